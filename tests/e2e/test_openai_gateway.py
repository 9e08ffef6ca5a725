"""The OpenAI gateway as a process before the demo server, used with OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from demo.pictures import Question, held_out
from quire_client import AsyncClient
from tests.e2e.conftest import ENDLESS, TinyServer
from tests.fixtures.pace import paced
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 7?"}]
ANSWER = "12 + 7 = 19"


@contextlib.contextmanager
def gateway(server_url: str, *options: str) -> Iterator[openai.OpenAI]:
    """A client of a gateway process, which ends by SIGTERM at once and has written nothing but its URL."""
    command = [sys.executable, "-m", "quire_client.cli", "openai", f"--url={server_url}", "--port=0"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            url = process.stdout.readline().strip()
            assert url.endswith("/v1"), process.stderr.read()
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield client
        finally:
            process.terminate()
            process.wait(120)
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with gateway(demo_server.grpc_url) as one:
        yield one


@pytest.mark.row("A28", clauses=("models",))
def test_the_models_that_generate_text(client: openai.OpenAI) -> None:
    models = {model.id: model.model_dump() for model in client.models.list()}
    assert models.keys() == {"chat", "vision_chat"}, "not what they are made of, nor their twins"
    assert all(model["max_model_len"] > 0 for model in models.values())
    assert client.models.retrieve("chat").owned_by == "quire"


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=QUESTION)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0
    assert answer.usage.completion_tokens > 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.row("A28", clauses=("chat",))
def test_a_streamed_chat_completion(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="chat", messages=QUESTION)
    # Its prompt is in the cache now, as it will be for the stream: usage tells.
    whole = client.chat.completions.create(model="chat", messages=QUESTION)
    stream = client.chat.completions.create(
        model="chat", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    deltas = [part.choices[0].delta for part in parts]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "stop"]
    assert last.choices == []
    assert last.usage == whole.usage


@pytest.mark.row("A28", clauses=("completions",))
def test_completions_of_text_and_token_ids(client: openai.OpenAI, demo_server: ServerProcess) -> None:
    """Greedy, so that the answer is that of `quire_client`."""
    text: Any = {"model": "generator", "prompt": "What is", "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(**text)

    async def ask() -> Any:
        async with AsyncClient(demo_server.grpc_url) as one:
            return await one.generate("What is", model="generator", max_tokens=8, temperature=0.0)

    expected = asyncio.run(ask())
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert (
        "".join(part.choices[0].text for part in client.completions.create(stream=True, **text))
        == expected.text
    )
    ids = client.completions.create(model="generator", prompt=[5, 6, 7], max_tokens=4)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


@pytest.mark.row("A28", clauses=("finish",))
def test_parameters_reach_the_sampler(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model="chat", messages=QUESTION, stop=[" ="], max_tokens=50)
    assert cut.choices[0].message.content == "12 + 7"
    assert cut.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model="chat", messages=QUESTION, max_completion_tokens=2)
    assert short.choices[0].finish_reason == "length"
    extra = {"ignore_eos": True, "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1}
    sampled = [
        client.chat.completions.create(
            model="chat", messages=QUESTION, temperature=1.5, seed=11, max_tokens=40, extra_body=extra
        )
        for _ in range(2)
    ]
    assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content
    assert [answer.usage and answer.usage.completion_tokens for answer in sampled] == [40, 40]


@pytest.mark.row("A28", clauses=("no-default",))
def test_completions_have_no_default_of_16_tokens(client: openai.OpenAI) -> None:
    """Until the model's length ends it, where nothing else does."""
    asked: Any = {"model": "generator", "prompt": "What is", "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens > 16
    longer = client.completions.create(**asked, max_tokens=40, extra_body={"ignore_eos": True})
    assert answer.choices[0].text.startswith(longer.choices[0].text)


@pytest.mark.row("A28", clauses=("options",))
def test_n_and_logit_bias(client: openai.OpenAI) -> None:
    sampled: Any = {"model": "generator", "prompt": "W", "temperature": 5, "seed": 3, "max_tokens": 20}
    answer = client.completions.create(n=3, **sampled)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    parts = list(client.completions.create(n=3, stream=True, **sampled))
    for choice in answer.choices:
        mine = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        assert mine[-1].finish_reason == choice.finish_reason
    asked: Any = {"model": "generator", "prompt": "What is", "max_tokens": 6, "temperature": 0}
    drawn = client.completions.create(**asked, logit_bias={"7": 100}, extra_body={"ignore_eos": True})
    only = client.completions.create(**asked, logprobs=0, logit_bias={"7": 100})
    assert only.choices[0].logprobs is not None and only.choices[0].logprobs.tokens is not None
    assert len(set(only.choices[0].logprobs.tokens)) == 1 and drawn.choices[0].text
    assert client.completions.create(**asked).choices[0].text != drawn.choices[0].text


@pytest.mark.row("A28", clauses=("logprobs",))
def test_log_probabilities(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": QUESTION, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(temperature=0, **asked).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    entries = whole.logprobs.content
    text = "".join(entry.token for entry in entries)
    assert text.startswith(ANSWER), "the end token may follow"
    assert bytes(b for entry in entries for b in entry.bytes or []) == text.encode()
    for entry in entries:
        top = entry.top_logprobs
        assert (top[0].token, top[0].logprob) == (entry.token, entry.logprob), "greedy"
        assert len(top) == 3 and top[0].logprob >= top[1].logprob >= top[2].logprob
    parts = list(client.chat.completions.create(temperature=0, stream=True, **asked))
    told = [part.choices[0].logprobs for part in parts]
    streamed = [entry for one in told if one for entry in one.content or []]
    assert [e.token for e in streamed] == [e.token for e in entries]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    scored = client.completions.create(
        model="generator", prompt="What is 12", max_tokens=4, temperature=0, logprobs=1, echo=True
    ).choices[0]
    assert scored.text.startswith("What is 12") and scored.logprobs is not None
    tokens, offsets = scored.logprobs.tokens, scored.logprobs.text_offset
    values = scored.logprobs.token_logprobs
    assert tokens is not None and offsets is not None and values is not None
    assert "".join(token for token in tokens if not token.startswith("<|")) == scored.text
    assert values[0] is None and all(value <= 0 for value in values[1:])
    within = [pair for pair in zip(offsets, tokens, strict=True) if pair[0] < len("What is 12")]
    assert len(within) > 2 and all(scored.text[at:].startswith(token) for at, token in within)


def test_several_prompts_in_one_request(client: openai.OpenAI) -> None:
    asked: Any = {"model": "generator", "max_tokens": 8, "temperature": 0}
    prompts = ["What is", "12 + 7"]
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    both = client.completions.create(prompt=prompts, **asked)
    assert [(choice.index, choice.text) for choice in both.choices] == list(enumerate(alone))


def test_what_real_clients_send(client: openai.OpenAI) -> None:
    """Of the demo model each answer is known: the ways to ask for it agree."""
    prompt: Any = "What is 12"
    asked: Any = {"model": "generator", "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(prompt=prompt, logprobs=1, echo=True, **asked).choices[0]
    assert whole.logprobs is not None
    parts = list(client.completions.create(prompt=prompt, echo=True, stream=True, **asked))
    assert parts[0].choices[0].text.startswith(prompt)
    assert "".join(part.choices[0].text for part in parts) == whole.text

    told = client.post("/../tokenize", body={"model": "chat", "prompt": prompt}, cast_to=object)
    ids: Any = told["tokens"]  # type: ignore[index]
    back = client.post("/../detokenize", body={"model": "chat", "tokens": ids}, cast_to=object)
    assert back["prompt"].endswith(prompt)  # type: ignore[index]

    # lm-eval: the log-probabilities of two prompts as token ids, without an answer.
    scored = client.completions.create(
        **{**asked, "model": "chat", "max_tokens": 0}, prompt=[ids, ids[:-1]], echo=True, logprobs=1
    )
    assert [choice.text for choice in scored.choices] == [prompt, prompt[: len(scored.choices[1].text)]]
    assert scored.usage is not None and scored.usage.completion_tokens == 0
    for choice, length in zip(scored.choices, (len(ids), len(ids) - 1), strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        expected = (whole.logprobs.token_logprobs or [])[1:length]
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)

    begun = [*QUESTION, {"role": "assistant", "content": "12 + 7"}]
    going_on: Any = {"continue_final_message": True, "add_generation_prompt": False, "top_p": 0}
    answer = client.chat.completions.create(
        model="chat", messages=begun, temperature=0, reasoning_effort="low", extra_body=going_on
    )
    assert answer.choices[0].message.content == ANSWER.removeprefix("12 + 7")


@pytest.mark.row("A28", clauses=("format",))
def test_response_format(client: openai.OpenAI) -> None:
    """The demo model knows no JSON: what it may say is all by the grammar."""
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    for stream in (False, True):
        asked: Any = {"model": "chat", "messages": QUESTION, "temperature": 1, "seed": 5, "stream": stream}
        answer = client.chat.completions.create(response_format=wanted, max_tokens=60, **asked)
        if stream:
            text = "".join(part.choices[0].delta.content or "" for part in answer)
        else:
            text = answer.choices[0].message.content
        found = json.loads(text)
        assert set(found) == {"colour", "count"} and found["colour"] in ("red", "blue")
        assert isinstance(found["count"], int) and found["count"] <= 9
    free = client.chat.completions.create(
        model="chat", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=300, seed=2
    ).choices[0]
    assert (free.message.content or "").lstrip().startswith("{")
    assert free.finish_reason == "length" or isinstance(json.loads(free.message.content or ""), dict)
    with pytest.raises(openai.BadRequestError):
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        client.chat.completions.create(model="chat", messages=QUESTION, response_format=bad)


def test_the_server_s_refusals_are_openai_s_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="chat", messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="role"):
        client.chat.completions.create(model="chat", messages=[{"content": "x"}], stream=True)  # type: ignore
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="no_such: unknown field"):
        client.chat.completions.create(model="chat", messages=QUESTION, extra_body={"no_such": 1})


# --- images ---


def with_urls(question: Question, urls: list[str]) -> list[Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question.prompt}]}]


