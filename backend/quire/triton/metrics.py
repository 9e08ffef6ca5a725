"""Metrics of a frontend: figures of its requests, and of its engine, which other frontends may share."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

import msgspec

from quire.core.request import FinishReason
from quire.engine.messages import EngineInfo
from quire.outputs import SchedulerStats, WaitingCounts
from quire.triton.adapter_metrics import AdapterMetrics
from quire.triton.metrics_board import (
    FINISHED,
    HISTOGRAMS,
    MAX_ADAPTERS,
    MAX_TENANTS,
    Figure,
    MetricsBoard,
    known,
)
from quire.triton.observers import RequestEnded

logger = logging.getLogger("quire")

_Read: TypeAlias = Callable[[SchedulerStats], int]
_COUNTERS: dict[str, _Read] = {
    "quire_prefix_queried_tokens_total": lambda stats: stats.num_queried_tokens,
    "quire_prefix_cached_tokens_total": lambda stats: stats.num_cached_tokens,
    "quire_kv_loaded_tokens_total": lambda stats: stats.num_loaded_tokens,
    "quire_preemptions_total": lambda stats: stats.num_preemptions,
    "quire_swaps_total": lambda stats: stats.num_swaps,
    "quire_draft_tokens_total": lambda stats: stats.num_draft_tokens,
    "quire_accepted_draft_tokens_total": lambda stats: stats.num_accepted_drafts,
    "quire_scheduled_tokens_total": lambda stats: stats.num_scheduled_tokens,
    "quire_steps_total": lambda stats: stats.step,
}
"""Counters of every engine, by name. Each grows with what its function reads, a count since the engine's
start."""
_ADAPTER_COUNTERS: dict[str, _Read] = {
    "quire_adapter_evictions_total": lambda stats: stats.num_adapter_evictions
}
"""More such counters, for an engine that has slots for adapters."""
_EXPERT_COUNTERS: dict[str, _Read] = {
    "quire_expert_hits_total": lambda stats: stats.experts.num_hits,
    "quire_expert_misses_total": lambda stats: stats.experts.num_misses,
    "quire_expert_prefetches_total": lambda stats: stats.experts.num_prefetches,
    "quire_expert_prefetch_hits_total": lambda stats: stats.experts.num_prefetch_hits,
    "quire_expert_loaded_bytes_total": lambda stats: stats.experts.num_loaded_bytes,
}
"""More such counters, for an engine that may offload experts."""
_GAUGES: dict[str, _Read] = {
    "quire_requests_running": lambda stats: stats.num_running,
    "quire_requests_loading": lambda stats: stats.num_loading,
    "quire_requests_waiting": lambda stats: stats.num_waiting,
    "quire_batch_rows": lambda stats: stats.num_batch_rows,
    "quire_batch_tokens": lambda stats: stats.num_batch_tokens,
}
"""Some of the engine's gauges, by name. Each shows what its function reads."""


