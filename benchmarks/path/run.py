"""What a streamed token costs between the engine and its reader, by process, beside the least it can cost.

Streams are sent together and run to their ends. CPU time is that of the processes' own clocks, from the
first request to the last response, so it has parsing and ending in it, too. The floor is a model that only
sends (`floor/`): as many streams, responses and tokens in each, at the same pace. Our share is the ratio.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks import fake_device, history, machine, report
from benchmarks.path.client import Job, Measured, measure
from benchmarks.peers import checkpoints
from benchmarks.peers.adapter_process import AdapterError, AdapterProcess
from benchmarks.peers.run import ADAPTERS, round_order
from benchmarks.peers.workloads import FIRST_TOKEN_ID, Request
from benchmarks.served import Served, package_path, served

FLOOR = Path(__file__).resolve().parent / "floor"
DEMO = machine.ROOT / "model_repository" / "generator" / "1" / "demo"
MODEL = "generator"
FAKE_SHAPE = "smollm2"
FLOOR_S = 6.0
"""About the longest run of a floor."""
LEAST_REQUESTS = 5
FLOORS = {"floor": False, "floor, anew": True}
"""Of which kinds, and whether each response has tensors of its own."""
Figures = dict[str, float]


def figures(measured: Measured) -> Figures:
    """Rates, latencies (ms) and CPU time (us) of one run, flat."""
    summary = measured.summary
    tokens = summary["output_tokens"]
    found = {
        **{name: summary[name] for name in ("tokens_per_s", "responses_per_s", "tokens_per_response")},
        "ttft_p50_ms": summary["ttft_s"]["p50"] * 1e3,
        "others_cpu": measured.others_cpu,
    }
    for name, key in (("itl", "itl_s"), ("token", "token_gap_s")):
        gaps = summary[key] or {"p50": 0.0, "p99": 0.0}
        found |= {f"{name}_p50_ms": gaps["p50"] * 1e3, f"{name}_p99_ms": gaps["p99"] * 1e3}
    each = {**measured.cpu_s, "host": measured.cpu_s["server"] + measured.cpu_s["stub"]}
    for role, seconds in each.items():
        found[f"{role}_us_per_token"] = 1e6 * seconds / tokens
        found[f"{role}_us_per_response"] = found[f"{role}_us_per_token"] * found["tokens_per_response"]
    return found


def measure_generator(
    server: Served,
    model: str,
    prompts: Sequence[Any],
    num_tokens: int,
    streams: int,
    *,
    library: bool = False,
) -> Measured:
    """`num_tokens` tokens for each prompt (text or token ids), so many streams at once."""
    processes = server.processes()
    return measure(Job(server.url, model, processes, streams, num_tokens, list(prompts), library=library))


def measure_floor(server: Served, streams: int, like: Measured, *, anew: bool) -> Measured:
    """The floor model with what a generator's run had: streams, tokens in a response, and the pace of these.

    Args:
        server: has the model.
        streams: as there.
        like: the generator's run.
        anew: each response has tensors of its own.
    """
    summary = like.summary
    pace = summary["itl_s"]["mean"] if summary["itl_s"] else 0.0
    responses = summary["responses_per_s"] * min(summary["duration_s"], FLOOR_S) / streams
    inputs = {
        "responses": max(2, round(responses)),
        "tokens": max(1, round(summary["tokens_per_response"])),
        "step_ms": pace * 1e3,
        "anew": anew,
    }
    return measure(Job(server.url, "floor", server.processes(), streams, 0, floor=inputs))


@dataclass(frozen=True)
class Row:
    """What was measured with a number of streams, the median of each figure over the rounds."""

    streams: int
    who: str
    figures: Figures


COLUMNS = {
    "tok/s": ("tokens_per_s", 0),
    "resp/s": ("responses_per_s", 0),
    "tok/resp": ("tokens_per_response", 2),
    "server us/tok": ("server_us_per_token", 0),
    "stub us/tok": ("stub_us_per_token", 0),
    "both us/tok": ("host_us_per_token", 0),
    "engine us/tok": ("engine_us_per_token", 0),
    "client us/tok": ("client_us_per_token", 0),
    "server us/resp": ("server_us_per_response", 0),
    "stub us/resp": ("stub_us_per_response", 0),
    "client us/resp": ("client_us_per_response", 0),
    "both us/resp": ("host_us_per_response", 0),
    **{f"x {floor}": (f"x {floor}", 2) for floor in FLOORS},
    "served/in process": ("served_share", 2),
    "TTFT p50": ("ttft_p50_ms", 1),
    "ITL p50": ("itl_p50_ms", 1),
    "ITL p99": ("itl_p99_ms", 1),
    "per token p50": ("token_p50_ms", 2),
    "per token p99": ("token_p99_ms", 2),
    "others' CPU": ("others_cpu", 2),
}
"""Title, name and decimals of each figure that a table shows."""


def table(rows: Sequence[Row]) -> str:
    """Markdown; columns without any figure are left out."""
    columns = {
        title: entry for title, entry in COLUMNS.items() if any(entry[0] in row.figures for row in rows)
    }

    def cell(row: Row, name: str, decimals: int) -> str:
        value = row.figures.get(name)
        return "-" if value is None else f"{value:.{decimals}f}"

    lines = [[str(row.streams), row.who, *(cell(row, *entry) for entry in columns.values())] for row in rows]
    return report.table(["streams", "of", *columns], lines)


def medians(runs: Sequence[tuple[int, str, Figures]]) -> list[Row]:
    """One row for each number of streams and what was measured, in the order of first appearance."""
    rows = []
    for streams, who in dict.fromkeys((streams, who) for streams, who, _ in runs):
        found = [values for *key, values in runs if key == [streams, who]]
        names = dict.fromkeys(name for values in found for name in values)
        middle = {name: statistics.median(one[name] for one in found if name in one) for name in names}
        rows.append(Row(streams, who, middle))
    return rows


@dataclass(frozen=True)
class Plan:
    """What is measured: an engine's options, and the streams."""

    options: Mapping[str, Any]
    """Of quire.json."""
    vocab_size: int
    streams: Sequence[int]
    num_prompt: int
    num_tokens: int
    frontends: int = 1
    library: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of server and engine."""

    def prompts(self, streams: int, number: int) -> list[list[int]]:
        """Token ids; those of another round, or number of streams, are others. Few streams run several times,
        so that there is more than one first token."""
        source = random.Random(f"{streams}/{number}")
        ids = range(FIRST_TOKEN_ID, self.vocab_size)
        count = streams * max(1, LEAST_REQUESTS // streams)
        return [source.choices(ids, k=self.num_prompt) for _ in range(count)]

    def write_repository(self, folder: Path) -> Path:
        """A model repository with the generator and the floor."""
        version = folder / MODEL / "1"
        version.mkdir(parents=True)
        instances = f"instance_group [ {{ count: {self.frontends}, kind: KIND_MODEL }} ]"
        (version.parent / "config.pbtxt").write_text(f'backend: "quire"\n{instances}\n')
        (version / "quire.json").write_text(json.dumps(dict(self.options)))
        (folder / "floor").symlink_to(FLOOR)
        return folder


def engine_options(
    model: str,
    streams: Sequence[int],
    num_prompt: int,
    num_tokens: int,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], int]:
    """Options of the engine and the size of its vocabulary."""
    if model == "demo":
        path, vocab_size = DEMO, json.loads((DEMO / "config.json").read_text("utf-8"))["vocab_size"]
    else:
        shape = checkpoints.SHAPES[FAKE_SHAPE if model == "fake" else model]
        path = checkpoints.without_weights(shape) if model == "fake" else checkpoints.huggingface(shape)
        vocab_size = shape.vocab_size
    length = -(-(num_prompt + num_tokens) // 16) * 16
    values: dict[str, Any] = {
        "model": str(path),
        "max_model_len": max(length, 256),
        "max_num_seqs": max(max(streams), 64),
        "num_blocks": max(max(streams) * (length // 16 + 1), 1024),
    }
    if model == "fake":
        # All prompts in a step: they cost a fake device nothing.
        values["max_num_batched_tokens"] = max(streams) * num_prompt + 1
    return values | dict(options), vocab_size


@contextlib.contextmanager
def _sides(
    plan: Plan, before: Path | None, folder: Path
) -> Iterator[dict[str, tuple[Served, AdapterProcess]]]:
    """For the code here, and that of another checkout: a server, and an engine in a process of its own."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository = plan.write_repository(place / "repository")
        sides = {}
        for name, checkout in {"now": None, **({"before": before} if before else {})}.items():
            adapter = ADAPTERS / "quire_engine.py"
            env = dict(plan.env)
            if checkout is not None:
                adapter = checkout / adapter.relative_to(machine.ROOT)
                env |= package_path(checkout)
            weights, options = str(plan.options["model"]), json.dumps(dict(plan.options))
            command = [sys.executable, str(adapter), "--weights", weights, "--options", options]
            process = stack.enter_context(AdapterProcess(command, folder / f"{name}.engine.log", env=env))
            log = folder / f"{name}.server.log"
            sides[name] = (
                stack.enter_context(served(repository, log=log, env=plan.env, checkout=checkout)),
                process,
            )
        yield sides


