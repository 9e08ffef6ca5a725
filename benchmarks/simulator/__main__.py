"""The simulator's command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks.simulator.fit import fit
from benchmarks.simulator.plot import DEFAULT_MAX_REQUESTS, plot_timeline
from benchmarks.simulator.replay import replay
from benchmarks.simulator.workload import Workload, arrivals_of_trace, read_mooncake, read_records
from quire.config import EngineConfig, load_config_file
from quire.errors import QuireError
from quire.plan.arrival import Arrival
from quire.plan.command import cost_model
from quire.plan.cost import PRESETS
from quire.plan.simulate import Simulator
from quire_ensemble.cli import parse_option

DEFAULT_NUM_BLOCKS = 4096


@contextmanager
def _errors_as_clicks() -> Iterator[None]:
    """Turns our errors into click's: one line, no traceback."""
    try:
        yield
    except QuireError as error:
        raise click.ClickException(str(error)) from None


def _shares(text: str) -> dict[str, float]:
    """ "a=3,b=1" """
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {name.strip(): float(share) for name, share in pairs}
    except ValueError:
        raise click.BadParameter(f"must be like a=3,b=1, got {text!r}") from None


@click.group()
def main() -> None:
    """Run the scheduler without a model, and look into its traces."""


@main.command()
@click.option("--requests", default=1000, show_default=True, help="How many to generate.")
@click.option("--rate", type=float, help="Requests per second; without it all arrive at once.")
@click.option("--variation", default=1.0, show_default=True, help="Of the gaps; 1: Poisson, more: bursts.")
@click.option("--prefixes", default=0, show_default=True, help="Shared system prompts.")
@click.option("--prefix-tokens", default=512, show_default=True, help="Length of each.")
@click.option("--turns", default=1, show_default=True, help="Requests per conversation.")
@click.option("--tenants", default="", help="Shares of the requests, such as a=3,b=1.")
@click.option("--priorities", default="", help="Shares of the requests, such as 0=1,5=4.")
@click.option("--seed", default=0, show_default=True)
@click.option("--mooncake", type=click.Path(exists=True, path_type=Path), help="Arrivals of this trace.")
@click.option(
    "--trace", "trace_path", type=click.Path(exists=True, path_type=Path), help="Or of a recorded one."
)
@click.option("--concurrency", type=int, help="Closed loop with n requests.")
@click.option(
    "--cost", default="h100-8b", show_default=True, help=f"{', '.join(PRESETS)}, fit (of --trace) or JSON."
)
@click.option("--config", type=click.Path(exists=True, path_type=Path), help="A quire.json.")
@click.option("--option", "settings", multiple=True, help="A configuration key, such as max_num_seqs=256.")
@click.option("--record", type=click.Path(path_type=Path), help="Write the trace of the simulation.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def simulate(
    requests: int,
    rate: float | None,
    variation: float,
    prefixes: int,
    prefix_tokens: int,
    turns: int,
    tenants: str,
    priorities: str,
    seed: int,
    mooncake: Path | None,
    trace_path: Path | None,
    concurrency: int | None,
    cost: str,
    config: Path | None,
    settings: tuple[str, ...],
    record: Path | None,
    as_json: bool,
) -> None:
    """Run the scheduler on a virtual clock and report latencies."""
    with _errors_as_clicks():
        engine = _engine_config(config, settings)
        records = read_records(trace_path) if trace_path is not None else []
        arrivals: list[Arrival]
        if mooncake is not None:
            arrivals = read_mooncake(mooncake)
        elif trace_path is not None:
            block_size = next((r["cache"]["block_size"] for r in records if "cache" in r), 16)
            arrivals, _ = arrivals_of_trace(records, block_size=block_size)
        else:
            arrivals = Workload(
                num_requests=requests,
                rate=rate,
                variation=variation,
                num_prefixes=prefixes,
                prefix_tokens=prefix_tokens,
                turns=turns,
                tenants=_shares(tenants),
                priorities={int(value): share for value, share in _shares(priorities).items()},
                block_size=engine.cache.tokens_per_block,
                seed=seed,
            ).arrivals()
        model = fit(records) if cost == "fit" else cost_model(cost)
        simulator = Simulator(engine, arrivals, model, concurrency=concurrency, trace=record is not None)
        report = simulator.run()
    if simulator.trace is not None and record is not None:
        lines = [simulator.trace.header, *simulator.trace.records]
        record.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    click.echo(json.dumps(report.as_dict()) if as_json else report.text())


def _engine_config(path: Path | None, settings: tuple[str, ...]) -> EngineConfig:
    values: dict[str, Any] = {"num_blocks": DEFAULT_NUM_BLOCKS, "max_waiting_requests": 2**31}
    values["max_waiting_tokens"] = 2**62
    if path is not None:
        values |= load_config_file(path)
    return EngineConfig.from_mapping({**values, **dict(map(parse_option, settings))})


@main.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .png or .html file.")
@click.option("--by-step", is_flag=True, help="Steps instead of seconds on the axis.")
@click.option("--max-requests", default=DEFAULT_MAX_REQUESTS, show_default=True)
def plot(file: Path, out: Path, by_step: bool, max_requests: int) -> None:
    """Draw what every request did in each step."""
    with _errors_as_clicks():
        left_out = plot_timeline(read_records(file), out, by_step=by_step, max_requests=max_requests)
    click.echo(f"{out}" + (f" ({left_out} later requests are left out)" if left_out else ""))


@main.command("replay")
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def replay_file(file: Path) -> None:
    """Make the scheduler's calls again and compare the batches; exit code 1 if one differs."""
    with _errors_as_clicks():
        report = replay(read_records(file))
    if report.difference is not None:
        raise click.ClickException(str(report.difference))
    click.echo(
        f"{report.num_steps} steps of {report.num_requests} requests are the same "
        f"({report.num_preemptions} preemptions)"
    )


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.simulator")
