"""How a decode step grows with running requests and with context, and where its time goes.

    python -m benchmarks.growth                        # the Qwen3-0.6B shape, bf16
    python -m benchmarks.growth --shape llama-1b --quantization int8

For every point requests of that context are prefilled, then decode steps of all of them are timed, one after
the other, on the engine as `quire.LLM` runs it. Beside the time stand what the step must read (weights and
KV of every row), the share of the machine's read rate that makes, and the time outside the model's layers:
planning, input preparation, sampling, accounting. From some number of rows on the step is bound by
multiplications instead.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.peers import checkpoints, machine, roofline
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.report import output_directory
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.sampling_params import SamplingParams

BLOCK_SIZE = 16
PRECISIONS = {None: "bf16", "int8": "int8", "w8a8": "int8", "int4": "int4"}
"""Precision of the weights as the roofline names it, by `quantization`."""
PARTS = ("plan", "prepare", "layers", "head", "account")
"""`head` is the output head and the choice of the largest logit, in one."""


@dataclass(frozen=True)
class Point:
    """Decode steps of `running` requests with `context` tokens each; times are medians in ms."""

    running: int
    context: int
    step_ms: float
    best_ms: float
    parts_ms: dict[str, float]
    read_gib: float
    """Weights once, KV of every row."""

    @property
    def tokens_per_s(self) -> float:
        return self.running / self.step_ms * 1000

    def read_share(self, read_gb_s: float) -> float:
        """Share of the machine's read rate that the best step makes."""
        return self.read_gib * 2**30 / (self.best_ms / 1000) / (read_gb_s * 1e9)


def _runner(core: EngineCore) -> Any:
    assert isinstance(core.executor, RunnerExecutor)
    return core.executor.runner


class Stopwatch:
    """Sums the time of each part of a step; wraps the methods that do them."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        runner = _runner(core)
        for part, owner, name in (
            ("plan", core.scheduler, "schedule"),
            ("prepare", runner.batch, "prepare"),
            ("layers", runner.model, "forward"),
            ("head", runner.model, "best_tokens"),
            ("account", core.scheduler, "update"),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return timed

    @contextmanager
    def step(self, into: list[dict[str, float]]) -> Iterator[None]:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        began = time.perf_counter()
        yield
        into.append({"step": time.perf_counter() - began, **self.seconds})


def measure(
    core: EngineCore, watch: Stopwatch, running: int, context: int, num_steps: int, weights: float, kv: float
) -> Point:
    """One point. `weights`: bytes that every step reads; `kv`: bytes of a token's keys and values."""
    rng = random.Random(running * 100_003 + context)
    names = [f"{running}-{context}-{index}" for index in range(running)]
    for name in names:
        prompt = [rng.randrange(core.info.vocab_size) for _ in range(context - num_steps // 2)]
        params = SamplingParams(max_tokens=core.info.max_model_len - len(prompt), ignore_eos=True)
        core.add_request(name, prompt, params)
    decoding: set[str] = set()
    while len(decoding) < running:
        decoding |= {output.request_id for output in core.step()}
    times: list[dict[str, float]] = []
    for _ in range(num_steps):
        with watch.step(times):
            outputs = core.step()
        assert len(outputs) == running
    core.abort(names)
    median = {part: 1000 * statistics.median(row[part] for row in times) for part in ("step", *PARTS)}
    return Point(
        running,
        context,
        median.pop("step"),
        1000 * min(row["step"] for row in times),
        median,
        (weights + running * context * kv) / 2**30,
    )


def table(points: list[Point], read_gb_s: float) -> str:
    """Markdown."""
    lines = [
        "| running | context | step ms | best ms | tokens/s | read GiB | of read rate | outside model ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        outside = point.step_ms - point.parts_ms["layers"] - point.parts_ms["head"]
        lines.append(
            f"| {point.running} | {point.context} | {point.step_ms:.1f} | {point.best_ms:.1f} "
            f"| {point.tokens_per_s:.1f} | {point.read_gib:.2f} | {100 * point.read_share(read_gb_s):.0f} % "
            f"| {outside:.2f} |"
        )
    return "\n".join(lines)


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
    points = [*runs, *contexts]
    tokens = max(count * (length + steps + BLOCK_SIZE) for count, length in points)
    values: dict[str, Any] = {
        "model": str(checkpoints.huggingface(SHAPES[shape])),
        "max_model_len": max(length for _, length in points) + 2 * steps,
        "max_num_seqs": max(count for count, _ in points),
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_SIZE,
        "num_blocks": tokens // BLOCK_SIZE + max(count for count, _ in points),
        "enable_prefix_caching": False,
        "quantization": quantization,
        "num_threads": threads,
    }
    core = EngineCore(EngineConfig.from_mapping({k: v for k, v in values.items() if v is not None}))
    core.warm_up()
    weights = SHAPES[shape].weight_bytes(PRECISIONS[quantization])
    kv = core.info.kv_cache_bytes / (core.info.num_blocks * BLOCK_SIZE)
    limits = roofline.measure()
    read = max(limits["read_gb_s"].values())
    watch = Stopwatch(core)
    found: dict[tuple[int, int], Point] = {}
    for count, length in points:
        if (count, length) not in found:
            found[count, length] = measure(core, watch, count, length, steps, weights, kv)
            click.echo(f"growth: {found[count, length]}", err=True)
    after = roofline.measure()
    read = max(read, *after["read_gb_s"].values())
    by_running, by_context = [found[p] for p in runs], [found[p] for p in contexts]
    folder = output_directory()
    document = {
        "environment": machine.describe(),
        "settings": values | {"steps": steps},
        "roofline": [limits, after],
        "points": [asdict(point) for point in found.values()],
    }
    (folder / "growth.json").write_text(json.dumps(document, indent=1))
    plot(by_running, by_context, read, folder / "growth.png")
    click.echo(f"read rate {read:.1f} GB/s\n")
    click.echo(table(by_running, read) + "\n\n" + table(by_context, read))
    click.echo(f"\n{folder}")


if __name__ == "__main__":
    main()
