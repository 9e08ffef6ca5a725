"""ThinkSplitter: separates the reasoning between a model's thinking tags from the rest of an answer."""

from __future__ import annotations

from quire.frontend.chat.machine import MAX_HEADER, AnswerParser, TextMachine
from quire.frontend.chat.sink import AnswerSink


class ThinkSplitter(TextMachine):
    """Parser of the reasoning at the beginning of an answer; another parser gets all text after it.

    The opening tag may be the end of the prompt, or come first in the answer. Line feeds after the opening
    tag and white space after the closing one are left out. Reasoning without a closing tag ends before a
    marker in `sink.hidden`, such as that of a call, which the other parser gets.

    Args:
        sink: gets the reasoning.
        then: the parser of the text after the reasoning.
        tags: the opening and the closing tag.
        is_open: whether the prompt ends with the opening tag.
    """

    def __init__(
        self, sink: AnswerSink, then: AnswerParser, tags: tuple[str, str], *, is_open: bool = False
    ) -> None:
        self._open_tag, close_tag = tags
        super().__init__(sink, {close_tag: self._close})
        self._then = then
        self.is_reasoning = is_open
        self.is_over = False
        self._state = self._trim if is_open else self._begin

    def feed(self, text: str) -> None:
        if self.is_over:
            self._then.feed(text)
        else:
            super().feed(text)

    def finish(self) -> None:
        super().finish()
        self._then.finish()

    def _end(self) -> None:
        pass

    def _begin(self) -> bool:
        at = self._at
        begins = self._may_begin(self._open_tag) if self._skip() else (False if self._is_last else None)
        if begins:
            self.is_reasoning = True
            return self._go(self._trim)
        self._at = at
        if begins is None and len(self._text) - at < MAX_HEADER:
            return False
        return self._close()

    def _trim(self) -> bool:
        return self._go(self._reasoning) if self._skip("\n") else False

    def _reasoning(self) -> bool:
        assert self._markers is not None
        piece, found = self._up_to(self._markers)
        self.sink.reason(piece)
        if found is None:
            return False
        if found[0] == self._open_tag:
            self._at = found.end()
            return True
        if found[0] in self._openers:
            self._at = found.end()
        self.sink.edge()
        return self._close()

    def _close(self) -> bool:
        """Ends the reasoning, if there is any. The other parser gets the unread text and all that follows."""
        self.is_reasoning, self.is_over = False, True
        self._then.feed(self._rest())
        return False
