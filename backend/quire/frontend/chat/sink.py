"""AnswerSink: collects what the parsers of an answer find."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one tool call. The first piece of each call has its id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the piece as a tool-call delta of OpenAI's chat completions."""
        function: dict[str, Any] = {"arguments": "".join(self.arguments)}
        if not self.id:
            return {"index": self.index, "function": function}
        function = {"name": self.name, **function}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class AnswerSink:
    """Content, reasoning and calls of one answer that were not popped yet.

    White space directly after reasoning or a call is left out. If an answer has nothing but white space
    before its first call, that is left out, too.

    A call is complete after `end_call`. If its text turns out to be invalid before that, the pieces already
    sent cannot be taken back, so `has_all_calls` stays false.

    Args:
        names: names of the request's tools; a call of another tool does not count as a call.
        hidden: markers that are special tokens and must not appear in content.
        max_calls: number of calls after which everything is left out; None: no limit.
        short_ids: whether ids of calls are 9 letters and digits, as Mistral's templates require.
    """

    __slots__ = (
        "_at_edge",
        "_calls",
        "_content",
        "_drops_space",
        "_num_begun",
        "_num_ended",
        "_reasoning",
        "_short_ids",
        "_space",
        "hidden",
        "max_calls",
        "names",
    )

    def __init__(
        self,
        names: Iterable[str] = (),
        hidden: Iterable[str] = (),
        max_calls: int | None = None,
        *,
        short_ids: bool = False,
    ) -> None:
        self.names = frozenset(names)
        self.hidden = tuple(sorted(hidden, key=len, reverse=True))
        self.max_calls = max_calls
        self._short_ids = short_ids
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_begun = self._num_ended = 0
        self._at_edge, self._drops_space = True, False
        self._space: list[str] = []

    @property
    def is_empty(self) -> bool:
        return not (self._content or self._reasoning or self._calls)

    @property
    def is_closed(self) -> bool:
        """Whether `max_calls` calls are complete, so that everything else is left out."""
        return self.max_calls is not None and self._num_ended >= self.max_calls

    @property
    def has_all_calls(self) -> bool:
        """Whether there are calls, and each that has begun is complete."""
        return 0 < self._num_begun == self._num_ended

    def text(self, piece: str) -> None:
        """Adds a piece of content, unless `is_closed`. White space after an `edge` is left out."""
        if not piece or self.is_closed:
            return
        if self._at_edge:
            text = piece.lstrip()
            if not self._drops_space:
                self._space.append(piece[: len(piece) - len(text)])
            if not text:
                return
            self._at_edge = False
            piece = "".join(self._space) + text
            self._space.clear()
        self._content.append(piece)

    def raw(self, piece: str) -> None:
        """Adds, as content, a text that turned out to be no call. Markers in `hidden` are left out of it."""
        for marker in self.hidden:
            piece = piece.replace(marker, "")
        self.text(piece)

    def reason(self, piece: str) -> None:
        """Adds a piece of reasoning, unless `is_closed`."""
        if piece and not self.is_closed:
            self._reasoning.append(piece)

    def edge(self) -> None:
        """Marks a boundary of content. White space after it is dropped. White space before it is dropped
        if it is the only content so far."""
        self._at_edge, self._drops_space = True, True
        self._space.clear()

    def begin_call(self, name: str) -> None:
        """Begins a call to the tool `name`, unless `is_closed`. The pieces of its arguments follow."""
        if self.is_closed:
            return
        self.edge()
        call_id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._calls.append(ToolCallDelta(self._num_begun, call_id, name))
        self._num_begun += 1

    def arguments(self, piece: str) -> None:
        """Adds a piece of the newest call's arguments, unless `is_closed`."""
        if not piece or self.is_closed:
            return
        index = self._num_begun - 1
        if not self._calls or self._calls[-1].index != index:
            self._calls.append(ToolCallDelta(index))
        self._calls[-1].arguments.append(piece)

    def end_call(self) -> None:
        """Marks the newest call as complete, unless `is_closed`."""
        if not self.is_closed:
            self._num_ended += 1

    def finish(self) -> None:
        """Ends the answer. White space at its beginning, held back so far, becomes content if neither other
        content nor a boundary (`edge`), such as that of a call, followed it."""
        if self._space and not self._drops_space:
            self._content.append("".join(self._space))
            self._space.clear()

    def pop_deltas(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns the content, reasoning and calls added since the last call of this method."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [call.as_json() for call in self._calls]
        self._content, self._reasoning, self._calls = [], [], []
        return content, reasoning, calls
