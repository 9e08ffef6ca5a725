"""HostTier: keeps blocks in host memory, with LRU eviction; pinned blocks stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.kv_tiers.connector import BlockArray, KVConnector
from quire_common.machine import available_memory


class HostTier(KVConnector):
    """Holds blocks in one allocation of at most `capacity_bytes`, in slots of one block each.

    Data is copied outside the lock, so no call waits for another thread's copy, except that a pinned save may
    if all slots are pinned or being filled. A reader compares the slot's generation before and after its
    copy; if the slot was given to another block in between, the read is a miss.
    """

    name: ClassVar[str] = "host"

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        """Allocates and touches the memory.

        Raises:
            ConfigError: the capacity is less than one block, or more than the memory available on the machine
                and in this process's control group.
        """
        self.num_slots = capacity_bytes // block_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"host_cache_memory={capacity_bytes} holds no block: one has {block_bytes} bytes"
            )
        available = available_memory()
        if capacity_bytes > available:
            raise ConfigError(
                f"host_cache_memory asks for {capacity_bytes / 2**20:.0f} MiB, but only "
                f"{available / 2**20:.0f} MiB of memory are available"
            )
        self.block_bytes = block_bytes
        self._arena: BlockArray = np.empty((self.num_slots, block_bytes), dtype=np.uint8)
        self._arena.fill(0)  # the memory is really there before the model is called ready
        self._lock = threading.Condition()
        self._num_filling = 0
        """Number of slots that are being written and belong to no key yet."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._generation = [0] * self.num_slots
        """Number of times that each slot was given to a block."""
        self._cached: OrderedDict[bytes, int] = OrderedDict()
        """Slots of the blocks that are not pinned, by key, least recently used first."""
        self._pinned: dict[bytes, int] = {}
        self._num_saved = self._num_loaded = self._num_evicted = self._num_dropped = 0

    def contains(self, key: bytes) -> bool:
        return key in self._cached or key in self._pinned

    def can_pin(self, count: int) -> bool:
        """Returns whether this tier could pin `count` more blocks now; another caller may pin first."""
        return count <= self.num_slots - len(self._pinned)

    def save(self, keys: Sequence[bytes], data: BlockArray, *, pinned: bool = False) -> None:
        """Copies blocks into the tier; pinned ones stay until `drop`. A block is skipped if all slots are
        pinned or being filled; with `pinned`, the call first waits for those being filled. Pinned blocks that
        `can_pin` allowed are not skipped if nothing else was pinned since."""
        for key, row in zip(keys, data, strict=True):
            self._save(key, row, pinned)

    def _save(self, key: bytes, row: BlockArray, pinned: bool) -> None:
        with self._lock:
            if key in self._pinned:
                return
            if key in self._cached:
                if pinned:
                    self._pin(key)
                else:
                    self._cached.move_to_end(key)
                return
            slot = self._take_slot()
            while slot is None and pinned and self._num_filling:
                self._lock.wait()
                slot = self._take_slot()
            if slot is None:
                self._num_dropped += 1
                return
            self._num_filling += 1
        self._arena[slot] = row
        with self._lock:
            self._num_filling -= 1
            self._lock.notify_all()
            if key in self._cached or key in self._pinned:  # another thread saved it meanwhile
                self._free.append(slot)
                if pinned and key in self._cached:
                    self._pin(key)
                return
            (self._pinned if pinned else self._cached)[key] = slot
            self._num_saved += 1

    def _pin(self, key: bytes) -> None:
        """Moves a cached block to the pinned ones; `contains`, which takes no lock, finds it throughout."""
        self._pinned[key] = self._cached[key]
        del self._cached[key]

    def _take_slot(self) -> int | None:
        """Returns a slot without a key, if necessary by evicting the least recently used block; None: all
        slots are pinned or being filled."""
        if self._free:
            slot = self._free.pop()
        elif self._cached:
            _, slot = self._cached.popitem(last=False)
            self._num_evicted += 1
        else:
            return None
        self._generation[slot] += 1
        return slot

    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        for index, key in enumerate(keys):
            with self._lock:
                slot = self._cached.get(key)
                if slot is not None:
                    self._cached.move_to_end(key)
                elif key in self._pinned:
                    slot = self._pinned[key]
                else:
                    return index
                generation = self._generation[slot]
            out[index] = self._arena[slot]
            with self._lock:
                if self._generation[slot] != generation:
                    return index
                self._num_loaded += 1
        return len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key in self._cached:
                    self._cached.move_to_end(key)

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                slot = self._cached.pop(key, None)
                if slot is None:
                    slot = self._pinned.pop(key, None)
                if slot is not None:
                    self._free.append(slot)

    def clear(self) -> int:
        """Forgets all blocks except pinned ones; returns how many."""
        with self._lock:
            count = len(self._cached)
            self._free.extend(self._cached.values())
            self._cached.clear()
            return count

    def close(self) -> None:
        with self._lock:
            self._cached.clear()
            self._pinned.clear()
            self._free.clear()
            self._arena = np.empty((0, self.block_bytes), dtype=np.uint8)

    def stats(self) -> dict[str, float]:
        num_blocks = len(self._cached) + len(self._pinned)
        return {
            "blocks": num_blocks,
            "bytes": num_blocks * self.block_bytes,
            "capacity_blocks": self.num_slots,
            "pinned_blocks": len(self._pinned),
            "saved_blocks": self._num_saved,
            "loaded_blocks": self._num_loaded,
            "evicted_blocks": self._num_evicted,
            "dropped_blocks": self._num_dropped,
        }
