"""Everything that is to be seen and measured on a GPU, in under eight minutes, as one JSON file.

    python -m benchmarks.gpu.run_all --out gpu.json
    python -m benchmarks.gpu.run_all --device cpu --small          # does it run? a minute, no GPU

Sections run in the order of their worth, each in a process of its own: one that fails is noted, also where
it takes the device's context with it, and after `--seconds` no further one begins. Needed: torch with CUDA,
triton, cuda-core, and what `quire` imports (`benchmarks/gpu/README.md`: how to bring it to a machine without
network).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import device as devices
from benchmarks import growth, kernels
from benchmarks.device import REPEATS
from benchmarks.gpu import engine
from benchmarks.machine import ROOT, usable_cores
from benchmarks.peers.checkpoints import SHAPES, Shape
from benchmarks.peers.limits import Roofline
from quire.engine.core import EngineCore

SECTIONS = {
    "machine": 60,
    "limits": 60,
    "agreement": 150,
    "parity": 240,
    "engine tests": 180,
    "kernels": 120,
    "engine bf16": 150,
    "engine fp8": 120,
    "engine drafts": 60,
    "engine gpt-oss": 120,
    "engine experts": 120,
    "engine latents": 120,
    "engine states": 90,
}
"""Sections in their order, and the seconds that each gets at most."""
ENGINE_TESTS = [
    *("engine", "model_runner", "models", "async_scheduling", "logprobs", "sampler", "structured_output"),
    *("lora", "prefix_cache", "kv_tiers", "sleep", "beam_search", "embeddings", "choices", "lookahead"),
    *("vision_language", "weight_quantization", "oracle_matrix", "logits_processors", "failed_steps"),
    "kv_cache",
]
OF_A_CPU = [
    # A stand-in for CUDA graphs, and ranks, each of which needs a GPU.
    *("recorded", "ranks", "padding_reads", "one_launch", "not_finite_end", "eager"),
    # The same bits for any batch; hooks that graphs do not call; steps that are not one ahead.
    *(
        "alone_and",
        "no_row_depends",
        "not_finite_fails",
        "never_starves",
        "cannot_run_are",
        "failing_step_ends",
    ),
    # CPU time, layers in one call, the size of the pool.
    *("against_serial", "four_and_eight_bits", "as_large_as_it_says"),
]
"""Words in the names of tests that say nothing of a GPU."""
POINTS = [(1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 8192), (64, 8192)]
PROMPTS = [(1, 512), (1, 8192), (8, 2048)]
FEW = {"points": [(1, 1024), (64, 1024), (1, 8192)], "prompts": [(1, 512), (8, 2048)]}
"""Of those, for models that no kernel computes in one call."""


@dataclass(frozen=True)
class Steps:
    """An engine whose steps a section measures."""

    shape: str
    """A name in SHAPES."""
    small: str
    """The family of tests/fixtures/checkpoints.py that takes its place with `--small`."""
    options: dict[str, Any] = field(default_factory=dict)
    points: list[tuple[int, int]] = field(default_factory=lambda: POINTS)
    """(requests, context) of the decode steps."""
    prompts: list[tuple[int, int]] = field(default_factory=lambda: PROMPTS)
    """(prompts at once, tokens of each)."""


AGREEING = ["llama", "qwen3", "gemma3", "gpt_oss", "qwen3_moe", "gemma4_moe", "deepseek_v3", "qwen3_5"]
"""Families whose tokens are compared with those of transformers."""
ENGINES = {
    "engine bf16": Steps("llama-8b", "qwen3"),
    "engine fp8": Steps("llama-8b", "qwen3", {"quantization": "fp8"}),
    "engine gpt-oss": Steps("gpt-oss-20b", "gpt_oss", **FEW),
    "engine experts": Steps("qwen3-30b-a3b", "qwen3_moe", **FEW),
    "engine latents": Steps("deepseek-v2-lite", "deepseek_v2", **FEW),
    "engine states": Steps("qwen3.5-0.8b", "qwen3_5", points=[(1, 1024), (64, 1024)], prompts=[(1, 512)]),
}


class Run:
    """The sections that one process runs, and their results."""

    def __init__(self, device: torch.device, small: bool, seconds: float, out: Path) -> None:
        self.device, self.small, self.out = device, small, out
        self.deadline = time.monotonic() + seconds
        self.document: dict[str, Any] = {"sections": {}, "seconds": {}}

    def section(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs it, keeps what it returns or how it failed, and saves: what is cut off loses only the rest."""
        sections, begin = self.document["sections"], time.monotonic()
        click.echo(f"gpu: {name}", err=True)
        try:
            sections[name] = work()
        except Exception:
            sections[name] = {**sections.get(name, {}), "failed": traceback.format_exc()[-3000:]}
            click.echo(f"gpu: {name} FAILED", err=True)
        self.document["seconds"][name] = round(time.monotonic() - begin, 1)
        self.save()
        return sections[name]

    def save(self) -> None:
        self.out.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")

    def left(self) -> float:
        return max(5.0, self.deadline - time.monotonic())

    def apart(self, name: str, arguments: list[str]) -> None:
        """Runs a section in a process of its own, and takes over what it found."""
        seconds, part = (
            min(SECTIONS[name], self.left()),
            self.out.with_suffix(f".{name.replace(' ', '-')}.json"),
        )
        command = [sys.executable, "-m", "benchmarks.gpu.run_all", "--only", name, "--out", str(part)]
        part.unlink(missing_ok=True)
        how = "did not say how it failed"
        try:
            done = subprocess.run(
                [*command, "--seconds", str(seconds - 5), *arguments],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
            how = f"exit status {done.returncode}: {done.stderr[-3000:]}"
        except subprocess.TimeoutExpired:
            how = f"not done after {seconds:.0f} s"
        found = json.loads(part.read_text("utf-8")) if part.exists() else {"sections": {}, "seconds": {}}
        part.unlink(missing_ok=True)
        section = found["sections"].get(name, {})
        # What has no time was cut off.
        self.document["sections"][name] = section if name in found["seconds"] else {**section, "failed": how}
        self.document["seconds"][name] = found["seconds"].get(name, seconds)
        if name not in ("machine", "limits"):
            # Of each process that measures: what the device could do then.
            self.document.setdefault("limits of", {})[name] = found["sections"].get("limits")
        self.save()


def parity_tests(run: Run) -> dict[str, Any]:
    """The kernels' tests on this device: every implementation against its reference."""
    if run.small:
        return run_tests(run, "parity", ["tests/kernels/test_registry.py"])
    # What has "cuda" in its file's name needs no device.
    ignored = [f"--ignore=tests/kernels/test_cuda_{name}.py" for name in ("compile", "emulated")]
    return run_tests(run, "parity", ["tests/kernels", "-k", "cuda", *ignored])


def engine_tests(run: Run) -> dict[str, Any]:
    """The engine's own tests, which take the device that there is."""
    names = ["rope"] if run.small else ENGINE_TESTS
    files = [f"tests/unit/test_{name}.py" for name in names]
    return run_tests(run, "engine tests", [*files, "-k", f"not ({' or '.join(OF_A_CPU)})"])


def run_tests(run: Run, section: str, arguments: list[str]) -> dict[str, Any]:
    """Runs pytest on several processes; what fails is told in a file beside the results at once."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    workers = 0 if run.small else min(12, len(usable_cores()))
    command += [
        "-p",
        "no:tests.groups",
        "-n",
        str(workers),
        "--dist=load",
        "-p",
        "benchmarks.gpu.shared_device",
    ]
    log = run.out.with_name(f"{run.out.stem}-{section.replace(' ', '-')}-failures.txt")
    log.write_text("")
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "QUIRE_FAILURES": str(log)},
            capture_output=True,
            text=True,
            timeout=run.left(),
            check=False,
        )
        how, last = f"exit status {done.returncode}", done.stdout.splitlines()[-1:]
    except subprocess.TimeoutExpired as error:
        how, last = "out of time", (error.stdout or b"").decode().splitlines()[-2:]
    failed = [line[2:] for line in log.read_text("utf-8").splitlines() if line.startswith("# ")]
    found = {"failed_tests": failed, "last": last}
    return found | ({} if how == "exit status 0" else {"failed": f"{how}: {log.name}"})


def kernel_records(run: Run, limits: Roofline) -> list[dict[str, Any]]:
    """Every operator on each of its implementations."""
    shape = SHAPES["tiny" if run.small else "llama-8b"]
    records = kernels.measure(run.device, kernels.cases(run.device, shape), 1 if run.small else REPEATS)
    kernels.judge(records, limits)
    return records


def engine_steps(run: Run, name: str, limits: Roofline) -> dict[str, Any]:
    """Prompts, decode steps and a mix of requests, on one engine; saved one by one."""
    asked = ENGINES[name]
    points = [(1, 64), (4, 64)] if run.small else asked.points
    prompts = [(1, 100), (3, 30)] if run.small else asked.prompts
    found: dict[str, Any] = {"prompts": [], "decode": []}
    run.document["sections"][name] = found
    begin = time.monotonic()
    with started(run, asked) as core:
        found["start_s"] = time.monotonic() - begin
        for count, length in prompts:
            found["prompts"].append(engine.prefill(core, limits, count, length))
            run.save()
        for point in points:
            found["decode"] += engine.decode(core, limits, [point])
            run.save()
        found["mix"] = engine.mix(core, 6 if run.small else 400)
    return found


@contextmanager
def started(run: Run, asked: Steps, **options: Any) -> Iterator[EngineCore]:
    """An engine of `asked` on the device, with random weights."""
    values: dict[str, Any] = {"device": run.device.type, "max_num_seqs": 256, **asked.options, **options}
    if run.small:
        values |= {"max_num_seqs": 8, "num_blocks": 600, "max_model_len": 1024, "async_scheduling": True}
    with growth.engine(small_shape(asked.small) if run.small else SHAPES[asked.shape], **values) as core:
        yield core


def small_shape(family: str) -> Shape:
    """A shape of a family for trying this out."""
    return replace(SHAPES["tiny"], name=f"tiny-{family}", family=family, extra={})


def drafts(run: Run) -> list[dict[str, Any]]:
    """Tokens per second with drafts by prompt lookup beside those without, where each prompt holds a text
    many times; and the share of the drafts that was right."""
    found = []
    for num_draft_tokens in (0, 4):
        with started(run, ENGINES["engine bf16"], num_draft_tokens=num_draft_tokens) as core:
            for count in (1, 4) if run.small else (1, 16, 64):
                found.append(
                    {"drafts": num_draft_tokens, **engine.repeating(core, count, 20 if run.small else 200)}
                )
    return found


def run_section(run: Run, name: str) -> None:
    """Runs one section in this process; first what the device can do, where it is held against that."""
    device, size = run.device, (1 << 22, 64) if run.small else (4 << 30, 8192)
    families = ["llama"] if run.small else AGREEING
    with tempfile.TemporaryDirectory() as folder:
        works: dict[str, Callable[[], Any]] = {
            "machine": lambda: devices.describe(device),
            "agreement": lambda: engine.agreement(Path(folder), device, families),
            "parity": lambda: parity_tests(run),
            "engine tests": lambda: engine_tests(run),
        }
        if name in works:
            run.section(name, works[name])
            return
    measured = run.section("limits", lambda: devices.rates(device, *size))
    if "failed" in measured:
        raise SystemExit("gpu: nothing can be measured without the device's rates")
    limits = Roofline.best([measured])
    if name == "kernels":
        run.section(name, lambda: kernel_records(run, limits))
    elif name == "engine drafts":
        run.section(name, lambda: {"runs": drafts(run)})
    elif name != "limits":
        run.section(name, lambda: engine_steps(run, name, limits))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("gpu.json"), show_default=True)
@click.option("--device", "device_name", default="cuda", show_default=True)
@click.option("--seconds", default=420.0, show_default=True, help="No section begins after this.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(SECTIONS)),
    help="Sections to run, in this process; may be given again. Default: all, each in one of its own.",
)
@click.option("--without", multiple=True, type=click.Choice(list(SECTIONS)), help="Sections to leave out.")
@click.option("--small", is_flag=True, help="Tiny shapes: does everything run?")
def main(
    out: Path, device_name: str, seconds: float, only: tuple[str, ...], without: tuple[str, ...], small: bool
) -> None:
    """Runs the sections; exits with 1 if one failed."""
    run = Run(torch.device(device_name), small, seconds, out)
    arguments = ["--device", device_name, *(["--small"] if small else [])]
    for name in only or SECTIONS:
        if name in without:
            continue
        if time.monotonic() > run.deadline:
            run.document["sections"][name] = {"skipped": "out of time"}
        elif only:
            run_section(run, name)
        else:
            run.apart(name, arguments)
    failed = [key for key, value in run.document["sections"].items() if "failed" in value]
    click.echo(json.dumps(run.document["seconds"]), err=True)
    click.echo(f"gpu: {out}" + (f"; failed: {', '.join(failed)}" if failed else ""), err=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
