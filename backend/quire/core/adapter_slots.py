"""AdapterSlots: decides which adapters occupy the runner's slots, and which waiting request gets one next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.adapters import Adapter, AdapterLoad, AdapterWeights


@dataclass(slots=True)
class _Slot:
    adapter: Adapter | None = None
    num_holders: int = 0
    """Number of running requests that use this adapter."""
    held_at: int = 0
    """Sequence number of the latest request that began with this adapter; larger is later."""


class AdapterSlots:
    """Assigns adapters to the runner's slots. A request with an adapter runs only while the adapter has a
    slot; it holds the slot until it stops running.

    Waiting requests ask in the order of the queue. An adapter without a slot is promised the slot with the
    fewest holders among those not promised yet. Requests behind it may not begin with the adapter in that
    slot, so its holders become fewer; only choices and beams of running requests may still join them.
    Requests that need no slot, or another slot, go on being admitted. Among slots without holders, the least
    recently used one is reused.

    Args:
        num_slots: number of adapter slots in the runner.
        weights: returns an adapter's weights; None: they are not in host memory yet, and are being read.
    """

    def __init__(self, num_slots: int, weights: Callable[[Adapter], AdapterWeights | None]) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._weights = weights
        self._slot_of: dict[Adapter, int] = {}
        self._promised: dict[int, Adapter] = {}
        """Slots promised in the present plan, each with the adapter of the waiting request."""
        self._loads: list[AdapterLoad] = []
        self._num_holds = 0
        self.waiting: set[Adapter] = set()
        """Adapters for which the latest plan passed over a request: the adapter has no slot, its weights are
        not read yet, or its slot is promised to another adapter."""
        self.is_reading = False
        """Whether at least one adapter in `waiting` lacks only its weights."""
        self.num_hits = self.num_loads = self.num_evictions = 0

    def begin_plan(self) -> None:
        """Drops the promises of the previous plan and empties `waiting`: the waiting requests ask anew in
        each plan."""
        self._promised.clear()
        self.waiting.clear()
        self.is_reading = False

    def may_run(self, adapter: Adapter) -> bool:
        """Returns whether a waiting request with this adapter may begin now: its adapter has a slot that is
        promised to no other, or its weights are read and the slot promised to it has no holders. An adapter
        without a slot is promised one if any is left. If the result is False, adds the adapter to
        `waiting`."""
        slot = self._slot_of.get(adapter)
        if slot is not None:
            if self._promised.get(slot, adapter) is adapter:
                return True
            self.waiting.add(adapter)
            return False
        slot = self._promise(adapter)
        if slot is not None:
            has_weights = self._weights(adapter) is not None
            is_free = not self._slots[slot].num_holders
            if has_weights and is_free:
                return True
            self.is_reading |= is_free
        self.waiting.add(adapter)
        return False

    def _promise(self, adapter: Adapter) -> int | None:
        """Promises this adapter a slot, unless it was promised one before, and returns the slot. None: all
        slots are promised to others."""
        for slot, other in self._promised.items():
            if other is adapter:
                return slot
        left = [slot for slot in range(len(self._slots)) if slot not in self._promised]
        if not left:
            return None
        # While a slot is promised neither figure of it grows, so that it is free in the end.
        slot = min(left, key=lambda one: (self._slots[one].num_holders, self._slots[one].held_at))
        self._promised[slot] = adapter
        return slot

    def hold(self, adapter: Adapter, *, is_new: bool) -> None:
        """Counts a request that begins to run with this adapter, and plans the adapter's load if it has no
        slot. `may_run` allowed it, or a request with the same adapter is already running. `is_new`: whether
        an adapter found in a slot counts as a hit."""
        slot = self._slot_of.get(adapter)
        if slot is None:
            slot = self._bring(adapter)
        elif is_new:
            self.num_hits += 1
            adapter.num_hits += 1
        self._num_holds += 1
        self._slots[slot].num_holders += 1
        self._slots[slot].held_at = self._num_holds

    def _bring(self, adapter: Adapter) -> int:
        slot, weights = self._promise(adapter), self._weights(adapter)
        assert slot is not None and weights is not None and not self._slots[slot].num_holders, adapter
        del self._promised[slot]
        evicted = self._slots[slot].adapter
        if evicted is not None:
            del self._slot_of[evicted]
            self.num_evictions += 1
        self._slots[slot].adapter, self._slot_of[adapter] = adapter, slot
        self._loads.append(AdapterLoad(slot, weights))
        self.num_loads += 1
        adapter.num_loads += 1
        return slot

    def release(self, adapter: Adapter) -> None:
        """Counts that a request stopped running and no longer holds its adapter's slot."""
        self._slots[self._slot_of[adapter]].num_holders -= 1

    def slot_of(self, adapter: Adapter) -> int:
        """Returns the adapter's slot; -1: it has none."""
        return self._slot_of.get(adapter, -1)

    @property
    def num_held(self) -> int:
        return sum(slot.num_holders > 0 for slot in self._slots)

    def take_loads(self) -> list[AdapterLoad]:
        """Returns the loads of adapters that the next step must carry out, and clears the list."""
        loads, self._loads = self._loads, []
        return loads

    def load_again(self, loads: list[AdapterLoad]) -> None:
        """Schedules these loads again for the next step, because the step that carried them failed."""
        self._loads = loads + self._loads

    def forget(self, adapter: Adapter) -> None:
        """Frees an adapter's slot, if it has one; no request may hold it."""
        slot = self._slot_of.pop(adapter, None)
        if slot is not None:
            assert not self._slots[slot].num_holders, adapter
            self._slots[slot] = _Slot()

    def clear(self) -> None:
        """Empties all slots, none of which may have a holder, and drops planned loads, for a runner that
        starts anew."""
        for adapter in list(self._slot_of):
            self.forget(adapter)
        self._loads.clear()

    def check_integrity(self, running: list[Adapter]) -> None:
        """Asserts the invariants that hold between any two calls. `running`: the adapter of each running
        request that has one."""
        for slot in self._slots:
            own = sum(adapter is slot.adapter for adapter in running)
            assert slot.num_holders == own, (slot, own)
        assert self._slot_of == {
            slot.adapter: number for number, slot in enumerate(self._slots) if slot.adapter is not None
        }
        assert all(adapter in self._slot_of for adapter in running)
