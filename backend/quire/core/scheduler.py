"""Scheduler: which tokens of which requests the next step computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.config import SchedulerConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.trace import SchedulerTrace
from quire.errors import EngineError, InvalidArgumentError, UnavailableError
from quire.outputs import (
    EngineCoreOutput,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
)
from quire.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Continuous batching by one rule: `num_computed_tokens` of each request catches up with its
    `num_tokens` under the token budget of a step. Prefill, chunks of it, decode and the recomputation after a
    preemption are all that rule.

    The running requests followed by the waiting ones are in order of arrival at all times: requests are
    admitted from the head of the queue only, the youngest running one is the victim of a preemption, and
    it returns to the head. From this follows
    - no livelock: the oldest request takes blocks from all others and none takes them from it, and alone it
      always fits, because `max_model_len` is cut to what the pool holds;
    - no starvation: each request becomes the oldest;
    - a decoding request is in every step: a request joins only a step whose budget has satisfied all older
      ones, and what those want of a step never grows.

    The protocol is schedule(), execution by a runner, update(), and again; add_request() and abort() may come
    at any point between. If the execution fails, fail() takes the place of update(). One thread owns
    the scheduler; nothing here locks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        trace: SchedulerTrace | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = min(max_model_len, kv.capacity + 1)
        """Most tokens of prompt and output together. The newest token of a sequence is not in the cache yet,
        so one more than the pool holds is possible; there a request ends with LENGTH."""
        self.trace = trace
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self._max_row_tokens = config.max_prefill_tokens_per_request or config.max_num_batched_tokens
        self._requests: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._num_waiting_tokens = 0
        self._by_external_id: dict[str, dict[str, None]] = {}
        self._dropped: list[str] = []
        self._step = 0
        self._in_flight: list[Request] = []  # of the rows of the step that is being executed

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that is accepted: it leaves room for one token of output."""
        return self.max_model_len - 1

    def add_request(self, request: Request) -> None:
        """Queues a new request.

        Raises:
            InvalidArgumentError: its prompt can never be computed here.
            UnavailableError: the queue is full; names the limit.
        """
        assert request.status is RequestStatus.WAITING, request
        assert request.request_id not in self._requests, f"request id {request.request_id} is in use"
        config = self.config
        if request.num_prompt_tokens > self.max_prompt_tokens:
            raise InvalidArgumentError(
                "prompt",
                f"{request.num_prompt_tokens} tokens, at most {self.max_prompt_tokens} are allowed "
                f"(max_model_len {self.max_model_len}, KV cache of {self.kv.capacity} tokens)",
            )
        if len(self._waiting) >= config.max_waiting_requests:
            raise UnavailableError(
                f"queue full: {len(self._waiting)} requests wait (max_waiting_requests "
                f"{config.max_waiting_requests})"
            )
        if self._num_waiting_tokens + request.num_tokens > config.max_waiting_tokens:
            raise UnavailableError(
                f"queue full: {self._num_waiting_tokens} tokens wait, {request.num_tokens} more exceed "
                f"the limit (max_waiting_tokens {config.max_waiting_tokens})"
            )
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request
        self._num_waiting_tokens += request.num_tokens
        if request.external_id:
            self._by_external_id.setdefault(request.external_id, {})[request.request_id] = None
        if self.trace is not None:
            self.trace.on_arrival(request)

    def schedule(self) -> SchedulerOutput:
        """Plans the next step: running requests first, oldest first, then the queue in order of arrival.

        The plan is empty only if there is no unfinished request.
        """
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        in_flight: list[Request] = []
        num_preemptions = self.num_preemptions
        for request in list(self._running.values()):
            if budget == 0 or request.status is not RequestStatus.RUNNING:
                break  # the victims of a preemption are the youngest: none after this one runs either
            count = min(request.num_tokens - request.num_computed_tokens, self._max_row_tokens, budget)
            block_ids = self._allocate_or_preempt(request, count)
            if block_ids is None:
                break
            scheduled.append(self._row(request, count, block_ids))
            in_flight.append(request)
            budget -= count

        # What victims gave back is for those they gave way to: nobody is admitted in such a step.
        num_seats = self.config.max_num_seqs - len(self._running)
        if num_seats > 0 and budget > 0 and self._waiting and self.num_preemptions == num_preemptions:
            num_available = self.kv.num_free_blocks - self._num_wanted_blocks()
            while num_seats > 0 and budget > 0 and self._waiting:
                request = next(iter(self._waiting.values()))
                num_wanted = self.kv.num_blocks_for(min(request.num_tokens + 1, self.kv.capacity))
                cached = self.kv.cached_prefix(request)
                num_wanted -= len(cached) - self.kv.num_unreferenced(cached)
                if num_wanted > num_available:
                    break
                num_available -= num_wanted
                self.kv.share(request, cached)
                count = min(request.num_tokens - request.num_computed_tokens, self._max_row_tokens, budget)
                new_block_ids = self.kv.allocate_slots(request, count)
                assert new_block_ids is not None, f"{request} was admitted without room for it"
                block_ids = cached + new_block_ids
                self._admit(request)
                scheduled.append(self._row(request, count, block_ids, is_new=True))
                in_flight.append(request)
                budget -= count
                num_seats -= 1

        self._step += 1
        num_tokens = self.config.max_num_batched_tokens - budget
        self.num_scheduled_tokens += num_tokens
        output = SchedulerOutput(self._step, scheduled, self._dropped, num_tokens)
        self._dropped, self._in_flight = [], in_flight
        if self.trace is not None:
            self.trace.begin_step(output)
        return output

    def update(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Takes in what the runner computed in the step planned last.

        Returns:
            One entry per sampled token, and per row that failed alone. Requests that end here hold no blocks
            any more; what was computed for requests aborted since schedule() is ignored.
        """
        assert scheduler_output.step == self._step, (scheduler_output.step, self._step)
        rows, requests, self._in_flight = scheduler_output.scheduled, self._in_flight, []
        outputs: list[EngineCoreOutput] = []
        for row, request in zip(rows, requests, strict=True):
            if request.is_finished:
                continue
            if row.request_id in runner_output.errors:
                outputs += self._end(
                    [row.request_id], FinishReason.ERROR, runner_output.errors[row.request_id]
                )
                continue
            num_computed = request.num_computed_tokens
            request.num_computed_tokens += row.num_scheduled_tokens
            self.kv.keep_computed(request, num_computed)
            if not row.samples:
                continue
            token_id = runner_output.sampled_token_ids[row.request_id]
            request.append_output(token_id)
            output = EngineCoreOutput(row.request_id, [token_id])
            if row.request_id in runner_output.logprobs:
                output.logprobs = [runner_output.logprobs[row.request_id]]
            if request.check_stop(self.max_model_len):
                assert request.finish_reason is not None
                self._finish(request, request.finish_reason)
                output.finish_reason = str(request.finish_reason)
                output.stop_reason = request.stop_reason
            outputs.append(output)
        self._end_step()
        return outputs

    def abort(self, request_ids: Iterable[str], reason: FinishReason) -> list[EngineCoreOutput]:
        """Ends requests wherever they are and frees their blocks at once.

        Returns:
            The last output of each; ids that are unknown or have finished already are skipped, since an
            abort and the end of a request may cross.
        """
        return self._end(request_ids, reason)

    def fail(
        self, request_ids: Iterable[str], error: str, error_code: str = EngineError.code
    ) -> list[EngineCoreOutput]:
        """Takes the place of update() when a step failed: ends its requests, as abort() does, with `error`.

        Args:
            request_ids: at least those of the rows of the step; how far these were computed is unknown.
        """
        outputs = self._end(request_ids, FinishReason.ERROR, error, error_code)
        assert all(request.is_finished for request in self._in_flight), self._in_flight
        self._in_flight = []
        self._end_step()
        return outputs

    def fail_all(self, error: str, error_code: str = EngineError.code) -> list[EngineCoreOutput]:
        """Ends every request, running or not: the engine cannot go on."""
        return self.fail(list(self._requests), error, error_code)

    def find(self, external_id: str) -> list[str]:
        """Ids of the unfinished requests that their client gave this id, oldest first."""
        return list(self._by_external_id.get(external_id, ()))

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._num_waiting_tokens,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free_blocks,
            num_preemptions=self.num_preemptions,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_cached_tokens=self.kv.num_cached_tokens,
            num_cached_blocks=self.kv.pool.num_cached,
        )

    def check_integrity(self) -> None:
        """Asserts what must hold between any two calls; O(requests + blocks), for tests."""
        self.kv.check_integrity(self._running.values())
        assert self._requests == {**self._running, **self._waiting}
        assert all(request.status is RequestStatus.RUNNING for request in self._running.values())
        for request in self._waiting.values():
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), request
            assert request.num_computed_tokens == 0, request
        assert self._num_waiting_tokens == sum(request.num_tokens for request in self._waiting.values())
        assert len(self._running) <= self.config.max_num_seqs
        external = {(r.external_id, r.request_id) for r in self._requests.values() if r.external_id}
        assert external == {(key, value) for key, ids in self._by_external_id.items() for value in ids}

    def _allocate_or_preempt(self, request: Request, count: int) -> list[int] | None:
        """Slots for a running request; None if it had to give way itself, being the youngest."""
        while (block_ids := self.kv.allocate_slots(request, count)) is None:
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is request:
                return None
        return block_ids

    def _num_wanted_blocks(self) -> int:
        """Blocks the running requests lack for the tokens they know and one more.

        Admitting against the pool less these keeps a long prompt, which takes its blocks chunk by chunk,
        from being preempted half way by one that was let in behind it.
        """
        missing = self.kv.num_missing_blocks
        return sum(missing(request, request.num_tokens + 1) for request in self._running.values())

    def _admit(self, request: Request) -> None:
        del self._waiting[request.request_id]
        self._num_waiting_tokens -= request.num_tokens
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request

    def _preempt(self, request: Request) -> None:
        self.kv.free(request)
        del self._running[request.request_id]
        self._dropped.append(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self._num_waiting_tokens += request.num_tokens
        self.num_preemptions += 1
        if self.trace is not None:
            self.trace.on_preemption(request)

    def _end(
        self,
        request_ids: Iterable[str],
        reason: FinishReason,
        error: str | None = None,
        error_code: str = EngineError.code,
    ) -> list[EngineCoreOutput]:
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._finish(request, reason)
            output = EngineCoreOutput(request_id, finish_reason=str(reason))
            if error is not None:
                output.error, output.error_code = error, error_code
            outputs.append(output)
        return outputs

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            self.kv.free(request)
            del self._running[request_id]
            self._dropped.append(request_id)
        else:
            del self._waiting[request_id]
            self._num_waiting_tokens -= request.num_tokens
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        del self._requests[request_id]
        if request.external_id:
            same = self._by_external_id[request.external_id]
            del same[request_id]
            if not same:
                del self._by_external_id[request.external_id]
        if self.trace is not None:
            self.trace.on_finish(request, reason)

    def _end_step(self) -> None:
        if self.trace is not None:
            self.trace.end_step(self.stats())

    @staticmethod
    def _row(request: Request, count: int, block_ids: list[int], *, is_new: bool = False) -> ScheduledRequest:
        new = None
        if is_new:
            new = NewRequestData(
                list(request.token_ids),  # a copy: the runner appends what it samples by itself
                request.num_prompt_tokens,
                request.sampling_params,
                request.eos_token_ids,
                request.embeds,
            )
        num_computed = request.num_computed_tokens
        samples = num_computed + count == request.num_tokens
        return ScheduledRequest(request.request_id, num_computed, count, block_ids, samples, new)
