"""Steps handed over before the tokens of the one before are known, and decode steps as graphs compute them.

Without a GPU a step is computed at once where it would be queued, and torch's operations are recorded and
repeated where a graph would be (tests.fixtures.graphs): all else is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.executor import RunnerExecutor
from quire.outputs import RequestOutput
from quire.request.scheduling_params import SchedulingParams
from quire.worker.block_table import BlockTable
from quire.worker.graph_runner import graph_sizes, token_sizes
from quire.worker.model_runner import ModelRunner
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.graphs import RecordedOperations, recorded_steps
from tests.unit.test_engine import random_prompts

PROMPTS = random_prompts(10, longest=30, seed=3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def recorded() -> Iterator[RecordedOperations]:
    with recorded_steps() as backend:
        yield backend


def engine(path: Path, **options: Any) -> LLM:
    values = {"max_model_len": 128, "num_blocks": 200, "block_size": 8, "num_threads": 1, "dtype": "float32"}
    return LLM(path, **{**values, **options})


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.core.executor, RunnerExecutor)
    assert isinstance(llm.core.executor.runner, ModelRunner)
    return llm.core.executor.runner


def run(
    llm: LLM, count: int, num_tokens: int = 10, before_step: Callable[[int], None] = lambda step: None
) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of so many requests at once, errors among them."""
    core = llm.core
    found: dict[str, tuple[list[int], str]] = {}
    for index in range(count):
        core.add_request(f"r{index}", PROMPTS[index], SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        found[f"r{index}"] = [], ""
    steps = itertools.count()
    while core.has_work:
        before_step(next(steps))
        for output in core.step():
            tokens, _ = found[output.request_id]
            found[output.request_id] = tokens + output.new_token_ids, output.finish_reason or ""
    return list(found.values())


PARAMS = {
    "greedy": SamplingParams(max_tokens=12, ignore_eos=True),
    "ends": SamplingParams(max_tokens=30, stop_token_ids=tuple(range(0, 500, 9))),
    "seeded": SamplingParams(max_tokens=12, temperature=1.0, seed=5, top_k=50, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5),
    "penalties and choices": SamplingParams(
        max_tokens=12, n=3, temperature=1.0, seed=8, repetition_penalty=1.3, presence_penalty=0.5
    ),
    "penalties and bans": SamplingParams(max_tokens=12, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "n-grams": SamplingParams(max_tokens=20, no_repeat_ngram_size=2),
    "bad words": SamplingParams(max_tokens=20, bad_words_ids=((3, 4), (5,))),
    "at least": SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=tuple(range(0, 500, 3))),
    "log-probabilities": SamplingParams(max_tokens=12, logprobs=3),
    "choices": SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=6),
    "ranked": SamplingParams(max_tokens=12, n=2, best_of=4, temperature=1.0, seed=7, logprobs=1),
    "beams": SamplingParams(max_tokens=12, n=2, beam_width=3),
}


def everything(outputs: list[RequestOutput]) -> tuple[list[Any], Any]:
    """What is to be equal, and log-probabilities, which other operators may round otherwise."""
    found: list[Any] = []
    values: list[float] = []
    for output in outputs:
        for one in (output, *output.others):
            logprobs = one.logprobs or []
            found.append((one.token_ids, one.finish_reason, one.stop_reason, [e.token_ids for e in logprobs]))
            values += [value for entry in logprobs for value in entry.logprobs]
    return found, pytest.approx(values, abs=1e-4)


@pytest.mark.row("B17", clauses=("equal",))
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "recorded"])
def test_a_request_gets_the_same_tokens(
    checkpoint: Path, name: str, graphs: bool, request: pytest.FixtureRequest
) -> None:
    plain = everything(engine(checkpoint).generate(PROMPTS, PARAMS[name]))
    if graphs:
        request.getfixturevalue("recorded")
    llm = engine(checkpoint, async_scheduling=True, max_num_batched_tokens=24)
    found, values = everything(llm.generate(PROMPTS, PARAMS[name]))
    assert found == plain[0]
    assert values.expected == plain[1]
    # All kinds in one batch, so that rows that must wait for their tokens are beside rows that need not.
    mixed = list(PARAMS.values()) * 2
    llm.generate([PROMPTS[i % len(PROMPTS)] for i in range(len(mixed))], mixed)
    assert llm.core.stats().num_free_blocks == llm.core.stats().num_blocks
    for recorder in (runner_of(llm).graphs, runner_of(llm).prompt_graphs):
        assert (recorder is not None) == graphs
        assert recorder is None or recorder.num_replays > 5


