"""What a step costs by who computes it: the caller's thread, a thread, or a worker process.

A model of a few layers of 64 features, so that what is measured is the way to it and back. All three engines
decode the same requests, in turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import click

from benchmarks.report import cpu_model
from quire.config import EngineConfig
from quire.engine.core import EngineCore, make_executor
from quire.sampling_params import SamplingParams

KINDS = ("inline", "thread", "worker process")


def make_engine(checkpoint: Path, kind: str, rows: int, num_steps: int) -> EngineCore:
    config = EngineConfig.from_mapping(
        {
            "model": str(checkpoint),
            "device": "cpu",
            "num_threads": 1,
            "max_num_seqs": rows,
            "num_blocks": (rows + 1) * (num_steps // 16 + 8),
            "worker_process": kind == "worker process",
        }
    )
    return EngineCore(config, make_executor(config, threaded=kind != "inline"))


def decode(core: EngineCore, rows: int, num_steps: int) -> float:
    """Seconds of a step in which every request decodes: the median."""
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True)
    for row in range(rows):
        core.add_request(f"r{row}", [3 + row % 50, 7, 11], params)
    seconds = []
    while core.has_work:
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@click.command()
@click.option("--rows", multiple=True, type=int, default=(1, 16, 64), show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(rows: tuple[int, ...], steps: int, rounds: int) -> None:
    """Print microseconds per step, as a Markdown table."""
    from tests.fixtures.checkpoints import make_checkpoint

    print(cpu_model())
    print("| rows | " + " | ".join(KINDS) + " |")
    print("| --- |" + " --- |" * len(KINDS))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint("llama", Path(folder) / "llama", max_position_embeddings=steps + 64)
        for count in rows:
            engines = {kind: make_engine(checkpoint, kind, count, steps) for kind in KINDS}
            found: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in range(rounds + 1):
                for kind, core in engines.items():
                    seconds = decode(core, count, steps)
                    if number:  # the first round is the warm-up
                        found[kind].append(seconds)
            for core in engines.values():
                core.close()
            medians = [statistics.median(found[kind]) * 1e6 for kind in KINDS]
            print(f"| {count} | " + " | ".join(f"{value:.0f}" for value in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
