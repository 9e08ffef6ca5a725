"""AdapterSlots: which adapters lie in the runner's slots, and who may have one next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.adapters import Adapter, AdapterLoad, AdapterWeights


@dataclass(slots=True)
class _Slot:
    adapter: Adapter | None = None
    num_holders: int = 0
    """Running requests that are computed with it."""
    held_at: int = 0
    """Number of the last time that a request began with it; larger is later."""


class AdapterSlots:
    """A request with an adapter runs only while that lies in a slot, and holds it until it waits or ends.

    Waiting requests are asked for in the order of the queue. The first that finds its adapter in no slot, and
    all slots held, is promised the slot with the fewest holders: nobody behind it may begin with what lies
    there. So each gets a slot when those that run with one adapter have ended, and meanwhile requests behind
    it run that need no slot or another one. Of slots that nobody holds the least recently used is taken.

    Args:
        num_slots: of the runner.
        weights: of an adapter; None: they are not in host memory, and are read from now on.
    """

    def __init__(self, num_slots: int, weights: Callable[[Adapter], AdapterWeights | None]) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._weights = weights
        self._slot_of: dict[Adapter, int] = {}
        self._promised: dict[int, Adapter] = {}
        """Slots of waiting requests of this plan."""
        self._loads: list[AdapterLoad] = []
        self._num_holds = 0
        self.waiting: set[Adapter] = set()
        """Adapters for which the latest plan passed over a request: each needs a slot, or its weights."""
        self.is_reading = False
        """Whether one of these waits for its weights alone."""
        self.num_hits = self.num_loads = self.num_evictions = 0

    def begin_plan(self) -> None:
        """Forgets what was promised to requests of the plan before: they are asked for again."""
        self._promised.clear()
        self.waiting.clear()
        self.is_reading = False

    def may_run(self, adapter: Adapter) -> bool:
        """Whether a waiting request of this adapter may run from now on, as far as slots are concerned."""
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
        """The slot that will be this adapter's; None: others wait for all of them."""
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
        """A request runs from now on; it `may_run`, or another of its adapter does.

        Args:
            is_new: whether it counts as a hit or a miss.
        """
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
        """A request that held its adapter's slot runs no more."""
        self._slots[self._slot_of[adapter]].num_holders -= 1

    def slot_of(self, adapter: Adapter) -> int:
        """Where it lies; -1: in no slot."""
        return self._slot_of.get(adapter, -1)

    @property
    def num_held(self) -> int:
        return sum(slot.num_holders > 0 for slot in self._slots)

    def take_loads(self) -> list[AdapterLoad]:
        """Hands over the adapters that the next step brings into slots, once."""
        loads, self._loads = self._loads, []
        return loads

    def load_again(self, loads: list[AdapterLoad]) -> None:
        """Has the next step bring what one was to bring that has failed."""
        self._loads = loads + self._loads

    def forget(self, adapter: Adapter) -> None:
        """The adapter is unloaded; nobody holds its slot."""
        slot = self._slot_of.pop(adapter, None)
        if slot is not None:
            assert not self._slots[slot].num_holders, adapter
            self._slots[slot] = _Slot()

    def clear(self) -> None:
        """The slots are gone, with nobody who held one; new ones are empty."""
        for adapter in list(self._slot_of):
            self.forget(adapter)
        self._loads.clear()

    def check_integrity(self, running: list[Adapter]) -> None:
        """Asserts what must hold between any two calls; `running`: of each running request that has one."""
        for slot in self._slots:
            own = sum(adapter is slot.adapter for adapter in running)
            assert slot.num_holders == own, (slot, own)
        assert self._slot_of == {
            slot.adapter: number for number, slot in enumerate(self._slots) if slot.adapter is not None
        }
        assert all(adapter in self._slot_of for adapter in running)
