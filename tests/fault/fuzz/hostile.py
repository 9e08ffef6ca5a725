"""Values that break programs, drawn from a seeded `random.Random`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

DEPTHS = (10, 60, 200, 400, 984, 1_000, 3_000, 100_000)
LENGTHS = (255, 256, 257, 1_023, 1_025, 5_000, 20_000, 70_000)
HUGE = 1_000_000
"""Bytes of the largest text; few messages have one."""
HUGE_SHARE = 0.01


class Literal(str):
    """JSON text that `to_json` writes as it is."""


NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    63,
    64,
    65,
    1_000,
    10**6,
    10**9,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
    2**64,
    10**30,
    -0.0,
    0.5,
    1.5,
    -1.5,
    5e-324,
    1e-40,
    3.5e38,
    1.7e308,
    math.nan,
    math.inf,
    -math.inf,
)
_LITERALS = (
    "1e400",
    "-1e400",
    "1e-400",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "NaN",
    "-Infinity",
    "01",
    "+1",
    "0x10",
)
_TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "\x01\x1f\x7f",
    "\r\n\r\n",
    "\ud800",
    "a\udfffb",
    "\ufffe\uffff",
    "\u202e\u200d\ufeff",
    "e\u0301" * 40,
    "\U0001f468\u200d\U0001f469" * 20,
    "<|im_end|>",
    "<image>",
    "<image><image>",
    "[INST]",
    "[",
    "{",
    '"',
    "\\",
    "{{ 7 * 7 }}{% for x in range(10**9) %}",
    "../../../../etc/passwd",
    "file:///etc/passwd",
    "%s%n%x",
    "null",
    "true",
    "nan",
    "1e400",
    "-1",
    "1_000",
    "٣",
    "reset",
    "generator",
)


def number(rng: Random) -> Any:
    return rng.choice(NUMBERS)


def text(rng: Random) -> str:
    match rng.randrange(4):
        case 0:
            return long_text(rng)
        case 1:
            return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD7FF)))) for _ in range(12))
        case _:
            return rng.choice(_TEXTS)


def long_text(rng: Random) -> str:
    length = HUGE if rng.random() < HUGE_SHARE else rng.choice(LENGTHS)
    unit = rng.choice(("a", "ab ", "\0", "é", " ", "<image>", "9"))
    return unit * (length // len(unit))


def blob(rng: Random) -> bytes:
    """Bytes, seldom UTF-8."""
    match rng.randrange(4):
        case 0:
            return text(rng).encode("utf-8", "surrogatepass")
        case 1:
            return rng.choice((b"\xff", b"ab\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"))
        case 2:
            return json_text(rng)
        case _:
            return rng.randbytes(rng.randrange(64))


def nested(rng: Random, depth: int | None = None) -> Literal:
    """A JSON text that is nested deeply, sometimes without its ends."""
    depth = depth or rng.choice(DEPTHS)
    opening, inner, closing = rng.choice((("[", "", "]"), ('{"a":', "1", "}"), ('[{"a":[', "", "]}]")))
    closed = closing if rng.random() < 0.7 else ""
    return Literal(opening * depth + inner + closed * depth)


def value(rng: Random) -> Any:
    """Anything that `to_json` writes."""
    match rng.randrange(9):
        case 0 | 1:
            return number(rng)
        case 2 | 3:
            return text(rng)
        case 4:
            return Literal(rng.choice(_LITERALS))
        case 5:
            return nested(rng)
        case 6:
            return rng.choice((None, True, False, [], {}, [[]], [None], [{}], {"": None}))
        case 7:
            return [rng.choice((number, text))(rng) for _ in range(rng.choice((1, 2, 5, 100)))]
        case _:
            return {text(rng)[:300]: number(rng) for _ in range(rng.choice((1, 2, 30)))}


def many(rng: Random) -> list[str]:
    """Some thousand short strings, or a few hundred long ones."""
    count, length = rng.choice(((1_000, 3), (5_000, 1), (64, 1_024), (300, 1_000)))
    return [f"{i:x}".ljust(length, "z")[:length] for i in range(count)]


def to_json(item: Any) -> str:
    """As json.dumps, with `Literal`s as they stand; bytes are text of the same code points."""
    if isinstance(item, Literal):
        return item
    if isinstance(item, Pairs):
        return "{" + ",".join(f"{to_json(key)}:{to_json(entry)}" for key, entry in item.pairs) + "}"
    if isinstance(item, dict):
        return "{" + ",".join(f"{to_json(key)}:{to_json(entry)}" for key, entry in item.items()) + "}"
    if isinstance(item, list | tuple):
        return "[" + ",".join(map(to_json, item)) + "]"
    if isinstance(item, bytes):
        item = item.decode("latin-1")
    return json.dumps(item)


class Pairs:
    """A JSON object in which a key may stand twice."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.pairs = list(pairs)


def json_text(rng: Random, fields: dict[str, Any] | None = None) -> bytes:
    """An object of `fields` in which something is wrong, or something else altogether."""
    pairs = list((fields or {"a": 1}).items())
    match rng.randrange(8):
        case 0:
            pairs.append((pairs[0][0], value(rng)))
        case 1:
            pairs.append((text(rng)[:300], value(rng)))
        case 2:
            key, _ = rng.choice(pairs)
            pairs = [(name, value(rng) if name == key else entry) for name, entry in pairs]
        case 3:
            return to_json(value(rng)).encode("utf-8", "surrogatepass")
        case 4:
            whole = to_json(Pairs(pairs)).encode()
            return whole[: rng.randrange(len(whole))]
        case 5:
            return damaged(rng, to_json(Pairs(pairs)).encode())
        case 6:
            return to_json(Pairs([*pairs, ("x", nested(rng))])).encode()
        case _:
            pass
    return to_json(Pairs(pairs)).encode("utf-8", "surrogatepass")


def damaged(rng: Random, data: bytes) -> bytes:
    """Cut, with bytes flipped, or with bytes put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(3):
            case 0:
                del changed[place:]
            case 1 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case _:
                changed[place:place] = rng.randbytes(rng.randrange(1, 5))
    return bytes(changed)


def weighted(rng: Random, choices: dict[Callable[..., Any], int]) -> Callable[..., Any]:
    return rng.choices(list(choices), list(choices.values()))[0]
