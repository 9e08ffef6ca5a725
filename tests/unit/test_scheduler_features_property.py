"""Random operations with every feature on, under many configurations: see `SchedulerWorld`."""

from __future__ import annotations

from typing import Any

import pytest

from quire.models.kv_groups import KVGroup
from tests.fixtures.scheduler_world import LIMITS, SchedulerWorld

HYBRID = (KVGroup(None, (2,)), KVGroup(9, (0,)), KVGroup(9, (1,)))
SLIDING = (KVGroup(6, (0, 1)),)
TENANTS = '{"a": {"max_running": 2, "weight": 2}, "b": {"tokens_per_minute": 600, "max_waiting": 4}}'

WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lookahead": {"lookahead": True},
    "sliding": {"groups": SLIDING},
    "hybrid": {"groups": HYBRID, "num_blocks": 72, "lookahead": True},
    "swap": {"host_blocks": 16, "preemption_mode": "swap"},
    "swap, hybrid, lookahead": {
        "groups": HYBRID,
        "num_blocks": 66,
        "host_blocks": 200,
        "preemption_mode": "swap",
        "lookahead": True,
    },
    "hybrid, two ahead": {"groups": HYBRID, "num_blocks": 66, "lookahead": 2},
    "priority, swap, two ahead": {
        "queue_policy": "priority",
        "host_blocks": 40,
        "preemption_mode": "swap",
        "lookahead": 2,
    },
    "priority, lookahead": {"queue_policy": "priority", "lookahead": True, "ageing_s": 2.0},
    "priority, swap, chunks": {
        "queue_policy": "priority",
        "host_blocks": 40,
        "preemption_mode": "swap",
        "max_prefill_tokens_per_request": 7,
    },
    "fair tenants": {"queue_policy": "fair", "tenants": TENANTS, "lookahead": True},
    "longest prefix": {
        "queue_policy": "longest_prefix",
        "max_long_prefills": 1,
    },
    "shortest first, predicted": {"queue_policy": "shortest_first", "kv_reservation": "predicted"},
    "no evict": {"kv_reservation": "no_evict", "lookahead": True},
    "prefill first": {"batch_policy": "prefill_first", "lookahead": True},
    "decode first": {"batch_policy": "decode_first", "lookahead": True},
    "static": {"batch_policy": "static", "lookahead": True},
    "lookahead, predicted, chunks": {
        "kv_reservation": "predicted",
        "max_prefill_tokens_per_request": 7,
        "lookahead": True,
    },
    "time to live": {"cache": {"cache_ttl_s": 2.0}},
}


def run(name: str, num_operations: int, seed: int) -> SchedulerWorld:
    world = SchedulerWorld(seed, **{**LIMITS, **WORLDS[name]})
    world.run(num_operations)
    return world


@pytest.mark.parametrize("name", WORLDS)
def test_every_output_is_that_of_the_request_alone(name: str) -> None:
    world = run(name, 5_000, seed=4)
    seen, stats = world.seen, world.scheduler.stats()
    assert seen["timeout"] and seen["stop"] and seen["length"] and seen["copies"], seen
    assert seen["cancelled"] and seen["failed steps"] and seen["failed rows"], seen
    assert seen["beam search"], seen
    assert stats.num_cached_tokens > 0
    assert seen["two in flight"] or not world.engine.lookahead
    if name == "no evict":
        # Choices of one request may be, where it was let in as nothing else ran.
        assert not seen["preempted for others"]
    if "swap" in name:
        assert stats.num_swaps > 0 and seen["loads"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_a_million_operations(name: str) -> None:
    run(name, 1_000_000 // len(WORLDS) + 1, seed=2)
