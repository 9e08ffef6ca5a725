"""Bad input is refused by name before it reaches the engine; good input of every form means the same."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config import FrontendConfig
from quire.engine.cache_commands import Health, Requests, Reset, Sleep, Unpin, Wake
from quire.engine.messages import EngineInfo
from quire.errors import InvalidArgumentError, UnavailableError
from quire.frontend.output_processor import RequestProcessor
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from quire.triton.request_parser import RequestParser
from quire_ensemble.generator_schema import OUTPUTS
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
    limits: dict[str, Any] | None = None,
    declared: frozenset[str] | None = None,
    defaults: SamplingParams = SamplingParams(),
    **options: Any,
) -> Any:
    parser = RequestParser(
        tokenizer,
        defaults,
        lambda: INFO,
        FrontendConfig(**{"max_prompt_bytes": 1000, "max_embeds_bytes": MAX_EMBEDS_BYTES, **(limits or {})}),
        decoupled=decoupled,
        declared=declared,
    )
    request = InferenceRequest(
        inputs, parameters=json.dumps(parameters or {}), request_id=request_id, **options
    )
    return parser.parse(parser.read(request))


def test_text_messages_and_ids_give_the_same_kind_of_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    assert parse(tokenizer, {"text_input": text("hello")}).prompt_token_ids == ids
    assert parse(tokenizer, {"input_ids": np.array(ids, np.int32)}).prompt_token_ids == ids
    messages = json.dumps([{"role": "user", "content": "hello"}])
    expected, _ = tokenizer.encode_chat(messages)
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


@pytest.mark.parametrize("field", ["stop", "bad_words", "stop_words"])
@pytest.mark.parametrize("string", ["[1]", "[INST]", "[]", '["a"]', "[", '["a", 1]'])
def test_a_string_is_no_list_where_a_list_can_be_told(tokenizer: Tokenizer, field: str, string: str) -> None:
    """The stop string "[1]" in `sampling_parameters` was read as a list of a number, and refused.

    A request parameter cannot be a list, so there, and only there, a list of strings may be spelled as JSON.
    """
    name = {"stop_words": "stop"}.get(field, field)
    by_json = {**PROMPT, "sampling_parameters": text(json.dumps({field: string}))}
    assert getattr(parse(tokenizer, by_json).params, name) == (string,)
    spelled = {"[]": (), '["a"]': ("a",)}.get(string, (string,))
    assert getattr(parse(tokenizer, PROMPT, {field: string}).params, name) == spelled


def test_a_request_states_how_often_it_is_sent_to_or_the_model_does(tokenizer: Tokenizer) -> None:
    """A request that states one of the two is not bound by the model's other one."""

    def intervals(inputs: dict[str, np.ndarray], parameters: dict[str, Any], **model: int) -> tuple[int, int]:
        parsed = parse(tokenizer, {**PROMPT, **inputs}, parameters, limits=model)
        return parsed.stream_interval, parsed.stream_interval_ms

    model = {"stream_interval": 4, "stream_interval_ms": 20}
    assert intervals({}, {}) == (0, 0)
    assert intervals({}, {}, **model) == (4, 20)
    assert intervals({}, {"stream_interval": "2"}, **model) == (2, 0)
    assert intervals({"stream_interval_ms": np.array([9], np.int32)}, {}, **model) == (0, 9)
    assert intervals({"stream_interval": np.array([0], np.int32)}, {}, **model) == (0, 0)


def test_reserved_parameters_are_not_ours(tokenizer: Tokenizer) -> None:
    prompt = {"input_ids": np.array([1, 2], np.int32)}
    parse(tokenizer, prompt, {"priority": 1, "timeout": 5, "triton_enable_empty_final_response": True})


PROMPT = {"input_ids": np.ones(2, np.int32)}

