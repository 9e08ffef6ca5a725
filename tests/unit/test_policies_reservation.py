"""Reservation on a simulated pool: who is admitted, who is preempted, and what that does to the batch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import SchedulerConfig, choices
from quire.core.policies.reservation import MIN_HISTORY, WINDOW, Predicted, Reservation, make_reservation
from quire.core.request import FinishReason, Request
from quire.request.sampling_params import SamplingParams
from tests.fixtures.properties import settings

KV_RESERVATIONS = choices("kv_reservation")

BLOCK_SIZE = 16


def make_request(
    request_id: str, prompt: int, max_tokens: int | None, output: int = 0, n: int = 1
) -> Request:
    request = Request(request_id, [1] * prompt, SamplingParams(max_tokens=max_tokens, n=n), arrival_time=0.0)
    for _ in range(output):
        request.token_ids.append(1)
    return request


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


class Pool:
    """Block counts only; a request takes blocks as its tokens are computed."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def lacking(self, request: Request, num_tokens: int) -> int:
        return max(0, blocks(num_tokens) - self.num_held(request))

    def num_held(self, request: Request) -> int:
        return self.held.get(request.request_id, 0)

    def begin(self, reservation: Reservation, running: list[Request]) -> None:
        reservation.begin(running, self.num_free, self.lacking, self.num_held)


def make(kind: str, max_model_len: int = 1024, num_groups: int = 1) -> Reservation:
    return make_reservation(SchedulerConfig(kv_reservation=kind), max_model_len, num_groups)


@dataclass
class Outcome:
    num_preemptions: int
    mean_batch: float
    num_steps: int


def simulate(
    kind: str, num_blocks: int, shapes: list[tuple[int, int, int | None]], seats: int = 64
) -> Outcome:
    """FCFS over requests of (prompt, true output, max_tokens), all waiting at the start; a prompt takes one
    step. The youngest is preempted when the pool is empty and returns to the head of the queue."""
    pool = Pool(num_blocks)
    reservation = make(kind, num_blocks * BLOCK_SIZE + 1)
    waiting = [make_request(f"r{i}", prompt, limit) for i, (prompt, _, limit) in enumerate(shapes)]
    truth = {f"r{i}": output for i, (_, output, _) in enumerate(shapes)}
    running: list[Request] = []
    num_preemptions = num_steps = num_rows = 0
    while waiting or running:
        preempted = False
        for request in list(running):
            if request not in running:
                continue
            while pool.lacking(request, request.num_tokens) > pool.num_free:
                victim = running.pop()
                del pool.held[victim.request_id]
                waiting.insert(0, victim)
                num_preemptions += 1
                preempted = True
                if victim is request:
                    break
            if request in running:
                pool.held[request.request_id] = blocks(request.num_tokens)
        if not preempted:
            pool.begin(reservation, running)
            while waiting and len(running) < seats and reservation.try_admit(waiting[0]):
                request = waiting.pop(0)
                assert pool.lacking(request, request.num_tokens) <= pool.num_free
                pool.held[request.request_id] = blocks(request.num_tokens)
                running.append(request)
        assert running, "nothing runs and nothing is admitted"
        assert pool.num_free >= 0
        num_rows += len(running)
        num_steps += 1
        for request in list(running):
            request.token_ids.append(1)
            if request.num_output_tokens == truth[request.request_id]:
                request.finish_reason = FinishReason.STOP
                reservation.on_finished(request)
                running.remove(request)
                del pool.held[request.request_id]
    return Outcome(num_preemptions, num_rows / num_steps, num_steps)


@pytest.mark.row("B8")
@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 120), st.one_of(st.none(), st.integers(120, 200))),
        min_size=1,
        max_size=25,
    ),
    st.integers(25, 80),
    st.sampled_from(KV_RESERVATIONS),
)
def test_every_reservation_ends_all_and_no_evict_never_preempts(
    shapes: list[tuple[int, int, int | None]], num_blocks: int, kind: str
) -> None:
    outcome = simulate(kind, num_blocks, shapes)
    assert kind != "no_evict" or outcome.num_preemptions == 0


