"""MetricsBoard: figures of this process, added up here and sent to Triton's /metrics by a thread.

Each update of a metric is a round trip to the server (20 to 100 us; 20 to 30 us of CPU on both sides). So
everything is added up here, and a thread of its own sends what has changed, about twice a second, histograms
every four seconds. (The board of vllm_backend's metrics does not wait.) For the same reason histograms are
counters, one per bucket, as Prometheus writes them: Triton's own histograms need a call for each observation.
Only vllm_backend's histograms are Triton's (`Observations`).

Metrics are never deleted (`immortal`). Two frontends may show the same one (instances of a model; a model
that is reloaded, whose old stub ends after the new one has begun). Their increments add up. If one of them
deleted the metric, the other would go on to write it, into memory that the server has freed.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.request import FinishReason
from quire_ensemble.triton_metrics import immortal

logger = logging.getLogger("quire")

PERIOD_S = 0.5
HISTOGRAM_PERIOD_S = 4.0
INFO_PERIOD_S = 10.0
MAX_TENANTS = 100
"""Most tenants with series of their own in one process, beyond those that the configuration names. All
further tenants share the label `other`."""
MAX_ADAPTERS = 100
"""Most LoRA adapters by which a metric of one process has series; further ones share the label `other`.
`vllm:lora_requests_info` has a limit of its own."""
OTHER = "other"
MAX_OWED = 2**16
"""Most values that may wait to be sent to one of Triton's own histograms; beyond that the oldest are lost."""

