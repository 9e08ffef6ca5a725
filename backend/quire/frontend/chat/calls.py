"""Readers of one tool call, or of its arguments alone. They pass the text on to the sink as soon as they
can."""

from __future__ import annotations

import json

from quire.converters import has_surrogates
from quire.frontend.chat.json_reader import JsonReader
from quire.frontend.chat.sink import AnswerSink

MAX_HELD = 2**20
"""Limit in characters of text that is held, until a call's name or the end of a value is known."""
_ARGUMENTS = ("arguments", "parameters")


class ArgumentsReader:
    """Reads the arguments of a call whose name is known: a JSON object, passed on as it is written."""

    __slots__ = ("_reader", "_sink")

    def __init__(self, sink: AnswerSink) -> None:
        self._sink, self._reader = sink, JsonReader()

    @property
    def is_done(self) -> bool:
        return self._reader.is_done

    @property
    def is_bad(self) -> bool:
        return self._reader.is_bad

    def feed(self, text: str, start: int) -> int:
        """Passes on the arguments' part of `text[start:]`, and ends the call when they are complete. Returns
        the index after the part (`JsonReader.feed`)."""
        end = self._reader.feed(text, start)
        self._sink.arguments(text[start:end])
        if self.is_done:
            self._sink.end_call()
        return end


class CallReader:
    """Reads a call written as an object `{"name": ..., "arguments": {...}}`, or with the key "parameters" in
    place of "arguments".

    Other keys are ignored. The sink gets the name and the first arguments when both have arrived. Arguments
    written as a string or null must be complete for that. A call without arguments begins when its object
    ends. Before it has begun, it may turn out to be no call; until then its text is in `raw`.

    Args:
        needs_arguments: whether an object without arguments is no call.
    """

    __slots__ = (
        "_arguments",
        "_has_arguments",
        "_held",
        "_name",
        "_name_parts",
        "_needs_arguments",
        "_num_held",
        "_raw",
        "_reader",
        "_sink",
        "has_begun",
    )

    def __init__(self, sink: AnswerSink, *, needs_arguments: bool = False) -> None:
        self._sink, self._needs_arguments = sink, needs_arguments
        self._reader = JsonReader(self._on_value)
        self._raw: list[str] = []
        self._num_held = 0
        self._name: str | None = None
        self._name_parts: list[str] = []
        self._held: list[str] = []
        self._has_arguments = False
        self._arguments = ""
        """First character of the arguments: `{` object, `"` string with one, `n` null; empty: none yet. With
        another character the call is bad."""
        self.has_begun = False

    @property
    def is_done(self) -> bool:
        return self._reader.is_done and not self._reader.is_bad

    @property
    def is_bad(self) -> bool:
        return self._reader.is_bad

    @property
    def raw(self) -> str:
        """Text read so far; empty once the call has begun."""
        return "".join(self._raw)

    def feed(self, text: str, start: int) -> int:
        """Reads the call's part of `text[start:]`; returns the index after it, as `JsonReader.feed`."""
        end = self._reader.feed(text, start)
        if not self.has_begun:
            self._raw.append(text[start:end])
            self._num_held += end - start
            if self._num_held > MAX_HELD:
                self._reader.is_bad = True
        if self.is_done:
            self._end()
        return end

    def _end(self) -> None:
        if not self.has_begun:
            if self._name is None or self._needs_arguments:
                self._reader.is_bad = True
                return
            self._begin()
            self._sink.arguments("{}")
        self._sink.end_call()

    def _begin(self) -> None:
        assert self._name is not None
        self.has_begun = True
        self._sink.begin_call(self._name)
        self._raw.clear()

    def _on_value(self, key: str, piece: str, ended: bool) -> bool:
        if key == "name" and self._name is None:
            return self._on_name(piece, ended)
        if key in _ARGUMENTS:
            return self._on_arguments(piece, ended)
        return True

    def _on_name(self, piece: str, ended: bool) -> bool:
        self._name_parts.append(piece)
        if not ended:
            return True
        name = json.loads("".join(self._name_parts))
        if not isinstance(name, str) or name not in self._sink.names:
            return False
        self._name = name
        # What is held of an object is told with the name; a string of one when it has ended.
        return self._tell_object() if self._arguments == "{" else self._tell_whole()

    def _on_arguments(self, piece: str, ended: bool) -> bool:
        if self._has_arguments:
            return False  # a second time
        if not self._arguments:
            self._arguments = piece[0]
            if self._arguments not in '{"n':
                return False
        self._held.append(piece)
        self._has_arguments = ended
        if self._name is None:
            return True
        return self._tell_object() if self._arguments == "{" else self._tell_whole()

    def _tell_object(self) -> bool:
        if not self.has_begun:
            self._begin()
        self._sink.arguments("".join(self._held))
        self._held.clear()
        return True

    def _tell_whole(self) -> bool:
        """Passes on arguments that are a string or null, once they are complete. Returns False if they stand
        for no valid object."""
        if not self._has_arguments:
            return True
        value = json.loads("".join(self._held))
        reader = JsonReader()
        text = "{}" if value is None else str(value).strip() or "{}"
        if reader.feed(text) != len(text) or not reader.is_done or has_surrogates(text):
            return False
        self._held = [text]
        return self._tell_object()
