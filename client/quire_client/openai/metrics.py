"""Prometheus metrics of the gateway."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

_PREFIX = "quire_gateway"
_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

__all__ = ["CONTENT_TYPE", "Metrics"]


class Metrics:
    """The metrics of one gateway. Labels have few values, whatever clients send: known paths, HTTP statuses,
    and names of models that answered."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def named(kind: Any, name: str, about: str, *labels: str, **others: Any) -> Any:
            return kind(f"{_PREFIX}_{name}", about, labels, registry=self._registry, **others)

        path_status, model = ("path", "status"), ("model",)
        latency = {"buckets": _LATENCIES}
        self.requests: Counter = named(Counter, "requests", "Requests answered.", *path_status)
        self.running: Gauge = named(Gauge, "requests_running", "Requests under way.")
        self.seconds: Histogram = named(
            Histogram, "request_seconds", "From a request to its last byte.", "path", **latency
        )
        self.first: Histogram = named(
            Histogram, "time_to_first_token_seconds", "Of requests that stream.", *model, **latency
        )
        self.between: Histogram = named(
            Histogram, "inter_token_seconds", "Between two tokens of a stream.", *model, **latency
        )
        self.input: Counter = named(Counter, "input_tokens", "Tokens of prompts.", *model)
        self.cached: Counter = named(Counter, "cached_tokens", "Tokens of prompts from the KV cache.", *model)
        self.output: Counter = named(Counter, "output_tokens", "Tokens of answers.", *model)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
