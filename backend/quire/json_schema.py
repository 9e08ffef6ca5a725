"""Rewrites or refuses a client's JSON schema where llguidance is known to allow values that do not fit it.

llguidance reads numbers as doubles and compares some with a double's shortest digits. So a bound of 2**53 or
more in magnitude moves inwards to the next double that, read in either way, admits no value beyond the bound.
Whole numbers that are constants and not doubles are refused. If two bounds are less than 1 apart, llguidance
accepts the one nearer to 0 if it is a whole number, even where it is excluded; so excluded bounds of that
kind always move. llguidance refuses a `oneOf` unless it sees that its schemas exclude each other; where this
module sees that they do, the `oneOf` becomes an `anyOf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from quire.errors import InvalidArgumentError

_MAX_BRANCHES = 64
"""Most schemas in a `oneOf` that are compared with each other; a longer one stays a `oneOf`."""
_MAX_STEPS = 10_000
"""Most schemas visited to find which exclude each other; references may be circular."""
_LARGEST = 2.0**63 - 1024
"""Largest magnitude of a bound: llguidance has no regular expression for the smallest 64-bit number."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keys with objects whose values are schemas."""
_VALUES = ("const", "enum", "default", "examples", "required")
"""Keys whose values stay as they are, as they are no schemas even if they look like some."""
_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
"""Types that are distinguished; integers count as numbers."""
_UNKNOWN = object()
_TYPE_OF = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string"}


