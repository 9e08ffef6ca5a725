"""Outputs of the vision encoder by content hash, so that an image whose output is still stored costs no
encoder run."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np


class EncoderCache:
    """Cache of arrays with a bound on their bytes, which evicts the least recently used. For one thread.

    Only the arrays' own bytes count. Read-only copies are stored, because an array cut from a batch's output
    would keep the whole batch in memory.

    Attributes:
        bytes: sum of the stored arrays' sizes; at most `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` 0 keeps nothing; a negative number raises ValueError."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[str, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        """Whether the key is stored. Does not count as a use of the entry."""
        return key in self._entries

    def get(self, key: str) -> np.ndarray | None:
        """Returns the stored array (read-only) and marks it as most recently used; None if there is none."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: str, value: np.ndarray) -> None:
        """Stores a copy of the array in place of the key's old one, if any.

        If the array is larger than `max_bytes`, the old one is removed, nothing is stored, and no other entry
        is evicted.
        """
        old = self._entries.pop(key, None)
        if old is not None:
            self.bytes -= old.nbytes
        if value.nbytes > self.max_bytes:
            return
        while self.bytes + value.nbytes > self.max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.bytes -= evicted.nbytes
        stored = np.array(value, copy=True, order="C")
        stored.flags.writeable = False
        self._entries[key] = stored
        self.bytes += stored.nbytes
