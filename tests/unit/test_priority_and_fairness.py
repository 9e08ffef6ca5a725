"""Whose turn it is: classes, tenants, quotas and long prompts, through the real scheduler in virtual time."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from typing import Any

import pytest

from benchmarks.simulator.workload import Lengths, Workload
from quire.config import EngineConfig
from quire.errors import UnavailableError
from quire.plan.arrival import Arrival
from quire.plan.cost import PRESETS
from quire.plan.simulate import Report, Simulator
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fair_queue import counter
from tests.fixtures.fake_engine import FakeEngine

CAPACITY = 38.0
"""Requests per second of the default mix that the simulated engine reaches with 64 seats."""


def simulate(arrivals: list[Arrival], **settings: Any) -> tuple[Report, Simulator]:
    limits = {
        "num_blocks": 4000,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": False,
        "max_waiting_requests": 2**31,
        "max_waiting_tokens": 2**62,
        **settings,
    }
    arrivals = sorted(arrivals, key=lambda arrival: arrival.at)
    simulator = Simulator(EngineConfig.from_mapping(limits), arrivals, PRESETS["h100-8b"], trace=True)
    return simulator.run(), simulator


def of(name: str, workload: Workload, **scheduling: Any) -> list[Arrival]:
    """The workload's arrivals, on the account of a tenant or of a class."""
    return [
        dataclasses.replace(
            arrival, request_id=f"{name}{arrival.request_id}", scheduling=SchedulingParams(**scheduling)
        )
        for arrival in workload.arrivals()
    ]


def at_rate(rate: float, seconds: float, **options: Any) -> Workload:
    return Workload(num_requests=max(1, round(rate * seconds)), rate=rate, **options)


# Classes.

URGENT = at_rate(1.5, 20.0, prompt=Lengths(1024, 0.1, 800, 1300), output=Lengths(40, 0.3, 10, 80), seed=1)


@pytest.mark.row("B11")
def test_the_high_class_hardly_notices_that_the_low_one_saturates_the_machine() -> None:
    high = of("high", URGENT, priority=-10)
    low = of("low", at_rate(2 * CAPACITY, 20.0, seed=2), priority=10, tenant="batch")
    settings = {"tenants": json.dumps({"batch": {"max_waiting": 100}})}
    ttft = {}
    for policy in ("priority", "fcfs"):
        idle, _ = simulate(high, queue_policy=policy, **settings)
        loaded, _ = simulate(high + low, queue_policy=policy, **settings)
        assert max(loaded.num_running) == 64 and loaded.by("priority")[10]["refused"] > 100
        assert {reason for outcome in loaded.outcomes for reason in outcome.reasons} == {"length"}
        ttft[policy] = [report.by("priority")[-10]["ttft_s"] for report in (idle, loaded)]
        if policy == "priority":
            assert loaded.num_preemptions > 5
    idle_s, loaded_s = ttft["priority"]
    assert loaded_s["p99"] < 1.5 * idle_s["p99"] and loaded_s["p50"] < 1.5 * idle_s["p50"]
    idle_s, loaded_s = ttft["fcfs"]
    assert loaded_s["p50"] > 20 * idle_s["p50"]


@pytest.mark.row("B11", clauses=("ageing",))
@pytest.mark.parametrize("ageing_s", [1.0, 0.0])
def test_ageing_prevents_starvation(ageing_s: float) -> None:
    """The high class alone is more than the machine can do: without ageing the low one comes last."""
    high = of("high", at_rate(2.0 * CAPACITY, 10.0, seed=3), priority=0)
    low = of("low", at_rate(2.0, 2.0, seed=4), priority=2)
    low = [dataclasses.replace(arrival, at=arrival.at + 4.0) for arrival in low]
    report, _ = simulate(high + low, queue_policy="priority", ageing_s=ageing_s)
    waits = [o.ttft for o in report.outcomes if o.arrival.scheduling.priority == 2]
    assert len(waits) == 4 and all(wait is not None for wait in waits)
    if ageing_s:  # two classes are worth 2 s; the rest is the backlog of the high class itself
        assert max(waits) < 8.0
    else:
        assert min(waits) > 9.0


# Tenants.