BAD = [
    ({}, {}, "prompt", "got none"),
    ({"text_input": text("a"), "messages": text("[]")}, {}, "prompt", "text_input, messages"),
    ({"text_input": text("")}, {}, "text_input", "empty"),
    ({"text_input": text(b"ab\xff")}, {}, "text_input", "UTF-8"),
    ({"text_input": text("x" * 1001)}, {}, "text_input", "1000"),
    ({"text_input": np.array([], np.object_)}, {}, "text_input", "at least one text"),
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
    ({"input_ids": np.ones(2, np.int32), "top_p": np.array([1.5], np.float32)}, {}, "top_p", "[0, 1]"),
    ({"input_ids": np.ones(2, np.int32), "max_tokens": np.array([-1], np.int32)}, {}, "max_tokens", "[1,"),
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
        {"input_ids": np.ones(2, np.int32), "stream_interval": np.array([-1], np.int32)},
        {},
        "stream_interval",
        "[0,",
    ),
    ({"input_ids": np.ones(2, np.int32)}, {"stream_interval_ms": 60_001}, "stream_interval_ms", "60000"),
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
    ({"cache_control": text("reset")}, {}, "cache_control", "invalid JSON"),
    ({"cache_control": text("[]")}, {}, "cache_control", "object"),
    ({"cache_control": text("{}")}, {}, "cache_control", "command"),
    ({**PROMPT, "n": np.array([65], np.int32)}, {}, "n", "[1, 64]"),
    ({**PROMPT, "n": np.array([3], np.int32)}, {"best_of": 2}, "best_of", "at least n (3)"),
    ({**PROMPT, "n": np.array([2], np.int32)}, {"stream": True, "best_of": 3}, "stream", "ranked"),
    (PROMPT, {"stream": True, "beam_width": 2}, "stream", "ranked"),
    (PROMPT, {"request_priority": 101}, "request_priority", "[-100, 100]"),
    (PROMPT, {"X-Quire-Priority": "high"}, "request_priority", "integer"),
    ({**PROMPT, "deadline_ms": np.array([0], np.int32)}, {}, "deadline_ms", "[1,"),
    ({**PROMPT, "tenant": np.array([b"\xff"], np.object_)}, {}, "tenant", "UTF-8"),
    ({**PROMPT, "session_end": np.array([True])}, {}, "session_end", "session"),
    ({**PROMPT, "sampling_parameters": text('{"priority": "x"}')}, {}, "priority", "integer"),
    (PROMPT, {"timeout": "soon"}, "timeout", "integer"),
    (PROMPT, {"max-tokens": 5}, "max-tokens", "unknown"),
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
    assert parse(tokenizer, {**inputs, "stream": np.array([True])}).echo == "hello"


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({"max_tokens": np.array([0], np.int32)}, {}),
        ({"max_tokens": np.array([0], np.int32)}, {"max_tokens": 5}),
        ({"sampling_parameters": text('{"max_tokens": 0}')}, {}),
        ({}, {"max_new_tokens": "0"}),
    ],
)
def test_without_tokens_the_prompt_is_all(
    tokenizer: Tokenizer, inputs: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    asked = {"text_input": text("hello"), **inputs}
    parsed = parse(tokenizer, asked, parameters)
    assert parsed.is_prompt_alone and parsed.params.max_tokens == 1
    assert parsed.results is not None and len(parsed.results.choices) == 1, "no engine is asked"
    with_logprobs = parse(tokenizer, {**asked, "prompt_logprobs": np.array([1], np.int32)}, parameters)
    assert with_logprobs.is_prompt_alone and with_logprobs.results is None
    some = {**asked, "max_tokens": np.array([3], np.int32)}
    assert not parse(tokenizer, some, {"max_tokens": 0}).is_prompt_alone


def test_a_configuration_may_declare_other_outputs(tokenizer: Tokenizer) -> None:
    """Who names none gets what there is; what is no output of ours is refused where it is named."""
    prompt = {"text_input": text("hello")}
    more = frozenset({*(spec.name for spec in OUTPUTS), "score"})
    for declared in (more, frozenset({"text_output", "finish_reason"})):
        parsed = parse(tokenizer, prompt, declared=declared, requested=sorted(declared))
        assert parsed.params.dimensions == 0 and "embedding" not in parsed.final_outputs
        assert {"text_output", "finish_reason"} <= parsed.final_outputs <= declared - {"score"}
    named = frozenset({"text_output", "score"})
    with pytest.raises(InvalidArgumentError, match=r"^outputs: 'score' is no output"):
        parse(tokenizer, prompt, declared=more, requested=sorted(named))


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({"top_p": np.array([0], np.float32)}, {}),
        ({"sampling_parameters": text('{"top_p": 0.0}')}, {}),
        ({}, {"top_p": "0"}),
        ({}, {"runtime_top_p": 0}),
        ({}, {"sampling_param_top_p": 0}),
    ],
)
def test_top_p_of_0_is_no_nucleus(
    tokenizer: Tokenizer, inputs: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    asked = {"text_input": text("hello"), "temperature": np.array([0.5], np.float32), **inputs}
    assert parse(tokenizer, asked, parameters, defaults=SamplingParams(top_p=0.5)).params.top_p == 1.0


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


def test_scheduling_in_all_forms(tokenizer: Tokenizer) -> None:
    """Typed tensor before JSON before request parameter before header, field by field."""
    headers = {"X-Quire-Tenant": "header", "x-quire-cache-salt": "salt", "X-Quire-Priority": "5"}
    assert parse(tokenizer, PROMPT, headers).scheduling == SchedulingParams(
        tenant="header", cache_salt="salt", priority=5
    )
    parameters = {**headers, "tenant": "parameter", "request_priority": 4, "cache_pin": "true"}
    parameters["cache_ttl_ms"] = 2500
    assert parse(tokenizer, PROMPT, parameters).scheduling == SchedulingParams(
        tenant="parameter", cache_salt="salt", priority=4, pin=True, cache_ttl_s=2.5
    )
    with_json = {**PROMPT, "sampling_parameters": text('{"priority": 3, "tenant": "json", "n": 2}')}
    parsed = parse(tokenizer, with_json, parameters)
    assert (parsed.scheduling.tenant, parsed.scheduling.priority, parsed.params.n) == ("json", 3, 2)
    tensors = {**with_json, "tenant": text("tensor"), "request_priority": np.array([-7], np.int32)}
    tensors |= {"cache_retention": np.array([90], np.int32), "session": text("talk")}
    tensors |= {"num_draft": np.array([0], np.int32)}
    assert parse(tokenizer, tensors, parameters).scheduling == SchedulingParams(
        tenant="tensor",
        cache_salt="salt",
        priority=-7,
        pin=True,
        cache_ttl_s=2.5,
        retention=90,
        session="talk",
        num_draft=0,
    )


def test_the_common_header_for_tenants_is_known_and_others_are_nobodys_business(tokenizer: Tokenizer) -> None:
    parsed = parse(tokenizer, PROMPT, {"x-tenant-id": "a", "User-Agent": "b", "triton-grpc-error": "true"})
    assert parsed.scheduling == SchedulingParams(tenant="a")
    both = parse(tokenizer, PROMPT, {"x-quire-tenant": "own", "x-tenant-id": "common"})
    assert both.scheduling.tenant == "own"
    both = parse(tokenizer, PROMPT, {"x-tenant-id": "common", "x-quire-tenant": "own"})
    assert both.scheduling.tenant == "own", "whatever the order"


@pytest.mark.row("A22")
def test_deadlines_count_from_the_arrival_and_the_smaller_wins(tokenizer: Tokenizer) -> None:
    def left_ms(parameters: dict[str, Any], timeout_us: int = 0) -> tuple[int | None, int | None]:
        parsed = parse(tokenizer, PROMPT, parameters, timeout_us=timeout_us)
        deadlines = parsed.scheduling.ttft_deadline, parsed.scheduling.deadline
        first, last = (None if d is None else round((d - parsed.arrived_at) * 1e3) for d in deadlines)
        return first, last

    before = time.monotonic()
    assert before <= parse(tokenizer, PROMPT).arrived_at <= time.monotonic()
    assert left_ms({}) == (None, None)
    assert left_ms({"ttft_deadline_ms": 20, "deadline_ms": 300}) == (20, 300)
    assert left_ms({"deadline_ms": 300}, timeout_us=200_000) == (None, 200)
    assert left_ms({"deadline_ms": 100}, timeout_us=200_000) == (None, 100)
    assert left_ms({"timeout": 50_000}) == (None, 50), "HTTP generate leaves Triton's own to us"


@pytest.mark.row("A36")
def test_a_sequence_is_a_session(tokenizer: Tokenizer) -> None:
    start, end = 1, 2
    turn = parse(tokenizer, PROMPT, correlation_id=7, flags=start)
    assert turn.scheduling == SchedulingParams(session="7")
    turn = parse(tokenizer, PROMPT, correlation_id="talk", flags=end)
    assert turn.scheduling == SchedulingParams(session="talk", session_end=True)
    turn = parse(tokenizer, PROMPT, {"sequence_id": 7, "sequence_end": True})
    assert turn.scheduling == SchedulingParams(session="7", session_end=True)
    turn = parse(tokenizer, {**PROMPT, "session": text("own")}, correlation_id=7, flags=end)
    assert turn.scheduling == SchedulingParams(session="own")
    assert parse(tokenizer, PROMPT, flags=start | end).scheduling == SchedulingParams()


def test_cache_control_is_a_command_and_no_generation(tokenizer: Tokenizer) -> None:
    parsed = parse(tokenizer, {"cache_control": text('{"command": "unpin", "all": true}')})
    assert parsed.cache_control == Unpin(all=True)
    assert parsed.outputs == parsed.final_outputs == {"text_output", "finish_reason"}
    named = parse(tokenizer, {"cache_control": text('{"command": "reset"}')}, requested=["text_output"])
    assert named.outputs == {"text_output"}


@pytest.mark.parametrize("command", [Sleep(), Sleep(drain=True), Wake()])
def test_only_where_it_is_allowed_a_client_puts_the_engine_to_sleep(
    tokenizer: Tokenizer, command: Sleep | Wake
) -> None:
    """Cache commands are allowed by default; this one stops the service."""
    inputs = {"cache_control": text(msgspec.json.encode(command).decode())}
    with pytest.raises(InvalidArgumentError, match="cache_control: needs allow_sleep"):
        parse(tokenizer, inputs)
    assert parse(tokenizer, inputs, limits={"allow_sleep": True}).cache_control == command
    alone = {"allow_sleep": True, "allow_cache_control": False}
    assert parse(tokenizer, inputs, limits=alone).cache_control == command


@pytest.mark.parametrize("allowed", [True, False])
def test_a_client_lists_its_own_requests_and_with_cache_commands_all(
    tokenizer: Tokenizer, allowed: bool
) -> None:
    limits = {"allow_cache_control": allowed}

    def ask(command: str, tenant: str = "") -> Any:
        inputs = {"cache_control": text(command)} | ({"tenant": text(tenant)} if tenant else {})
        return parse(tokenizer, inputs, limits=limits).cache_control

    assert ask('{"command": "requests"}') == Requests("")
    assert ask('{"command": "requests"}', tenant="a") == Requests("a")
    for command in ('{"command": "requests", "all": true}', '{"command": "requests", "tenant": "b"}'):
        if allowed:
            ask(command, tenant="a")
        else:
            with pytest.raises(InvalidArgumentError, match="cache_control: is not allowed here"):
                ask(command, tenant="a")


def test_several_choices_need_a_decoupled_model(tokenizer: Tokenizer) -> None:
    several = {**PROMPT, "n": np.array([2], np.int32)}
    assert parse(tokenizer, several).params.n == 2
    with pytest.raises(InvalidArgumentError, match="n: this model answers once") as error:
        parse(tokenizer, several, decoupled=False)
    assert error.value.field == "n"
    one_of_many = parse(tokenizer, PROMPT, {"best_of": 3}, decoupled=False)
    assert one_of_many.params.best_of == 3


def test_outputs_of_choices_come_by_themselves(tokenizer: Tokenizer) -> None:
    assert "index" not in parse(tokenizer, PROMPT).outputs
    several = parse(tokenizer, PROMPT, {"n": 2})
    assert "index" in several.outputs and "cumulative_logprob" not in several.final_outputs
    assert several.params.logprobs is None
    beams = parse(tokenizer, PROMPT, {"n": 2, "beam_width": 3})
    assert {"index", "cumulative_logprob"} <= beams.final_outputs


def test_outputs_on_request(tokenizer: Tokenizer) -> None:
    asked = parse(tokenizer, PROMPT, {"return_num_cached_tokens": True, "return_cumulative_logprob": True})
    assert {"num_cached_tokens", "cumulative_logprob"} <= asked.outputs
    assert "logprobs" not in asked.outputs
    assert asked.params.logprobs == 0, "a sum needs its parts"
    named = parse(tokenizer, PROMPT, requested=["text_output", "cumulative_logprob"])
    assert named.params.logprobs == 0
    assert named.outputs == {"text_output", "cumulative_logprob"}


@pytest.mark.parametrize("name", ["stop_reason", "timing", "num_reasoning_tokens"])
def test_what_is_known_at_the_end_comes_with_the_last_response(tokenizer: Tokenizer, name: str) -> None:
    asked = parse(tokenizer, PROMPT, {f"return_{name}": True, "stream": True})
    assert name in asked.final_outputs and name not in asked.outputs
    unasked = parse(tokenizer, PROMPT, {f"return_{name}": False})
    assert name not in unasked.final_outputs
    assert name in parse(tokenizer, PROMPT, requested=[name]).outputs


BEHIND_A_GATEWAY = {"tenant_from_header_only": True, "allow_cache_control": False}


@pytest.mark.parametrize(
    ("inputs", "parameters"),
    [
        ({"tenant": text("mine")}, {}),
        ({"sampling_parameters": text('{"tenant": "mine"}')}, {}),
        ({}, {"tenant": "mine"}),
        ({}, {"x-quire-tenant": "theirs", "X-Quire-Tenant": "mine"}),
        ({}, {"x-tenant-id": "theirs", "x-quire-tenant": "mine"}),
    ],
)
def test_behind_a_gateway_the_header_alone_names_the_tenant(
    tokenizer: Tokenizer, inputs: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    parse(tokenizer, {**PROMPT, **inputs}, parameters)
    with pytest.raises(InvalidArgumentError, match="tenant: must be given"):
        parse(tokenizer, {**PROMPT, **inputs}, parameters, limits=BEHIND_A_GATEWAY)
    header = {"x-quire-tenant": "theirs"}
    assert parse(tokenizer, PROMPT, header, limits=BEHIND_A_GATEWAY).scheduling.tenant == "theirs"


def test_a_forged_header_beside_the_real_one_is_seen(tokenizer: Tokenizer) -> None:
    """Triton passes a client's parameter of a header's name beside the header, as the same key twice."""
    twice = InferenceRequest(PROMPT, parameters='{"x-quire-tenant": "mine", "x-quire-tenant": "theirs"}')
    config = FrontendConfig(max_prompt_bytes=9, **BEHIND_A_GATEWAY)
    parser = RequestParser(tokenizer, SamplingParams(), lambda: INFO, config, decoupled=True)
    with pytest.raises(InvalidArgumentError, match="tenant: must be given once"):
        parser.parse(parser.read(twice))


def test_cache_commands_may_be_forbidden(tokenizer: Tokenizer) -> None:
    command = {"cache_control": text('{"command": "reset"}')}
    assert parse(tokenizer, command).cache_control == Reset()
    with pytest.raises(InvalidArgumentError, match="cache_control: is not allowed here"):
        parse(tokenizer, command, limits=BEHIND_A_GATEWAY)


LARGE = 10**8
"""Elements; as a list they would take 4 GB and seconds of the thread that takes all requests."""


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("input_ids", np.int32, r"at most 64 \(max_model_len\)"),
        ("max_tokens", np.int32, "exactly one element"),
        ("stop_token_ids", np.int32, "at most 256 elements"),
        ("stop", np.object_, "at most 64 elements"),
        ("bad_words", np.object_, "at most 256 elements"),
        ("image_spans", np.int32, "at most 128 elements"),
        ("position_ids", np.int32, "at most 192 elements"),
        ("image_embeds", np.float32, "at most 512 elements"),
    ],
)
def test_a_tensor_of_too_many_elements_is_refused_before_it_is_copied(
    tokenizer: Tokenizer, name: str, dtype: Any, words: str
) -> None:
    one = np.zeros((), dtype) if dtype is not np.object_ else np.array(b"x", dtype)
    shape = (LARGE // 2, 2) if name in ("image_spans", "position_ids", "image_embeds") else (LARGE,)
    tracemalloc.start()
    with pytest.raises(InvalidArgumentError, match=words):
        parse(tokenizer, {name: np.broadcast_to(one, shape)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("text_input", 1001, "at most 1000 bytes, got 1001"),
        ("messages", 1001, "at most 1000 bytes, got 1001"),
        ("sampling_parameters", 2**20 + 1, "at most 1048576 bytes"),
        ("cache_control", 2**20 + 1, "at most 1048576 bytes"),
        ("tenant", 2**20 + 1, "at most 1048576 bytes"),
        ("tenant", 257, "at most 256 characters"),
    ],
)
def test_texts_are_refused_by_their_bytes(tokenizer: Tokenizer, name: str, size: int, words: str) -> None:
    prompt = {} if name in ("text_input", "messages") else PROMPT
    with pytest.raises(InvalidArgumentError, match=f"{name}: {words}"):
        parse(tokenizer, {**prompt, name: text("x" * size)})
    with pytest.raises(InvalidArgumentError, match="parameters: at most 1048576 bytes"):
        parse(tokenizer, PROMPT, {"tenant": "x" * 2**20})


def test_an_id_is_a_name_and_no_text(tokenizer: Tokenizer) -> None:
    """It is kept while the request runs, sent to the engine, and in each log line and span about it: one of
    megabytes was in all of them, as often as there were lines."""
    assert parse(tokenizer, PROMPT, request_id="x" * 256).external_id == "x" * 256
    with pytest.raises(InvalidArgumentError, match="id: at most 256 characters are allowed, got 257"):
        parse(tokenizer, PROMPT, request_id="x" * 257)


def test_a_text_that_cannot_fit_is_refused_by_name(tokenizer: Tokenizer) -> None:
    parser = RequestParser(
        tokenizer, SamplingParams(), lambda: INFO, FrontendConfig(max_prompt_bytes=2**24), decoupled=True
    )
    with pytest.raises(InvalidArgumentError, match=r"text_input: .* more than 63 tokens.*max_model_len"):
        parser.parse(parser.read(InferenceRequest({"text_input": text("x" * 2**20)})))
    messages = json.dumps([{"role": "user", "content": "x" * 2**20}])
    with pytest.raises(InvalidArgumentError, match=r"messages: .* more than 63 tokens"):
        parser.parse(parser.read(InferenceRequest({"messages": text(messages)})))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("id", {"request_id": b"a\xff\xfeb"}),
        ("parameters", {"parameters": b'{"tenant": "a\xff"}'}),
        ("sequence_id", {"correlation_id": b"\xff"}),
    ],
)
def test_texts_of_triton_that_are_no_utf8_are_refused(
    tokenizer: Tokenizer, field: str, options: dict[str, Any]
) -> None:
    """HTTP lets any bytes through, and Triton's getters decode: the error left `execute`, where it races with
    the senders of other requests."""
    request = InferenceRequest(PROMPT, **options)
    parser = RequestParser(
        tokenizer, SamplingParams(), lambda: INFO, FrontendConfig(max_prompt_bytes=9), decoupled=True
    )
    with pytest.raises(InvalidArgumentError, match=f"{field}: invalid UTF-8 at byte [01]"):
        parser.read(request)


