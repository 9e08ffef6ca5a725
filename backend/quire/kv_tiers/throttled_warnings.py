"""ThrottledWarnings: one line in the log for a trouble that lasts, however often it is met."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("quire")

QUIET_S = 60.0
"""A cause that was not met for this long is news again."""


class ThrottledWarnings:
    """Remembers what was said, by cause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: dict[str, float] = {}

    def warn(self, cause: str, message: str) -> None:
        """Logs a warning, unless the same cause was met less than QUIET_S ago; causes are few."""
        now = self._clock()
        before = self._met.get(cause)
        self._met[cause] = now
        if before is None or now - before >= QUIET_S:
            logger.warning("%s (further ones are only counted)", message)
