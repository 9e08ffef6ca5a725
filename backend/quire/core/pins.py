"""Pins: keep blocks after the end of the requests that computed them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from quire.core.block_pool import BlockPool


@dataclass(slots=True)
class _Pin:
    block_ids: list[int]
    deadline: float


class Pins:
    """Holds named references to blocks, until a deadline or until they are released. Several pins may hold
    the same block.

    Args:
        max_blocks: most blocks held. It is also the most pins, because any number of pins may share blocks.
    """

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pool = pool
        self._pins: dict[Hashable, _Pin] = {}  # least recently used first
        self._counts: Counter[int] = Counter()  # number of pins that hold each block
        self._first_deadline = math.inf  # no pin has an earlier deadline
        self._now = 0.0  # time of the latest expire()

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    @property
    def deadlines(self) -> dict[Hashable, float]:
        """Deadline of each pin by its name, least recently used first."""
        return {name: pin.deadline for name, pin in self._pins.items()}

    def hold(self, name: Hashable, block_ids: Sequence[int], deadline: float) -> None:
        """Holds these blocks under `name`. Releases the blocks that this pin held before; without new blocks,
        the pin ends. To make room, releases other pins, the least recently used first.

        Args:
            block_ids: at most `max_blocks` blocks.
            deadline: seconds on the clock of `expire`; the pin's old deadline stays if it is later.
        """
        before = self._pins.get(name)
        if before is not None:
            deadline = max(deadline, before.deadline)
            self.release(name)
        if not block_ids:
            return
        count = len(block_ids)
        while self._pins and max(len(self._counts) + count, len(self._pins) + 1) > self.max_blocks:
            self.release(next(iter(self._pins)))
        for block_id in block_ids:
            self._pool.incref(block_id)
        self._counts.update(block_ids)
        self._pins[name] = _Pin(list(block_ids), deadline)
        self._first_deadline = min(self._first_deadline, deadline)

    def touch(self, name: Hashable, deadline: float) -> None:
        """Makes the pin of this name the most recently used and sets its deadline. No effect if there is
        no such pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            pin.deadline = deadline
            self._pins[name] = pin
            self._first_deadline = min(self._first_deadline, deadline)

    def release(self, name: Hashable) -> bool:
        """Releases the pin of this name; returns whether there was one."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._pool.free(reversed(pin.block_ids), self._now)
        for block_id in pin.block_ids:
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id]
        return True

    def release_all(self) -> int:
        """Releases every pin; returns how many there were."""
        count = len(self._pins)
        for name in list(self._pins):
            self.release(name)
        return count

    def release_oldest(self) -> bool:
        """Releases the least recently used pin; returns whether there was one."""
        return bool(self._pins) and self.release(next(iter(self._pins)))

    @property
    def next_expiry(self) -> float:
        """Time before which no pin expires. It may be earlier than all deadlines, and finite without pins."""
        return self._first_deadline

    def expire(self, now: float) -> None:
        """Releases the pins whose deadline has passed; `now`: seconds."""
        self._now = now
        if self._first_deadline <= now:
            for name, pin in list(self._pins.items()):
                if pin.deadline <= now:
                    self.release(name)
            self._first_deadline = min((pin.deadline for pin in self._pins.values()), default=math.inf)

    def check_integrity(self) -> Counter[int]:
        """Asserts that the counts are right; returns the number of pins' references to each block."""
        counts = Counter(block_id for pin in self._pins.values() for block_id in pin.block_ids)
        assert counts == self._counts, "pinned blocks miscounted"
        assert all(pin.deadline >= self._first_deadline for pin in self._pins.values()), self._pins
        return counts
