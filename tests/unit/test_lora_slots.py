"""Slots of adapters: who gets one, who waits, and what the runner is told."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire.adapters import Adapter, AdapterWeights
from quire.core.adapter_slots import AdapterSlots
from quire.core.planner import MAX_PASSED_OVER
from quire.errors import CheckpointError
from quire.outputs import SchedulerOutput
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_engine import FakeEngine


class Store:
    """Adapters, and which of them have their weights in host memory."""

    def __init__(self, count: int) -> None:
        self.adapters = [Adapter(f"a{n}", "", 1, bytes([n] * 16), n) for n in range(count)]
        self.weights = {
            one: AdapterWeights([(0, one.number + 1)], np.empty(0, np.uint8)) for one in self.adapters
        }
        self.missing: set[Adapter] = set()

    def find(self, adapter: Adapter) -> AdapterWeights | None:
        return None if adapter in self.missing else self.weights[adapter]


class Watch:
    """A runner's slots: each row must find its own adapter in the slot that it was told."""

    def __init__(self, engine: FakeEngine, store: Store) -> None:
        self.engine, self.store = engine, store
        self.slots: dict[int, AdapterWeights] = {}
        self.rows: dict[str, int] = {}

    def step(self) -> SchedulerOutput:
        plan = self.engine.step()
        self.slots |= {load.slot: load.weights for load in plan.adapter_loads}
        for row in plan.scheduled:
            if row.new is not None:
                self.rows[row.request_id] = row.new.slot
            adapter = self.engine.requests[row.request_id.partition("#")[0]].adapter
            slot = self.rows[row.request_id]
            assert (slot == -1) == (adapter is None)
            assert adapter is None or self.slots[slot] is self.store.weights[adapter], row.request_id
        return plan


def scheduled(plan: SchedulerOutput) -> list[str]:
    return [row.request_id for row in plan.scheduled]


@pytest.mark.row("E21")
@pytest.mark.parametrize("lookahead", [False, True])
def test_random_requests_of_many_adapters(lookahead: bool) -> None:
    """With preemptions, aborts, choices and failed steps, all get what they get alone."""
    rng, store = random.Random(5), Store(9)
    slots = AdapterSlots(3, store.find)
    engine = FakeEngine(
        num_blocks=24, max_num_seqs=6, max_num_batched_tokens=20, lookahead=lookahead, adapters=slots
    )
    watch, count = Watch(engine, store), 0
    for _ in range(400):
        if rng.random() < 0.5 and len(engine.scheduler.roster.requests) < 20:
            adapter = rng.choice([None, *store.adapters])
            engine.add(
                f"r{count}", rng.randint(1, 20), rng.randint(1, 9), adapter=adapter, n=rng.choice([1, 1, 2])
            )
            count += 1
        if rng.random() < 0.05 and count:
            engine.abort(f"r{rng.randrange(count)}")
        store.missing = {one for one in store.adapters if rng.random() < 0.2}
        watch.step()
    store.missing = set()
    for _ in range(500):
        if engine.scheduler.has_unfinished():
            watch.step()
    assert not engine.scheduler.has_unfinished()
    engine.check_outputs()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions and stats.num_adapter_hits and stats.num_adapter_evictions
    assert stats.num_adapter_slots == 0


@pytest.mark.row("E21")
def test_those_behind_one_that_waits_run_and_it_gets_its_slot() -> None:
    store = Store(3)
    engine = FakeEngine(adapters=AdapterSlots(2, store.find), max_num_seqs=8)
    watch = Watch(engine, store)
    a, b, c = store.adapters
    engine.add("a", 4, 4, adapter=a)
    engine.add("b", 4, 30, adapter=b)
    engine.add("b2", 4, 30, adapter=b)
    engine.add("c", 4, 4, adapter=c)
    engine.add("plain", 4, 4)
    engine.add("more b", 4, 4, adapter=b)
    engine.add("more a", 4, 4, adapter=a)
    assert scheduled(watch.step()) == ["a", "b", "b2", "plain", "more b"], "a's slot is promised to c"
    assert engine.scheduler.stats().waiting.adapter == 2
    while "a" not in engine.reasons:
        watch.step()
    assert "c" in scheduled(watch.step()), "although a request of a was there to take its place"
    while "more a" not in engine.reasons:
        watch.step()
    engine.run()
    engine.check_outputs()