FIRST_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)
"""Bucket bounds in seconds: OpenTelemetry's of gen_ai.server.time_to_first_token, and two more for queues."""
TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
"""Bucket bounds in seconds: OpenTelemetry's of gen_ai.server.time_per_output_token, and three more for small
models."""
REQUEST_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
)  # fmt: skip
"""Bucket bounds in seconds: OpenTelemetry's of gen_ai.server.request.duration, and two more for long
answers."""

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "quire_time_to_first_token_seconds": (
        "From a request's arrival to its first response; not streamed: to the engine's first token",
        FIRST_BUCKETS,
    ),
    "quire_inter_token_seconds": (
        "Between tokens as sent: of each token the time since the response before, over its tokens",
        TOKEN_BUCKETS,
    ),
    "quire_time_per_output_token_seconds": (
        "From a finished request's first token to its end, over the other tokens of a choice",
        TOKEN_BUCKETS,
    ),
    "quire_request_seconds": (
        "From a finished request's arrival to its last response",
        REQUEST_BUCKETS,
    ),
    "quire_queue_seconds": ("From a request's arrival to its first step", FIRST_BUCKETS),
    "quire_prefill_seconds": ("From a request's first step to the engine's first token", FIRST_BUCKETS),
    "quire_decode_seconds": (
        "From the engine's first token of a finished request to its last response",
        REQUEST_BUCKETS,
    ),
}
"""Description of each histogram that is made of counters, and its buckets' upper bounds in seconds, by
name."""
COUNTERS: dict[str, str] = {
    "quire_requests_total": "Requests that ended, by finish_reason, and code of Triton where it was an error",
    "quire_commands_total": "Cancellations by id and cache commands that ended",
    "quire_requests_continued_total": "Requests that went on after their engine had died",
    "quire_result_cache_lookups_total": "Requests that were looked up in the result cache, hit or miss",
    "quire_input_tokens_total": "Tokens of prompts of requests that ran, cached ones included",
    "quire_cached_input_tokens_total": "Those among them that the cache or a tier had",
    "quire_output_tokens_total": "Tokens generated, reasoning included",
    "quire_reasoning_tokens_total": "Those among them that were reasoning, where its format is known",
    "quire_prefix_queried_tokens_total": "Tokens of requests that were looked up in the prefix cache",
    "quire_prefix_cached_tokens_total": "Prompt tokens that the cache or a tier had",
    "quire_kv_loaded_tokens_total": "Tokens that a KV tier had",
    "quire_preemptions_total": "Requests that were preempted",
    "quire_swaps_total": "Preemptions that kept the blocks in the host tier",
    "quire_steps_total": "Steps that were planned",
    "quire_draft_tokens_total": "Tokens that were tried before they were known",
    "quire_accepted_draft_tokens_total": "Those among them that were right",
    "quire_scheduled_tokens_total": "Tokens computed, recomputation included",
    "quire_adapter_hits_total": "Requests that found their LoRA adapter in a slot when they began",
    "quire_adapter_loads_total": "LoRA adapters that were brought into a slot",
    "quire_adapter_evictions_total": "LoRA adapters that another one took the slot of",
    "quire_expert_hits_total": "Offloaded experts that a step needed and that had a slot",
    "quire_expert_misses_total": "Offloaded experts that a step needed and waited for",
    "quire_expert_prefetches_total": "Offloaded experts that were read ahead for a step that might need them",
    "quire_expert_prefetch_hits_total": "Those among them that the step needed",
    "quire_expert_loaded_bytes_total": "Bytes of the offloaded experts that were loaded",
    "quire_engine_restarts_total": "Engines that took the place of one that had died",
    "vllm:prompt_tokens_total": "Tokens of prompts of which a first token came",
    "vllm:generation_tokens_total": "Tokens generated",
}
OBSERVATIONS: dict[str, str] = {
    "vllm:time_to_first_token_seconds": "From a request's arrival to a choice's first token",
    "vllm:time_per_output_token_seconds": "From one token of a choice to the next",
    "vllm:e2e_request_latency_seconds": "From a request's arrival to the last token of a finished choice",
    "vllm:request_prompt_tokens": "Tokens of the prompt of a finished choice",
    "vllm:request_generation_tokens": "Tokens of a finished choice",
    "vllm:request_params_n": "Choices that a finished request asked for",
}
"""Descriptions of the metrics that use Triton's own histogram type (`vllm_metrics.py`), by name."""
GAUGES: dict[str, str] = {
    "quire_requests_running": "Sequences that are being computed",
    "quire_requests_loading": "Those among them that wait for blocks from a KV tier",
    "quire_requests_waiting": "Sequences in the queue",
    "quire_requests_waiting_for": "The same by what they wait for",
    "quire_kv_use_ratio": "Share of the KV blocks in use, 0 to 1; for balancers that cannot divide",
    "quire_kv_blocks": "KV blocks; free, cached and in_use are all of them, pinned those in use by pins",
    "quire_batch_rows": "Sequences in the latest step",
    "quire_batch_tokens": "Tokens in the latest step",
    "quire_engine_info": "1; the engine that a model has, and its KV cache",
    "vllm:cache_config_info": "1; the KV cache, as vLLM tells of it",
    "quire_adapters_loaded": "LoRA adapters in slots",
    "quire_adapter_loaded": "Whether a LoRA adapter is in a slot, so that a request for it need not wait",
    "quire_adapter_requests": "Sequences with a LoRA adapter, by state",
    "vllm:lora_requests_info": "When it was told that these adapters have requests; the latest is so now",
}
VLLM: dict[str, str] = {
    "quire_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "quire_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "quire_queue_seconds": "vllm:request_queue_time_seconds",
    "quire_prefill_seconds": "vllm:request_prefill_time_seconds",
    "quire_decode_seconds": "vllm:request_decode_time_seconds",
    "quire_requests_total": "vllm:request_success_total",
    "quire_prefix_queried_tokens_total": "vllm:prefix_cache_queries_total",
    "quire_prefix_cached_tokens_total": "vllm:prefix_cache_hits_total",
    "quire_preemptions_total": "vllm:num_preemptions_total",
    "quire_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "quire_accepted_draft_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "quire_requests_running": "vllm:num_requests_running",
    "quire_requests_waiting": "vllm:num_requests_waiting",
    "quire_kv_use_ratio": "vllm:kv_cache_usage_perc",
}
"""vLLM's names of some metrics, by our names. vLLM has these metrics, but vllm_backend does not show them.
They are shown under both names where vllm_backend's metrics are asked for, for gateways and dashboards."""
_VLLM_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length", "error": "error"}
"""vLLM's finish reason by ours; all other reasons are vLLM's abort."""
FINISHED = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)


