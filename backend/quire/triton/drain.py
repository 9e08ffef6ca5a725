"""Drain: notices that the model is being unloaded, and says when the time of its running requests is over.

Triton tells a backend of it only when the last request has ended (`finalize`), for which it waits without a
limit; but it says so to who asks.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger("quire")

LOOK_S = 0.5
"""Time between two questions, which are asked while requests are open: each is a round trip to the server,
some 150 us."""
STILL_S = 2.5
"""A server that has been told to end does something more often than this."""
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


class Drain:
    """Owned by the responder's thread.

    Args:
        is_wanted: whether Triton would give the model requests; None: not known.
        limit_s: how long those that run may go on once it would not.
    """

    def __init__(self, is_wanted: Callable[[], bool | None] = lambda: None, limit_s: float = 0.0) -> None:
        self._is_wanted, self._limit_s = is_wanted, limit_s
        self._ends_at: float | None = None
        self.next_look = 0.0
        self.is_asking = False
        """Whether the server is being asked; one that has the backend asked in turn (26.03) must be told that
        it is ready, or its answer says nothing of an unload."""

    @property
    def is_on(self) -> bool:
        """Whether the model is to go: nothing new is taken."""
        return self._ends_at is not None

    def is_over(self, now: float) -> bool:
        """Whether what is open must end now."""
        if now >= self.next_look:
            self.next_look = now + LOOK_S
            self.is_asking = True
            wanted = self._is_wanted()
            self.is_asking = False
            match wanted:
                case True:
                    self._ends_at = None
                case False if self._ends_at is None:
                    logger.info("frontend: unloading; requests may go on for %g s", self._limit_s)
                    self._ends_at = now + self._limit_s
        if self._ends_at is None:
            return False
        self.next_look = min(self.next_look, max(self._ends_at, now))
        return now >= self._ends_at


class ServerAnswer:
    """Whether the server gives a model requests.

    One that ends must not be asked: 24.10 does not answer then, or hangs at its end, and all responses of the
    stub with it. Its first thread, which waits for signals, comes to life then, and again every second; so it
    is asked only when that thread has been still for a while.
    """

    def __init__(self, pb_utils: Any, model: str, version: str, server_pid: int) -> None:
        self._ask = lambda: pb_utils.is_model_ready(model_name=model, model_version=version)
        self._status = Path(f"/proc/{server_pid}/task/{server_pid}/status")
        self._switches, self._moved_at = "", 0.0

    def is_wanted(self) -> bool | None:
        """None: it cannot be asked now, or does not answer."""
        now = time.monotonic()
        try:
            found = _SWITCHES.search(self._status.read_text("utf-8", errors="replace"))
        except OSError:
            return None
        if found is None:
            return None
        if found[1] != self._switches:
            self._switches, self._moved_at = found[1], now
        if now - self._moved_at < STILL_S:
            return None
        try:
            return bool(self._ask())
        except Exception:  # full shared memory, for example
            return None
