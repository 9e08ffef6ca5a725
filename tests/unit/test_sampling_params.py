"""parse_sampling_params: every parameter, in every spelling a request may use."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.errors import InvalidArgumentError
from quire.frontend.bad_words import with_bad_words_ids
from quire.request.logits_processors import NamedProcessor
from quire.request.sampling_params import (
    ALIASES,
    MAX_BAD_WORDS,
    MAX_BEAM_WIDTH,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SAMPLING_FIELDS,
    SamplingParams,
    StructuredOutput,
    defaults_from_generation_config,
    parse_sampling_params,
)
from quire.request.structured_output import FIELDS as STRUCTURED_FIELDS
from quire.request.validation import check_choices
from tests.keys_page import GENERATION_DEFAULTS, GENERATION_WITHOUT_EFFECT

INT32 = 2**31 - 1
NAN, INF = float("nan"), float("inf")
BOOLEANS = [
    (True, True),
    (False, False),
    ("true", True),
    (" FALSE ", False),
    ("1", True),
    (0, False),
    (1, True),
]
NOT_BOOLEANS = ["yes", "", 2, -1, 1.0, [True], NAN]
NOT_INTEGERS = [
    "",
    "one",
    "1.5",
    "16.0",
    10**400,
    1.5,
    NAN,
    INF,
    True,
    False,
    [1],
    {},
    "1e3",
    b"1",
    "9" * 5000,
]
NOT_NUMBERS = ["", "hot", "1,5", "nan", NAN, True, [1.0], {}, b"1", INF, -INF, "inf", "1e999", 10**400]

# Accepted: raw value and what it becomes. Every number is also tried as text.
ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "thinking_budget": [(0, 0), ("9", 9), (INT32, INT32)],
    "dimensions": [(0, 0), ("9", 9), (INT32, INT32)],
    "max_tokens": [(1, 1), (INT32, INT32), (16.0, 16), (" 16 ", 16)],
    "min_tokens": [(0, 0), (7, 7)],
    "temperature": [(0, 0.0), (0.7, 0.7), (100, 100.0), ("7e-1", 0.7)],
    "top_k": [(0, 0), (-1, 0), (1, 1), (INT32, INT32)],
    "top_p": [(1, 1.0), (0, 1.0), (1e-9, 1e-9), (0.5, 0.5)],
    "min_p": [(0, 0.0), (1, 1.0), (0.05, 0.05)],
    "typical_p": [(1, 1.0), (0.2, 0.2)],
    "repetition_penalty": [(1, 1.0), (1e-3, 1e-3), (100, 100.0)],
    "presence_penalty": [(-2, -2.0), (2.0, 2.0), (0, 0.0)],
    "frequency_penalty": [(-2, -2.0), (2.0, 2.0), (0, 0.0)],
    "no_repeat_ngram_size": [(0, 0), (3, 3), (1024, 1024)],
    "logit_bias": [
        ({}, {}),
        ({"5": 1, "6": "-2.5"}, {5: 1.0, 6: -2.5}),
        ({7: -100, INT32: 100}, {7: -100.0, INT32: 100.0}),
        ('{"5": 1.5}', {5: 1.5}),
    ],
    "bad_words": [("x", ("x",)), (["a", "b c"], ("a", "b c")), ('["a"]', ('["a"]',)), ([], ())],
    "seed": [(0, 0), (MAX_SEED, MAX_SEED), (-1, MAX_SEED), (-(2**63), 2**63)],
    "stop": [
        ("\n", ("\n",)),
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ('["a", "b"]', ('["a", "b"]',)),
        ("[1]", ("[1]",)),
        ("[INST]", ("[INST]",)),
        (["[1]", "😀"], ("[1]", "😀")),
        ("[" * MAX_STOP_LENGTH, ("[" * MAX_STOP_LENGTH,)),
    ],
    "stop_token_ids": [
        (5, (5,)),
        ("5", (5,)),
        ([0, "7", INT32], (0, 7, INT32)),
        ("[1, 2]", (1, 2)),
        ([], ()),
    ],
    "include_stop_str_in_output": BOOLEANS,
    "ignore_eos": BOOLEANS,
    "skip_special_tokens": BOOLEANS,
    "logprobs": [(0, 0), (MAX_LOGPROBS, MAX_LOGPROBS)],
    "prompt_logprobs": [(0, 0), (MAX_LOGPROBS, MAX_LOGPROBS)],
    "logits_processors": [
        ([], ()),
        ('["a"]', (NamedProcessor("a"),)),
        ([{"name": "a", "args": {"b": 1}}], (NamedProcessor("a", '{"b": 1}'),)),
    ],
    "n": [(1, 1), (MAX_CHOICES, MAX_CHOICES)],
    "best_of": [(1, 1), (4.0, 4), (MAX_CHOICES, MAX_CHOICES)],
    "beam_width": [(1, 1), (MAX_BEAM_WIDTH, MAX_BEAM_WIDTH)],
    "length_penalty": [(0, 0.0), (-10, -10.0), (10.0, 10.0)],
    "early_stopping": [*BOOLEANS, ("never", None), (" Never ", None)],
    "structured_output": [
        ({"regex": "a+"}, StructuredOutput(regex="a+")),
        ('{"regex": "a+", "after": "</think>"}', StructuredOutput(regex="a+", after="</think>")),
    ],
}

REFUSED: dict[str, list[Any]] = {
    "thinking_budget": [*NOT_INTEGERS, -1, INT32 + 1],
    "dimensions": [*NOT_INTEGERS, -1, INT32 + 1],
    "max_tokens": [*NOT_INTEGERS, 0, -1, INT32 + 1],
    "min_tokens": [*NOT_INTEGERS, -1, INT32 + 1],
    "temperature": [*NOT_NUMBERS, -0.1, 100.1],
    "top_k": [*NOT_INTEGERS, -2, INT32 + 1],
    "top_p": [*NOT_NUMBERS, -0.1, 1.1],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "typical_p": [*NOT_NUMBERS, 0, -0.1, 1.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, -1, 100.5],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "no_repeat_ngram_size": [*NOT_INTEGERS, -1, 1025],
    "logit_bias": [
        5,
        "5",
        [5],
        "{",
        '{"5": {}}',
        "[" * 10,
        {"x": 1},
        {"-1": 1},
        {INT32 + 1: 1},
        {5: 100.1},
        {5: -101},
        {5: NAN},
        {5: None},
        {5: "x"},
        {True: 1.0},
        '{"5": ' * 5000,
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
    ],
    "bad_words": [5, "", [""], ["a", 5], {"a": 1}, ["a"] * (MAX_BAD_WORDS + 1), ["\ud800"]],
    "seed": [*NOT_INTEGERS, MAX_SEED + 1, -(2**63) - 1],
    "stop": [
        5,
        1.5,
        True,
        "",
        [""],
        ["a", None],
        {"a": 1},
        ["a"] * (MAX_STOP_STRINGS + 1),
        "x" * (MAX_STOP_LENGTH + 1),
        "[" * 100_000,
        "\udc00",
        b"x",
    ],
    "stop_token_ids": [
        "",
        "a",
        [1.5],
        [-1],
        [INT32 + 1],
        [True],
        True,
        {"1": 1},
        "[1",
        [[1]],
        list(range(MAX_STOP_TOKEN_IDS + 1)),
    ],
    "include_stop_str_in_output": NOT_BOOLEANS,
    "ignore_eos": NOT_BOOLEANS,
    "skip_special_tokens": NOT_BOOLEANS,
    "logprobs": [*NOT_INTEGERS, -1, MAX_LOGPROBS + 1],
    "prompt_logprobs": [*NOT_INTEGERS, -1, MAX_LOGPROBS + 1],
    "logits_processors": ["[", "a", {}, 5, [5], [{"args": {}}], [{"name": ""}], ["a"] * 9],
    "n": [*NOT_INTEGERS, 0, MAX_CHOICES + 1],
    "best_of": [*NOT_INTEGERS, 0, MAX_CHOICES + 1],
    "beam_width": [*NOT_INTEGERS, 0, MAX_BEAM_WIDTH + 1],
    "length_penalty": [*NOT_NUMBERS, -10.1, 10.1],
    "early_stopping": [*NOT_BOOLEANS, "always"],
    "structured_output": ["", "a+", 5, True, [], {}, "{}", b"{}"],
}


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{index}")
        for name, entries in table.items()
        for index, case in enumerate(entries)
    ]


def test_tables_cover_every_parameter() -> None:
    assert set(ACCEPTED) == set(REFUSED) == set(SAMPLING_FIELDS)
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(SAMPLING_FIELDS) == fields - {"bad_words_ids", "thinking", "pooling"}, (
        "what the frontend fills in is not a client's business"
    )


@pytest.mark.parametrize(("name", "case"), cases(ACCEPTED))
def test_accepted(name: str, case: tuple[Any, Any]) -> None:
    raw, expected = case
    spellings = [raw]
    if type(raw) is int or type(raw) is type(expected) is float:
        spellings.append(str(raw))
    for spelling in spellings:
        value = getattr(parse_sampling_params({name: spelling}), name)
        assert value == expected
        assert type(value) is type(expected)


@pytest.mark.parametrize(("name", "raw"), cases(REFUSED))
def test_refused_naming_the_parameter(name: str, raw: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_sampling_params({name: raw})
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: ")
    assert len(str(caught.value)) < 400, "a message must not echo a large input"


def test_refusal_of_a_range_names_the_limit() -> None:
    with pytest.raises(InvalidArgumentError, match=r"top_p: must be in \[0, 1\], got 1\.5"):
        parse_sampling_params({"top_p": "1.5"})
    with pytest.raises(InvalidArgumentError, match=r"logprobs: must be in \[0, 64\], got 65"):
        parse_sampling_params({"logprobs": 65})
    with pytest.raises(InvalidArgumentError, match="stop: at most 64 entries are allowed, got 65"):
        parse_sampling_params({"stop": ["x"] * 65})


@pytest.mark.parametrize("alias", [name for name in ALIASES if name not in STRUCTURED_FIELDS])
def test_aliases(alias: str) -> None:
    raw = "x" if alias == "stop_words" else 5
    field = ALIASES[alias]
    params = parse_sampling_params({alias: raw, "max_tokens": 5} if field == "min_tokens" else {alias: raw})
    assert getattr(params, field) == (("x",) if alias == "stop_words" else 5)
    with pytest.raises(InvalidArgumentError) as caught:
        parse_sampling_params({alias: {}})
    assert caught.value.field == alias, "the error names what the client wrote"


@pytest.mark.parametrize("name", ["temprature", "bad_words_ids", "best-of", "", "TEMPERATURE"])
def test_unknown_names_are_refused_and_the_known_listed(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"unknown parameter; known are max_tokens, .*temperature"):
        parse_sampling_params({name: 1})
    with pytest.raises(InvalidArgumentError):
        parse_sampling_params({"temperature": 1.0}, {name: None})


def test_first_source_wins_and_all_are_checked() -> None:
    tensors, text, parameters = (
        {"temperature": 0.5},
        {"temperature": 0.9, "top_k": 3},
        {"top_k": 9, "seed": "4"},
    )
    params = parse_sampling_params(tensors, text, parameters)
    assert (params.temperature, params.top_k, params.seed) == (0.5, 3, 4)
    with pytest.raises(InvalidArgumentError, match="top_k"):
        parse_sampling_params(tensors, text, {"top_k": "many"})
    assert parse_sampling_params({"max_tokens": 3}, {"max_new_tokens": 9}).max_tokens == 3


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"n": 3, "best_of": 2}, "best_of", r"at least n \(3\), got 2"),
        ({"n": 3, "beam_width": 2}, "n", r"must not exceed beam_width \(2\), got 3"),
        ({"best_of": 2, "beam_width": 2}, "best_of", "must not be given with beam_width"),
        ({"beam_width": 2, "temperature": 0.5}, "beam_width", "temperature must be 0"),
        ({"beam_width": 2, "top_k": 5}, "beam_width", "temperature must be 0"),
    ],
)
def test_choices_that_exclude_each_other(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        parse_sampling_params(given)
    assert caught.value.field == field


def test_choices() -> None:
    one = parse_sampling_params({"n": 1})
    assert (one.num_sequences, one.is_ranked) == (1, False)
    several = parse_sampling_params({"n": 3})
    assert (several.num_sequences, several.is_ranked) == (3, False)
    same = parse_sampling_params({"n": 3, "best_of": 3})
    assert (same.num_sequences, same.is_ranked) == (3, False), "nothing to choose among"
    ranked = parse_sampling_params({"n": 2, "best_of": 5})
    assert (ranked.num_sequences, ranked.is_ranked) == (5, True)
    beams = parse_sampling_params({"n": 2, "beam_width": 4}, defaults=SamplingParams(temperature=0.7))
    assert (beams.num_sequences, beams.is_ranked) == (4, True)
    assert beams.is_greedy, "what a checkpoint samples with by default is no reason to refuse beams"


@pytest.mark.parametrize(
    ("given", "field"), [({"n": 5}, "n"), ({"best_of": 5}, "best_of"), ({"beam_width": 5}, "beam_width")]
)
def test_more_sequences_than_a_step_has_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    params = parse_sampling_params(given)
    check_choices(params, 5)
    with pytest.raises(InvalidArgumentError, match="at most 4") as caught:
        check_choices(params, 4)
    assert caught.value.field == field


def test_none_means_not_given() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20)
    assert parse_sampling_params(dict.fromkeys(SAMPLING_FIELDS), defaults=defaults) == defaults
    assert parse_sampling_params({"top_k": None}, {"top_k": 4}).top_k == 4


def test_no_parameters_is_greedy() -> None:
    assert parse_sampling_params() == SamplingParams()
    assert parse_sampling_params().is_greedy


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({"top_p": 0.9}, 1.0),
        ({"top_k": 50}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"typical_p": 0.5}, 1.0),
        ({"top_k": 1}, 0.0),
        ({"top_k": -1}, 0.0),
        ({"top_p": 1.0, "top_k": 0, "min_p": 0, "typical_p": 1}, 0.0),
        ({"top_p": 0.9, "temperature": 0}, 0.0),
        ({"seed": 5}, 0.0),
        ({"repetition_penalty": 1.2}, 0.0),
    ],
)
def test_shaping_the_distribution_means_sampling(given: dict[str, Any], temperature: float) -> None:
    assert parse_sampling_params(given).temperature == temperature


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidArgumentError, match=r"min_tokens: must not exceed max_tokens \(5\), got 6"):
        parse_sampling_params({"min_tokens": 6, "max_tokens": 5})
    assert parse_sampling_params({"min_tokens": 5, "max_tokens": 5}).min_tokens == 5


def test_default_min_tokens_gives_way_to_the_requests_max_tokens() -> None:
    """Regression: a checkpoint with min_new_tokens refused shorter requests, naming what they never said."""
    defaults = SamplingParams(min_tokens=10)
    assert parse_sampling_params({"max_tokens": 3}, defaults=defaults).min_tokens == 3


def test_params_survive_the_wire() -> None:
    """What crosses to the engine's process is equal on the other side."""
    params = parse_sampling_params(
        {
            name: entries[-1][0]
            for name, entries in ACCEPTED.items()
            if name not in ("max_tokens", "min_tokens", "beam_width")
        }
    )
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