def test_recorded_steps_know_the_blocks_of_every_group_of_layers(tmp_path: Path) -> None:
    """The device's mirror of the block table has a row more per group than the host's: what was appended to
    the tables of later groups must not land a row too early."""
    path = make_checkpoint("gemma2", tmp_path)
    plain, _ = everything(engine(path).generate(PROMPTS[:5], PARAMS["greedy"]))
    with recorded_steps():
        llm = engine(path, async_scheduling=True)
        assert len(runner_of(llm).info.kv_groups) > 1
        assert everything(llm.generate(PROMPTS[:5], PARAMS["greedy"]))[0] == plain
    graphs = runner_of(llm).graphs
    assert graphs is not None and graphs.num_replays > 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "recorded"])
def test_three_steps_may_be_under_way(tmp_path: Path, family: str, graphs: bool) -> None:
    """All kinds of requests in one batch, on a thread of the runner's own: preempted, and in the second round
    with their beginnings in the cache."""
    path, params = make_checkpoint(family, tmp_path), list(PARAMS.values())
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    expected, values = everything(engine(path, enable_prefix_caching=False).generate(prompts, params))
    small = {"num_blocks": 24 if family == "llama" else 48, "max_num_batched_tokens": 24}
    with recorded_steps() if graphs else nullcontext():
        llm = engine(path, async_scheduling=True, **small)
        llm.core.executor = executor = RunnerExecutor(runner_of(llm), depth=3, threaded=True)
        most, collect = 0, executor.collect

        def collected() -> Any:
            nonlocal most
            most = max(most, len(llm.core._in_flight))
            return collect()

        executor.collect = collected  # type: ignore[method-assign]
        for _ in range(2):
            found, numbers = everything(llm.generate(prompts, params))
            assert found == expected and numbers == values.expected
        stats = llm.core.stats()
        llm.core.scheduler.check_integrity()
        llm.core.close()
    assert most == 3
    assert stats.num_preemptions > 0 and stats.num_cached_tokens > 0
    assert stats.num_free_blocks == stats.num_blocks


def order_of_calls(llm: LLM) -> list[str]:
    """Fills with launch, settle (the host learns of tokens) and collect as they come."""
    runner, calls = runner_of(llm), list[str]()
    for name in ("launch", "collect"):

        def call(*arguments: Any, name: str = name, method: Any = getattr(runner, name)) -> Any:
            calls.append(name)
            return method(*arguments)

        setattr(runner, name, call)
    settle = runner._settle

    def settled(step: Any) -> None:
        if step.drawn is not None:
            calls.append("settle")
        settle(step)

    runner._settle = settled  # type: ignore[method-assign]
    return calls


@pytest.mark.row("B17")
def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known(checkpoint: Path) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    calls = order_of_calls(llm)
    llm.generate(PROMPTS[:4], SamplingParams(max_tokens=8, ignore_eos=True))
    # Eight steps that sample.
    assert [call for call in calls if call != "settle"] == ["launch", *["launch", "collect"] * 7, "collect"]
    assert calls[2:].count("settle") == 8 and "settle" not in calls[:3]


@pytest.mark.parametrize(
    ("params", "num_known"),
    [
        ({}, 0),
        ({"temperature": 1.0, "min_tokens": 3}, 0),
        ({"repetition_penalty": 1.5}, 1),
        ({"bad_words_ids": ((3, 4),)}, 2),
    ],
)
def test_a_step_waits_for_no_more_tokens_than_the_host_must_know(
    checkpoint: Path, params: dict[str, Any], num_known: int
) -> None:
    """Penalties count the newest token on the device, and only that."""
    llm = engine(checkpoint, async_scheduling=True)
    llm.core.executor = RunnerExecutor(runner_of(llm), depth=3)
    calls = order_of_calls(llm)
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6, ignore_eos=True, **params))
    first = [call for call in calls[: calls.index("collect")] if call == "settle"]
    assert len(first) == num_known


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({"no_repeat_ngram_size": 2}, True),
        ({"bad_words_ids": ((3, 4),)}, True),
        ({"repetition_penalty": 1.5, "frequency_penalty": 0.2}, False),
        ({"temperature": 1.0, "top_p": 0.9, "min_tokens": 3}, False),
    ],
)
def test_a_step_waits_for_tokens_that_the_host_must_know(
    checkpoint: Path, params: dict[str, Any], waits: bool
) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    calls = order_of_calls(llm)
    llm.generate(PROMPTS[:2], SamplingParams(max_tokens=6, ignore_eos=True, **params))
    assert (calls.index("settle") < calls.index("collect")) == waits


