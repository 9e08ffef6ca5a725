"""EngineMetrics: the engine's figures at Triton's /metrics.

Several frontends share an engine and all of them hear its figures. One per model publishes them: the labels
are `model`, `version` and `engine`, which is the same for models that share one (`max by (engine)` of these).
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("quire")

COUNTERS: dict[str, tuple[str, str]] = {
    "num_cached_tokens": ("quire_prefix_cached_tokens_total", "Prompt tokens that the cache or a tier had"),
    "num_loaded_tokens": ("quire_kv_loaded_tokens_total", "Tokens that a KV tier had"),
    "num_preemptions": ("quire_preemptions_total", "Requests that were preempted"),
    "num_swaps": ("quire_swaps_total", "Preemptions that kept the blocks in the host tier"),
    "num_scheduled_tokens": ("quire_scheduled_tokens_total", "Tokens computed, recomputation included"),
}
"""Name and description of each counter, by field of SchedulerStats."""
GAUGES: dict[str, tuple[str, str]] = {
    "num_running": ("quire_requests_running", "Sequences that are being computed"),
    "num_waiting": ("quire_requests_waiting", "Sequences in the queue"),
    "kv_use": (
        "quire_kv_use_ratio",
        "Share of the KV blocks in use, 0 to 1; for balancers that cannot divide",
    ),
}
BLOCKS = (
    "quire_kv_blocks",
    "KV blocks; free, cached and in_use are all of them, pinned those in use by pins",
)


class EngineMetrics:
    """Sends the figures that have changed; each is a call to the server of 20 to 80 us.

    The responder's thread calls `update` about twice a second, nothing per token.

    Args:
        pb_utils: Triton's utilities.
        labels: of every metric; no other living process may use the same.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str]) -> None:
        kind = pb_utils.MetricFamily
        # The server removes a family when its object goes, and updates of its metrics raise from then on.
        self._families: list[Any] = []

        def family(name: str, description: str, family_kind: Any) -> Any:
            self._families.append(kind(name=name, description=description, kind=family_kind))
            return self._families[-1]

        self._counters = {
            key: family(*texts, kind.COUNTER).Metric(labels=dict(labels)) for key, texts in COUNTERS.items()
        }
        self._gauges = {
            key: family(*texts, kind.GAUGE).Metric(labels=dict(labels)) for key, texts in GAUGES.items()
        }
        blocks = family(*BLOCKS, kind.GAUGE)
        for state in ("free", "cached", "in_use", "pinned"):
            self._gauges[state] = blocks.Metric(labels={**labels, "state": state})
        self._engine_pid = 0
        self._counted: dict[str, float] = {}
        self._shown: dict[str, float] = {}
        self._lock: Any = None

    @classmethod
    def claim(cls, pb_utils: Any, args: Mapping[str, str], directory: Path) -> EngineMetrics | None:
        """The metrics of this model's engine, unless another frontend of the model has them already.

        Args:
            args: of `initialize`.
            directory: where the frontends of the engine meet; named after the engine's configuration.

        Returns:
            None also where the server has no metrics.
        """
        model, version = args["model_name"], args["model_version"]
        lock = (directory / f"metrics-{model}-{version}").open("w")
        try:
            # Held as long as this process lives, so that a restarted frontend gets it again.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        labels = {"model": model, "version": version, "engine": directory.name.rpartition("-")[2]}
        try:
            metrics = cls(pb_utils, labels)
        except pb_utils.TritonModelException as error:
            logger.warning("frontend: no metrics: %s", error)
            lock.close()
            return None
        metrics._lock = lock
        return metrics

    def update(self, values: Mapping[str, float], engine_pid: int) -> None:
        """Publishes what an engine says of itself.

        Args:
            values: the fields of SchedulerStats.
            engine_pid: another one than before counts from zero, while the counters go on.
        """
        if engine_pid != self._engine_pid:
            self._engine_pid, self._counted = engine_pid, {}
        for key, counter in self._counters.items():
            more = values[key] - self._counted.get(key, 0.0)
            if more > 0:  # a load that fails takes back what it had announced
                counter.increment(more)
                self._counted[key] = values[key]
        available, cached = values["num_free_blocks"], values["num_cached_blocks"]
        in_use = values["num_blocks"] - available
        present = {
            "num_running": values["num_running"],
            "num_waiting": values["num_waiting"],
            "kv_use": round(in_use / max(values["num_blocks"], 1), 3),
            "free": available - cached,
            "cached": cached,
            "in_use": in_use,
            "pinned": values["num_pinned_blocks"],
        }
        for key, value in present.items():
            if self._shown.get(key) != value:
                self._gauges[key].set(value)
        self._shown = present

    def close(self) -> None:
        """A family must outlive its metrics."""
        self._counters.clear()
        self._gauges.clear()
        self._families.clear()
        if self._lock is not None:
            self._lock.close()
