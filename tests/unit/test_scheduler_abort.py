"""Requests that are aborted or fail, in every phase, with a fake runner."""

from __future__ import annotations

import pytest

from quire.config import CacheConfig
from quire.core.request import RequestStatus
from quire.errors import InvalidArgumentError
from tests.fixtures.fair_queue import counter
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import STAGES, VOCAB_SIZE


def test_abort_in_every_phase_frees_at_once() -> None:
    engine = FakeEngine(num_blocks=4, max_num_seqs=3, max_num_batched_tokens=8)
    engine.add("running", 7, 9)
    engine.add("preempted", 3, 9)
    while engine.scheduler.roster.num_preemptions == 0:
        engine.step()
    engine.add("waiting", 2, 3)
    assert engine.requests["preempted"].status is RequestStatus.WAITING
    assert engine.requests["preempted"].num_preemptions == 1

    for name in ("preempted", "waiting"):
        (output,) = engine.abort(name)
        assert (output.request_id, output.new_token_ids, output.finish_reason) == (name, [], "cancelled")
        assert engine.abort(name) == []
    assert engine.scheduler.stats().num_waiting == 0
    assert engine.scheduler.stats().num_waiting_tokens == 0
    engine.abort("running")
    assert engine.kv.num_free_blocks == 4
    assert not engine.scheduler.has_unfinished()
    # The runner forgot the preempted row already and never saw the waiting one.
    plan = engine.step()
    assert (plan.is_empty, plan.dropped_request_ids) == (True, ["running"])
    assert engine.runner.rows == {}
    assert engine.abort("unknown") == []


def test_abort_of_a_half_computed_prompt() -> None:
    engine = FakeEngine(num_blocks=8, max_num_batched_tokens=5)
    engine.add("a", 20, 3)
    engine.add("b", 6, 3)
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.kv.num_free_blocks == 8
    plan = engine.step()
    assert plan.dropped_request_ids == ["a"]
    assert [row.request_id for row in plan.scheduled] == ["b"]
    engine.run()
    engine.check_outputs()


def test_a_request_aborted_while_its_step_is_computed_gets_nothing_of_it() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.add("a", 4, 5)
    engine.add("b", 4, 5)
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    engine.abort("a")
    assert engine.kv.num_free_blocks == 7
    # The same id may come again at once, and is another request.
    engine.reasons.clear()
    engine.outputs.clear()
    again = engine.add("a", 9, 2)
    outputs = engine.scheduler.update(plan, result)
    assert [output.request_id for output in outputs] == ["b"]
    assert (again.num_computed_tokens, again.num_output_tokens) == (0, 0)
    engine.collect(outputs)
    plan = engine.step()
    assert plan.dropped_request_ids == ["a"]
    assert [row.request_id for row in plan.scheduled] == ["b", "a"]
    engine.run()
    engine.check_outputs()


def test_a_failed_step_ends_its_requests_and_the_rest_go_on() -> None:
    engine = FakeEngine(num_blocks=8, max_num_seqs=2)
    for name in "abc":
        engine.add(name, 4, 3)
    engine.step()
    plan = engine.scheduler.schedule()
    engine.runner.execute(plan)  # and raises, say
    outputs = engine.scheduler.fail("broken")
    assert [(o.request_id, o.finish_reason, o.error, o.error_code) for o in outputs] == [
        ("a", "error", "broken", "INTERNAL"),
        ("b", "error", "broken", "INTERNAL"),
    ]
    engine.scheduler.check_integrity()
    assert engine.kv.num_free_blocks == 8
    plan = engine.step()
    assert plan.dropped_request_ids == ["a", "b"]
    assert [row.request_id for row in plan.scheduled] == ["c"]
    engine.run()
    assert engine.reasons == {"c": "length"}


def test_a_row_that_failed_alone_ends_alone() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.add("a", 4, 3)
    engine.add("b", 4, 3)
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    result.rows[0].error = "no finite logit"
    failed, fine = engine.scheduler.update(plan, result)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("a", "error", "no finite logit")
    assert (fine.request_id, fine.finish_reason, fine.error) == ("b", None, None)
    assert engine.step().dropped_request_ids == ["a"]
    engine.scheduler.check_integrity()


def test_find_by_the_id_the_client_gave() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name, external_id in (("1", "x"), ("2", "x"), ("3", "y"), ("4", "")):
        engine.add(name, 2, 1, external_id=external_id)
    assert engine.scheduler.roster.find("x") == ["1", "2"]
    assert engine.scheduler.roster.find("") == engine.scheduler.roster.find("z") == []
    engine.step()
    assert engine.scheduler.roster.find("x") == ["2"]
    engine.abort(*engine.scheduler.roster.find("x"))
    assert engine.scheduler.roster.find("x") == []
    engine.run()
    assert engine.scheduler.roster._by_external_id == {}


def test_update_takes_the_plan_made_last() -> None:
    engine = FakeEngine()
    engine.add("a", 2, 3)
    plan = engine.step()
    engine.scheduler.schedule()
    with pytest.raises(AssertionError):
        engine.scheduler.update(plan, engine.runner.execute(plan))


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_loads_ends_whenever_its_step_fails(stage: str) -> None:
    """A step that failed before it began its loads left their requests waiting for ever, and the engine
    planned empty steps as fast as it could."""
    engine = FakeEngine(num_blocks=16, host_blocks=64, cache={"enable_prefix_caching": True})
    prompt = [(position * 5) % VOCAB_SIZE for position in range(33)]
    engine.add("first", 0, 3, prompt=prompt)
    engine.run()
    engine.kv.reset()
    engine.add("loads", 0, 3, prompt=prompt)
    plan = engine.scheduler.schedule()
    assert [len(load.blocks) for load in plan.kv_loads] == [8] and not plan.scheduled
    engine.runner.fail_at = stage
    with pytest.raises(RuntimeError, match="made to fail"):
        engine.runner.execute(plan)
    engine.collect(engine.scheduler.fail("broken"))
    engine.scheduler.check_integrity()
    engine.run(max_steps=20)
    assert engine.reasons == {"first": "length", "loads": "length"}
    assert not engine.scheduler.has_work
    engine.check_outputs()
    assert engine.kv.num_free_blocks == 16


