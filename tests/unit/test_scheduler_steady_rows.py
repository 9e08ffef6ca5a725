"""Rows that are planned without a look at the blocks are those that would be planned with one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.planner import Planner
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.scheduler_world import LIMITS, SchedulerWorld
from tests.unit.test_scheduler_features_property import WORLDS


class RecordedWorld(SchedulerWorld):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.plans: list[str] = []

    def begin(self) -> None:
        super().begin()
        if not self.scheduler._in_flight:
            return  # the step has failed
        scheduler, plan = self.scheduler, self.scheduler._in_flight[-1]
        counts = (
            plan.num_prefill_tokens,
            scheduler.stats().num_recomputed_tokens,
            scheduler.kv.num_free_blocks,
        )
        self.plans.append(f"{self.steps[-1][0]} {counts} {plan.newly_cached}")


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", WORLDS)
def test_plans_are_the_same_without_steady_rows(
    name: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    for has_steady_rows in (True, False):
        if not has_steady_rows:
            monkeypatch.setattr(Planner, "_plain_decode_until", lambda self, request: 0)
        world = RecordedWorld(3, **{**LIMITS, **WORLDS[name], "block_size": block_size})
        for _ in range(600):
            world.operate()
        world.finish()
        plans.append(world.plans)
    assert len(plans[0]) > 100
    assert plans[0] == plans[1]


@pytest.mark.parametrize("lookahead", [False, True])
def test_decoding_looks_at_the_blocks_twice_per_block(
    lookahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a token needs a new one, and when one becomes full and can be shared."""
    engine = FakeEngine(block_size=16, lookahead=lookahead, cache={"enable_prefix_caching": True})
    looks = 0
    allocate_slots = engine.kv.allocate_slots

    def count(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return allocate_slots(*args)

    monkeypatch.setattr(engine.kv, "allocate_slots", count)
    for i in range(4):
        engine.add(f"r{i}", 10 + i, 100)
    engine.run()
    assert [len(tokens) for tokens in engine.outputs.values()] == [100] * 4
    assert looks <= 4 * (1 + 2 * 100 // 16 + 2)
