"""Scheduler: which tokens of which requests the next step computes."""

from __future__ import annotations

import bisect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

from quire.config import SchedulerConfig
from quire.core.choices import BeamSearch, Choices, make_choices
from quire.core.kv_cache_manager import CachedPrefix, KVCacheManager
from quire.core.policies.admission import AdmissionControl, DeadlineHeap
from quire.core.policies.preemption import PreemptionCost
from quire.core.policies.queue import make_queue
from quire.core.policies.reservation import make_reservation
from quire.core.policies.tenants import Tenants
from quire.core.trace import SchedulerTrace
from quire.core.transfers import BlockTransfers, Tiers
from quire.errors import EngineError, InvalidArgumentError, describe
from quire.outputs import (
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)
from quire.request import FinishReason, Request, RequestStatus
from quire.scheduling_params import MAX_PIN_TTL_S
from quire.validation import check_choices

logger = logging.getLogger("quire")

MAX_PASSED_OVER = 256
"""Waiting requests that one step looks at in vain, because each has to wait for something of its own."""


class _Plan:
    """A step being planned: rows in the order of their requests' ranks, and what is left of its budget."""

    __slots__ = (
        "begun",
        "budget",
        "copies",
        "dropped",
        "has_decodes",
        "is_open",
        "late_offers",
        "num_prefill_tokens",
        "offers",
        "requests",
        "row_of",
        "rows",
        "seconds",
        "stale",
        "step",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[ScheduledRequest] = []
        self.requests: list[Request] = []
        self.offers: list[Sequence[tuple[bytes, int]]] = []
        """Per row, the blocks it fills that others may find from now on."""
        self.late_offers: list[tuple[bytes, int]] = []
        """Those of requests that ended while it was executed."""
        self.num_prefill_tokens = 0
        self.seconds = 0.0
        self.has_decodes = True
        """False when the batch policy keeps it for prompts."""
        self.is_open = True
        """False when requests were preempted for it: what they gave back is for those they gave way to, so
        nobody joins."""
        self.row_of: dict[str, ScheduledRequest] = {}
        """By request, of a plan made ahead."""
        self.stale: set[int] = set()
        """Blocks that its rows would have filled, of requests that have ended since."""
        self.step = 0
        self.begun = 0.0
        self.dropped: list[str] = []
        self.copies: list[tuple[int, int]] = []
        """What else the runner was told with it."""


class Scheduler:
    """Continuous batching by one rule: `num_computed_tokens` of each request catches up with its
    `num_tokens` under the token budget of a step. Prefill, chunks of it, decode, cached prefixes and the
    recomputation after a preemption are all that rule. Policies (`core.policies`) say in which order requests
    join, how much room they must find, and which steps take prompts.

    Every request has a rank, fixed when it arrives. Running requests get their rows in the order of ranks,
    and only one of a higher rank is preempted for them; it waits at the place its rank gives it. From this
    follows
    - no livelock: the first in rank takes blocks from all others and none takes them from it, and alone it
      always fits, because `max_model_len` is cut to what the pool holds;
    - no starvation under a policy by which each request becomes the first in rank: all, given ageing;
    - with mixed batches a decoding request is in every step: prompts leave room for those that decode behind
      them, and a request joins only a step whose budget has satisfied all others. Not so where urgent
      requests preempt: there the prompt of a more urgent one goes before other requests' decoding.

    The protocol is schedule(), execution by a runner, update(), and again; add_request() and abort() may come
    at any point between. If the execution fails, fail() takes the place of update(). plan_ahead() during an
    execution does most of the work of the schedule() that follows it. Where a device computes steps in the
    order in which they were handed over, schedule() may also come before update() of the step before: the
    tokens that this one samples are pending then, the runner finds them on its device, and a row of a request
    that turns out to have ended is computed in vain. One thread owns the scheduler; nothing here locks.

    Args:
        clock: seconds, monotonic; the simulator brings its own.
        tiers: KV tiers beside the pool.
        block_bytes: of a block, to weigh moving it against computing it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        trace: SchedulerTrace | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tiers: Tiers | None = None,
        block_bytes: int = 0,
        session_ttl_s: float = 300.0,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = min(max_model_len, kv.capacity + 1)
        """Most tokens of prompt and output together. The newest token of a sequence is not in the cache yet,
        so one more than the pool holds is possible; there a request ends with LENGTH."""
        self.trace = trace
        self.clock = clock
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.num_recomputed_tokens = 0
        self.tenants = Tenants(config.tenants)
        self.queue = make_queue(
            config,
            cached_tokens=lambda request: kv.find_prefix(request).num_tokens,
            may_run=self.tenants.may_run,
            weight=self.tenants.weight,
        )
        self.reservation = make_reservation(config, self.max_model_len, len(kv.groups))
        self.admission = AdmissionControl(config)
        self.preemption_cost = PreemptionCost(
            config.preemption_mode,
            block_bytes,
            lambda: (None, None) if tiers is None else (tiers.save_bytes_per_s, tiers.load_bytes_per_s),
        )
        self.transfers = BlockTransfers(kv, tiers, self.preemption_cost.should_swap)
        self._has_accounts = bool(config.tenants) or config.queue_policy == "fair"
        self._session_ttl_s = session_ttl_s
        self._deadlines = DeadlineHeap()
        self._max_row_tokens = config.max_prefill_tokens_per_request or config.max_num_batched_tokens
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, Choices] = {}
        self._running: list[Request] = []  # in the order of ranks
        self._num_seats = config.max_num_seqs
        self._num_waiting_tokens = 0
        self._by_external_id: dict[tuple[str, str], dict[str, None]] = {}
        """Ids of requests by tenant and the client's id: two tenants may give the same."""
        self._dropped: list[str] = []
        self._copies: list[tuple[int, int]] = []
        self._branched: list[Request] = []
        """Requests whose next token became known in the latest update(), and no plan made ahead has."""
        self._step = 0
        self._last_join_step = 0
        self._ahead: _Plan | None = None
        self._in_flight: deque[_Plan] = deque()  # steps that are being executed, the oldest first
        self._updated = 0.0

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that is accepted: it leaves room for one token of output."""
        return self.max_model_len - 1

    def add_request(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            InvalidArgumentError: its prompt or its choices can never be computed here, or its id is in use or
                may be taken for that of a choice.
            UnavailableError: the queue is full, a quota used up, or it would wait too long; names the limit.
        """
        assert request.status is RequestStatus.WAITING, request
        request_id = request.request_id
        if "#" in request_id or request_id in self._requests or request_id in self._choices:
            raise InvalidArgumentError("request_id", f"{request_id!r:.80} is in use, or holds a '#'")
        if request.num_prompt_tokens > self.max_prompt_tokens:
            raise InvalidArgumentError(
                "prompt",
                f"{request.num_prompt_tokens} tokens, at most {self.max_prompt_tokens} are allowed "
                f"(max_model_len {self.max_model_len}, KV cache of {self.kv.capacity} tokens)",
            )
        check_choices(request.sampling_params, self.config.max_num_seqs)
        self._check_beams(request)
        now = self.clock()
        self.admission.set_default_deadlines(request)
        has_room = self.kv.num_free_blocks >= self.kv.num_blocks_for(request.num_tokens)
        self.admission.check(
            request,
            now,
            num_waiting=len(self.queue),
            num_waiting_tokens=self._num_waiting_tokens,
            num_free_seats=self._num_seats if has_room else 0,
            num_running_tokens=self._num_prompt_tokens_left() if self.admission.predicts(request) else 0,
            ahead=self.queue.ahead(request),
        )
        self.tenants.check_arrival(request, now)
        self._requests[request.request_id] = request
        request.choices = make_choices(request)
        if request.choices is not None:
            self._choices[request.request_id] = request.choices
        if request.external_id:
            key = request.scheduling.tenant, request.external_id
            self._by_external_id.setdefault(key, {})[request.request_id] = None
        self._deadlines.push(request)
        self._enqueue(request)
        self.tenants.on_arrival(request, now)
        self.transfers.prefetch(request)
        if self.trace is not None:
            self.trace.on_arrival(request)

    def _check_beams(self, request: Request) -> None:
        """Refuses a beam search whose beams would compute each other's past again and again."""
        width = request.sampling_params.beam_width
        if width == 1:
            return
        num_output = request.max_output_tokens(self.max_model_len)
        num_tokens = request.num_prompt_tokens + num_output - 1  # the last one is never in the cache
        shared = self.kv.num_blocks_for(request.num_prompt_tokens // self.kv.block_size * self.kv.block_size)
        needed = shared + width * (self.kv.num_blocks_for(num_tokens) - shared)
        if needed > self.kv.num_blocks:
            raise InvalidArgumentError(
                "beam_width",
                f"{width} beams of up to {num_output} tokens behind a prompt of {request.num_prompt_tokens} "
                f"need {needed} KV blocks, there are {self.kv.num_blocks}: ask for fewer beams or max_tokens",
            )

    def expire(self) -> list[EngineCoreOutput]:
        """Ends requests whose deadline has passed; to be called before a step is planned."""
        outputs = []
        for request, _ in self._deadlines.expired(self.clock()):
            if not request.is_finished:  # with another of its choices
                outputs += self._end_all(request, FinishReason.TIMEOUT)
        return outputs

    def plan_ahead(self) -> None:
        """Plans the next step while one is being executed; new requests still join it in schedule()."""
        if self._ahead is None:
            self._ahead = plan = self._plan()
            plan.row_of = {row.request_id: row for row in plan.rows}

    def schedule(self) -> SchedulerOutput:
        """Plans the next step: running requests in the order of ranks, then the queue in its policy's order.

        Without KV tiers there are rows in the plan whenever there is an unfinished request.
        """
        if self._in_flight and not self._in_flight[-1].rows:
            self._in_flight.pop()  # nobody executes a plan without rows while another one is made
        overlapped = self._ahead is not None or bool(self._in_flight)
        plan, self._ahead = self._ahead, None
        plan = self._plan() if plan is None else self._revise(plan)
        self._step += 1
        num_tokens = self.config.max_num_batched_tokens - plan.budget
        self.num_scheduled_tokens += num_tokens
        saves, loads = self.transfers.take()
        output = SchedulerOutput(
            self._step,
            plan.rows,
            self._dropped,
            num_tokens,
            kv_saves=saves,
            block_copies=self._copies,
            kv_loads=loads,
        )
        self._dropped, self._copies, self._branched = [], [], []
        plan.step, plan.begun = self._step, self.clock()
        plan.dropped, plan.copies = output.dropped_request_ids, output.block_copies
        self._in_flight.append(plan)
        if self.trace is not None:
            self.trace.begin_step(output, plan_s=plan.seconds, overlapped=overlapped)
        return output

    def update(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Takes in what the runner computed in the oldest step that it has not been told of.

        Returns:
            One entry per sampled token, and per row that failed alone. Requests that end here hold no blocks
            any more; what was computed for requests aborted since schedule() is ignored. An exception while a
            row is taken in ends its request alone, with all its choices.
        """
        plan = self._in_flight.popleft()
        assert scheduler_output.step == plan.step, (scheduler_output.step, plan.step)
        now = self.clock()
        outputs: list[EngineCoreOutput] = []
        sampled, logprobs, errors = (
            runner_output.sampled_token_ids,
            runner_output.logprobs,
            runner_output.errors,
        )
        for row, request, offers in zip(plan.rows, plan.requests, plan.offers, strict=True):
            if row.samples:
                request.num_pending_tokens -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            request_id = row.request_id
            try:
                if request_id in errors:
                    self._take_back(request, row)
                    outputs += self._end_all(request, FinishReason.ERROR, errors[request_id])
                    continue
                if offers:
                    self.transfers.save(offers)
                if self._has_accounts:
                    self._account(request, row, now)
                if not row.samples:
                    continue
                if request.choices is not None:
                    outputs += self._take_sample(request, row, runner_output)
                    continue
                output = self._append(request, sampled[request_id], logprobs.get(request_id))
                outputs.append(self._finish_if_done(request, output))
            except Exception as error:
                outputs.append(self._give_up(request, row, error))
        self.finish_loads(runner_output.loads_done)
        # A step that was handed over early has waited for the one before.
        seconds = now - max(plan.begun, self._updated)
        self._updated = now
        self.admission.on_step(now, seconds, plan.num_prefill_tokens, len(plan.rows))
        self.preemption_cost.on_prefill(plan.num_prefill_tokens, seconds)
        self._end_step()
        return outputs

    def finish_loads(self, loads_done: Iterable[tuple[int, int]]) -> None:
        """Takes in which loads have ended: (load id, leading blocks that are valid)."""
        for load_id, num_valid in loads_done:
            request, complete = self.transfers.finish_load(load_id, num_valid)
            if request.is_finished:
                self.kv.free(request, self.clock())
            elif not complete:
                self.kv.num_cached_tokens -= request.num_cached_tokens
                request.num_cached_tokens = 0
                self._leave(request)
                self._wait(request)

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> list[EngineCoreOutput]:
        """Ends requests wherever they are and frees their blocks at once.

        Args:
            request_ids: as given to add_request; "id#i" ends choice i alone.

        Returns:
            The last output of each of their choices; ids that are unknown or have finished already are
            skipped, since an abort and the end of a request may cross.
        """
        return self._end(request_ids, reason)

    def fail(
        self, request_ids: Iterable[str], error: str, error_code: str = EngineError.code
    ) -> list[EngineCoreOutput]:
        """Takes the place of update() when a step failed: ends its requests, as abort() does, with `error`.

        All steps in flight have failed then, as a later one rests on what an earlier one computes.

        Args:
            request_ids: at least those of the rows of the step; how far these were computed is unknown, and
                what else the runner has done of the step: its blocks are not copied, its drops are told
                again, and loads that it has not begun are missed.
        """
        plans = list(self._in_flight)
        self._in_flight.clear()
        outputs: list[EngineCoreOutput] = []
        # Before any is ended: choices end together. What was offered stays so when its request ends or gives
        # way while the step is under way, and nobody has computed it.
        known = plans if self._ahead is None else [*plans, self._ahead]
        stale = self.kv.withdraw(
            offer for plan in known for offers in (plan.late_offers, *plan.offers) for offer in offers
        )
        self.transfers.forget_saves(stale)
        for plan in plans:
            for row, request in zip(plan.rows, plan.requests, strict=True):
                if not request.is_finished:
                    stale |= self._take_back(request, row)
        for plan in plans:
            for request in plan.requests:
                if not request.is_finished:
                    outputs += self._end_all(request, FinishReason.ERROR, error, error_code)
        if len(plans) > 1:
            # Requests that ended with the step before left blocks which a failed row was to fill.
            self.kv.reset()
        for _ in plans[1:]:
            self._end_step()
        outputs += self._end(request_ids, FinishReason.ERROR, error, error_code)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Its rows may rest on what the failed step should have computed.
            stale |= ahead.stale
            for row, request in zip(ahead.rows, ahead.requests, strict=True):
                stale |= self._withdraw(request, row)
        self._dropped += [name for plan in plans for name in plan.dropped if name not in self._dropped]
        self._restart(stale | {target for plan in plans for _, target in plan.copies})
        self.finish_loads((load_id, 0) for load_id in self.transfers.lost_loads)
        self._end_step()
        return outputs

    def _restart(self, block_ids: set[int]) -> None:
        """Lets requests begin anew whose blocks, these among them, do not hold what they should.

        They have no row: one that loads others, joined without a token left for it, or was to be a copy.
        """
        for request in list(self._running) if block_ids else ():
            if request.in_runner or all(block_ids.isdisjoint(ids) for ids in self.kv.block_ids(request)):
                continue
            if request.load_id is not None:
                self.transfers.distrust(request.load_id)
                continue
            self._leave(request)
            request.num_preemptions += 1
            self._wait(request)

    def _give_up(self, request: Request, row: ScheduledRequest, error: Exception) -> EngineCoreOutput:
        """Ends a request, or what is left of it, as its row could not be taken in."""
        logger.exception("%s: a step could not be taken in", request)
        self._take_back(request, row)
        choices = request.choices
        if choices is not None:
            for one in list(choices.live.values()):
                self._finish(one, FinishReason.ERROR)
        elif not request.is_finished:
            self._finish(request, FinishReason.ERROR)
        return EngineCoreOutput(
            request.request_id if choices is None else choices.request_id,
            finish_reason=str(FinishReason.ERROR),
            error=f"the engine failed while computing the request: {describe(error)}",
            error_code=EngineError.code,
        )

    def fail_all(self, error: str, error_code: str = EngineError.code) -> list[EngineCoreOutput]:
        """Ends every request, running or not: the engine cannot go on."""
        return self.fail([*self._requests, *self._choices], error, error_code)

    def find(self, external_id: str, tenant: str = "") -> list[str]:
        """Ids of the unfinished requests that a client of the tenant gave this id, oldest first."""
        return list(self._by_external_id.get((tenant, external_id), ()))

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a step must be planned: for requests, or for blocks that are still to be moved."""
        return bool(self._requests or self.transfers.has_work or self.transfers.num_loading)

    def reset_cache(self) -> int:
        """Empties prefix cache, pins and tiers; running requests are not disturbed.

        Returns:
            Blocks that could be found.
        """
        count = self.kv.reset()
        if self.transfers.tiers is not None:
            count += self.transfers.tiers.clear()
        return count

    def inspect(self) -> dict[str, Any]:
        """What the cache holds, for people."""
        pool, tiers = self.kv.pool, self.transfers.tiers
        now = self.clock()
        self.kv.expire(now)
        return {
            "block_size": self.kv.block_size,
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "num_cached_blocks": pool.num_cached,
            "num_blocks_in_use": pool.num_in_use,
            "num_pinned_blocks": self.kv.num_pinned_blocks,
            "num_findable_blocks": len(pool.cached_hashes()),
            "num_cached_tokens": self.kv.num_cached_tokens,
            "num_loaded_tokens": self.transfers.num_loaded_tokens,
            "pins": {str(name): round(deadline - now, 3) for name, deadline in self.kv.pins.items()},
            "tiers": {} if tiers is None else tiers.stats(),
        }

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self.queue),
            num_waiting_tokens=self._num_waiting_tokens,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free_blocks,
            num_preemptions=self.num_preemptions,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_cached_tokens=self.kv.num_cached_tokens,
            num_cached_blocks=self.kv.pool.num_cached,
            num_pinned_blocks=self.kv.num_pinned_blocks,
            num_swaps=self.transfers.num_swaps,
            num_loaded_tokens=self.transfers.num_loaded_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls; O(requests + blocks), for tests."""
        ended = [request for request in self.transfers.loading if request.is_finished]
        self.kv.check_integrity([*self._running, *ended])
        running = {request.request_id: request for request in self._running}
        waiting = {request.request_id: request for request in self.queue}
        assert self._requests == {**running, **waiting} and len(running) == len(self._running)
        assert all(request.status is RequestStatus.RUNNING for request in self._running)
        ranks = [request.rank for request in self._running]
        assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks), ranks
        for request in waiting.values():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
            assert request.num_computed_tokens == request.steady_until == 0, request
        for request in self._running:
            is_steady = request.num_computed_tokens < request.steady_until
            assert not is_steady or (request.in_runner and not request.num_given_tokens), request
        assert self._num_waiting_tokens == sum(request.num_tokens for request in waiting.values())
        seats = sum(request.num_sequences for request in self._running)
        assert self._num_seats == self.config.max_num_seqs - seats >= 0, (self._num_seats, seats)
        for request_id, choices in self._choices.items():
            assert choices.live and choices.request_id == request_id
            assert all(self._requests[r.request_id] is r for r in choices.live.values())
        known = {*self._requests, *self._choices}
        assert {id for ids in self._by_external_id.values() for id in ids} <= known

    # Planning.

    def _plan(self) -> _Plan:
        begin = time.perf_counter()
        plan = _Plan(self.config.max_num_batched_tokens)
        self.kv.expire(self.clock())
        num_preemptions = self.num_preemptions
        if self.queue.preempts and len(self.queue):
            self._join_urgent()
        decodes, prefills, joins = self._phases()
        self._plan_running(plan, decodes=decodes, prefills=prefills)
        plan.has_decodes = decodes
        plan.is_open = joins and self.num_preemptions == num_preemptions
        if plan.is_open and len(self.queue):
            self._plan_waiting(plan)
        if not plan.rows and not (decodes and prefills):
            self._plan_running(plan)
        if not plan.rows and not self._in_flight and not self.transfers.num_loading:
            self._plan_stalled(plan)
        plan.seconds = time.perf_counter() - begin
        return plan

    def _revise(self, plan: _Plan) -> _Plan:
        """Brings a plan that was made ahead up to date: who has ended leaves it, who has arrived may join."""
        begin = time.perf_counter()
        kept = []
        for entry in zip(plan.rows, plan.requests, plan.offers, strict=True):
            row, request, _ = entry
            # Requests that share blocks with a row that is not computed now stand behind it.
            if request.status is not RequestStatus.FINISHED and (
                row.new is None or plan.stale.isdisjoint(b for ids in row.new_block_ids for b in ids)
            ):
                kept.append(entry)
                continue
            plan.budget += row.num_scheduled_tokens
            plan.stale |= self._withdraw(request, row)
        if len(kept) < len(plan.rows):
            self._restart(plan.stale)
            plan.rows = [row for row, _, _ in kept]
            plan.requests = [request for _, request, _ in kept]
            plan.offers = [offers for _, _, offers in kept]
        for request in self._branched if plan.rows and plan.has_decodes else ():
            if request.status is RequestStatus.RUNNING and plan.budget:
                block_ids = self.kv.allocate_slots(request, 1)
                if block_ids is not None:
                    self._add_row(plan, request, 1, block_ids)
        if plan.is_open and plan.budget and len(self.queue) and self._may_join():
            self._plan_waiting(plan)
        if not plan.rows:
            return self._plan()
        plan.seconds += time.perf_counter() - begin
        return plan

    def _phases(self) -> tuple[bool, bool, bool]:
        """What the step may hold: decodes, prompts of running requests, waiting requests that join."""
        policy = self.config.batch_policy
        joins = self._may_join()
        if policy == "mixed":
            return True, True, joins
        if policy == "prefill_first":
            if (joins and len(self.queue)) or any(
                self._num_missing(request) > 1 for request in self._running
            ):
                return False, True, joins
            return True, True, False
        if any(self._num_missing(request) == 1 for request in self._running) and not self._is_due():
            return True, False, False
        return True, True, joins

    def _may_join(self) -> bool:
        config = self.config
        if not self._running:
            return True
        if config.scheduler == "static":
            return False
        has_rule = config.schedule_interval > 1 or config.waiting_running_ratio > 0
        return not has_rule or self._is_due()

    def _is_due(self) -> bool:
        """Whether an interval or the length of the queue says that prompts are to be computed now."""
        interval, ratio = self.config.schedule_interval, self.config.waiting_running_ratio
        if interval > 1 and self._step - self._last_join_step >= interval:
            return True
        return ratio > 0 and len(self.queue) > ratio * len(self._running)

    @staticmethod
    def _num_missing(request: Request) -> int:
        """Tokens still to compute: one for a request that decodes."""
        return len(request.token_ids) + request.num_pending_tokens - request.num_computed_tokens

    def _plan_running(self, plan: _Plan, *, decodes: bool = True, prefills: bool = True) -> None:
        running, no_blocks, is_running = list(self._running), self.kv.no_blocks, RequestStatus.RUNNING
        add_row, add_request, add_offers = plan.rows.append, plan.requests.append, plan.offers.append
        for index, request in enumerate(running):
            if plan.budget == 0 or request.status is not is_running:
                break  # victims are those of the highest ranks: none behind this one runs either
            num_computed = request.num_computed_tokens
            count = len(request.token_ids) + request.num_pending_tokens - num_computed
            if count == 1 and num_computed < request.steady_until:
                if decodes:  # nearly all rows: what the calls below would come to
                    add_row(ScheduledRequest(request.request_id, num_computed, 1, no_blocks, True))
                    add_request(request)
                    add_offers(())
                    plan.budget -= 1
                    request.num_computed_tokens = num_computed + 1
                    request.num_pending_tokens += 1
                continue
            if count <= 0 or request.load_id is not None or not (prefills if count > 1 else decodes):
                continue
            if request.num_pending_tokens and self._ends_with_pending(request):
                continue
            if count > 1:
                count = min(count, self._max_row_tokens, plan.budget)
            if count > 1 and decodes and not self.queue.preempts:
                # One of a smaller rank that joined later must not stall those that decode already.
                num_behind = sum(self._num_missing(other) == 1 for other in running[index + 1 :])
                count = min(count, plan.budget - num_behind)
                if count <= 0:
                    continue
            block_ids = self._allocate_or_preempt(request, count)
            if block_ids is None:
                break
            self._add_row(plan, request, count, block_ids)

    def _plan_waiting(self, plan: _Plan) -> None:
        """Lets waiting requests join, as long as there are seats, tokens and blocks."""
        if self._num_seats <= 0 or plan.budget <= 0 or not len(self.queue):
            return
        now = self.clock()
        num_passed_over = 0
        self._begin_reservation()
        with closing(self.queue.candidates(now)) as candidates:
            for request in candidates:
                if self._num_seats <= 0 or plan.budget <= 0:
                    break
                if _is_paused(request):
                    continue
                if request.num_sequences > self._num_seats:
                    break
                prefix = self.transfers.find_prefix(request)
                if prefix is None or self._is_one_too_many(request, prefix):
                    num_passed_over += 1
                    if num_passed_over == MAX_PASSED_OVER:
                        break
                    continue
                saved = self.kv.num_in(prefix) - self.kv.num_taken(prefix)
                missing = self.kv.num_missing_blocks(request, request.num_tokens) - saved
                if missing > self.kv.num_free_blocks or not self.reservation.try_admit(request, saved):
                    break
                self._join(request, prefix)
                if request.load_id is not None:
                    continue
                count = self._num_missing(request)
                count = min(count, self._max_row_tokens, plan.budget)
                block_ids = self.kv.allocate_slots(request, count)
                assert block_ids is not None, f"{request} joined without room for it"
                self._add_row(plan, request, count, block_ids)

    def _plan_stalled(self, plan: _Plan) -> None:
        """Something waits and nothing runs: what is in the way gives way."""
        while not plan.rows and len(self.queue) and not self.transfers.num_loading:
            if self._running:
                self._preempt(self._running[-1])  # of those that wait for others to be computed
            elif not self.kv.break_pin():
                break
            self._plan_waiting(plan)

    def _join_urgent(self) -> None:
        """Requests of a more urgent class take the places of less urgent ones, and stand before them."""
        while (found := self._next_urgent()) is not None:
            request, prefix, victims = found
            for victim in victims:
                if self._fits(request, prefix):
                    break
                self._preempt(victim)
                prefix = self.transfers.find_prefix(request) or prefix
            if not self._fits(request, prefix):
                return
            self._join(request, prefix)

    def _next_urgent(self) -> tuple[Request, CachedPrefix, list[Request]] | None:
        """The first waiting request that may take running ones' places, and these, last in rank first."""
        with closing(self.queue.candidates(self.clock())) as candidates:
            for request in candidates:
                if _is_paused(request):
                    continue
                victims = [
                    other
                    for other in reversed(self._running)
                    if other.load_id is None and self.queue.may_preempt(request, other)
                ]
                if not victims:
                    return None
                prefix = self.transfers.find_prefix(request)
                if prefix is not None:
                    return request, prefix, victims
        return None

    def _fits(self, request: Request, prefix: CachedPrefix) -> bool:
        if request.num_sequences > self._num_seats:
            return False
        self._begin_reservation()
        return self.reservation.try_admit(request, self.kv.num_in(prefix) - self.kv.num_taken(prefix))

    def _begin_reservation(self) -> None:
        kv = self.kv
        self.reservation.begin(self._running, kv.num_free_blocks, kv.num_missing_blocks, kv.num_held_blocks)

    def _is_one_too_many(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether enough long prompts are being computed already."""
        config = self.config
        if config.max_long_prefills is None:
            return False
        threshold = config.long_prefill_threshold
        if request.num_tokens - prefix.num_tokens < threshold:
            return False
        under_way = sum(
            other.num_prompt_tokens >= threshold and other.num_computed_tokens < other.num_prompt_tokens
            for other in self._running
        )
        return under_way >= config.max_long_prefills

    def _ends_with_pending(self, request: Request) -> bool:
        """Whether no token is known to come behind those that planned steps will sample: they are its last
        ones, or beam search is to choose."""
        if request.sampling_params.beam_width > 1:
            return True
        num_output = request.num_output_tokens + request.num_pending_tokens
        return num_output >= request.max_output_tokens(self.max_model_len)

    def _allocate_or_preempt(self, request: Request, count: int) -> list[list[int]] | None:
        """Slots for a running request; None if it had to give way itself, being the last in rank."""
        while (block_ids := self.kv.allocate_slots(request, count)) is None:
            victim = self._running[-1]
            if victim.load_id is not None:
                return None  # its blocks are being written: this request waits until that has ended
            family = victim.choices
            alone = all(other is victim or (family and other.choices is family) for other in self._running)
            if alone and self.kv.break_pin():
                continue
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _add_row(self, plan: _Plan, request: Request, count: int, block_ids: list[list[int]]) -> None:
        new = None
        if not request.in_runner:
            request.in_runner = True
            block_ids = self.kv.block_ids(request)
            new = NewRequestData(
                list(request.token_ids),  # a copy: the runner appends what it samples by itself
                request.num_prompt_tokens,
                request.sampling_params,
                request.eos_token_ids,
                request.embeds,
                num_choices=1 if request.choices is None else request.choices.num_draws,
            )
            request.num_given_tokens = 0
        num_computed = request.num_computed_tokens
        end = num_computed + count
        samples = end == len(request.token_ids) + request.num_pending_tokens
        row = ScheduledRequest(request.request_id, num_computed, count, block_ids, samples, new)
        if request.num_given_tokens:
            row.given_token_ids = request.token_ids[-request.num_given_tokens :]
            request.num_given_tokens = 0
        if num_computed < request.num_once_computed:
            self.num_recomputed_tokens += min(count, request.num_once_computed - num_computed)
        if count > 1 or num_computed < request.num_prompt_tokens:
            plan.num_prefill_tokens += count
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        plan.rows.append(row)
        plan.requests.append(request)
        # One more, as the token that fills a block may have been pending when its row was planned.
        fills = end // self.kv.block_size > (num_computed - 1) // self.kv.block_size
        plan.offers.append(self.kv.keep(request) if fills else ())
        plan.budget -= count
        request.steady_until = self._steady_until(request)

    def _steady_until(self, request: Request) -> int:
        """As far as rows of the one missing token bring no block and not its end: see Request."""
        # None of them is computed a second time: with one token missing, all that once were are again.
        num_prompt_tokens = request.num_prompt_tokens
        if request.num_computed_tokens < num_prompt_tokens:
            return 0  # counts as prefill
        if request.choices is not None and request.sampling_params.beam_width > 1:
            return 0  # the runner must be told the tokens
        end = num_prompt_tokens + request.max_output_tokens(self.max_model_len)
        return min(end - 1, self.kv.steady_until(request))

    def _num_prompt_tokens_left(self) -> int:
        """Tokens that running requests lack beyond the next one."""
        missing = map(self._num_missing, self._running)
        return sum(count - 1 for count in missing if count > 1)

    # Requests on their way.

    def _enqueue(self, request: Request) -> None:
        self.queue.push(request)
        self._num_waiting_tokens += request.num_tokens

    def _wait(self, request: Request) -> None:
        """Back into the queue, at the place its rank says."""
        self._enqueue(request)
        self.tenants.on_waiting(request)

    def _join(self, request: Request, prefix: CachedPrefix) -> None:
        self.queue.remove(request)
        self._num_waiting_tokens -= request.num_tokens
        request.status = RequestStatus.RUNNING
        self._num_seats -= request.num_sequences
        self._last_join_step = self._step
        bisect.insort(self._running, request, key=lambda other: other.rank)
        self.transfers.begin(request, prefix)
        if request.scheduling.session:
            self.kv.touch_pin(_session_name(request), self.clock() + self._session_ttl_s)
        if not request.num_preemptions and request.index == 0:
            request.num_cached_tokens = prefix.num_tokens
            self.kv.num_cached_tokens += prefix.num_tokens
        self.tenants.on_admitted(request)
        self.queue.on_admitted(request)

    def _leave(self, request: Request) -> None:
        """Takes a running request out of the batch and its blocks away."""
        if self._copies:  # those into its blocks have no purpose any more, and others may get the blocks
            own = {block_id for ids in self.kv.block_ids(request) for block_id in ids}
            self._copies = [pair for pair in self._copies if pair[1] not in own]
        if request.load_id is None:
            self.kv.free(request, self.clock())
        index = bisect.bisect_left(self._running, request.rank, key=lambda other: other.rank)
        assert self._running[index] is request, request
        del self._running[index]
        self._num_seats += request.num_sequences
        self.tenants.on_left(request)
        self.queue.on_left(request)
        if request.in_runner:
            self._dropped.append(request.request_id)
            request.in_runner = False
        request.status = RequestStatus.PREEMPTED
        if request.load_id is None:
            request.num_once_computed = max(request.num_once_computed, request.num_computed_tokens)
        request.num_computed_tokens = request.steady_until = 0

    def _preempt(self, request: Request) -> None:
        assert request.load_id is None, request
        self.transfers.drop(request)
        # A block that is still to be copied for a choice holds nothing yet, and saves go before copies.
        targets = {target for _, target in self._copies}
        if not targets or targets.isdisjoint(b for ids in self.kv.block_ids(request) for b in ids):
            self.transfers.swap_out(request)
        self._leave(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)
        if self.trace is not None:
            self.trace.on_preemption(request)

    def _account(self, request: Request, row: ScheduledRequest, now: float) -> None:
        """Charges the tenant for what was computed, once also where it is computed again."""
        end = row.num_computed_tokens + row.num_scheduled_tokens
        num_input = 0
        if not request.num_preemptions:
            num_input = max(0, min(end, request.num_prompt_tokens) - row.num_computed_tokens)
        self.queue.on_tokens(request, num_input, int(row.samples))
        if row.samples:
            self.tenants.on_tokens(request, 1, now)

    def _take_sample(
        self, request: Request, row: ScheduledRequest, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """A new token of a request with choices; the first one makes them requests of their own."""
        request_id = row.request_id
        logprobs = runner_output.logprobs.get(request_id)
        choices = request.choices
        if isinstance(choices, BeamSearch):
            assert logprobs is not None, f"{request_id}: no candidates"
            return self._take_candidates(request, choices, logprobs)
        outputs = [self._append(request, runner_output.sampled_token_ids[request_id], logprobs)]
        assert choices is not None, request
        if not choices.has_forked:
            others = runner_output.choice_logprobs.get(request_id, [])
            num_computed = row.num_computed_tokens + row.num_scheduled_tokens
            self._num_seats += choices.count - 1 if request.status is RequestStatus.RUNNING else 0
            for child in choices.fork(runner_output.choice_token_ids[request_id]):
                self._requests[child.request_id] = child
                self._deadlines.push(child)
                self._start(child, request, num_computed)
                entry = others[child.index - 1] if others else None
                outputs.append(self._finish_if_done(child, self._output(child, entry)))
        outputs[0] = self._finish_if_done(request, outputs[0])
        return choices.pass_on(outputs)

    def _take_candidates(
        self, request: Request, beams: BeamSearch, candidates: TokenLogprobs
    ) -> list[EngineCoreOutput]:
        """A beam has reported; when all have, they become those of the next step, or the request ends."""
        if not beams.report(request, candidates):
            return []
        num_seats = request.num_sequences
        step = beams.advance(self.max_model_len)
        self._num_seats += num_seats - request.num_sequences if request.status is RequestStatus.RUNNING else 0
        if beams.is_over:
            outputs = beams.results()
            for beam in list(beams.live.values()):
                beam.finish_reason = FinishReason.LENGTH  # of what the search has still in hand
                self.reservation.on_finished(beam)
                self._finish(beam, beam.finish_reason)
            return outputs
        # What is freed here may be the target of a copy at once: copies come before all that is computed.
        for beam in step.dropped:
            self._remove(beam)
        for parent, child in step.forks:
            self._requests[child.request_id] = child
            self._deadlines.push(child)
            self._start(child, parent, parent.num_computed_tokens)
        for beam, token_id in step.continued:
            beam.append_output(token_id)
            if beam.status is RequestStatus.RUNNING:
                beam.num_given_tokens = 1
                self._branched.append(beam)
            else:
                self._num_waiting_tokens += 1
        return []

    def _start(self, child: Request, parent: Request, num_computed: int) -> None:
        """A choice begins beside its parent, or waits if it finds no place or the parent runs no more."""
        child.num_computed_tokens = num_computed
        may_run = parent.status is RequestStatus.RUNNING and self._num_seats > 0
        copies = self.kv.fork(parent, child) if may_run else None
        if copies is None:
            child.num_computed_tokens = 0
            child.status = RequestStatus.PREEMPTED
            self._wait(child)
            return
        self._copies += copies
        self._branched.append(child)
        child.status = RequestStatus.RUNNING
        self._num_seats -= 1
        bisect.insort(self._running, child, key=lambda other: other.rank)
        self.tenants.on_waiting(child)
        self.tenants.on_admitted(child)
        self.queue.on_admitted(child)

    def _append(self, request: Request, token_id: int, logprobs: Any) -> EngineCoreOutput:
        request.token_ids.append(token_id)
        if request.status is not RequestStatus.RUNNING:
            self._num_waiting_tokens += 1
        return self._output(request, logprobs)

    @staticmethod
    def _output(request: Request, logprobs: Any) -> EngineCoreOutput:
        token_ids, choices = request.token_ids, request.choices
        output = EngineCoreOutput(request.request_id, token_ids[-1:])
        if choices is not None:
            output.request_id, output.index = choices.request_id, request.index
        if logprobs is not None:
            output.logprobs = [logprobs]
        if len(token_ids) == request.num_prompt_tokens + 1:
            output.num_cached_tokens = request.num_cached_tokens
        return output

    def _finish_if_done(self, request: Request, output: EngineCoreOutput) -> EngineCoreOutput:
        if request.check_stop(self.max_model_len):
            assert request.finish_reason is not None
            self.reservation.on_finished(request)
            self._finish(request, request.finish_reason)
            output.finish_reason = str(request.finish_reason)
            output.stop_reason = request.stop_reason
        return output

    # Ends.

    def _end(
        self,
        request_ids: Iterable[str],
        reason: FinishReason,
        error: str | None = None,
        error_code: str = EngineError.code,
    ) -> list[EngineCoreOutput]:
        outputs = []
        for request_id in request_ids:
            parent, _, index = request_id.rpartition("#")
            choices = self._choices.get(parent)
            if error is None and choices is not None and not choices.is_ranked and index.isdecimal():
                one = choices.live.get(int(index))
                if one is not None and choices.has_forked:
                    self._finish(one, reason)
                    outputs.append(EngineCoreOutput(parent, finish_reason=str(reason), index=int(index)))
                continue
            request = self._requests.get(request_id)
            if request is None and request_id in self._choices:
                request = next(iter(self._choices[request_id].live.values()))
            if request is not None:
                outputs += self._end_all(request, reason, error, error_code)
        return outputs

    def _end_all(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        error_code: str = EngineError.code,
    ) -> list[EngineCoreOutput]:
        """Ends a request with all its choices; an error is told once."""
        choices = request.choices
        if choices is None:
            request_id, indices, requests = request.request_id, [0], [request]
        else:
            request_id, indices = choices.request_id, choices.open_indices
            requests = list(choices.live.values())
        for one in requests:
            self._finish(one, reason)
        if error is not None:
            return [
                EngineCoreOutput(request_id, finish_reason=str(reason), error=error, error_code=error_code)
            ]
        return [EngineCoreOutput(request_id, finish_reason=str(reason), index=index) for index in indices]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            if self._ahead is not None and request.request_id in self._ahead.row_of:
                self._ahead.stale |= self._take_back(request, self._ahead.row_of[request.request_id])
            if request.load_id is None and request.num_computed_tokens:
                self._keep(request)
            self.admission.on_departure()
        elif request.scheduling.session_end:
            self.kv.unpin(_session_name(request))
        self._remove(request)
        request.finish_reason = reason
        if self.trace is not None:
            self.trace.on_finish(request, reason)

    def _remove(self, request: Request) -> None:
        """Takes a request out, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.queue.remove(request)
            self.tenants.on_not_waiting(request)
            self._num_waiting_tokens -= request.num_tokens
        if request.load_id is None:
            self.transfers.drop(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        request_id, external_id, is_over = request.request_id, request.external_id, True
        choices = request.choices
        if choices is not None:
            request_id, external_id = choices.request_id, choices.external_id
            del choices.live[request.index]
            is_over = not choices.live
            if is_over:
                del self._choices[request_id]
        if external_id and is_over:
            key = request.scheduling.tenant, external_id
            same = self._by_external_id[key]
            del same[request_id]
            if not same:
                del self._by_external_id[key]

    def _take_back(self, request: Request, row: ScheduledRequest) -> set[int]:
        """The row is not computed after all; returns the blocks that it would have filled."""
        request.num_computed_tokens = min(request.num_computed_tokens, row.num_computed_tokens)
        return self.kv.forget(request, row.num_computed_tokens)

    def _withdraw(self, request: Request, row: ScheduledRequest) -> set[int]:
        """Takes a row out of a plan made ahead, and its request back into the queue if it has not ended."""
        stale: set[int] = set()
        request.num_pending_tokens -= row.samples
        if request.status is RequestStatus.RUNNING:
            stale = self._take_back(request, row)
            self._leave(request)
            self._wait(request)
        if row.new is not None and row.request_id in self._dropped:
            self._dropped.remove(row.request_id)  # the runner has never seen it
        return stale

    def _keep(self, request: Request) -> None:
        """Keeps what is to outlive the request; to fail in this must not keep the request from its end."""
        try:
            offers = self.kv.keep(request)
            self.transfers.save(offers)
            if self._in_flight:
                self._in_flight[-1].late_offers += offers
            self._pin(request)
        except Exception:
            logger.exception("%s: what it has computed is not kept", request)

    def _pin(self, request: Request) -> None:
        scheduling, now = request.scheduling, self.clock()
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if scheduling.session:
            name = _session_name(request)
            if scheduling.session_end:
                self.kv.unpin(name)
            else:
                self.kv.pin(request, num_tokens, name, now + self._session_ttl_s)
        if scheduling.pin:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
            count = num_tokens // self.kv.block_size
            if count and len(request.block_hashes) >= count:
                ttl_s = scheduling.cache_ttl_s or MAX_PIN_TTL_S
                name = f"prefix {request.block_hashes[count - 1].hex()}"
                self.kv.pin(request, num_tokens, name, now + min(ttl_s, MAX_PIN_TTL_S))

    def _end_step(self) -> None:
        if self.trace is not None:
            self.trace.end_step(self.stats())


def _is_paused(request: Request) -> bool:
    """Whether a waiting request waits for other sequences of its family, and for no place to run."""
    return request.choices is not None and request.choices.is_paused(request)


def _session_name(request: Request) -> str:
    """Of the pin that holds a conversation; tenants have sessions of their own."""
    return session_name(request.scheduling.tenant, request.scheduling.session)


def session_name(tenant: str, session: str) -> str:
    """Of a conversation's pin, as `inspect` shows it; no other tenant and session have the same."""
    tenant, session = (text.replace("%", "%25").replace("/", "%2F") for text in (tenant, session))
    return f"session {tenant}/{session}" if tenant else f"session {session}"
