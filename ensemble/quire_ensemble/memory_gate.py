"""MemoryGate: how much work that takes memory is under way at a time, over all threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MemoryGate:
    """Lets in, in the order they come, whatever has room beside those that are in."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._turn = threading.Lock()
        self._left = threading.Condition()

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Waits until `amount` is free; what exceeds the capacity waits until no one else holds any."""
        with self._turn, self._left:
            self._left.wait_for(lambda: not self.used or self.used + amount <= self.capacity)
            self.used += amount
        try:
            yield
        finally:
            with self._left:
                self.used -= amount
                self._left.notify()