def test_a_cancellation_is_for_the_requests_of_its_tenant(tokenizer: Tokenizer) -> None:
    """Ids such as "1" collide: one tenant's cancellation ended another's request."""
    cancel = {"cancel": np.array([True])}
    assert parse(tokenizer, cancel, request_id="1").scheduling.tenant == ""
    for inputs, parameters in (
        ({"tenant": text("a")}, {}),
        ({}, {"tenant": "a"}),
        ({}, {"x-quire-tenant": "a"}),
    ):
        parsed = parse(tokenizer, {**cancel, **inputs}, parameters, request_id="1")
        assert parsed.cancel and parsed.scheduling.tenant == "a"
    with pytest.raises(InvalidArgumentError, match="tenant: must be given as a header"):
        parse(tokenizer, cancel, {"tenant": "a"}, request_id="1", limits=BEHIND_A_GATEWAY)


def test_health_may_be_asked_where_cache_commands_are_forbidden(tokenizer: Tokenizer) -> None:
    command = {"cache_control": text('{"command": "health"}')}
    assert parse(tokenizer, command, limits=BEHIND_A_GATEWAY).cache_control == Health()


def test_spans_are_pairs(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="image_spans: must hold pairs of numbers, got 3"):
        parse(tokenizer, {**PROMPT, "image_spans": np.array([1, 3, 5], np.int32)})


