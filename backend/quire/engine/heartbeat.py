"""Heartbeat: the time by which an engine must act again, in memory that its frontends map.

Reading it costs no message, and an idle engine need not wake up to write it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time

_BEAT = struct.Struct("=dd")
TOKENS_PER_LIMIT = 1024
"""Number of tokens that extend a step's time limit by another `watchdog_s`."""


class Heartbeat:
    """Two times in CLOCK_MONOTONIC seconds: when the engine last beat, and when it is overdue.

    Args:
        fd: descriptor of the file to map; it is closed.
        watchdog_s: seconds that the engine may be silent; 0: no limit. Used only by the writer.
    """

    def __init__(self, fd: int, watchdog_s: float = 0.0) -> None:
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._watchdog_s = watchdog_s

    def beat(self, num_tokens: int = 0) -> None:
        """Records a sign of life. The time limit begins anew, and is longer by the tokens of the steps in
        flight (`num_tokens`)."""
        now = time.monotonic()
        limit_s = self._watchdog_s * (1.0 + num_tokens / TOKENS_PER_LIMIT)
        _BEAT.pack_into(self._memory, 0, now, now + limit_s if limit_s else math.inf)

    def rest(self) -> None:
        """Records that the engine waits for messages, or does work without a time limit, so that it is not
        overdue until the next `beat`."""
        _BEAT.pack_into(self._memory, 0, time.monotonic(), math.inf)

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() > self.read()[1]

    def read(self) -> tuple[float, float]:
        """Returns when the engine last beat and when it is overdue; inf: at no time, because it is idle, has
        no time limit at present or has not beaten yet."""
        beat, due = _BEAT.unpack_from(self._memory)
        return beat, due or math.inf
