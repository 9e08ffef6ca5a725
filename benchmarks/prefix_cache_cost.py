"""What prefix caching costs when nothing is ever found: planning and hashing against the time of a step.

The same requests, whose prompts have nothing in common, run through an engine with prefix caching and one
without, in turns. All times are CPU times of the one thread that does everything (num_threads 1), so other
processes of the machine disturb little. The smaller the model, the larger the share: the demo checkpoint is
as small as they come.

    python -m benchmarks.prefix_cache_cost
    python -m benchmarks.prefix_cache_cost --model DIRECTORY --running 64
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report import ROOT
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.sampling_params import SamplingParams

DEMO = ROOT / "model_repository" / "generator" / "1" / "demo"


@dataclass
class Round:
    """One run of all requests; times per step in microseconds of CPU time."""

    steps: int
    step_us: float
    """All of it: arrivals, planning, model, accounting."""
    planning_us: float
    """add_request, schedule and update."""
    cached_tokens: int


class Timed:
    """Sums the CPU time of the scheduler's calls."""

    def __init__(self, core: EngineCore) -> None:
        self.seconds = 0.0
        for name in ("add_request", "schedule", "update"):
            setattr(core.scheduler, name, self._timed(getattr(core.scheduler, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - begin

        return call


def run(core: EngineCore, timed: Timed, prompts: list[list[int]], max_tokens: int) -> Round:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    core.scheduler.reset_cache()
    cached = core.stats().num_cached_tokens
    gc.collect()
    gc.disable()
    timed.seconds, steps = 0.0, 0
    begin = time.thread_time()
    for index, prompt in enumerate(prompts):
        core.add_request(f"r{index}", prompt, params)
    while core.has_work:
        core.step()
        steps += 1
    seconds = time.thread_time() - begin
    gc.enable()
    return Round(
        steps, 1e6 * seconds / steps, 1e6 * timed.seconds / steps, core.stats().num_cached_tokens - cached
    )


@click.command()
@click.option("--model", default=DEMO, type=click.Path(exists=True, path_type=Path))
@click.option("--running", default=32, show_default=True, help="Requests at a time.")
@click.option("--prompt", default=256, show_default=True, help="Tokens of each prompt.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(model: Path, running: int, prompt: int, max_tokens: int, rounds: int) -> None:
    """Print the cost of prefix caching at 0 % hits."""
    engines = {}
    for enabled in (False, True):
        core = EngineCore(
            EngineConfig.from_mapping(
                {
                    "model": str(model),
                    "device": "cpu",
                    "num_threads": 1,
                    "max_num_seqs": running,
                    "num_blocks": 4 * running * (prompt + max_tokens) // 16,
                    "enable_prefix_caching": enabled,
                }
            )
        )
        core.warm_up()
        engines[enabled] = core, Timed(core)
    found: dict[bool, list[Round]] = {False: [], True: []}
    for number in range(rounds + 1):
        rng = random.Random(number)
        vocab_size = engines[False][0].vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for _ in range(3 * running)]
        for enabled, (core, timed) in engines.items():
            result = run(core, timed, prompts, max_tokens)
            assert result.cached_tokens == 0, "something was found"
            if number:  # the first round warms up
                found[enabled].append(result)
    median = {
        enabled: {
            key: statistics.median(getattr(one, key) for one in results)
            for key in ("steps", "step_us", "planning_us")
        }
        for enabled, results in found.items()
    }
    extra = [on.planning_us - off.planning_us for on, off in zip(found[True], found[False], strict=True)]
    cost_us = statistics.median(extra)
    lines = ["| prefix caching | steps | step us | planning us |", "| --- | --- | --- | --- |"]
    for enabled, row in median.items():
        name = "on, 0 % hits" if enabled else "off"
        lines.append(f"| {name} | {row['steps']:.0f} | {row['step_us']:.0f} | {row['planning_us']:.1f} |")
    click.echo("\n".join(lines))
    share = cost_us / median[False]["step_us"]
    click.echo(
        f"cost: {cost_us:.1f} us per step (of {sorted(round(x, 1) for x in extra)}), {share:.2%} of a step"
    )
    click.echo(
        json.dumps(
            {
                "model": str(model),
                "running": running,
                "prompt": prompt,
                "off": median[False],
                "on": median[True],
                "cost_us": cost_us,
                "share": share,
            }
        )
    )


if __name__ == "__main__":
    main()