def test_a_failed_step_ends_the_requests_under_way_and_the_engine_goes_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    expected = run(llm, 3)
    runner, launch, count = runner_of(llm), runner_of(llm).launch, 0

    def fails(output: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("an illegal memory access was encountered")
        return launch(output)

    monkeypatch.setattr(runner, "launch", fails)
    for tokens, reason in run(llm, 3):
        assert reason == "error" and len(tokens) == 2, "the third step has failed with the fourth"
    assert run(llm, 3) == expected
    stats = llm.core.stats()
    assert stats.num_free_blocks == stats.num_blocks
    llm.core.scheduler.check_integrity()


def test_an_aborted_request_gives_its_blocks_back_at_once(checkpoint: Path) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    core = llm.core
    for index in range(3):
        core.add_request(f"r{index}", PROMPTS[index], SamplingParams(max_tokens=50, ignore_eos=True))
    for _ in range(4):
        core.step()
    held = core.stats().num_free_blocks
    assert [output.finish_reason for output in core.abort(["r1"])] == ["cancelled"]
    assert core.stats().num_free_blocks > held
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert {output.request_id for output in outputs} == {"r0", "r2"}
    assert core.stats().num_free_blocks == core.stats().num_blocks


@pytest.mark.parametrize("ahead", [True, False], ids=["async", "plain"])
def test_a_deadline_ends_its_request_alone(checkpoint: Path, ahead: bool) -> None:
    llm = engine(checkpoint, async_scheduling=ahead)
    core, now = llm.core, 100.0
    core.scheduler.roster.clock = lambda: now
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    core.add_request("endless", PROMPTS[0], params, arrival_time=now)
    for name, scheduling in {
        "late": SchedulingParams(deadline=110.0),
        "first token in time": SchedulingParams(ttft_deadline=110.0),
    }.items():
        core.add_request(name, PROMPTS[1], params, arrival_time=now, scheduling=scheduling)
    found: dict[str, str] = {}

    def step() -> None:
        for output in core.step():
            if output.finish_reason is not None:
                found[output.request_id] = output.finish_reason

    for _ in range(5):
        step()
    assert found == {}
    now = 111.0
    step()
    assert found == {"late": "timeout"}
    while core.has_work:
        step()
    assert found == {"late": "timeout", "endless": "length", "first token in time": "length"}
    assert core.stats().num_free_blocks == core.stats().num_blocks
    core.scheduler.check_integrity()


def test_logits_that_are_not_finite_end_one_request(checkpoint: Path, recorded: RecordedOperations) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    expected = run(llm, 3)
    batch, blocks = runner_of(llm).batch, runner_of(llm).kv_cache.blocks

    def spoil(step: int) -> None:
        if step == 4:
            row = batch.requests["r1"].row
            blocks[batch.block_table.table[0, row, 0]] = 0xFF

    got = run(llm, 3, before_step=spoil)
    assert [reason for _, reason in got] == ["length", "error", "length"]
    assert [got[0], got[2]] == [expected[0], expected[2]]
    assert got[1][0] == expected[1][0][: len(got[1][0])] and len(got[1][0]) < 10


@pytest.mark.row("D7")
def test_steps_that_fit_no_recorded_size_are_computed_as_usual(
    checkpoint: Path, recorded: RecordedOperations
) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in engine(checkpoint).generate(PROMPTS, params)]
    llm = engine(checkpoint, async_scheduling=True)
    graphs, pieces = runner_of(llm).graphs, runner_of(llm).prompt_graphs
    assert graphs is not None and pieces is not None
    graphs.sizes = [1, 2, 4]
    pieces.sizes = [size for size in pieces.sizes if size <= 32]
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected
    # The prompts in one step of too many tokens, then steps of ten rows that have no more than the limit.
    assert graphs.num_misses == 7 and graphs.num_replays == 0
    assert pieces.num_misses == 1 and pieces.num_replays == 7
    assert [output.token_ids for output in llm.generate(PROMPTS[:3], params)] == expected[:3]
    assert graphs.num_replays == 7


