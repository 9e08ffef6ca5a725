"""What the batch policies trade: TTFT over TPOT at rising load, by the real scheduler on a virtual clock.

    python -m benchmarks.scheduler_sim                       # a minute on one core
    python -m benchmarks.scheduler_sim --requests 500        # does it run at all?

No model and no server; times are simulated, by the cost model named. What planning costs by the clock tell
`python -m benchmarks.growth` and `python -m benchmarks.simulator simulate`.
"""

from __future__ import annotations

import json
from typing import Any

import click

from benchmarks import report
from benchmarks.simulator.workload import Workload
from quire.config import EngineConfig, choices
from quire.plan.cost import PRESETS, CostModel
from quire.plan.simulate import Simulator

BATCH_POLICIES = choices("batch_policy")
SEATS = 256
BLOCKS_PER_REQUEST = 48  # of 16 tokens: about twice the mean of the mix, so that few are preempted
PREFILL_TOKENS = 4096
"""Prefill tokens of a step, beside one for each running request."""
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
"""Shares of the throughput that a closed loop reaches."""
COLUMNS = ("tpot_p50_s", "itl_p99_s", "ttft_p50_s", "ttft_p99_s")


def run(
    workload: Workload, cost: CostModel, concurrency: int | None = None, **settings: Any
) -> dict[str, Any]:
    """Figures of an engine with seats and blocks for `SEATS` requests."""
    config = EngineConfig.from_mapping(
        {
            "num_blocks": SEATS * BLOCKS_PER_REQUEST,
            "max_num_seqs": SEATS,
            "max_num_batched_tokens": SEATS + PREFILL_TOKENS,
            "max_waiting_requests": 2**31,
            "max_waiting_tokens": 2**62,
            **settings,
        }
    )
    return Simulator(config, workload.arrivals(), cost, concurrency=concurrency).run().as_dict()


def trade_off(num_requests: int, cost: CostModel) -> list[dict[str, Any]]:
    """Latencies by policy and load, in seconds."""
    shared = Workload(num_requests=num_requests, num_prefixes=16, prefix_tokens=64)
    peak = run(shared, cost, concurrency=SEATS)["requests_per_s"]
    points = []
    for policy in BATCH_POLICIES:
        for load in LOADS:
            figures = run(Workload(num_requests=num_requests, rate=load * peak), cost, batch_policy=policy)
            point = {"policy": policy, "load": load, "rate": load * peak}
            for column in COLUMNS:
                name, percentile, _ = column.split("_")
                point[column] = figures[f"{name}_s"][percentile]
            points.append(point | {"output_tokens_per_s": figures["output_tokens_per_s"]})
    return points


def table(points: list[dict[str, Any]]) -> str:
    """Markdown; latencies in ms."""
    return report.table(
        (
            "policy",
            "load",
            "requests/s",
            *(column.removesuffix("_s").replace("_", " ") for column in COLUMNS),
        ),
        [
            [
                point["policy"],
                f"{point['load']:.1f}",
                f"{point['rate']:.1f}",
                *(f"{1000 * point[column]:.2f}" for column in COLUMNS),
            ]
            for point in points
        ],
    )


@click.command()
@click.option("--requests", default=5000, show_default=True, help="Of each policy and load.")
@click.option("--cost", default="h100-8b", show_default=True, type=click.Choice(list(PRESETS)))
def main(requests: int, cost: str) -> None:
    """Compare batch policies."""
    points = trade_off(requests, PRESETS[cost])
    click.echo(f"{table(points)}\n\n{json.dumps({'cost': cost, 'points': points})}")


if __name__ == "__main__":
    main()
