"""What a step costs by who computes it: the caller's thread, a thread, or two ranks.

A model of two layers of 64 features, so that what is measured is the way to it and back. All three engines
decode the same requests, in turns.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import click

from benchmarks import machine, report
from benchmarks.growth import decode_steps, engine, room
from benchmarks.peers.checkpoints import Shape

SHAPE = Shape(
    "two layers", "llama3", 2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, inner=128, vocab_size=512
)
KINDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"threaded": True},
    "two ranks": {"threaded": True, "tensor_parallel_size": 2},
}


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1, 16, 64), show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(rows: tuple[int, ...], steps: int, rounds: int) -> None:
    """Print microseconds per step, as a Markdown table."""
    lines = []
    for count in rows:
        options = {"device": "cpu", "dtype": "float32", "num_threads": 1, **room([(count, 16)], steps)}
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with contextlib.ExitStack() as opened:
            engines = {
                kind: opened.enter_context(engine(SHAPE, **options, **own)) for kind, own in KINDS.items()
            }
            for number in range(rounds + 1):
                for kind, core in engines.items():
                    seconds = statistics.median(decode_steps(core, count, 16, steps))
                    if number:  # the first round is the warm-up
                        found[kind].append(seconds)
        lines.append([str(count), *(f"{statistics.median(times) * 1e6:.0f}" for times in found.values())])
    click.echo(f"{machine.environment()['cpu']}\n\n{report.table(('rows', *KINDS), lines)}")


if __name__ == "__main__":
    main()
