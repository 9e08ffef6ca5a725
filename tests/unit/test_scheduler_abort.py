"""Requests that are aborted or fail, in every phase, with a fake runner."""

from __future__ import annotations

import pytest

from quire.request import RequestStatus
from tests.fixtures.fake_engine import FakeEngine


def test_abort_in_every_phase_frees_at_once() -> None:
    engine = FakeEngine(num_blocks=4, max_num_seqs=3, max_num_batched_tokens=8)
    engine.add("running", 7, 9)
    engine.add("preempted", 3, 9)
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    engine.add("waiting", 2, 3)
    assert engine.requests["preempted"].status is RequestStatus.PREEMPTED

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
    outputs = engine.scheduler.fail([row.request_id for row in plan.scheduled], "broken")
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


def test_fail_all_ends_waiting_requests_too() -> None:
    engine = FakeEngine(num_blocks=8, max_num_seqs=1)
    engine.add("a", 4, 3)
    engine.add("b", 4, 3)
    plan = engine.scheduler.schedule()
    outputs = engine.scheduler.fail_all("gone", "UNAVAILABLE")
    assert [(o.request_id, o.error, o.error_code) for o in outputs] == [
        ("a", "gone", "UNAVAILABLE"),
        ("b", "gone", "UNAVAILABLE"),
    ]
    assert not engine.scheduler.has_unfinished()
    engine.scheduler.check_integrity()
    assert plan.scheduled and engine.kv.num_free_blocks == 8


def test_a_row_that_failed_alone_ends_alone() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.add("a", 4, 3)
    engine.add("b", 4, 3)
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    del result.sampled_token_ids["a"]
    result.errors["a"] = "no finite logit"
    failed, fine = engine.scheduler.update(plan, result)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("a", "error", "no finite logit")
    assert (fine.request_id, fine.finish_reason, fine.error) == ("b", None, None)
    assert engine.step().dropped_request_ids == ["a"]
    engine.scheduler.check_integrity()


def test_find_by_the_id_the_client_gave() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for name, external_id in (("1", "x"), ("2", "x"), ("3", "y"), ("4", "")):
        engine.add(name, 2, 1, external_id=external_id)
    assert engine.scheduler.find("x") == ["1", "2"]
    assert engine.scheduler.find("") == engine.scheduler.find("z") == []
    engine.step()
    assert engine.scheduler.find("x") == ["2"]
    engine.abort(*engine.scheduler.find("x"))
    assert engine.scheduler.find("x") == []
    engine.run()
    assert engine.scheduler._by_external_id == {}


def test_update_takes_the_plan_made_last() -> None:
    engine = FakeEngine()
    engine.add("a", 2, 3)
    plan = engine.step()
    engine.scheduler.schedule()
    with pytest.raises(AssertionError):
        engine.scheduler.update(plan, engine.runner.execute(plan))
