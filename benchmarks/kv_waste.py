"""How much of the allocated KV cache holds nothing: a ShareGPT-like mix through the real scheduler.

A sequence's table ends in a block that is partly empty; nothing else is ever allocated and unused. The figure
is unused slots / allocated slots, over all steps of a run in virtual time with a closed loop of requests that
keeps the pool busy. Prefix caching is off, which only makes it larger.

    python -m benchmarks.kv_waste
    python -m benchmarks.kv_waste --requests 300           # does it run at all?
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from quire.config import EngineConfig
from quire.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from quire.simulator.cost import PRESETS
from quire.simulator.simulate import Simulator
from quire.simulator.workload import Workload

BLOCK_SIZES = (8, 16, 32, 64)


@dataclass
class Waste:
    """Sums over the steps of a run."""

    allocated: int = 0
    unused: int = 0
    steps: int = 0

    @property
    def fraction(self) -> float:
        return self.unused / self.allocated


def measure(
    block_size: int, num_requests: int, concurrency: int, *, kv_reservation: str = "on_demand"
) -> dict[str, Any]:
    """Runs the mix to its end; the pool has room for about three quarters of what wants to run."""
    config = EngineConfig.from_mapping(
        {
            "block_size": block_size,
            "num_blocks": concurrency * 240 // block_size,
            "max_num_seqs": concurrency,
            "max_num_batched_tokens": 512,
            "kv_reservation": kv_reservation,
            "enable_prefix_caching": False,
            "max_waiting_requests": 2**31,
        }
    )
    # Without prefix caching no block has two owners, so slots can be counted by sequence.
    arrivals = Workload(num_requests=num_requests).arrivals()
    simulator = Simulator(config, arrivals, PRESETS["h100-8b"], concurrency=concurrency)
    scheduler, waste = simulator.scheduler, Waste()
    update, lengths = scheduler.update, dict[str, int]()

    def count(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Counts, while the step is computed, the slots that hold something when it is done."""
        for name in plan.dropped_request_ids:
            lengths.pop(name, None)
        for row in plan.scheduled:
            lengths[row.request_id] = row.num_computed_tokens + row.num_scheduled_tokens
        waste.allocated += simulator.kv.pool.num_in_use * block_size
        waste.unused += simulator.kv.pool.num_in_use * block_size - sum(lengths.values())
        waste.steps += 1
        return update(plan, result)

    scheduler.update = count  # type: ignore[method-assign]
    report = simulator.run()
    figures = report.as_dict()
    return {
        "block_size": block_size,
        "kv_reservation": kv_reservation,
        "requests": num_requests,
        "steps": waste.steps,
        "waste": waste.fraction,
        "usage": figures["kv_usage"]["mean"],
        "running": figures["running"]["mean"],
        "preemptions": report.num_preemptions,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| block size | reservation | waste | pool in use | running | steps | preemptions |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        lines.append(
            f"| {run['block_size']} | {run['kv_reservation']} | {run['waste']:.2%} | {run['usage']:.1%} | "
            f"{run['running']:.1f} | {run['steps']} | {run['preemptions']} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--requests", default=2000, show_default=True)
@click.option("--concurrency", default=128, show_default=True)
def main(requests: int, concurrency: int) -> None:
    """Print the share of allocated KV slots that hold nothing."""
    runs = [measure(size, requests, concurrency) for size in BLOCK_SIZES]
    runs += [measure(16, requests, concurrency, kv_reservation=kind) for kind in ("predicted", "no_evict")]
    click.echo(table(runs))
    click.echo(json.dumps(runs))


if __name__ == "__main__":
    main()