def test_images_that_begin_alike_have_different_hashes(tokenizer: Tokenizer) -> None:
    """A hash of an image's first row would give one image's answers to whoever asks about another."""
    rows = np.arange(3 * 8, dtype=np.float32).reshape(3, 8)
    inputs = {
        "input_ids": np.array([1, 2, 2, 2, 3], np.int32),
        "image_spans": np.array([[1, 3]], np.int32),
    }

    def hash_of(embeds: np.ndarray) -> str:
        (found,) = parse(tokenizer, {**inputs, "image_embeds": embeds}).embeds.hashes
        return found

    others = []
    for row, column in ((0, 0), (0, 7), (1, 0), (2, 7)):
        other = rows.copy()
        other[row, column] += 1
        others.append(hash_of(other))
    assert len({hash_of(rows), *others}) == 5
    assert hash_of(rows.copy()) == hash_of(rows)


def test_embeddings_are_copied_once_between_tensor_and_engine(tokenizer: Tokenizer) -> None:
    """Of the four copies that ensemble/README.md counts, the one that is ours: memory that Python allocates
    holds none, and what the engine maps is the very file that the frontend wrote."""
    info = msgspec.structs.replace(INFO, hidden_size=8 * 4096)
    rows = np.ones((40, info.hidden_size), np.float32)
    parser = RequestParser(
        tokenizer, SamplingParams(), lambda: info, FrontendConfig(max_embeds_bytes=2**30), decoupled=True
    )
    inputs = {
        "input_ids": np.arange(50, dtype=np.int32),
        "image_spans": np.array([[5, 40]], np.int32),
        "image_embeds": rows,
    }
    open_files = Path("/proc/self/fd")
    files_before = len(list(open_files.iterdir()))
    tracemalloc.start()
    parsed = parser.parse(parser.read(InferenceRequest(inputs)))
    opened = parsed.embeds.embeds.open()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows.nbytes // 10, f"{peak} bytes allocated for {rows.nbytes} bytes of rows"
    assert len(list(open_files.iterdir())) == files_before + 3, "one file, mapped by both"
    parsed.buffer.array[39, 7] = 77
    assert opened[39, 7] == 77 and rows[39, 7] == 1


