"""Parses JSON that a client sent, with bounds on its size, its depth, and its number of lists, objects and
keys."""

from __future__ import annotations

import json
from typing import Any

from quire_common.errors import InputError

MAX_BYTES = 2**20
"""Most bytes of a JSON text for which no other limit is stated; messages have a limit of their own."""
MAX_DEPTH = 64
"""Largest nesting depth of lists and objects, the outermost included."""
MAX_VALUES = 2**19
"""Most lists, objects and keys together, counted as brackets and colons. Each takes up to a hundred times the
memory of its characters."""


def parse_json(field: str, raw: bytes | str, *, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the value that a JSON text holds.

    Args:
        field: name of the input for errors.
        raw: the text. If it is a string, each character counts as a byte.
        max_bytes: most bytes of the text.

    Raises:
        InputError: the text is longer than `max_bytes`, has more than MAX_VALUES lists, objects and keys
            (counted as brackets and colons, those in strings too), is not UTF-8 or not JSON (with the
            position), is nested more than MAX_DEPTH deep, or has NaN, Infinity (which are not JSON) or an
            integer with more digits than Python parses.
    """
    check_bytes(field, raw, max_bytes)
    text = decode_utf8(field, raw) if isinstance(raw, bytes) else raw
    num_values = text.count("[") + text.count("{") + text.count(":")
    if num_values > MAX_VALUES:
        raise InputError(field, f"at most {MAX_VALUES} lists, objects and keys in JSON, got {num_values}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(
            field, f"invalid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except RecursionError:
        raise InputError(field, f"JSON nested too deeply, at most {MAX_DEPTH} levels are allowed") from None
    except ValueError as error:  # a constant, or an integer longer than Python's limit of digits
        raise InputError(field, f"invalid JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise InputError(field, f"JSON nested too deeply, at most {MAX_DEPTH} levels are allowed")


def check_bytes(field: str, raw: bytes | str, max_bytes: int) -> None:
    """Raises InputError if `raw` is longer than `max_bytes`, counted in bytes or, for a string, in
    characters."""
    if len(raw) > max_bytes:
        raise InputError(field, f"at most {max_bytes} bytes, got {len(raw)}")


def decode_utf8(field: str, raw: bytes) -> str:
    """Returns the text of an input's bytes.

    Raises:
        InputError: invalid UTF-8; names the field and the byte offset.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            field, f"invalid UTF-8 at byte {error.start} of {len(raw)}: {error.reason}"
        ) from None


def _children(node: Any) -> list[Any]:
    """Returns the lists and objects directly inside a list or object."""
    found = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in found if isinstance(child, list | dict)]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
