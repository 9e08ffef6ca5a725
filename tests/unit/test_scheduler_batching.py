"""Continuous batching as rows B1, B2, B4, B7 and B9 ask for it, with a fake runner; and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.trace import SchedulerTrace
from quire.errors import UnavailableError
from tests.fixtures.fake_engine import FakeEngine, rows


@pytest.mark.row("B1", clauses=("joins", "leaves"))
def test_trace_an_arrival_is_in_the_next_step_and_a_finished_request_leaves_at_once() -> None:
    trace = SchedulerTrace()
    engine = FakeEngine(trace=trace, max_num_batched_tokens=64)
    engine.add("r0", 5, 30)
    lengths = {"r0": 30}
    for step in range(1, 40):
        plan = engine.scheduler.schedule()
        result = engine.runner.execute(plan)
        if step % 3 == 0:  # arrives while step `step` is being computed
            name = f"r{step}"
            lengths[name] = 1 + step % 7
            engine.add(name, 1 + step % 11, lengths[name])
        engine.collect(engine.scheduler.update(plan, result))
    engine.run()

    records = {record["step"]: record for record in trace.records}
    assert sorted(records) == list(range(1, len(records) + 1))
    arrived = {arrival["id"]: step for step, record in records.items() for arrival in record["arrivals"]}
    finished = {end["id"]: step for step, record in records.items() for end in record["finished"]}
    active = {name: [] for name in lengths}  # type: dict[str, list[int]]
    for step, record in records.items():
        for name, _, _ in record["scheduled"]:
            active[name].append(step)
    assert arrived.keys() == finished.keys() == lengths.keys()
    for name, length in lengths.items():
        arrived_during = int(name[1:])
        assert arrived[name] == arrived_during + 1
        # From the step after its arrival to the step of its last token, in each, and in none after.
        assert active[name] == list(range(arrived_during + 1, arrived_during + 1 + length))
        assert finished[name] == active[name][-1]
    assert max(len(record["scheduled"]) for record in trace.records) >= 3
    engine.check_outputs()


def test_trace_writes_one_json_line_per_step(tmp_path: Path) -> None:
    trace = SchedulerTrace(tmp_path / "trace.jsonl")
    engine = FakeEngine(num_blocks=4, trace=trace)
    engine.add("a", 4, 7)
    engine.add("b", 4, 7)
    plans = engine.run()
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    trace.close()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [plan.step for plan in plans]
    for record, plan in zip(records, plans, strict=True):
        expected = [[name, computed, scheduled] for name, computed, scheduled, _ in rows(plan)]
        assert record["scheduled"] == expected
    assert [record["preempted"] for record in records if record["preempted"]] == [["b"]]
    assert [(arrival["id"], arrival["prompt"]) for arrival in records[0]["arrivals"]] == [("a", 4), ("b", 4)]
    ends = [(end["id"], end["reason"], end["output"]) for record in records for end in record["finished"]]
    assert ends == [("a", "length", 7), ("b", "length", 7)]
    last = records[-1]
    assert (last["num_free_blocks"], last["num_running"], last["num_waiting"]) == (4, 0, 0)


def test_trace_keeps_what_happened_around_a_plan_that_was_not_executed() -> None:
    trace = SchedulerTrace()
    engine = FakeEngine(trace=trace)
    engine.add("a", 4, 3)
    engine.abort("a")
    assert engine.scheduler.schedule().is_empty
    trace.event("abort", request_ids=["a"])
    engine.add("b", 4, 1)
    engine.step()
    event, record = trace.records
    assert (event["event"], event["request_ids"]) == ("abort", ["a"])
    assert [arrival["id"] for arrival in record["arrivals"]] == ["a", "b"]
    assert [(end["id"], end["reason"]) for end in record["finished"]] == [("a", "cancelled"), ("b", "length")]
    assert record["ended"] == [["a", "cancelled", False, 1]]


def test_trace_counts_the_arrivals_before_an_end_over_a_plan_that_was_not_executed() -> None:
    """An end says how many arrivals came before it; those of an empty plan before are put in front again. A
    replay that counted from the plan would end a request before it had come."""
    trace = SchedulerTrace()
    engine = FakeEngine(trace=trace)
    engine.add("a", 4, 3)
    engine.abort("a")
    assert engine.scheduler.schedule().is_empty
    engine.add("b", 4, 3)
    engine.abort("b")
    engine.add("c", 4, 1)
    engine.step()
    (record,) = trace.records
    assert [arrival["id"] for arrival in record["arrivals"]] == ["a", "b", "c"]
    assert record["ended"] == [["a", "cancelled", False, 1], ["b", "cancelled", False, 2]]


@pytest.mark.row("B2")
def test_tokens_computed_are_the_tokens_scheduled_and_nothing_else() -> None:
    """Without padding, the tokens that go through the model are those that the requests have."""
    engine = FakeEngine(num_blocks=2000, max_num_seqs=256, max_num_batched_tokens=333)
    for length in range(1, 201):
        engine.add(f"r{length}", length, 1 + length % 5)
    plans = engine.run()
    scheduled = sum(row.num_scheduled_tokens for plan in plans for row in plan.scheduled)
    # The last token of a request is sampled but never goes through the model.
    needed = sum(length + (1 + length % 5) - 1 for length in range(1, 201))
    assert engine.scheduler.roster.num_preemptions == 0
    assert engine.runner.num_computed_tokens == scheduled == needed
    assert engine.scheduler.stats().num_scheduled_tokens == needed
    engine.check_outputs()


@pytest.mark.row("B4")
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_no_step_exceeds_the_budget_and_each_token_is_computed_once(chunk: int) -> None:
    engine = FakeEngine(num_blocks=500, max_num_seqs=16, max_num_batched_tokens=chunk)
    for index in range(12):
        engine.add(f"r{index}", 1 + 13 * index, 3 + index)
    plans = engine.run()
    assert all(1 <= sum(row.num_scheduled_tokens for row in plan.scheduled) <= chunk for plan in plans)
    assert engine.scheduler.roster.num_preemptions == 0
    for name, request in engine.requests.items():
        assert engine.runner.times_computed[name] == [1] * (request.num_tokens - 1)
    if chunk > 1:
        assert any(len({row.samples for row in plan.scheduled}) == 2 for plan in plans), "nothing was mixed"
    engine.check_outputs()


@pytest.mark.row("B4", clauses=("itl",))
@pytest.mark.parametrize("per_request", [None, 16])
def test_decodes_are_in_every_step_of_a_4k_prefill(per_request: int | None) -> None:
    engine = FakeEngine(
        num_blocks=4000,
        max_num_batched_tokens=64,
        max_prefill_tokens_per_request=per_request,
        max_model_len=8192,
    )
    for index in range(5):
        engine.add(f"d{index}", 10, 2000)
    engine.step()
    engine.add("long", 4096, 4)
    engine.add("short", 40, 2000)
    prefill_steps = 0
    while engine.requests["long"].num_output_tokens == 0:
        decoding = {name for name, request in engine.requests.items() if request.num_output_tokens > 0}
        scheduled = {row.request_id: row.num_scheduled_tokens for row in engine.step().scheduled}
        assert decoding <= scheduled.keys()
        assert scheduled["long"] <= (per_request or 64)
        prefill_steps += 1
    assert prefill_steps == (-(-4096 // 59) if per_request is None else 256)
    # With a cap per request what is left of the budget serves the one behind the long prompt at once.
    assert (engine.requests["short"].num_output_tokens > 200) == (per_request is not None)


@pytest.mark.row("B7")
@pytest.mark.parametrize(
    ("limits", "most_running"),
    [
        ({"max_num_seqs": 3}, 3),
        ({"max_num_batched_tokens": 4}, 4),
        ({"num_blocks": 10}, 9),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_blocks": 5}, 1),
    ],
    ids=["sequences", "tokens", "blocks", "all"],
)
def test_a_limit_that_is_hit_queues_and_never_fails_or_stalls(
    limits: dict[str, Any], most_running: int
) -> None:
    engine = FakeEngine(**({"num_blocks": 300, "max_num_seqs": 64} | limits))
    for index in range(30):
        engine.add(f"r{index}", 1 + index % 9, 1 + index % 12)
    hit = 0
    while engine.scheduler.has_unfinished():
        plan = engine.step()  # asserts budget, seats and blocks
        assert not plan.is_empty
        stats = engine.scheduler.stats()
        assert stats.num_running <= most_running
        hit += stats.num_waiting > 0
    assert hit > 10, "the limit was never hit"
    assert set(engine.reasons.values()) == {"length"} and len(engine.reasons) == 30
    engine.check_outputs()


@pytest.mark.row("B15", clauses=("bounds",))
@pytest.mark.row("B7")
def test_a_full_queue_is_unavailable_and_recovers() -> None:
    engine = FakeEngine(max_num_seqs=1, max_waiting_requests=3, max_waiting_tokens=20)
    engine.add("a", 4, 2)
    engine.step()
    for name in "bcd":
        engine.add(name, 5, 2)
    with pytest.raises(UnavailableError, match="max_waiting_requests 3"):
        engine.add("e", 1, 1)
    engine.abort("c")
    assert engine.scheduler.stats().num_waiting_tokens == 10
    with pytest.raises(UnavailableError, match="max_waiting_tokens 20"):
        engine.add("e", 11, 1)
    engine.add("e", 10, 2)
    assert engine.scheduler.stats().num_waiting_tokens == 20
    engine.run()
    assert engine.scheduler.stats().num_waiting_tokens == 0
    engine.check_outputs()


@pytest.mark.row("B9")
@pytest.mark.parametrize("num_prompt_tokens", [16, 160, 300])
@pytest.mark.parametrize("chunk", [7, 512])
def test_eight_requests_of_20_blocks_in_a_pool_of_24(num_prompt_tokens: int, chunk: int) -> None:
    engine = FakeEngine(num_blocks=24, block_size=16, max_num_batched_tokens=chunk)
    for index in range(8):
        engine.add(f"r{index}", num_prompt_tokens, 320 - num_prompt_tokens)
    engine.run()
    stats = engine.scheduler.stats()
    if num_prompt_tokens < 192:  # else two never run together, and nothing has to give way
        assert stats.num_preemptions > 0
        assert stats.num_preemptions == sum(r.num_preemptions for r in engine.requests.values())
        assert stats.num_scheduled_tokens > 8 * 319, "a preempted request computes its tokens again"
    assert stats.num_free_blocks == 24
    assert all(len(tokens) == 320 - num_prompt_tokens for tokens in engine.outputs.values())
    engine.check_outputs()  # equal to the unconstrained run