def data_urls(question: Question) -> list[str]:
    return [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in question.images]


@pytest.mark.row("H9", clauses=("data",))
def test_images_as_data_urls(client: openai.OpenAI, demo_server: ServerProcess) -> None:
    """The answers are those that `quire_client` gets for the same images; whether they are right is
    test_demo_vision's matter."""
    questions = [question for question in held_out(40, seed=9) if question.images][:12]

    async def expected() -> list[str]:
        async with AsyncClient(demo_server.grpc_url) as one:
            return [
                (await one.chat(q.messages, images=q.images, model="vision_chat")).text for q in questions
            ]

    answers = asyncio.run(expected())
    assert len(set(answers)) > 3, "the images matter"
    for question, answer in zip(questions, answers, strict=True):
        messages = with_urls(question, data_urls(question))
        got = client.chat.completions.create(model="vision_chat", messages=messages)
        assert got.choices[0].message.content == answer
        stream = client.chat.completions.create(model="vision_chat", messages=messages, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream) == answer


@pytest.mark.row("H9", clauses=("off",))
def test_what_is_no_image_is_refused_and_no_url_is_fetched(client: openai.OpenAI) -> None:
    question = next(question for question in held_out(20, seed=9) if question.images)

    def ask(parts: list[Any], model: str = "vision_chat") -> None:
        client.chat.completions.create(model=model, messages=parts)

    with pytest.raises(openai.BadRequestError, match="allow-image-host") as url:
        ask(with_urls(question, ["http://localhost:1/x.png"]))
    assert url.value.param == "messages[0].content[0].image_url"
    with pytest.raises(openai.BadRequestError, match=r"image\[0\]"):
        ask(with_urls(question, ["data:image/png;base64,AAAA"]))
    with pytest.raises(openai.BadRequestError, match="image_url"):
        ask(with_urls(question, data_urls(question)), model="chat")
    audio = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="input_audio is not supported"):
        ask([{"role": "user", "content": [audio]}])