def run(plan: Plan, rounds: int, before: Path | None, folder: Path) -> list[tuple[int, str, Figures]]:
    """All rounds: (streams, what, figures) of each measurement, as it was made."""
    runs: list[tuple[int, str, Figures]] = []

    def note(streams: int, who: str, found: Figures) -> None:
        runs.append((streams, who, found))
        with (folder / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"streams": streams, "who": who, **found}) + "\n")
        click.echo(f"path: x{streams} {who}: {found['tokens_per_s']:.0f} tok/s", err=True)

    with _sides(plan, before, folder) as sides:
        for number in range(rounds):
            for streams in plan.streams:
                prompts = plan.prompts(streams, number)
                found: dict[str, Figures] = {}
                for name in round_order(list(sides), number):
                    server, engine = sides[name]
                    measured = measure_generator(
                        server, MODEL, prompts, plan.num_tokens, streams, library=plan.library
                    )
                    found[name] = figures(measured)
                    for floor, anew in FLOORS.items():
                        least = figures(measure_floor(sides["now"][0], streams, measured, anew=anew))
                        ratio = found[name]["host_us_per_response"] / least["host_us_per_response"]
                        found[name][f"x {floor}"] = ratio
                        note(streams, f"{floor} of {name}", least)
                    other = plan.prompts(streams, rounds + number)
                    result, conditions = engine.run([Request(one, plan.num_tokens) for one in other], streams)
                    inside = {
                        "tokens_per_s": result.num_output_tokens / result.wall_s,
                        "ttft_p50_ms": 1e3 * statistics.median(result.first_token_s[:streams]),
                        "others_cpu": conditions["others_cpu"],
                    }
                    found[name]["served_share"] = found[name]["tokens_per_s"] / inside["tokens_per_s"]
                    note(streams, f"{name} in process", inside)
                    note(streams, name, found[name])
    return runs