def for_llguidance(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a client's schema rewritten for llguidance, as the module describes.

    Raises:
        InvalidArgumentError: a constant is a whole number that is not a double, a bound admits only
            numbers beyond those that llguidance keeps, or schemas are nested too deeply.
    """
    try:
        return _Rewriting(schema).schema(schema)
    except RecursionError:
        raise InvalidArgumentError("structured_output", "json: is nested too deeply") from None


class _Rewriting:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._steps = 0
        self._listed: dict[int, Any] = {}
        """Results of `_constants`, by the id() of the schema's `enum`."""

    def schema(self, value: Any) -> Any:
        """Rewrites a schema or a list of schemas; other values are returned as they are."""
        if isinstance(value, list):
            return [self.schema(one) for one in value]
        if not isinstance(value, Mapping):
            return value
        found: dict[str, Any] = {}
        for key, one in value.items():
            if key in ("const", "enum"):
                _check_constant(key, one)
            if key in _VALUES:
                found[key] = one
            elif key in _NAMED and isinstance(one, Mapping):
                found[key] = {name: self.schema(each) for name, each in one.items()}
            else:
                found[key] = self.schema(one)
        _bound(found, "exclusiveMinimum", "minimum", 1)
        _bound(found, "exclusiveMaximum", "maximum", -1)
        _part_bounds(found)
        branches = found.get("oneOf")
        if isinstance(branches, list) and self._exclude_each_other(value["oneOf"]):
            del found["oneOf"]
            if "anyOf" in found:
                found["allOf"] = [*found.get("allOf", ()), {"anyOf": branches}]
            else:
                found["anyOf"] = branches
        return found

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        if len(branches) > _MAX_BRANCHES:
            return False
        pairs = ((one, other) for at, one in enumerate(branches) for other in branches[:at])
        try:
            return all(self._disjoint(one, other) for one, other in pairs)
        except RecursionError:  # references that go round in circles
            return False

    def _disjoint(self, one: Any, other: Any) -> bool:
        """Returns whether no value satisfies both schemas; False if this cannot be determined."""
        one, other = self._resolved(one), self._resolved(other)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or self._steps > _MAX_STEPS:
            return False
        values, others = self._constants(one), self._constants(other)
        if values is not None and others is not None:
            return values.isdisjoint(others)
        types = self._types(one) & self._types(other)
        if types != {"object"}:
            return not types
        needed = [set(each["required"]) for each in (one, other) if isinstance(each.get("required"), list)]
        properties = [
            each["properties"] for each in (one, other) if isinstance(each.get("properties"), Mapping)
        ]
        if len(needed) < 2 or len(properties) < 2:
            return False
        shared = needed[0] & needed[1] & properties[0].keys() & properties[1].keys()
        return any(self._disjoint(properties[0][name], properties[1][name]) for name in shared)

    def _types(self, schema: Any) -> frozenset[str]:
        """Returns a superset of the types that a schema's values may have."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or self._steps > _MAX_STEPS:
            return _TYPES
        types = _TYPES
        if (stated := schema.get("type")) is not None:
            names = stated if isinstance(stated, list) else [stated]
            types &= frozenset("number" if name == "integer" else str(name) for name in names)
        if (values := self._constants(schema)) is not None:
            types &= frozenset(_TYPE_OF[type(value)] for value, _ in values)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                types &= frozenset[str]().union(*(self._types(one) for one in schema[key]))
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self._types(one)
        return types

    def _constants(self, schema: Mapping[str, Any]) -> frozenset[tuple[Any, bool]] | None:
        """Returns the values that a schema lists, each with whether it is a boolean (Python's True equals 1).
        None: it lists none, or some are lists or objects."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        if (found := self._listed.get(id(values), _UNKNOWN)) is _UNKNOWN:
            is_plain = all(isinstance(one, str | int | float | None) for one in values)
            found = frozenset((one, isinstance(one, bool)) for one in values) if is_plain else None
            if "const" not in schema:  # the list lives as long as the client's schema
                self._listed[id(values)] = found
        return found

    def _resolved(self, schema: Any) -> Any:
        """Returns a schema with its reference replaced by the schema that it points to, merged with the keys
        beside the reference. The result may allow values that one of the two forbids, and after _MAX_STEPS it
        may have a reference. A schema without one is returned as it is. None: the target is not known."""
        while isinstance(schema, Mapping) and "$ref" in schema and self._steps <= _MAX_STEPS:
            self._steps += 1
            target: Any = self._root
            start, *parts = str(schema["$ref"]).split("/")
            if start != "#":
                return None
            for part in parts:
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if not isinstance(target, Mapping):
                return None
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        self._steps += 1
        return schema


def _check_constant(key: str, value: Any) -> None:
    if isinstance(value, list):
        for one in value:
            _check_constant(key, one)
    elif isinstance(value, Mapping):
        for one in value.values():
            _check_constant(key, one)
    elif isinstance(value, int) and not isinstance(value, bool) and _double(value) != value:
        shown = str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
        raise InvalidArgumentError(
            "structured_output", f"{key}: {shown} is not a double, and would be written as another number"
        )


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _numbers(schema: Mapping[str, Any], *keys: str) -> list[float]:
    found = (schema.get(key) for key in keys)
    return [one for one in found if isinstance(one, int | float) and not isinstance(one, bool)]


def _bound(schema: dict[str, Any], exclusive: str, inclusive: str, inwards: int) -> None:
    """Replaces a bound of 2**53 and more in magnitude, where not every whole number is a double, by an
    inclusive one: the outermost double, at most _LARGEST in magnitude, with which llguidance allows no value
    beyond the bound.

    Args:
        schema: the schema, changed in place.
        exclusive, inclusive: keys of the two kinds of bound: exclusiveMinimum and minimum, or of the maximum.
        inwards: 1 for lower bounds, -1 for upper ones.

    Raises:
        InvalidArgumentError: only numbers beyond -_LARGEST or _LARGEST would satisfy the bound.
    """
    for key in (exclusive, inclusive):
        for value in _numbers(schema, key):
            if abs(value) < 2**53:
                continue
            moved = _double(value)
            while _is_outside(moved, value, inwards, is_excluded=key == exclusive):
                moved = math.nextafter(moved, inwards * math.inf)
            if moved * inwards > _LARGEST:
                raise InvalidArgumentError("structured_output", f"{key}: is beyond {inwards * _LARGEST:.0f}")
            moved = inwards * max(moved * inwards, -_LARGEST)
            del schema[key]
            _tighten(schema, inclusive, int(moved), inwards)


def _is_outside(moved: float, value: float, inwards: int, *, is_excluded: bool) -> bool:
    """Returns whether llguidance, given `moved` as its inclusive bound, would allow values that the client's
    bound forbids. It compares whole numbers with the double itself, other numbers with the double's shortest
    digits, padded with zeros.

    Args:
        moved: the double; an infinite one gives False.
        value: the client's bound.
        inwards: 1 if it is a lower bound, -1 if it is an upper one.
        is_excluded: whether the client forbids `value` itself.
    """
    if math.isinf(moved):
        return False  # there is a nearer bound for all
    worst = min(inwards * int(moved), inwards * int(Decimal(repr(moved))))
    exact = inwards * int(value)
    return worst < exact or (is_excluded and worst == exact)


def _tighten(schema: dict[str, Any], key: str, bound: float, inwards: int) -> None:
    schema[key] = (max if inwards > 0 else min)([bound, *_numbers(schema, key)])


def _part_bounds(schema: dict[str, Any]) -> None:
    """Moves an excluded bound that is a whole number a little inwards, if it is a lower bound of 0 or more or
    an upper one of 0 or less.

    It does not check whether the other bound is less than 1 away, because that may be in another schema, by
    `allOf`.
    """
    for key, inclusive, inwards in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        for value in _numbers(schema, key):
            if value == int(value) and value * inwards >= 0:
                # llguidance tells some 15 digits apart. No whole number is lost.
                step = min(1.0, 10.0 ** (len(str(abs(int(value)))) - 15))
                del schema[key]
                _tighten(schema, inclusive, value + inwards * step, inwards)