class Figure:
    """A number at /metrics: a gauge, or a counter, which only grows there.

    Usually one thread changes `value`, and the board's thread sends it.
    """

    __slots__ = ("is_gauge", "is_info", "labels", "metrics", "name", "shown", "value")

    def __init__(self, name: str, labels: Mapping[str, str], *, is_gauge: bool) -> None:
        self.name, self.labels, self.is_gauge = name, labels, is_gauge
        self.value = 0.0
        self.shown = math.nan if is_gauge else 0.0
        """Value that was sent last; NaN: the value is to be sent in any case. A gauge begins with NaN,
        because a process that was killed may have left another value at /metrics."""
        self.is_info = False
        """Whether the value is sent again though it has not changed: at most once in INFO_PERIOD_S seconds,
        and only in a round of sending that something else has caused.

        When a model is reloaded, the process before this one sets the same gauge to 0 as it ends, and may do
        so after this process has set it.
        """
        self.metrics: list[Any] = []
        """Triton's metric objects for this figure; empty until they are made."""

    def send(self) -> None:
        """Sends the value if it has changed. A counter whose value fell is not sent until it exceeds the
        value sent last."""
        value = self.value
        if value == self.shown or (value < self.shown and not self.is_gauge):
            return
        for metric in self.metrics:
            if self.is_gauge:
                metric.set(value)
            else:
                metric.increment(value - self.shown)
        self.shown = value


class Histogram:
    """Histogram made of counters: one for each bucket, the sum of all values, and their number.

    Args:
        board: the board that gets the counters.
        name: name of the histogram, an entry of HISTOGRAMS.
    """

    def __init__(self, board: MetricsBoard, name: str, labels: Mapping[str, str]) -> None:
        self._bounds = HISTOGRAMS[name][1]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        ends = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        self._buckets = [board.counter(f"{name}_bucket", **labels, le=end) for end in ends]
        self._total, self._count = (board.counter(f"{name}_{part}", **labels) for part in ("sum", "count"))

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` values, all of them `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def show(self) -> None:
        """Sets the figures that are sent by the counts and the sum so far."""
        for figure, total in zip(self._buckets, itertools.accumulate(self._counts), strict=True):
            figure.value = total
        self._count.value = self._buckets[-1].value
        self._total.value = self._sum


