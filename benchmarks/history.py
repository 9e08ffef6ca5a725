"""History of the benchmarks: a line of key figures per run, and what has changed since.

python -m benchmarks.history --threshold 10
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.machine import ROOT
from benchmarks.report import Row, median_run

HISTORY = ROOT / "benchmarks" / "history.jsonl"
COMPARED_RUNS = 5
"""Runs before it on the same machine with whose median a run is compared, so that one odd run is none."""
HIGHER_IS_BETTER = {
    "tokens_per_s": True,
    "ttft_p50_ms": False,
    "itl_p50_ms": False,
    "latency_p99_ms": False,
    "host_us_per_token": False,
}


def entry(rows: Sequence[Row], env: Mapping[str, Any]) -> dict[str, Any]:
    """The line of one run."""
    figures = {}
    for row in rows:
        run = median_run(row.summaries)
        if run["completed"]:
            figures[f"{row.model} {row.load}"] = {
                "tokens_per_s": round(run["tokens_per_s"], 1),
                "ttft_p50_ms": round(run["ttft_s"]["p50"] * 1e3, 2),
                "itl_p50_ms": round(run["itl_s"]["p50"] * 1e3, 2) if run["itl_s"] else None,
                "latency_p99_ms": round(run["latency_s"]["p99"] * 1e3, 2),
                "errors": run["requests"] - run["completed"],
            }
    return line(figures, env)


def line(figures: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """What a run adds to the history: figures by scenario, and where they come from."""
    machine = f"{env['cpu']} x{env['usable_cores']}" + (f", {env['gpu']}" if env["gpu"] else "")
    return {
        "date": env["date"],
        "commit": env["commit"],
        "dirty": env["dirty"],
        "machine": machine,
        "loadavg": env["loadavg"],
        "figures": figures,
    }


def append(line: Mapping[str, Any], path: Path = HISTORY) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path = HISTORY) -> list[dict[str, Any]]:
    """All runs, oldest first; empty without a file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


@dataclass(frozen=True)
class Change:
    """A figure of the last run against the median of those before it."""

    scenario: str
    figure: str
    before: float
    now: float

    @property
    def percent(self) -> float:
        return (self.now / self.before - 1) * 100

    @property
    def is_worse(self) -> bool:
        return (self.now < self.before) == HIGHER_IS_BETTER[self.figure]


def changes(lines: Sequence[Mapping[str, Any]], threshold: float) -> list[Change]:
    """Figures of the last run that moved by more than `threshold` percent, on the same machine only."""
    if not lines:
        return []
    last = lines[-1]
    earlier = [line for line in lines[:-1] if line["machine"] == last["machine"]][-COMPARED_RUNS:]
    found = []
    for scenario, figures in last["figures"].items():
        for name in HIGHER_IS_BETTER:
            values = [
                value
                for line in earlier
                if (value := line["figures"].get(scenario, {}).get(name)) is not None
            ]
            now = figures.get(name)
            if not values or now is None or (before := statistics.median(values)) == 0:
                continue
            change = Change(scenario, name, before, now)
            if abs(change.percent) > threshold:
                found.append(change)
    return found


def table(lines: Sequence[Mapping[str, Any]], last: int = 10) -> str:
    """Tokens/s of the last runs, newest first, one column per scenario."""
    shown = list(reversed(lines[-last:]))
    scenarios = list(dict.fromkeys(name for line in shown for name in line["figures"]))
    rows = []
    for line in shown:
        rates = [str(line["figures"].get(name, {}).get("tokens_per_s", "-")) for name in scenarios]
        commit = f"{(line['commit'] or 'unknown')[:10]}{'+' if line['dirty'] else ''}"
        rows.append([line["date"][:16], commit, line["machine"], *rates])
    return report.table(["date", "commit", "machine", *scenarios], rows)


@click.command()
@click.option(
    "--file", "path", default=HISTORY, type=click.Path(path_type=Path), help="Default: our own history."
)
@click.option("--threshold", default=10.0, show_default=True, help="Percent from which a change is shown.")
@click.option("--last", default=10, show_default=True, help="Runs in the table.")
@click.option(
    "--fail", is_flag=True, help="Exit status 1 when a figure got worse by more than the threshold."
)
def main(path: Path, threshold: float, last: int, fail: bool) -> None:
    """Shows tokens/s of the last runs, and what moved in the last one."""
    lines = read(path)
    if not lines:
        raise click.ClickException(f"{path}: no runs yet; `make bench` adds one")
    click.echo(table(lines, last))
    moved = changes(lines, threshold)
    for change in moved:
        word = "WORSE" if change.is_worse else "better"
        values = f"{change.before:g} -> {change.now:g} ({change.percent:+.0f}%)"
        click.echo(f"{word}: {change.scenario}: {change.figure} {values}")
    if not moved:
        click.echo(f"no figure moved by more than {threshold:g}%")
    if fail and any(change.is_worse for change in moved):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
