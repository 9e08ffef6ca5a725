"""Everything that is to be seen and measured on a GPU, in under eight minutes, as one JSON file.

    python -m benchmarks.gpu.run_all --out gpu.json
    python -m benchmarks.gpu.run_all --device cpu --small          # does it run? a minute, no GPU

Sections run in the order of their worth and are independent: one that fails is noted, and after
`--seconds` no further one begins. Needed: torch with CUDA, triton, cuda-core, and what `quire` imports
(`benchmarks/gpu/README.md` says how to bring it to a machine without network).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import device as devices
from benchmarks import growth, kernels
from benchmarks.device import REPEATS
from benchmarks.gpu import engine
from benchmarks.machine import ROOT
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.limits import Roofline

POINTS = [(1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 8192), (64, 8192)]


class Run:
    """Sections and their results."""

    def __init__(
        self, device: torch.device, small: bool, seconds: float, out: Path, only: tuple[str, ...]
    ) -> None:
        self.device, self.small, self.out, self.only = device, small, out, only
        self.deadline = time.monotonic() + seconds
        self.document: dict[str, Any] = {"sections": {}, "seconds": {}}

    def section(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs it, keeps what it returns or how it failed, and saves: what is cut off loses only the rest."""
        sections = self.document["sections"]
        if self.only and name not in self.only:
            return {}
        begin = time.monotonic()
        if begin > self.deadline:
            sections[name] = {"skipped": "out of time"}
        else:
            click.echo(f"gpu: {name}", err=True)
            try:
                sections[name] = work()
            except Exception:
                sections[name] = {"failed": traceback.format_exc()[-3000:]}
                click.echo(f"gpu: {name} FAILED", err=True)
        self.document["seconds"][name] = round(time.monotonic() - begin, 1)
        self.out.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        return sections[name]

    def left(self) -> float:
        return max(10.0, self.deadline - time.monotonic())


def parity_tests(run: Run) -> dict[str, Any]:
    """The kernels' tests on this device: every implementation against its reference."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=20", "-p", "no:cacheprovider"]
    command += ["tests/kernels", "-k", "cuda", "--timeout=120"]
    if run.small:
        command = [sys.executable, "-m", "pytest", "-q", "tests/kernels/test_registry.py"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=min(180.0, run.left()), check=False
    )
    return {"exit": done.returncode, "output": done.stdout[-4000:]}


def kernel_records(run: Run, limits: Roofline) -> list[dict[str, Any]]:
    """Every operator on each of its implementations."""
    shape = SHAPES["tiny" if run.small else "llama-8b"]
    records = kernels.measure(run.device, kernels.cases(run.device, shape), 1 if run.small else REPEATS)
    kernels.judge(records, limits)
    return records


def engine_steps(run: Run, limits: Roofline, quantization: str | None) -> dict[str, Any]:
    """Decode steps and a mix of requests, on one engine."""
    options: dict[str, Any] = {"device": run.device.type, "quantization": quantization, "max_num_seqs": 256}
    points = [(1, 64), (4, 64)] if run.small else POINTS
    if run.small:
        options |= {"max_num_seqs": 8, "num_blocks": 600, "max_model_len": 1024, "async_scheduling": True}
    with growth.engine(SHAPES["tiny" if run.small else "llama-8b"], **options) as core:
        found: dict[str, Any] = {"decode": engine.decode(core, limits, points)}
        found["mix"] = engine.mix(core, 6 if run.small else 400)
    del core
    if run.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu.json"), show_default=True)
@click.option("--device", "device_name", default="cuda", show_default=True)
@click.option("--seconds", default=420.0, show_default=True, help="No section begins after this.")
@click.option("--only", multiple=True, help="Sections to run; may be given again. Default: all.")
@click.option("--small", is_flag=True, help="Tiny shapes: does everything run?")
def main(out: Path, device_name: str, seconds: float, only: tuple[str, ...], small: bool) -> None:
    """Runs all sections; exits with 1 if one failed."""
    device = torch.device(device_name)
    run = Run(device, small, seconds, out, ("limits", *only) if only else ())
    run.section("machine", lambda: devices.describe(device))
    size = (1 << 22, 64) if small else (4 << 30, 8192)
    measured = run.section("limits", lambda: devices.rates(device, *size))
    if "failed" in measured:
        raise SystemExit("gpu: nothing can be measured without the device's rates")
    limits = Roofline.best([measured])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        families = ["llama"] if small else ["llama", "qwen3", "gemma3"]
        run.section("agreement", lambda: engine.agreement(folder, device, families))
        run.section("parity", lambda: parity_tests(run))
        run.section("kernels", lambda: kernel_records(run, limits))
        run.section("engine bf16", lambda: engine_steps(run, limits, None))
        run.section("engine fp8", lambda: engine_steps(run, limits, "fp8"))
    failed = [key for key, value in run.document["sections"].items() if "failed" in value]
    click.echo(json.dumps(run.document["seconds"]), err=True)
    click.echo(f"gpu: {out}" + (f"; failed: {', '.join(failed)}" if failed else ""), err=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
