"""The generator through the real server, by plain clients."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tritonclient.utils import InferenceServerException

from quire import SamplingParams
from tests.e2e.conftest import ENDLESS, TinyServer
from tests.e2e.triton_calls import Reply, TritonStream, infer, stream
from tests.fixtures.pace import gated_input, paced_input

pytestmark = pytest.mark.server

PROMPT = "The quick brown fox"
UTF8_PROMPTS = [PROMPT, "数字 10 以内", "naïve café 🙂", "a", "Zwei Wörter", "x" * 100]


def transformers_text(tiny: TinyServer, prompt: str, max_tokens: int) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.checkpoint, dtype=torch.float32).eval()
    assert tiny.llm.tokenizer is not None
    tokenizer = tiny.llm.tokenizer.hf
    ids = torch.tensor([tiny.llm.encode(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
        )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def engine_text(tiny: TinyServer, prompt: str, **params: Any) -> str:
    return tiny.llm.generate([prompt], SamplingParams(**params))[0].text


def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://{url}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def streamed(url: str, body: dict[str, Any], first_came: Path) -> list[dict[str, Any]]:
    """The events of an answer whose second token is not computed before the first event is there."""
    data = json.dumps({**body, **gated_input(first_came)}).encode()
    request = urllib.request.Request(f"http://{url}", data)
    with urllib.request.urlopen(request, timeout=120) as response:
        first = response.readline().decode()
        first_came.touch()
        return events(first + response.read().decode())


def events(text: str) -> list[dict[str, Any]]:
    """The JSON documents of a server-sent-event stream."""
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]


@pytest.mark.row("A31")
@pytest.mark.parametrize("model", ["generator", "chat"])
@pytest.mark.parametrize("interval", [{}, {"stream_interval": 8}, {"stream_interval_ms": 40}], ids=str)
def test_many_streams_at_every_interval_say_what_the_whole_answer_does(
    tiny: TinyServer, model: str, interval: dict[str, int]
) -> None:
    asked = {"max_tokens": 120, "ignore_eos": True}
    wanted = {prompt: engine_text(tiny, prompt, **asked) for prompt in UTF8_PROMPTS}

    def run(prompt: str) -> Reply:
        inputs = {"text_input": prompt, "stream": True, **asked, **interval}
        return stream(tiny.server.grpc_url, model, inputs)

    prompts = UTF8_PROMPTS * 4
    with ThreadPoolExecutor(len(prompts)) as pool:
        for prompt, reply in zip(prompts, pool.map(run, prompts), strict=True):
            assert reply.error is None and reply.finals == 1
            assert reply.text == wanted[prompt] and len(reply.token_ids) == 120
            if "stream_interval" in interval:
                assert all(len(result.as_numpy("output_ids")) >= 8 for result in reply.results[1:-1])


@pytest.mark.row("A1", clauses=("grpc", "one-line"))
@pytest.mark.row("A42", clauses=("one-line", "directory"))
@pytest.mark.row("A41")
@pytest.mark.parametrize("prompt", UTF8_PROMPTS)
def test_one_line_config_serves_a_checkpoint_directory(tiny: TinyServer, prompt: str) -> None:
    expected = transformers_text(tiny, prompt, 24)
    reply = stream(tiny.server.grpc_url, "zero", {"text_input": prompt, "max_tokens": 24})
    assert reply.text == expected
    assert (reply.finals, len(reply.results)) == (1, 1)
    status, body = post(
        f"{tiny.server.http_url}/v2/models/zero/generate", {"text_input": prompt, "max_tokens": 24}
    )
    assert status == 200
    assert json.loads(body)["text_output"] == expected


def test_a_configuration_with_an_output_of_its_own(tiny: TinyServer) -> None:
    """Who names no output is asked by Triton for all that it knows of, and was refused for log-probabilities
    that must not be given where an embedding is wanted."""
    expected, asked = transformers_text(tiny, PROMPT, 24), {"text_input": PROMPT, "max_tokens": 24}
    status, body = post(f"{tiny.server.http_url}/v2/models/more_outputs/generate", asked)
    assert status == 200, body
    assert json.loads(body)["text_output"] == expected
    assert stream(tiny.server.grpc_url, "more_outputs", asked).text == expected


@pytest.mark.row("A1", clauses=("http",))
@pytest.mark.row("A3", clauses=("infer",))
def test_plain_model_infer_on_the_non_decoupled_variant(tiny: TinyServer) -> None:
    expected = transformers_text(tiny, PROMPT, 24)
    result = infer(tiny.server.grpc_url, "generator_unary", {"text_input": PROMPT, "max_tokens": 24})
    assert result.as_numpy("text_output")[0].decode() == expected
    body = {
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [24]},
        ]
    }
    status, text = post(f"{tiny.server.http_url}/v2/models/generator_unary/infer", body)
    assert status == 200
    outputs = {output["name"]: output["data"] for output in json.loads(text)["outputs"]}
    assert outputs["text_output"] == [expected]


@pytest.mark.row("A3", clauses=("refusal",))
def test_streaming_on_the_non_decoupled_variant_is_refused(tiny: TinyServer) -> None:
    with pytest.raises(InferenceServerException, match="stream: this model is not decoupled") as error:
        infer(tiny.server.grpc_url, "generator_unary", {"text_input": PROMPT, "stream": True})
    assert "INVALID_ARGUMENT" in str(error.value.status())


@pytest.mark.row("A2", clauses=("concat", "final"))
@pytest.mark.parametrize("empty_final", [False, True])
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_deltas_are_the_whole_text_with_one_final(tiny: TinyServer, model: str, empty_final: bool) -> None:
    for prompt in UTF8_PROMPTS:
        expected = engine_text(tiny, prompt, max_tokens=60)
        call = TritonStream(
            tiny.server.grpc_url,
            model,
            {"text_input": prompt, "stream": True, "max_tokens": 60},
            empty_final=empty_final,
        )
        reply = call.read_all()
        assert reply.text == expected
        assert reply.finals == 1
        assert call.extra_responses() == 0
        assert reply.finish_reasons[-1] in ("stop", "length")
        assert not any(reply.finish_reasons[:-1])
        unary = stream(tiny.server.grpc_url, model, {"text_input": prompt, "max_tokens": 60})
        assert unary.text == expected


@pytest.mark.row("A2", clauses=("early",))
def test_the_first_response_comes_before_the_last_token_is_computed(tiny: TinyServer) -> None:
    inputs = {"text_input": PROMPT, "stream": True, "max_tokens": ENDLESS, "ignore_eos": True}
    inputs |= paced_input()
    call = TritonStream(tiny.server.grpc_url, "generator", inputs, request_id="first-response")
    assert not call.next()
    assert (
        stream(tiny.server.grpc_url, "generator", {"cancel": True}, request_id="first-response").error is None
    )
    reply = call.read_all()
    assert reply.finish_reasons[-1] == "cancelled"
    assert 0 < len(reply.token_ids) < ENDLESS


@pytest.mark.row("A2", clauses=("parallel",))
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_sixteen_streams_do_not_mix(tiny: TinyServer, model: str) -> None:
    prompts = [f"{word} {i}" for i in range(8) for word in ("alpha", "βήτα")]
    expected = [engine_text(tiny, prompt, max_tokens=80, ignore_eos=True) for prompt in prompts]
    inputs = [{"text_input": p, "stream": True, "max_tokens": 80, "ignore_eos": True} for p in prompts]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: stream(tiny.server.grpc_url, model, i), inputs))
    assert [reply.text for reply in replies] == expected
    assert all(reply.finals == 1 for reply in replies)


@pytest.mark.row("A4", clauses=("generate", "stream"))
@pytest.mark.parametrize("model", ["generator", "chat"])
@pytest.mark.parametrize("where", ["top", "parameters"])
def test_generate_and_generate_stream(tiny: TinyServer, tmp_path: Path, model: str, where: str) -> None:
    expected = engine_text(tiny, PROMPT, max_tokens=60, ignore_eos=True)
    options = {"max_tokens": 60, "ignore_eos": True}
    body: dict[str, Any] = {"text_input": PROMPT}
    body |= options if where == "top" else {"parameters": options}
    url = f"{tiny.server.http_url}/v2/models/{model}"
    status, text = post(f"{url}/generate", body)
    assert status == 200
    assert json.loads(text)["text_output"] == expected
    body |= {"stream": True} if where == "top" else {"parameters": {**options, "stream": True}}
    parts = streamed(f"{url}/generate_stream", body, tmp_path / "first came")
    assert len(parts) > 1
    assert "".join(part["text_output"] for part in parts) == expected
    assert parts[-1]["finish_reason"] == "length"


@pytest.mark.row("A4", clauses=("error",))
def test_errors_are_objects(tiny: TinyServer) -> None:
    url = f"{tiny.server.http_url}/v2/models/generator"
    status, text = post(f"{url}/generate", {"text_input": PROMPT, "temperature": -1})
    assert status == 400
    assert "temperature" in json.loads(text)["error"]
    status, text = post(f"{url}/generate_stream", {"text_input": PROMPT, "stream": True, "temperature": -1})
    assert status == 400
    (part,) = events(text)
    assert "temperature: must be in [0, 100]" in part["error"]


@pytest.mark.row("A8")
def test_parameters_reach_the_generator_in_every_form(tiny: TinyServer) -> None:
    """Typed tensor, JSON tensor, request parameter; through the ensemble too."""
    params = {"max_tokens": 40, "temperature": 0.9, "seed": 77, "top_k": 50, "ignore_eos": True}
    expected = engine_text(tiny, PROMPT, **params)
    url = tiny.server.grpc_url
    for model in ("generator", "chat"):
        typed = {**params, "ignore_eos": True}
        assert stream(url, model, {"text_input": PROMPT, **typed}).text == expected
        as_json = {"text_input": PROMPT, "sampling_parameters": json.dumps(params)}
        assert stream(url, model, as_json).text == expected
        texts = {name: str(value) for name, value in params.items()}
        assert stream(url, model, {"text_input": PROMPT}, parameters=texts).text == expected


def test_messages_are_rendered_by_the_template(tiny: TinyServer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 🙂"}]
    expected = tiny.llm.chat(messages, max_tokens=20).text
    for model in ("generator", "chat"):
        inputs = {"messages": json.dumps(messages), "max_tokens": 20, "stream": True}
        assert stream(tiny.server.grpc_url, model, inputs).text == expected


@pytest.mark.row("A7", clauses=("ids",))
def test_token_ids_in_and_out(tiny: TinyServer) -> None:
    ids = tiny.llm.encode(PROMPT)
    expected = tiny.llm.generate([ids], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
    inputs = {"input_ids": np.array(ids, np.int32), "max_tokens": 20, "ignore_eos": True, "stream": True}
    reply = stream(tiny.server.grpc_url, "generator", {**inputs, "return_num_output_tokens": True})
    assert reply.token_ids == expected
    counted = sum(int(result.as_numpy("num_output_tokens")[0]) for result in reply.results)
    assert counted == 20
    assert int(reply.results[-1].as_numpy("num_input_tokens")[0]) == len(ids)


@pytest.mark.row("A32", clauses=("requested",))
def test_only_requested_outputs_are_sent(tiny: TinyServer) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 3, "stream": True}
    reply = stream(tiny.server.grpc_url, "generator", inputs, outputs=["text_output"])
    for result in reply.results:
        assert [output.name for output in result.get_response().outputs] == ["text_output"]


def test_without_a_choice_responses_are_lean_and_the_last_one_tells_more(tiny: TinyServer) -> None:
    reply = stream(tiny.server.grpc_url, "generator", {"text_input": PROMPT, "max_tokens": 3, "stream": True})
    names = [{output.name for output in result.get_response().outputs} for result in reply.results]
    assert all(part == {"text_output", "output_ids"} for part in names[:-1])
    assert names[-1] == {"text_output", "output_ids", "finish_reason", "num_input_tokens"}


def test_logprobs_come_as_json(tiny: TinyServer) -> None:
    reply = stream(tiny.server.grpc_url, "generator", {"text_input": PROMPT, "max_tokens": 4, "logprobs": 2})
    entries = json.loads(reply.results[0].as_numpy("logprobs")[0])
    assert [entry["token_id"] for entry in entries] == reply.token_ids
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    assert all(set(entry["tokens"]) == set(entry["top"]) for entry in entries)
    assert "".join(entry["token"] for entry in entries) == reply.text


@pytest.mark.row("A13")
@pytest.mark.row("A15", clauses=("prompt",))
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_prompt_logprobs_and_echo_are_those_of_transformers(
    tiny: TinyServer, tmp_path: Path, model: str
) -> None:
    """Once per request, with its first response; asking for other outputs asks for none."""
    from transformers import AutoModelForCausalLM

    name = "prompt_logprobs" if model == "generator" else "num_prompt_logprobs"
    asked = {"text_input": PROMPT, "max_tokens": 6, "ignore_eos": True, name: 2}
    reply = stream(tiny.server.grpc_url, model, {**asked, "exclude_input_in_output": False})
    (result,) = (one for one in reply.results if one.as_numpy("text_output") is not None)
    assert result.as_numpy("text_output")[0].decode() == PROMPT + engine_text(
        tiny, PROMPT, max_tokens=6, ignore_eos=True
    )
    first, *found = json.loads(result.as_numpy("prompt_logprobs")[0])
    ids = tiny.llm.encode(PROMPT)
    oracle = AutoModelForCausalLM.from_pretrained(tiny.checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = torch.log_softmax(oracle(torch.tensor([ids])).logits[0, :-1], -1)
    assert first is None and [entry["token_id"] for entry in found] == ids[1:]
    for entry, row in zip(found, rows, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=1e-4)
        top = row.topk(2)
        assert list(map(int, entry["top"])) == top.indices.tolist()
        assert list(entry["top"].values()) == pytest.approx(top.values.tolist(), abs=1e-4)
    first_came = tmp_path / "first came"
    call = TritonStream(tiny.server.grpc_url, model, {**asked, "stream": True, **gated_input(first_came)})
    assert not call.next()
    first_came.touch()
    told = [one.as_numpy("prompt_logprobs") for one in call.read_all().results]
    assert json.loads(told[0][0]) == [first, *found] and len(told) > 1
    assert all(one is None for one in told[1:])
    named = stream(tiny.server.grpc_url, model, asked, outputs=["text_output"])
    assert all(one.as_numpy("prompt_logprobs") is None for one in named.results)


def test_stop_strings_through_the_server(tiny: TinyServer) -> None:
    full = engine_text(tiny, PROMPT, max_tokens=60, ignore_eos=True)
    stop = full[len(full) // 2 :][:4]
    inputs = {"text_input": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True, "stop": [stop]}
    reply = stream(tiny.server.grpc_url, "generator", inputs)
    assert reply.text == full[: full.index(stop)]
    assert reply.finish_reasons[-1] == "stop"


@pytest.mark.row("A39", clauses=("ensemble",))
def test_a_step_behind_the_generator_streams(tiny: TinyServer, tmp_path: Path) -> None:
    """tokenizer -> generator -> detokenizer, all three steps for every delta."""
    inputs = {"text_input": PROMPT, "stream": True, "max_tokens": 100}
    first_came = tmp_path / "first came"
    call = TritonStream(tiny.server.grpc_url, "three_step", inputs, parameters=gated_input(first_came))
    assert not call.next()
    first_came.touch()
    reply = call.read_all()
    assert reply.error is None
    assert len(reply.results) > 1
    parts = [[int(i) for i in result.as_numpy("ids")] for result in reply.results]
    expected = tiny.llm.generate([PROMPT], SamplingParams(max_tokens=100))[0].token_ids
    assert [token_id for part in parts for token_id in part] == expected
    assert tiny.llm.tokenizer is not None
    # Which tokens come together is a matter of time; a character cut between two parts is U+FFFD in each.
    texts = [result.as_numpy("text")[0].decode() for result in reply.results]
    assert texts == [tiny.llm.tokenizer.hf.decode(part) for part in parts]
    assert len(set(texts)) > 1 and len(set(expected)) > 10, "texts that differ, or the test sees little"


@pytest.mark.row("A39", clauses=("bls",))
def test_a_bls_model_iterates_and_cancels(tiny: TinyServer) -> None:
    expected = engine_text(tiny, PROMPT, max_tokens=400, ignore_eos=True)
    result = infer(tiny.server.grpc_url, "bls", {"prompt": PROMPT, "take": 5}, request_id="b1")
    text, count, end = (value.decode() for value in result.as_numpy("report"))
    assert expected[: len(text)] == text[: len(expected)]
    assert int(count) >= 5
    assert end == "cancelled"
    whole = infer(tiny.server.grpc_url, "bls", {"prompt": PROMPT, "take": 0}, request_id="b2")
    assert whole.as_numpy("report")[0].decode() == expected
