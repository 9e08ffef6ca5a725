"""Embeddings on the wire: how they are asked for, what is refused, and the one response that brings them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.errors import InvalidArgumentError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402
from quire_ensemble.generator_schema import outputs_of  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.fake_runner import generate_alone  # noqa: E402
from tests.triton.test_request_parser import INFO, MAX_EMBEDS_BYTES, parse, text, tokenizer  # noqa: E402, F401
from tests.triton.test_responder import MAX_MODEL_LEN  # noqa: E402
from tests.triton.test_usage import Harness, data, harness, last, texts  # noqa: E402, F401

PROMPT = {"input_ids": np.array([5, 6, 7], np.int32)}
WANTED = {"return_embedding": np.array([True])}
IDS = [7, 8, 9, 10, 11]


def test_who_asks_for_one_gets_no_tokens(tokenizer: Tokenizer) -> None:  # noqa: F811
    """By the name of the output or, where none is named, by a flag; of any prompt."""
    whole = SamplingParams(dimensions=INFO.hidden_size, max_tokens=1)
    named = parse(tokenizer, PROMPT, requested=["embedding"])
    assert named.params == whole and named.outputs == named.final_outputs == {"embedding"}
    for form in (WANTED, {"sampling_parameters": text("{}"), **WANTED}):
        flagged = parse(tokenizer, {**PROMPT, **form})
        assert flagged.params == whole
        assert flagged.outputs == flagged.final_outputs == {"embedding", "finish_reason", "num_input_tokens"}
    assert parse(tokenizer, PROMPT, {"return_embedding": True, "dimensions": "3"}).params.dimensions == 3
    messages = text(json.dumps([{"role": "user", "content": "hi"}]))
    several = np.array([b"one", b"two"], dtype=np.object_)
    for prompt in ({"messages": messages}, {"text_input": several}, {"prompt_embeds": np.ones((2, 8), "f4")}):
        parsed = parse(tokenizer, {**prompt, **WANTED})
        assert [one.params for one in (parsed, *parsed.others)] == [whole] * (1 + len(parsed.others))
        assert parsed.new_answer is None
    assert parse(tokenizer, PROMPT).params.dimensions == 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {**WANTED, "dimensions": np.array([9], np.int32)},
            r"dimensions: at most 8 \(the model's",
        ),
        ({"dimensions": np.array([4], np.int32)}, "dimensions: is of an embedding, and none is asked for"),
        ({**WANTED, "dimensions": np.array([-1], np.int32)}, "dimensions: must be"),
        ({**WANTED, "n": np.array([2], np.int32)}, "n: must not be given where an embedding"),
        ({**WANTED, "logprobs": np.array([2], np.int32)}, "logprobs: must not be given where"),
        ({**WANTED, "return_logprobs": np.array([True])}, "logprobs: must not be given where"),
        ({**WANTED, "structured_output": text('{"regex": "a"}')}, "structured_output: must not be given"),
    ],
    ids=range(7),
)
def test_what_is_wrong_is_named(tokenizer: Tokenizer, inputs: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(InvalidArgumentError, match=message):
        parse(tokenizer, {**PROMPT, **inputs})


def submit(harness: Harness, number: int, stream: bool = False) -> fake_pb_utils.ResponseSender:  # noqa: F811
    sender = fake_pb_utils.ResponseSender()
    asked = {"input_ids": np.array(IDS, np.int32), **WANTED, "stream": np.array([stream])}
    parsed = parse(None, asked, request_id=f"request {number}")
    harness.responder.submit(RequestHandle(sender, f"e-{number}", f"request {number}"), parsed)
    return sender


@pytest.mark.parametrize("stream", [False, True])
def test_it_comes_in_one_response_beside_those_that_generate(
    harness: Harness,  # noqa: F811
    stream: bool,
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    generating = harness.submit(IDS, params)
    senders = [submit(harness, number, stream) for number in range(3)]
    expected = generate_alone(IDS, SamplingParams(dimensions=1), MAX_MODEL_LEN)[0][0]
    for sender in senders:
        (response,) = data(sender)
        assert set(response.tensors) == {"embedding", "finish_reason", "num_input_tokens"}
        vector = response.tensors["embedding"]
        assert (vector.dtype, vector.tobytes()) == (np.float32, expected.to_bytes(4, "little"))
        assert (texts([response], "finish_reason"), last([response], "num_input_tokens")) == (["stop"], 5)
        assert len(sender.responses) == 1 and sender.responses[0] is response, "FINAL is on it"
    got = [int(i) for response in data(generating) for i in response.tensors["output_ids"]]
    assert got == generate_alone(IDS, params, MAX_MODEL_LEN)[0]


def test_cancelled_before_it_is_there(tmp_path: Path) -> None:
    """It waits for the one place, which is taken for 300 steps."""
    harness = Harness(tmp_path, max_num_seqs=1)  # noqa: F811
    try:
        harness.runner.hold_after_token_of = "t-1"
        first = harness.submit([1, 2], SamplingParams(max_tokens=300, ignore_eos=True))
        assert first.first.wait(60)
        sender = submit(harness, 7)
        harness.cancel("request 7")
        harness.runner.is_slow = lambda: not sender.final.is_set()
        harness.runner.gate.set()
        (response,) = data(sender)
        assert texts([response], "finish_reason") == ["cancelled"] and not response.tensors["embedding"].size
    finally:
        harness.close()


@pytest.fixture
def batched(tokenizer: Tokenizer) -> Iterator[RequestParser]:  # noqa: F811
    from quire.config import FrontendConfig

    config = FrontendConfig(max_prompt_bytes=1000, max_embeds_bytes=MAX_EMBEDS_BYTES)
    yield RequestParser(tokenizer, SamplingParams(), lambda: INFO, config, decoupled=True, batched=True)


def test_with_a_batch_dimension(batched: RequestParser, tmp_path: Path) -> None:
    """All rows ask for one, or none; a response is a row."""
    ids = np.array([[5, 6], [7, 8]], np.int32)

    def parsed(*wanted: bool, **more: np.ndarray) -> Any:
        flags = {"return_embedding": np.array([[one] for one in wanted]), **more}
        inputs, names = {"input_ids": ids, **flags}, [spec.name for spec in outputs_of(batched=True)]
        return batched.parse(batched.read(fake_pb_utils.InferenceRequest(inputs, requested=names)))

    both = parsed(True, True, dimensions=np.array([[3], [4]], np.int32))
    assert (both.params.dimensions, both.others[0].params.dimensions) == (3, 4)
    with pytest.raises(InvalidArgumentError, match="return_embedding: must be the same in all rows"):
        parsed(True, False)
    harness = Harness(tmp_path)  # noqa: F811
    try:
        sender = fake_pb_utils.ResponseSender()
        harness.responder.submit(RequestHandle(sender, "b", ""), both)
        responses = data(sender)
        assert [response.tensors["embedding"].shape for response in responses] == [(1, 1)] * 2
        assert sorted(int(response.tensors["batch_index"]) for response in responses) == [0, 1]
    finally:
        harness.close()