def test_the_stop_strings_automaton_is_made_on_intake(tokenizer: Tokenizer) -> None:
    """On the responder's thread it held up every stream, for each choice again."""
    assert parse(tokenizer, PROMPT).stops is None
    stops = parse(tokenizer, PROMPT, {"stop": ["ab"], "n": 64}).stops
    processor = RequestProcessor("r", 2, SamplingParams(stop=("ab",), n=64), tokenizer.hf, stops)
    made = {id(choice._detokenizer._matcher._automaton) for choice in processor.choices}
    assert made == {id(stops)}
    alone = RequestProcessor("r", 2, SamplingParams(stop=("ab",), n=64), tokenizer.hf)
    assert len({id(choice._detokenizer._matcher._automaton) for choice in alone.choices}) == 1


def test_a_model_of_text_refuses_images_and_no_other_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "INFO", msgspec.structs.replace(INFO, accepts_image_embeds=False))
    rows, ids = np.ones((3, 8), np.float32), np.array([1, 2, 2, 2, 3], np.int32)
    spans = np.array([[1, 3]], np.int32)
    with pytest.raises(InvalidArgumentError, match=r"image_embeds: the model reads text only"):
        parse(None, {"input_ids": ids, "image_embeds": rows, "image_spans": spans})
    assert parse(None, {"prompt_embeds": rows}).embeds.spans == [(0, 3)]
    assert parse(None, {"input_ids": ids}).embeds is None


