"""Admission and preemption cost in virtual time: predictions, retry-after, deadlines, swap or recompute."""

from __future__ import annotations

import random

import pytest

from quire.config import SchedulerConfig
from quire.core.policies.admission import MIN_DEPARTURES, SIGMAS, AdmissionControl, DeadlineHeap
from quire.core.policies.preemption import PreemptionCost
from quire.core.request import Request, RequestStatus
from quire.errors import UnavailableError
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_engine import FakeEngine


def make_request(request_id: str = "r", prompt: int = 4, **scheduling: float | None) -> Request:
    return Request(
        request_id,
        [1] * prompt,
        SamplingParams(),
        arrival_time=100.0,
        scheduling=SchedulingParams(**scheduling),
    )


def check(admission: AdmissionControl, request: Request, **kwargs: object) -> None:
    values = {"num_waiting": 0, "num_waiting_tokens": 0, "num_free_seats": 1, **kwargs}
    admission.check(request, 100.0, **values)


def busy(config: SchedulerConfig, base_s: float = 0.01, per_token_s: float = 1e-3) -> AdmissionControl:
    """After 300 steps of base_s + per_token_s * tokens."""
    admission, choice = AdmissionControl(config), random.Random(0)
    for _ in range(300):
        num_tokens = choice.choice([0, 0, 10, 100, 512])
        admission.on_step(base_s + per_token_s * num_tokens, num_tokens, 8)
    return admission


@pytest.mark.row("B15")
def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    admission = AdmissionControl(SchedulerConfig(max_waiting_requests=2, max_waiting_tokens=100))
    check(admission, make_request(prompt=60), num_waiting=1, num_waiting_tokens=40)
    with pytest.raises(UnavailableError, match=r"^queue full: 2 requests wait \(max_waiting_requests 2\)$"):
        check(admission, make_request(), num_waiting=2)
    expected = r"^queue full: 40 tokens wait, 61 more exceed the limit \(max_waiting_tokens 100\)$"
    with pytest.raises(UnavailableError, match=expected):
        check(admission, make_request(prompt=61), num_waiting=1, num_waiting_tokens=40)


@pytest.mark.row("B15")
def test_a_full_queue_says_when_the_next_request_ends() -> None:
    admission = AdmissionControl(SchedulerConfig(max_waiting_requests=2))
    for _ in range(20):
        admission.on_departure()
        admission.on_step(0.5, 0, 4)
    with pytest.raises(UnavailableError, match=r"\(max_waiting_requests 2\); retry after 0\.5 s$"):
        check(admission, make_request(), num_waiting=2)


@pytest.mark.row("B15")
def test_without_history_every_request_is_taken() -> None:
    admission = AdmissionControl(SchedulerConfig(max_predicted_ttft_ms=1))
    assert admission.predicted_ttft_s(10**6, 10**3, 0) is None
    check(admission, make_request(prompt=10**5), num_waiting=1000, num_waiting_tokens=10**6)
    admission.on_step(5.0, 0, 3)  # decodes alone do not tell what a prompt costs
    admission.on_step(5.0, 0, 0)
    check(admission, make_request(prompt=10**5), num_waiting=1000, num_waiting_tokens=10**6)


@pytest.mark.row("B15")
def test_the_time_to_compute_the_prompts_ahead_is_predicted_from_steps() -> None:
    admission = busy(SchedulerConfig(max_num_batched_tokens=512), base_s=0.01, per_token_s=1e-3)
    assert admission.predicted_ttft_s(5120, 9, 64) == pytest.approx(10 * 0.01 + 5.12, rel=1e-3)
    assert admission.predicted_ttft_s(10, 0, 64) == pytest.approx(0.02, rel=1e-3)
    # Steps that are all alike do not tell the parts apart: what they say together is used.
    alike = AdmissionControl(SchedulerConfig())
    for _ in range(50):
        alike.on_step(0.2, 100, 4)
    assert alike.predicted_ttft_s(1000, 0, 64) == pytest.approx(2.0)
    # Steps that were faster the more they had: no step is predicted to be faster than the mean.
    odd = AdmissionControl(SchedulerConfig())
    for tokens, seconds in ((10, 0.3), (20, 0.1)) * 20:
        odd.on_step(seconds, tokens, 4)
    assert odd.predicted_ttft_s(1024, 0, 64) == pytest.approx(0.4, rel=0.02)


