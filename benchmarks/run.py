"""`make bench`: serves the demo, runs perf_analyzer and the load generator, prints a table, keeps history."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

if __package__ in (None, ""):
    # Run by path: python then has this folder on its path, not the one above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import history, host_cost, load, perf_analyzer, report
from benchmarks.report import ROOT, SLO
from benchmarks.served import Served, served, wait_ready


def _say(line: str) -> None:
    click.echo(f"bench: {line}", err=True)


@click.command()
@click.option("--url", help="A running server's gRPC endpoint, instead of starting one.")
@click.option(
    "--model-repository",
    "repository",
    default=ROOT / "model_repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Default: the demo.",
)
@click.option("--models", default="generator,chat", show_default=True)
@click.option("--concurrency", default="1,4,16,64", show_default=True, callback=perf_analyzer.integers)
@click.option("--max-tokens", default=32, show_default=True, help="Tokens per request under perf_analyzer.")
@click.option("--rate", default=8.0, show_default=True, help="Load generator: Poisson requests per second.")
@click.option("--requests", default=80, show_default=True, help="Load generator: requests per run.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--requests-per-stream", default=4, show_default=True, help="perf_analyzer: per run.")
@click.option("--slo-ttft", default=0.5, show_default=True, help="Seconds.")
@click.option("--slo-itl", default=0.1, show_default=True, help="Seconds.")
@click.option("--quick", is_flag=True, help="Two concurrencies, one repeat: does it run at all?")
@click.option("--history/--no-history", "keep", default=True, help="Append to benchmarks/history.jsonl.")
@click.option("--threshold", default=10.0, show_default=True, help="Percent from which a change is told.")
def main(
    url: str | None,
    repository: Path,
    models: str,
    concurrency: list[int],
    max_tokens: int,
    rate: float,
    requests: int,
    repeats: int,
    requests_per_stream: int,
    slo_ttft: float,
    slo_itl: float,
    quick: bool,
    keep: bool,
    threshold: float,
) -> None:
    """Measures a served model repository and prints one table."""
    if quick:
        concurrency, repeats, requests, keep = concurrency[:2], 1, min(requests, 16), False
    version = perf_analyzer.check_binary(perf_analyzer.find_binary(), perf_analyzer.library_path())
    env = report.environment()
    folder = report.output_directory()
    names = models.split(",")
    server: Served | None = None
    with contextlib.ExitStack() as stack:
        if url is None:
            _say(f"starting a server for {repository}")
            server = stack.enter_context(served(repository, log=folder / "server.log"))
            url = server.url
        else:
            wait_ready(url, 10.0)
        _say(f"measuring {url}")
        rows = perf_analyzer.matrix(
            url,
            names,
            concurrency,
            folder,
            workload=perf_analyzer.Workload(max_tokens),
            requests_per_stream=requests_per_stream,
            repeats=repeats,
            progress=_say,
        )
        slo = SLO(slo_ttft, slo_itl)
        for name in names:
            for plan in (
                load.Plan(name, rate=rate, requests=requests, slo=slo),
                load.Plan(name, concurrency=16, requests=requests, slo=slo),
            ):
                row = load.run(url, plan, folder, repeats=repeats)
                _say(f"{row.load} {row.model}: done")
                rows.append(row)
        costs = []
        if server is not None:
            _say("host cost per streamed token")
            costs = [
                host_cost.measure(url, server.pid, name, streams=streams, max_tokens=256)
                for name in names
                for streams in ((16,) if quick else (1, 16, 64))
            ]
    settings = {
        "perf_analyzer": version,
        "max_tokens": max_tokens,
        "repeats": repeats,
        "host_cost": [cost.as_dict() for cost in costs],
    }
    click.echo(report.save(folder, rows, env, settings))
    if costs:
        click.echo(f"CPU time beside the model, all processes' own clocks:\n\n{host_cost.table(costs)}\n")
    click.echo(f"raw data: {folder}")
    if keep:
        history.append(history.entry(rows, env))
        for change in history.changes(history.read(), threshold):
            word = "worse" if change.is_worse else "better"
            click.echo(f"{word} than before: {change.scenario} {change.figure} {change.percent:+.0f}%")
    failed = sum(s["requests"] - s["completed"] for row in rows for s in row.summaries)
    if failed:
        raise click.ClickException(f"{failed} requests failed; see the column err and {folder}/summary.json")


if __name__ == "__main__":
    main()