def test_only_tokens_of_images_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ids = np.ones((3, 8), np.float32), np.array([1, 2, 2, 2, 3], np.int32)
    image = {"input_ids": ids, "image_embeds": rows, "image_spans": np.array([[1, 3]], np.int32)}
    assert not parse(None, image).embeds.is_joint
    monkeypatch.setitem(globals(), "INFO", msgspec.structs.replace(INFO, has_joint_images=True))
    assert parse(None, image).embeds.is_joint
    assert not parse(None, {"prompt_embeds": rows}).embeds.is_joint


@pytest.mark.parametrize(("low", "high", "fits"), [(0, 63, True), (0, 64, False), (-1, 5, False)])
def test_positions_are_those_of_the_longest_sequence(
    low: int, high: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond it there are no rotations: on a device the look-up reads what lies behind the table."""
    monkeypatch.setitem(globals(), "INFO", msgspec.structs.replace(INFO, takes_position_ids=True))
    positions = np.array([[0, 1, low, 3], [0, 1, 2, 3], [0, 1, 2, high]], np.int32)
    inputs = {
        "input_ids": np.array([1, 2, 3, 4], np.int32),
        "image_embeds": np.ones((3, 8), np.float32),
        "image_spans": np.array([[1, 3]], np.int32),
        "position_ids": positions,
    }
    if fits:
        assert parse(None, inputs).embeds.position_ids == positions.tobytes()
        return
    with pytest.raises(InvalidArgumentError, match=r"position_ids: must be in \[0, 64\)"):
        parse(None, inputs)
