"""Scheduler: chooses the tokens that the next step computes, and processes the step's results."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.adapters import Adapter
from quire.config import CacheConfig, SchedulerConfig
from quire.core.adapter_slots import AdapterSlots
from quire.core.drafts import GRAM, DraftBudget, Drafter, OutputsByTenant
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.planner import Planner
from quire.core.policies.admission import AdmissionControl
from quire.core.policies.preemption import PreemptionCost
from quire.core.policies.reservation import make_reservation
from quire.core.probation import Probation
from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.roster import Roster
from quire.core.sequence_group import SequenceGroup, make_sequence_group
from quire.core.step import Step
from quire.core.trace import SchedulerTrace
from quire.core.transfers import BlockTransfers
from quire.errors import EngineError, InvalidArgumentError, QuireError, describe
from quire.outputs import (
    EngineCoreOutput,
    ExpertCounts,
    ModelRunnerOutput,
    RowOutput,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
)
from quire.request.validation import check_choices

if TYPE_CHECKING:
    from quire.kv_tiers import KVTiers

logger = logging.getLogger("quire")


class Scheduler:
    """Continuous batching by one rule: `num_computed_tokens` of each request catches up with its `num_tokens`
    under the token budget of a step. The rule covers prefill, chunked prefill, decode, cached prefixes and
    recomputation after a preemption. Policies (`core.policies`) decide the order of admission, the room that
    a request must find, and which steps compute prompts.

    Every request has a rank, fixed when it arrives. Running requests get their rows in the order of ranks. A
    running request is preempted for one of a smaller rank, or itself if it is the last in rank; it returns to
    the queue and keeps its rank. From this follows, but for beam searches, whose beams wait for each other,
    and for the time in which a suspect of an engine's death runs alone (`Probation`),
    - no livelock: the first in rank may preempt all others and none may preempt it, and alone it fits,
    because `max_model_len` is cut to what the pool holds;
    - no starvation under first come, first served, nor under a policy with ageing;
    - with mixed batches, while the pool has room, a decoding request is in every step: prompts leave room for
    those that decode behind them, and a request joins only a step whose budget has satisfied all others.
    Exceptions: if urgent requests preempt, the prompt of a more urgent one goes before other requests'
    decoding; and a request may wait for its pending tokens.

    The caller repeats schedule(), execution by a runner, update(); add_request() and abort() may come at any
    point between. If the execution fails, it calls fail() in place of update(). On a device that computes
    steps in launch order, schedule() may also come before update() of earlier steps. The tokens that those
    sample are then pending, and the runner finds them on its device. The row of a request that turns out to
    have ended is computed for nothing. One thread owns the scheduler; nothing here locks.

    `Planner` plans steps, `Roster` tracks which requests wait and run, `SequenceGroup` manages the sequences
    of a request that has several. This class processes the results of steps.

    Args:
        clock: returns monotonic seconds; the simulator passes its own.
        tiers: KV tiers beside the pool; None: there are none.
        block_bytes: bytes of a block, to compare swapping with recomputation.
        adapters: the runner's adapter slots; None: no request has an adapter.
        has_draft_model: whether the runner has a draft model.
        computes_whole_prompts: whether a prompt must be computed in one step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        tiers: KVTiers | None = None,
        block_bytes: int = 0,
        session_ttl_s: float = 300.0,
        adapters: AdapterSlots | None = None,
        has_draft_model: bool = False,
        computes_whole_prompts: bool = False,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = min(max_model_len, kv.capacity + 1)
        """Most tokens of prompt and output together. It may exceed the tokens that the pool holds by one,
        because the newest token of a sequence is not in the cache yet. Output that reaches it ends, usually
        with LENGTH."""
        self.num_scheduled_tokens = 0
        self.last_batch = 0, 0
        """Number of rows and tokens of the latest step that had any."""
        self.preemption_cost = PreemptionCost(
            config.preemption_mode,
            block_bytes,
            lambda: self.transfers.rates,
        )
        self.transfers = BlockTransfers(kv, tiers, self.preemption_cost.should_swap)
        self.roster = Roster(
            config, kv, self.transfers, clock=clock, session_ttl_s=session_ttl_s, adapters=adapters
        )
        self.groups: dict[str, SequenceGroup] = {}
        """Groups of the unfinished requests with several sequences, by request id."""
        self._admission = AdmissionControl(config)
        self._reservation = make_reservation(config, self.max_model_len, len(kv.groups))
        self.probation = Probation(config.num_draft_tokens)
        self._drafts, self._outputs = DraftBudget(), OutputsByTenant()
        self._has_draft_model = has_draft_model
        self.num_draft_tokens = self.num_accepted_drafts = 0
        """Number of draft tokens that steps verified since start, and how many of them were right. Drafts
        from the token on that ends a request do not count as right."""
        self._experts = ExpertCounts()
        self._planner = Planner(
            config,
            self.roster,
            self._reservation,
            self.max_model_len,
            self.probation,
            self._drafts,
            computes_whole_prompts=computes_whole_prompts,
        )
        self._has_accounts = bool(config.tenants) or config.queue_policy == "fair"
        self._num_steps = 0
        self._in_flight: deque[Step] = deque()  # the oldest first
        self._updated = 0.0

    def start_trace(self, cache: CacheConfig, path: str | Path | None = None) -> SchedulerTrace:
        """Starts and returns a trace, which records the steps from now on. Call it before the first request,
        because a replay knows no earlier ones.

        Args:
            cache: the configuration of the block manager.
            path: the file to append to; None: records are kept in memory.
        """
        kv, roster = self.kv, self.roster
        engine = {
            "scheduler": dataclasses.asdict(self.config),
            "max_model_len": self.max_model_len,
            "cache": {
                **dataclasses.asdict(cache),
                "num_blocks": kv.num_blocks,
                "block_size": kv.block_size,
            },
            "windows": [[group.window, list(group.layers), group.state_bytes] for group in kv.groups],
            "max_step_tokens": kv.max_step_tokens,
            "tiers": self.transfers.tiers is not None,
            "adapters": roster.adapters is not None,
        }
        roster.trace = SchedulerTrace(path, block_size=kv.block_size, clock=roster.clock, engine=engine)
        return roster.trace

    def add_request(self, request: Request, outputs: dict[int, list[int]] | None = None) -> None:
        """Queues a new request, or one from an engine that died (`Request.num_deaths` > 0).

        A request from a dead engine was accepted once: limits of the queue and quotas do not refuse it.

        Args:
            outputs: tokens so far of each open choice, by index; None: no output was reported.

        Raises:
            InvalidArgumentError: its prompt or its choices might never fit here, or its id is in use or looks
                like the id of a choice.
            UnavailableError: the queue (of all, or of its tenant) is full, a quota used up, or the predicted
                wait too long; names the limit.
        """
        assert request.status is RequestStatus.WAITING, request
        request_id, roster = request.request_id, self.roster
        if "#" in request_id or request_id in roster.sequences:
            raise InvalidArgumentError("request_id", f"{request_id!r:.80} is in use, or holds a '#'")
        num_tokens = request.num_prompt_tokens + max(map(len, (outputs or {}).values()), default=0)
        most = self.max_model_len - 1  # leaves room for one token of output
        if request.sampling_params.dimensions:
            most = min(self.max_model_len, self.kv.capacity)
        if num_tokens > most:
            raise InvalidArgumentError(
                "prompt",
                f"{num_tokens} tokens, at most {most} are allowed "
                f"(max_model_len {self.max_model_len}, KV cache of {self.kv.capacity} tokens)",
            )
        check_choices(request.sampling_params, self.config.max_num_seqs)
        self._check_beams(request)
        self._check_joint_spans(request)
        now = roster.clock()
        self._admission.set_default_deadlines(request)
        has_room = self.kv.num_free_blocks >= self.kv.num_blocks_for(request.num_tokens)
        if not request.num_deaths:
            self._admission.check(
                request,
                now,
                num_waiting=len(roster.queue),
                num_waiting_tokens=roster.queue.num_tokens,
                num_free_seats=roster.num_free_seats if has_room else 0,
                num_running_tokens=roster.num_prompt_tokens_left if self._admission.predicts(request) else 0,
                ahead=roster.queue.ahead(request),
            )
            roster.tenants.check_arrival(request, now)
        if outputs is not None:
            request.token_ids += outputs.get(0, [])
        roster.add(request)
        sequences = roster.sequences[request_id]
        group = make_sequence_group(request, sequences, self.max_model_len)
        if group is not None:
            self.groups[request_id] = group
            if outputs is not None:
                group.resume(request, outputs, roster)
        if request.num_deaths:
            self.probation.add(request, sequences)
        self.transfers.prefetch(request)
        if roster.trace is not None:
            roster.trace.on_arrival(request)

    def _check_joint_spans(self, request: Request) -> None:
        """Raises InvalidArgumentError for a joint span (an image whose tokens one step must compute together)
        that exceeds a row's limit, or might never fit into a step beside a row of each other sequence."""
        if request.embeds is None or not request.embeds.is_joint:
            return
        config = self.config
        others = (config.max_num_seqs - 1) * (1 + config.num_draft_tokens)
        most = min(config.max_row_tokens, config.max_num_batched_tokens - others)
        longest = max((length for _, length in request.embeds.spans), default=0)
        if longest > most:
            raise InvalidArgumentError(
                "image_spans",
                f"an image of {longest} tokens, which one step must compute together, at most {most} are "
                f"allowed (max_num_batched_tokens {config.max_num_batched_tokens} less the tokens of other "
                "sequences, by max_num_seqs and num_draft_tokens; max_prefill_tokens_per_request)",
            )

    def _check_beams(self, request: Request) -> None:
        """Raises InvalidArgumentError for a beam search whose beams at full length need more blocks than the
        pool has, because they might preempt each other repeatedly."""
        width = request.sampling_params.beam_width
        if width == 1:
            return
        num_output = request.max_output_tokens(self.max_model_len)
        num_tokens = request.num_prompt_tokens + num_output - 1  # the last one is never in the cache
        shared = self.kv.num_blocks_for(request.num_prompt_tokens // self.kv.block_size * self.kv.block_size)
        shared = max(0, shared - 2 * self.kv.num_state_groups)  # each beam has states of its own
        needed = shared + width * (self.kv.num_blocks_for(num_tokens) - shared)
        if needed > self.kv.num_blocks:
            raise InvalidArgumentError(
                "beam_width",
                f"{width} beams of up to {num_output} tokens behind a prompt of {request.num_prompt_tokens} "
                f"need {needed} KV blocks, there are {self.kv.num_blocks}: ask for fewer beams or max_tokens",
            )

    def expire(self) -> list[EngineCoreOutput]:
        """Ends requests that have missed a deadline and returns their last outputs; call it before planning a
        step."""
        outputs = []
        for request in self.roster.overdue():
            outputs += self._end_all(request, FinishReason.TIMEOUT)
        return outputs

    def schedule(self) -> SchedulerOutput:
        """Plans the next step. Running requests come first, in the order of ranks, then waiting ones in their
        queue policy's order; `batch_policy` may leave some of them to a later step.

        If no other step is in flight, the plan has rows whenever there is an unfinished request, unless
        blocks are being loaded from a KV tier or weights of an adapter are being read.
        """
        if self._in_flight and not self._in_flight[-1].requests:
            self._in_flight.pop()  # nobody executes a plan without rows while another one is made
        is_ahead = bool(self._in_flight)
        self._num_steps += 1
        begin = time.perf_counter()
        step = self._planner.plan(self._num_steps, is_ahead=is_ahead)
        plan_s = time.perf_counter() - begin
        num_tokens = self.config.max_num_batched_tokens - step.budget
        self.num_scheduled_tokens += num_tokens
        if step.requests:
            self.last_batch = len(step.requests), num_tokens
        output = step.output
        self.roster.take_changes(output)
        output.kv_saves, output.kv_loads = self.transfers.pop_planned()
        step.begun = self.roster.clock()
        self._in_flight.append(step)
        if self.probation:
            self.probation.launch(request for step in self._in_flight for request in step.requests)
        if self.roster.trace is not None:
            self.roster.trace.begin_step(output, plan_s=plan_s, overlapped=is_ahead)
        return output

    def update(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Processes the runner's results of the oldest step in flight.

        Returns:
            One output per choice that has sampled, per prompt that was pooled, and per request with a row
            that failed alone or could not be processed; either ends that request, with all its choices. A
            beam search has outputs only at its end. Requests that end here have freed their blocks, except
            those that are being loaded. Rows of requests that have ended since schedule() have no effect.
        """
        step = self._in_flight.popleft()
        assert scheduler_output is step.output, (scheduler_output.step, step.output.step)
        now = self.roster.clock()
        # A step that was launched ahead has waited for the one before.
        seconds = now - max(step.begun, self._updated)
        self._updated = now
        self._experts = runner_output.experts or self._experts
        outputs: list[EngineCoreOutput] = []
        for row, request, newly_cached, result in zip(
            step.output.scheduled, step.requests, step.newly_cached, runner_output.rows, strict=True
        ):
            if row.samples:
                request.num_pending_tokens -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            try:
                if result.error:
                    self._take_back(request, row)
                    outputs += self._end_all(
                        request, FinishReason.ERROR, result.error, result.error_code or EngineError.code
                    )
                    continue
                if newly_cached:
                    self.transfers.save(newly_cached)
                if row.num_drafts:
                    self._take_drafts(request, row, result)
                if self._has_accounts:
                    num_sampled = len(result.token_ids) + sum(len(one.token_ids) for one in result.choices)
                    self._account(request, row, num_sampled, now)
                if not row.samples:
                    if result.prompt_logprobs is not None:
                        end = row.num_computed_tokens + row.num_scheduled_tokens
                        request.add_prompt_logprobs(result.prompt_logprobs, end)
                    continue
                if not result.token_ids and not result.embedding:
                    raise EngineError("no token was drawn for it")
                group = self.groups.get(request.group_id)
                if group is not None:
                    outputs += group.apply_result(
                        request, result, self.roster, self._apply_result, self._complete
                    )
                else:
                    outputs.append(self._apply_result(request, result))
                if self.config.num_draft_tokens and not request.is_finished:
                    self._guess(request)
            except Exception as error:
                outputs.append(self._give_up(request, row, error))
        self.finish_loads(runner_output.loads_done)
        if step.requests and not step.num_prefill_tokens and not runner_output.has_caught_up:
            self._drafts.cost.add(self.config.max_num_batched_tokens - step.budget, seconds)
        self._admission.on_step(seconds, step.num_prefill_tokens, len(step.requests))
        self.preemption_cost.on_prefill(step.num_prefill_tokens, seconds)
        self._end_step()
        return outputs

    def _take_drafts(self, request: Request, row: ScheduledRequest, result: RowOutput) -> None:
        """Cuts the sampled tokens after one that ends the request, counts the row's drafts, and takes back
        the computed tokens of drafts that are not used."""
        drafter, num_known = request.drafter, request.num_output_tokens
        assert drafter is not None, request
        for count, token_id in enumerate(result.token_ids, 1):
            if count < len(result.token_ids) and request.end_by(
                token_id, num_known + count, self.max_model_len
            ):
                result.cut(count)
                result.is_final = False
                break
        num_right = len(result.token_ids) - 1
        request.num_computed_tokens = min(
            request.num_computed_tokens, row.num_computed_tokens + 1 + num_right
        )
        num_tried = row.num_drafts
        if not row.draft_token_ids:
            num_tried = result.num_drafts
            drafter.rate_model(num_tried, num_right)
        drafter.num_tried += num_tried
        drafter.num_accepted += num_right
        self.num_draft_tokens += num_tried
        self.num_accepted_drafts += num_right

    def _guess(self, request: Request) -> None:
        """Updates the guess of a request's next tokens, if the request may have drafts."""
        drafter, params = request.drafter, request.sampling_params
        if drafter is None:
            asked = request.scheduling.num_draft
            most = self.config.num_draft_tokens
            most = most if asked is None else min(asked, most)
            # Beams are chosen here, and processors may remember what they were asked.
            if not most or params.beam_width > 1 or params.logits_processors:
                return
            # A draft model sees no images.
            has_model = self._has_draft_model and request.embeds is None
            drafter = Drafter(most, has_model, self._outputs.get(request.scheduling))
            request.drafter = drafter
        drafter.see(request.token_ids)

    def _account(self, request: Request, row: ScheduledRequest, num_sampled: int, now: float) -> None:
        """Reports the row's computed prompt tokens and sampled tokens to the queue policy, and charges the
        sampled ones to the tenant's quota, with the first tokens of choices that fork from the row. After a
        request's first preemption or failed load no prompt tokens are reported."""
        end = row.num_computed_tokens + row.num_scheduled_tokens
        num_input = 0
        if not request.num_preemptions:
            num_input = max(0, min(end, request.num_prompt_tokens) - row.num_computed_tokens)
        self.roster.queue.on_tokens(request, num_input, num_sampled)
        if num_sampled:
            self.roster.tenants.on_tokens(request, num_sampled, now)

    def _apply_result(self, request: Request, result: RowOutput) -> EngineCoreOutput:
        """Appends sampled tokens to their request, up to one that ends it. An embedding ends the request
        instead. Returns the output for the client."""
        token_ids = request.token_ids
        output = EngineCoreOutput(
            request.group_id, result.token_ids, index=request.index, logprobs=result.logprobs
        )
        _tell_drafts(output, request)
        if len(token_ids) == request.num_prompt_tokens:
            output.num_cached_tokens = request.num_cached_tokens
            output.admitted_at, output.first_token_at = request.admitted_at, self._updated
            output.prompt_logprobs = request.take_prompt_logprobs(result.prompt_logprobs)
            if request.index == 0:
                output.seed = request.sampling_params.seed
        if result.embedding:
            self._complete(request, FinishReason.STOP)
            output.embedding, output.finish_reason = result.embedding, str(FinishReason.STOP)
            output.num_preemptions = request.num_preemptions
        for count, token_id in enumerate(result.token_ids, 1):
            token_ids.append(token_id)
            at_end = result.is_final and count == len(result.token_ids)
            if request.check_stop(self.max_model_len) or at_end:
                if at_end and request.finish_reason is not FinishReason.STOP:
                    request.finish_reason = FinishReason.STOP  # whole, also where it may not be longer
                assert request.finish_reason is not None
                self._complete(request, request.finish_reason)
                output.finish_reason = str(request.finish_reason)
                output.stop_reason = request.stop_reason
                output.num_preemptions = request.num_preemptions
                if count < len(result.token_ids):
                    output.new_token_ids = result.token_ids[:count]
                    output.logprobs = result.logprobs and result.logprobs[:count]
                break
        return output

    def finish_loads(self, loads_done: Iterable[tuple[int, int]]) -> None:
        """Processes loads that have ended: (load id, number of leading blocks that are valid). The request of
        an incomplete load waits again, unless it has ended."""
        for load_id, num_valid in loads_done:
            request, complete = self.transfers.finish_load(load_id, num_valid)
            if request.is_finished:
                self.kv.free(request, self.roster.clock())
            elif not complete:
                if (
                    not request.num_preemptions and request.index == 0
                ):  # else they were reused, or not counted
                    self.kv.num_cached_tokens -= request.num_cached_tokens
                    request.num_cached_tokens = 0
                self.roster.requeue(request)
                request.num_preemptions += 1  # its next admission is not its first

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> list[EngineCoreOutput]:
        """Ends requests in any state and frees their blocks at once, or, if these are being loaded, when the
        load ends.

        Args:
            request_ids: as given to add_request; "id#i" ends choice i alone, once the choices have forked.
                Beams cannot be ended alone.

        Returns:
            The last output of each of their open choices. Unknown and finished ids are skipped, since an
            abort and the end of a request may cross.
        """
        outputs = []
        for request_id in request_ids:
            parent, _, index = request_id.rpartition("#")
            group = self.groups.get(parent)
            if group is not None and not group.is_ranked and index.isdecimal():
                one = group.live.get(int(index))
                if one is not None and group.has_forked:
                    self._finish(one, reason, is_external=True)
                    outputs.append(_final_output(parent, int(index), one, reason))
                continue
            request = self.roster.requests.get(request_id)
            if request is None and request_id in self.groups:
                request = next(iter(self.groups[request_id].live.values()))
            if request is not None:
                outputs += self._end_all(request, reason)
        return outputs

    def fail(self, error: str) -> list[EngineCoreOutput]:
        """Processes a failed step; called in place of update(). All steps in flight fail with it, as each
        depends on earlier ones. Ends every request with a row in one of them with `error`, and returns their
        last outputs.

        How much of the steps was computed or carried out is unknown. So pending block copies are dropped,
        drops of rows and adapter loads are sent to the runner again, and loads that the runner will never
        report are given up. If several steps were in flight, the prefix cache is emptied and all pins are
        released.
        """
        steps = list(self._in_flight)
        self._in_flight.clear()
        outputs: list[EngineCoreOutput] = []
        # Before any is ended: choices end together. What was offered stays so when its request ends or is
        # preempted while the step is under way, and nobody has computed it.
        self.kv.uncache(self.roster.cached_after_plan)
        self.transfers.forget_saves()
        for step in steps:
            for row, request, newly_cached in zip(
                step.output.scheduled, step.requests, step.newly_cached, strict=True
            ):
                self.kv.uncache(newly_cached)
                if not request.is_finished:
                    self._take_back(request, row)
        for step in steps:
            for request in step.requests:
                if not request.is_finished:
                    outputs += self._end_all(request, FinishReason.ERROR, error)
            self.roster.drop_again(step.output.dropped_request_ids)
        if self.roster.adapters is not None:
            self.roster.adapters.load_again([load for step in steps for load in step.output.adapter_loads])
        if len(steps) > 1:
            # Requests that ended with the step before left blocks which a failed row was to fill.
            self.kv.reset()
        self.roster.restart()
        self.finish_loads((load_id, 0) for load_id in self.transfers.lost_loads)
        for _ in steps:
            self._end_step()
        return outputs

    def end_waiting(self, adapter: Adapter, error: QuireError) -> list[EngineCoreOutput]:
        """Ends the queued requests with this adapter, because its weights cannot be read; returns their last
        outputs."""
        outputs: list[EngineCoreOutput] = []
        for request in list(self.roster.queue):
            if request.adapter is adapter and not request.is_finished:
                outputs += self._end_all(request, FinishReason.ERROR, str(error), error.code)
        return outputs

    def _give_up(self, request: Request, row: ScheduledRequest, error: Exception) -> EngineCoreOutput:
        """Ends a request, or its remaining choices, because its row could not be processed."""
        logger.exception("a step could not be taken in", extra=request.log_fields)
        self._take_back(request, row)
        for one in list(self.roster.sequences.get(request.group_id, {}).values()):
            self._finish(one, FinishReason.ERROR)
        return EngineCoreOutput(
            request.group_id,
            finish_reason=str(FinishReason.ERROR),
            error=f"the engine failed while computing the request: {describe(error)}",
            error_code=EngineError.code,
        )

    def _take_back(self, request: Request, row: ScheduledRequest) -> None:
        """Undoes the planning of a row that failed: its tokens count as not computed, and blocks that they
        were to fill can no longer be found."""
        request.num_computed_tokens = min(request.num_computed_tokens, row.num_computed_tokens)
        self.kv.uncache_from(request, row.num_computed_tokens)
        for step in self._in_flight:  # what rows behind it found full may have left the tables
            for other, newly_cached in zip(step.requests, step.newly_cached, strict=True):
                if other is request:
                    self.kv.uncache(newly_cached)

    @property
    def num_tokens_in_flight(self) -> int:
        """Number of tokens in all steps that are planned and not yet processed."""
        return sum(self.config.max_num_batched_tokens - step.budget for step in self._in_flight)

    def has_unfinished(self) -> bool:
        return bool(self.roster.requests)

    @property
    def has_work(self) -> bool:
        """Returns whether a step must be planned, for requests or for blocks to move."""
        return bool(self.roster.requests) or self.transfers.has_work

    def reset_cache(self) -> int:
        """Empties the prefix cache, pins and tiers. Requests keep the blocks that they hold or have swapped
        out.

        Returns:
            The number of blocks that could be found before, in the pool and in each tier.
        """
        count = self.kv.reset()
        if self.transfers.tiers is not None:
            count += self.transfers.tiers.clear()
        return count

    def inspect(self) -> dict[str, Any]:
        """Returns the state of the cache for operators: counts of blocks and tokens, seconds until each pin
        expires, statistics of the tiers."""
        pool, tiers, now = self.kv.pool, self.transfers.tiers, self.roster.clock()
        self.kv.expire(now)
        return {
            "block_size": self.kv.block_size,
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "num_cached_blocks": pool.num_cached,
            "num_blocks_in_use": pool.num_in_use,
            "num_pinned_blocks": self.kv.pins.num_blocks,
            "num_findable_blocks": len(pool.cached_hashes()),
            "num_cached_tokens": self.kv.num_cached_tokens,
            "num_loaded_tokens": self.transfers.num_loaded_tokens,
            "pins": {
                str(name): round(deadline - now, 3) for name, deadline in self.kv.pins.deadlines.items()
            },
            "tiers": {} if tiers is None else tiers.stats(),
        }

    def stats(self) -> SchedulerStats:
        """Returns the present state of the scheduler and the block pool; O(waiting requests)."""
        rows, tokens = self.last_batch if self.roster.requests else (0, 0)
        adapters = self.roster.adapters
        return SchedulerStats(
            step=self._num_steps,
            num_running=len(self.roster.running),
            num_waiting=len(self.roster.queue),
            num_waiting_tokens=self.roster.queue.num_tokens,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free_blocks,
            num_preemptions=self.roster.num_preemptions,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_cached_tokens=self.kv.num_cached_tokens,
            num_cached_blocks=self.kv.pool.num_cached,
            num_pinned_blocks=self.kv.pins.num_blocks,
            num_swaps=self.transfers.num_swaps,
            num_loaded_tokens=self.transfers.num_loaded_tokens,
            num_recomputed_tokens=self._planner.num_recomputed_tokens,
            num_queried_tokens=self.kv.num_queried_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_drafts=self.num_accepted_drafts,
            num_batch_rows=rows,
            num_batch_tokens=tokens,
            num_loading=self.transfers.num_loading,
            waiting=self.roster.waiting_by_reason(self._planner.admission_blocked_by),
            num_adapter_slots=0 if adapters is None else adapters.num_held,
            num_adapter_hits=0 if adapters is None else adapters.num_hits,
            num_adapter_loads=0 if adapters is None else adapters.num_loads,
            num_adapter_evictions=0 if adapters is None else adapters.num_evictions,
            experts=self._experts,
        )

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between any two calls; O(requests + blocks), for tests."""
        self.roster.check_integrity(self.config.max_num_seqs)

    # Ends.

    def _end_all(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        code: str = EngineError.code,
    ) -> list[EngineCoreOutput]:
        """Ends a request with all its choices. Returns one output with the error, or without an error one for
        each open choice."""
        group, request_id = self.groups.get(request.group_id), request.group_id
        indices = [0] if group is None else group.open_indices
        requests = list(self.roster.sequences[request_id].values())
        for one in requests:
            self._finish(one, reason, is_external=error is None)
        if error is not None:
            return [EngineCoreOutput(request_id, finish_reason=str(reason), error=error, error_code=code)]
        return [_final_output(request_id, index, requests[0], reason) for index in indices]

    def _complete(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, choice or beam because nothing is left to compute for it."""
        request.finish_reason = reason
        self._reservation.on_finished(request)
        self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason, *, is_external: bool = False) -> None:
        if request.status is RequestStatus.RUNNING:
            self._admission.on_departure()
        self.roster.finish(request, reason, is_external=is_external)
        if request.drafter is not None:
            begin = max(0, request.num_prompt_tokens - GRAM)
            self._outputs.get(request.scheduling).add(request.token_ids[begin:])
        if request.group_id not in self.roster.sequences:
            self.groups.pop(request.group_id, None)

    def _end_step(self) -> None:
        if self.roster.trace is not None:
            self.roster.trace.end_step(self.stats())


def _final_output(request_id: str, index: int, request: Request, reason: FinishReason) -> EngineCoreOutput:
    """Returns the last output of a choice that was aborted or missed a deadline."""
    output = EngineCoreOutput(
        request_id,
        finish_reason=str(reason),
        index=index,
        admitted_at=request.admitted_at,
        num_preemptions=request.num_preemptions,
    )
    _tell_drafts(output, request)
    return output


def _tell_drafts(output: EngineCoreOutput, request: Request) -> None:
    """Adds the counts of verified and accepted drafts to a choice's output, if it has drafts. Any output may
    be the choice's last, because the frontend looks for stop strings."""
    if request.drafter is not None:
        output.num_draft_tokens = request.drafter.num_tried
        output.num_accepted_drafts = request.drafter.num_accepted
