"""ThrottledWarnings: logs a lasting problem once, rather than each time it occurs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("quire")

QUIET_S = 60.0
"""Seconds without an occurrence of a cause after which its next occurrence is logged."""


class ThrottledWarnings:
    """Logs warnings, except those that follow another one of the same cause too soon."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: dict[str, float] = {}

    def warn(self, cause: str, message: str) -> None:
        """Logs a warning unless the same cause occurred less than QUIET_S ago; keep the number of causes
        small."""
        now = self._clock()
        before = self._met.get(cause)
        self._met[cause] = now
        if before is None or now - before >= QUIET_S:
            logger.warning("%s (further ones are only counted)", message)