@pytest.mark.row("B15")
def test_the_estimate_follows_a_machine_that_slows_down() -> None:
    admission = busy(SchedulerConfig(), base_s=0.0, per_token_s=1e-4)
    for i in range(400):
        admission.on_step(0.2 if i % 2 else 0.4, 200 if i % 2 else 400, 4)  # 1 ms per token, 120 s
    assert admission.predicted_ttft_s(1000, 0, 64) == pytest.approx(1.0, rel=0.05)


@pytest.mark.row("B15")
def test_the_wait_for_a_seat_follows_the_rate_of_departures() -> None:
    admission = AdmissionControl(SchedulerConfig())
    for i in range(1000):
        if i % 10 == 0:  # every second
            admission.on_departure()
        admission.on_step(0.1, 10, 4)
    assert admission.predicted_ttft_s(10, 0, 0) == pytest.approx(1 + SIGMAS, rel=0.05)
    assert admission.predicted_ttft_s(10, 4, 0) == pytest.approx(5 + SIGMAS * 5**0.5, rel=0.05)
    assert admission.predicted_ttft_s(10, 4, 3) == pytest.approx(2 + SIGMAS * 2**0.5, rel=0.05)
    assert admission.predicted_ttft_s(10, 4, 5) == pytest.approx(0.1)  # a seat for each

    few = AdmissionControl(SchedulerConfig())
    for _ in range(int(MIN_DEPARTURES) - 1):
        few.on_departure()
        few.on_step(1.0, 10, 4)
    assert few.predicted_ttft_s(10, 100, 0) == pytest.approx(1.0)  # too few to say: prompts only


@pytest.mark.row("B15")
def test_a_request_that_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    admission = busy(SchedulerConfig(max_predicted_ttft_ms=2000), base_s=0.0, per_token_s=1e-3)
    check(admission, make_request(prompt=1000), num_waiting=2, num_waiting_tokens=950, num_free_seats=9)
    with pytest.raises(UnavailableError, match=r"3\.00 s to the first token.*max_predicted_ttft_ms") as error:
        check(admission, make_request(prompt=1000), num_waiting=2, num_waiting_tokens=1000, num_free_seats=9,
              num_running_tokens=1000)  # fmt: skip
    # By then that much less of the queue is left: it would just be taken.
    retry_after_s = error.value.retry_after_s
    assert retry_after_s == pytest.approx(1.0, rel=1e-3)
    drained = int(retry_after_s * 1000) + 5
    check(admission, make_request(prompt=1000), num_waiting=2, num_waiting_tokens=2000 - drained)


@pytest.mark.row("A22")
def test_the_deadline_of_the_request_counts_as_a_limit() -> None:
    admission = busy(SchedulerConfig(max_predicted_ttft_ms=5000), base_s=0.0, per_token_s=1e-3)
    for which in ("ttft_deadline", "deadline"):
        check(admission, make_request(prompt=900, **{which: 101.0}))
        with pytest.raises(UnavailableError, match=f"1.00 s allowed .{which} of the request"):
            check(admission, make_request(prompt=1100, **{which: 101.0}))
    with pytest.raises(UnavailableError, match="max_predicted_ttft_ms"):
        check(admission, make_request(prompt=5100, deadline=10_000.0))
    check(busy(SchedulerConfig()), make_request(prompt=10**5))  # no limit, no deadline


def test_only_what_is_ahead_counts() -> None:
    admission = busy(SchedulerConfig(max_predicted_ttft_ms=2000), base_s=0.0, per_token_s=1e-3)
    waiting = {"num_waiting": 500, "num_waiting_tokens": 10**6}
    with pytest.raises(UnavailableError):
        check(admission, make_request(), **waiting)
    check(admission, make_request(), **waiting, ahead=(1, 1000))


@pytest.mark.row("A22")
def test_default_deadlines_are_for_requests_that_state_none() -> None:
    admission = AdmissionControl(SchedulerConfig(default_ttft_deadline_ms=500, default_deadline_ms=3000))
    for given, expected in (
        ({}, (100.5, 103.0)),
        ({"ttft_deadline": 200.0}, (200.0, 103.0)),
        ({"deadline": 101.0, "priority": 3}, (100.5, 101.0)),
    ):
        request = make_request(**given)
        admission.set_default_deadlines(request)
        assert (request.scheduling.ttft_deadline, request.scheduling.deadline) == expected
        assert request.scheduling.priority == given.get("priority", 0)
    request = make_request()
    AdmissionControl(SchedulerConfig()).set_default_deadlines(request)
    assert request.scheduling == SchedulingParams()


