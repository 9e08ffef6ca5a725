"""Bad input is refused by name before it reaches the engine; good input of every form means the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.messages import EngineInfo
from quire.errors import InvalidArgumentError, UnavailableError
from quire.sampling_params import SamplingParams
from quire.triton.request_parser import RequestParser, read_request
from quire_ensemble.tokenizer import Tokenizer
from tests.fixtures.checkpoints import write_tokenizer
from tests.fixtures.fake_pb_utils import InferenceRequest

INFO = EngineInfo(
    hidden_size=8,
    takes_position_ids=False,
    pid=1,
    max_model_len=64,
    vocab_size=600,
    num_blocks=8,
    block_size=16,
    kv_cache_bytes=1,
    dtype="float32",
    device="cpu",
)

MAX_EMBEDS_BYTES = 3 * 8 * 4 * 10
"""Of ten requests as below: 3 rows of 8 numbers each."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path)


def text(value: str | bytes) -> np.ndarray:
    raw = value.encode() if isinstance(value, str) else value
    return np.array([raw], dtype=np.object_)


def parse(
    tokenizer: Any,
    inputs: dict[str, np.ndarray],
    parameters: dict[str, Any] | None = None,
    *,
    request_id: str = "",
    decoupled: bool = True,
) -> Any:
    parser = RequestParser(
        tokenizer, SamplingParams(), lambda: INFO, max_prompt_bytes=1000, decoupled=decoupled
    )
    request = InferenceRequest(inputs, parameters=json.dumps(parameters or {}), request_id=request_id)
    return parser.parse(read_request(request, MAX_EMBEDS_BYTES))


def test_text_messages_and_ids_give_the_same_kind_of_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    assert parse(tokenizer, {"text_input": text("hello")}).prompt_token_ids == ids
    assert parse(tokenizer, {"input_ids": np.array(ids, np.int32)}).prompt_token_ids == ids
    messages = json.dumps([{"role": "user", "content": "hello"}])
    expected = tokenizer.encode_messages(messages)
    assert parse(tokenizer, {"messages": text(messages)}).prompt_token_ids == expected


def test_typed_tensor_beats_json_beats_parameter(tokenizer: Tokenizer) -> None:
    prompt = {"input_ids": np.array([1, 2], np.int32)}
    only_parameter = parse(tokenizer, prompt, {"max_tokens": 3})
    assert only_parameter.params.max_tokens == 3
    with_json = {**prompt, "sampling_parameters": text('{"max_tokens": 4}')}
    assert parse(tokenizer, with_json, {"max_tokens": 3}).params.max_tokens == 4
    with_tensor = {**with_json, "max_tokens": np.array([5], np.int32)}
    assert parse(tokenizer, with_tensor, {"max_tokens": 3}).params.max_tokens == 5


def test_numbers_may_be_text(tokenizer: Tokenizer) -> None:
    """perf_analyzer's --request-parameter has no float type."""
    prompt = {"input_ids": np.array([1, 2], np.int32)}
    params = parse(tokenizer, prompt, {"temperature": "0.7", "stop": '["a", "b"]', "stream": "true"})
    assert params.params.temperature == 0.7
    assert params.params.stop == ("a", "b")
    assert params.stream


def test_reserved_parameters_are_not_ours(tokenizer: Tokenizer) -> None:
    prompt = {"input_ids": np.array([1, 2], np.int32)}
    parse(tokenizer, prompt, {"priority": 1, "timeout": 5, "triton_enable_empty_final_response": True})


