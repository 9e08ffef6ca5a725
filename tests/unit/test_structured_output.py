"""StructuredOutput: every form in which a request may state a grammar, and the limits."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.errors import InvalidArgumentError
from quire.request.sampling_params import (
    SamplingParams,
    StructuredOutput,
    check_limits,
    parse_sampling_params,
)
from quire.request.structured_output import (
    FIELDS,
    MAX_AFTER_LENGTH,
    MAX_ALTERNATIVE_LENGTH,
    MAX_ALTERNATIVES,
    MAX_ALTERNATIVES_LENGTH,
    MAX_GRAMMAR_LENGTH,
    MAX_REGEX_LENGTH,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG_TEXT = json.dumps(TAG, separators=(",", ":"))

SAME: list[tuple[StructuredOutput | None, list[tuple[str, Any]]]] = [
    (
        StructuredOutput(json=SCHEMA_TEXT),
        [
            ("structured_output", {"json": SCHEMA}),
            ("structured_output", {"json": json.dumps(SCHEMA, indent=2), "regex": None}),
            ("structured_output", json.dumps({"json": SCHEMA})),
            ("structured_outputs", {"json": SCHEMA, "disable_fallback": False, "whitespace_pattern": None}),
            ("guided_decoding", {"json": json.dumps(SCHEMA), "backend": None}),
            ("guided_json", SCHEMA),
            ("guided_json", json.dumps(SCHEMA)),
            (
                "response_format",
                {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            ),
        ],
    ),
    (
        StructuredOutput(json_object=True),
        [
            ("structured_output", {"json_object": True}),
            ("structured_output", '{"json_object": "true"}'),
            ("structured_outputs", {"json_object": True}),
            ("guided_json_object", "true"),
            ("response_format", {"type": "json_object"}),
            ("response_format", '{"type": "json_object"}'),
        ],
    ),
    (
        StructuredOutput(regex="a|b"),
        [
            ("structured_output", {"regex": "a|b"}),
            ("guided_regex", "a|b"),
            ("guided_decoding", {"regex": "a|b"}),
        ],
    ),
    (
        StructuredOutput(choice=("a", "b")),
        [
            ("structured_output", {"choice": ["a", "b", "a"]}),
            ("guided_choice", ["a", "b"]),
            ("guided_choice", '["a", "b"]'),
        ],
    ),
    (
        StructuredOutput(grammar='start: "a"'),
        [("structured_output", {"grammar": 'start: "a"'}), ("guided_grammar", 'start: "a"')],
    ),
    (
        StructuredOutput(structural_tag=TAG_TEXT),
        [
            ("structured_output", {"structural_tag": TAG}),
            ("structured_outputs", {"structural_tag": TAG_TEXT}),
            ("response_format", {"type": "structural_tag", **TAG}),
        ],
    ),
    (
        StructuredOutput(regex="a", after="</think>"),
        [("structured_output", {"regex": "a", "after": "</think>"})],
    ),
    (None, [("response_format", {"type": "text"}), ("guided_json_object", False)]),
]


@pytest.mark.parametrize(
    ("expected", "name", "value"), [(wanted, *form) for wanted, forms in SAME for form in forms]
)
def test_forms(expected: StructuredOutput | None, name: str, value: Any) -> None:
    params = parse_sampling_params({name: value})
    assert params.structured_output == expected
    check_limits(params)
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == params
    hash(params.structured_output)


REFUSED: list[tuple[str, Any, str]] = [
    ("structured_output", {}, "exactly one of json, .*, got none"),
    ("structured_output", {"json_object": False}, "got none"),
    ("structured_output", {"after": "x"}, "got none"),
    ("structured_output", {"regex": "a", "json_object": True}, "got json_object, regex"),
    ("structured_output", {"regexp": "a"}, "unknown key 'regexp'; known are json, "),
    ("structured_output", {"regex": ""}, "regex: must be non-empty text"),
    ("structured_output", {"regex": 5}, "regex: must be non-empty text, got int 5"),
    ("structured_output", {"regex": "\ud800"}, "regex: must not hold unpaired surrogates"),
    ("structured_output", {"regex": "a" * (MAX_REGEX_LENGTH + 1)}, "regex: at most 8192 characters"),
    ("structured_output", {"grammar": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "grammar: at most 131072 characters"),
    ("structured_output", {"json": {"a": "a" * MAX_GRAMMAR_LENGTH}}, "json: at most 131072 bytes"),
    ("structured_output", {"json": "{"}, "json: invalid JSON at line 1 column 2"),
    ("structured_output", {"json": True}, "json: must be a JSON object"),
    ("structured_output", {"json": {"a": {1, 2}}}, "json: must be a JSON object, got one that has no JSON"),
    ("structured_output", {"json": {"a": float("nan")}}, "json: invalid JSON: NaN"),
    ("structured_output", {"json": '{"a":' * 70 + "1" + "}" * 70}, "json: JSON nested too deeply"),
    ("structured_output", {"structural_tag": []}, "structural_tag: must be a JSON object"),
    ("structured_output", {"choice": []}, "choice: must be a list of one string or more"),
    ("structured_output", {"choice": [""]}, "choice: must be non-empty text"),
    ("structured_output", {"choice": "a"}, "choice: invalid JSON"),
    ("structured_output", {"choice": ["a"] * (MAX_ALTERNATIVES + 1)}, "choice: at most 1024 strings"),
    ("structured_output", {"choice": ["a" * (MAX_ALTERNATIVE_LENGTH + 1)]}, "choice: at most 4096 char"),
    (
        "structured_output",
        {"choice": ["a" * MAX_ALTERNATIVE_LENGTH] * (MAX_ALTERNATIVES_LENGTH // MAX_ALTERNATIVE_LENGTH + 1)},
        "choice: at most 65536 characters together",
    ),
    ("structured_output", {"regex": "a", "after": ""}, "after: must be non-empty text"),
    ("structured_output", {"regex": "a", "after": "x" * (MAX_AFTER_LENGTH + 1)}, "after: at most 256"),
    ("structured_outputs", {"json": {}, "whitespace_pattern": "x"}, "unknown key 'whitespace_pattern'"),
    ("guided_decoding", {"regex": "a", "backend": "outlines"}, "unknown key 'backend'"),
    ("guided_json", "[]", "must be a JSON object"),
    ("guided_regex", ["a"], "must be non-empty text"),
    ("guided_json_object", "perhaps", "must be a boolean"),
    ("response_format", "json_object", "invalid JSON"),
    ("response_format", {"type": "yaml"}, "type must be text, json_object, json_schema or structural_tag"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, "with an object in schema"),
    ("response_format", {}, "type must be"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED)
def test_refused_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        parse_sampling_params({name: value})
    assert caught.value.field == name
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", FIELDS)
def test_what_has_no_json_text_is_refused(name: str) -> None:
    circular: dict[str, Any] = {"json": {}}
    circular["json"]["self"] = circular
    with pytest.raises(InvalidArgumentError):
        parse_sampling_params({name: circular})


def test_one_grammar_per_place() -> None:
    with pytest.raises(InvalidArgumentError, match="must not be given beside structured_output") as caught:
        parse_sampling_params({"structured_output": {"regex": "a"}, "guided_regex": "a"})
    assert caught.value.field == "guided_regex"
    params = parse_sampling_params({"structured_output": {"regex": "a"}}, {"guided_regex": "b"})
    assert params.structured_output == StructuredOutput(regex="a"), "the first place wins"


@pytest.mark.parametrize(
    "value",
    [
        StructuredOutput(),
        StructuredOutput(regex="a", json_object=True),
        StructuredOutput(json="[]"),
        StructuredOutput(json='{"a" : 1}'),
        StructuredOutput(regex="a" * (MAX_REGEX_LENGTH + 1)),
        StructuredOutput(choice=("a", "a")),
        StructuredOutput(after="x"),
    ],
)
def test_the_engine_checks_once_more(value: StructuredOutput) -> None:
    for check in (check_limits, lambda params: parse_sampling_params({"structured_output": value})):
        with pytest.raises(InvalidArgumentError, match="structured_output"):
            check(SamplingParams(structured_output=value))
