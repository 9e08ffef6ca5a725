"""Blocks of layers with an attention window: a sequence holds what the window covers, however long it is."""

from __future__ import annotations

import pytest

from quire.models.kv_groups import KVGroup
from tests.fixtures.fake_engine import FakeEngine

WINDOW, BLOCK_SIZE = 32, 4
SLIDING = (KVGroup(WINDOW, (0, 1)),)
HYBRID = (KVGroup(None, (0,)), KVGroup(WINDOW, (1,)), KVGroup(WINDOW, (2,)))


def window_blocks(step_tokens: int) -> int:
    """Blocks that cover the window and the tokens of a step, at the worst alignment."""
    return -(-(WINDOW - 1 + step_tokens) // BLOCK_SIZE) + 1


@pytest.mark.row("C14")
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_a_long_sequence_holds_a_window_of_blocks(chunk: int) -> None:
    engine = FakeEngine(num_blocks=400, groups=SLIDING, max_num_batched_tokens=chunk)
    request = engine.add("long", 500, 700)
    used = []
    while engine.scheduler.has_unfinished():
        step_tokens = engine.step().scheduled[0].num_scheduled_tokens
        used.append(engine.kv.pool.num_in_use)
        assert used[-1] <= window_blocks(step_tokens)
        if request.num_output_tokens > 1 and engine.scheduler.has_unfinished():
            assert WINDOW // BLOCK_SIZE <= used[-1] <= window_blocks(1)
    assert max(used) <= window_blocks(min(chunk, 500))
    engine.check_outputs()


@pytest.mark.parametrize("window", range(1, 10))
def test_a_block_stays_until_the_last_token_that_sees_it_is_computed(window: int) -> None:
    """One that leaves a token early may belong to another request when it is read."""
    engine = FakeEngine(groups=(KVGroup(window, (0,)),), max_num_batched_tokens=7)
    request = engine.add("r", 20, 30)
    left = 0
    while engine.scheduler.has_unfinished():
        plan = engine.scheduler.schedule()
        if request.table is not None:
            first_seen = max(0, plan.scheduled[0].num_computed_tokens - window + 1)
            left = request.table.released[0]
            assert left * BLOCK_SIZE <= first_seen
        engine.collect(engine.scheduler.update(plan, engine.runner.execute(plan)))
    assert left > 5
    engine.check_outputs()


@pytest.mark.row("C14", clauses=("hybrid",))
def test_of_hybrid_layers_only_those_without_a_window_hold_all() -> None:
    engine = FakeEngine(num_blocks=1000, groups=HYBRID, max_num_batched_tokens=64)
    request = engine.add("long", 300, 500)
    while engine.scheduler.has_unfinished():
        plan = engine.step()
        if not engine.scheduler.has_unfinished():
            break
        full = -(-request.num_computed_tokens // BLOCK_SIZE)
        windows = 2 * window_blocks(plan.scheduled[0].num_scheduled_tokens)
        assert full <= engine.kv.pool.num_in_use <= full + windows
    engine.check_outputs()


@pytest.mark.row("C14")
def test_a_pool_that_one_sequence_would_fill_holds_many_with_windows() -> None:
    runs = {}
    for name, groups in (("full", (KVGroup(None, (0, 1)),)), ("window", SLIDING)):
        engine = FakeEngine(num_blocks=90, groups=groups, max_num_batched_tokens=64, max_num_seqs=16)
        for index in range(8):
            engine.add(f"r{index}", 40, 300)
        most = 0
        while engine.scheduler.has_unfinished():
            most = max(most, len(engine.step().scheduled))
        runs[name] = engine.scheduler.roster.num_preemptions, engine.runner.num_steps
        assert engine.kv.pool.num_in_use == 0
        engine.check_outputs()
    assert runs["window"][0] == 0 and runs["full"][0] > 0
    assert 2 * runs["window"][1] < runs["full"][1]


@pytest.mark.row("C14")
def test_a_sequence_longer_than_the_pool_runs_if_all_layers_have_windows() -> None:
    engine = FakeEngine(num_blocks=40, groups=SLIDING, max_num_batched_tokens=64, max_model_len=4096)
    engine.add("long", 200, 1000)  # 300 blocks without a window
    engine.run()
    assert engine.reasons == {"long": "length"} and len(engine.outputs["long"]) == 1000
    assert engine.scheduler.roster.num_preemptions == 0
    engine.check_outputs()


@pytest.mark.row("C14")
@pytest.mark.parametrize("groups", [SLIDING, HYBRID], ids=["all", "hybrid"])
def test_the_cache_finds_a_prefix_whose_early_blocks_are_gone(groups: tuple[KVGroup, ...]) -> None:
    cache = {"enable_prefix_caching": True}
    # The pool is too small for all of the first request: only what later tokens see must be found.
    num_blocks = 60 if groups is SLIDING else 230
    engine = FakeEngine(num_blocks=num_blocks, groups=groups, max_num_batched_tokens=64, cache=cache)
    first = engine.add("first", 400, 40)
    engine.run()
    follow_up = [*first.token_ids, 7, 7, 7]
    second = engine.add("second", 0, 5, prompt=follow_up)
    engine.run()
    assert second.num_cached_tokens >= 436
    engine.check_outputs()
