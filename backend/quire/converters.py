"""Converters of request values, in their own type or as text, to checked values. Errors name the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType
from typing import Any, get_args

from quire.errors import InvalidArgumentError
from quire_common.errors import kind, shown

INT32_MAX = 2**31 - 1


def fail(field: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, message)


def integer(low: int, high: int) -> Callable[[str, Any], int]:
    def convert(field: str, value: Any) -> int:
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                raise fail(field, f"must be an integer, got {shown(value)}") from None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise fail(field, f"must be an integer, got {kind(value)}")
        if not low <= value <= high:
            raise fail(field, f"must be in [{low}, {high}], got {shown(value)}")
        return value

    return convert


def number(low: float, high: float, *, low_open: bool = False) -> Callable[[str, Any], float]:
    def convert(field: str, value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value.strip())
            except ValueError:
                raise fail(field, f"must be a number, got {shown(value)}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fail(field, f"must be a number, got {kind(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise fail(field, "must be a number, got an integer too large for one") from None
        if math.isnan(value):
            raise fail(field, "must be a number, got NaN")
        if value < low or value > high or (low_open and value == low):
            raise fail(field, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value:g}")
        return value

    return convert


def boolean(field: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise fail(field, f"must be a boolean, got {kind(value)}")


def one_of(*words: str) -> Callable[[str, Any], str]:
    """Returns a converter that accepts only the texts in `words`."""

    def convert(field: str, value: Any) -> str:
        if value not in words:
            found = shown(value) if isinstance(value, str) else kind(value)
            raise fail(field, f"must be one of {', '.join(words)}, got {found}")
        return str(value)

    return convert


def unless_none(kind: Any) -> Any:
    """Returns the X of an annotation `X | None`; any other annotation is returned unchanged."""
    return get_args(kind)[0] if NoneType in get_args(kind) else kind


def converter(kind: Any) -> Callable[[str, Any], Any]:
    """Returns the converter for an annotation: a boolean, or a number with both its limits in a msgspec.Meta.
    An optional type converts as the type itself."""
    kind = unless_none(kind)
    if kind is bool:
        return boolean
    base, limits = get_args(kind)
    if base is int:
        return integer(limits.ge, limits.le)
    return number(limits.ge if limits.gt is None else limits.gt, limits.le, low_open=limits.gt is not None)


def has_surrogates(text: str) -> bool:
    """Returns whether a text holds a surrogate, a code point without a UTF-8 form. JSON can spell an unpaired
    one."""
    return any("\ud800" <= char <= "\udfff" for char in text)


def name(limit: int) -> Callable[[str, Any], str]:
    """Returns a converter that accepts text, and integers as their digits. It raises InvalidArgumentError for
    other values, more than `limit` characters, and text without a UTF-8 form (unpaired surrogates)."""

    def convert(field: str, value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise fail(field, f"must be text, got {kind(value)}")
        if len(value) > limit:
            raise fail(field, f"at most {limit} characters are allowed, got {len(value)}")
        if has_surrogates(value):
            raise fail(field, "must not hold unpaired surrogates, which have no UTF-8 form")
        return value

    return convert