BAD = [
    ({}, {}, "prompt", "got none"),
    ({"text_input": text("a"), "messages": text("[]")}, {}, "prompt", "text_input, messages"),
    ({"text_input": text("")}, {}, "text_input", "empty"),
    ({"text_input": text(b"ab\xff")}, {}, "text_input", "UTF-8"),
    ({"text_input": text("x" * 1001)}, {}, "text_input", "1000"),
    ({"text_input": np.array([b"a", b"b"], np.object_)}, {}, "text_input", "exactly one"),
    ({"messages": text("{")}, {}, "messages", "JSON"),
    ({"messages": text('"hi"')}, {}, "messages", ""),
    ({"messages": text("[]")}, {}, "messages", ""),
    ({"messages": text('[{"role": "user"}]')}, {}, "messages", "content"),
    ({"input_ids": np.array([], np.int32)}, {}, "input_ids", "at least one"),
    ({"input_ids": np.array([1, 600], np.int32)}, {}, "input_ids", "600"),
    ({"input_ids": np.array([-1], np.int32)}, {}, "input_ids", "-1"),
    ({"input_ids": np.ones(64, np.int32)}, {}, "prompt", "max_model_len is 64"),
    (
        {"input_ids": np.ones(2, np.int32), "temperature": np.array([np.nan], np.float32)},
        {},
        "temperature",
        "NaN",
    ),
    ({"input_ids": np.ones(2, np.int32), "top_p": np.array([0.0], np.float32)}, {}, "top_p", "(0, 1]"),
    ({"input_ids": np.ones(2, np.int32), "top_p": np.array([1.5], np.float32)}, {}, "top_p", "(0, 1]"),
    ({"input_ids": np.ones(2, np.int32), "max_tokens": np.array([0], np.int32)}, {}, "max_tokens", "[1,"),
    (
        {"input_ids": np.ones(2, np.int32), "max_tokens": np.array([1, 2], np.int32)},
        {},
        "max_tokens",
        "one element",
    ),
    ({"input_ids": np.ones(2, np.int32)}, {"temprature": 1}, "temprature", "unknown"),
    ({"input_ids": np.ones(2, np.int32)}, {"max_tokens": "ten"}, "max_tokens", "integer"),
    ({"input_ids": np.ones(2, np.int32)}, {"stream": "perhaps"}, "stream", "boolean"),
    (
        {"input_ids": np.ones(2, np.int32), "sampling_parameters": text("{")},
        {},
        "sampling_parameters",
        "JSON",
    ),
    (
        {"input_ids": np.ones(2, np.int32), "sampling_parameters": text("[1]")},
        {},
        "sampling_parameters",
        "object",
    ),
    ({"input_ids": np.ones(2, np.int32), "sampling_parameters": text('{"topp": 1}')}, {}, "topp", "unknown"),
    (
        {"input_ids": np.ones(2, np.int32), "stop_token_ids": np.array([600], np.int32)},
        {},
        "stop_token_ids",
        "600",
    ),
    ({"input_ids": np.ones(2, np.int32), "logit_bias": text('{"600": 1}')}, {}, "logit_bias", "600"),
    ({"input_ids": np.ones(2, np.int32), "stop": np.array([b"\xff"], np.object_)}, {}, "stop", "UTF-8"),
    ({"cancel": np.array([True])}, {}, "cancel", "request id"),
]


@pytest.mark.parametrize(("inputs", "parameters", "field", "words"), BAD)
def test_bad_input_names_the_field(
    tokenizer: Tokenizer, inputs: dict, parameters: dict, field: str, words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        parse(tokenizer, inputs, parameters)
    assert error.value.field == field
    assert words in str(error.value)


def test_streaming_is_refused_where_triton_cannot_stream(tokenizer: Tokenizer) -> None:
    inputs = {"input_ids": np.ones(2, np.int32), "stream": np.array([True])}
    assert parse(tokenizer, inputs).stream
    with pytest.raises(InvalidArgumentError, match="stream"):
        parse(tokenizer, inputs, decoupled=False)


def test_echo_is_asked_for_as_in_vllm_backend(tokenizer: Tokenizer) -> None:
    inputs = {"text_input": text("hello"), "exclude_input_in_output": np.array([False])}
    assert parse(tokenizer, inputs).echo == "hello"
    assert parse(tokenizer, {"text_input": text("hello")}).echo == ""
    with pytest.raises(InvalidArgumentError, match="exclude_input_in_output"):
        parse(tokenizer, {**inputs, "stream": np.array([True])})


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    assert parse(None, {"input_ids": np.array([3], np.int32)}).prompt_token_ids == [3]
    with pytest.raises(InvalidArgumentError, match="input_ids"):
        parse(None, {"text_input": text("hello")})
    with pytest.raises(InvalidArgumentError, match="stop"):
        parse(None, {"input_ids": np.array([3], np.int32), "stop": text("x")})


def test_cancel_carries_the_id(tokenizer: Tokenizer) -> None:
    parsed = parse(tokenizer, {"cancel": np.array([True])}, request_id="abc")
    assert parsed.cancel
    assert parsed.external_id == "abc"


def test_image_embeddings_are_bounded_together_and_given_back(tokenizer: Tokenizer) -> None:
    """What requests hold is counted until they are gone, and a refused one holds nothing."""
    from quire.engine.shared_array import SharedBuffer

    inputs = {
        "input_ids": np.array([1, 2, 2, 2, 3], np.int32),
        "image_embeds": np.ones((3, 8), np.float32),
        "image_spans": np.array([[1, 3]], np.int32),
    }
    held = [parse(tokenizer, inputs) for _ in range(10)]
    assert SharedBuffer.total_bytes == MAX_EMBEDS_BYTES
    assert held[0].embeds.spans == [(1, 3)]
    assert held[0].embeds.embeds.open().tolist() == inputs["image_embeds"].tolist()
    with pytest.raises(UnavailableError, match=f"queue full.*max_embeds_bytes {MAX_EMBEDS_BYTES}"):
        parse(tokenizer, inputs)
    held.pop()
    held.append(parse(tokenizer, inputs))
    held.clear()
    assert SharedBuffer.total_bytes == 0
