"""Steps that fail beside KV tiers and choices: what was to come with them is neither awaited nor trusted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.trace import SchedulerTrace
from quire.kv_tiers import HostTier, KVTiers
from quire.outputs import SchedulerOutput
from quire.request.scheduling_params import SchedulingParams
from quire.worker import model_runner
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import STAGES, FakeKVCache
from tests.fixtures.loopback import LoopbackConnector
from tests.fixtures.runner_of import runner_of

PROMPT = list(range(10, 50))
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
MAX_STEPS = 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def engine(checkpoint: Path, **options: Any) -> LLM:
    values = {"max_model_len": 128, "num_blocks": 64, "block_size": 8, "num_threads": 1, "dtype": "float32"}
    return LLM(checkpoint, **{**values, **options})


def run(llm: LLM, request_id: str) -> tuple[list[int], str]:
    """Tokens and finish reason of a request, within MAX_STEPS."""
    llm.core.add_request(request_id, PROMPT, GREEDY)
    tokens: list[int] = []
    for _ in range(MAX_STEPS):
        for output in llm.core.step():
            tokens += output.new_token_ids
            if output.finish_reason is not None:
                return tokens, output.finish_reason
    raise AssertionError("the request hangs")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_that_fails_before_its_loads_begin_does_not_keep_their_requests(
    checkpoint: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waited for blocks that nobody was fetching, and the engine span around it for ever."""
    llm = engine(checkpoint, host_cache_memory="16MiB", async_scheduling=is_async)
    expected = run(llm, "first")
    llm.core.kv.reset()
    move, failed = model_runner.move_blocks, list[int]()

    def moves(output: SchedulerOutput, *pool_and_tiers: Any) -> None:
        if output.kv_loads and not failed:
            failed.append(output.step)
            raise RuntimeError("the blocks cannot be moved")
        move(output, *pool_and_tiers)

    monkeypatch.setattr(model_runner, "move_blocks", moves)
    assert run(llm, "second") == expected
    assert failed, "nothing was to be loaded"
    llm.core.scheduler.check_integrity()
    assert not llm.core.has_work or not llm.core.step()
    assert llm.core.scheduler.transfers.num_loading == 0
    llm.core.close()


def test_a_load_that_had_begun_when_the_step_failed_is_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(checkpoint, host_cache_memory="16MiB")
    expected = run(llm, "first")
    llm.core.kv.reset()
    move, failed = model_runner.move_blocks, list[int]()

    def moves(output: SchedulerOutput, *pool_and_tiers: Any) -> None:
        move(output, *pool_and_tiers)
        if output.kv_loads and not failed:
            failed.append(output.step)
            raise RuntimeError("too late")

    monkeypatch.setattr(model_runner, "move_blocks", moves)
    assert run(llm, "second") == expected
    assert failed and llm.core.scheduler.transfers.num_loaded_tokens > 0, "the load was to count"
    llm.core.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_one_failure_while_settling_fails_one_step(
    checkpoint: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step stayed in the runner's queue, and each later one met it there instead of itself."""
    llm = engine(checkpoint, async_scheduling=is_async)
    expected = run(llm, "first")
    with monkeypatch.context() as patch:
        patch.setattr(runner_of(llm.core), "_settle", lambda step: 1 / 0)
        assert run(llm, "second") == ([], "error")
    assert run(llm, "third") == expected
    llm.core.scheduler.check_integrity()


def test_copies_of_a_failed_step_are_not_trusted() -> None:
    """Choices that had no row in the step went on from blocks that were never copied: wrong tokens. They are
    computed anew."""
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_batched_tokens=4, queue_policy="priority")
    scheduler = engine.scheduler
    engine.add("a", 6, 8, n=3, temperature=1.0, seed=3)
    while not scheduler.roster._copies:
        engine.step()
    engine.add("b", 12, 8, scheduling=SchedulingParams(priority=-5))
    plan = scheduler.schedule()
    assert plan.block_copies and [row.request_id for row in plan.scheduled] == ["b"]
    outputs = scheduler.fail("broken")
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("b", "error")]
    scheduler.check_integrity()
    del engine.requests["b"]
    engine.runner.was_told_of_failure = True
    engine.run()
    engine.check_outputs()