class Observations:
    """Values, not sent yet, for one histogram of OBSERVATIONS, which Triton's metrics API keeps
    (`pb_utils.MetricFamily`). One thread adds (`observe`), another sends.

    The oldest values beyond MAX_OWED are lost, for example where the server has no metrics.
    """

    def __init__(self, name: str, buckets: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name, self._buckets, self._labels = name, buckets, labels
        self._metric: Any = None
        # What nobody sends, as the server has no metrics, must not grow.
        self._values: deque[float] = deque(maxlen=MAX_OWED)
        self.observe = self._values.append

    def send(self, pb_utils: Any) -> None:
        """Sends each waiting value to Triton, in one call per value."""
        if self._metric is None:
            kind = pb_utils.MetricFamily
            about = OBSERVATIONS[self._name]
            family = immortal(kind(name=self._name, description=about, kind=kind.HISTOGRAM))
            self._metric = immortal(family.Metric(labels=dict(self._labels), buckets=list(self._buckets)))
        while self._values:
            self._metric.observe(self._values.popleft())


class MetricsBoard(threading.Thread):
    """Holds metrics of this process and sends them to Triton.

    Figures may be added at any time, by one thread. Until `start`, and where the server has no metrics,
    nothing is sent.

    Args:
        pb_utils: Triton's utilities.
        vllm: labels of the series with vLLM's names, `model_name` and `engine`; None: no such series.
        period_s: seconds between two rounds of sending while figures change.
    """

    def __init__(
        self, pb_utils: Any, vllm: Mapping[str, str] | None = None, period_s: float = PERIOD_S
    ) -> None:
        super().__init__(name="quire-metrics", daemon=True)
        self._pb_utils, self._period_s = pb_utils, period_s
        self.vllm = vllm
        self._families: dict[str, Any] = {}
        self._figures: list[Figure] = []
        self._histograms: list[Histogram] = []
        self._observations: list[Observations] = []
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._next_histograms = self._next_infos = 0.0

    def counter(self, name: str, **labels: str) -> Figure:
        return self._add(name, labels, is_gauge=False)

    def gauge(self, name: str, **labels: str) -> Figure:
        return self._add(name, labels, is_gauge=True)

    def histogram(self, name: str, **labels: str) -> Histogram:
        self._histograms.append(Histogram(self, name, labels))
        return self._histograms[-1]

    def observations(self, name: str, buckets: Sequence[float], **labels: str) -> Observations:
        """Creates a histogram of Triton's own type. OBSERVATIONS must list `name` with its description."""
        self._observations.append(Observations(name, buckets, labels))
        return self._observations[-1]

    def _add(self, name: str, labels: Mapping[str, str], *, is_gauge: bool) -> Figure:
        self._figures.append(Figure(name, labels, is_gauge=is_gauge))
        return self._figures[-1]

    def touch(self) -> None:
        """Wakes the thread, which soon sends changed and new figures."""
        if not self._changed.is_set():
            self._changed.set()

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._changed.wait()
                self._stopped.wait(self._period_s)
                self._changed.clear()
                self.send()
            for figure in self._figures:
                if figure.is_gauge:
                    figure.value = 0.0
            self.send(all_of_them=True)
        except self._pb_utils.TritonModelException as error:
            logger.warning("frontend: no metrics: %s", error)

    def stop(self, timeout_s: float) -> None:
        """Has the thread send what is left, with 0 for gauges, and end. Waits `timeout_s` seconds at most."""
        self._stopped.set()
        self._changed.set()
        if self.is_alive():
            self.join(timeout_s)

    def send(self, *, all_of_them: bool = False) -> None:
        """Sends the figures that have changed and all waiting `Observations`. The figures of a Histogram are
        updated with `all_of_them`, else at most every HISTOGRAM_PERIOD_S seconds."""
        now = time.monotonic()
        if all_of_them or now >= self._next_histograms:
            self._next_histograms = now + HISTOGRAM_PERIOD_S
            for histogram in self._histograms:
                histogram.show()
        elif self._histograms:
            self._changed.set()  # they are owed
        for observations in self._observations:
            observations.send(self._pb_utils)
        repeats = now >= self._next_infos
        if repeats:
            self._next_infos = now + INFO_PERIOD_S
        for figure in self._figures[:]:
            if not figure.metrics:
                self._make(figure)
            if repeats and figure.is_info:
                figure.shown = math.nan
            figure.send()

    def _make(self, figure: Figure) -> None:
        """Makes a figure's metrics in Triton, one for each of its names, which are shown even at 0."""
        names = [(figure.name, figure.labels)]
        base = re.sub(r"_(bucket|sum|count)$", "", figure.name)
        if self.vllm is not None and base in VLLM:
            labels = {**self.vllm, **{key: figure.labels[key] for key in ("le",) if key in figure.labels}}
            if "finish_reason" in figure.labels:
                labels["finished_reason"] = _VLLM_REASONS.get(figure.labels["finish_reason"], "abort")
            names.append((VLLM[base] + figure.name.removeprefix(base), labels))
        about = HISTOGRAMS[base][0] if base in HISTOGRAMS else {**COUNTERS, **GAUGES}[base]
        figure.metrics = [self._metric(name, labels, about, figure.is_gauge) for name, labels in names]

    def _metric(self, name: str, labels: Mapping[str, str], about: str, is_gauge: bool) -> Any:
        kind = self._pb_utils.MetricFamily
        if name not in self._families:
            made = kind(name=name, description=about, kind=kind.GAUGE if is_gauge else kind.COUNTER)
            self._families[name] = immortal(made)
        return immortal(self._families[name].Metric(labels=dict(labels)))


def known(name: str, names: set[str], most: int) -> str:
    """Returns `name` as a label value and adds it to `names`. If it is new and `names` already has `most`,
    returns `other`."""
    if name not in names and len(names) >= most:
        return OTHER
    names.add(name)
    return name