@pytest.mark.row("D7")
def test_a_decode_step_is_one_launch_and_any_other_one_per_attention_and_one(
    checkpoint: Path, recorded: RecordedOperations
) -> None:
    llm = engine(checkpoint, async_scheduling=True)
    runner = runner_of(llm)
    assert runner.graphs is not None and runner.prompt_graphs is not None
    runner.warm_up()
    pieces = len(runner.model.layers) + 1
    num_graphs = len(runner.graphs.sizes) + len(runner.prompt_graphs.sizes) * pieces
    assert recorded.num_graphs == num_graphs
    run(llm, 3, num_tokens=6)
    assert recorded.num_replays == pieces + 5
    assert recorded.num_graphs == num_graphs, "nothing is recorded after the warm-up"


@pytest.mark.row("D7")
def test_attention_that_cannot_be_recorded_runs_between_pieces_in_decode_steps_too(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in engine(checkpoint).generate(PROMPTS[:3], params)]
    with recorded_steps("reference"):
        llm = engine(checkpoint, async_scheduling=True)
    runner = runner_of(llm)
    assert runner.graphs is None and runner.prompt_graphs is not None
    assert runner.prompt_graphs.sizes[:5] == [1, 2, 4, 8, 16]
    with recorded_steps("reference"):
        assert [output.token_ids for output in llm.generate(PROMPTS[:3], params)] == expected
    assert runner.prompt_graphs.num_replays == 8


@pytest.mark.row("D7")
def test_padding_reads_and_writes_nothing_of_a_request(
    checkpoint: Path, recorded: RecordedOperations
) -> None:
    """Every block that no request holds is NaN, the scratch block too after its first use."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = [output.token_ids for output in engine(checkpoint).generate(PROMPTS[:5], params)]
    llm = engine(checkpoint, async_scheduling=True, max_num_batched_tokens=30)
    runner = runner_of(llm)
    runner.warm_up()
    runner.kv_cache.blocks.fill_(0xFF)
    assert [output.token_ids for output in llm.generate(PROMPTS[:5], params)] == expected
    scratch = runner.kv_cache.scratch_block
    assert scratch == runner.info.num_blocks == len(runner.kv_cache.blocks) - 1
    assert runner.graphs is not None and runner.graphs.num_replays > 2
    assert runner.prompt_graphs is not None and runner.prompt_graphs.num_replays > 2


def test_recorded_work_may_not_ask_for_values() -> None:
    """The recorder notices what a CUDA graph could not follow."""
    number, backend = torch.tensor([3.0]), RecordedOperations()
    backend.begin()
    doubled = number * 2
    with pytest.raises(AssertionError, match="asks for a value"):
        doubled.item()
    repeat = backend.end()
    number.fill_(5.0)
    assert doubled.item() == 6.0
    repeat()
    assert doubled.item() == 10.0


def test_the_sizes_that_are_recorded() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert graph_sizes(100)[-4:] == [64, 80, 96, 100]
    assert token_sizes(5) == [5]
    assert token_sizes(130) == [16, 32, 48, 64, 80, 96, 112, 128, 130]
    assert token_sizes(512)[-5:] == [256, 320, 384, 448, 512]


def test_a_block_table_tells_what_was_appended_and_the_newest_of_a_place() -> None:
    table = BlockTable(2, 3, 4, 16)
    table.record_changes()
    row = table.assign()
    table.append(row, [[5, 6], [7, -1]])
    table.release(row)
    assert table.assign() == row
    table.append(row, [[8], [9]])
    places, blocks = table.take_changes()
    mirror = np.zeros(table.table.size, dtype=np.int64)
    mirror[places] = blocks
    assert mirror.reshape(table.table.shape)[:, row].tolist() == [[8, 6, 0, 0], [9, 0, 0, 0]]
    assert len(set(places.tolist())) == len(places)
    assert table.take_changes().shape == (2, 0)