class RequestMetrics:
    """Metrics of a model's requests: a `RequestObserver` and a `StreamMeter`.

    The responder's thread calls it. Each instance of a model has its own, and the server adds them up.

    Args:
        model, version: labels of all series but those with vLLM's names.
        tenants: names that get series of their own whatever MAX_TENANTS says.
    """

    def __init__(self, board: MetricsBoard, model: str, version: str, tenants: Collection[str] = ()) -> None:
        self._board = board
        self._labels = {"model": model, "version": version}
        first, interval, per_token, whole, queue, prefill, decode = (
            board.histogram(name, **self._labels) for name in HISTOGRAMS
        )
        self._first, self._per_token, self._whole = first, per_token, whole
        self._queue, self._prefill, self._decode = queue, prefill, decode
        self.first = first.observe
        """Called with the seconds from a request's arrival to the first response of its stream."""
        self.interval = interval.observe
        """Called for a further response of a choice, with its seconds per token and its number of tokens."""
        self._continued = board.counter("quire_requests_continued_total", **self._labels)
        self._ends: dict[tuple[str, ...], Figure] = {}
        self._named = frozenset(tenants)
        self._tokens: dict[tuple[str, str], list[Figure]] = {}
        self._tenants: set[str] = set()
        self._adapters: set[str] = set()
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._count("quire_requests_total", finish_reason=reason.value, code="")

    def ended(self, record: RequestEnded) -> None:
        self._board.touch()
        if record.is_command:
            self._count("quire_commands_total", code=record.error_code).value += 1
            return
        end = self._count("quire_requests_total", finish_reason=record.finish_reason, code=record.error_code)
        end.value += 1
        self._continued.value += record.num_continuations > 0
        if record.result_cached is not None:
            found = "hit" if record.result_cached else "miss"
            self._count("quire_result_cache_lookups_total", result=found).value += 1
        if not record.admitted_at:
            return
        amounts = (
            record.num_prompt_tokens,
            record.num_cached_tokens,
            record.num_output_tokens,
            record.num_reasoning_tokens,
        )
        for figure, amount in zip(self._of_account(record.tenant, record.adapter), amounts, strict=True):
            figure.value += amount
        self._queue.observe(record.admitted_at - record.arrived_at)
        if not record.first_token_at:
            return
        self._prefill.observe(record.first_token_at - record.admitted_at)
        if not record.is_stream:
            self._first.observe(record.first_token_at - record.arrived_at)
        if record.finish_reason not in FINISHED or record.error_code:
            return
        self._whole.observe(record.ended_at - record.arrived_at)
        self._decode.observe(record.ended_at - record.first_token_at)
        num_further = record.num_output_tokens / record.n - 1
        if num_further > 0:
            begin = record.first_sent_at if record.is_stream else record.first_token_at
            self._per_token.observe((record.ended_at - begin) / num_further)

    def _count(self, name: str, **labels: str) -> Figure:
        key = (name, *labels.values())
        if key not in self._ends:
            self._ends[key] = self._board.counter(name, **self._labels, **labels)
        return self._ends[key]

    def _of_account(self, tenant: str, adapter: str) -> list[Figure]:
        """Returns the counters of input, cached, output and reasoning tokens for a tenant and adapter. Beyond
        MAX_TENANTS or MAX_ADAPTERS it returns those of `other`."""
        if tenant and tenant not in self._named:
            tenant = known(tenant, self._tenants, MAX_TENANTS)
        if adapter:
            adapter = known(adapter, self._adapters, MAX_ADAPTERS)
        if (tenant, adapter) not in self._tokens:
            labels = {**self._labels, "tenant": tenant, "adapter": adapter}
            self._tokens[tenant, adapter] = [
                self._board.counter(f"quire_{kind}_tokens_total", **labels)
                for kind in ("input", "cached_input", "output", "reasoning")
            ]
        return self._tokens[tenant, adapter]