def served(simulator: Simulator, *, weights: tuple[float, float] = (1.0, 2.0)) -> list[dict[str, float]]:
    """Per step, the service each tenant has had until then."""
    assert simulator.trace is not None
    tenant, prompt = {}, {}
    total: defaultdict[str, float] = defaultdict(float)
    series = []
    for record in simulator.trace.records:
        for arrival in record["arrivals"]:
            tenant[arrival["id"]], prompt[arrival["id"]] = arrival["tenant"], arrival["prompt"]
        for name, computed, count in record["scheduled"]:
            num_input = max(0, min(computed + count, prompt[name]) - computed)
            samples = computed + count >= prompt[name]
            total[tenant[name]] += weights[0] * num_input + weights[1] * samples
        series.append(dict(total))
    return series


def largest_gap(series: list[dict[str, float]], shares: dict[str, float]) -> float:
    """Most that the service per weight of two tenants differs over any interval."""
    first, second = shares
    differences = [
        step.get(first, 0.0) / shares[first] - step.get(second, 0.0) / shares[second] for step in series
    ]
    return max(differences) - min(differences)


@pytest.mark.row("B12", clauses=("gap",))
def test_service_of_backlogged_tenants_differs_by_the_bound_of_the_paper_at_most() -> None:
    seats, longest_prompt, longest_output = 16, 600, 200
    lengths = {"prompt": Lengths(100, 1.0, 4, longest_prompt), "output": Lengths(60, 0.8, 4, longest_output)}
    # Both have always something waiting: all of it is there at the beginning.
    heavy = of("heavy", Workload(num_requests=600, seed=5, **lengths), tenant="heavy")
    light = of("light", Workload(num_requests=60, seed=6, **lengths), tenant="light")
    gaps = {}
    for policy in ("fair", "fcfs"):
        _, simulator = simulate(heavy + light, queue_policy=policy, max_num_seqs=seats)
        assert simulator.trace is not None
        series = served(simulator)
        waiting = len(light)
        backlogged = 0  # steps before the last one of the light tenant has begun
        for record in simulator.trace.records:
            waiting -= sum(n.startswith("light") and not at for n, at, _ in record["scheduled"])
            backlogged += waiting > 0
        gaps[policy] = largest_gap(series[:backlogged], {"heavy": 1.0, "light": 1.0})
    # Section 4: 2 max(w_in * longest input, w_out * tokens of a running batch).
    bound = 2 * max(1.0 * longest_prompt, 2.0 * seats * (longest_prompt + longest_output))
    tight = 2 * max(1.0 * longest_prompt, 2.0 * seats * longest_output)
    assert gaps["fair"] < tight < bound
    assert gaps["fcfs"] > 2 * tight


@pytest.mark.row("B12")
def test_a_light_tenant_beside_one_that_sends_ten_times_as_much() -> None:
    light = of("light", at_rate(0.2 * CAPACITY, 10.0, seed=7), tenant="light")
    heavy = of("heavy", at_rate(2.0 * CAPACITY, 10.0, seed=8), tenant="heavy")
    ratios = {}
    for policy in ("fair", "fcfs"):
        alone = simulate(light, queue_policy=policy)[0].by("tenant")["light"]["e2e_s"]
        beside = simulate(light + heavy, queue_policy=policy)[0].by("tenant")["light"]["e2e_s"]
        ratios[policy] = {key: beside[key] / alone[key] for key in alone}
    assert max(ratios["fair"].values()) < 1.3, ratios
    assert ratios["fcfs"]["p50"] > 3


def test_a_prompt_that_joins_late_at_an_early_rank_does_not_stall_who_decodes() -> None:
    """It took the whole budget, as rows go in the order of ranks and its rank is that of its arrival. Under
    every policy but FCFS prompts may join so; a light tenant's end-to-end latency doubled by it."""
    engine = FakeEngine(num_blocks=600, max_num_seqs=2, max_num_batched_tokens=16, queue_policy="fair")
    heavy, light = SchedulingParams(tenant="heavy"), SchedulingParams(tenant="light")
    engine.add("h0", 8, 30, scheduling=heavy)
    engine.add("h1", 8, 10, scheduling=heavy)
    engine.step()
    engine.add("long", 700, 4, scheduling=heavy)
    engine.add("late", 8, 400, scheduling=light)
    decoding: set[str] = set()
    while engine.scheduler.has_unfinished():
        plan = engine.step()
        scheduled = {row.request_id: row.num_scheduled_tokens for row in plan.scheduled}
        assert decoding <= scheduled.keys()
        if "late" in decoding and scheduled.get("long", 1) > 1:
            assert scheduled["long"] <= 15
        decoding |= {row.request_id for row in plan.scheduled if row.samples}
        decoding -= engine.reasons.keys()
    late, long = engine.requests["late"], engine.requests["long"]
    assert long.rank < late.rank and engine.runner.num_steps < 500
    engine.check_outputs()


