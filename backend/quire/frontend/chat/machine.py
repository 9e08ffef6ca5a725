"""TextMachine: base of the parsers of text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from quire.frontend.chat.sink import AnswerSink

MAX_HEADER = 1024
"""Characters after which a parser no longer waits for what must follow: for example a call's arguments after
its marker, or, after white space, the tag that opens reasoning."""


class AnswerParser(Protocol):
    """Parser of an answer's text; it puts the parts that it finds into a sink."""

    def feed(self, text: str) -> None:
        """Parses the next piece of the text."""

    def finish(self) -> None:
        """Parses the rest, as no more text will come."""


class Markers:
    """Strings to search for in a text that grows, so that it may end within one of them."""

    def __init__(self, *markers: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
        self._beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
        self._longest = max(map(len, markers)) - 1

    def find(self, text: str, start: int, most: int | None = None) -> re.Match[str] | None:
        """Finds the first marker in `text[start:]`. With `most`, no more characters than that may come before
        it."""
        end = len(text) if most is None else start + most + self._longest + 1
        found = self._pattern.search(text, start, end)
        return None if found is None or (most is not None and found.start() - start > most) else found

    def is_late(self, text: str, start: int, most: int) -> bool:
        """Whether `text[start:]` is so long that `find` with `most`, if it has found nothing, never will."""
        return len(text) - start > most + self._longest

    def held(self, text: str, start: int) -> int:
        """Number of last characters of `text[start:]` that may be the beginning of a marker."""
        for size in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - size :] in self._beginnings:
                return size
        return 0


class TextMachine:
    """Base of the parsers. A state is a method that reads from the text; it returns False if nothing more is
    to be read for now.

    A state may wait for more text, but should not otherwise depend on where the text ends now, so that the
    outcome is the same however the text is cut.

    Args:
        sink: gets what is found.
        openers: for each marker that may follow content, the state that comes after it.
        closers: markers that are left out of content if they are found in it.
    """

    def __init__(
        self, sink: AnswerSink, openers: dict[str, Callable[[], bool]], closers: tuple[str, ...] = ()
    ) -> None:
        self.sink = sink
        self._openers, self._closers = openers, frozenset(closers)
        markers = {*openers, *closers, *sink.hidden}
        self._markers = Markers(*markers) if markers else None
        self._opened = ""
        """Text that opened the call or message being read, such as its marker; `_give_up` needs it."""
        self._text, self._at = "", 0
        self._is_last = False
        self._state: Callable[[], bool] = self._content

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        while self._state():
            pass

    def finish(self) -> None:
        self._is_last = True
        self.feed("")
        self._end()

    def _end(self) -> None:
        """Handles the text that is still unread when the answer has ended: it becomes content."""
        self.sink.text(self._rest())

    def _rest(self) -> str:
        """Removes and returns all text that has not been read."""
        rest = self._text[self._at :]
        self._at = len(self._text)
        return rest

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _content(self) -> bool:
        """State that reads content up to a marker."""
        if self._markers is None:
            self.sink.text(self._rest())
            return False
        piece, found = self._up_to(self._markers)
        self.sink.text(piece)
        if found is None:
            return False
        self._at = found.end()
        marker = found[0]
        if marker in self._openers:
            self._opened = marker
            return self._go(self._openers[marker])
        if marker in self._closers:
            self.sink.edge()
        return True

    def _up_to(self, markers: Markers) -> tuple[str, re.Match[str] | None]:
        """Reads the text before the next marker, and returns this text and the marker's match. The marker
        itself stays unread.

        If there is no marker, the match is None, and a possible beginning of one at the end of the text so
        far stays unread, unless the text is complete.
        """
        found = markers.find(self._text, self._at)
        held = 0 if found is not None or self._is_last else markers.held(self._text, self._at)
        end = len(self._text) - held if found is None else found.start()
        piece, self._at = self._text[self._at : end], end
        return piece, found

    def _skip(self, characters: str = " \t\r\n") -> bool:
        """Skips these characters as far as they come next; returns whether another character is there yet."""
        text, at = self._text, self._at
        while at < len(text) and text[at] in characters:
            at += 1
        self._at = at
        return at < len(text)

    def _may_begin(self, marker: str) -> bool | None:
        """Whether the text goes on with a marker, which is then read; None: that is not known yet."""
        rest = self._text[self._at : self._at + len(marker)]
        if rest == marker:
            self._at += len(marker)
            return True
        return None if marker.startswith(rest) and not self._is_last else False

    def _until(self, markers: Markers, behind: int = 0) -> re.Match[str] | None:
        """Finds a marker within MAX_HEADER characters of index `behind` (0: of the next unread character).

        None: there is none so far; `_is_hopeless` says when to stop waiting for one.
        """
        return markers.find(self._text, behind or self._at, MAX_HEADER)

    def _is_hopeless(self, markers: Markers, behind: int = 0) -> bool:
        """Whether a marker that `_until` has not found need not be waited for any more."""
        return self._is_last or markers.is_late(self._text, behind or self._at, MAX_HEADER)

    def _give_up(self, raw: str = "") -> bool:
        """Ends what turned out to be no call or message: its beginning (`_opened`) and `raw` become content.

        The unread text is read as content again.
        """
        self.sink.raw(self._opened + raw)
        self._opened = ""
        return self._go(self._content)