@pytest.mark.row("B8")
@pytest.mark.parametrize("seed", range(2))
def test_predicted_lies_between_no_evict_and_on_demand(seed: int) -> None:
    """Outputs around 60 tokens that could be 600, in a pool of 400 blocks: a batch of 10 if room for all
    of it is kept, and one that preempts all the time if none is."""
    choice = random.Random(seed)
    shapes = [
        (choice.randint(16, 64), min(600, 1 + int(choice.expovariate(1 / 60))), 600) for _ in range(700)
    ]
    outcomes = {kind: simulate(kind, 400, shapes, seats=256) for kind in KV_RESERVATIONS}
    no_evict, predicted, on_demand = (outcomes[kind] for kind in ("no_evict", "predicted", "on_demand"))
    assert no_evict.num_preemptions == 0
    assert predicted.num_preemptions < on_demand.num_preemptions / 3, outcomes
    assert no_evict.mean_batch * 3 < predicted.mean_batch <= on_demand.mean_batch * 1.02, outcomes
    assert predicted.num_steps < no_evict.num_steps / 2


def test_on_demand_counts_what_running_requests_lack_for_one_more_token() -> None:
    pool, reservation = Pool(10), make("on_demand")
    long = make_request("long", 100, 10)  # 7 blocks, of which the first chunk has taken 2
    pool.held["long"] = 2
    pool.begin(reservation, [long])
    assert not reservation.try_admit(make_request("a", 48, 10))  # 3 free, but 4 for its next token
    assert reservation.try_admit(make_request("a", 48, 10), num_saved_blocks=1)
    assert not reservation.try_admit(make_request("b", 1, 10))
    assert not reservation.try_admit(make_request("c", 33, 10), num_saved_blocks=2)
    assert reservation.try_admit(make_request("d", 20, 10), num_saved_blocks=2)


def test_no_evict_counts_the_longest_output_within_the_model_length() -> None:
    pool, reservation = Pool(20), make("no_evict", max_model_len=161)  # 160 slots: 10 blocks
    pool.begin(reservation, [])
    assert reservation.try_admit(make_request("a", 16, None))
    assert reservation.try_admit(make_request("b", 100, 10**6))
    assert not reservation.try_admit(make_request("d", 1, 1))
    pool.begin(reservation, [])
    assert reservation.try_admit(make_request("e", 16, 1))  # its one output token is never cached: 1 block
    assert reservation.try_admit(make_request("f", 16 * 9, 17))
    assert not reservation.try_admit(make_request("g", 16 * 8, 17 + 16))
    assert reservation.try_admit(make_request("g", 16 * 8, 17))


@pytest.mark.parametrize("kind", KV_RESERVATIONS)
def test_the_first_is_admitted_alone_if_it_can_begin(kind: str) -> None:
    pool, reservation = Pool(10), make(kind, max_model_len=161)
    pool.begin(reservation, [])
    assert reservation.try_admit(make_request("a", 159, None, n=8))  # with its choices more than the pool
    assert not reservation.try_admit(make_request("b", 1, 1))
    pool.begin(reservation, [])
    assert reservation.try_admit(make_request("a", 30, None))
    pool.held["pinned"] = 9
    pool.begin(reservation, [])
    assert not reservation.try_admit(make_request("a", 30, None))


def test_choices_count_before_they_fork() -> None:
    for num_groups, needed in ((1, 3 + 3 * 2), (2, 3 + 3 * 3)):
        for num_blocks, fits in ((needed - 1, False), (needed, True)):
            pool, reservation = Pool(num_blocks + 1), make("no_evict", num_groups=num_groups)
            pool.held["other"] = 1
            pool.begin(reservation, [make_request("other", 15, 1)])
            # 20 + 20 - 1 slots: 3 blocks, the prompt has 2 of them; each other choice a copy and a block.
            assert reservation.try_admit(make_request("a", 20, 20, n=4)) is fits


