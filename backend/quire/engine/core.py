"""EngineCore: requests in, token deltas out, one step at a time.

Owned by one thread. It knows neither sockets nor text: `engine/loop.py` puts it into a process of its
own, `quire.LLM` runs it in the caller's.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quire.cache_commands import CacheCommand, Health, Inspect, Reset, Unpin
from quire.config import CacheConfig, EngineConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.kv_events import KVEventCollector
from quire.core.scheduler import Scheduler, session_name
from quire.core.trace import SchedulerTrace
from quire.engine.kv_event_publisher import KVEventPublisher
from quire.errors import EngineError, QuireError, describe
from quire.kv_groups import KVGroup
from quire.kv_tiers import BlockAccess, KVTiers, fingerprint, make_tiers, needs_fingerprint
from quire.multimodal import PromptEmbeds
from quire.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, SchedulerStats
from quire.request import FinishReason, Request
from quire.sampling_params import SamplingParams
from quire.scheduling_params import SchedulingParams
from quire.validation import check_choices, check_prompt, check_token_parameters

logger = logging.getLogger("quire")

LOAD_WAIT_S = 0.05
"""Longest wait for a KV tier before the engine looks for messages again, when there is nothing to compute."""


MAX_FAILED_STEPS = 5
"""Failed steps in a row that end the engine: whatever the reason is, it lasts, and a new process may help."""


class Runner(Protocol):
    """What the core needs of a model runner; tests bring their own."""

    num_blocks: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    kv_groups: tuple[KVGroup, ...]
    tiers: KVTiers | None
    """Set by the core."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...

    # With `async_scheduling` also launch(output) -> handle, collect(handle) -> ModelRunnerOutput, reset() and
    # warm_up(), as ModelRunner has them.


