"""`make bench`: serves the demo, runs perf_analyzer and the load generator, prints a table, keeps history."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks import history, load, machine, perf_analyzer, report
from benchmarks.path import run as path
from benchmarks.report import SLO
from benchmarks.served import Served, served, wait_ready

TOOLS = ("perf_analyzer", "load", "path")
PATH_TOKENS = 256
"""Tokens of a stream whose CPU time is told."""


def _say(line: str) -> None:
    click.echo(f"bench: {line}", err=True)


@click.command()
@click.option("--url", help="A running server's gRPC endpoint, instead of starting one.")
@click.option(
    "--model-repository",
    "repository",
    default=machine.ROOT / "model_repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Default: the demo.",
)
@click.option("--models", default="generator,chat", show_default=True)
@click.option("--tool", "tools", multiple=True, type=click.Choice(TOOLS), default=TOOLS, show_default=True)
@click.option("--concurrency", default="1,4,16,64", show_default=True, callback=report.integers)
@click.option("--max-tokens", default=32, show_default=True, help="Tokens per request under perf_analyzer.")
@click.option("--rate", default=8.0, show_default=True, help="Load generator: Poisson requests per second.")
@click.option("--closed", default=16, show_default=True, help="And with so many running all the time.")
@click.option("--requests", default=80, show_default=True, help="Load generator: requests per run.")
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Load generator: instead of both, the requests of this file (see load.py).",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--requests-per-stream", default=4, show_default=True, help="perf_analyzer: per run.")
@click.option("--slo-ttft", default=0.5, show_default=True, help="Seconds.")
@click.option("--slo-itl", default=0.1, show_default=True, help="Seconds, for the p99 of a request.")
@click.option("--quick", is_flag=True, help="Two concurrencies, one repeat: does it run at all?")
@click.option("--history/--no-history", "keep", default=True, help="Append to benchmarks/history.jsonl.")
@click.option("--threshold", default=10.0, show_default=True, help="Percent from which a change is told.")
def main(
    url: str | None,
    repository: Path,
    models: str,
    tools: tuple[str, ...],
    concurrency: list[int],
    max_tokens: int,
    rate: float,
    closed: int,
    requests: int,
    trace: Path | None,
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
    arrivals = tuple(load.read_trace(trace)) if trace is not None else None
    keep = keep and arrivals is None and set(tools) == set(TOOLS)
    settings = {"max_tokens": max_tokens, "repeats": repeats}
    if "perf_analyzer" in tools:
        binary, libraries = perf_analyzer.find_binary(), perf_analyzer.library_path()
        settings["perf_analyzer"] = perf_analyzer.check_binary(binary, libraries)
    env = machine.environment()
    folder = report.output_directory()
    names = models.split(",")
    rows: list[report.Row] = []
    costs: list[path.Row] = []
    server: Served | None = None
    with contextlib.ExitStack() as stack:
        if url is None:
            _say(f"starting a server for {repository}")
            server = stack.enter_context(served(repository, log=folder / "server.log"))
            url = server.url
        else:
            wait_ready(url, 10.0)
        _say(f"measuring {url}")
        if "perf_analyzer" in tools:
            rows += perf_analyzer.matrix(
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
        for name in names if "load" in tools else ():
            plans = [load.Plan(name, trace=arrivals, slo=slo)]
            if arrivals is None:
                plans = [
                    load.Plan(name, rate=rate, requests=requests, slo=slo),
                    load.Plan(name, concurrency=closed, requests=requests, slo=slo),
                ]
            for plan in plans:
                rows += load.run(url, plan, folder, repeats=repeats)
                _say(f"{plan.load} {name}: done")
        if server is not None and "path" in tools:
            _say("CPU time per streamed token")
            for name in names:
                for streams in concurrency:
                    measured = path.measure_generator(
                        server, name, load.prompts(streams), PATH_TOKENS, streams
                    )
                    costs.append(path.Row(streams, name, path.figures(measured)))
    settings["path"] = [asdict(cost) for cost in costs]
    click.echo(report.save(folder, rows, env, settings))
    if costs:
        click.echo(f"CPU time by process, all processes' own clocks:\n\n{path.table(costs)}\n")
    click.echo(f"raw data: {folder}")
    if keep:
        history.append(history.entry(rows, env))
        for change in history.changes(history.read(), threshold):
            word = "worse" if change.is_worse else "better"
            click.echo(f"{word} than before: {change.scenario} {change.figure} {change.percent:+.0f}%")
    if any(summary["completed"] < summary["requests"] for row in rows for summary in row.summaries):
        raise click.ClickException(f"requests failed; see the column err and {folder}/summary.json")


if __name__ == "__main__":
    main()