def expected_remaining(reservation: Predicted, request: Request, max_model_len: int) -> int:
    """Tokens the request is expected to generate still."""
    done = request.num_output_tokens
    return reservation._remaining(done, request.max_output_tokens(max_model_len) - done)


def finish(reservation: Reservation, lengths: list[int], reason: FinishReason = FinishReason.STOP) -> None:
    for i, length in enumerate(lengths):
        request = make_request(f"done{i}", 1, None, length)
        request.finish_reason = reason
        reservation.on_finished(request)


@pytest.mark.row("B8")
def test_the_expected_length_is_the_mean_of_those_longer_than_what_is_there() -> None:
    reservation = make("predicted", max_model_len=2000)
    assert isinstance(reservation, Predicted)

    def remaining(num_prompt: int, limit: int, output: int = 0) -> int:
        return expected_remaining(reservation, make_request("a", num_prompt, limit, output=output), 2000)

    finish(reservation, [10] * (MIN_HISTORY - 1))
    finish(reservation, [1] * 100, FinishReason.CANCELLED)  # tell nothing
    assert remaining(10, 500) == 500  # too little history: its limit
    finish(reservation, [10])
    assert remaining(10, 500) == 10
    finish(reservation, [100] * MIN_HISTORY)
    assert remaining(10, 500) == 55
    assert remaining(10, 500, output=10) == 90
    assert remaining(10, 500, output=99) == 1
    assert remaining(10, 500, output=100) == 100  # longer than any
    assert remaining(10, 120, output=100) == 20
    assert remaining(10, 30) == 30
    finish(reservation, [7] * WINDOW)  # the old ones are forgotten
    assert remaining(10, 500) == 7
    assert len(reservation._lengths) == WINDOW


def test_the_predicted_peak_counts_blocks_that_ended_requests_give_back() -> None:
    """Two requests, of 160 output tokens in the end, hold the pool but for 4 blocks. One more of them
    fits if they end before it grows, and not if they have as long to go."""
    for done, fits in ((155, True), (80, False)):
        reservation = make("predicted", max_model_len=1000)
        finish(reservation, [160] * MIN_HISTORY)
        pool = Pool(2 * blocks(32 + done) + 4)
        running = [make_request(f"r{i}", 32, 400, output=done) for i in range(2)]
        for request in running:
            pool.held[request.request_id] = blocks(request.num_tokens)
        pool.begin(reservation, running)
        assert reservation.try_admit(make_request("new", 20, 400)) is fits


@settings(max_examples=50)
@given(st.data())
def test_the_table_of_predicted_is_what_a_simulation_of_its_model_gives(data: st.DataObject) -> None:
    """Blocks free at each time of the grid, computed request by request."""
    reservation = make("predicted", max_model_len=600)
    assert isinstance(reservation, Predicted)
    finish(reservation, data.draw(st.lists(st.integers(1, 300), min_size=MIN_HISTORY, max_size=60)))
    pool = Pool(10**4)
    running = []
    for i in range(data.draw(st.integers(0, 12))):
        request = make_request(f"r{i}", data.draw(st.integers(1, 100)), 400, data.draw(st.integers(0, 90)))
        pool.held[request.request_id] = blocks(request.num_tokens)
        running.append(request)
    pool.begin(reservation, running)
    num_free = pool.num_free
    for index, time in enumerate(reservation._times):
        free = num_free * 0.97
        for request in running:
            remaining = expected_remaining(reservation, request, 600)
            end = next(t for t in reservation._times if t >= remaining)
            if end < time:
                free += pool.num_held(request)
            else:
                now = pool.lacking(request, request.num_tokens + 1)
                last = min(request.num_tokens + end, request.num_prompt_tokens + 399, 599)
                most = max(now, pool.lacking(request, last))
                free -= now + (most - now) * (time - 1) / max(1, end - 1)
        assert reservation._free[index] == pytest.approx(free)
