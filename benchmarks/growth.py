"""How a decode step grows with running requests and with context, and where its time goes.

    python -m benchmarks.growth                        # the Qwen3-0.6B shape, bf16
    python -m benchmarks.growth --shape llama-1b --quantization int8

For every point requests of that context are prefilled, then decode steps of all of them are timed, one after
the other, on the engine as `quire.LLM` runs it, with random weights. Beside the time stand what the step
must read (`step_work`), the share of the machine's read rate that makes, and the time of its
parts: planning, input preparation, the model with the choice of tokens, accounting. From some number of rows
on the step is bound by multiplications instead.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import machine, report
from benchmarks.peers import roofline
from benchmarks.peers.checkpoints import SHAPES, Shape, write_config
from benchmarks.peers.limits import Roofline
from quire.config import EngineConfig
from quire.engine.core import EngineCore, make_executor
from quire.engine.executor import RunnerExecutor
from quire.layers.moe import MixtureOfExperts
from quire.request.sampling_params import SamplingParams
from quire.roofline import Row, Work
from quire.worker.model_runner import ModelRunner

BLOCK_SIZE = 16
BUDGET = 2048
SETTLING = 4
"""Steps of all requests before the first one that is timed."""
PARTS = ("plan", "prepare", "model", "account")
"""`model` is also the choice of the largest logit."""


@dataclass(frozen=True)
class Point:
    """Decode steps of `running` requests with `context` tokens each; times are medians in ms."""

    running: int
    context: int
    step_ms: float
    best_ms: float
    parts_ms: dict[str, float]
    read_gib: float
    """GiB that the step reads at least (`step_work`)."""
    flop: float

    @property
    def tokens_per_s(self) -> float:
        return self.running / self.step_ms * 1000

    @property
    def outside_ms(self) -> float:
        """Time outside the model."""
        return self.step_ms - self.parts_ms["model"]

    def read_share(self, read_gb_s: float) -> float:
        """Share of the machine's read rate that the best step makes."""
        return self.read_gib * 2**30 / (self.best_ms / 1000) / (read_gb_s * 1e9)

    def floor_ms(self, limits: Roofline) -> float:
        return 1000 * limits.seconds(self.read_gib * 2**30, self.flop)


def room(points: Sequence[tuple[int, int]], num_steps: int) -> dict[str, int]:
    """Limits of an engine in which all (running, context) have room."""
    # Those that are prefilled first decode until the last one is.
    longest = [length + running * length // BUDGET + num_steps + 64 for running, length in points]
    tokens = max(running * length for (running, _), length in zip(points, longest, strict=True))
    return {
        "max_model_len": max(longest),
        "max_num_seqs": max(running for running, _ in points),
        "num_blocks": tokens // BLOCK_SIZE + max(running for running, _ in points),
    }


@contextmanager
def engine(shape: Shape, *, threaded: bool = False, **options: Any) -> Iterator[EngineCore]:
    """An engine with random weights of a shape, warmed up; prefix caching off."""
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "model": str(write_config(shape, Path(folder))),
            "load_format": "dummy",
            "max_num_batched_tokens": BUDGET,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": False,
            **options,
        }
        config = EngineConfig.from_mapping({key: value for key, value in values.items() if value is not None})
        core = EngineCore(config, make_executor(config, threaded=threaded))
        try:
            core.warm_up()
            yield core
        finally:
            core.close()


def runner_of(core: EngineCore) -> ModelRunner:
    """The runner of an engine that computes in this process."""
    assert isinstance(core.executor, RunnerExecutor) and isinstance(core.executor.runner, ModelRunner)
    return core.executor.runner


def decode_steps(
    core: EngineCore, running: int, context: int, num_steps: int, begin: Callable[[], Any] = lambda: None
) -> Iterator[float]:
    """Seconds of each of `num_steps` steps in which all of `running` requests decode.

    Args:
        context: their tokens when the first step is timed.
        begin: called before that step.
    """
    rng = random.Random(running * 100_003 + context)
    names = [f"{running}-{context}-{index}" for index in range(running)]
    # Those that begin first have decoded for half of the prefill, on the average.
    num_prompt = max(1, context - SETTLING - running * context // BUDGET // 2)
    for name in names:
        prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=core.info.max_model_len - num_prompt, ignore_eos=True)
        core.add_request(name, prompt, params)
    decoding: set[str] = set()
    while len(decoding) < running:
        decoding |= {output.request_id for output in core.step()}
    for _ in range(SETTLING):
        core.step()
    begin()
    for _ in range(num_steps):
        began = time.perf_counter()
        outputs = core.step()
        yield time.perf_counter() - began
        assert len(outputs) == running, f"{len(outputs)} of {running} requests were in a step"
    core.abort(names)
    while core.has_work:
        core.step()