def test_an_adapter_is_not_starved_by_others_that_keep_coming() -> None:
    store = Store(3)
    engine = FakeEngine(adapters=AdapterSlots(2, store.find), max_num_seqs=8, num_blocks=256)
    for number in range(60):
        for adapter in store.adapters[:2]:
            engine.add(f"{adapter.name}-{number}", 2, 5, adapter=adapter)
        if number == 5:
            engine.add("other", 2, 5, adapter=store.adapters[2])
        if number < 40:
            engine.step()
    for _ in range(20):
        engine.step()
    assert "other" in engine.reasons


def test_however_many_wait_for_a_slot_those_behind_them_run() -> None:
    store = Store(2)
    engine = FakeEngine(adapters=AdapterSlots(1, store.find), max_num_seqs=4)
    engine.add("long", 4, 40, adapter=store.adapters[0])
    engine.step()
    for number in range(2 * MAX_PASSED_OVER):
        engine.add(f"other-{number}", 2, 1, adapter=store.adapters[1])
    engine.add("plain", 4, 1)
    engine.step()
    assert "plain" in engine.reasons


def test_beams_are_not_kept_apart_by_one_who_waits_for_their_slot() -> None:
    """A beam that was preempted comes back although the slot is promised: the others wait for it."""
    store = Store(2)
    engine = FakeEngine(
        num_blocks=12, max_num_seqs=8, queue_policy="priority", step_s=0.01,
        adapters=AdapterSlots(1, store.find),
    )  # fmt: skip

    def add(name: str, *sizes: int, priority: int, **options: Any) -> None:
        engine.add(name, *sizes, scheduling=SchedulingParams(priority=priority), **options)

    add("beams", 9, 12, priority=0, adapter=store.adapters[0], beam_width=3, n=2)
    for _ in range(2):
        engine.step()
    add("urgent", 12, 8, priority=-2)
    for _ in range(4):
        engine.step()
    add("other", 4, 4, priority=-1, adapter=store.adapters[1])
    for number in range(200):
        if len(engine.scheduler.roster.requests) < 7:
            add(f"plain-{number}", 4, 6, priority=1)
        engine.step()
    assert {"urgent", "beams", "other"} <= engine.reasons.keys()


def test_the_least_recently_used_slot_is_taken() -> None:
    store = Store(3)
    slots = AdapterSlots(2, store.find)
    engine = FakeEngine(adapters=slots)
    for name, number in (("1", 0), ("2", 1), ("3", 0), ("4", 2)):
        engine.add(name, 3, 2, adapter=store.adapters[number])
        engine.run()
    assert [slots.slot_of(one) >= 0 for one in store.adapters] == [True, False, True]
    assert (slots.num_hits, slots.num_loads, slots.num_evictions) == (1, 3, 1)
    assert (store.adapters[0].num_hits, store.adapters[0].num_loads) == (1, 1)


def test_a_step_that_fails_is_told_again_what_it_was_to_bring() -> None:
    store = Store(2)
    engine = FakeEngine(adapters=AdapterSlots(2, store.find), max_num_seqs=1)
    watch = Watch(engine, store)
    engine.add("1", 3, 2, adapter=store.adapters[0])
    engine.runner.execute(engine.scheduler.schedule())
    engine.collect(engine.scheduler.fail("broken"))
    engine.scheduler.check_integrity()
    del engine.requests["1"]
    engine.add("2", 3, 2, adapter=store.adapters[0])
    while engine.scheduler.has_unfinished():
        watch.step()
    engine.check_outputs()


def test_requests_end_whose_weights_are_not_to_be_had() -> None:
    store = Store(2)
    engine = FakeEngine(adapters=AdapterSlots(2, store.find))
    store.missing = {store.adapters[0]}
    engine.add("1", 3, 2, adapter=store.adapters[0])
    engine.add("2", 3, 2, adapter=store.adapters[1])
    assert scheduled(engine.step()) == ["2"]
    (output,) = engine.scheduler.end_waiting(store.adapters[0], CheckpointError("gone"))
    assert (output.request_id, output.error, output.error_code) == ("1", "gone", "INVALID_ARG")
    engine.run()
