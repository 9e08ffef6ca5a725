"""Tenants in virtual time: quotas, caps, and what clients that invent names can do."""

from __future__ import annotations

import random

import pytest

from quire.config import EngineConfig, TenantLimits
from quire.core.policies.reservation import Predicted
from quire.core.policies.tenants import MAX_IDLE_TENANTS, Tenants
from quire.core.request import FinishReason, Request
from quire.errors import UnavailableError
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fair_queue import counter
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE


def make_request(tenant: str, prompt: int = 1, request_id: str = "r") -> Request:
    return Request(
        request_id,
        [1] * prompt,
        SamplingParams(),
        scheduling=SchedulingParams(tenant=tenant),
        arrival_time=0.0,
    )


def make(**limits: object) -> Tenants:
    given = {name.replace("default", "*"): values for name, values in limits.items()}
    return Tenants(EngineConfig.from_mapping({"tenants": given}).scheduler.tenants)


def test_limits_of_named_and_unnamed_tenants() -> None:
    tenants = make(acme={"weight": 3, "tokens_per_minute": 600}, default={"max_running": 2, "weight": 0.5})
    assert tenants.limits("acme") == TenantLimits(weight=3, tokens_per_minute=600)
    assert tenants.limits("") == tenants.limits("x") == TenantLimits(weight=0.5, max_running=2)
    assert (tenants.weight("acme"), tenants.weight("x"), Tenants({}).weight("x")) == (3, 0.5, 1.0)


@pytest.mark.row("B13")
def test_over_quota_is_unavailable_until_the_time_that_is_named() -> None:
    tenants = make(acme={"tokens_per_minute": 600})  # 10 per second
    now = 1000.0
    request = make_request("acme", 500)
    tenants.check_arrival(request, now)
    tenants.on_arrival(request, now)
    tenants.on_admitted(request)
    assert tenants.tokens_left("acme", now) == 100
    tenants.on_tokens(request, 149, now)
    with pytest.raises(UnavailableError, match=r"tenant 'acme'.*tokens_per_minute 600.*after 5\.0 s") as e:
        tenants.check_arrival(make_request("acme"), now)
    assert e.value.retry_after_s == 5.0  # 49 of debt, and one token
    with pytest.raises(UnavailableError):
        tenants.check_arrival(make_request("acme"), now + 4.99)
    tenants.check_arrival(make_request("acme"), now + 5.0)
    tenants.check_arrival(make_request("other"), now)  # others have no limit
    assert tenants.tokens_left("acme", now + 1e6) == 600  # never more than a minute's


@pytest.mark.row("B13")
@pytest.mark.parametrize("tenant", ["acme", "invented"])
def test_a_greedy_tenant_gets_its_quota_over_an_hour(tenant: str) -> None:
    """It tries ten times a second and retries after what it is told: 60 minutes and the burst, and what
    one request may overdraw."""
    quota, choice = 6000, random.Random(1)
    tenants = make(acme={"tokens_per_minute": quota}, default={"tokens_per_minute": quota})
    now, used, refused = 0.0, 0, 0
    while now < 3600.0:
        request = make_request(tenant, choice.randint(1, 400))
        try:
            tenants.check_arrival(request, now)
        except UnavailableError as error:
            refused += 1
            assert error.retry_after_s is not None and error.retry_after_s > 0
            now += error.retry_after_s + 1e-9
            tenants.check_arrival(request, now)
        tenants.on_arrival(request, now)
        tenants.on_admitted(request)
        output = choice.randint(1, 200)
        for _ in range(output):
            tenants.on_tokens(request, 1, now)
        tenants.on_left(request)
        used += request.num_prompt_tokens + output
        now += 0.1
    assert refused > 1000
    assert 61 * quota - 600 <= used <= 61 * quota + 600


@pytest.mark.row("B13")
def test_caps_on_running_and_waiting_requests() -> None:
    tenants = make(default={"max_running": 2, "max_waiting": 3})
    requests = [make_request("a", request_id=f"r{i}") for i in range(5)]
    for request in requests[:3]:
        tenants.check_arrival(request, 0.0)
        tenants.on_arrival(request, 0.0)
    with pytest.raises(UnavailableError, match=r"tenant 'a' full: 3 requests wait \(max_waiting 3\)"):
        tenants.check_arrival(requests[3], 0.0)
    tenants.check_arrival(make_request("b"), 0.0)  # to each separately
    for request in requests[:2]:
        assert tenants.may_run(request)
        tenants.on_admitted(request)
    assert not tenants.may_run(requests[2])
    assert tenants.may_run(make_request("b"))

    tenants.on_left(requests[0])  # preempted
    tenants.on_waiting(requests[0])
    assert tenants.may_run(requests[2])
    tenants.on_not_waiting(requests[0])  # aborted while it waited
    tenants.on_admitted(requests[2])
    tenants.on_left(requests[1])
    tenants.on_left(requests[2])
    assert len(tenants._accounts) + len(tenants._idle) == 0


