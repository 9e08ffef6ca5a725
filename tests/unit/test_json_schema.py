"""Schemas as llguidance is made to read them: what it lets through holds for the client's own."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from quire.errors import InvalidArgumentError
from quire.grammar import Vocabulary
from quire.json_schema import for_llguidance
from quire.request.structured_output import parse_structured_output
from tests.fixtures.checkpoints import EOS_TOKEN_IDS, VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Vocabulary(path, VOCAB_SIZE, frozenset(EOS_TOKEN_IDS))


def taken(vocabulary: Vocabulary, schema: dict[str, Any], texts: list[str]) -> list[str]:
    """Those of the texts that may be the whole output."""
    stated = parse_structured_output("structured_output", {"json": schema})
    assert stated is not None
    compiled, found = vocabulary.compile(stated), []
    for text in texts:
        matcher, ids = compiled.deep_copy(), vocabulary.tokenizer.tokenize_str(text)
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            found.append(text)
    return found


BOUNDS = [-1000, -10, -1.5, -1, -0.5, -0.05, 0, 0.05, 0.5, 1, 1.5, 2, 9.5, 10, 10.5, 100, 1_000_000]
NUMBERS = [str(bound) for bound in BOUNDS] + [
    "-0",
    "0.0",
    "1.0",
    "0.3",
    "-0.3",
    "1.2",
    "10.2",
    "9.99",
    "-0.0001",
]


@pytest.mark.parametrize("low", [None, *BOUNDS])
def test_bounds_of_numbers_hold(low: float | None, vocabulary: Vocabulary) -> None:
    """Above 0 and up to 0.5 there was 0: a whole bound that is excluded was let through where the other one
    is less than 1 away."""
    for high, low_key, high_key in itertools.product(
        [None, *BOUNDS], ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    ):
        if low is not None and high is not None and low >= high:
            continue
        bounds = {low_key: low, high_key: high}
        schema = {"type": "number", **{key: value for key, value in bounds.items() if value is not None}}
        right = [text for text in NUMBERS if is_valid(Decimal(text), schema)]
        found = taken(vocabulary, schema, NUMBERS)
        if len(schema) == 3:
            apart = {"type": "number", "allOf": [{low_key: low}, {high_key: high}]}
            assert taken(vocabulary, apart, NUMBERS) == found
        assert set(found) <= set(right), schema
        # How a zero or a trailing one is written is llguidance's to choose.
        assert {text for text in right if text.strip("-0.") and not text.endswith(".0")} <= set(found), schema


_DRAFT = jsonschema.Draft202012Validator
EXACT = jsonschema.validators.extend(
    _DRAFT,
    type_checker=_DRAFT.TYPE_CHECKER.redefine(
        "number", lambda _, one: isinstance(one, Decimal | int | float)
    ),
)
"""Knows decimal numbers."""


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    return bool(EXACT(json.loads(json.dumps(schema), parse_float=Decimal)).is_valid(value))


BIG = 2**53


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"minimum": BIG + 1, "maximum": BIG + 3}, [BIG + 2], [BIG, BIG + 4]),
        ({"exclusiveMinimum": BIG, "exclusiveMaximum": BIG + 4}, [BIG + 2], [BIG, BIG + 4]),
        ({"exclusiveMinimum": BIG + 1, "maximum": BIG + 4}, [BIG + 2, BIG + 3], [BIG, BIG + 1, BIG + 5]),
        ({"exclusiveMinimum": -BIG - 5, "minimum": -BIG - 2}, [-BIG - 2, 0], [-BIG - 3]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, 5, -(2**62)], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [2**64, -1]),
        ({"minimum": -(10**400), "exclusiveMaximum": 10**400}, [0, 2**62], [10**400]),
        ({"type": "number", "minimum": -1e300, "maximum": 1e22}, [0, 2**62], [10**23]),
        ({"type": "number", "maximum": 2**62}, [0, 2**62 - 1024], [2**62 + 1, 2**62 + 90]),
        ({"type": "number", "exclusiveMinimum": -(2**62)}, [-(2**62) + 1024], [-(2**62), -(2**62) - 90]),
        ({"exclusiveMinimum": 10**15}, [10**15 + 1, 10**15 + 2], [10**15]),
        ({"exclusiveMaximum": -(10**15) - 7}, [-(10**15) - 8, -(10**15) - 99], [-(10**15) - 7, 0]),
    ],
)
def test_bounds_beyond_doubles_hold(
    schema: dict[str, Any], right: list[int], wrong: list[int], vocabulary: Vocabulary
) -> None:
    """They were rounded, so that numbers outside came out; the range may lose some at its ends."""
    texts = [str(one) for one in (*right, *wrong)]
    assert taken(vocabulary, {"type": "integer"} | schema, texts) == [str(one) for one in right]


@pytest.mark.parametrize("value", [BIG, BIG + 2, -BIG, 2**60, 10**20, 0.1, 1, True, None, "9007199254740993"])
def test_constants_that_are_doubles_are_exact(value: Any, vocabulary: Vocabulary) -> None:
    text = json.dumps(value)
    assert taken(vocabulary, {"const": value}, [text]) == [text]
    assert taken(vocabulary, {"enum": [value, "x"]}, [text, '"x"', "7"]) == [text, '"x"']


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"const": BIG + 1}, "const: 9007199254740993 is not a double"),
        ({"enum": ["x", 1234567890123456789]}, "enum: 1234567890123456789 is not a double"),
        ({"enum": [12345678901234567890123, 1]}, "enum: 12345678901234567890123 is not a double"),
        ({"const": {"a": [{"b": -BIG - 1}]}}, "const: -9007199254740993 is not a double"),
        ({"properties": {"enum": {"items": {"const": BIG + 1}}}}, "const: 9007199254740993"),
        ({"$defs": {"a": {"const": 10**400}}, "$ref": "#/$defs/a"}, "a number of more than 40 digits"),
        ({"type": "integer", "minimum": 2**64}, "minimum: is beyond 9223372036854774784"),
        ({"type": "integer", "maximum": -(10**400)}, "maximum: is beyond -9223372036854774784"),
    ],
)
def test_constants_that_are_no_doubles_are_refused(
    schema: dict[str, Any], words: str, vocabulary: Vocabulary
) -> None:
    """Another number came out: 1234567890123456768."""
    with pytest.raises(InvalidArgumentError, match=words) as refused:
        taken(vocabulary, schema, [])
    assert refused.value.field == "structured_output"


def test_names_are_no_constants(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"const": {"type": "integer", "default": BIG + 1, "examples": [BIG + 1]}},
        "required": ["const"],
        "additionalProperties": False,
    }
    assert taken(vocabulary, schema, ['{"const": 5}', "{}"]) == ['{"const": 5}']


def animal(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}


DEFINED = {
    "A": {"type": "string", "maxLength": 3},
    "B": {"$ref": "#/$defs/A", "minLength": 1},
    "tilde~slash/": {"enum": [1, 2]},
    "cat": animal("cat", lives={"type": "integer"}),
    "dog": animal("dog"),
    "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
    "round": {"$ref": "#/$defs/round"},
}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("branches", "texts"),
    [
        ([ref("A"), {"type": "null"}], ['"abc"', "null"]),
        ([{"type": "null"}, ref("B"), ref("either")], ["null", '"a"', "5", "true"]),
        ([ref("tilde~0slash~1"), {"const": 3}], ["1", "3"]),
        ([{"const": 1}, {"const": True}, {"enum": [None, "1"]}], ["1", "true", "null", '"1"']),
        ([ref("cat"), ref("dog"), {"type": "null"}], ['{"kind": "cat"}', '{"kind": "dog"}', "null"]),
        ([{"allOf": [ref("either"), {"type": ["integer", "null"]}]}, {"type": "boolean"}], ["5", "true"]),
    ],
)
def test_schemas_of_a_one_of_that_exclude_each_other(
    branches: list[Any], texts: list[str], vocabulary: Vocabulary
) -> None:
    """llguidance does not look behind `$ref`, and told of an option that no client has."""
    schema = {"oneOf": branches, "$defs": DEFINED}
    assert taken(vocabulary, schema, [*texts, '"four"', "[]"]) == texts
    inner = {"type": "object", "properties": {"x": {"oneOf": branches}}, "required": ["x"], "$defs": DEFINED}
    assert taken(vocabulary, inner, [f'{{"x": {text}}}' for text in texts])
    beside = {"oneOf": branches, "anyOf": [{"type": ["string", "null"]}], "$defs": DEFINED}
    if "null" in texts:
        assert taken(vocabulary, beside, ["null", "5", "true"]) == ["null"]


@pytest.mark.parametrize(
    "branches",
    [
        [ref("A"), {"type": ["null", "string"]}],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, 2]}],
        [ref("A"), {"maximum": 4}],
        [ref("cat"), {"type": "object", "properties": {"kind": {"const": "dog"}}}],
        [ref("cat"), animal("cat")],
        [ref("round"), {"type": "null"}],
        [{"enum": [[1], {"a": 1}]}, {"const": [2]}],
        [{"type": "null"}] * 70,
    ],
)
def test_schemas_of_a_one_of_that_may_both_hold_are_refused(
    branches: list[Any], vocabulary: Vocabulary
) -> None:
    with pytest.raises(InvalidArgumentError, match="oneOf: its schemas are not known to exclude each other"):
        taken(vocabulary, {"oneOf": branches, "$defs": DEFINED}, [])


def test_references_in_circles_and_deep_schemas_end_in_a_refusal() -> None:
    """Both ended in a RecursionError."""
    names = [f"d{number}" for number in range(60)]
    circles = {
        "$defs": {
            name: {"oneOf": [{"$ref": f"#/$defs/{names[(at + step) % 60]}"} for step in (1, 7)]}
            for at, name in enumerate(names)
        },
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in names],
    }
    assert "oneOf" in for_llguidance(circles), "left to llguidance, which refuses it"
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidArgumentError, match="structured_output: json: is nested too deeply"):
        for_llguidance(deep)
