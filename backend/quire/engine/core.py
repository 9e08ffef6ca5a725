"""EngineCore: accepts requests and returns token deltas, one step at a time.

One thread owns it. It knows neither frontends nor text: `engine/loop.py` runs it in a process of its own,
`quire.LLM` in the caller's process.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.adapters import SavedAdapters
from quire.config import EngineConfig, KVEventsConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.kv_events import KVEventCollector
from quire.core.request import FinishReason, Request
from quire.core.request_list import list_requests
from quire.core.roster import session_name
from quire.core.scheduler import Scheduler
from quire.core.trace import SchedulerTrace
from quire.engine.adapter_registry import AdapterRegistry
from quire.engine.cache_commands import (
    Adapters,
    CacheCommand,
    Health,
    Inspect,
    Requests,
    Reset,
    Sleep,
    Unpin,
)
from quire.engine.executor import Executor, Runner, RunnerExecutor
from quire.engine.kv_event_publisher import KVEventPublisher
from quire.engine.step_observer import StepObserver
from quire.errors import (
    EngineError,
    QuireError,
    UnavailableError,
    WorkerLostError,
    describe,
)
from quire.kv_tiers import KVTiers, fingerprint, make_tiers, needs_fingerprint
from quire.outputs import EngineCoreOutput, ModelRunnerOutput, RunnerInfo, SchedulerOutput, SchedulerStats
from quire.request.multimodal import PromptEmbeds
from quire.request.sampling_params import PoolingParams, SamplingParams
from quire.request.scheduling_params import SchedulingParams
from quire.request.validation import (
    as_pooling,
    check_choices,
    check_generates,
    check_logits_processors,
    check_prompt,
    check_prompt_logprobs,
    check_token_parameters,
)
from quire_common.host_memory import resident_bytes

logger = logging.getLogger("quire")

LOAD_WAIT_S = 0.05
"""Most seconds that an engine with nothing to compute waits for a KV tier before it looks for messages
again."""


PROBE_ID = "probe"
"""Id of the request of its own that an idle engine computes for a health check."""
ASLEEP = 'the engine is asleep: cache_control {"command": "wake"} wakes it'
MAX_FAILED_STEPS = 5
"""Number of failures in a row, without a computed step between, after which the engine gives up: the cause
persists, and a new process may help. Steps that fail together count once."""


class EngineCore:
    """Joins the scheduler and the executor by `step`.

    Args:
        config: the engine's configuration.
        executor: computes the steps; None: one is made from the configuration.
        saved: the adapters of a dead engine that this one replaces; None: there was none.

    Raises:
        QuireError: the engine cannot start; says why.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor | None = None, saved: SavedAdapters | None = None
    ) -> None:
        executor = make_executor(config) if executor is None else executor
        self.executor = executor
        self.info = info = executor.info
        # Typed Any: with states, it may be a number that a configuration file cannot have.
        chosen: Any = info.block_size or config.cache.tokens_per_block
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, block_size=chosen))
        self.config = config
        cache, limits = config.cache, config.scheduler
        self._publisher = _publisher(cache.kv_events)
        self._events = None if self._publisher is None else KVEventCollector()
        self.kv = KVCacheManager(
            info.num_blocks,
            chosen,
            groups=info.kv_groups,
            enable_prefix_caching=cache.enable_prefix_caching and not info.pooling.is_encoder,
            cache_ttl_s=cache.cache_ttl_s,
            max_pinned_fraction=cache.max_pinned_fraction,
            max_step_tokens=min(limits.max_row_tokens, info.max_model_len),
            events=self._events,
        )
        self.fingerprint = _fingerprint(config, info, executor.kv_cache.block_bytes)
        """Fingerprint by which other engines know whether they would compute the same blocks
        (`kv_tiers/fingerprint.py`); empty: it is not needed."""
        self.tiers = make_tiers(cache, executor.kv_cache, self.fingerprint)
        executor.attach(self.tiers)
        self.adapters = AdapterRegistry(config.adapters, info, saved)
        self.scheduler = Scheduler(
            # As it is, for traces: whether steps are launched ahead may be left to the device.
            dataclasses.replace(limits, async_scheduling=executor.depth > 1),
            self.kv,
            info.max_model_len,
            tiers=self.tiers,
            block_bytes=executor.kv_cache.block_bytes,
            session_ttl_s=cache.session_ttl_s,
            adapters=self.adapters.slots,
            has_draft_model=bool(config.model.draft_model),
            computes_whole_prompts=info.pooling.is_encoder,
        )
        self.adapters.requests = self.scheduler.roster.requests
        self._in_flight: deque[SchedulerOutput] = deque()
        """Steps that were launched and not collected, the oldest first."""
        self.num_finished_steps = 0
        """Number of steps since start that computed something."""
        self.observer = StepObserver(self.scheduler, info)
        self._num_failures = 0
        """Number of failures since the latest step that was computed; steps that fail together count once."""
        self._rest = ""
        """Why requests are refused: the engine is asleep, or about to sleep; empty: it is awake."""
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
        num_deaths: int = 0,
        outputs: dict[int, list[int]] | None = None,
        adapter: str = "",
        adapter_digest: str = "",
    ) -> None:
        """Queues a request; it may take part in the next step that is planned, if there is room.

        Args:
            num_deaths: number of deaths of its engines, as in `AddRequest`. Above 0 the request continues,
                and no limit of the queue refuses it.
            outputs: tokens so far of each open choice, by its index; None: the request begins, or begins
                anew.
            adapter: name of the LoRA adapter; empty: none.
            adapter_digest: hexadecimal digest of the adapter's content that a continued request needs; empty:
                any.

        Raises:
            InvalidArgumentError: the request is wrong or can never be computed here. For example, there is no
                adapter of that name and content (field `lora_name`), the prompt is empty or longer than
                max_model_len or the KV cache allow, a token id is outside the vocabulary, the id is in use,
                or the model or the configuration does not allow a parameter.
            UnavailableError: the queue is full, a quota is used up, the predicted wait is too long, the
                adapter is being unloaded, or the engine is asleep or about to sleep. An engine that is only
                about to sleep accepts continued requests, because whoever asked for sleep could not know of
                them.
        """
        if self.is_asleep or (self._rest and not num_deaths):
            raise UnavailableError(self._rest)
        is_pooled, pooling = sampling_params.dimensions > 0, self.info.pooling
        for output in [[]] if outputs is None else outputs.values():
            check_prompt(
                prompt_token_ids + output,
                vocab_size=self.info.vocab_size,
                max_model_len=self.info.max_model_len,
                is_pooled=is_pooled,
            )
        found = self.adapters.get(adapter, adapter_digest if num_deaths else "") if adapter else None
        if is_pooled:
            sampling_params = as_pooling(sampling_params, pooling, self.info.hidden_size)
        else:
            check_generates(pooling)
        check_token_parameters(sampling_params, self.info.vocab_size)
        check_prompt_logprobs(sampling_params, len(prompt_token_ids))
        check_logits_processors(sampling_params, self.config.model.logits_processors)
        check_choices(sampling_params, self.config.scheduler.max_num_seqs)
        if sampling_params.seed is None and not sampling_params.is_greedy:
            seed = (self._seed_base + 0x9E3779B97F4A7C15 * next(self._seeds)) % 2**64
            sampling_params = msgspec.structs.replace(sampling_params, seed=seed)
        request = Request(
            request_id,
            prompt_token_ids,
            sampling_params,
            eos_token_ids=self.info.eos_token_ids,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            scheduling=scheduling,
            external_id=external_id,
            embeds=embeds,
            reuses_prefix=not (is_pooled and pooling.mode != "last"),
            adapter=found,
        )
        request.num_deaths = num_deaths
        self.scheduler.add_request(request, outputs)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED
    ) -> list[EngineCoreOutput]:
        """Ends requests in any state, and returns their last outputs. Their blocks are released on return,
        except blocks that a KV tier is still loading."""
        return self.scheduler.abort(request_ids, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight) or self._is_broken or self.adapters.has_news

    @property
    def _is_broken(self) -> bool:
        return self._num_failures >= MAX_FAILED_STEPS

    def step(self, meanwhile: Callable[[Future[Any]], None] | None = None) -> list[EngineCoreOutput]:
        """Plans a step, and launches it if there is work for the runner. Once `executor.depth` steps are in
        flight, processes the oldest of them; after a plan without rows, all of them. Returns their outputs,
        and the last outputs of requests whose deadlines have passed or whose adapters cannot be read.

        Args:
            meanwhile: called while another thread computes, with the future of its work. It may add and abort
                requests and inspect the cache.

        If the executor allows several steps in flight, a new one is launched before the oldest is waited for.
        Sampled tokens then stay on the device for the next step, and the host learns of them later. So a
        request that ends by a stop token may have a row too many, whose result is dropped, and a new request
        waits for all steps in flight.

        An exception of the runner, other than WorkerLostError, ends every request in the steps in flight with
        an error. The engine can continue: the next step drops their rows from the runner. A KeyboardInterrupt
        while a step is computed ends these requests, too, and is raised again.

        Raises:
            WorkerLostError: a worker process has ended.
            EngineError: there were MAX_FAILED_STEPS failures in a row. After this or any other `Exception`
                the engine is unusable; its requests are still open.
        """
        if self._is_broken:
            raise EngineError(f"the latest {self._num_failures} steps of the engine have all failed")
        observer = self.observer
        observer.begin()
        outputs = self.scheduler.expire()
        if self.adapters.has_news:
            for adapter, error in self.adapters.poll():
                outputs += self.scheduler.end_waiting(adapter, error)
        planned = self.scheduler.schedule()
        observer.planned(planned)
        if planned.has_work or self.scheduler.transfers.num_loading:
            self.executor.launch(planned)
            self._in_flight.append(planned)
        elif not self._in_flight:
            self.adapters.wait()  # if anything waits for them there is nothing else to do
        # Nothing is left waiting behind a plan that computes nothing.
        while self._in_flight and (len(self._in_flight) >= self.executor.depth or planned.is_empty):
            try:
                result = self._collect(meanwhile)
            except WorkerLostError:
                raise
            except BaseException as error:
                failed = self._fail(error)
                if not isinstance(error, Exception):
                    raise  # an interrupt; what was under way must not be taken for what comes next
                return outputs + failed
            oldest = self._in_flight.popleft()
            observer.collected(oldest)
            outputs += self._update(oldest, result)
            observer.updated(oldest, result)
        self._publish()
        observer.end()
        return outputs

    def _collect(self, meanwhile: Callable[[Future[Any]], None] | None) -> ModelRunnerOutput:
        """Returns the oldest step's result; raises the error of that step, or of one launched behind it."""
        done = self.executor.collect()
        if not done.done():
            try:
                if meanwhile is not None:
                    meanwhile(done)
            finally:
                # Whatever becomes of the rest, nothing may go on while a step is computed.
                wait((done,))
        return done.result()

    def _update(self, planned: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        if planned.is_empty:
            if self.tiers is not None and not result.loads_done:
                result.loads_done = self.tiers.poll(LOAD_WAIT_S)
        else:
            self._num_failures = 0
            self.num_finished_steps += 1
        return self.scheduler.update(planned, result)

    def _fail(self, error: BaseException) -> list[EngineCoreOutput]:
        """Fails all steps in flight, since each depends on earlier ones; returns the last outputs of their
        requests."""
        self._num_failures += 1
        steps, oldest = len(self._in_flight), self._in_flight[0]
        request_ids = [row.request_id for row in oldest.scheduled]
        logger.error(
            "step %d failed with %d rows (%d steps in flight)",
            oldest.step, len(oldest.scheduled), steps, exc_info=error,
            extra={"request_id": " ".join(request_ids)},
        )  # fmt: skip
        self._in_flight.clear()
        self.executor.reset()
        message = f"the engine failed while computing the request: {describe(error)}"
        return self.scheduler.fail(message)

    def control(self, command: CacheCommand) -> dict[str, Any]:
        """Executes a command that inspects the engine, empties the cache or releases pins; running requests
        go on. `Sleep` and `Wake` are handled by `begin_sleep`, `sleep` and `wake`. `Profile` is handled by
        `StepObserver.begin_profile`, commands that change adapters by `AdapterRegistry.begin`.

        In a healthy engine with requests, `num_finished_steps` keeps increasing.
        """
        match command:
            case Health():
                return {
                    "has_work": self.has_work,
                    "num_finished_steps": self.num_finished_steps,
                    "is_asleep": self.is_asleep,
                }
            case Inspect():
                return self.scheduler.inspect()
            case Adapters():
                return {
                    "max_loras": self.config.adapters.max_loras,
                    "max_model_len": self.info.max_model_len,
                    "adapters": msgspec.to_builtins(self.adapters.listing()),
                }
            case Requests():
                return list_requests(self.scheduler.roster, None if command.all else command.tenant)
        self._expire()
        match command:
            case Reset():
                answer = {"num_blocks": self.scheduler.reset_cache()}
            case Unpin(all=True):
                answer = {"num_pins": self.kv.pins.release_all()}
            case Unpin():
                answer = {
                    "num_pins": int(self.kv.pins.release(session_name(command.tenant, command.session)))
                }
        self._publish()
        return answer

    @property
    def is_asleep(self) -> bool:
        return self._rest == ASLEEP

    @property
    def is_resting(self) -> bool:
        """Whether new requests are refused because the engine is asleep or about to sleep."""
        return bool(self._rest)

    def begin_sleep(self, command: Sleep) -> None:
        """Refuses requests from now on. The caller calls `sleep` when no work is left.

        Raises:
            UnavailableError: there are requests, and the command does not allow them to finish.
        """
        if self.scheduler.roster.requests.keys() - {PROBE_ID} and not command.drain:
            raise UnavailableError('requests are running or waiting: "drain": true waits for their ends')
        self._rest = self._rest or "the engine is about to sleep"

    def sleep(self, meanwhile: Callable[[Future[Any]], None] | None = None) -> dict[str, Any]:
        """Frees the memory of weights and KV cache until `wake`; the process and its frontends stay.

        Cached prefixes, pins and the host tier are emptied. Blocks on disk are found again later, as are
        those in a connector that keeps them.

        Args:
            meanwhile: called while another thread works, with the future of that work.

        Returns:
            Resident bytes of this process before and after (`resident_bytes_before`, `resident_bytes`).
        """
        assert not (self.scheduler.has_work or self._in_flight), "asleep with work to do"
        before = resident_bytes()
        if not self.is_asleep:
            self._rest = ASLEEP
            self.kv.reset()
            self._publish()
            if self.tiers is not None:
                self.tiers.close()
            self.adapters.drop_weights()
            self.scheduler.roster.take_changes(SchedulerOutput(0))  # the runner forgets by itself
            self._attach(None)
            _wait_for(self.executor.sleep(), meanwhile)
        return {"resident_bytes_before": before, "resident_bytes": resident_bytes()}

    def wake(self, meanwhile: Callable[[Future[Any]], None] | None = None) -> dict[str, Any]:
        """Loads the same weights again if the engine is asleep, and accepts requests.

        Args:
            meanwhile: called while another thread works, with the future of that work.

        Returns:
            `seconds` that it took, and `resident_bytes` of this process.

        Raises:
            QuireError: the engine could not be woken, for example because the weights cannot be loaded. It
                stays asleep, and `wake` may be tried again.
        """
        began = time.monotonic()
        if self.is_asleep:
            try:
                _wait_for(self.executor.wake(), meanwhile)
                self._attach(make_tiers(self.config.cache, self.executor.kv_cache, self.fingerprint))
            except BaseException:
                _wait_for(self.executor.sleep(), meanwhile)
                raise
        self._rest = ""
        return {"seconds": round(time.monotonic() - began, 3), "resident_bytes": resident_bytes()}

    def _attach(self, tiers: KVTiers | None) -> None:
        self.tiers = self.scheduler.transfers.tiers = tiers
        self.executor.attach(tiers)

    def _publish(self) -> None:
        if self._events is not None and self._publisher is not None:
            batch = self._events.pop_batch()
            if batch is not None:
                self._publisher.publish(batch)

    def close(self) -> None:
        """Ends the executor with its processes, the tiers and the other threads; waits until the disk tier
        has written its queue."""
        self.executor.close()
        self.adapters.close()
        if self.tiers is not None:
            self.tiers.close()
        if self._publisher is not None:
            self._publisher.close()

    @property
    def trace(self) -> SchedulerTrace | None:
        return self.scheduler.roster.trace

    def enable_trace(self, path: Path | None = None) -> SchedulerTrace:
        """Records every step from now on, in a file or (None) in memory."""
        return self.scheduler.start_trace(self.config.cache, path)

    def warm_up(self) -> None:
        """Computes a prompt and, if the model generates, decode steps, greedy and sampled, so that requests
        need not wait for first use. If blocks have more than three tokens, none is filled, so nothing stays
        in the cache. Raises EngineError if a step fails.

        If steps are recorded as graphs, they are recorded before that. Kernels are tuned only during this
        recording; a step recorded afterwards would keep untuned defaults for shapes that were not timed.
        """
        self.executor.warm_up()
        num_tokens = max(1, min(self.kv.block_size, self.info.max_model_len) - 3)
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=temperature, top_k=2)
            self.add_request(
                "warm-up",
                [0] * num_tokens,
                self.internal_params(params),
                external_id="warm-up",
                scheduling=SchedulingParams(is_internal=True),
            )
            while self.has_work:
                for output in self.step():
                    if output.error is not None:
                        raise EngineError(f"the first step of the model failed: {output.error}")

    def internal_params(self, params: SamplingParams) -> SamplingParams:
        """Returns the parameters for a request of the engine's own: those given, or those of a pooled prompt
        if the model generates no tokens."""
        pooling = self.info.pooling
        if pooling.generates:
            return params
        task: Literal["embed", "classify"] = "classify" if pooling.num_scores else "embed"
        size = pooling.num_scores or self.info.hidden_size
        return SamplingParams(dimensions=size, pooling=PoolingParams(task=task))

    def stats(self) -> SchedulerStats:
        self._expire()
        return self.scheduler.stats()

    @property
    def next_expiry(self) -> float:
        """Time before which no pin and no cached block expires, on the scheduler's clock; inf: none is due
        to."""
        return self.kv.next_expiry

    def _expire(self) -> None:
        """Releases expired pins and forgets expired cached blocks, as the planning of each step does."""
        self.kv.expire(self.scheduler.roster.clock())


