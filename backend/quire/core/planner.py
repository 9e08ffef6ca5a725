"""Planner: which tokens of which requests a step computes."""

from __future__ import annotations

from contextlib import closing

from quire.config import SchedulerConfig
from quire.core.drafts import DraftBudget, Drafter
from quire.core.policies.batch import phases
from quire.core.policies.reservation import Reservation
from quire.core.prefix import CachedPrefix
from quire.core.probation import Probation
from quire.core.request import Request, RequestStatus
from quire.core.roster import Roster
from quire.core.step import Step
from quire.outputs import NewRequestData, ScheduledRequest

MAX_PASSED_OVER = 256
"""Number of waiting requests at which `Planner._add_waiting` stops. Those count that it passes over because
their prefix is being loaded or too many long prompts are under way."""


class Planner:
    """Gives running requests their rows in the order of ranks, then admits waiting requests. Under a queue
    policy that preempts, urgent waiting requests are admitted first.

    When the pool is exhausted, usually the running request of the largest rank is preempted. The freed blocks
    are for the running requests: after such a preemption, a step admits others only if it would have no rows
    otherwise.

    Args:
        max_model_len: most tokens of prompt and output together.
        computes_whole_prompts: whether a prompt must be computed in one step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        roster: Roster,
        reservation: Reservation,
        max_model_len: int,
        probation: Probation,
        drafts: DraftBudget,
        *,
        computes_whole_prompts: bool = False,
    ) -> None:
        self.num_recomputed_tokens = 0
        """Number of tokens since start that steps computed for requests which had given up these tokens'
        blocks, by a preemption or because a load or a step failed."""
        self.admission_blocked_by = ""
        """Latest known reason why no further request was admitted from the queue: "seats" (places in the
        batch), "blocks" (room in the KV cache, also after a preemption), "budget" (the step's tokens), or ""
        (another reason, or none was left)."""
        self._config = config
        self._roster = roster
        self._queue = roster.queue
        self._kv = roster.kv
        self._transfers = roster.transfers
        self._adapters = roster.adapters
        self._reservation = reservation
        self._max_model_len = max_model_len
        self._max_row_tokens = config.max_row_tokens
        self._probation = probation
        self._drafts = drafts
        self._computes_whole_prompts = computes_whole_prompts
        self._only: str | None = None
        """Id of the only request that may have rows, with all its choices; None: there is no such limit."""

    def plan(self, number: int, *, is_ahead: bool) -> Step:
        """Plans a step: chooses its rows and allocates their blocks.

        Args:
            number: the step's number.
            is_ahead: whether an earlier step is still in flight, whose end may free what this one lacks.
        """
        step, roster = Step(number, self._config.max_num_batched_tokens), self._roster
        self._kv.expire(roster.clock())
        if self._adapters is not None:
            self._adapters.begin_plan()
        only = self._probation.review() if self._probation else None
        if only is not None:
            if is_ahead and only != self._only:
                return step  # what is under way is of others, and comes to its end first
            self._only = only
            for other in [other for other in roster.running if not self._may_run(other)]:
                if other.load_id is None:
                    roster.preempt(other)
        self._only = only
        num_preemptions = roster.num_preemptions
        if self._only is None and self._queue.preempts and len(self._queue):
            self._admit_urgent(step)
        self._drafts.begin(len(roster.running))
        decodes, prefills, admits = phases(
            self._config.batch_policy, roster.running, len(self._queue), number
        )
        self._add_running(step, decodes=decodes, prefills=prefills)
        self.admission_blocked_by = ""
        if roster.num_preemptions != num_preemptions:
            self.admission_blocked_by = "blocks"
        elif admits:
            self._add_waiting(step)
        if not step.requests and not (decodes and prefills):
            self._add_running(step)
        if not step.requests and not is_ahead and not self._transfers.num_loading:
            self._add_stalled(step)
        return step

    def _add_running(self, step: Step, *, decodes: bool = True, prefills: bool = True) -> None:
        running, no_blocks, is_running = list(self._roster.running), self._kv.no_blocks, RequestStatus.RUNNING
        add_row, add_request = step.output.scheduled.append, step.requests.append
        add_newly_cached = step.newly_cached.append
        for index, request in enumerate(running):
            if step.budget == 0 or request.status is not is_running:
                break  # victims are those of the highest ranks: none behind this one runs either
            num_computed = request.num_computed_tokens
            count = len(request.token_ids) + request.num_pending_tokens - num_computed
            drafter = request.drafter
            if drafter is not None and request.num_pending_tokens and self._waits(step, request, drafter):
                continue  # once its newest tokens are known, more than one may follow in a step
            if count == 1 and num_computed < request.plain_decode_until:
                if decodes:  # nearly all rows: what the calls below would come to
                    row = ScheduledRequest(request.request_id, num_computed, 1, no_blocks, True)
                    if drafter is not None:
                        self._try_drafts(step, request, row, request.plain_decode_until)
                    add_row(row)
                    add_request(request)
                    add_newly_cached(())
                    step.budget -= row.num_scheduled_tokens
                    request.num_computed_tokens = num_computed + row.num_scheduled_tokens
                    request.num_pending_tokens += 1
                continue
            if count <= 0 or request.load_id is not None or not (prefills if count > 1 else decodes):
                continue
            if request.num_pending_tokens and self._needs_pending(request):
                continue
            if count > 1:
                count = min(count, self._max_row_tokens, step.budget)
            if count > 1 and decodes and not self._queue.preempts:
                # One of a smaller rank that was admitted later must not stall those that decode already.
                num_behind = sum(other.decodes for other in running[index + 1 :])
                count = min(count, step.budget - num_behind)
                if count <= 0:
                    continue
            if self._computes_whole_prompts and count < request.num_missing:
                continue  # the next step begins with it
            count = self._whole_spans(request, count)
            if not count:
                continue
            if count > 1:
                count = self._kv.align_row(request, count)
            block_ids = self._allocate_or_preempt(request, count)
            if block_ids is None:
                break
            self._add_row(step, request, count, block_ids)

    def _add_waiting(self, step: Step) -> None:
        """Admits waiting requests while there are seats, tokens and blocks."""
        roster, kv = self._roster, self._kv
        if not len(self._queue) or self._is_full(step):
            return
        num_passed_over = 0
        self._begin_reservation()
        with closing(self._queue.candidates(roster.clock())) as candidates:
            for request in candidates:
                if self._is_full(step):
                    break
                if request.is_paused or not self._may_run(request):
                    continue
                if request.num_pending_tokens:
                    break  # the runner has dropped it, and they are not known here yet
                if request.num_sequences > roster.num_free_seats:
                    self.admission_blocked_by = "seats"
                    break
                if not self._has_adapter(request):
                    continue  # costs next to nothing, and those behind it may run
                if self._computes_whole_prompts and request.num_missing > step.budget:
                    self.admission_blocked_by = "budget"
                    break
                prefix = self._transfers.find_prefix(request)
                if prefix is None or self._is_one_too_many(request, prefix):
                    num_passed_over += 1
                    if num_passed_over == MAX_PASSED_OVER:
                        break
                    continue
                saved = prefix.num_blocks - kv.num_taken(prefix)
                missing = kv.num_missing_blocks(request, request.num_tokens) - saved
                if missing > kv.num_free_blocks or not self._reservation.try_admit(request, saved):
                    self.admission_blocked_by = "blocks"
                    break
                self._roster.admit(request, prefix)
                if request.load_id is not None:
                    continue
                count = min(request.num_missing, self._max_row_tokens, step.budget)
                count = self._whole_spans(request, count)
                if not count:
                    continue  # it runs, and has a row once a step has room for it
                count = kv.align_row(request, count)
                block_ids = kv.allocate_slots(request, count)
                assert block_ids is not None, f"{request} was admitted without room for it"
                self._add_row(step, request, count, block_ids)

    @staticmethod
    def _whole_spans(request: Request, count: int) -> int:
        """Returns how many of the request's next `count` tokens a row may have so that it cuts no joint span
        (`PromptEmbeds.is_joint`); 0: the request must wait for a step with more room."""
        begin = request.num_computed_tokens
        return count if request.embeds is None else request.embeds.last_cut(begin, begin + count) - begin

    def _is_full(self, step: Step) -> bool:
        """Returns whether the step can take no further request; if so, sets `admission_blocked_by`."""
        has_seats = self._roster.num_free_seats > 0
        if has_seats and step.budget > 0:
            return False
        self.admission_blocked_by = "budget" if has_seats else "seats"
        return True

    def _add_stalled(self, step: Step) -> None:
        """Preempts requests or releases pins so that a waiting request can run. Called when the step has no
        rows."""
        roster = self._roster
        while not step.requests and len(self._queue) and not self._transfers.num_loading:
            if self._adapters is not None and self._adapters.is_reading:
                break
            if roster.running:
                roster.preempt(roster.running[-1])  # of those that wait for others to be computed
            elif not self._kv.pins.release_oldest():
                break
            self._add_waiting(step)

    def _admit_urgent(self, step: Step) -> None:
        """Admits waiting requests of more urgent classes, which may preempt running ones of less urgent
        classes."""
        while (found := self._next_urgent()) is not None:
            request, prefix, victims = found
            for victim in victims:
                if self._fits(request, prefix):
                    break
                self._roster.preempt(victim)
                prefix = self._transfers.find_prefix(request) or prefix
            if not self._fits(request, prefix):
                return
            self._roster.admit(request, prefix)

    def _next_urgent(self) -> tuple[Request, CachedPrefix, list[Request]] | None:
        """Looks for a waiting request that may preempt running ones. Returns it, its cached prefix, and these
        running requests, the last in rank first. None: there is none ahead of a request that must not be
        passed over."""
        with closing(self._queue.candidates(self._roster.clock())) as candidates:
            for request in candidates:
                if request.is_paused or not self._has_adapter(request):
                    continue
                if request.num_pending_tokens:
                    return None
                victims = [
                    other
                    for other in reversed(self._roster.running)
                    if other.load_id is None and self._queue.may_preempt(request, other)
                ]
                if not victims:
                    return None
                prefix = self._transfers.find_prefix(request)
                if prefix is not None:
                    return request, prefix, victims
        return None

    def _fits(self, request: Request, prefix: CachedPrefix) -> bool:
        if request.num_sequences > self._roster.num_free_seats:
            return False
        self._begin_reservation()
        return self._reservation.try_admit(request, prefix.num_blocks - self._kv.num_taken(prefix))

    def _may_run(self, request: Request) -> bool:
        return self._only is None or request.group_id == self._only

    def _has_adapter(self, request: Request) -> bool:
        """Returns whether a waiting request needs no adapter slot, or may have one now."""
        adapter = request.adapter
        if adapter is None or self._adapters is None:
            return adapter is None
        # Beams that run keep the slot until one that was preempted has caught up, whomever it is promised to.
        searches = request.sampling_params.beam_width > 1
        beams = self._roster.sequences[request.group_id].values() if searches else ()
        return any(beam.status is RequestStatus.RUNNING for beam in beams) or self._adapters.may_run(adapter)

    def _begin_reservation(self) -> None:
        kv = self._kv
        self._reservation.begin(
            self._roster.running, kv.num_free_blocks, kv.num_missing_blocks, kv.num_held_blocks
        )

    def _is_one_too_many(self, request: Request, prefix: CachedPrefix) -> bool:
        """Returns whether the limit on long prompts computed at the same time keeps this request out."""
        most, budget = self._config.max_long_prefills, self._config.max_num_batched_tokens
        if most is None or request.num_tokens - prefix.num_tokens <= budget:
            return False
        under_way = sum(
            other.num_prompt_tokens > budget and other.num_computed_tokens < other.num_prompt_tokens
            for other in self._roster.running
        )
        return under_way >= most

    def _needs_pending(self, request: Request) -> bool:
        """Returns whether a request with pending tokens must wait for them before its next row. This is so if
        they are its last by its length limit, if beam search must choose, or if choices have yet to fork from
        blocks or states that the row would free or change."""
        if request.sampling_params.beam_width > 1:
            return True
        if request.num_sequences > 1 and (request.num_pending_tokens > 1 or self._kv.num_state_groups):
            return True
        num_output = request.num_output_tokens + request.num_pending_tokens
        return num_output >= request.max_output_tokens(self._max_model_len)

    def _allocate_or_preempt(self, request: Request, count: int) -> list[list[int]] | None:
        """Allocates slots for a running request, and returns the result of `allocate_slots`. While there is
        no room, releases a pin if there is one and all that runs belongs to one request, else preempts the
        request that is last in rank. None: the request was itself preempted, as the last in rank, or must
        wait because the last in rank is loading blocks."""
        running = self._roster.running
        while (block_ids := self._kv.allocate_slots(request, count)) is None:
            victim = running[-1]
            if victim.load_id is not None:
                return None  # its blocks are being written: this request waits until that has ended
            alone = all(other.group_id == victim.group_id for other in running)
            if alone and self._kv.pins.release_oldest():
                continue
            self._roster.preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _add_row(self, step: Step, request: Request, count: int, block_ids: list[list[int]]) -> None:
        new = None
        if not request.in_runner:
            request.in_runner = True
            block_ids = self._kv.block_ids(request)
            slot = -1
            if request.adapter is not None and self._adapters is not None:
                slot = self._adapters.slot_of(request.adapter)
            new = NewRequestData(
                list(request.token_ids),  # a copy: the runner appends what it samples by itself
                request.num_prompt_tokens,
                request.sampling_params,
                request.eos_token_ids,
                request.embeds,
                slot=slot,
                num_choices=1 if request.sampling_params.beam_width > 1 else request.num_sequences,
                num_prompt_logprobs=(
                    request.num_prompt_tokens
                    if request.prompt_logprobs is None
                    else len(request.prompt_logprobs)
                ),
            )
            request.num_forced_tokens = 0
        num_computed = request.num_computed_tokens
        end = num_computed + count
        samples = end == len(request.token_ids) + request.num_pending_tokens
        row = ScheduledRequest(request.request_id, num_computed, count, block_ids, samples, new)
        if request.num_forced_tokens:
            row.given_token_ids = request.token_ids[-request.num_forced_tokens :]
            request.num_forced_tokens = 0
        if num_computed < request.num_computed_before_preemption:
            self.num_recomputed_tokens += min(count, request.num_computed_before_preemption - num_computed)
        if count > 1 or num_computed < request.num_prompt_tokens:
            step.num_prefill_tokens += count
        elif samples and request.drafter is not None:
            self._try_drafts(step, request, row, self._kv.num_slots(request))
            end = num_computed + row.num_scheduled_tokens
        request.num_computed_tokens = end
        if samples:
            request.num_pending_tokens += 1
        step.add(row, request, self._kv.cache_blocks(request))
        request.plain_decode_until = self._plain_decode_until(request)

    def _try_drafts(self, step: Step, request: Request, row: ScheduledRequest, num_slots: int) -> None:
        """Adds drafts to a one-token row if they are worth it. They get no new blocks: with them the request
        has at most `num_slots` tokens, for which it has blocks."""
        drafter = request.drafter
        assert drafter is not None, request
        chance, most = drafter.next()
        if request.num_pending_tokens or not most or row.new is not None:
            return
        most = min(most, self._most_drafts(step, request, num_slots))
        count = self._drafts.allocate(chance, most)
        if count > 0:
            row.num_drafts = count
            if not drafter.uses_model:
                row.draft_token_ids = drafter.guess[:count]
            row.num_scheduled_tokens += count

    def _most_drafts(self, step: Step, request: Request, num_slots: int) -> int:
        """Returns the most drafts for the request's next one-token row, if its blocks have slots for
        `num_slots` tokens; below 1: none."""
        end = request.num_prompt_tokens + request.max_output_tokens(self._max_model_len)
        # What is drawn behind the last of them is the request's last token at most.
        most = min(num_slots, end - 1) - request.num_computed_tokens - 1
        return min(most, step.budget - len(self._roster.running))

    def _waits(self, step: Step, request: Request, drafter: Drafter) -> bool:
        """Returns whether a request gains by waiting for its newest tokens before its next row, although the
        row could run without them."""
        num_slots, num_computed = request.plain_decode_until, request.num_computed_tokens
        if num_computed >= num_slots:
            num_slots = (num_computed // self._kv.block_size + 1) * self._kv.block_size
        return self._most_drafts(step, request, num_slots) > 0 and self._drafts.is_worth_waiting(drafter)

    def _plain_decode_until(self, request: Request) -> int:
        """Returns a number of computed tokens up to which one-token rows need no block and sample no token
        beyond the length limit; see `Request.plain_decode_until`."""
        # None of them is computed a second time: with one token missing, all that once were are again.
        num_prompt_tokens = request.num_prompt_tokens
        if request.num_computed_tokens < num_prompt_tokens:
            return 0  # counts as prefill
        if request.num_sequences > 1:
            return 0  # choices are still to fork: see `_needs_pending`
        if request.sampling_params.beam_width > 1:
            return 0  # the runner must be told the tokens
        end = num_prompt_tokens + request.max_output_tokens(self._max_model_len)
        return min(end - 1, self._kv.plain_decode_until(request))
