"""Own load generator over quire_client: open loop (Poisson or a trace) or closed loop, goodput under an SLO.

An open loop sends at its own times, whatever the server does, and so shows queueing; a closed loop keeps a
number of requests running, and so shows capacity. Latencies in an open loop count from the time a request
was due.

    python -m benchmarks.load --rate 20 --requests 200 --slo-ttft 0.5 --slo-itl 0.1
    python -m benchmarks.load --concurrency 16 --requests 200
    python -m benchmarks.load --trace trace.jsonl
    # its lines: {"at": 0.25, "prompt": "What is 1 + 2?", "max_tokens": 16}, or "prompt_tokens": 200 instead
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.prompts import prompts
from benchmarks.report import SLO, RequestRecord, Row
from quire_client import AsyncClient, QuireClientError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    at: float
    """Seconds after the start; a closed loop ignores it."""
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts (questions of about 8 words each) and outputs (tokens), uniform in these ranges."""

    prompt_questions: tuple[int, int] = (1, 4)
    output_tokens: tuple[int, int] = (8, 64)
    seed: int = 0

    def arrivals(self, count: int, rate: float | None) -> list[Arrival]:
        """`count` requests; with a rate (per second) their gaps are exponential: a Poisson process."""
        rng = random.Random(self.seed)
        texts = prompts(count, words=self.prompt_questions, seed=self.seed)
        listed, at = [], 0.0
        for text in texts:
            if rate is not None:
                at += rng.expovariate(rate)
            listed.append(Arrival(at, text, rng.randint(*self.output_tokens)))
        return listed


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals of a JSON-lines file, ordered by time.

    Raises:
        click.ClickException: naming the line that is wrong.
    """
    arrivals = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry.get("prompt") or "1 " * int(entry["prompt_tokens"])
            arrivals.append(Arrival(float(entry["at"]), prompt, int(entry["max_tokens"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise click.ClickException(f"{path}:{number}: {type(error).__name__} {error}") from None
    return sorted(arrivals, key=lambda arrival: arrival.at)


async def send(
    client: AsyncClient, model: str, arrival: Arrival, due: float, timeout: float
) -> RequestRecord:
    """Sends one request and records it. `due` is on the clock of `time.perf_counter()`."""
    times: list[float] = []
    counts: list[int] = []
    error = None
    stream = client.stream(
        arrival.prompt, model=model, max_tokens=arrival.max_tokens, ignore_eos=True, timeout=timeout
    )
    try:
        async for chunk in stream:
            if chunk.num_tokens:
                times.append(chunk.received_at)
                counts.append(chunk.num_tokens)
    except QuireClientError as failure:
        error = failure.code
    return RequestRecord(due, tuple(times), tuple(counts), error)


async def open_loop(
    client: AsyncClient, model: str, arrivals: Sequence[Arrival], timeout: float
) -> list[RequestRecord]:
    """Each request at its own time, however many are running."""
    begin = time.perf_counter()

    async def one(arrival: Arrival) -> RequestRecord:
        due = begin + arrival.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await send(client, model, arrival, due, timeout)

    return list(await asyncio.gather(*(one(arrival) for arrival in arrivals)))


async def closed_loop(
    client: AsyncClient, model: str, arrivals: Sequence[Arrival], concurrency: int, timeout: float
) -> list[RequestRecord]:
    """A number of requests running all the time, the next one sent when one ends."""
    left = iter(arrivals)
    records: list[RequestRecord] = []

    async def worker() -> None:
        for arrival in left:
            records.append(await send(client, model, arrival, time.perf_counter(), timeout))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return records


@dataclass(frozen=True)
class Plan:
    """One scenario: exactly one of rate, concurrency and trace is set."""

    model: str
    rate: float | None = None
    concurrency: int | None = None
    trace: tuple[Arrival, ...] | None = None
    requests: int = 100
    mix: Mix = Mix()
    slo: SLO | None = None
    timeout: float = 120.0

    @property
    def load(self) -> str:
        if self.rate is not None:
            return f"Poisson {self.rate:g}/s"
        return "trace" if self.trace is not None else f"closed x{self.concurrency}"


async def _measure(url: str, plan: Plan, repeats: int, warmup: int) -> tuple[Row, list[list[RequestRecord]]]:
    row = Row(plan.load, plan.model)
    runs = []
    async with AsyncClient(url) as client:
        if warmup:
            await closed_loop(
                client, plan.model, plan.mix.arrivals(warmup, None), min(warmup, 4), plan.timeout
            )
        for repeat in range(repeats):
            mix = Mix(plan.mix.prompt_questions, plan.mix.output_tokens, plan.mix.seed + repeat)
            arrivals = plan.trace or mix.arrivals(plan.requests, plan.rate)
            if plan.concurrency is not None:
                records = await closed_loop(client, plan.model, arrivals, plan.concurrency, plan.timeout)
            else:
                records = await open_loop(client, plan.model, arrivals, plan.timeout)
            runs.append(records)
            row.summaries.append(report.summarize(records, slo=plan.slo))
    return row, runs


def run(url: str, plan: Plan, folder: Path, *, repeats: int = 3, warmup: int = 8) -> Row:
    """Warm-up, then the repeats; raw records are saved in the folder."""
    row, runs = asyncio.run(_measure(url, plan, repeats, warmup))
    name = f"load-{plan.model}-{plan.load.replace(' ', '-').replace('/', 'per')}.json"
    raw: list[list[dict[str, Any]]] = [
        [
            {"start": r.start, "times": r.response_times, "tokens": r.response_tokens, "error": r.error}
            for r in run
        ]
        for run in runs
    ]
    (folder / name).write_text(json.dumps(raw), "utf-8")
    return row


@click.command()
@click.option("--url", default="localhost:8001", show_default=True, help="HOST:PORT of the gRPC endpoint.")
@click.option("--model", default="generator", show_default=True)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Open loop: requests per second.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Closed loop: requests running.")
@click.option(
    "--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Open loop: a file."
)
@click.option("--requests", default=100, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--prompt-questions", default=(1, 4), show_default=True, type=(int, int), help="Least and most."
)
@click.option("--output-tokens", default=(8, 64), show_default=True, type=(int, int), help="Least and most.")
@click.option("--slo-ttft", default=0.5, show_default=True, help="Seconds.")
@click.option("--slo-itl", default=0.1, show_default=True, help="Seconds, for the p99 of a request.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--warmup", default=8, show_default=True, help="Requests before the first repeat.")
@click.option("--seed", default=0, show_default=True)
@click.option("--timeout", default=120.0, show_default=True, help="Seconds per request.")
def main(
    url: str,
    model: str,
    rate: float | None,
    concurrency: int | None,
    trace: Path | None,
    requests: int,
    prompt_questions: tuple[int, int],
    output_tokens: tuple[int, int],
    slo_ttft: float,
    slo_itl: float,
    repeats: int,
    warmup: int,
    seed: int,
    timeout: float,
) -> None:
    """Loads a running server and prints one table."""
    if sum(x is not None for x in (rate, concurrency, trace)) != 1:
        raise click.UsageError("give exactly one of --rate, --concurrency and --trace")
    plan = Plan(
        model,
        rate,
        concurrency,
        tuple(read_trace(trace)) if trace else None,
        requests,
        Mix(prompt_questions, output_tokens, seed),
        SLO(slo_ttft, slo_itl),
        timeout,
    )
    env = report.environment()
    folder = report.output_directory()
    row = run(url, plan, folder, repeats=repeats, warmup=warmup)
    click.echo(report.save(folder, [row], env, {"tool": "load"}))
    click.echo(f"raw data: {folder}")
    if any(s["completed"] == 0 for s in row.summaries):
        raise click.ClickException(f"no request succeeded: {row.summaries[0]['errors']}")


if __name__ == "__main__":
    main()
