"""KV reservation in the scheduler: preallocated, as tokens come, and as outputs are expected."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from quire.models.kv_groups import KVGroup
from tests.fixtures.fake_engine import FULL, FakeEngine

KINDS = ("no_evict", "predicted", "on_demand")
HYBRID = (KVGroup(None, (0,)), KVGroup(12, (1,)))


class Run(NamedTuple):
    outputs: dict[str, list[int]]
    num_steps: int
    num_preemptions: int
    mean_running: float


def run(kind: str, *, seed: int = 0, count: int = 150, num_blocks: int = 110, **options: Any) -> Run:
    """Requests that may generate 160 tokens; one token in 50 is an end token, so most end long before."""
    rng = random.Random(seed)
    engine = FakeEngine(
        num_blocks=num_blocks, max_num_batched_tokens=128, max_num_seqs=48, kv_reservation=kind, **options
    )
    num_running = []
    for index in range(count):
        engine.add(f"r{index}", rng.randint(4, 24), 160, ignore_eos=False)
    while engine.scheduler.has_unfinished():
        num_running.append(len(engine.step().scheduled))
    engine.check_outputs()
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == num_blocks
    # What fills the machine: without the last requests, which run as few as they are.
    full = num_running[: len(num_running) * 3 // 4]
    return Run(engine.outputs, len(num_running), stats.num_preemptions, sum(full) / len(full))


@pytest.mark.row("B8", whole=True)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_evict_never_preempts_on_demand_runs_more_at_a_time_predicted_is_between(seed: int) -> None:
    no_evict, predicted, on_demand = (run(kind, seed=seed) for kind in KINDS)
    assert no_evict.outputs == predicted.outputs == on_demand.outputs
    assert no_evict.num_preemptions == 0
    assert 2 * predicted.num_preemptions < on_demand.num_preemptions
    assert 1.3 * no_evict.mean_running < predicted.mean_running < on_demand.mean_running
    assert predicted.num_steps < 0.8 * no_evict.num_steps


@pytest.mark.row("B8")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"cache": {"enable_prefix_caching": True}},
        {"cache": {"enable_prefix_caching": True}, "lookahead": True},
        {"groups": HYBRID, "num_blocks": 70, "cache": {"enable_prefix_caching": True}},
        {"queue_policy": "shortest_first", "batch_policy": "prefill_first"},
        {"queue_policy": "fair", "batch_policy": "decode_first"},
    ],
    ids=["plain", "chunks", "prefix cache", "lookahead", "windows", "shortest first", "fair"],
)
def test_no_evict_keeps_its_word_whatever_else_is_on(options: dict[str, Any]) -> None:
    rng = random.Random(7)
    # Any one of the requests fits into the pool with all its choices; one that does not runs alone.
    limits = {"num_blocks": 40, "max_num_batched_tokens": 64, **options}
    engine = FakeEngine(max_num_seqs=24, kv_reservation="no_evict", **limits)
    beginnings = [[rng.randrange(50) for _ in range(24)] for _ in range(3)]
    most_running = 0
    for index in range(120):
        prompt = rng.choice(beginnings)[: rng.randint(0, 24)] + [rng.randrange(50)] * rng.randint(1, 6)
        n = rng.choice((1, 1, 1, 2, 3))
        engine.add(f"r{index}", 0, rng.randint(1, 40), prompt=prompt, n=n, seed=index, temperature=1.0)
        for _ in range(rng.randint(0, 3)):
            most_running = max(most_running, len(engine.step().scheduled))
        if rng.random() < 0.1:
            engine.abort(f"r{rng.randint(0, index)}")
    engine.run()
    assert engine.scheduler.roster.num_preemptions == 0
    assert most_running >= 3
    engine.check_outputs()


@pytest.mark.row("B8")
def test_the_same_load_on_demand_does_preempt() -> None:
    """What the test above would be worth nothing without."""
    engine = FakeEngine(num_blocks=40, max_num_batched_tokens=64, max_num_seqs=24, groups=FULL)
    for index in range(40):
        engine.add(f"r{index}", 10, 40)
    engine.run()
    assert engine.scheduler.roster.num_preemptions > 10
    engine.check_outputs()
