"""JsonReader: checks a JSON object whose text arrives in pieces of any length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from quire_common.client_json import MAX_DEPTH

MAX_KEY = 1024
"""Most characters of a key of the outermost object, counted as they are written."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = "0123456789"
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", **dict.fromkeys("123456789", "integer")},
    "zero": {".": "point", "e": "exponent", "E": "exponent"},
    "integer": {**dict.fromkeys(_DIGITS, "integer"), ".": "point", "e": "exponent", "E": "exponent"},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), "e": "exponent", "E": "exponent"},
    "exponent": {**dict.fromkeys(_DIGITS, "power"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "power"),
    "power": dict.fromkeys(_DIGITS, "power"),
}
"""Next state in a number (RFC 8259), by the state and the next character; a state names what came last."""
_NUMBER_ENDS = frozenset(("zero", "integer", "fraction", "power"))

_CLOSES = (
    ("comma", ["{"], "}"),
    ("first key", ["{"], "}"),
    ("comma", ["["], "]"),
    ("first value", ["["], "]"),
)
_SCALARS = frozenset(("string", "escape", "hex", "literal", "number"))

OnValue = Callable[[str, str, bool], bool]


class JsonReader:
    """Checks one JSON object; the text accepted so far is always the beginning of a valid object.

    Args:
        on_value: called with each piece of a value of the outermost object: the value's key, the piece, and
            whether the value ends with it. If it returns False, the object is bad.
    """

    __slots__ = (
        "_expect",
        "_is_key",
        "_key",
        "_key_size",
        "_on_value",
        "_open",
        "_rest",
        "is_bad",
        "is_done",
    )

    def __init__(self, on_value: OnValue | None = None) -> None:
        self.is_done = False
        self.is_bad = False
        self._on_value = on_value
        self._open: list[str] = []
        self._expect = "value"
        self._rest = ""
        """Progress in a literal, a number or a \\u escape: the literal's missing characters, the number's
        state (a key of _NUMBER), or one character for each missing digit of the escape."""
        self._is_key = False
        self._key: list[str] = []
        self._key_size = 0

    def feed(self, text: str, start: int = 0) -> int:
        """Reads the part of `text[start:]` that belongs to the object, with white space before the object.

        Returns:
            Index after that part. If the object is bad, index of the first wrong character or of a piece of
            a key that makes the key too long, or index after the piece that `on_value` refused.
        """
        index, size = start, len(text)
        told = index if self._on_value is not None and self._in_value else -1
        """Index at which the part of a value begins that `on_value` must still get; -1: there is none."""
        while index < size and not (self.is_done or self.is_bad):
            taken = self._take_next(text, index)
            if self.is_bad:
                break
            if self._on_value is not None:
                if told < 0 and self._in_value:
                    told = index
                elif told >= 0 and not self._in_value:
                    if not self._tell(text[told : index + taken], ended=True):
                        return index + taken
                    told = -1
            index += taken
        if 0 <= told < index:
            self._tell(text[told:index], ended=False)
        return index

    @property
    def _in_value(self) -> bool:
        """Whether a value of the outermost object has begun and not ended."""
        depth = len(self._open)
        if depth > 1:
            return True
        return depth == 1 and not self._is_key and self._expect in _SCALARS

    def _tell(self, piece: str, *, ended: bool) -> bool:
        assert self._on_value is not None
        if not self._on_value("".join(self._key), piece, ended):
            self.is_bad = True
        return not self.is_bad

    def _take_next(self, text: str, index: int) -> int:
        """Reads one or several characters and returns how many. It is 0 for the character after a number,
        which is read by the next call. The result has no meaning if `is_bad` is set."""
        char, expect = text[index], self._expect
        if expect == "string":
            return self._take_string(text, index)
        if expect == "escape":
            self._expect, self._rest = ("hex", "####") if char == "u" else ("string", "")
            self.is_bad = char not in '"\\/bfnrtu'
            self._add_to_key(char)
            return 1
        if expect == "hex":
            self.is_bad = char not in _HEX
            self._rest = self._rest[1:]
            self._expect = "hex" if self._rest else "string"
            self._add_to_key(char)
            return 1
        if expect == "literal":
            self.is_bad = char != self._rest[0]
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
            return 1
        if expect == "number":
            following = _NUMBER[self._rest].get(char)
            if following is None:
                self.is_bad = self._rest not in _NUMBER_ENDS
                self._end_value()
                return 0
            self._rest = following
            return 1
        if char in _SPACE:
            return 1
        self._take_sign(char, expect)
        return 1

    def _take_string(self, text: str, index: int) -> int:
        found = _PLAIN.match(text, index)
        end = index if found is None else found.end()
        if end > index:
            self._add_to_key(text[index:end])
            return end - index
        char = text[index]
        if char == '"':
            if self._is_key:
                self._expect = "colon"
                if len(self._open) == 1:
                    self._key = [json.loads(f'"{"".join(self._key)}"')]
            else:
                self._end_value()
        elif char == "\\":
            self._expect = "escape"
            self._add_to_key(char)
        else:
            self.is_bad = True  # a control character
        return 1

    def _add_to_key(self, piece: str) -> None:
        if self._is_key and len(self._open) == 1:
            self._key.append(piece)
            self._key_size += len(piece)
            self.is_bad = self.is_bad or self._key_size > MAX_KEY

    def _take_sign(self, char: str, expect: str) -> None:
        if char == '"' and expect in ("key", "first key"):
            self._expect, self._is_key = "string", True
            if len(self._open) == 1:
                self._key, self._key_size = [], 0
        elif char == ":" and expect == "colon":
            self._expect, self._is_key = "value", False
        elif char == "," and expect == "comma":
            self._expect = "key" if self._open[-1] == "{" else "value"
        elif (expect, self._open[-1:], char) in _CLOSES:
            self._open.pop()
            self._end_value()
        elif expect in ("value", "first value") and (char == "{" or self._open):
            self._begin_value(char)
        else:
            self.is_bad = True

    def _begin_value(self, char: str) -> None:
        if char in "{[":
            self._open.append(char)
            self._expect = "first key" if char == "{" else "first value"
            self.is_bad = len(self._open) > MAX_DEPTH
        elif char == '"':
            self._expect, self._is_key = "string", False
        elif char in _LITERALS:
            self._expect, self._rest = "literal", _LITERALS[char]
        elif char in "-" or char in _DIGITS:
            states = {"-": "minus", "0": "zero"}
            self._expect, self._rest = "number", states.get(char, "integer")
        else:
            self.is_bad = True

    def _end_value(self) -> None:
        self._expect, self._rest = "comma", ""
        self.is_done = not self._open