@click.command()
@click.option(
    "--model",
    default="fake",
    show_default=True,
    type=click.Choice(["fake", "demo", *checkpoints.SHAPES]),
    help="A fake device, the demo, or a random checkpoint of a shape.",
)
@click.option("--step-ms", default=10.0, show_default=True, help="Of the fake device.")
@click.option("--streams", default="1,16,64,256", show_default=True, callback=report.integers)
@click.option("--prompt-tokens", "num_prompt", default=64, show_default=True)
@click.option("--tokens", "num_tokens", default=128, show_default=True, help="Of each stream.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--frontends", default=1, show_default=True, help="Instances of the generator.")
@click.option(
    "--options",
    default="{}",
    callback=lambda _c, _p, value: json.loads(value),
    help="Of quire.json, as JSON.",
)
@click.option("--library", is_flag=True, help="The client is quire_client, not the cheapest one.")
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path, resolve_path=True),
    help="A checkout of another commit: ours as they stand there take part too.",
)
@click.option("--history/--no-history", "keep", default=False, help="Append to benchmarks/history.jsonl.")
def main(
    model: str,
    step_ms: float,
    streams: list[int],
    num_prompt: int,
    num_tokens: int,
    rounds: int,
    frontends: int,
    options: dict[str, Any],
    library: bool,
    before: Path | None,
    keep: bool,
) -> None:
    """CPU time and latency of streamed tokens, by process, beside a model that only sends."""
    env = machine.environment()
    folder = report.output_directory()
    values, vocab_size = engine_options(model, streams, num_prompt, num_tokens, options)
    fake = fake_device.environment(step_ms) if model == "fake" else {}
    plan = Plan(values, vocab_size, streams, num_prompt, num_tokens, frontends, library, fake)
    try:
        rows = medians(run(plan, rounds, before, folder))
    except AdapterError as error:
        raise click.ClickException(f"{error} (logs: {folder})") from None
    name = f"fake {step_ms:g} ms" if model == "fake" else model
    text = (
        f"{name}, {num_prompt} tokens in and {num_tokens} out, {frontends} frontends, medians of {rounds} "
        f"rounds, latencies in ms.\n\n{table(rows)}\n\n{machine.hardware_note(env)}"
    )
    (folder / "table.md").write_text(f"{text}\n", "utf-8")
    click.echo(f"{text}\nraw data: {folder}")
    if keep:
        kept = {f"path {name} x{row.streams}": row.figures for row in rows if row.who == "now"}
        rounded = {key: {k: round(v, 2) for k, v in values.items()} for key, values in kept.items()}
        history.append(history.line(rounded, env))
