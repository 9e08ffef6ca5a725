"""What other backends call things means the same here; what we cannot do is refused by its name."""

from __future__ import annotations

import functools
import json
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.config import FrontendConfig
from quire.errors import ConfigError, InvalidArgumentError
from quire.frontend.chat.formats import ChatParsing
from quire.request.sampling_params import SamplingParams
from quire.triton import config_completion
from quire.triton.request_parser import RequestParser
from quire_ensemble.generator_schema import INPUTS, MAX_PROMPTS, SAMPLING_INPUTS, inputs_of, outputs_of
from quire_ensemble.tokenizer import Tokenizer
from tests.fault.fuzz.calls import DTYPES, VALID
from tests.fixtures.fake_pb_utils import InferenceRequest
from tests.triton import test_request_parser
from tests.triton.test_request_parser import INFO, PROMPT, parse, text, tokenizer  # noqa: F401

ANY_GRAMMAR: Any = SimpleNamespace(check=lambda structured: None)
ALL = [spec.name for spec in outputs_of(batched=True)]
SPECS = {spec.name: spec for spec in inputs_of(batched=True)}


def array(name: str, value: Any) -> np.ndarray:
    """The tensor of an input, with its declared type."""
    spec = SPECS[name] if name != "stop" else next(one for one in INPUTS if one.name == name)
    encode = np.vectorize(lambda one: one.encode() if isinstance(one, str) else one, otypes=[object])
    values = np.array(value if isinstance(value, list) else [value], dtype=object)
    return (encode(values) if values.size else values).astype(DTYPES[spec.datatype])


def batch(
    tokenizer: Any,  # noqa: F811
    inputs: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    *,
    requested: list[str] | None = None,
    decoupled: bool = True,
    dialect: str = "quire",
) -> Any:
    """Parses for a model with a batch dimension; values are rows, the arrays of which must have one."""
    parser = RequestParser(
        tokenizer,
        SamplingParams(),
        lambda: INFO,
        FrontendConfig(dialect=dialect),  # type: ignore[arg-type]
        decoupled=decoupled,
        batched=True,
        grammars=ANY_GRAMMAR,
    )
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.array(value, DTYPES[SPECS[name].datatype])
        for name, value in inputs.items()
    }
    request = InferenceRequest(
        arrays, parameters=json.dumps(parameters or {}), request_id="7", requested=requested or ALL
    )
    return parser.parse(parser.read(request))


def test_rows_without_a_width_are_no_failure_of_ours(tokenizer: Tokenizer) -> None:  # noqa: F811
    """They were UNAVAILABLE, as "cannot reshape array of size 0"."""
    given = {"input_ids": [[5, 6, 7, 8]], "image_embeds": np.zeros((1, 3, 0), np.float32)}
    assert batch(tokenizer, given).embeds is None
    with pytest.raises(InvalidArgumentError, match="image_spans"):
        batch(tokenizer, {**given, "image_spans": [[[0, 3]]]})


IDS = {"input_ids": [[5, 6, 7, 8]], "input_lengths": [[3]], "request_output_len": [[9]]}
TEXT = {"text_input": [[b"hello"]], "max_tokens": [[9]]}


