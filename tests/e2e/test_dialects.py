"""Clients as the examples of vllm_backend and TensorRT-LLM write them: names, shapes and types of tensors,
and how they read what comes back. Models of one engine answer them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.e2e.conftest import ENDLESS, TinyServer
from tests.e2e.test_generate import PROMPT, post
from tests.e2e.triton_calls import TritonStream, stream
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server


class Served:
    def __init__(self, server: ServerProcess, llm: LLM) -> None:
        self.url, self.http_url, self.llm = server.grpc_url, server.http_url, llm

    def text(self, prompt: str, **params: Any) -> str:
        return self.llm.generate([prompt], SamplingParams(**params))[0].text


@pytest.fixture
def served(tiny: TinyServer) -> Served:
    return Served(tiny.server, tiny.llm)


# vllm_backend: samples/client.py and ci/L0_additional_outputs_vllm.


@pytest.mark.row("A5", clauses=("names",))
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_the_sample_client_of_vllm_backend(served: Served, streams: bool, as_tensor: bool) -> None:
    """Its parameters are text, sent as a tensor and as request parameters at once, its ids numbers."""
    stated = {"temperature": "0", "top_p": "0.95", "max_tokens": "40"}
    inputs: dict[str, Any] = {"text_input": [PROMPT], "stream": [streams], "exclude_input_in_output": [True]}
    if as_tensor:
        inputs["sampling_parameters"] = [json.dumps(stated)]
    reply = stream(
        served.url, "vllm_model", inputs, outputs=["text_output"], request_id="3", parameters=stated
    )
    assert reply.error is None and reply.text == served.text(PROMPT, max_tokens=40)
    assert all(result.as_numpy("text_output").shape == (1,) for result in reply.results)
    assert {result.get_response().id for result in reply.results} == {"3"}


@pytest.mark.row("A5")
def test_the_prompt_is_part_of_a_whole_answer_unless_excluded(served: Served) -> None:
    asked = {
        "text_input": [PROMPT],
        "stream": [False],
        "sampling_parameters": ['{"max_tokens": "9", "temperature": "0"}'],
    }
    answer = served.text(PROMPT, max_tokens=9)
    for exclude, expected in ((None, PROMPT + answer), ([False], PROMPT + answer), ([True], answer)):
        inputs = asked if exclude is None else {**asked, "exclude_input_in_output": exclude}
        assert stream(served.url, "vllm_model", inputs).text == expected
    refused = stream(
        served.url, "vllm_model", {**asked, "stream": [True], "exclude_input_in_output": [False]}
    )
    assert "exclude_input_in_output" in str(refused.error)


@pytest.mark.row("A5", clauses=("names",))
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_additional_outputs_of_vllm_backend(served: Served, streams: bool, logprobs: int | None) -> None:
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    stated: dict[str, Any] = {"temperature": "0", "top_p": "1", "ignore_eos": True, "max_tokens": 16}
    if logprobs is not None:
        stated["logprobs"] = logprobs
    inputs = {"text_input": [PROMPT], "stream": [streams], "sampling_parameters": [json.dumps(stated)]}
    none = stream(served.url, "vllm_model", inputs)
    for result in none.results:
        assert [output.name for output in result.get_response().outputs] == ["text_output"]
    every = {**inputs, **{f"return_{name}": [True] for name in names}}
    reply = stream(served.url, "vllm_model", every)
    before = 0.0
    for number, result in enumerate(reply.results):
        last = number == len(reply.results) - 1
        assert result.as_numpy("finish_reason")[0].decode() == ("length" if last else "None")
        # A token of which the model is all but sure changes nothing.
        assert result.as_numpy("cumulative_logprob")[0] <= before
        before = result.as_numpy("cumulative_logprob")[0]
        assert result.as_numpy("num_input_tokens").astype(int) > 0
        count = int(result.as_numpy("num_output_tokens")[0])
        found = json.loads(result.as_numpy("logprobs")[0].decode())
        if logprobs is None:
            assert found is None
            continue
        assert len(found) == count
        text = ""
        for entry in found:
            assert 1 <= len(entry) <= logprobs + 1
            (best,) = [one for one in entry.values() if one["rank"] == 1]
            assert all(set(one) == {"logprob", "rank", "decoded_token"} for one in entry.values())
            text += best["decoded_token"]
        shown = result.as_numpy("text_output")[0].decode()
        if "\ufffd" not in text + shown:
            assert (text if streams else PROMPT + text) == shown
    assert before < 0


@pytest.mark.row("A5")
def test_the_request_of_the_openai_frontend_in_its_vllm_mode(served: Served) -> None:
    """As its conversion writes it: all fields of the schema that are set, lists among them."""
    stated = {
        "frequency_penalty": 0.0,
        "logit_bias": {"7": 1},
        "n": 1,
        "presence_penalty": 0.0,
        "seed": 5,
        "stop": ["never there"],
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 16,
    }
    inputs = {
        "return_logprobs": [False],
        "text_input": [PROMPT],
        "stream": [True],
        "exclude_input_in_output": [True],
        "sampling_parameters": [json.dumps(stated)],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
    }
    expected = served.text(PROMPT, max_tokens=16, logit_bias={7: 1})
    reply = stream(served.url, "vllm_model", inputs)
    assert reply.text == expected
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in reply.results) <= 16
    assert all(result.as_numpy("num_input_tokens").dtype == np.uint32 for result in reply.results)


# TensorRT-LLM: inflight_batcher_llm/client.


def rows(*values: Any, dtype: Any = np.int32) -> np.ndarray:
    """[batch, 1] or [batch, n]."""
    return np.array([value if isinstance(value, list) else [value] for value in values], dtype)


def texts(*values: Any) -> np.ndarray:
    return np.array(
        [[v.encode() for v in (value if isinstance(value, list) else [value])] for value in values], object
    )


def flag(*values: bool) -> np.ndarray:
    return np.array([[value] for value in values])


@pytest.mark.row("A6")
@pytest.mark.parametrize("streams", [True, False])
def test_the_client_of_the_model_behind_the_ensemble(served: Served, streams: bool) -> None:
    """inflight_batcher_llm_client.py: token ids in, output_ids[0][0] out."""
    ids = served.llm.encode(PROMPT)
    expected = served.llm.generate([ids], SamplingParams(max_tokens=24, ignore_eos=True))[0].token_ids
    inputs = {
        "input_ids": rows(ids),
        "input_lengths": rows(len(ids)),
        "request_output_len": rows(24),
        "beam_width": rows(1),
        "temperature": rows(0.0, dtype=np.float32),
        "streaming": flag(streams),
        "end_id": rows(-1),
        "pad_id": rows(2),
        "runtime_top_k": rows(1),
        "runtime_top_p": rows(0.0, dtype=np.float32),
        "repetition_penalty": rows(1.0, dtype=np.float32),
        "return_log_probs": flag(True),
        "return_context_logits": flag(False),
        "return_generation_logits": flag(False),
    }
    reply = stream(served.url, "tensorrt_llm", inputs)
    assert reply.error is None and reply.finals == 1
    found = []
    for result in reply.results:
        (part,) = result.as_numpy("output_ids")[0].tolist()
        assert result.as_numpy("sequence_length")[0][0] == len(part)
        assert result.as_numpy("sequence_index")[0][0] == 0 == result.as_numpy("batch_index")[0][0]
        assert result.as_numpy("output_log_probs").shape == (1, 1, len(part))
        assert result.as_numpy("cum_log_probs").shape == (1, 1)
        found += part
    assert found == expected


@pytest.mark.row("A6")
@pytest.mark.parametrize("streams", [True, False])
def test_the_end_to_end_client_with_a_batch_of_prompts(served: Served, streams: bool) -> None:
    """end_to_end_grpc_client.py with --batch-inputs: everything is [batch, 1]."""
    prompts = [PROMPT, "a", "naïve café 🙂"]
    count = len(prompts)
    inputs = {
        "text_input": texts(*prompts),
        "max_tokens": rows(20, 30, 10),
        "stream": flag(*[streams] * count),
        "beam_width": rows(*[1] * count),
        "temperature": rows(*[0.0] * count, dtype=np.float32),
        "num_return_sequences": rows(*[1] * count),
        "bad_words": texts(*[""] * count),
        "stop_words": texts(*[["never there", ""]] * count),
        "return_log_probs": flag(*[True] * count),
        "end_id": rows(*[-1] * count),
        "pad_id": rows(*[2] * count),
        "exclude_input_in_output": flag(*[True] * count),
    }
    named = ["text_output", "cum_log_probs", "output_log_probs", "batch_index"]
    reply = stream(served.url, "tensorrt_llm", inputs, outputs=named)
    assert reply.error is None and reply.finals == 1
    found = [""] * count
    for result in reply.results:
        found[result.as_numpy("batch_index")[0][0]] += result.as_numpy("text_output")[0].decode("utf-8")
    asked = zip(prompts, (20, 30, 10), strict=True)
    assert found == [served.text(prompt, max_tokens=most, ignore_eos=True) for prompt, most in asked]


@pytest.mark.row("A6")
def test_beams_and_sequences_are_told_by_sequence_index(served: Served) -> None:
    inputs = {"text_input": texts(PROMPT), "max_tokens": rows(8), "beam_width": rows(3)}
    reply = stream(served.url, "tensorrt_llm", inputs, outputs=["text_output", "sequence_index"])
    assert sorted(result.as_numpy("sequence_index")[0][0] for result in reply.results) == [0, 1, 2]


@pytest.mark.row("A6")
def test_an_llmapi_client(served: Served) -> None:
    inputs = {
        "text_input": texts(PROMPT),
        "streaming": flag(True),
        "sampling_param_temperature": rows(0.0, dtype=np.float32),
        "sampling_param_top_p": rows(0.9, dtype=np.float32),
        "sampling_param_max_tokens": rows(20),
        "sampling_param_stop": texts(["never there"]),
        "sampling_param_seed": rows(3, dtype=np.uint64),
        "sampling_param_exclude_input_from_output": flag(True),
        "return_finish_reason": flag(True),
        "return_stop_reason": flag(True),
        "return_cumulative_logprob": flag(True),
    }
    reply = stream(served.url, "tensorrt_llm", inputs)
    assert reply.text == served.text(PROMPT, max_tokens=20)
    assert reply.finish_reasons[-1] in ("length", "stop")
    assert reply.results[-1].as_numpy("cumulative_logprob").shape == (1,)


@pytest.mark.row("A6", clauses=("names", "migration"))
def test_legacy_requests_of_all_three_kinds_say_the_same(served: Served) -> None:
    """One question in the words of the ensemble's model, of BLS and of llmapi, by gRPC and by HTTP."""
    ids = served.llm.encode(PROMPT)
    expected = served.llm.generate([ids], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    legacy = {
        "ensemble": {
            "input_ids": rows(ids),
            "input_lengths": rows(len(ids)),
            "request_output_len": rows(20),
            "end_id": rows(-1),
        },
        "bls": {
            "text_input": texts(PROMPT),
            "max_tokens": rows(20),
            "stop_words": texts([""]),
            "bad_words": texts([""]),
            "end_id": rows(-1),
        },
        "llmapi": {
            "text_input": texts(PROMPT),
            "sampling_param_max_tokens": rows(20),
            "ignore_eos": flag(True),
        },
    }
    for kind, inputs in legacy.items():
        for streams in (True, False):
            further = {"stream" if kind == "bls" else "streaming": flag(streams)}
            assert stream(served.url, "tensorrt_llm", {**inputs, **further}).text == expected.text, kind
    bodies: list[dict[str, Any]] = [
        {
            "text_input": PROMPT,
            "max_tokens": 20,
            "bad_words": "",
            "stop_words": "",
            "end_id": -1,
            "pad_id": 2,
        },
        {"text_input": PROMPT, "sampling_param_max_tokens": 20, "ignore_eos": True},
        {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 20, "end_id": -1},
    ]
    for body in bodies:
        status, answer = post(f"{served.http_url}/v2/models/tensorrt_llm/generate", body)
        assert status == 200 and json.loads(answer)["text_output"] == expected.text, answer


def test_what_tensorrt_llm_can_and_we_cannot_is_refused_by_name(served: Served) -> None:
    asked = {"text_input": texts(PROMPT), "max_tokens": rows(2)}
    for name, value in (
        ("return_context_logits", flag(True)),
        ("num_draft_tokens", rows(3)),
        ("lora_task_id", rows(3, dtype=np.uint64)),
    ):
        assert name in str(stream(served.url, "tensorrt_llm", {**asked, name: value}).error)


@pytest.mark.row("A21", clauses=("stop", "cancel", "http"))
@pytest.mark.parametrize("how", ["grpc", "http", "http cancel"])
def test_stop_with_its_id_ends_a_request(served: Served, how: str) -> None:
    """As prepare_stop_signals writes it; over HTTP as JSON, where the first request is one over HTTP too."""
    inputs = {
        "text_input": texts(PROMPT),
        "max_tokens": rows(ENDLESS),
        "stream": flag(True),
        "ignore_eos": flag(True),
        "logits_processors": texts(paced_input()["logits_processors"]),
    }
    call = TritonStream(served.url, "tensorrt_llm", inputs, request_id="42")
    assert not call.next()
    if how == "grpc":
        signal = {
            "input_ids": rows(0),
            "input_lengths": rows(0),
            "request_output_len": rows(0),
            "stop": flag(True),
        }
        assert stream(served.url, "tensorrt_llm", signal, request_id="42").error is None
    else:
        named = {"stop": True} if how == "http" else {"cancel": True}
        status, answer = post(f"{served.http_url}/v2/models/tensorrt_llm/generate", {"id": "42", **named})
        assert status == 200, answer
    reply = call.read_all()
    assert reply.finish_reasons[-1] == "cancelled"
    assert len(reply.results) > 0 and reply.finals == 1


@pytest.mark.row("A21")
def test_a_request_over_http_is_ended_by_its_id(served: Served) -> None:
    """The server does not see that an HTTP client has gone; its id is the way to end what it asked for."""
    body = {"id": "h-1", "text_input": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True, **paced_input()}
    url = f"{served.http_url}/v2/models/tensorrt_llm/generate"
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(post, url, body)
        wait_until(lambda: post(url, {"id": "h-1", "stop": True})[0] == 200 or asking.done())
        status, answer = asking.result()
    assert status == 200 and json.loads(answer)["finish_reason"] == "cancelled"
