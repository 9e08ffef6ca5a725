"""Own load generator over quire_client: open loop (Poisson or a trace) or closed loop, goodput under an SLO.

An open loop sends at its own times, whatever the server does, and so shows queueing; a closed loop keeps a
number of requests running, and so shows capacity. Latencies in an open loop count from the time a request
was due.

A trace is a file of lines like {"at": 0.25, "prompt": "What is 1 + 2?", "max_tokens": 16}, or with
"prompt_tokens": 200 instead of the prompt; "tenant" and "priority" may be among them, and each pair of these
has its own row in the table.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from benchmarks import report
from benchmarks.report import SLO, RequestRecord, Row
from quire_client import AsyncClient, QuireClientError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    at: float
    """Seconds after the start; a closed loop ignores it."""
    prompt: str | list[int]
    """Text or token ids."""
    max_tokens: int
    tenant: str = ""
    priority: int = 0

    @property
    def group(self) -> str:
        tenant = f"tenant {self.tenant}" if self.tenant else ""
        priority = f"priority {self.priority}" if self.priority else ""
        return ", ".join(filter(None, (tenant, priority)))


def prompts(count: int, *, words: tuple[int, int] = (1, 1), seed: int = 0) -> list[str]:
    """Questions of the kinds the demo checkpoint knows, each `words[0]` to `words[1]` questions long.

    The content does not matter to a measurement (lengths are fixed by `max_tokens` and `ignore_eos`), but
    prompts must differ, or prefix caching would be measured.
    """
    rng = random.Random(seed)
    return [" ".join(_question(rng) for _ in range(rng.randint(*words))) for _ in range(count)]


def _question(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:
        return f"What is {rng.randint(0, 99)} + {rng.randint(0, 99)}?"
    if kind == 1:
        return f"Reverse the word {''.join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))}."
    return f"Sort the numbers {', '.join(str(rng.randint(0, 99)) for _ in range(rng.randint(3, 6)))}."


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
            tenant, priority = str(entry.get("tenant", "")), int(entry.get("priority", 0))
            arrivals.append(Arrival(float(entry["at"]), prompt, int(entry["max_tokens"]), tenant, priority))
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
    scheduling = {name: value for name in ("tenant", "priority") if (value := getattr(arrival, name))}
    text, ids = (arrival.prompt, None) if isinstance(arrival.prompt, str) else (None, arrival.prompt)
    stream = client.stream(
        text,
        input_ids=ids,
        model=model,
        max_tokens=arrival.max_tokens,
        ignore_eos=True,
        timeout=timeout,
        **scheduling,
    )
    try:
        async for chunk in stream:
            if chunk.num_tokens:
                times.append(chunk.received_at)
                counts.append(chunk.num_tokens)
    except QuireClientError as failure:
        error = failure.code
    return RequestRecord(due, tuple(times), tuple(counts), error, arrival.group)


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


async def _measure(url: str, plan: Plan, repeats: int, warmup: int) -> list[list[RequestRecord]]:
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
    return runs


def run(url: str, plan: Plan, folder: Path, *, repeats: int = 3, warmup: int = 8) -> list[Row]:
    """Warm-up, then the repeats; raw records are saved in the folder.

    Returns:
        The row of all requests and, where a trace has several tenants or priorities, one of each.
    """
    runs = asyncio.run(_measure(url, plan, repeats, warmup))
    name = f"load-{plan.model}-{plan.load.replace(' ', '-').replace('/', 'per')}.json"
    (folder / name).write_text(json.dumps([[asdict(record) for record in run] for run in runs]), "utf-8")
    groups = sorted({record.group for run in runs for record in run})
    rows = [Row(plan.load, plan.model, [report.summarize(run, slo=plan.slo) for run in runs])]
    for group in groups if len(groups) > 1 else ():
        parts = ([record for record in run if record.group == group] for run in runs)
        load = f"{plan.load}, {group or 'others'}"
        rows.append(Row(load, plan.model, [report.summarize(part, slo=plan.slo) for part in parts]))
    return rows