def test_without_limits_nothing_is_remembered() -> None:
    tenants = Tenants({})
    for i in range(100):
        request = make_request(f"t{i}")
        tenants.check_arrival(request, 0.0)
        tenants.on_arrival(request, 0.0)
        assert tenants.may_run(request)
        tenants.on_admitted(request)
        tenants.on_tokens(request, 10**9, 0.0)
    assert len(tenants._accounts) + len(tenants._idle) == 0


def test_a_long_invented_name_is_cut_in_the_message() -> None:
    tenants = make(default={"tokens_per_minute": 1})
    request = make_request("x\n" * 10_000)
    tenants.on_arrival(request, 0.0)
    with pytest.raises(UnavailableError) as error:
        tenants.check_arrival(request, 0.0)
    assert len(str(error.value)) < 250 and "\n" not in str(error.value)


@pytest.mark.row("B13")
def test_invented_tenants_are_forgotten() -> None:
    """100 000 names, each with one short request: those whose bucket has refilled go at once, and a flood
    that is faster than the refill is bounded."""

    def flood(per_second: float) -> tuple[int, Tenants]:
        tenants = make(named={"tokens_per_minute": 60}, default={"tokens_per_minute": 60})
        named = make_request("named", 100)
        tenants.on_arrival(named, 0.0)
        tenants.on_not_waiting(named)
        most = 0
        for i in range(100_000):
            now = i / per_second
            request = make_request(f"invented {i}", 5)
            tenants.check_arrival(request, now)
            tenants.on_arrival(request, now)
            tenants.on_admitted(request)
            tenants.on_tokens(request, 1, now)
            tenants.on_left(request)
            most = max(most, len(tenants._accounts) + len(tenants._idle))
        return most, tenants

    most, _ = flood(100.0)  # 6 tokens refill in 6 s
    assert most <= 650
    most, tenants = flood(1e6)
    assert MAX_IDLE_TENANTS < most <= MAX_IDLE_TENANTS + 2
    assert tenants.tokens_left("named", 0.0) == -40  # what is named stays
    assert tenants.tokens_left("invented 0", 0.1) == 60
    assert tenants.tokens_left("invented 99999", 0.1) == pytest.approx(54, abs=0.1)


def test_a_tenant_with_requests_here_is_never_forgotten() -> None:
    tenants = make(default={"tokens_per_minute": 60, "max_running": 1})
    running = make_request("busy", 59)
    tenants.on_arrival(running, 0.0)
    tenants.on_admitted(running)
    for i in range(3 * MAX_IDLE_TENANTS):
        request = make_request(f"invented {i}", 5)
        tenants.on_arrival(request, 0.0)
        tenants.on_not_waiting(request)
    assert not tenants.may_run(running)
    assert tenants.tokens_left("busy", 0.0) == 1
    assert len(tenants._accounts) + len(tenants._idle) == MAX_IDLE_TENANTS + 1


def test_the_fair_queue_charges_what_a_prompt_computes() -> None:
    """The scheduler told the queue the cached tokens after it had charged the prompt."""
    engine = FakeEngine(num_blocks=64, queue_policy="fair", cache={"enable_prefix_caching": True})
    prompt = [(position * 5) % VOCAB_SIZE for position in range(41)]
    engine.add("first", 0, 1, prompt=prompt, scheduling=SchedulingParams(tenant="a"))
    engine.run()
    assert counter(engine.scheduler.roster.queue, "a") == 41 + 2
    engine.add("again", 0, 1, prompt=prompt, scheduling=SchedulingParams(tenant="b"))
    engine.run()
    assert engine.requests["again"].num_cached_tokens == 40
    assert counter(engine.scheduler.roster.queue, "b") == 43 + 1 + 2  # lifted, as nobody waits


def test_pooled_prompts_are_no_outputs_to_learn_from_and_decode_nothing() -> None:
    """Embeddings counted as outputs of no token, so each generation was expected to end at once; and their
    rows in flight held prompts back with decode_first."""
    engine = FakeEngine(num_blocks=64, kv_reservation="predicted", batch_policy="decode_first")
    engine.add("tokens", 4, 9)
    engine.run()
    pooled = engine.add("pooled", 1, 1, dimensions=4)
    assert pooled.num_missing == 1 and not pooled.decodes
    pooled.finish_reason = FinishReason.STOP
    reservation = engine.scheduler._reservation
    assert isinstance(reservation, Predicted)
    reservation.on_finished(pooled)
    assert reservation._lengths == [9]


@pytest.mark.row("B13")
def test_all_tokens_of_all_choices_are_charged() -> None:
    """The first token of each choice but one was free."""
    engine = FakeEngine(step_s=0.0, num_blocks=100, tenants={"*": {"tokens_per_minute": 600}})
    engine.add("r", 0, 5, prompt=[1, 2, 3, 4], n=3, ignore_eos=True, scheduling=SchedulingParams(tenant="a"))
    while engine.scheduler.has_unfinished():
        engine.step()
    roster = engine.scheduler.roster
    assert roster.tenants.tokens_left("a", roster.clock()) == 600 - 4 - 3 * 5