@pytest.mark.row("A10", clauses=("defaults", "override"))
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0)),
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
                "min_p": None,
                "typical_p": 0.9,
            },
            SamplingParams(temperature=0.6, top_k=20, top_p=0.95, typical_p=0.9),
        ),
        (
            {
                "repetition_penalty": 1.05,
                "no_repeat_ngram_size": 3,
                "max_new_tokens": 2048,
                "min_new_tokens": 2,
            },
            SamplingParams(repetition_penalty=1.05, no_repeat_ngram_size=3, max_tokens=2048, min_tokens=2),
        ),
        ({"eos_token_id": [2, 7], "pad_token_id": 0, "transformers_version": "5"}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=0)),  # transformers has 50
        # These were not read: a checkpoint's markers that transformers never lets it say came out.
        (
            {"suppress_tokens": [5, 6], "bad_words_ids": [[7], [8, 9]], "stop_strings": ["END"]},
            SamplingParams(bad_words_ids=((5,), (6,), (7,), (8, 9)), stop=("END",)),
        ),
    ],
)
def test_generation_config_defaults(config: dict[str, Any], expected: SamplingParams) -> None:
    config = json.loads(json.dumps(config))
    defaults = defaults_from_generation_config(config)
    assert defaults == expected
    request = {"temperature": 0.25, "repetition_penalty": 1.5, "max_tokens": 9}
    params = parse_sampling_params(request, defaults=defaults)
    assert (params.temperature, params.repetition_penalty, params.max_tokens) == (0.25, 1.5, 9)
    assert (params.top_k, params.top_p, params.min_tokens) == (
        defaults.top_k,
        defaults.top_p,
        defaults.min_tokens,
    )


def test_every_key_of_generation_config_is_used_or_named(caplog: pytest.LogCaptureFixture) -> None:
    """Keys with which transformers chooses other tokens were passed over in silence: of all that its class
    knows, each is a default here, or named in a warning, or of no effect on what is generated."""
    from transformers import GenerationConfig

    for key in GenerationConfig().to_dict().keys() - GENERATION_DEFAULTS - GENERATION_WITHOUT_EFFECT:
        caplog.clear()
        with caplog.at_level("WARNING", "quire"):
            defaults_from_generation_config({key: 0.0})
            assert not caplog.records
            defaults_from_generation_config({key: 4})
        assert [record.getMessage() for record in caplog.records] == [
            f"generation_config.json: {key}: not supported, and not used"
        ]


def test_a_requests_bad_words_come_beside_those_of_the_checkpoint() -> None:
    class Lengths:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(text)]

    params = SamplingParams(bad_words=("x",), bad_words_ids=((5,),))
    assert with_bad_words_ids(params, Lengths()).bad_words_ids == ((5,), (1,), (2,))
