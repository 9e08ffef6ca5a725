"""Queue policies in virtual time: order, ageing, walks, and what they promise about fairness."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import SchedulerConfig, choices
from quire.core.policies.queue import (
    MAX_EXPECTED_OUTPUT,
    MAX_IDLE_TENANTS,
    PREFIX_WALKS,
    PREFIX_WINDOW,
    FairQueue,
    QueuePolicy,
    make_queue,
)
from quire.core.policies.ranked_requests import RankedRequests
from quire.core.request import Request
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fair_queue import counter
from tests.fixtures.properties import settings
from tests.unit.test_scheduler_cost import Bytecodes

QUEUE_POLICIES = choices("queue_policy")


def make_request(
    request_id: str,
    *,
    prompt: int = 4,
    max_tokens: int | None = 8,
    arrival: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    n: int = 1,
) -> Request:
    return Request(
        request_id,
        [1] * prompt,
        SamplingParams(max_tokens=max_tokens, n=n),
        arrival_time=arrival,
        scheduling=SchedulingParams(priority=priority, tenant=tenant),
    )


def make(policy: str, **kwargs: object) -> QueuePolicy:
    callbacks = {key: kwargs.pop(key) for key in ("cached_tokens", "may_run", "weight") if key in kwargs}
    callbacks.setdefault("cached_tokens", lambda request: 0)
    return make_queue(SchedulerConfig(queue_policy=policy, **kwargs), **callbacks)


def ids(queue: QueuePolicy, now: float = 0.0) -> list[str]:
    return [request.request_id for request in queue.candidates(now)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("pppra"), st.integers(0, 10**6)), max_size=300))
def test_ranked_requests_are_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    ranked, model, count = RankedRequests(), {}, 0
    for operation, value in operations:
        if operation == "p":
            request = make_request(f"r{count}")
            request.rank = (float(value % 50), count + 1)
            count += 1
            ranked.push(request)
            model[request.request_id] = request
        elif operation == "r" and model:
            ranked.remove(model.pop(sorted(model)[value % len(model)]))
        elif operation == "a" and model:
            first = ranked.pop()
            assert first.rank == min(request.rank for request in model.values())
            del model[first.request_id]
        assert len(ranked) == len(model)
        assert list(ranked.in_order()) == sorted(model.values(), key=lambda request: request.rank)


def test_a_walk_passes_over_what_is_removed_ahead_of_it() -> None:
    ranked = RankedRequests()
    requests = [make_request(f"r{i}") for i in range(40)]
    for i, request in enumerate(requests):
        request.rank = (float(i), i)
        ranked.push(request)
    seen = []
    for request in ranked.in_order():
        seen.append(request)
        for other in (request, requests[int(request.rank[0]) + 1]):
            if other in ranked:
                ranked.remove(other)
    assert seen == requests[::2]
    assert len(ranked) == 0


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_what_every_policy_does_with_a_walk(policy: str) -> None:
    queue = make(policy)
    requests = {f"r{i}": make_request(f"r{i}", arrival=0.1 * i, tenant=f"t{i % 3}") for i in range(200)}
    for request in requests.values():
        queue.push(request)
    assert len(queue) == 200 and queue.num_tokens == 800
    assert len({request.rank[1] for request in requests.values()}) == 200
    assert set(queue) == set(requests.values())

    everything = ids(queue)
    assert sorted(everything) == sorted(requests)  # each once, though none is admitted
    walk = queue.candidates(0.0)
    admitted = []
    for i, request in enumerate(walk):
        if i % 2 == 0:
            queue.remove(request)
            queue.on_admitted(request)
            admitted.append(request)
        if i == 120:
            break
    walk.close()
    assert len(queue) == 200 - len(admitted) and queue.num_tokens == 4 * len(queue)
    assert not any(request in queue for request in admitted)
    assert sorted(ids(queue)) == sorted(requests.keys() - {request.request_id for request in admitted})

    rank = admitted[0].rank
    admitted[0].num_preemptions += 1
    queue.on_left(admitted[0])
    queue.push(admitted[0])
    assert admitted[0].rank == rank and admitted[0] in queue
    for request in list(queue):
        queue.remove(request)
    assert (len(queue), queue.num_tokens, ids(queue)) == (0, 0, [])


def test_a_preempted_request_returns_to_the_place_its_rank_says() -> None:
    queue = make("fcfs")
    requests = [make_request(f"r{i}") for i in range(4)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1])
    queue.remove(requests[0])
    queue.push(requests[1])
    queue.push(requests[0])
    assert ids(queue) == ["r0", "r1", "r2", "r3"]


@pytest.mark.row("B11")
def test_priority_ages_one_class_per_ageing_s() -> None:
    queue = make("priority", ageing_s=10.0)
    low = make_request("low", priority=2, arrival=0.0)
    queue.push(low)
    queue.push(make_request("just before", priority=0, arrival=19.9))
    queue.push(make_request("just after", priority=0, arrival=20.1))
    queue.push(make_request("normal", priority=1, arrival=5.0))
    assert ids(queue) == ["normal", "just before", "low", "just after"]
    assert low.rank == (20.0, 1)

    strict = make("priority", ageing_s=0)
    strict.push(make_request("low", priority=2, arrival=0.0))
    strict.push(make_request("b", priority=-1, arrival=1e6))
    strict.push(make_request("a", priority=-1, arrival=1e6))
    assert ids(strict) == ["b", "a", "low"]


@pytest.mark.row("B11")
def test_an_aged_request_is_safe_from_newer_urgent_ones() -> None:
    queue = make("priority", ageing_s=10.0)
    assert queue.preempts
    running, soon, late, same = (
        make_request("running", priority=1, arrival=0.0),
        make_request("soon", priority=0, arrival=9.0),
        make_request("late", priority=0, arrival=11.0),
        make_request("same", priority=1, arrival=-5.0),
    )
    for request in (running, soon, late, same):
        queue.push(request)
    assert queue.may_preempt(soon, running)
    assert not queue.may_preempt(late, running)
    assert same.rank < running.rank and not queue.may_preempt(same, running)
    assert not make("fcfs").may_preempt(soon, running)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 60)), min_size=3, max_size=3),
    st.sampled_from([0.0, 1.0, 10.0]),
)
@pytest.mark.row("B11")
def test_may_preempt_is_a_strict_partial_order(classes: list[tuple[int, float]], ageing_s: float) -> None:
    queue = make("priority", ageing_s=ageing_s)
    requests = [make_request(f"r{i}", priority=p, arrival=t) for i, (p, t) in enumerate(classes)]
    for request in requests:
        queue.push(request)
    may = queue.may_preempt
    for x in requests:
        assert not may(x, x)
        for y in requests:
            assert not (may(x, y) and may(y, x))
            for z in requests:
                assert not (may(x, y) and may(y, z)) or may(x, z)


@pytest.mark.row("B11")
def test_ageing_ends_the_starvation_of_a_low_class_on_a_saturated_machine() -> None:
    """One seat, two seconds per request, an urgent arrival per second: twice what the seat can serve. With
    ageing the low request runs once it has aged, and nobody may take its seat; without it never does."""

    def steps_until_done(ageing_s: float) -> int | None:
        queue = make("priority", ageing_s=ageing_s)
        low = make_request("low", priority=3, arrival=0.0)
        queue.push(low)
        running, left = None, {}
        for now in range(400):
            queue.push(make_request(f"u{now}", priority=0, arrival=float(now)))
            first = next(iter(queue.candidates(now)))
            if running is not None and queue.may_preempt(first, running):
                running.num_preemptions += 1
                queue.push(running)
                running = None
            if running is None:
                running = next(iter(queue.candidates(now)))
                queue.remove(running)
                left[running] = 2
            left[running] -= 1
            if left[running] == 0:
                if running is low:
                    return now
                running = None
        return None

    done = steps_until_done(10.0)
    # 30 urgent ones have the smaller rank, each takes two seconds.
    assert done is not None and 30 <= done <= 64
    assert steps_until_done(0.0) is None


def test_those_ahead_of_an_urgent_request_are_of_its_class_or_a_more_urgent_one() -> None:
    queue = make("priority")
    for i, priority in enumerate([5, 5, 0, -1]):
        queue.push(make_request(f"r{i}", priority=priority, prompt=10 * (i + 1)))
    assert queue.ahead(make_request("x", priority=0)) == (2, 70)
    assert queue.ahead(make_request("x", priority=9)) == (4, 100)
    queue.remove(next(iter(queue.candidates(0.0))))
    assert queue.ahead(make_request("x", priority=0)) == (1, 30)
    assert make("fcfs").ahead(make_request("x")) == (0, 0)


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_a_token_that_comes_while_a_request_waits_does_not_upset_the_counts(policy: str) -> None:
    """A request that gives way while its step is computed gets that step's token in the queue; what was
    counted when it came in must be taken off when it leaves."""
    queue = make(policy)
    request = make_request("r", prompt=4)
    queue.push(request)
    request.token_ids.append(1)
    queue.remove(request)
    assert (len(queue), queue.num_tokens) == (0, 0)
    queue.push(make_request("s", prompt=10))
    assert queue.ahead(make_request("x")) == (1, 10)


@pytest.mark.row("B16")
def test_shortest_first_counts_uncached_prompt_and_expected_output() -> None:
    queue = make(
        "shortest_first", ageing_s=0, cached_tokens=lambda request: 90 * request.request_id.count("c")
    )
    queue.push(make_request("long", prompt=4000, max_tokens=1))
    queue.push(make_request("open", prompt=10, max_tokens=None))
    queue.push(make_request("huge output", prompt=20, max_tokens=10**6))
    queue.push(make_request("c", prompt=100, max_tokens=5))
    queue.push(make_request("four", prompt=10, max_tokens=5, n=4))
    queue.push(make_request("short", prompt=10, max_tokens=6))
    assert ids(queue) == ["c", "short", "four", "open", "huge output", "long"]
    ranks = {request.request_id: request.rank[0] for request in queue}
    assert ranks["open"] == 10 + MAX_EXPECTED_OUTPUT and ranks["four"] == 30 and ranks["c"] == 15


@pytest.mark.row("B16")
def test_shortest_first_ages_so_that_the_long_prompt_runs_too() -> None:
    queue = make("shortest_first", ageing_s=10.0)
    queue.push(make_request("long", prompt=4000, max_tokens=0, arrival=0.0))
    queue.push(make_request("overtakes", prompt=10, max_tokens=0, arrival=39.0))
    queue.push(make_request("does not", prompt=10, max_tokens=0, arrival=40.0))
    assert ids(queue) == ["overtakes", "long", "does not"]


@pytest.mark.row("B16")
def test_longest_prefix_first_and_the_aged_before_all() -> None:
    cached = {"r0": 0, "r1": 32, "r2": 16, "r3": 32, "r4": 48}
    queue = make("longest_prefix", ageing_s=10.0, cached_tokens=lambda r: cached[r.request_id])
    for i, request_id in enumerate(cached):
        queue.push(make_request(request_id, arrival=float(i)))
    assert ids(queue, now=5.0) == ["r4", "r1", "r3", "r2", "r0"]
    assert ids(queue, now=11.0) == ["r0", "r1", "r4", "r3", "r2"]  # r0 and r1 are older than 10 s
    assert ids(queue, now=100.0) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.row("B16")
def test_the_cost_of_longest_prefix_is_bounded_and_its_lengths_are_fresh() -> None:
    calls: list[str] = []
    offset = 0

    def cached_tokens(request: Request) -> int:
        calls.append(request.request_id)
        return int(request.request_id) + offset

    queue = make("longest_prefix", ageing_s=0, cached_tokens=cached_tokens)
    for i in range(1000):
        queue.push(make_request(str(i)))
    next(queue.candidates(0.0))
    assert len(calls) == PREFIX_WALKS
    next(queue.candidates(0.0))
    assert sorted(map(int, calls)) == list(range(PREFIX_WINDOW))
    assert ids(queue)[:PREFIX_WINDOW] == [str(i) for i in reversed(range(PREFIX_WINDOW))]
    calls.clear()
    offset = 1000  # the cache changes: two calls later every length of the window is known anew
    next(queue.candidates(0.0)), next(queue.candidates(0.0))
    assert sorted(map(int, calls)) == list(range(PREFIX_WINDOW))
    for request in list(queue):
        queue.remove(request)
    assert queue._lengths == {}


@pytest.mark.row("B13")
@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_a_tenant_at_its_cap_costs_the_others_nothing(policy: str) -> None:
    running, cap, looked_at = {"capped": 0, "other": 0}, 2, []

    def may_run(request: Request) -> bool:
        looked_at.append(request)
        return request.scheduling.tenant != "capped" or running["capped"] < cap

    queue = make(policy, may_run=may_run, ageing_s=0)
    for i in range(1000):
        queue.push(make_request(f"c{i}", tenant="capped"))
    for i in range(3):
        queue.push(make_request(f"o{i}", tenant="other"))

    def admit(limit: int) -> list[Request]:
        admitted = []
        for request in queue.candidates(0.0):
            if len(admitted) == limit:
                break
            queue.remove(request)
            queue.on_admitted(request)
            running[request.scheduling.tenant] += 1
            admitted.append(request)
        return admitted

    first = admit(5)
    assert sorted(r.request_id for r in first) == ["c0", "c1", "o0", "o1", "o2"]
    assert admit(1) == []
    looked_at.clear()
    assert admit(1) == [] and len(looked_at) <= 1  # not again all that must not run

    # One ends: one takes its place, the oldest; the others stay parked.
    ended = next(request for request in first if request.scheduling.tenant == "capped")
    running["capped"] -= 1
    queue.on_left(ended)
    looked_at.clear()
    assert [r.request_id for r in admit(5)] == ["c2"] and len(looked_at) <= 3
    assert len(queue) == 997

    # Whatever is removed, each seat that opens is taken while any of the tenant wait.
    choice = random.Random(0)
    active = [request for request in first if request.scheduling.tenant == "capped"][:2]
    while len(queue):
        for request in choice.sample(list(queue), min(len(queue), 40)):
            queue.remove(request)
        running["capped"] = 0
        for request in active:
            queue.on_left(request)
        num_waiting = len(queue)
        active = admit(5)
        assert len(active) == min(cap, num_waiting)


def test_the_next_of_a_tenant_gets_its_chance_when_one_is_passed_over() -> None:
    running = 1
    queue = make("fcfs", may_run=lambda request: running < 1)
    for i in range(3):
        queue.push(make_request(f"r{i}", tenant="a"))
    assert ids(queue) == []  # all are parked
    running = 0
    queue.on_left(make_request("left", tenant="a"))
    assert ids(queue) == ["r0"]
    assert ids(queue) == ["r0", "r1"]
    assert ids(queue) == ["r0", "r1", "r2"]


class Machine:
    """A batch of rows over a fair queue: prompts take one step, then one token per row and step."""

    def __init__(self, queue: QueuePolicy, memory: int) -> None:
        self.queue, self.memory = queue, memory
        self.running: deque[tuple[Request, list[int]]] = deque()
        self.service: dict[str, float] = {}
        self.most_tokens = 0
        self.finished: list[str] = []
        self.started: dict[str, float] = {}

    def step(self, now: float) -> None:
        used = sum(r.num_prompt_tokens + (r.sampling_params.max_tokens or 0) for r, _ in self.running)
        for request in self.queue.candidates(now):
            needed = request.num_prompt_tokens + (request.sampling_params.max_tokens or 0)
            if used + needed > self.memory:
                break
            used += needed
            self.queue.remove(request)
            self.queue.on_admitted(request)
            self.started[request.request_id] = now
            self.running.append((request, [0]))
            self.serve(request, 1.0 * request.num_prompt_tokens)
        self.most_tokens = max(self.most_tokens, used)
        for entry in list(self.running):
            request, done = entry
            done[0] += 1
            self.queue.on_tokens(request, 0, 1)
            self.serve(request, 2.0)
            if done[0] == request.sampling_params.max_tokens:
                self.running.remove(entry)
                self.queue.on_left(request)
                self.finished.append(request.request_id)

    def serve(self, request: Request, service: float) -> None:
        tenant = request.scheduling.tenant
        self.service[tenant] = self.service.get(tenant, 0.0) + service


@pytest.mark.row("B12")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weights", [{}, {"a": 2.0, "b": 1.0, "c": 0.5}])
def test_served_tokens_of_backlogged_tenants_stay_within_the_bound(
    seed: int, weights: dict[str, float]
) -> None:
    shapes = {"a": (5, 60), "b": (100, 20), "c": (30, 30)}  # prompt, output: at most

    def run(policy: str) -> tuple[float, float, float]:
        """The largest difference of service / weight, the least of it at the end, and the bound."""
        choice, count, gap = random.Random(seed), 0, 0.0
        queue = make(policy, weight=lambda tenant: weights.get(tenant, 1.0))
        machine = Machine(queue, memory=600)
        for now in range(3000):
            backlog = Counter(request.scheduling.tenant for request in queue)
            for tenant, (prompt, output) in shapes.items():
                for _ in range(120 - backlog[tenant]):  # more than are ever admitted in one step
                    count += 1
                    prompt_tokens, max_tokens = choice.randint(1, prompt), choice.randint(1, output)
                    queue.push(
                        make_request(f"r{count}", tenant=tenant, prompt=prompt_tokens, max_tokens=max_tokens)
                    )
            machine.step(now)
            shares = [machine.service.get(tenant, 0.0) / weights.get(tenant, 1.0) for tenant in shapes]
            gap = max(gap, max(shares) - min(shares))
        bound = 2 * max(1.0 * 100, 2.0 * machine.most_tokens) / min(weights.values(), default=1.0)
        return gap, min(shares), bound

    gap, least, bound = run("fair")
    assert gap <= bound < least / 3, (gap, least, bound)
    gap, _, bound = run("fcfs")
    assert gap > 2 * bound


@pytest.mark.row("B12")
def test_a_light_tenant_is_served_as_if_it_were_alone() -> None:
    def waits(policy: str, heavy: bool) -> list[float]:
        machine = Machine(make(policy), 200)
        for now in range(1000):
            if heavy:
                for i in range(2):
                    machine.queue.push(
                        make_request(f"h{now}-{i}", tenant="heavy", max_tokens=10, arrival=float(now))
                    )
            if now % 10 == 0:
                machine.queue.push(make_request(f"l{now}", tenant="light", max_tokens=10, arrival=float(now)))
            machine.step(now)
        return [machine.started.get(f"l{t}", 1000.0) - t for t in range(100, 900, 10)]

    assert max(waits("fair", heavy=False)) == 0
    assert max(waits("fair", heavy=True)) <= 2  # until a seat opens
    assert max(waits("fcfs", heavy=True)) > 100


@pytest.mark.row("B12", clauses=("lift",))
def test_idling_saves_nothing_up() -> None:
    queue = make("fair")
    for i in range(10):
        queue.push(make_request(f"a{i}", tenant="a"))
    for _ in range(5):
        request = next(iter(queue.candidates(0.0)))
        queue.remove(request)
        queue.on_admitted(request)
        queue.on_tokens(request, 4, 50)
    assert isinstance(queue, FairQueue)
    assert counter(queue, "a") == 5 * (4 + 2 * 50)
    queue.push(make_request("b0", tenant="b"))
    assert counter(queue, "b") == counter(queue, "a")  # lifted, not at 0

    for request in list(queue):
        queue.remove(request)
    queue.on_tokens(request, 0, 7)  # the last to leave was a tenant of this request
    queue.push(make_request("c0", tenant="c"))
    assert counter(queue, "c") == counter(queue, request.scheduling.tenant)


@pytest.mark.row("B12", clauses=("weights",))
def test_a_prompt_is_charged_once_and_less_what_was_cached() -> None:
    queue = make("fair")
    assert isinstance(queue, FairQueue)
    request = make_request("a", tenant="a", prompt=100)
    queue.push(request)
    queue.remove(request)
    request.num_cached_tokens = 64
    queue.on_admitted(request)
    queue.on_tokens(request, 36, 1)
    assert counter(queue, "a") == 36 + 2
    request.num_preemptions += 1
    queue.on_left(request)
    queue.push(request)
    queue.remove(request)
    queue.on_admitted(request)
    queue.on_tokens(request, 101, 0)
    assert counter(queue, "a") == 36 + 2


def test_admissions_of_one_step_alternate_between_tenants() -> None:
    queue = make("fair")
    for tenant in "ab":
        for i in range(4):
            queue.push(make_request(f"{tenant}{i}", tenant=tenant))
    order = []
    for request in queue.candidates(0.0):
        queue.remove(request)
        queue.on_admitted(request)
        order.append(request.request_id)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_invented_tenants_do_not_fill_the_memory_of_the_fair_queue() -> None:
    queue = make("fair")
    assert isinstance(queue, FairQueue)
    for i in range(100_000):
        request = make_request(f"r{i}", tenant=f"invented {i}", prompt=1)
        queue.push(request)
        queue.remove(request)
        queue.on_admitted(request)
        queue.on_tokens(request, 0, 1)
    assert len(queue._idle) <= MAX_IDLE_TENANTS and not queue._waiting
    assert len(queue._by_counter) <= MAX_IDLE_TENANTS


def test_a_light_tenant_has_few_ahead_of_it() -> None:
    queue = make("fair")
    for i in range(100):
        queue.push(make_request(f"h{i}", tenant="heavy", prompt=10))
    assert queue.ahead(make_request("x", tenant="light")) == (1, 10)
    queue.push(make_request("l", tenant="light", prompt=10))
    assert queue.ahead(make_request("x", tenant="light")) == (3, 30)
    assert queue.ahead(make_request("x", tenant="heavy")) == (101, 1010)


@pytest.mark.parametrize("policy", QUEUE_POLICIES)
def test_twenty_thousand_waiting_requests_cost_a_step_little(policy: str) -> None:
    """Counts bytecodes instead of time: what a step does must not grow with the queue."""

    def bytecodes(num_waiting: int) -> int:
        queue = make(policy)
        for i in range(num_waiting):
            queue.push(make_request(f"r{i}", prompt=1, tenant=f"t{i % 50}", priority=i % 7, arrival=i * 1e-3))
        next(iter(queue.candidates(0.0)))

        def step(now: float) -> None:
            for _, request in zip(range(10), queue.candidates(now), strict=False):
                queue.remove(request)
                queue.on_admitted(request)

        count = Bytecodes()
        for now in range(20):
            count(step, now)
        assert len(queue) == num_waiting - 200
        return count.count

    assert bytecodes(20_000) < 1.2 * bytecodes(1000)