class EngineCore:
    """Scheduler and runner joined by `step`.

    Args:
        config: the engine's configuration.
        runner: computes the steps; None builds a `ModelRunner` from the configuration.
        vocab_size: token ids at or above it are refused; None takes the model's.
        threaded: steps are computed by a thread of their own, so that `step` can do something meanwhile.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | None = None,
        *,
        vocab_size: int | None = None,
        threaded: bool = False,
    ) -> None:
        if runner is None:
            from quire.worker.model_runner import ModelRunner

            model_runner = ModelRunner(config)
            runner, vocab_size = model_runner, model_runner.model_config.vocab_size
        assert vocab_size is not None, "a runner given from outside comes with its vocab_size"
        self.config = config
        self.runner: Runner = runner
        self.vocab_size = vocab_size
        self.max_model_len = runner.max_model_len
        self.is_async = is_async(config, str(getattr(runner, "device", "cpu")))
        cache, limits = config.cache, dataclasses.replace(config.scheduler, async_scheduling=self.is_async)
        self._publisher = _publisher(cache)
        self._events = None if self._publisher is None else KVEventCollector()
        self.kv = KVCacheManager(
            runner.num_blocks,
            cache.block_size,
            groups=runner.kv_groups,
            enable_prefix_caching=cache.enable_prefix_caching,
            eviction_policy=cache.eviction_policy,
            cache_ttl_s=cache.cache_ttl_s,
            max_pinned_fraction=cache.max_pinned_fraction,
            max_step_tokens=min(
                limits.max_prefill_tokens_per_request or limits.max_num_batched_tokens, self.max_model_len
            ),
            events=self._events,
        )
        access = getattr(runner, "kv_cache", None)
        self.tiers = None if access is None else _tiers(config, runner, access)
        runner.tiers = self.tiers
        self.scheduler = Scheduler(
            limits,
            self.kv,
            self.max_model_len,
            tiers=self.tiers,
            block_bytes=0 if access is None else access.block_bytes,
            session_ttl_s=cache.session_ttl_s,
        )
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()
        """Steps that a device computes, with what the runner collects them by."""
        self.num_finished_steps = 0
        """Since start, those that computed something."""
        self._num_failures = 0
        """Of the latest steps, in a row."""
        self._executor: ThreadPoolExecutor | None = None
        if threaded or limits.overlap_scheduling:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="quire-runner")
        self._seeds = itertools.count()
        self._seed_base = config.model.seed or secrets.randbits(63)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        scheduling: SchedulingParams = SchedulingParams(),
        external_id: str = "",
        embeds: PromptEmbeds | None = None,
    ) -> None:
        """Queues a request; it takes part in the next step if there is room.

        Raises:
            InvalidArgumentError: empty prompt, token id outside the vocabulary, prompt longer than
                max_model_len or (refused by the scheduler) than the KV cache can ever hold.
            UnavailableError: the queue is full.
        """
        check_prompt(prompt_token_ids, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        check_token_parameters(sampling_params, self.vocab_size)
        check_choices(sampling_params, self.config.scheduler.max_num_seqs)
        if sampling_params.seed is None and not sampling_params.is_greedy:
            seed = (self._seed_base + 0x9E3779B97F4A7C15 * next(self._seeds)) % 2**64
            sampling_params = msgspec.structs.replace(sampling_params, seed=seed)
        request = Request(
            request_id,
            prompt_token_ids,
            sampling_params,
            eos_token_ids=self.runner.eos_token_ids,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            scheduling=scheduling,
            external_id=external_id,
            embeds=embeds,
        )
        self.scheduler.add_request(request)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED
    ) -> list[EngineCoreOutput]:
        """Ends requests in whatever phase they are; their blocks are free on return."""
        return self.scheduler.abort(request_ids, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or self._is_broken

    @property
    def _is_broken(self) -> bool:
        return self._num_failures >= MAX_FAILED_STEPS

    def step(self, meanwhile: Callable[[Future[Any]], None] | None = None) -> list[EngineCoreOutput]:
        """Plans, computes and accounts one step; returns what it brought.

        Args:
            meanwhile: called while a thread of its own computes the step, with what tells when that is done;
                it may add and abort requests and look into the cache.

        An exception of the runner ends every request of the step with an error and leaves the engine
        able to go on: the rows are dropped from the runner with the next step.

        Raises:
            EngineError: MAX_FAILED_STEPS steps in a row have failed. It and any other exception mean that
                this engine is of no use any more; its requests are still open.
        """
        if self._is_broken:
            raise EngineError(f"the latest {self._num_failures} steps of the engine have all failed")
        outputs = self.scheduler.expire()
        planned = self.scheduler.schedule()
        if self.is_async:
            return outputs + self._step_ahead(planned, meanwhile)
        if not planned.has_work and not self.scheduler.transfers.num_loading:
            return outputs
        overlaps = self.config.scheduler.overlap_scheduling
        done = self._compute(partial(self.runner.execute, planned), meanwhile, plan_ahead=overlaps)
        try:
            result = done.result()
        except Exception as error:
            return outputs + self._fail(planned, error)
        outputs += self._update(planned, result)
        self._publish()
        return outputs

    def _step_ahead(
        self, planned: SchedulerOutput, meanwhile: Callable[[Future[Any]], None] | None
    ) -> list[EngineCoreOutput]:
        """Hands a step to the device, then waits for the one before it: the device never waits for a plan.

        Sampled tokens stay on the device, where the next step takes them from; the host learns of them one
        step later. What that costs: a request that ends has one more row, whose result is dropped, and one
        that arrives while two steps are under way waits for both.
        """
        runner: Any = self.runner
        outputs: list[EngineCoreOutput] = []
        if planned.has_work or self.scheduler.transfers.num_loading:
            try:
                self._in_flight.append((planned, runner.launch(planned)))
            except Exception as error:
                return self._fail(planned, error)
        # Two steps at most, and nothing is left waiting behind a plan that computes nothing.
        while self._in_flight and (len(self._in_flight) > 1 or planned.is_empty):
            step, handle = self._in_flight[0]
            done = self._compute(partial(runner.collect, handle), meanwhile)
            try:
                result = done.result()
            except Exception as error:
                return outputs + self._fail(planned, error)
            self._in_flight.popleft()
            outputs += self._update(step, result)
        self._publish()
        return outputs

    def _compute(
        self,
        work: Callable[[], Any],
        meanwhile: Callable[[Future[Any]], None] | None,
        *,
        plan_ahead: bool = False,
    ) -> Future[Any]:
        """Has `work` done, by the thread for that if there is one; returns when it is."""
        if self._executor is None:
            return _done(work)
        future = self._executor.submit(work)
        try:
            if plan_ahead:
                self.scheduler.plan_ahead()
            if meanwhile is not None:
                meanwhile(future)
        finally:
            # Whatever becomes of the plan, nothing may go on while the runner works.
            wait((future,))
        return future

    def _update(self, planned: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        if planned.is_empty:
            if self.tiers is not None and not result.loads_done:
                result.loads_done = self.tiers.poll(LOAD_WAIT_S)
        else:
            self._num_failures = 0
            self.num_finished_steps += 1
        return self.scheduler.update(planned, result)

    def _fail(self, planned: SchedulerOutput, error: Exception) -> list[EngineCoreOutput]:
        """The runner has failed, in this step or in one that it rests on."""
        self._num_failures += 1
        logger.error("step %d failed with %d rows", planned.step, len(planned.scheduled), exc_info=error)
        if self.is_async:
            self._in_flight.clear()
            runner: Any = self.runner
            runner.reset()
        message = f"the engine failed while computing the request: {describe(error)}"
        return self.scheduler.fail([row.request_id for row in planned.scheduled], message)

    def control(self, command: CacheCommand) -> dict[str, Any]:
        """Looks into the cache, or empties it; running requests are not disturbed.

        A healthy engine that has requests finishes steps: `num_finished_steps` moves.
        """
        match command:
            case Health():
                return {"has_work": self.has_work, "num_finished_steps": self.num_finished_steps}
            case Inspect():
                return self.scheduler.inspect()
        self._expire()
        match command:
            case Reset():
                answer = {"num_blocks": self.scheduler.reset_cache()}
            case Unpin(all=True):
                answer = {"num_pins": self.kv.unpin_all()}
            case Unpin():
                answer = {"num_pins": int(self.kv.unpin(session_name(command.tenant, command.session)))}
        self._publish()
        return answer

    def _publish(self) -> None:
        if self._events is not None and self._publisher is not None:
            batch = self._events.take()
            if batch is not None:
                self._publisher.publish(batch)

    def close(self) -> None:
        """Ends the threads; what the disk tier still has to write is written."""
        if self._executor is not None:
            self._executor.shutdown()
        if self.tiers is not None:
            self.tiers.close()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def trace(self) -> SchedulerTrace | None:
        return self.scheduler.trace

    def enable_trace(self, path: Path | None = None) -> SchedulerTrace:
        """Records every step from now on, in a file or (None) in memory."""
        return SchedulerTrace.attach(self.scheduler, self.config.cache, path)

    def warm_up(self) -> None:
        """Runs one prefill and one decode step, so that the first request does not pay for first use.

        On a device with graphs the decode steps of all sizes are recorded then.
        """
        self.add_request(
            "warm-up",
            [0],
            SamplingParams(max_tokens=2, ignore_eos=True),
            external_id="warm-up",
            scheduling=SchedulingParams(exempt=True),
        )
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise EngineError(f"the first step of the model failed: {output.error}")
        warm_up = getattr(self.runner, "warm_up", None)  # runners of tests have none
        if warm_up is not None:
            warm_up()

    def stats(self) -> SchedulerStats:
        self._expire()
        return self.scheduler.stats()

    def _expire(self) -> None:
        """Where nobody asks for a step nothing else looks at the clock."""
        self.kv.expire(self.scheduler.clock())


def is_async(config: EngineConfig, device: str) -> bool:
    """Whether steps are handed to the device one ahead: as configured, else on cuda."""
    wanted = config.scheduler.async_scheduling
    return device.startswith("cuda") if wanted is None else wanted


def _tiers(config: EngineConfig, runner: Any, access: BlockAccess) -> KVTiers | None:
    """What the configuration keeps beside the pool; a directory is shared only by what computes the same."""
    name = ""
    if needs_fingerprint(config.cache):
        groups = [[group.window, *group.layers] for group in runner.kv_groups]
        resolved = {"groups": groups, "block_bytes": access.block_bytes, **runner.kv_identity}
        name = fingerprint(config, resolved)
    return make_tiers(config.cache, access, name)


def _publisher(cache: CacheConfig) -> KVEventPublisher | None:
    if not cache.kv_events_endpoint:
        return None
    return KVEventPublisher(
        cache.kv_events_endpoint,
        cache.kv_events_replay_endpoint,
        cache.kv_events_topic,
        cache.kv_events_buffer,
    )


def error_output(request_id: str, error: QuireError) -> EngineCoreOutput:
    """The one final output of a request that never ran."""
    return EngineCoreOutput(
        request_id,
        finish_reason=FinishReason.ERROR.value,
        error=str(error),
        error_code=error.code,
        retry_after_s=error.retry_after_s,
    )


def _done(work: Callable[[], Any]) -> Future[Any]:
    """What came of `work`, done here and now."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