def test_a_trace_that_cannot_be_written_ends_and_nothing_else(tmp_path: Path) -> None:
    """A full disk ended the engine."""
    engine = FakeEngine(trace=SchedulerTrace("/dev/full"))
    engine.add("a", 6, 8)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.roster.trace is not None
    engine.scheduler.roster.trace.event("anything")


@pytest.mark.parametrize(
    "stats",
    [{"blocks": object()}, {"blocks": float("nan")}, {"blocks": 10**400}, {"blocks": "many"}, None, 1 / 3],
    ids=["object", "NaN", "beyond a float", "text", "none", "no mapping"],
)
def test_a_connector_with_useless_stats_is_used_all_the_same(
    stats: Any, caplog: pytest.LogCaptureFixture
) -> None:
    access = FakeKVCache(4, 4)
    store = LoopbackConnector(block_bytes=access.block_bytes, fingerprint="f")
    tiers = KVTiers([HostTier(2**16, access.block_bytes), store], access)
    try:
        good = tiers.stats()
        assert good["loopback_blocks"] == 0
        store.stats = lambda: stats  # type: ignore[method-assign]
        for _ in range(3):
            found = tiers.stats()
            assert found == {key: good[key] for key in found} and "loopback_failures" in found
            assert "loopback_blocks" not in found
        assert found["loopback_failures"] == 0, "it rests for no such reason"
        assert len(caplog.records) == 1 and "loopback" in caplog.text
    finally:
        tiers.close()


SHARED, REST = list(range(1, 9)), list(range(10, 22))
CACHED: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "cache": {"enable_prefix_caching": True}}


def fail_step(engine: FakeEngine, stage: str, *, meanwhile: str = "") -> None:
    """A step that fails; a request that is cancelled meanwhile."""
    plan = engine.scheduler.schedule()
    engine.runner.fail_at = stage
    with pytest.raises(RuntimeError):
        engine.runner.execute(plan)
    if meanwhile:
        engine.abort(meanwhile)
    engine.collect(engine.scheduler.fail("broken"))
    engine.scheduler.check_integrity()


def test_nobody_finds_what_a_failed_step_was_to_compute_of_a_request_cancelled_meanwhile() -> None:
    """The next request with its prompt took blocks that nobody had written, and had other tokens."""
    engine = FakeEngine(**CACHED)
    prompt = engine.add("a", 17, 4).token_ids
    fail_step(engine, "before all", meanwhile="a")
    assert not engine.kv.pool.cached_hashes()
    engine.add("b", 0, 4, prompt=list(prompt))
    engine.run()
    engine.check_outputs()


def test_nobody_finds_what_a_row_without_finite_logits_has_filled() -> None:
    """It alone has failed; whatever is in its blocks, others must not go on from it."""
    engine = FakeEngine(**CACHED)
    prompt = engine.add("a", 17, 4).token_ids
    plan = engine.scheduler.schedule()
    assert len(engine.kv.pool.cached_hashes()) == 4
    result = engine.runner.execute(plan)
    result.rows[0].error = "no finite logit"
    (output,) = engine.scheduler.update(plan, result)
    assert output.error == "no finite logit" and not engine.kv.pool.cached_hashes()
    del engine.requests["a"]
    engine.add("b", 0, 4, prompt=list(prompt))
    engine.run()
    engine.check_outputs()


def test_nobody_finds_what_a_failed_step_was_to_compute_of_later_choices() -> None:
    """Choices end together: only the first one's blocks were taken back."""
    engine = FakeEngine(**CACHED)
    engine.add("a", 5, 30, n=2, temperature=1.0, seed=3)
    for _ in range(3):
        engine.step()
    texts = [list(request.token_ids) for request in engine.scheduler.roster.running]
    assert [len(text) for text in texts] == [8, 8], "the next step fills a block of each"
    fail_step(engine, "before all")
    engine.requests.clear()
    for index, text in enumerate(texts):
        engine.add(f"b{index}", 0, 4, prompt=[*text, 1])
    engine.run()
    engine.check_outputs()


