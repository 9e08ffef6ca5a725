"""EngineCore: requests in, token deltas out, one step at a time.

Owned by one thread. It knows neither sockets nor text: `engine/loop.py` puts it into a process of its
own, `quire.LLM` runs it in the caller's.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from quire.config import EngineConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.scheduler import Scheduler
from quire.core.trace import SchedulerTrace
from quire.errors import EngineError, QuireError
from quire.multimodal import PromptEmbeds
from quire.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, SchedulerStats
from quire.request import FinishReason, Request
from quire.sampling_params import SamplingParams
from quire.validation import check_prompt, check_token_parameters

logger = logging.getLogger("quire")


class Runner(Protocol):
    """What the core needs of a model runner; tests bring their own."""

    num_blocks: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class EngineCore:
    """Scheduler and runner joined by `step`.

    Args:
        config: the engine's configuration.
        runner: computes the steps; None builds a `ModelRunner` from the configuration.
        vocab_size: token ids at or above it are refused; None takes the model's.
    """

    def __init__(
        self, config: EngineConfig, runner: Runner | None = None, *, vocab_size: int | None = None
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
        self.kv = KVCacheManager(
            runner.num_blocks,
            config.cache.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, self.kv, self.max_model_len)
        self._seeds = itertools.count()
        self._seed_base = config.model.seed or secrets.randbits(63)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        client_id: int = 0,
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
        if sampling_params.seed is None and not sampling_params.is_greedy:
            seed = (self._seed_base + 0x9E3779B97F4A7C15 * next(self._seeds)) % 2**64
            sampling_params = msgspec.structs.replace(sampling_params, seed=seed)
        request = Request(
            request_id,
            prompt_token_ids,
            sampling_params,
            eos_token_ids=self.runner.eos_token_ids,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            client_id=client_id,
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
        return self.scheduler.has_unfinished()

    def step(self) -> list[EngineCoreOutput]:
        """Plans, computes and accounts one step; returns what it brought.

        An exception of the runner ends every request of the step with an error and leaves the engine
        able to go on: the rows are dropped from the runner with the next step.
        """
        planned = self.scheduler.schedule()
        if planned.is_empty and not planned.dropped_request_ids:
            return []
        try:
            result = self.runner.execute(planned)
        except Exception as error:
            logger.exception("step %d failed with %d rows", planned.step, len(planned.scheduled))
            message = f"the engine failed while computing the request: {type(error).__name__}: {error}"
            outputs = self.scheduler.fail([row.request_id for row in planned.scheduled], message)
        else:
            outputs = self.scheduler.update(planned, result)
        return outputs

    @property
    def trace(self) -> SchedulerTrace | None:
        return self.scheduler.trace

    def enable_trace(self, path: Path | None = None) -> SchedulerTrace:
        """Records every step from now on, in a file or (None) in memory."""
        self.scheduler.trace = SchedulerTrace(path)
        return self.scheduler.trace

    def warm_up(self) -> None:
        """Runs one prefill and one decode step, so that the first request does not pay for first use."""
        self.add_request("warm-up", [0], SamplingParams(max_tokens=2, ignore_eos=True), external_id="warm-up")
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise EngineError(f"the first step of the model failed: {output.error}")

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()


def error_output(request_id: str, error: QuireError) -> EngineCoreOutput:
    """The one final output of a request that never ran."""
    return EngineCoreOutput(
        request_id, finish_reason=FinishReason.ERROR.value, error=str(error), error_code=error.code
    )