class Stopwatch:
    """Sums the time of each part of a step; wraps the methods that do them."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._running = ""
        """The part under way: a method that it calls of the same part is in its time already."""
        self._wrapped: list[tuple[Any, str]] = []
        runner = runner_of(core)
        for part, owner, name in (
            ("plan", core.scheduler, "schedule"),
            ("prepare", runner.batch, "prepare"),
            ("model", runner.model, "forward"),
            ("model", runner.model, "next_tokens"),
            ("account", core.scheduler, "update"),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))
            self._wrapped.append((owner, name))

    def stop(self) -> None:
        """Times no more."""
        for owner, name in self._wrapped:
            delattr(owner, name)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._running == part:
                return call(*arguments, **named)
            outer, self._running, began = self._running, part, time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._running = outer
                self.seconds[part] += time.perf_counter() - began

        return timed

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def measure(
    core: EngineCore,
    watch: Stopwatch,
    running: int,
    context: int,
    num_steps: int,
    begin: Callable[[], Any] = lambda: None,
) -> Point:
    """One point; `begin` is called before the first timed step."""

    def begin_both() -> None:
        begin()
        watch.take()

    steps = decode_steps(core, running, context, num_steps, begin_both)
    times = [{"step": seconds, **watch.take()} for seconds in steps]
    median = {part: 1000 * statistics.median(row[part] for row in times) for part in ("step", *PARTS)}
    work = step_work(core, [(context - 1, 1, True)] * running)
    return Point(
        running,
        context,
        median.pop("step"),
        1000 * min(row["step"] for row in times),
        median,
        work.num_bytes / 2**30,
        work.flops,
    )


def step_work(core: EngineCore, rows: Sequence[Row]) -> Work:
    """The least work of a step. Of a layer's experts, as many are read as so many tokens choose on the
    average, if each chooses as by lot. States are not counted."""
    runner, num_tokens = runner_of(core), sum(count for _, count, _ in rows)
    work = runner.info.work.of_step(rows)
    for one in runner.model.modules():
        if isinstance(one, MixtureOfExperts):
            count, chosen = len(one.experts), one.gate.routing.num_chosen
            used = count * (1 - (1 - chosen / count) ** num_tokens)
            work += Work(one.unread_bytes * (used - chosen) / (count - chosen))
    return work


def table(points: list[Point], read_gb_s: float) -> str:
    """Markdown."""
    columns = ("running", "context", "step ms", "best ms", "tokens/s", "read GiB", "of read rate", *PARTS)
    return report.table(
        (*columns, "outside model ms"),
        [
            [
                str(point.running),
                str(point.context),
                f"{point.step_ms:.1f}",
                f"{point.best_ms:.1f}",
                f"{point.tokens_per_s:.1f}",
                f"{point.read_gib:.2f}",
                f"{100 * point.read_share(read_gb_s):.0f} %",
                *(f"{point.parts_ms[part]:.2f}" for part in PARTS),
                f"{point.outside_ms:.2f}",
            ]
            for point in points
        ],
    )


def plot(by_running: list[Point], by_context: list[Point], read_gb_s: float, file: Path) -> None:
    """Step time against both, with the time that reading alone takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for panel, points, key, title in (
        (panels[0], by_running, "running", "running requests"),
        (panels[1], by_context, "context", "context in tokens"),
    ):
        if not points:
            continue
        x = [getattr(point, key) for point in points]
        panel.plot(x, [point.step_ms for point in points], "o-", label="step, median")
        panel.plot(x, [point.best_ms for point in points], ".--", label="step, best")
        reading = [point.read_gib * 2**30 / read_gb_s / 1e6 for point in points]
        panel.plot(x, reading, "k:", label=f"weights and KV at {read_gb_s:.1f} GB/s")
        other = "context" if key == "running" else "running"
        panel.set(xscale="log", yscale="log", xlabel=title, ylabel="ms")
        panel.set_xticks(x, [str(value) for value in x])
        panel.set_title(f"{other} {getattr(points[0], other)}")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=110)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


@click.command()
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--quantization", type=click.Choice(["int8", "int4", "w8a8"]))
@click.option("--running", default="1,2,4,8,16,32,64,128,256", show_default=True)
@click.option("--at-context", default=128, show_default=True)
@click.option("--context", default="128,256,512,1024,2048,4096,8192", show_default=True)
@click.option("--at-running", default=4, show_default=True)
@click.option("--steps", default=16, show_default=True)
@click.option("--threads", type=int)
def main(
    shape: str,
    quantization: str | None,
    running: str,
    at_context: int,
    context: str,
    at_running: int,
    steps: int,
    threads: int | None,
) -> None:
    """Measures, writes JSON and a plot under benchmarks/out, prints tables."""
    runs = [(count, at_context) for count in _numbers(running)]
    contexts = [(at_running, length) for length in _numbers(context)]
    points = list(dict.fromkeys([*runs, *contexts]))
    options = {"quantization": quantization, "num_threads": threads, **room(points, steps)}
    limits = [roofline.measure()]
    found: dict[tuple[int, int], Point] = {}
    with engine(SHAPES[shape], **options) as core:
        watch = Stopwatch(core)
        for count, length in points:
            found[count, length] = measure(core, watch, count, length, steps)
            click.echo(f"growth: {found[count, length]}", err=True)
    limits.append(roofline.measure())
    read = Roofline.best(limits).read_gb_s
    by_running, by_context = [found[p] for p in runs], [found[p] for p in contexts]
    folder = report.output_directory()
    document = {
        "environment": machine.environment(),
        "settings": {"shape": shape, "steps": steps, **options},
        "roofline": limits,
        "points": [asdict(point) for point in found.values()],
    }
    (folder / "growth.json").write_text(json.dumps(document, indent=1))
    plot(by_running, by_context, read, folder / "growth.png")
    click.echo(f"read rate {read:.1f} GB/s\n")
    click.echo(table(by_running, read) + "\n\n" + table(by_context, read))
    click.echo(f"\n{folder}")


if __name__ == "__main__":
    main()
