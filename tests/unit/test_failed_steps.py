"""Steps that fail beside KV tiers and choices: what was to come with them is neither awaited nor trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.trace import SchedulerTrace
from quire.kv_tiers import HostTier, KVTiers
from quire.kv_tiers.loopback import LoopbackConnector
from quire.outputs import SchedulerOutput
from quire.scheduling_params import SchedulingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import FakeKVCache

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
    runner: Any = llm.core.runner
    move, failed = runner._move_blocks, list[int]()

    def moves(output: SchedulerOutput) -> None:
        if output.kv_loads and not failed:
            failed.append(output.step)
            raise RuntimeError("the blocks cannot be moved")
        move(output)

    monkeypatch.setattr(runner, "_move_blocks", moves)
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
    runner: Any = llm.core.runner
    move, failed = runner._move_blocks, list[int]()

    def moves(output: SchedulerOutput) -> None:
        move(output)
        if output.kv_loads and not failed:
            failed.append(output.step)
            raise RuntimeError("too late")

    monkeypatch.setattr(runner, "_move_blocks", moves)
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
        patch.setattr(llm.core.runner, "_settle", lambda step: 1 / 0)
        assert run(llm, "second") == ([], "error")
    assert run(llm, "third") == expected
    llm.core.scheduler.check_integrity()


def test_copies_of_a_failed_step_are_not_trusted() -> None:
    """Choices that had no row in the step went on from blocks that were never copied: wrong tokens. They are
    computed anew."""
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_batched_tokens=4, queue_policy="priority")
    scheduler = engine.scheduler
    engine.add("a", 6, 8, n=3, temperature=1.0, seed=3)
    while not scheduler._copies:
        engine.step()
    engine.add("b", 12, 8, scheduling=SchedulingParams(priority=-5))
    plan = scheduler.schedule()
    assert plan.block_copies and [row.request_id for row in plan.scheduled] == ["b"]
    outputs = scheduler.fail(["b"], "broken")
    engine.runner.was_told_of_failure = True
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("b", "error")]
    scheduler.check_integrity()
    targets = {target for _, target in plan.block_copies}
    assert all(
        targets.isdisjoint(b for ids in engine.kv.block_ids(r) for b in ids) for r in scheduler._running
    )
    while scheduler.has_unfinished():
        engine.step()
    scheduler.check_integrity()
    assert not scheduler._copies


def test_a_trace_that_cannot_be_written_ends_and_nothing_else(tmp_path: Path) -> None:
    """A full disk ended the engine."""
    engine = FakeEngine(trace=SchedulerTrace("/dev/full"))
    engine.add("a", 6, 8)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.trace is not None
    engine.scheduler.trace.event("anything")


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
