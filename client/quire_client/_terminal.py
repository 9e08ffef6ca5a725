"""Output of the commands to a terminal: dimmed reasoning, the seconds waited, no control characters."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType


def without_controls(text: str) -> str:
    """Removes control characters other than newline and tab, so that a model cannot move the cursor or change
    the terminal's title."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


class AnswerWriter:
    """Writes an answer to stdout as it comes. Reasoning is shown at a terminal only, dimmed."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_thinking = False

    def reasoning(self, text: str) -> None:
        if self._is_terminal and text:
            self._is_thinking = True
            self._write(f"\x1b[2m{without_controls(text)}\x1b[0m")

    def text(self, text: str) -> None:
        if not text:
            return
        if self._is_thinking:
            self._is_thinking = False
            self._write("\n\n")
        self._write(without_controls(text) if self._is_terminal else text)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


class Waiting:
    """Context manager that shows on stderr, if that is a terminal, for how many seconds nothing has come.

    `over` ends the display.
    """

    AFTER = 1.0
    """Seconds until the display appears, and then between its updates."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()

    def over(self) -> None:
        """Removes the line from the terminal; returns when it is removed."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _show(self) -> None:
        began = time.monotonic()
        shown = False
        while not self._over.wait(self.AFTER):
            shown = True
            sys.stderr.write(f"\r{self._what}, {time.monotonic() - began:.0f} s\x1b[K")
            sys.stderr.flush()
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