@pytest.mark.row("A6")
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"runtime_top_k": [[3]]}, {"top_k": 3}),
        ({"runtime_top_p": [[0.5]]}, {"top_p": 0.5}),
        ({"runtime_top_p": [[0.0]]}, {"top_p": 1.0}),
        ({"len_penalty": [[0.5]], "beam_width": [[3]]}, {"length_penalty": 0.5, "beam_width": 3, "n": 3}),
        ({"min_length": [[2]]}, {"min_tokens": 2}),
        ({"random_seed": [[11]]}, {"seed": 11}),
        ({"num_return_sequences": [[4]]}, {"n": 4}),
        ({"end_id": [[-1]], "pad_id": [[2]]}, {"ignore_eos": True, "stop_token_ids": ()}),
        ({"end_id": [[42]]}, {"ignore_eos": True, "stop_token_ids": (42,)}),
        ({"return_log_probs": [[True]]}, {"logprobs": 0}),
        ({"stop_words_list": [[[7, 9, -1], [1, 2, -1]]]}, {"stop_token_ids": (7, 9)}),
        ({"bad_words_list": [[[7, 9, 8], [1, 3, -1]]]}, {"bad_words_ids": ((7,), (9, 8))}),
        ({"embedding_bias": [[0.0, 0.0, 1.5] + [0.0] * 597]}, {"logit_bias": {2: 1.5}}),
        ({"sampling_param_temperature": [[0.5]], "sampling_param_top_k": [[3]]}, {"temperature": 0.5}),
        ({"sampling_param_stop": [[b"ab", b""]], "sampling_param_seed": [[3]]}, {"stop": ("ab",), "seed": 3}),
        ({"stop_words": [[b""]], "bad_words": [[b""]]}, {"stop": (), "bad_words": ()}),
        (
            {"stop_words": [[b"ab", b"c"]], "bad_words": [[b"fox"]]},
            {"stop": ("ab", "c"), "bad_words": ("fox",)},
        ),
        ({"return_context_logits": [[False]], "num_draft_tokens": [[0]]}, {}),
        ({"beam_search_diversity_rate": [[0.0]], "runtime_top_p_decay": [[1.0]]}, {}),
    ],
    ids=str,
)
def test_tensorrt_llms_names_mean_what_they_mean_there(
    tokenizer: Tokenizer,  # noqa: F811
    inputs: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    for prompt in (IDS, TEXT):
        params = batch(tokenizer, {**prompt, **inputs}).params
        assert params.max_tokens == 9
        assert {name: getattr(params, name) for name in expected} == expected
    assert batch(tokenizer, {**IDS, **inputs}).prompt_token_ids == [5, 6, 7]


@pytest.mark.row("A6")
@pytest.mark.parametrize(("value", "expected"), [(-1, ()), (0, (0,)), (42, (42,)), (None, None)])
def test_the_end_as_a_request_parameter(
    tokenizer: Tokenizer,  # noqa: F811
    value: int | None,
    expected: tuple[int, ...] | None,
) -> None:
    params = batch(tokenizer, IDS, {"end_id": value}).params
    if expected is None:
        assert not params.ignore_eos
    else:
        assert params.ignore_eos and params.stop_token_ids == expected


@pytest.mark.row("A6")
def test_words_of_several_tokens_and_their_bias(tokenizer: Tokenizer) -> None:  # noqa: F811
    ids = tokenizer.hf.encode("hello there", add_special_tokens=False)
    assert len(ids) > 1
    words = np.array([[ids, [len(ids), *[-1] * (len(ids) - 1)]]], np.int32)
    assert batch(tokenizer, {**IDS, "stop_words_list": words}).params.stop == (tokenizer.hf.decode(ids),)
    biased = {"embedding_bias_words": [[b"hello there", b"z"]], "embedding_bias_weights": [[2.0, -3.0]]}
    bias = batch(tokenizer, {**IDS, **biased}).params.logit_bias
    assert all(bias[token_id] == 2.0 for token_id in ids) and -3.0 in bias.values()


@pytest.mark.row("A6")
def test_control_in_tensorrt_llms_words(tokenizer: Tokenizer) -> None:  # noqa: F811
    assert batch(tokenizer, {**IDS, "streaming": [[True]]}).stream
    assert batch(tokenizer, {**TEXT, "stream": [[True]]}).stream
    echo = {"sampling_param_exclude_input_from_output": [[False]]}
    assert batch(tokenizer, {**TEXT, **echo}).echo == "hello"
    assert (
        batch(tokenizer, TEXT).echo == "" and batch(tokenizer, TEXT, dialect="tensorrt_llm").echo == "hello"
    )
    stop = batch(tokenizer, {"stop": [[True]], "input_ids": [[0]], "input_lengths": [[0]]})
    assert stop.cancel and stop.external_id == "7"
    assert not batch(tokenizer, {**TEXT, "stop": [[False]]}).cancel
    found = batch(tokenizer, {**TEXT, "return_log_probs": [[True]]})
    assert {"cum_log_probs", "output_log_probs", "batch_index", "sequence_index"} <= found.outputs
    guide = {"guided_decoding_guide_type": [[b"regex"]], "guided_decoding_guide": [[b"[0-9]+"]]}
    assert batch(tokenizer, {**TEXT, **guide}).params.structured_output.regex == "[0-9]+"


@pytest.mark.row("A21")
def test_stop_as_a_request_parameter_or_a_flag_cancels_everywhere(tokenizer: Tokenizer) -> None:  # noqa: F811
    assert parse(tokenizer, {}, {"stop": True}, request_id="7").cancel
    assert parse(tokenizer, {"stop": np.array([True])}, request_id="7").cancel
    assert not parse(tokenizer, PROMPT, {"stop": False}).cancel
    assert parse(tokenizer, PROMPT, {"stop": "true"}).params.stop == ("true",)
    with pytest.raises(InvalidArgumentError, match="cancel: needs the id"):
        parse(tokenizer, {}, {"stop": True})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"return_context_logits": [[True]]}, "return_context_logits: is not supported but for False"),
        ({"num_draft_tokens": [[3]]}, "num_draft_tokens: is not supported but for 0, got '3'"),
        ({"request_output_len": [[0]]}, r"request_output_len: must be in \[1"),
        ({"runtime_top_p": [[2.0]]}, r"runtime_top_p: must be in \[0, 1\]"),
        ({"end_id": [[600]]}, "end_id: token id 600 is outside"),
        ({"input_lengths": [[5]]}, r"input_lengths: must be in \[1, 4\], got 5"),
        ({"stop_words_list": [[[1, 2], [2, 1]]]}, "stop_words_list: ends of words must ascend"),
        ({"bad_words_list": [[[1], [3]]]}, "bad_words_list: ends of words must ascend"),
        ({"stop_words_list": [[[1, 999], [2, -1]]]}, "stop_words_list: token id 999"),
        ({"stop_words_list": [[[999, 2], [1, -1]]]}, "stop_words_list: token id 999"),
        ({"stop_words_list": [[[-5, 2], [1, 2]]], "end_id": [[3]]}, "stop_words_list: token id -5"),
        ({"stop_words_list": [[[5] * 300, [*range(1, 301)]]]}, "stop_words_list: at most 256"),
        (
            {"stop_words_list": [[[5, 6] * 65, [*range(2, 132, 2)] + [-1] * 65]]},
            "stop_words_list: at most 64",
        ),
        ({"bad_words_list": [[[1, 999], [2, -1]]]}, "bad_words_list: token id 999"),
        (
            {"guided_decoding_guide_type": [[b"regex"]], "guided_decoding_guide": [[b""]]},
            "guided_decoding_guide: regex: must be non-empty",
        ),
        ({"embedding_bias": [[1000.0]]}, r"embedding_bias: must be in \[-100, 100\], got 1000"),
        ({"embedding_bias_words": [[b"a"]]}, "embedding_bias_weights: 0 for 1"),
        ({"guided_decoding_guide_type": [[b"x"]]}, "guided_decoding_guide_type: must be one of json"),
        ({"guided_decoding_guide_type": [[b"regex"]]}, "guided_decoding_guide: must be given"),
        ({"beam_width": [[33]]}, "beam_width: must be in"),
        ({"max_tokens": [[9]]}, "request_output_len: is the same as max_tokens, which is given as well"),
        (
            {"sampling_param_max_tokens": [[9]]},
            "sampling_param_max_tokens: is the same as request_output_len",
        ),
        ({"end_id": [[-2]]}, r"end_id: must be in \[-1"),
        ({"guided_decoding_guide": [[b"x"]]}, "guided_decoding_guide: needs a guided_decoding_guide_type"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_the_name_the_client_used(
    tokenizer: Tokenizer,  # noqa: F811
    inputs: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        batch(tokenizer, {**IDS, **inputs})


@pytest.mark.row("A18")
def test_rows_of_a_batch_have_parameters_of_their_own(tokenizer: Tokenizer) -> None:  # noqa: F811
    parsed = batch(
        tokenizer,
        {
            "text_input": [[b"a"], [b"hello there"]],
            "max_tokens": [[3], [5]],
            "seed": [[1], [2]],
            "n": [[1], [2]],
        },
    )
    rows = [parsed.of_item(item) for item in range(2)]
    assert [row.params.max_tokens for row in rows] == [3, 5] and [row.params.n for row in rows] == [1, 2]
    assert [row.prompt_token_ids for row in rows] == [tokenizer.encode("a"), tokenizer.encode("hello there")]
    padded = {
        "input_ids": [[5, 6, 0], [7, 8, 9]],
        "input_lengths": [[2], [3]],
        "request_output_len": [[2], [2]],
    }
    both = batch(tokenizer, padded)
    assert [both.of_item(item).prompt_token_ids for item in range(2)] == [[5, 6], [7, 8, 9]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": [[b"a"], [b"b"]], "max_tokens": [[3], [0]]}, r"max_tokens\[1\]: must be in"),
        ({"text_input": [[b"a"], [b"\xff"]]}, r"text_input\[1\]: .*UTF-8"),
        ({"text_input": [[b"a"], [b"b"]], "max_tokens": [[3]]}, "inputs: must share a batch"),
        (
            {"text_input": [[b"a"], [b"b"]], "stream": [[True], [False]]},
            "stream: must be the same in all rows",
        ),
        ({"text_input": [[b"a", b"b"], [b"c", b"d"]]}, "text_input: rows of a batch must hold one prompt"),
        ({"text_input": [[b"a"]] * (MAX_PROMPTS + 1)}, "text_input: a batch of at most 256"),
    ],
    ids=["row", "utf-8", "sizes", "stream", "several", "many"],
)
def test_what_is_wrong_with_a_batch(tokenizer: Tokenizer, inputs: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(InvalidArgumentError, match=message):
        batch(tokenizer, inputs)


def test_a_model_that_answers_once_takes_one_row(tokenizer: Tokenizer) -> None:  # noqa: F811
    assert batch(tokenizer, TEXT, decoupled=False).params.max_tokens == 9
    with pytest.raises(InvalidArgumentError, match="batch of 1 to 1"):
        batch(tokenizer, {"text_input": [[b"a"], [b"b"]]}, decoupled=False)


@pytest.mark.row("A5")
def test_vllm_backends_json_with_values_as_text(tokenizer: Tokenizer) -> None:  # noqa: F811
    stated = {
        "temperature": "0.1",
        "top_p": "0.95",
        "max_tokens": "20",
        "ignore_eos": "False",
        "n": "2",
        "detokenize": True,
        "spaces_between_special_tokens": "True",
        "lora_name": None,
    }
    params = parse(tokenizer, {**PROMPT, "sampling_parameters": text(json.dumps(stated))}).params
    assert (params.temperature, params.top_p, params.max_tokens, params.n) == (0.1, 0.95, 20, 2)
    for name, value in (("detokenize", False), ("allowed_token_ids", [1])):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: is not supported"):
            parse(tokenizer, {**PROMPT, "sampling_parameters": text(json.dumps({name: value}))})


@pytest.mark.row("A5")
def test_in_vllms_dialect_the_prompt_precedes_a_whole_answer(tokenizer: Tokenizer) -> None:  # noqa: F811
    prompt, limits = {"text_input": text("hello")}, {"dialect": "vllm"}
    assert parse(tokenizer, prompt, limits=limits).echo == "hello"
    assert parse(tokenizer, prompt, {"stream": True}, limits=limits).echo == ""
    assert parse(tokenizer, prompt, {"exclude_input_in_output": True}, limits=limits).echo == ""
    assert parse(tokenizer, prompt).echo == ""
    with pytest.raises(InvalidArgumentError) as refused:
        parse(tokenizer, prompt, {"stream": True, "exclude_input_in_output": False}, limits=limits)
    assert refused.value.field == "exclude_input_in_output"
    # enabled_stream_test.py of vllm_backend compares the whole text.
    assert str(refused.value) == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )
    lean = parse(tokenizer, prompt, limits=limits)
    assert (lean.params.max_tokens, lean.params.temperature) == (16, 1.0)
    assert lean.outputs == lean.final_outputs == {"text_output"}
    asked = parse(tokenizer, prompt, {"return_finish_reason": True}, limits=limits)
    assert asked.outputs == {"text_output", "finish_reason"}


@pytest.mark.row("A8", clauses=("ways",))
@pytest.mark.parametrize("name", [spec.name for spec in SAMPLING_INPUTS])
def test_every_sampling_parameter_in_every_form(
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    # Whether this model can follow them is another matter.
    made = functools.partial(RequestParser, grammars=ANY_GRAMMAR)
    monkeypatch.setattr(test_request_parser, "RequestParser", made)
    monkeypatch.setattr(ChatParsing, "with_thinking", lambda _, params, chat: params)
    seen = []
    prompt = {**PROMPT, "return_embedding": np.array([True])} if name == "dimensions" else PROMPT
    for seed in range(8):
        value = VALID[name](Random(seed))
        as_json = json.loads(value) if name == "logit_bias" else value
        scalar = value if isinstance(value, bool | int | float | str) else json.dumps(value)
        found = [
            parse(tokenizer, {**prompt, name: array(name, value)}).params,
            parse(tokenizer, {**prompt, "sampling_parameters": text(json.dumps({name: as_json}))}).params,
            parse(tokenizer, prompt, {name: scalar}).params,
        ]
        typed, *others = (getattr(one, name) for one in found)
        for other in others:
            assert other == pytest.approx(typed, rel=1e-6) if isinstance(typed, float) else other == typed
        seen.append(repr(typed))
    assert len(set(seen)) > 1, "values that differ, or nothing is shown"


ILL = {
    "TYPE_BOOL": "maybe",
    "TYPE_INT32": "1.5x",
    "TYPE_FP32": "warm",
    "TYPE_UINT64": "-x",
    "TYPE_STRING": 1.5,
}


@pytest.mark.row("A8", clauses=("naming",))
@pytest.mark.parametrize("spec", SAMPLING_INPUTS, ids=lambda spec: spec.name)
def test_an_ill_typed_or_unknown_parameter_is_named(tokenizer: Tokenizer, spec: Any) -> None:  # noqa: F811
    value = ILL[spec.datatype] if spec.name != "stop_token_ids" else "x"
    for inputs, parameters in (
        ({"sampling_parameters": text(json.dumps({spec.name: value}))}, {}),
        ({}, {spec.name: value}),
        ({"sampling_parameters": text(json.dumps({spec.name: {"a": {}}}))}, {}),
    ):
        with pytest.raises(InvalidArgumentError) as error:
            parse(tokenizer, {**PROMPT, **inputs}, parameters)
        assert error.value.field == spec.name and error.value.code == "INVALID_ARG"
    for source in ({"sampling_parameters": text(json.dumps({f"{spec.name}_x": 1}))},):
        with pytest.raises(InvalidArgumentError, match=f"^{spec.name}_x: unknown parameter"):
            parse(tokenizer, {**PROMPT, **source})
    with pytest.raises(InvalidArgumentError, match=f"^{spec.name}_x: unknown parameter"):
        parse(tokenizer, PROMPT, {f"{spec.name}_x": 1})


class Config:
    """What Triton's auto-complete gives a model."""

    def __init__(self, **given: Any) -> None:
        self.given, self.inputs, self.outputs, self.size = given, [], [], -1

    def as_dict(self) -> dict[str, Any]:
        return self.given

    def add_input(self, spec: dict[str, Any]) -> None:
        self.inputs.append(spec)

    def add_output(self, spec: dict[str, Any]) -> None:
        self.outputs.append(spec)

    def set_max_batch_size(self, size: int) -> None:
        self.size = size

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        pass


@pytest.mark.row("A6")
def test_a_model_with_a_batch_dimension_declares_tensorrt_llms_names() -> None:
    config = config_completion.complete(Config(max_batch_size=64))
    declared = {spec["name"]: spec for spec in config.inputs}
    assert config.size == 64 and declared["stop"]["data_type"] == "TYPE_BOOL"
    assert {"request_output_len", "stop_words", "sampling_param_seed", "text_input"} <= declared.keys()
    assert len(declared) == len(config.inputs)
    assert {spec["name"]: spec["dims"] for spec in config.outputs}["output_ids"] == [-1, -1]
    plain = config_completion.complete(Config())
    assert plain.size == 0 and {spec["name"] for spec in plain.inputs} == {spec.name for spec in INPUTS}
    own = config_completion.complete(Config(input=[{"name": "stop", "data_type": "TYPE_BOOL", "dims": [1]}]))
    assert "stop" not in {spec["name"] for spec in own.inputs}
    with pytest.raises(ConfigError, match="max_batch_size must be at most 256"):
        config_completion.complete(Config(max_batch_size=257))


def test_a_grammar_is_refused_by_the_name_it_came_by(tokenizer: Tokenizer) -> None:  # noqa: F811
    for stated in ({"guided_regex": "a+"}, {"response_format": {"type": "json_object"}}):
        for given in ({"sampling_parameters": text(json.dumps(stated))}, {}):
            with pytest.raises(InvalidArgumentError, match=f"{next(iter(stated))}: needs a tokenizer"):
                parse(
                    tokenizer,
                    {**PROMPT, **given},
                    {} if given else {k: json.dumps(v) for k, v in stated.items()},
                )