@pytest.mark.row("A22")
def test_expired_requests_are_told_once_and_with_the_deadline_that_passed() -> None:
    heap = DeadlineHeap()
    quiet, talking, total, ended, both = (
        make_request("quiet", ttft_deadline=10.0),
        make_request("talking", ttft_deadline=10.0, deadline=30.0),
        make_request("total", deadline=20.0),
        make_request("ended", deadline=5.0),
        make_request("both", ttft_deadline=12.0, deadline=13.0),
    )
    heap.push(make_request("none"))
    assert len(heap) == 0
    for request in (quiet, talking, total, ended, both):
        heap.push(request)
    talking.token_ids.append(1)
    ended.status = RequestStatus.FINISHED
    assert heap.expired(9.9) == []
    assert heap.expired(10.0) == [(quiet, "ttft_deadline")]
    assert heap.expired(11.9) == []
    assert heap.expired(25.0) == [(both, "ttft_deadline"), (total, "deadline")]
    assert heap.expired(25.0) == []
    assert heap.expired(29.9) == []
    assert heap.expired(30.0) == [(talking, "deadline")]
    assert len(heap) == 0


def test_ended_requests_do_not_stay_until_their_far_deadline() -> None:
    heap, open_requests = DeadlineHeap(), []
    for i in range(20_000):
        request = make_request(f"r{i}", prompt=1, ttft_deadline=1e6, deadline=1e6)
        heap.push(request)
        open_requests.append(request)
        if len(open_requests) > 50:
            open_requests.pop(0).status = RequestStatus.FINISHED
        assert len(heap) <= 2 * 2 * 51 + 66
    assert sorted(r.request_id for r, _ in heap.expired(1e6)) == sorted(r.request_id for r in open_requests)


@pytest.mark.row("B10")
def test_auto_takes_what_is_cheaper_by_measured_rates() -> None:
    rates = (10_000.0, 20_000.0)  # 100 ms per block out, 50 ms back
    cost = PreemptionCost("auto", 1000, lambda: rates)
    cost.on_prefill(1000, 1.0)  # 1 ms per token
    assert cost.should_swap(10, 1501)
    assert not cost.should_swap(10, 1499)
    rates = (100_000.0, 200_000.0)
    assert cost.should_swap(10, 151) and not cost.should_swap(10, 149)
    for _ in range(400):  # computing becomes ten times faster, and the old measurements fade
        cost.on_prefill(1000, 0.1)
    assert cost.should_swap(10, 1510) and not cost.should_swap(10, 1490)


@pytest.mark.row("B10")
def test_what_auto_does_before_it_has_measured() -> None:
    rates: tuple[float | None, float | None] = (None, None)
    cost = PreemptionCost("auto", 1000, lambda: rates)
    assert not cost.should_swap(1, 10**6)  # no prefill yet
    cost.on_prefill(0, 1.0)
    cost.on_prefill(10, 0.0)
    assert not cost.should_swap(1, 10**6)
    cost.on_prefill(1000, 1.0)
    assert cost.should_swap(10**6, 1)  # to learn
    rates = (10_000.0, None)
    assert cost.should_swap(1, 201) and not cost.should_swap(1, 199)  # the way back as fast as the way out
    unknown = PreemptionCost("auto", 0, lambda: rates)
    unknown.on_prefill(1000, 1.0)
    assert not unknown.should_swap(1, 10**6)


def test_the_fixed_modes_do_as_they_say() -> None:
    for mode, swaps in (("recompute", False), ("swap", True)):
        cost = PreemptionCost(mode, 1000, lambda: (None, None))
        assert cost.should_swap(10, 1) is cost.should_swap(1, 10**6) is swaps
    with pytest.raises(AssertionError):
        PreemptionCost("later", 1, lambda: (None, None))


def test_prompts_that_are_being_computed_are_ahead_of_a_new_one() -> None:
    """A prompt leaves the queue with its first chunk; the rest of it still has to be computed before."""
    engine = FakeEngine(num_blocks=1024, step_s=1.0, max_num_batched_tokens=50, max_num_seqs=8)
    for name in ("before", "again"):
        engine.add(name, 100, 1)
        engine.run()
    engine.add("long", 1000, 4)
    engine.step()
    assert not len(engine.scheduler.roster.queue), "nothing waits"

    def soon() -> SchedulingParams:
        return SchedulingParams(ttft_deadline=engine.clock() + 6.5)

    with pytest.raises(UnavailableError, match="ttft_deadline of the request"):
        engine.add("late", 40, 1, scheduling=soon())
    while engine.requests["long"].num_computed_tokens < 800:
        engine.step()
    engine.add("in time", 40, 1, scheduling=soon())
    engine.run()
    assert engine.reasons["in time"] == "length"
