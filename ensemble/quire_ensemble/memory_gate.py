"""MemoryGate: limits how much memory the work of several threads uses at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MemoryGate:
    """Admits threads one after the other, each when enough of the capacity, or all of it, is free. No thread
    overtakes the one whose turn it is, so a thread that needs much is not starved by those that need little.
    The capacity may be in any unit."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._turn = threading.Lock()
        self._left = threading.Condition()

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Context manager: waits until `amount` is free, and holds it until its block ends. An amount above
        the capacity waits until nothing is held."""
        with self._turn, self._left:
            self._left.wait_for(lambda: not self.used or self.used + amount <= self.capacity)
            self.used += amount
        try:
            yield
        finally:
            with self._left:
                self.used -= amount
                self._left.notify()