@pytest.mark.row("B13", clauses=("weights",))
def test_weights_are_shares_of_the_service() -> None:
    lengths = {"prompt": Lengths(50, 0.5, 4, 200), "output": Lengths(40, 0.5, 4, 120)}
    gold = of("gold", Workload(num_requests=400, seed=9, **lengths), tenant="gold")
    iron = of("iron", Workload(num_requests=400, seed=10, **lengths), tenant="iron")
    _, simulator = simulate(
        gold + iron, queue_policy="fair", max_num_seqs=16, tenants=json.dumps({"gold": {"weight": 3}})
    )
    series = served(simulator)
    # Until the first of the two has nothing waiting; gold is faster.
    half = next(step for step in series if step.get("gold", 0) > 0.8 * series[-1]["gold"])
    assert half["gold"] / half["iron"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.row("B13")
def test_a_quota_that_is_used_up_says_when_to_come_again() -> None:
    limits = {"small": {"tokens_per_minute": 600}}
    engine = FakeEngine(num_blocks=500, tenants=json.dumps(limits), step_s=0.01)
    small, other = SchedulingParams(tenant="small"), SchedulingParams(tenant="other")
    engine.add("a", 550, 100, scheduling=small)
    engine.run()  # 50 tokens of debt, less what a second brought
    with pytest.raises(UnavailableError, match=r"quota of tenant 'small'.*tokens_per_minute 600") as refused:
        engine.add("b", 10, 5, scheduling=small)
    retry_after_s = refused.value.retry_after_s
    assert retry_after_s == pytest.approx((51 - engine.clock.now * 10) / 10, rel=0.01)
    engine.add("c", 10, 5, scheduling=other)  # nobody else is touched
    engine.clock.now += retry_after_s - 0.05
    with pytest.raises(UnavailableError):
        engine.add("b", 10, 5, scheduling=small)
    engine.clock.now += 0.1
    engine.add("b", 10, 5, scheduling=small)
    engine.run()
    engine.check_outputs()


@pytest.mark.row("B13", clauses=("concurrency",))
@pytest.mark.parametrize("queue_policy", ["fcfs", "fair", "priority", "shortest_first", "longest_prefix"])
def test_a_cap_on_running_requests_holds_back_that_tenant_alone(queue_policy: str) -> None:
    limits = {"capped": {"max_running": 2}, "*": {"max_waiting": 30}}
    engine = FakeEngine(num_blocks=500, max_num_seqs=8, tenants=json.dumps(limits), queue_policy=queue_policy)
    for index in range(12):
        engine.add(f"c{index}", 5, 6, scheduling=SchedulingParams(tenant="capped"))
    for index in range(12):
        engine.add(f"o{index}", 5, 6, scheduling=SchedulingParams(tenant="other"))
    most: dict[str, int] = {"c": 0, "o": 0}
    while engine.scheduler.has_unfinished():
        names = [row.request_id[0] for row in engine.step().scheduled]
        assert names.count("c") <= 2
        most = {kind: max(count, names.count(kind)) for kind, count in most.items()}
    assert most == {"c": 2, "o": 6}
    engine.check_outputs()


@pytest.mark.row("B13")
def test_a_cap_on_waiting_requests_refuses_that_tenant_alone() -> None:
    engine = FakeEngine(max_num_seqs=1, tenants=json.dumps({"*": {"max_waiting": 2}}))
    for tenant in ("a", "b"):
        for index in range(2):
            engine.add(f"{tenant}{index}", 4, 2, scheduling=SchedulingParams(tenant=tenant))
        with pytest.raises(UnavailableError, match=f"queue of tenant '{tenant}' full.*max_waiting 2"):
            engine.add(f"{tenant}2", 4, 2, scheduling=SchedulingParams(tenant=tenant))
    engine.run()
    engine.add("a2", 4, 2, scheduling=SchedulingParams(tenant="a"))
    engine.run()
    engine.check_outputs()


# Long prompts and order.


def first_tokens(engine: FakeEngine, kind: str) -> list[float]:
    return [at for name, at in engine.first_token_at.items() if name.startswith(kind)]


def behind_long_prompts(**limits: Any) -> FakeEngine:
    """Three prompts of 4096 tokens, and 20 of 20 tokens right behind them; a step is a second."""
    engine = FakeEngine(
        num_blocks=5000,
        max_num_batched_tokens=256,
        max_prefill_tokens_per_request=128,
        max_model_len=8192,
        step_s=1.0,
        **limits,
    )
    for index in range(3):
        engine.add(f"long{index}", 4096, 2)
    for index in range(20):
        engine.add(f"short{index}", 20, 2)
    engine.run()
    engine.check_outputs()
    return engine


@pytest.mark.row("B16", clauses=("overtake", "cap"))
@pytest.mark.parametrize("limits", [{"max_long_prefills": 1}, {"queue_policy": "shortest_first"}], ids=str)
def test_short_prompts_overtake_a_4k_prompt(limits: dict[str, Any]) -> None:
    plain = behind_long_prompts()
    assert min(first_tokens(plain, "short")) >= 32, "they wait for two long prompts of 32 chunks each"
    better = behind_long_prompts(**limits)
    assert max(first_tokens(better, "short")) <= 5
    # Nobody pays for it: what runs is the same, in another order.
    assert max(first_tokens(better, "long")) <= 1.6 * max(first_tokens(plain, "long"))


@pytest.mark.row("B16", clauses=("shortest",))
@pytest.mark.parametrize("ageing_s", [2.0, 0.0])
def test_with_ageing_a_4k_prompt_gets_its_turn_while_short_ones_keep_coming(ageing_s: float) -> None:
    engine = FakeEngine(
        num_blocks=3000,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        max_model_len=8192,
        step_s=0.01,
        queue_policy="shortest_first",
        ageing_s=ageing_s,
    )
    engine.add("s0", 20, 4)
    engine.add("s1", 20, 4)
    engine.step()
    engine.add("long", 4096, 1)
    number = 2
    while "long" not in engine.first_token_at and engine.clock.now < 12.0:
        while len(engine.scheduler.roster.queue) < 3:
            engine.add(f"s{number}", 20, 4)
            number += 1
        engine.step()
    if ageing_s:
        # 4.1 thousand tokens more than the others are worth 8.2 s of waiting.
        assert 8.0 < engine.first_token_at["long"] < 9.0
    else:
        assert "long" not in engine.first_token_at and number > 200


@pytest.mark.row("B16", clauses=("lpm",))
def test_longest_prefix_raises_the_hit_rate_on_a_trace_with_shared_prefixes() -> None:
    arrivals = Workload(
        num_requests=200,
        prompt=Lengths(30, 0.5, 4, 100),
        output=Lengths(20, 0.5, 4, 60),
        num_prefixes=10,
        prefix_tokens=512,
        seed=11,
    ).arrivals()
    rates = {}
    for policy in ("fcfs", "longest_prefix"):
        # The prefixes need 320 blocks together: the pool holds some of them beside what runs.
        report, _ = simulate(
            arrivals,
            queue_policy=policy,
            num_blocks=160,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
        )
        assert all(outcome.reasons == ["length"] for outcome in report.outcomes)
        rates[policy] = report.as_dict()["hit_rate"]
    assert rates["longest_prefix"] > 1.25 * rates["fcfs"], rates


def test_a_probe_of_the_engine_is_nobody_s_service() -> None:
    """The tenant without a name paid three tokens for each probe of an idle engine, the whole night long."""
    engine = FakeEngine(queue_policy="fair")
    engine.add("probe", 1, 1, scheduling=SchedulingParams(is_internal=True))
    engine.run()
    assert counter(engine.scheduler.roster.queue, "") == 0.0
    engine.add("request", 1, 1)
    engine.run()
    assert counter(engine.scheduler.roster.queue, "") > 0.0
