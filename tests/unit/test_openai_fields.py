"""Fields of OpenAI's and vLLM's requests at the gateway: done, refused by name, or without effect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire_client.openai import requests
from quire_client.openai.app import GatewaySettings
from quire_client.openai.logprobs import places
from quire_client.openai.observer import Exchange, Observer
from quire_client.openai.replies import ReplyFormat
from quire_client.openai.stream import EventStream, Exchanges
from quire_client.types import Chunk
from tests.fixtures.server import ROOT
from tests.fixtures.waiting import wait_until
from tests.unit.fake_kserve import FakeKServe, read_inputs
from tests.unit.test_openai_gateway import (
    WAIT,
    chat,
    complete,
    events,
    gateway,
    inputs_of,
    post_raw,
    refused,
    usage,
)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture(scope="module")
def base(server: FakeKServe) -> Iterator[str]:
    with gateway(GatewaySettings(server.url)) as url:
        yield url


@pytest.fixture(scope="module")
def official(base: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        yield client


def messages_of(reply: httpx.Response) -> Any:
    """What the server got as its messages."""
    assert reply.status_code == 200, reply.text
    return json.loads(inputs_of(reply)["messages"][0])


# --- the table ---


def test_the_readme_tells_what_becomes_of_each_field() -> None:
    text = (ROOT / "client" / "README.md").read_text("utf-8").partition("### Fields")[2]
    rows = {
        kind: set(re.findall(r"`(\w+)`", told)) for kind, told in re.findall(r"\| (.+?) \| (.+) \|", text)
    }
    sampling = {*requests.OPENAI_SAMPLING, *requests.QUIRE_SAMPLING}
    taken = requests.CHAT_FIELDS | requests.COMPLETION_FIELDS
    assert rows["without effect"] == requests.SERVICE_FIELDS
    assert rows["carried out"] == taken - requests.SERVICE_FIELDS - sampling
    fixed = {**requests._CHAT_FIXED, **requests._COMPLETION_FIXED, **requests._REASONS}
    beside = {"logit_bias", "beam_width"}
    assert rows["refused, but for the value that asks for nothing"] - beside == fixed.keys()
    assert rows["of `stream_options`"] == {*requests._STREAM_OPTIONS}


# --- without effect ---


@pytest.mark.parametrize(
    "field",
    [
        {"reasoning_effort": None},
        {"guided_decoding_backend": None},
        {"web_search_options": None},
        {"verbosity": "low"},
        {"prediction": {"type": "content", "content": "a"}},
        {"include_reasoning": True},
        {"allowed_token_ids": None},
        {"spaces_between_special_tokens": True},
    ],
)
def test_hints_and_unknown_fields_of_null_change_nothing(base: str, field: dict[str, Any]) -> None:
    """Clients are typed objects that write all of their fields."""
    inputs = inputs_of(chat(base, "echo", **field))
    assert inputs == inputs_of(chat(base, "echo"))
    assert "unknown field" in refused(chat(base, "echo", guided_decoding_backend="x"))["message"]


def test_stream_options(base: str) -> None:
    neutral = {"include_obfuscation": False, "continuous_usage_stats": None, "other": None}
    parts = events(chat(base, "tokens 2", stream=True, stream_options={"include_usage": True, **neutral}))
    assert [part["usage"] for part in parts] == [None] * (len(parts) - 1) + [usage(2)]
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(complete(base, "tokens 3", stream=True, stream_options=options))
    told = [part["usage"]["completion_tokens"] for part in parts]
    assert told == [1, 2, 3, 3, 3], "so far, with each part, and at the end"
    assert parts[0]["usage"]["prompt_tokens"] == 3


# --- handed on ---


def test_reasoning_effort_is_the_template_s(official: openai.OpenAI) -> None:
    asked: Any = {
        "model": "chat",
        "messages": [{"role": "user", "content": "echo"}],
        "reasoning_effort": "low",
    }

    def kwargs(**others: Any) -> Any:
        answer = official.chat.completions.create(**asked, **others)
        inputs = json.loads(answer.choices[0].message.content or "")
        return json.loads(inputs["messages"][0])["chat_template_kwargs"]

    assert kwargs() == {"reasoning_effort": "low"}
    stated = {"chat_template_kwargs": {"reasoning_effort": "high", "a": 1}}
    assert kwargs(extra_body=stated) == {"reasoning_effort": "high", "a": 1}


def test_an_answer_s_beginning_is_handed_on(base: str) -> None:
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"model": "chat", "messages": [{"role": "user", "content": "echo"}], **fields}
    reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=WAIT)
    assert messages_of(reply) == {"messages": body["messages"], **fields}


def test_old_answers_are_put_as_templates_know_them(base: str) -> None:
    refusal = {"type": "refusal", "refusal": "I cannot"}
    told = [
        {"role": "assistant", "content": [{"type": "text", "text": "Sorry."}, refusal], "refusal": None},
        {"role": "user", "content": "echo"},
    ]
    body = {"model": "chat", "messages": told}
    reply = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=WAIT)
    parts = [{"type": "text", "text": "Sorry."}, {"type": "text", "text": "I cannot"}]
    assert messages_of(reply) == [
        {"role": "assistant", "content": parts},
        {"role": "user", "content": "echo"},
    ]


# --- refused ---


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs"),
        ({"truncate_prompt_tokens": 5}, "cut the prompt"),
        ({"allowed_token_ids": [1]}, "logit_bias"),
        ({"use_beam_search": True}, "beam_width"),
        ({"prompt_logprobs": 21}, "[0, 20]"),
        ({"prompt_logprobs": 1, "stream": True}, "without stream"),
        ({"return_token_ids": 1}, "true or false"),
        ({"reasoning_effort": 5}, "a word"),
    ],
)
def test_what_is_refused_says_why(base: str, field: dict[str, Any], reason: str) -> None:
    error = refused(chat(base, "tokens 1", **field))
    assert error["param"] == next(iter(field)) and reason in error["message"]


# --- prompts of token ids ---


def test_prompts_of_token_ids(official: openai.OpenAI, server: FakeKServe) -> None:
    """lm-eval asks so with --batch_size 4."""
    prompts = [[72, 101], [66], [5, 6, 7]]
    asked: Any = {"model": "generator", "prompt": prompts}
    answer = official.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [json.loads(choice.text)["input_ids"] for choice in answer.choices] == prompts
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 6)
    usage_too: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = official.completions.create(**asked, **usage_too)
    texts = {part.choices[0].index: part.choices[0].text for part in parts if part.choices[0].text}
    assert [json.loads(texts[index])["input_ids"] for index in range(3)] == prompts
    assert last.usage == answer.usage


def test_of_prompts_of_token_ids_one_fails(base: str, server: FakeKServe, monkeypatch: Any) -> None:
    """The others end with it: here they would never end by themselves."""
    monkeypatch.setattr(
        FakeKServe,
        "_text",
        staticmethod(
            lambda inputs: "endless" if inputs["input_ids"] != [1] else "error INVALID_ARGUMENT seed: x"
        ),
    )
    begun = len(server.begun)
    assert refused(complete(base, [[2], [1], [3]]))["param"] == "seed"
    wait_until(lambda: not server.running)
    assert len(server.begun) <= begun + 2


def test_a_prompt_that_cannot_be_sent_ends_those_before_it(
    base: str, server: FakeKServe, monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeKServe, "_text", staticmethod(lambda inputs: "endless"))
    assert refused(complete(base, [[2], [2**40]]))["param"] == "prompt"
    wait_until(lambda: not server.running)


def test_a_client_of_several_prompts_of_token_ids_leaves(
    base: str, server: FakeKServe, monkeypatch: Any
) -> None:
    monkeypatch.setattr(FakeKServe, "_text", staticmethod(lambda inputs: "endless"))
    begun = len(server.begun)
    body = {"model": "generator", "prompt": [[2], [3]], "stream": True}
    with post_raw(base, body, "/v1/completions"):
        wait_until(lambda: len(server.begun) == begun + 2)
    wait_until(lambda: not server.running)


# --- what vLLM tells beside ---


def test_log_probabilities_of_the_prompt_as_vllm_tells_them(base: str, server: FakeKServe) -> None:
    whole = chat(base, "logprobs", prompt_logprobs=2).json()
    assert read_inputs(server.requests[-1])["num_prompt_logprobs"] == [2]
    first, second = whole["prompt_logprobs"]
    assert first is None
    assert second == {
        "7": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "6": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
    }
    (choice,) = complete(base, "logprobs", prompt_logprobs=1, echo=True, logprobs=3).json()["choices"]
    assert read_inputs(server.requests[-1])["prompt_logprobs"] == [3]
    assert choice["prompt_logprobs"][1].keys() == {"7", "5"} and choice["logprobs"]["tokens"]
    (plain,) = complete(base, "logprobs", prompt_logprobs=1, logprobs=3).json()["choices"]
    assert plain["prompt_logprobs"] and plain["logprobs"]["text_offset"][0] == 0
    assert len(plain["logprobs"]["tokens"]) == len(choice["logprobs"]["tokens"]) - 2, "the prompt has two"
    assert "prompt_logprobs" not in complete(base, "logprobs").json()["choices"][0]


def test_token_ids(base: str) -> None:
    (choice,) = complete(base, "tokens 3", return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == [0, 1, 2]
    parts = events(chat(base, "tokens 3", return_token_ids=True, stream=True))
    told = [part["choices"][0].get("token_ids") for part in parts]
    assert [ids for ids in told if ids] == [[0], [1], [2]]
    assert "token_ids" not in complete(base, "tokens 3").json()["choices"][0]


# --- log-probabilities of completions ---


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        (["a", " b"], "a b", [0, 1]),
        (["<s>", "a", " b", "</s>"], "a b", [0, 0, 1, 3]),
        (["a", "<tool>", "b"], "ab", [0, 1, 1]),
        (["a", "\ufffd", "\ufffd", "b"], "aéb", [0, 1, 1, 2]),
        (["a", "\ufffd", "\ufffd"], "aé", [0, 1, 1]),
        (["\ufffd", "\ufffd"], "é", [0, 0]),
        (["a", "STOP", " more"], "a", [0, 1, 5]),
        (["a"], "", [0]),
        ([], "a", []),
    ],
)
def test_offsets_are_those_of_the_text(tokens: list[str], text: str, expected: list[int]) -> None:
    assert places(tokens, text) == expected


def test_tokens_with_one_text_and_the_sampled_one(base: str) -> None:
    """A dictionary by texts has room for one of two: the likelier, by which lm-eval sees what is greedy."""
    entry = {"token_id": 9, "token": "z", "logprob": -4.0}
    entry |= {"top": {"1": -0.1, "2": -3.0}, "tokens": {"1": "\ufffd", "2": "\ufffd"}}
    (choice,) = complete(base, f"raw logprobs {json.dumps([entry])}", logprobs=2).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1, "z": -4.0}]


def test_parts_of_characters_have_bytes(base: str) -> None:
    entry: dict[str, Any] = {"token_id": 1, "token": "\ufffd", "logprob": -0.1, "top": {"1": -0.1, "2": -3.0}}
    entry |= {"tokens": {"1": "\ufffd", "2": " \ufffd"}, "bytes": {"1": [195], "2": [32, 226, 130]}}
    rest = {"token_id": 3, "token": "\ufffd", "logprob": -0.2, "top": {}, "bytes": {"3": [169]}}
    asked = f"raw logprobs {json.dumps([entry, rest])}"
    (choice,) = chat(base, asked, logprobs=True, top_logprobs=2).json()["choices"]
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], second["bytes"]) == ("\ufffd", [195], [169])
    assert [likely["bytes"] for likely in first["top_logprobs"]] == [[195], [32, 226, 130]]
    columns = complete(base, asked, logprobs=2).json()["choices"][0]["logprobs"]
    assert columns["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"], "as OpenAI writes them"
    assert columns["top_logprobs"][0] == {"bytes:\\xc3": -0.1, "bytes:\\x20\\xe2\\x82": -3.0}


def test_a_stream_that_ends_is_no_client_that_left() -> None:
    """A server tells an application behind its last piece that the connection has gone."""
    gone = asyncio.Event()

    class Ended:
        """A stream that has no more chunks."""

        async def __aenter__(self) -> None: ...
        async def __aexit__(self, *_: object) -> None: ...
        def __aiter__(self) -> Ended:
            return self

        async def __anext__(self) -> Chunk:
            raise StopAsyncIteration

    async def send(message: dict[str, Any]) -> None:
        if not message.get("more_body", True):
            gone.set()
            await asyncio.sleep(3600)  # until it is cancelled

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    exchange = Exchange("POST", "/v1/completions", "", Observer(None, metrics=False, log=None), status=200)
    stream: Any = Ended()
    answer = EventStream(Exchanges(), stream, None, ReplyFormat("id", "m", is_chat=False), 1, exchange)
    asyncio.run(answer({}, receive, send))
    assert exchange.status == 200