def test_a_request_whose_load_failed_is_admitted_for_the_first_time_once() -> None:
    """It was counted, and its tenant was charged, at the second admission again."""
    cache = {"enable_prefix_caching": True}
    engine = FakeEngine(num_blocks=16, host_blocks=64, queue_policy="fair", cache=cache)
    prompt = [(position * 5) % VOCAB_SIZE for position in range(33)]
    engine.add("first", 0, 3, prompt=prompt)
    engine.run()
    engine.kv.reset()
    charged, queried = counter(engine.scheduler.roster.queue, ""), engine.kv.num_queried_tokens
    cached = engine.kv.num_cached_tokens
    engine.add("loads", 0, 3, prompt=prompt)
    (load,) = engine.scheduler.schedule().kv_loads
    engine.kv.reset()
    engine.scheduler.finish_loads([(load.load_id, 0)])
    engine.run(max_steps=20)
    assert engine.kv.num_queried_tokens - queried == 33
    assert engine.kv.num_cached_tokens == cached
    assert (
        counter(engine.scheduler.roster.queue, "") - charged == 1 + 3 * 2
    )  # what was not to be loaded, and three tokens
    engine.check_outputs()


def test_what_a_failed_step_was_to_drop_is_dropped_by_the_next_one() -> None:
    """A runner that has not seen the drop keeps the row, and has none for the request when it returns."""
    engine = FakeEngine(max_num_seqs=3)
    for name in "abc":
        engine.add(name, 4, 6)
    engine.step()
    engine.abort("a")
    plan = engine.scheduler.schedule()
    assert plan.dropped_request_ids == ["a"]
    engine.runner.fail_at = "before all"
    with pytest.raises(RuntimeError):
        engine.runner.execute(plan)
    engine.collect(engine.scheduler.fail("broken"))
    engine.add("d", 4, 6)
    assert set(engine.step().dropped_request_ids) == {"a", "b", "c"}
    engine.run()
    assert engine.reasons["d"] == "length" and set(engine.runner.rows) <= {"d"}


def test_a_row_that_cannot_be_taken_in_ends_its_request_alone() -> None:
    """An exception in the middle of update() left the rows behind it, and the loads, without their end."""
    engine = FakeEngine(host_blocks=64, cache={"enable_prefix_caching": True})
    prompt = [(position * 5) % VOCAB_SIZE for position in range(33)]
    engine.add("before", 0, 2, prompt=prompt)
    engine.run()
    engine.kv.reset()
    for name in "ab":
        engine.add(name, 6, 4)
    engine.add("n", 6, 4, n=2, temperature=1.0, seed=3)
    engine.add("loads", 0, 2, prompt=prompt)
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    assert len(plan.kv_loads) == 1
    if not result.loads_done:
        result.loads_done = engine.runner.tiers.poll() if engine.runner.tiers is not None else []
    for row, output in zip(plan.scheduled, result.rows, strict=True):
        if row.request_id in "an":
            output.token_ids = []
    outputs = engine.scheduler.update(plan, result)
    errors = {output.request_id: output.error for output in outputs if output.error is not None}
    assert errors.keys() == {"a", "n"} and all(
        "no token was drawn" in str(error) for error in errors.values()
    )
    engine.collect(outputs)
    engine.scheduler.check_integrity()
    engine.run(max_steps=20)
    assert engine.reasons["b"] == engine.reasons["loads"] == "length"
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_trace_on_a_full_disk_ends_and_the_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """The write raised out of update(): tokens that were computed were never told."""
    engine = FakeEngine()
    engine.scheduler.start_trace(CacheConfig(), "/dev/full")
    engine.add("a", 5, 6)
    engine.add("b", 5, 6)
    engine.run()
    engine.check_outputs()
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("request_id", ["a", "n", "n#1", "#", "x#7"])
def test_an_id_that_could_be_taken_for_another_one_is_refused(request_id: str) -> None:
    """A request named as the choice of another one took that one's place among the requests."""
    engine = FakeEngine()
    engine.add("a", 4, 9)
    engine.add("n", 4, 9, n=2, temperature=1.0, seed=3)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"request_id: .* is in use, or holds a '#'"):
            engine.add(request_id, 4, 9)
        engine.step()
    engine.run()
    assert engine.reasons == {"a": "length", "n": "length", "n#1": "length"}


def test_choices_whose_blocks_a_failed_step_was_to_copy_are_computed_again() -> None:
    """They had no row in it, so they did not end with it, and went on with blocks that held nothing."""
    engine = FakeEngine(batch_policy="prefill_first")
    engine.add("r", 6, 5, n=3, temperature=1.0, seed=3)
    engine.step()
    engine.add("new", 8, 2)
    plan = engine.scheduler.schedule()
    assert [row.request_id for row in plan.scheduled] == ["new"] and len(plan.block_copies) == 2
    engine.runner.fail_at = "before copies"
    with pytest.raises(RuntimeError):
        engine.runner.execute(plan)
    (failed,) = engine.scheduler.fail("broken")
    assert failed.request_id == "new"
    engine.scheduler.check_integrity()
    del engine.requests["new"]
    engine.run()
    engine.check_outputs()
    assert engine.reasons == {"r": "length", "r#1": "length", "r#2": "length"}