def test_a_request_that_loads_blocks_behind_others_that_are_not_computed_begins_anew() -> None:
    """It went on with what was in the blocks before."""
    engine = FakeEngine(**CACHED, host_blocks=32)
    scheduler, tiers = engine.scheduler, engine.runner.tiers
    assert tiers is not None
    engine.add("before", 0, 2, prompt=SHARED + REST)
    engine.run()
    while scheduler.has_work:
        engine.step()
    host = tiers._host
    assert host is not None
    host.drop(list(host._cached)[:2])  # as it loses the oldest first
    engine.kv.reset()
    engine.add("other", 3, 20)
    engine.step()
    engine.add("first", 0, 4, prompt=[*SHARED, 40])
    engine.add("second", 0, 4, prompt=SHARED + REST)
    fail_step(engine, "after loads")
    del engine.requests["first"], engine.requests["other"]
    assert engine.requests["second"].load_id is not None, "it was to load"
    engine.run()
    engine.check_outputs()
    tiers.close()


@pytest.mark.parametrize("seed", range(120))
def test_random_failures_and_cancellations_change_no_tokens(seed: int) -> None:
    """Prompts that share beginnings, choices, tiers, steps launched ahead; steps fail at every stage."""
    rng = random.Random(seed)
    lookahead = rng.random() < 0.5
    host_blocks = rng.choice([0, 6, 12, 40])
    engine = FakeEngine(
        num_blocks=rng.choice([10, 16, 40]),
        block_size=4,
        host_blocks=host_blocks,
        cache={"enable_prefix_caching": True},
        max_num_seqs=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        preemption_mode="swap" if host_blocks and rng.random() < 0.5 else "recompute",
        queue_policy=rng.choice(["fcfs", "priority"]),
        lookahead=lookahead,
    )
    scheduler, tiers = engine.scheduler, engine.runner.tiers
    texts = [[rng.randrange(1, 5) for _ in range(30)] for _ in range(3)]
    numbers, failed = itertools.count(), set[str]()

    def add() -> None:
        text = rng.choice(texts)
        prompt = [*text[: rng.randrange(1, min(26, len(text)) + 1)], rng.randrange(1, 50)]
        n = rng.choice([1, 1, 1, 2, 3])
        options: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": rng.randrange(9)} if n > 1 else {}
        options["scheduling"] = SchedulingParams(priority=rng.randrange(-2, 3))
        engine.add(f"r{next(numbers)}", 0, rng.randrange(1, 10), prompt=prompt, **options)

    def abort() -> None:
        if open_ids := [name for name in engine.requests if name in scheduler.roster.sequences]:
            engine.abort(rng.choice(open_ids))

    for _ in range(120):
        if rng.random() < 0.4 and len(scheduler.roster.requests) < 8:
            add()
        if rng.random() < 0.08:
            abort()
        texts += [r.token_ids[:28] for r in engine.requests.values() if r.is_finished and rng.random() < 0.02]
        if rng.random() > 0.12:
            plan = engine.step()
            continue
        plan = scheduler.schedule()
        engine.runner.fail_at = rng.choice(STAGES)
        with pytest.raises(RuntimeError):
            engine.runner.execute(plan)
        if rng.random() < 0.5:
            abort()
        if rng.random() < 0.3:
            abort()
        engine.in_flight.clear()
        outputs = scheduler.fail("broken")
        failed |= {output.request_id for output in outputs if output.error is not None}
        engine.collect([output for output in outputs if output.error is None])
        scheduler.check_integrity()
    engine.run()
    while scheduler.has_work:  # a load holds the blocks of a request that has ended
        engine.step()
    for name in failed:
        del engine.requests[name]
    engine.check_outputs()
    assert engine.kv.pool.num_in_use == 0
    if tiers is not None:
        tiers.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("half", ["launch", "collect"])
def test_an_interrupt_ends_the_requests_it_strikes_and_no_others(
    checkpoint: Path, half: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in `generate` left its requests running, and the step that it struck in the engine's hands: the
    next call failed, as what its first step brought was taken for what that one should have."""
    llm = engine(checkpoint, async_scheduling=is_async)
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    runner = runner_of(llm.core)
    computes, calls = getattr(runner, half), itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return computes(*args)

    monkeypatch.setattr(runner, half, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT[:20], PROMPT[10:]], GREEDY)
    assert not llm.core.scheduler.has_unfinished()
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected
    assert llm.core.kv.num_free_blocks == llm.core.kv.num_blocks
    llm.core.close()