@pytest.mark.row("H9", clauses=("allowed",))
def test_an_image_from_an_allowed_host(demo_server: ServerProcess, tmp_path: Path) -> None:
    question = next(question for question in held_out(20, seed=10) if len(question.images) == 1)
    (tmp_path / "x.png").write_bytes(question.images[0])
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind=127.0.0.1", f"--directory={tmp_path}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with (
        gateway(demo_server.grpc_url, "--allow-image-host=127.0.0.1") as client,
        subprocess.Popen(command, **pipes) as web,
    ):
        try:
            assert web.stdout is not None
            base = web.stdout.readline().partition("(")[2].partition("/)")[0]

            def ask(url: str) -> str | None:
                messages = with_urls(question, [url])
                answer = client.chat.completions.create(model="vision_chat", messages=messages)
                return answer.choices[0].message.content

            assert ask(f"{base}/x.png") == ask(*data_urls(question))
            with pytest.raises(openai.BadRequestError, match="status 404"):
                ask(f"{base}/none.png")
        finally:
            web.terminate()


# --- embeddings ---


@pytest.mark.row("A28", clauses=("embeddings",))
def test_embeddings_are_those_of_transformers(tiny: TinyServer) -> None:
    """Texts and token ids, one or several, as numbers or base64, whole or cut; what is wrong is named."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny.checkpoint).model.eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny.checkpoint)
    texts = ["hello", "the quick brown fox", "hello", "two old friends " * 12]
    ids = [tokenizer(text)["input_ids"] for text in texts]

    def expected(token_ids: list[int], size: int | None = None) -> Any:
        with torch.inference_mode():
            state = model(torch.tensor([token_ids])).last_hidden_state[0, -1, :size]
        return torch.nn.functional.normalize(state, dim=0).numpy()

    with gateway(tiny.server.grpc_url) as client:
        assert "embeddings" in client.models.retrieve("chat").capabilities  # type: ignore[attr-defined]
        several: tuple[Any, ...] = (texts, ids)
        for given in several:
            for options in ({}, {"encoding_format": "float"}, {"dimensions": 5}):
                answer = client.embeddings.create(model="generator", input=given, **options)
                assert [one.index for one in answer.data] == list(range(len(texts)))
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
                for one, token_ids in zip(answer.data, ids, strict=True):
                    vector = expected(token_ids, options.get("dimensions"))  # type: ignore[call-overload]
                    np.testing.assert_allclose(one.embedding, vector, atol=1e-4)
        for single, model_name in ((texts[1], "generator"), (ids[1], "generator"), (texts[1], "chat")):
            answer = client.embeddings.create(model=model_name, input=single)
            (one,) = answer.data
            np.testing.assert_allclose(one.embedding, expected(ids[1]), atol=1e-4)
        for options, param in (
            ({"input": texts, "dimensions": 10_000}, "dimensions"),
            ({"input": [[5], [10**6]]}, "input[1]"),
            ({"input": []}, "input"),
            ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ):
            asked: Any = {"model": "generator", **options}
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(**asked)
            assert refused.value.param == param, refused.value
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="none", input="x")
    assert len(json.loads(run_cli(tiny, "embed", "hello", "--dimensions", "3"))) == 3


def run_cli(tiny: TinyServer, *words: str) -> str:
    command = [sys.executable, "-m", "quire_client.cli", *words, f"--url={tiny.server.grpc_url}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout


# --- clients that leave ---


def test_a_stream_that_is_left_ends_in_the_engine(tiny: TinyServer) -> None:
    """Through the ensemble."""
    already = len(aborts(tiny))
    endless = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True, "logits_processors": paced()}}
    long: Any = {"model": "chat", "prompt": "one two", **endless}
    with gateway(tiny.server.grpc_url) as client:
        stream = client.completions.create(stream=True, **long)
        next(iter(stream))
        stream.close()
        wait_until(lambda: len(aborts(tiny)) > already, "the cancellation did not arrive")


def aborts(tiny: TinyServer) -> list[dict[str, Any]]:
    return [record for record in tiny.trace() if record.get("event") == "abort" and record["request_ids"]]
