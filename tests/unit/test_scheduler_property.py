"""More than 10^5 random operations on scheduler, KV cache manager and fake runner together.

After every operation `check_integrity()` runs. What each request gets is compared with what it gets alone, so
preemption, chunking, aborts and reuse of blocks must not be visible in any output.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.config import SchedulerConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.errors import InvalidArgumentError, UnavailableError
from quire.outputs import EngineCoreOutput, RowOutput, SchedulerOutput
from quire.request.sampling_params import SamplingParams
from tests.fixtures.fake_runner import EOS_TOKEN_IDS, VOCAB_SIZE, FakeRunner, generate_alone


@dataclass
class Expected:
    """A request as its caller sees it."""

    request: Request
    token_ids: list[int]
    finish_reason: str
    latest_step: int
    """By then it must have ended: see `World.steps_until_finished`."""
    got: list[int] = field(default_factory=list)


class World:
    """One scheduler, one runner, and everything that is known about their requests."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = False,
        **limits: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.beginnings = [[self.rng.randrange(VOCAB_SIZE) for _ in range(max_model_len)] for _ in range(3)]
        self.runner = FakeRunner(num_blocks, block_size)
        self.config = SchedulerConfig(**limits)
        self.scheduler = Scheduler(self.config, self.kv, max_model_len)
        self.alive: dict[str, Expected] = {}
        self.num_steps = 0
        self.num_requests = 0
        self.seen: Counter[str] = Counter()
        self.plan: SchedulerOutput | None = None
        """A step between schedule() and update()."""

    def steps_until_finished(self, request: Request, num_output_tokens: int) -> int:
        """Most steps it takes a request from the moment when it is the oldest, whatever it loses before.

        Each step the oldest computes a whole chunk: at most all of its tokens again, then one by one.
        """
        chunk = min(self.config.max_num_batched_tokens, self.config.max_prefill_tokens_per_request or 1 << 30)
        return -(-(request.num_prompt_tokens + num_output_tokens) // chunk) + num_output_tokens + 1

    def add(self) -> None:
        rng = self.rng
        longest = self.scheduler.max_model_len - 1
        length = rng.choice((1, rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, 40), longest))
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if self.kv.enable_prefix_caching:
            common = rng.randint(0, length)
            prompt[:common] = rng.choice(self.beginnings)[:common]
        max_tokens = rng.choice((None, 1, rng.randint(1, 60), rng.randint(1, 60)))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, 8) if max_tokens is None or max_tokens > 8 else 0,
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.3 else (),
        )
        request = Request(
            f"r{self.num_requests}",
            prompt,
            params,
            eos_token_ids=EOS_TOKEN_IDS,
            arrival_time=0.0,
            external_id=rng.choice(("", "", "shared", f"x{self.num_requests}")),
        )
        self.num_requests += 1
        waiting = [e.request for e in self.alive.values() if e.request.status in (0, 2)]
        num_waiting_tokens = sum(other.num_tokens for other in waiting)
        fits = (
            len(waiting) < self.config.max_waiting_requests
            and num_waiting_tokens + length <= self.config.max_waiting_tokens
        )
        if length > longest:
            with pytest.raises(InvalidArgumentError):
                self.scheduler.add_request(request)
            self.seen["too long"] += 1
        elif not fits:
            with pytest.raises(UnavailableError):
                self.scheduler.add_request(request)
            self.seen["queue full"] += 1
        else:
            self.scheduler.add_request(request)
            token_ids, reason = generate_alone(prompt, params, self.scheduler.max_model_len)
            work = sum(self.steps_until_finished(e.request, len(e.token_ids)) for e in self.alive.values())
            latest_step = self.num_steps + work + self.steps_until_finished(request, len(token_ids))
            self.alive[request.request_id] = Expected(request, token_ids, reason, latest_step)

    def schedule(self) -> None:
        preemptions = self.scheduler.roster.num_preemptions
        self.plan = plan = self.scheduler.schedule()
        self.num_steps += 1
        assert plan.is_empty == (not self.alive), "stalled"
        assert sum(row.num_scheduled_tokens for row in plan.scheduled) == sum(
            row.num_scheduled_tokens for row in plan.scheduled
        )
        assert sum(row.num_scheduled_tokens for row in plan.scheduled) <= self.config.max_num_batched_tokens
        assert len(plan.scheduled) <= self.config.max_num_seqs
        new = [row for row in plan.scheduled if row.new is not None]
        if self.scheduler.roster.num_preemptions > preemptions:
            assert not new, "something was admitted in a step that preempted"
        running = [
            e.request.request_id for e in self.alive.values() if e.request.status == RequestStatus.RUNNING
        ]
        assert running == [row.request_id for row in plan.scheduled], (
            "a running request is left out of a step"
        )
        chunk = self.config.max_prefill_tokens_per_request
        assert all(row.num_scheduled_tokens <= (chunk or 1 << 30) for row in plan.scheduled)
        self.seen["steps with preemption"] += self.scheduler.roster.num_preemptions > preemptions
        self.seen["mixed steps"] += len({row.samples for row in plan.scheduled}) == 2

        # Rows are in order of arrival, and nobody overtakes: neither into the batch nor in it.
        order = {request_id: index for index, request_id in enumerate(self.alive)}
        places = [order[row.request_id] for row in plan.scheduled]
        assert places == list(range(len(places))), "the rows are not the oldest requests"

    def update(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        result = self.runner.execute(plan)
        choice = self.rng.random()
        if choice < 0.004 and plan.scheduled:
            self.runner.was_told_of_failure = True
            self.end(self.scheduler.fail("broken"), "error")
            self.seen["failed steps"] += 1
            return
        failed = self.rng.choice(plan.scheduled) if choice < 0.02 and plan.scheduled else None
        if failed is not None:
            result.rows[plan.scheduled.index(failed)] = RowOutput(error="no finite logit")
        outputs = self.scheduler.update(plan, result)
        for output in outputs:
            expected = self.alive[output.request_id]
            if output.error is not None:
                assert failed is not None and output.request_id == failed.request_id
                assert output.error == "no finite logit" and output.finish_reason == "error"
                self.end([output], "error")
                self.seen["failed rows"] += 1
                continue
            expected.got += output.new_token_ids
            assert len(output.new_token_ids) == 1
            assert expected.got == expected.token_ids[: len(expected.got)], output
            is_last = len(expected.got) == len(expected.token_ids)
            assert output.finish_reason == (expected.finish_reason if is_last else None), output
            if is_last:
                self.seen[expected.finish_reason] += 1
                self.seen["finished after preemption"] += expected.request.num_preemptions > 0
                del self.alive[output.request_id]
        for expected in self.alive.values():
            assert self.num_steps < expected.latest_step, f"{expected.request} starves"
        running = [e.request for e in self.alive.values() if e.request.status is RequestStatus.RUNNING]
        for request in running:
            unused = len(self.kv.block_ids(request)[0]) * self.kv.block_size - request.num_computed_tokens
            assert 0 <= unused < self.kv.block_size, f"{request}: {unused} unused slots"
        assert self.runner.num_computed_tokens == self.scheduler.num_scheduled_tokens

    def abort(self) -> None:
        if not self.alive:
            return
        ids = self.rng.sample(list(self.alive), min(len(self.alive), self.rng.choice((1, 1, 1, 2, 5))))
        for request_id in ids:
            request = self.alive[request_id].request
            is_preempted = request.status is RequestStatus.WAITING and request.num_preemptions
            self.seen[f"aborted {'PREEMPTED' if is_preempted else request.status.name}"] += 1
        self.seen["aborted in flight"] += self.plan is not None
        references = Counter(
            block_id
            for request_id in ids
            for block_id in self.kv.block_ids(self.alive[request_id].request)[0]
        )
        held = sum(count == self.kv.pool.ref_count(block_id) for block_id, count in references.items())
        num_free = self.kv.num_free_blocks
        reason = self.rng.choice((FinishReason.CANCELLED, FinishReason.TIMEOUT))
        outputs = self.scheduler.abort([*ids, "unknown"], reason)
        assert [output.request_id for output in outputs] == ids
        assert self.kv.num_free_blocks == num_free + held
        self.end(outputs, str(reason))
        assert self.scheduler.abort(ids, reason) == []

    def end(self, outputs: list[EngineCoreOutput], reason: str) -> None:
        for output in outputs:
            assert output.finish_reason == reason and not output.new_token_ids
            expected = self.alive.pop(output.request_id)
            assert expected.request.is_finished
            assert len(expected.got) < len(expected.token_ids)

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.has_unfinished() == bool(self.alive)
        assert self.kv.pool.num_free + self.kv.pool.num_cached + self.kv.pool.num_in_use == self.kv.num_blocks

    def run(self, num_operations: int) -> None:
        """Random operations, then steps until all has ended, then the books must be closed."""
        for _ in range(num_operations):
            choice = self.rng.random()
            if choice < 0.02:
                self.abort()
            elif choice < 0.12 and len(self.alive) < 24:
                self.add()
            elif self.plan is None:
                self.schedule()
            else:
                self.update()
            self.check()
        if self.plan is not None:
            self.update()
        while self.alive:
            self.schedule()
            self.update()
            self.check()
        self.schedule()
        assert self.plan is not None
        self.runner.execute(self.plan)
        assert self.runner.rows == {}
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert sorted(self.kv.pool.free_list()) == list(range(self.kv.num_blocks))
        assert self.scheduler.roster._by_external_id == {}


def settings(**values: int) -> dict[str, int]:
    return values


TIGHT = [
    # Pools of a few short sequences, so that many steps preempt; budgets of a step, of a chunk, of one token.
    settings(num_blocks=12, block_size=4, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=32),
    settings(num_blocks=40, block_size=1, max_model_len=40, max_num_seqs=5, max_num_batched_tokens=7),
    settings(num_blocks=24, block_size=2, max_model_len=48, max_num_seqs=24, max_num_batched_tokens=5),
    settings(
        num_blocks=10,
        block_size=8,
        max_model_len=96,
        max_num_seqs=6,
        max_num_batched_tokens=20,
        max_prefill_tokens_per_request=5,
        max_waiting_requests=9,
        max_waiting_tokens=200,
    ),
]
ROOMY = [
    settings(num_blocks=9, block_size=2, max_model_len=18, max_num_seqs=4, max_num_batched_tokens=1),
    settings(num_blocks=30, block_size=1, max_model_len=30, max_num_seqs=1, max_num_batched_tokens=7),
    settings(num_blocks=100, block_size=16, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64),
]


def random_settings(seed: int) -> dict[str, int]:
    rng = random.Random(f"settings {seed}")
    values = settings(
        num_blocks=rng.randint(2, 30),
        block_size=rng.choice((1, 2, 4, 8, 16)),
        max_model_len=rng.randint(4, 120),
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=rng.choice((1, 2, rng.randint(3, 16), rng.randint(17, 200))),
        max_waiting_requests=rng.randint(1, 20),
        max_waiting_tokens=rng.randint(30, 400),
    )
    if rng.random() < 0.5:
        values["max_prefill_tokens_per_request"] = rng.randint(1, 20)
    return values


def run(seed: int, num_operations: int, values: dict[str, int]) -> Counter[str]:
    world = World(seed, **values)
    world.run(num_operations)
    return world.seen


@pytest.mark.row("C2")
@pytest.mark.parametrize("seed", range(len(TIGHT)))
def test_random_operations_where_blocks_are_scarce(seed: int) -> None:
    seen = run(seed, 30_000, TIGHT[seed])
    # The test is worth something only if it comes to the corners.
    assert seen["steps with preemption"] > 200 and seen["finished after preemption"] > 75, seen
    assert min(seen[f"aborted {phase}"] for phase in ("WAITING", "RUNNING", "PREEMPTED", "in flight")) > 10, (
        seen
    )
    assert seen["mixed steps"] > 30 and seen["failed steps"] > 3 and seen["failed rows"] > 10, seen
    assert seen["stop"] > 50 and seen["length"] > 50, seen


@pytest.mark.row("C22", "H12")
@pytest.mark.parametrize("values", [*TIGHT, *ROOMY])
def test_random_operations_on_prompts_that_begin_alike(values: dict[str, int]) -> None:
    world = World(7, enable_prefix_caching=True, **values)
    world.run(8_000)
    assert world.kv.num_cached_tokens > 100


@pytest.mark.parametrize("seed", range(len(ROOMY)))
def test_random_operations_where_sequences_or_tokens_are_scarce(seed: int) -> None:
    seen = run(100 + seed, 12_000, ROOMY[seed])
    assert seen["steps with preemption"] == 0, seen
    assert min(seen[f"aborted {phase}"] for phase in ("WAITING", "RUNNING", "in flight")) > 10, seen
    assert seen["stop"] > 10 and seen["length"] > 10, seen


def test_random_operations_under_random_limits() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += run(1000 + seed, 1_000, random_settings(seed))
    assert min(seen["queue full"], seen["too long"], seen["steps with preemption"]) > 50, seen
