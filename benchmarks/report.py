"""What is computed from measured requests: percentiles, rates, tables, the files of a run.

Times are seconds everywhere; tables show milliseconds. Percentiles interpolate linearly between samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import ROOT, hardware_note

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One measured request."""

    start: float
    """Time when it was sent."""
    response_times: tuple[float, ...]
    """Times of arrival of the responses with tokens, ascending, on the clock of `start`."""
    response_tokens: tuple[int, ...]
    """Tokens in each of these responses; more than one where the server coalesced."""
    error: str | None = None
    """Code of the error that ended it; the request then counts in no latency and no rate."""
    group: str = ""
    """Name of those requests whose figures are also told apart from the others'."""

    @property
    def num_tokens(self) -> int:
        return sum(self.response_tokens)

    @property
    def ttft(self) -> float:
        return self.response_times[0] - self.start

    @property
    def latency(self) -> float:
        return self.response_times[-1] - self.start

    @property
    def itls(self) -> list[float]:
        """Gaps between responses: what a reader of the stream sees, coalesced or not."""
        return [b - a for a, b in zip(self.response_times, self.response_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first response; None when there is none."""
        after_first = self.num_tokens - self.response_tokens[0]
        return (self.response_times[-1] - self.response_times[0]) / after_first if after_first > 0 else None


@dataclass(frozen=True)
class SLO:
    """A request is good when its TTFT and its largest-but-1% ITL are within these, seconds."""

    ttft: float
    itl: float

    def is_met(self, record: RequestRecord) -> bool:
        itls = record.itls
        return record.ttft <= self.ttft and (not itls or percentile(itls, 99) <= self.itl)


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), interpolated linearly between the closest ranks."""
    assert samples, "a percentile of nothing"
    return float(np.percentile(samples, q))


def distribution(samples: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles, or None without samples."""
    values = list(samples)
    if not values:
        return None
    return {"mean": sum(values) / len(values), **{f"p{q}": percentile(values, q) for q in PERCENTILES}}


def summarize(records: Sequence[RequestRecord], *, slo: SLO | None = None) -> dict[str, Any]:
    """Rates and latencies of one run.

    Rates are over the time from the first request's start to the last response. Failed requests are counted
    and otherwise left out.
    """
    good = [r for r in records if r.error is None and r.response_times]
    empty = sum(r.error is None and not r.response_times for r in records)
    errors: dict[str, int] = {"EMPTY": empty} if empty else {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    summary: dict[str, Any] = {"requests": len(records), "completed": len(good), "errors": errors}
    if not good:
        return summary
    duration = max(r.response_times[-1] for r in good) - min(r.start for r in records)
    tokens = sum(r.num_tokens for r in good)
    responses = sum(len(r.response_times) for r in good)
    summary |= {
        "duration_s": duration,
        "output_tokens": tokens,
        "tokens_per_s": tokens / duration,
        "requests_per_s": len(good) / duration,
        "responses_per_s": responses / duration,
        "tokens_per_response": tokens / responses,
        "ttft_s": distribution(r.ttft for r in good),
        "itl_s": distribution(gap for r in good for gap in r.itls),
        "tpot_s": distribution(t for r in good if (t := r.tpot) is not None),
        "latency_s": distribution(r.latency for r in good),
    }
    if slo is not None:
        met = sum(slo.is_met(r) for r in good)
        summary["goodput"] = {
            "ttft_s": slo.ttft,
            "itl_s": slo.itl,
            "requests_per_s": met / duration,
            "share": met / len(records),
        }
    return summary


def spread(summaries: Sequence[Mapping[str, Any]]) -> float | None:
    """(max - min) / median of the tokens/s of repeats; None with fewer than two."""
    values = [s["tokens_per_s"] for s in summaries if "tokens_per_s" in s]
    return (max(values) - min(values)) / percentile(values, 50) if len(values) > 1 else None


def median_run(summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The repeat in the middle by tokens/s (the lower one of two), so that its numbers belong together."""
    assert summaries
    ordered = sorted(summaries, key=lambda s: s.get("tokens_per_s", 0.0))
    return ordered[(len(ordered) - 1) // 2]


@dataclass
class Row:
    """One line of the table: a scenario and its repeats."""

    load: str
    model: str
    summaries: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "model": self.model,
            "repeats": self.summaries,
            "median": dict(median_run(self.summaries)),
            "spread": spread(self.summaries),
        }


_COLUMNS = (
    *("model", "load", "req", "err", "tok/s", "±%", "resp/s", "req/s"),
    *("TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "TPOT p50", "e2e p50", "p99", "goodput"),
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def markdown_table(rows: Sequence[Row]) -> str:
    """One line per row: the median repeat; latencies in ms."""
    return table(_COLUMNS, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    run = median_run(row.summaries)
    between = spread(row.summaries)
    goodput = run.get("goodput")
    return [
        row.model,
        row.load,
        str(run["requests"]),
        str(run["requests"] - run["completed"]),
        _number(run.get("tokens_per_s")),
        "-" if between is None else f"{between * 50:.0f}",
        _number(run.get("responses_per_s")),
        _number(run.get("requests_per_s")),
        *(_milliseconds(run, "ttft_s", q) for q in ("p50", "p90", "p99")),
        *(_milliseconds(run, "itl_s", q) for q in ("p50", "p90", "p99")),
        _milliseconds(run, "tpot_s", "p50"),
        *(_milliseconds(run, "latency_s", q) for q in ("p50", "p99")),
        "-" if goodput is None else f"{goodput['share'] * 100:.0f}%",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _milliseconds(run: Mapping[str, Any], key: str, quantile: str) -> str:
    values = run.get(key)
    return "-" if not values else _number(values[quantile] * 1e3)


def integers(_: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    """The value of an option that is a list like 1,4,16."""
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"positive integers like 1,4,16 expected, got {value!r}", param=parameter)
    return numbers


def output_directory(parent: Path | None = None) -> Path:
    """A new folder benchmarks/out/<UTC time>, for raw data."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    base = parent or ROOT / "benchmarks" / "out"
    folder, n = base / stamp, 1
    while folder.exists():
        n += 1
        folder = base / f"{stamp}-{n}"
    folder.mkdir(parents=True)
    return folder


def save(folder: Path, rows: Sequence[Row], env: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """Writes summary.json and table.md into the folder; returns the text of table.md."""
    document = {"environment": dict(env), **extra, "rows": [row.as_json() for row in rows]}
    (folder / "summary.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    text = (
        f"{markdown_table(rows)}\n\n{hardware_note(env)} Clients run on the same machine; latencies in ms; "
        "± is half the spread of the repeats.\n"
    )
    (folder / "table.md").write_text(text, "utf-8")
    return text
