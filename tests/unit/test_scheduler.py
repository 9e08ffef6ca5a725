"""Scheduler with a fake runner: exact plans in small cases, preemption, ends of a sequence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.core.request import FinishReason, RequestStatus
from quire.core.trace import SchedulerTrace
from quire.errors import InvalidArgumentError, UnavailableError
from quire.request.sampling_params import SamplingParams
from tests.fixtures.fake_engine import FakeEngine, rows
from tests.fixtures.fake_runner import generate_alone


def test_exact_rows_and_blocks_of_prefill_and_decode_together() -> None:
    engine = FakeEngine(num_blocks=8, max_num_batched_tokens=10)
    engine.add("a", 6, 4)
    engine.add("b", 7, 2)
    plan = engine.step()
    assert rows(plan) == [("a", 0, 6, [0, 1]), ("b", 0, 4, [2])]
    assert [row.samples for row in plan.scheduled] == [True, False]
    assert plan.scheduled[0].new is not None and plan.scheduled[0].new.num_prompt_tokens == 6
    assert (plan.step, sum(row.num_scheduled_tokens for row in plan.scheduled)) == (1, 10)

    plan = engine.step()
    assert rows(plan) == [("a", 6, 1, []), ("b", 4, 3, [3])]
    assert [row.samples for row in plan.scheduled] == [True, True]
    assert [row.new for row in plan.scheduled] == [None, None]

    engine.add("c", 3, 1)
    assert rows(engine.step()) == [("a", 7, 1, []), ("b", 7, 1, []), ("c", 0, 3, [4])]
    # b and c end: the last block of each is behind the others in the free list.
    assert engine.kv.pool.free_list() == [5, 6, 7, 3, 2, 4]
    plan = engine.step()
    assert rows(plan) == [("a", 8, 1, [5])]
    assert plan.dropped_request_ids == ["b", "c"]
    assert engine.kv.pool.free_list() == [6, 7, 3, 2, 4, 5, 1, 0]
    plan = engine.step()
    assert (plan.is_empty, plan.dropped_request_ids) == (True, ["a"])
    assert engine.runner.rows == {}
    engine.check_outputs()


def test_what_the_runner_is_given_is_a_copy() -> None:
    engine = FakeEngine()
    request = engine.add("a", 3, 2)
    plan = engine.scheduler.schedule()
    new = plan.scheduled[0].new
    assert new is not None
    new.token_ids.append(1)
    assert request.num_tokens == 3


def test_preemption_takes_the_youngest_and_puts_it_first_in_the_queue() -> None:
    engine = FakeEngine(num_blocks=4, max_num_seqs=3)
    engine.add("a", 7, 4)
    engine.add("b", 3, 6)
    engine.add("c", 3, 6)
    engine.add("d", 1, 1)
    # The pool is full; d would wait for a seat anyway.
    assert rows(engine.step()) == [("a", 0, 7, [0, 1]), ("b", 0, 3, [2]), ("c", 0, 3, [3])]
    assert rows(engine.step()) == [("a", 7, 1, []), ("b", 3, 1, []), ("c", 3, 1, [])]
    # a needs a third block: c gives way. b needs a second one: it is the youngest now and gives way itself.
    plan = engine.step()
    assert rows(plan) == [("a", 8, 1, [3])]
    assert plan.dropped_request_ids == ["c", "b"]
    assert [engine.requests[name].status for name in "abcd"] == [
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
        RequestStatus.WAITING,
        RequestStatus.WAITING,
    ]
    assert [engine.requests[name].num_preemptions for name in "abcd"] == [0, 1, 1, 0]
    assert (engine.requests["b"].num_computed_tokens, engine.requests["b"].num_output_tokens) == (0, 2)
    assert [r.request_id for r in engine.scheduler.roster.queue.candidates(0.0)] == ["b", "c", "d"]
    assert engine.scheduler.stats().num_preemptions == 2
    # One block is free: b needs two now, and nobody overtakes it.
    assert rows(engine.step()) == [("a", 9, 1, [])]
    plan = engine.step()
    assert rows(plan) == [("b", 0, 5, [2, 3]), ("c", 0, 5, [1, 0])]
    assert plan.scheduled[0].samples and plan.scheduled[0].new is not None
    assert plan.scheduled[0].new.num_prompt_tokens == 3
    engine.run()
    engine.check_outputs()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    trace = SchedulerTrace()
    engine = FakeEngine(num_blocks=9, max_num_seqs=8, trace=trace)
    for index in range(20):
        engine.add(f"r{index}", 1 + index % 6, 12)
    plans = engine.run()
    preempting = [plan for plan, record in zip(plans, trace.records, strict=True) if record["preempted"]]
    assert len(preempting) > 5
    for plan in preempting:
        assert all(row.new is None for row in plan.scheduled)
    engine.check_outputs()


def test_a_long_prompt_is_not_undone_by_one_admitted_behind_it() -> None:
    """Admission counts the blocks that running prompts have yet to take, not only those that are free."""
    engine = FakeEngine(num_blocks=8, max_num_batched_tokens=8, max_prefill_tokens_per_request=4)
    engine.add("long", 27, 3)
    engine.add("short", 5, 3)
    plans = engine.run()
    assert engine.scheduler.roster.num_preemptions == 0
    first = [row.request_id for plan in plans for row in plan.scheduled if row.new is not None]
    assert first == ["long", "short"]
    assert not any(len(plan.scheduled) > 1 for plan in plans)


def test_the_pool_exhausted_by_one_sequence_ends_it_with_length() -> None:
    engine = FakeEngine(num_blocks=3, block_size=4, max_model_len=1000)
    assert engine.scheduler.max_model_len == 13
    engine.add("a", 5, 100)
    engine.add("b", 5, 100)
    engine.run()
    # Twelve tokens are in the cache, the thirteenth came from them.
    assert [len(engine.outputs[name]) for name in "ab"] == [8, 8]
    assert engine.reasons == {"a": "length", "b": "length"}
    engine.check_outputs()


@pytest.mark.parametrize(("num_blocks", "max_model_len", "longest"), [(3, 1000, 12), (100, 9, 8)])
def test_a_prompt_that_can_never_run_is_refused(num_blocks: int, max_model_len: int, longest: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    assert engine.scheduler.max_model_len - 1 == longest
    with pytest.raises(InvalidArgumentError, match=rf"prompt: {longest + 1} tokens, at most {longest}"):
        engine.add("a", longest + 1, 1)
    assert not engine.scheduler.has_unfinished()
    engine.add("b", longest, 5)
    engine.run()
    assert (len(engine.outputs["b"]), engine.reasons["b"]) == (1, "length")


def test_stop_tokens_end_a_request_in_the_step_that_samples_them() -> None:
    engine = FakeEngine()
    alone = generate_alone(
        engine.add("a", 4, 40).token_ids, SamplingParams(max_tokens=40, ignore_eos=True), 99
    )
    engine.run()
    assert engine.outputs["a"] == alone[0]
    stop_id = alone[0][5]
    engine.outputs.clear()
    engine.reasons.clear()
    engine.add("a", 4, 40, stop_token_ids=(stop_id,))
    engine.run()
    assert engine.outputs["a"] == alone[0][: alone[0].index(stop_id) + 1]
    assert engine.reasons["a"] == "stop"
    assert engine.requests["a"].stop_reason == stop_id


def test_outputs_carry_logprobs_and_finish_reason_once() -> None:
    engine = FakeEngine()
    engine.add("a", 3, 2, logprobs=0)
    plan = engine.scheduler.schedule()
    (first,) = engine.scheduler.update(plan, engine.runner.execute(plan))
    plan = engine.scheduler.schedule()
    (second,) = engine.scheduler.update(plan, engine.runner.execute(plan))
    assert first.logprobs is not None and first.logprobs[0].token_ids == first.new_token_ids
    assert (first.finish_reason, second.finish_reason) == (None, "length")
    assert engine.scheduler.abort(["a"], FinishReason.CANCELLED) == []


def test_preemption_does_not_fail_on_a_full_queue() -> None:
    engine = FakeEngine(num_blocks=4, max_num_seqs=2, max_waiting_requests=1)
    engine.add("a", 4, 9)
    engine.step()
    engine.add("b", 4, 9)
    engine.step()
    engine.add("c", 1, 1)
    while engine.scheduler.roster.num_preemptions == 0:
        engine.step()
    assert engine.scheduler.stats().num_waiting == 2
    with pytest.raises(UnavailableError):
        engine.add("d", 1, 1)
    engine.run()
    engine.check_outputs()


def test_the_oldest_is_never_preempted() -> None:
    engine = FakeEngine(num_blocks=6, max_num_seqs=4)
    for index in range(12):
        engine.add(f"r{index}", 3, 18)
    plans = engine.run()
    assert engine.requests["r0"].num_preemptions == 0
    assert engine.scheduler.roster.num_preemptions > 0
    # Admission for the first time is in order of arrival.
    admitted = dict.fromkeys(row.request_id for plan in plans for row in plan.scheduled)
    assert list(admitted) == [f"r{index}" for index in range(12)]
    assert list(engine.reasons) == [f"r{index}" for index in range(12)]


def test_core_imports_neither_torch_nor_zmq() -> None:
    program = "import sys, quire.core.scheduler; print([m for m in ('torch', 'zmq') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
