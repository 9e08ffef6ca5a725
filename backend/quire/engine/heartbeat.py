"""Heartbeat: by when an engine will have done something again, in memory that its frontends map.

To read it costs no message, and an idle engine need not wake to write it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time

_BEAT = struct.Struct("=dd")
TOKENS_PER_LIMIT = 1024
"""Tokens that prolong a step's limit by `watchdog_s`."""


class Heartbeat:
    """Two numbers, CLOCK_MONOTONIC seconds: when the engine last beat, and when it is overdue.

    Args:
        fd: of a file, which is closed.
        watchdog_s: how long the engine may be silent; 0: for ever. Only for who writes.
    """

    def __init__(self, fd: int, watchdog_s: float = 0.0) -> None:
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._watchdog_s = watchdog_s

    def beat(self, num_tokens: int = 0) -> None:
        """Something is done from here on, a step of so many tokens perhaps."""
        now = time.monotonic()
        limit_s = self._watchdog_s * (1.0 + num_tokens / TOKENS_PER_LIMIT)
        _BEAT.pack_into(self._memory, 0, now, now + limit_s if limit_s else math.inf)

    def rest(self) -> None:
        """The engine waits for messages, as long as none comes."""
        _BEAT.pack_into(self._memory, 0, time.monotonic(), math.inf)

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self.read()[1]

    def read(self) -> tuple[float, float]:
        """When it last beat, and when it is overdue; inf: at no time, as it rests."""
        beat, due = _BEAT.unpack_from(self._memory)
        return beat, due or math.inf
