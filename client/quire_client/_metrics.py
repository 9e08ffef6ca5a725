"""A server's /metrics: Prometheus' text format, and what can be read from two scrapes of it."""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(?:^|,)([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
MAX_BYTES = 64 * 2**20
"""Most bytes of a scrape that are read; the rest is ignored."""


@dataclass(frozen=True)
class Scrape:
    """Samples of a scrape: (labels, value), by metric name. `at` is the `time.monotonic()` of the scrape.

    Any program may answer at the address, so lines without a finite number are ignored."""

    samples: Mapping[str, list[tuple[dict[str, str], float]]]
    at: float

    @classmethod
    def parse(cls, text: str) -> Scrape:
        samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for name, labels, number in _SAMPLE.findall(text):
            values = {
                key: _ESCAPED.sub(lambda mark: "\n" if mark[1] == "n" else mark[1], value)
                for key, value in _LABEL.findall(labels)
            }
            value = _number(number)
            if math.isfinite(value):
                samples[name].append((values, value))
        return cls(samples, time.monotonic())

    @classmethod
    def fetch(cls, url: str, timeout_s: float = 10.0) -> Scrape:
        """Fetches a scrape. Raises OSError, HTTPException or ValueError if that fails: for example, there is
        no answer, it is not HTTP or has an error status, or the URL is malformed.

        Args:
            url: the URL of the metrics, or HOST:PORT.
        """
        if "://" not in url:
            url = f"http://{url}/metrics"
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return cls.parse(answer.read(MAX_BYTES).decode("utf-8", "replace"))

    def of_name(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Samples of the metric `name` whose labels include the given ones."""
        found = self.samples.get(name, [])
        return [(given, value) for given, value in found if given.items() >= labels.items()]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.of_name(name, **labels))

    def values_of(self, name: str, label: str) -> list[str]:
        """The different values that the label has in samples of the metric `name`, sorted."""
        return sorted({labels[label] for labels, _ in self.of_name(name) if label in labels})


@dataclass(frozen=True)
class Interval:
    """Two scrapes of one server. Without an earlier one, counts are since the server's start; rates are 0."""

    now: Scrape
    before: Scrape | None = None

    def grown(self, name: str, **labels: str) -> float:
        """Growth of a counter between the two scrapes, summed over its samples with these labels. If the sum
        has become smaller, the counter was reset, and the present sum is returned."""
        now = self.now.total(name, **labels)
        before = 0.0 if self.before is None else self.before.total(name, **labels)
        return now - before if before <= now else now

    def rate(self, name: str, **labels: str) -> float:
        """Growth of a counter per second; 0 without an earlier scrape."""
        if self.before is None or self.now.at <= self.before.at:
            return 0.0
        return self.grown(name, **labels) / (self.now.at - self.before.at)

    def quantile(self, share: float, name: str, **labels: str) -> float:
        """Quantile `share` of what a histogram counted between the two scrapes, interpolated in a bucket as
        by Prometheus' histogram_quantile. NaN if nothing was counted."""
        stated = self.now.values_of(f"{name}_bucket", "le")
        bounds = sorted((bound for bound in stated if not math.isnan(_number(bound))), key=float)
        counts = [self.grown(f"{name}_bucket", le=bound, **labels) for bound in bounds]
        if not counts or not counts[-1]:
            return math.nan
        rank, begin, below = share * counts[-1], 0.0, 0.0
        for bound, count in zip(bounds, counts, strict=True):
            if count >= rank and count > below:
                if math.isinf(float(bound)):
                    return begin
                return begin + (float(bound) - begin) * (rank - below) / (count - below)
            begin, below = float(bound), count
        return begin


def _number(text: str) -> float:
    """Parses a number; returns NaN for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
