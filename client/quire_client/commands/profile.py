"""`quire-client profile`: a trace of an engine's next steps, and how near they come to the limits."""

from __future__ import annotations

import json
from pathlib import Path

import click

from quire_client.client import Client
from quire_client.commands._options import url_option
from quire_client.commands._output import print_table
from quire_client.protocol import GENERATOR_MODEL


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--steps", type=int, default=100, show_default=True, help="Steps to record.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="Longest time for that.")
def profile(file: Path, url: str, model: str, steps: int, seconds: float) -> None:
    """Records what the engine does in its next steps, and writes it to FILE for Perfetto or chrome://tracing.

    Shows how near each kind of step came to the limits of the device, if that is known. The first profile of
    an engine measures these limits; its steps wait about half a second for that."""
    with Client(url) as client:
        command = {"command": "profile", "steps": steps, "seconds": seconds}
        answer = client.cache_control(command, model=model)
    file.write_text(json.dumps(answer), encoding="utf-8")
    roofline = answer["otherData"]["roofline"]
    rows = [("STEPS", "", "ROWS", "TOKENS", "MS", "GB/S", "MBU", "GFLOP/S", "MFU", "BOUND BY")]
    names = ("steps", "rows", "tokens", "step_ms", "gb_s", "mbu", "gflop_s", "mfu", "bound")
    for kind, phase in roofline["phases"].items():
        rows.append((kind, *(str(phase.get(name, "-")) for name in names)))
    print_table(rows)
    if (limits := roofline["limits"]) is not None:
        click.echo(f"limits: {limits['gb_s']} GB/s, {limits['gflop_s']} GFLOP/s ({limits['method']})")
    if (share := roofline["computing"]) is not None:
        click.echo(f"computing {share:.0%} of the time")
