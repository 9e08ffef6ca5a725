"""What planning costs, and what batch policies trade: the real scheduler on a virtual clock.

Three parts, no model and no server:
- planning cost per step at 10, 100 and 1000 running requests, which may grow linearly at most;
- 100 000 requests of a ShareGPT-like mix with 1 000 running at once;
- TTFT over TPOT of the three batch policies at rising load, as a table and a plot.

    python -m benchmarks.scheduler_sim                       # some minutes on one core
    python -m benchmarks.scheduler_sim --requests 500        # does it run at all?

Times of planning are CPU times of this machine; TTFT and TPOT are simulated, by the cost model named.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import click

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report import ROOT
from quire.config import EngineConfig, choices
from quire.engine.loop import GC_THRESHOLDS
from quire.simulator.cost import PRESETS, CostModel
from quire.simulator.plot import plot_trade_off
from quire.simulator.simulate import Report, Simulator
from quire.simulator.workload import Workload

BATCH_POLICIES = choices("batch_policy")

BLOCKS_PER_REQUEST = 48  # of 16 tokens: about twice the mean of the mix, so that few are preempted
PREFILL_TOKENS = 4096
"""Prefill tokens of a step, beside one for each running request; 1 000 that run end, and so begin, at
6 per step."""
TRADE_OFF_SEATS = 256
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
"""Shares of the throughput that a closed loop reaches."""


def engine(num_running: int, **settings: Any) -> EngineConfig:
    """An engine with seats and blocks for `num_running` requests."""
    return EngineConfig.from_mapping(
        {
            "num_blocks": num_running * BLOCKS_PER_REQUEST,
            "max_num_seqs": num_running,
            "max_num_batched_tokens": num_running + PREFILL_TOKENS,
            "max_waiting_requests": 2**31,
            "max_waiting_tokens": 2**62,
            **settings,
        }
    )


def closed_loop(num_requests: int, num_running: int, cost: CostModel, **settings: Any) -> Report:
    arrivals = Workload(num_requests=num_requests, num_prefixes=16, prefix_tokens=64).arrivals()
    simulator = Simulator(engine(num_running, **settings), arrivals, cost, concurrency=num_running)
    # As in an engine: what start-up made is not looked through again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        return simulator.run()
    finally:
        gc.unfreeze()


def planning(report: Report, num_running: int) -> dict[str, Any]:
    """Cost of the steps with at least 90 % of the seats taken."""
    figures: dict[str, Any] = {"running": num_running, "requests": len(report.outcomes)}
    full = [index for index, count in enumerate(report.num_running) if count >= 0.9 * num_running]
    assert full, f"there were never {num_running} requests running"
    for name in ("plan_s", "update_s"):
        values = sorted(getattr(report, name)[index] for index in full)
        figures[f"{name.removesuffix('_s')}_p50_ms"] = 1000 * values[len(values) // 2]
        figures[f"{name.removesuffix('_s')}_p99_ms"] = 1000 * values[int(0.99 * len(values))]
    figures["steps"] = len(full)
    figures["steps_per_s"] = report.num_steps / report.wall_s
    figures["wall_s"] = report.wall_s
    figures["preemptions"] = report.num_preemptions
    return figures


def _say_planning(figures: dict[str, Any]) -> None:
    click.echo(
        f"{figures['running']:5} running  {figures['requests']:6} requests  "
        f"plan p50 {figures['plan_p50_ms']:7.3f} p99 {figures['plan_p99_ms']:7.3f} ms  "
        f"update p50 {figures['update_p50_ms']:7.3f} p99 {figures['update_p99_ms']:7.3f} ms  "
        f"{figures['steps_per_s']:6.0f} steps/s  {figures['wall_s']:.1f} s  "
        f"{figures['preemptions']} preemptions"
    )


def trade_off(num_requests: int, cost: CostModel) -> dict[str, list[dict[str, float]]]:
    """Median TPOT and 99th percentile of TTFT, by policy and load."""
    peak = closed_loop(num_requests, TRADE_OFF_SEATS, cost).as_dict()["requests_per_s"]
    curves: dict[str, list[dict[str, float]]] = {}
    for policy in BATCH_POLICIES:
        settings = {"batch_policy": policy}
        if policy == "decode_first":
            settings["schedule_interval"] = 16
        curves[policy] = []
        for load in LOADS:
            arrivals = Workload(num_requests=num_requests, rate=load * peak).arrivals()
            figures = Simulator(engine(TRADE_OFF_SEATS, **settings), arrivals, cost).run().as_dict()
            point = {
                "load": load,
                "rate": load * peak,
                "tpot_p50_s": figures["tpot_s"]["p50"],
                "ttft_p50_s": figures["ttft_s"]["p50"],
                "ttft_p99_s": figures["ttft_s"]["p99"],
                "itl_p99_s": figures["itl_s"]["p99"],
                "output_tokens_per_s": figures["output_tokens_per_s"],
            }
            curves[policy].append(point)
            ms = {name: 1000 * value for name, value in point.items() if name.endswith("_s")}
            click.echo(
                f"{policy:13} load {load:.1f} ({point['rate']:6.1f}/s)  TPOT p50 {ms['tpot_p50_s']:7.2f}  "
                f"ITL p99 {ms['itl_p99_s']:7.2f}  TTFT p50 {ms['ttft_p50_s']:9.2f}  "
                f"p99 {ms['ttft_p99_s']:9.2f} ms"
            )
    return curves


@click.command()
@click.option("--requests", default=100_000, show_default=True, help="Of the large run; others have fewer.")
@click.option("--cost", default="h100-8b", show_default=True, type=click.Choice(list(PRESETS)))
@click.option(
    "--out",
    default=ROOT / "benchmarks" / "out" / "simulator",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
)
def main(requests: int, cost: str, out: Path) -> None:
    """Measure planning cost, run many requests, compare batch policies."""
    out.mkdir(parents=True, exist_ok=True)
    model = PRESETS[cost]
    costs = []
    for num_running in (10, 100, 1000):
        count = max(requests, 2 * num_running) if num_running == 1000 else min(requests, 60 * num_running)
        costs.append(planning(closed_loop(count, num_running, model), num_running))
        _say_planning(costs[-1])
    growth = costs[2]["plan_p50_ms"] / costs[1]["plan_p50_ms"]
    click.echo(f"from 100 to 1000 running the median plan grows {growth:.1f} times (linear: 10)")
    curves = trade_off(min(requests, 5000), model)
    for name in ("ttft_p50_s", "ttft_p99_s"):
        plot_trade_off(
            {
                policy: [(point["tpot_p50_s"], point[name]) for point in curve]
                for policy, curve in curves.items()
            },
            out / f"trade_off_{name.removesuffix('_s')}.png",
            title=f"{cost}, {TRADE_OFF_SEATS} seats: {name.removesuffix('_s')} over TPOT p50",
        )
    result = {"cost": cost, "planning": costs, "plan_growth_100_to_1000": growth, "trade_off": curves}
    (out / "scheduler_sim.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