def _wait_for(done: Future[None], meanwhile: Callable[[Future[Any]], None] | None) -> None:
    if meanwhile is not None:
        meanwhile(done)
    done.result()


def make_executor(config: EngineConfig, *, threaded: bool = False) -> Executor:
    """Returns the executor for a configuration.

    Args:
        threaded: whether a separate thread computes the steps, so that `step` can do other work meanwhile.
    """
    runner: Runner
    if stand_in := os.environ.get("QUIRE_TEST_RUNNER"):
        module, _, name = stand_in.partition(":")
        runner = getattr(importlib.import_module(module), name)(config)
    elif config.model.tensor_parallel_size > 1:
        from quire.engine.worker_group import WorkerGroup

        runner = WorkerGroup(config)
    else:
        from quire.worker.model_runner import ModelRunner

        runner = ModelRunner(config)
    is_ahead = config.scheduler.launches_ahead(runner.info.device)
    return RunnerExecutor(runner, depth=2 if is_ahead else 1, threaded=threaded)


def _fingerprint(config: EngineConfig, info: RunnerInfo, block_bytes: int) -> str:
    if not needs_fingerprint(config.cache):
        return ""
    groups = [[group.window, *group.layers] for group in info.kv_groups]
    return fingerprint(config, {"groups": groups, "block_bytes": block_bytes, **info.kv_identity})


def _publisher(config: KVEventsConfig) -> KVEventPublisher | None:
    if not config.endpoint:
        return None
    return KVEventPublisher(config.endpoint, config.replay_endpoint, config.topic)


def error_output(request_id: str, error: QuireError) -> EngineCoreOutput:
    """Returns the output that ends a refused request: its error."""
    return EngineCoreOutput(
        request_id,
        finish_reason=FinishReason.ERROR.value,
        error=str(error),
        error_code=error.code,
    )
