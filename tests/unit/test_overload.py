"""Five times as many requests as the engine can do: those taken are served in time, the rest hear at once."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.simulator.workload import Workload
from quire.config import EngineConfig
from quire.core.request import Request
from quire.errors import UnavailableError
from quire.plan.arrival import Arrival
from quire.plan.cost import PRESETS
from quire.plan.simulate import SampledTokens, Simulator, make_request
from quire.request.scheduling_params import SchedulingParams
from tests.unit.test_scheduler_cost import Bytecodes

CAPACITY = 13.0
"""Requests per second of the mix that the simulated engine reaches."""


def overload(seconds: float, factor: float = 5.0, **scheduling: Any) -> list[Arrival]:
    """Three seconds of an ordinary load, and then the overload."""
    calm = Workload(num_requests=round(1.8 * CAPACITY), rate=0.6 * CAPACITY, seed=1).arrivals()
    rate = factor * CAPACITY
    storm = Workload(num_requests=round(seconds * rate), rate=rate, seed=2).arrivals()
    arrivals = calm + [
        dataclasses.replace(
            arrival, request_id=f"storm-{arrival.request_id}", at=3.0 + arrival.at, stream=10_000 + index
        )
        for index, arrival in enumerate(storm)
    ]
    return [
        dataclasses.replace(
            arrival,
            scheduling=SchedulingParams(**{key: arrival.at + value for key, value in scheduling.items()}),
        )
        for arrival in arrivals
    ]


def simulator(arrivals: list[Arrival], **settings: Any) -> Simulator:
    limits = {"num_blocks": 4000, "max_num_seqs": 16, "max_num_batched_tokens": 256, **settings}
    return Simulator(EngineConfig.from_mapping(limits), arrivals, PRESETS["h100-8b"])


@pytest.mark.row("B15", clauses=("predicted",))
@pytest.mark.parametrize("slo_ms", [500, 2000])
@pytest.mark.parametrize("by", ["max_predicted_ttft_ms", "ttft_deadline of the request"])
def test_accepted_requests_keep_their_ttft_and_the_rest_are_refused(slo_ms: int, by: str) -> None:
    if by == "max_predicted_ttft_ms":
        report = simulator(overload(10.0), max_predicted_ttft_ms=slo_ms).run()
    else:
        report = simulator(overload(10.0, ttft_deadline=slo_ms / 1000)).run()
    accepted = [outcome for outcome in report.outcomes if outcome.reasons]
    assert report.num_refused > 0.6 * len(report.outcomes)
    served = [outcome.ttft for outcome in accepted if outcome.ttft is not None]
    assert np.percentile(served, 99) <= slo_ms / 1000
    # Those that would be late with a deadline of their own end by it: few.
    assert len(served) >= 0.98 * len(accepted)
    # The machine is not left idle for it.
    storm_rows = np.asarray(report.num_running)[
        len(report.num_running) // 2 : len(report.num_running) * 3 // 4
    ]
    assert np.percentile(storm_rows, 5) >= 14
    free = simulator(overload(10.0)).run()
    assert np.percentile([o.ttft for o in free.outcomes if o.ttft is not None], 50) > 4 * slo_ms / 1000


class Storm(NamedTuple):
    """What driving the scheduler alone through an overload showed."""

    num_refused: int
    most_waiting: int
    most_waiting_tokens: int
    most_alive: int
    """Requests that something still refers to, refused and ended ones among them."""


def storm(seconds: float, **settings: Any) -> Storm:
    engine = simulator([], **settings)
    scheduler, clock, cost = engine.scheduler, engine.clock, engine.cost
    arrivals = iter(overload(seconds, ttft_deadline=60.0))
    runner = SampledTokens()
    num_refused, most_waiting, most_tokens, most_alive = 0, 0, 0, 0
    coming = next(arrivals, None)
    while coming is not None or scheduler.has_unfinished():
        while coming is not None and coming.at <= clock.now:
            request = make_request(coming)
            try:
                scheduler.add_request(request)
                runner.add(coming)
            except UnavailableError as error:
                num_refused += 1
                assert error.retry_after_s is not None and error.retry_after_s > 0
            del request
            coming = next(arrivals, None)
        if not scheduler.has_unfinished():
            assert coming is not None
            clock.now = coming.at
            continue
        for output in scheduler.expire():
            runner.remove(output.request_id)
        plan = scheduler.schedule()
        clock.now += cost.seconds(
            (row.num_computed_tokens, row.num_scheduled_tokens) for row in plan.scheduled
        )
        for output in scheduler.update(plan, runner.execute(plan)):
            if output.finish_reason is not None:
                runner.remove(output.request_id)
        stats = scheduler.stats()
        most_waiting = max(most_waiting, stats.num_waiting)
        most_tokens = max(most_tokens, stats.num_waiting_tokens)
        if stats.step % 100 == 0:
            gc.collect()  # else those in cycles count, until the collector happens to come
            most_alive = max(most_alive, sum(type(one) is Request for one in gc.get_objects()))
    scheduler.check_integrity()
    return Storm(num_refused, most_waiting, most_tokens, most_alive)


@pytest.mark.row("B15")
@pytest.mark.parametrize(
    "settings",
    [{"max_waiting_requests": 50}, {"max_waiting_tokens": 8000}, {"max_predicted_ttft_ms": 1000}],
    ids=str,
)
def test_memory_is_flat(settings: dict[str, int]) -> None:
    seen = storm(6.0, **settings)
    assert seen.num_refused > 150
    assert seen.most_waiting <= settings.get("max_waiting_requests", 200)
    assert seen.most_waiting_tokens <= settings.get("max_waiting_tokens", 40_000)
    # Ended requests are remembered with their deadlines until they are the majority, and no longer.
    assert seen.most_alive <= 3 * (seen.most_waiting + 16) + 80


@pytest.mark.row("B15")
@pytest.mark.parametrize("limit", [{"max_waiting_requests": 1}, {"max_waiting_tokens": 100}], ids=str)
def test_a_refusal_costs_the_same_however_many_wait(limit: dict[str, int]) -> None:
    """A bound on its bytecodes alone let it look at each of the fifty that waited."""

    def cost(size: int) -> tuple[int, int]:
        """How many wait when one is refused, and the bytecodes of that."""
        scheduler = simulator([], **{name: value * size for name, value in limit.items()}).scheduler
        for coming in overload(60.0, ttft_deadline=6000.0):
            bytecodes = Bytecodes()
            try:
                bytecodes(scheduler.add_request, make_request(coming))
            except UnavailableError:
                return scheduler.stats().num_waiting, bytecodes.count
        raise AssertionError("nothing was refused")

    (few, least), (many, most) = cost(50), cost(500)
    assert many > 5 * few
    assert most < least + 2 * (many - few), "it looks at each one"


def test_without_a_bound_the_queue_grows() -> None:
    """What the test above would be worth nothing without."""
    seen = storm(6.0)
    assert not seen.num_refused
    assert seen.most_waiting > 250 and seen.most_alive > 250