class EngineMetrics:
    """Metrics of the engine. One at a time of the frontends that share an engine shows its figures.

    The gauges that describe the engine (`quire_engine_info`) are shown by every frontend.

    Args:
        directory: directory that the engine's frontends share; named after the engine's configuration.
        model, version: labels of `quire_engine_info`.
        max_loras: the engine's slots for LoRA adapters; 0: it has none.
        offloads: whether the engine may offload experts.
    """

    def __init__(
        self,
        board: MetricsBoard,
        directory: Path,
        model: str,
        version: str,
        max_loras: int = 0,
        *,
        offloads: bool = False,
    ) -> None:
        self._board, self._max_loras, self._offloads = board, max_loras, offloads
        self._adapters: AdapterMetrics | None = None
        self._labels = {"engine": directory.name.rpartition("-")[2]}
        self._model = {"model": model, "version": version}
        # Holds the pid of the engine whose counts are at /metrics.
        self._lock = (directory / "metrics").open("a+")
        self._is_ours = False
        self._engine_pid = 0
        self._counted: list[int] = []

    def update(self, stats: SchedulerStats, info: EngineInfo) -> None:
        """Updates the figures, unless another frontend shows them. Called about twice a second while they
        change.

        Args:
            stats: the engine's latest statistics.
            info: the engine they are from. When its pid is new, `stats` count from zero, while the counters
                at /metrics go on.
        """
        if not self._engine_pid:
            self._tell_of(info)
        if not self._is_ours:
            try:
                # Held as long as this process lives; then another one gets it.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._engine_pid = info.pid
                return
            self._add_figures()
        if info.pid != self._engine_pid or not self._is_ours:
            self._is_ours, self._engine_pid = True, info.pid
            self._begin(stats, info)
        for at, (figure, read) in enumerate(self._counters):
            count = read(stats)
            if count > self._counted[at]:  # a load that fails takes back what it had announced
                figure.value += count - self._counted[at]
                self._counted[at] = count
        for figure, read in self._gauges:
            figure.value = read(stats)
        for figure, count in zip(self._waiting, msgspec.structs.astuple(stats.waiting), strict=True):
            figure.value = count
        num_blocks, available = stats.num_blocks, stats.num_free_blocks
        in_use, cached = num_blocks - available, stats.num_cached_blocks
        if self._adapters is not None:
            self._adapters.update(info.adapters)
        self._use.value = round(in_use / max(num_blocks, 1), 3)
        states = (available - cached, cached, in_use, stats.num_pinned_blocks)
        for figure, value in zip(self._blocks, states, strict=True):
            figure.value = value
        self._board.touch()

    def _begin(self, stats: SchedulerStats, info: EngineInfo) -> None:
        """Begins with a new engine, or with one whose figures another frontend has shown until now.

        What the other frontend has counted of this engine is not added again.
        """
        self._lock.seek(0)
        before, now = self._lock.read(), str(self._engine_pid)
        self._counted = [read(stats) if before == now else 0 for _, read in self._counters]
        if self._adapters is not None:
            self._adapters.begin(info.adapters if before == now else ())
        self._restarts.value += before not in ("", now)
        self._lock.truncate(0)
        self._lock.write(now)
        self._lock.flush()

    def _tell_of(self, info: EngineInfo) -> None:
        """Adds the gauges that describe the engine. Every frontend shows its own. They are not updated when
        another engine takes over."""
        board, block_size, num_blocks = self._board, str(info.block_size), str(info.num_blocks)
        engine = board.gauge(
            "quire_engine_info",
            **self._labels,
            **self._model,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=str(info.max_model_len),
            dtype=info.dtype,
            device=info.device,
        )
        engine.value, infos = 1, [engine]
        if board.vllm is not None:
            labels = {**board.vllm, "block_size": block_size, "num_gpu_blocks": num_blocks}
            cache = board.gauge("vllm:cache_config_info", **labels)
            cache.value = 1
            infos.append(cache)
            if not self._max_loras:
                labels = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
                adapters = board.gauge("vllm:lora_requests_info", **board.vllm, **labels)
                adapters.value = time.time()
                infos.append(adapters)
        for figure in infos:
            figure.is_info = True
        board.touch()

    def close(self) -> None:
        """Lets another frontend show the engine's metrics. Call it after the board has stopped."""
        self._lock.close()

    def _add_figures(self) -> None:
        board, labels = self._board, self._labels
        if self._max_loras:
            self._adapters = AdapterMetrics(board, labels, self._max_loras)
        counters = _COUNTERS | (_ADAPTER_COUNTERS if self._max_loras else {})
        counters |= _EXPERT_COUNTERS if self._offloads else {}
        self._counters = [(board.counter(name, **labels), read) for name, read in counters.items()]
        self._gauges = [(board.gauge(name, **labels), read) for name, read in _GAUGES.items()]
        self._waiting = [
            board.gauge("quire_requests_waiting_for", **labels, reason=reason)
            for reason in WaitingCounts.__struct_fields__
        ]
        self._use = board.gauge("quire_kv_use_ratio", **labels)
        states = ("free", "cached", "in_use", "pinned")
        self._blocks = [board.gauge("quire_kv_blocks", **labels, state=state) for state in states]
        self._restarts = board.counter("quire_engine_restarts_total", **labels)
