"""How fast weights come into memory, ready to compute, beside how fast their file can be read at all.

    python -m benchmarks.loading                    # Qwen3-0.6B's shape
    python -m benchmarks.loading --shape tiny       # does it run?

A first start packs what it reads, a second one reads what the first has kept. Before each the file leaves the
page cache; the limit is the faster of two readings of it just before, by threads, past the page cache and
through it, into memory that is there. `warm` is a load whose file is in the page cache: what is left is the
processor's work. Of a load's time are told what the model without weights took (config, allocation), packing,
and reading a kept entry with its checksums; the rest is what reading and converting took beside packing.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import torch
import xxhash

from benchmarks import machine, report
from benchmarks.peers.checkpoints import SHAPES, huggingface, pure_gguf
from quire.config import ModelConfig
from quire.loader import load as loader
from quire.loader import packed_cache
from quire.loader.packed_cache import PackedCache
from quire_kernels.cpu.native import set_num_threads

THREADS, PART = 8, 2**23
PARTS = {
    "model": (loader, "empty_model"),
    "packing": (loader.Packer, "pack"),
    "entry": (PackedCache, "read"),
}
"""Functions whose time is told."""


@dataclass
class Start:
    """Loads of one kind, a figure for each round."""

    name: str
    num_bytes: int
    """Of the file that is read."""
    limit_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)
    """Of the load from the disk."""

    def row(self) -> list[str]:
        """Medians, of the table."""
        ratios = [limit / load for limit, load in zip(self.limit_s, self.load_s, strict=True)]
        times = [self.limit_s, self.load_s, *(self.parts_s[part] for part in PARTS), self.warm_s]
        return [
            self.name,
            f"{self.num_bytes / 1e6:.0f}",
            *(f"{statistics.median(one):.2f}" for one in times),
            f"{statistics.median(ratios):.2f}",
        ]


def forget(file: Path) -> None:
    """Has a file's pages leave the page cache."""
    with file.open("rb") as opened:
        os.fsync(opened)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(file: Path, flags: int) -> float:
    """What threads take to read a file that is not in the page cache."""
    forget(file)
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(mmap.mmap(-1, PART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    handle, size = os.open(file, os.O_RDONLY | flags), file.stat().st_size

    def read(offset: int) -> int:
        buffer = buffers.get()
        count = os.preadv(handle, [buffer], offset)
        buffers.put(buffer)
        return count

    try:
        with ThreadPoolExecutor(THREADS) as pool:
            begin = time.perf_counter()
            assert sum(pool.map(read, range(0, size, PART))) == size
            return time.perf_counter() - begin
    finally:
        os.close(handle)


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up what PARTS take."""

    def wrapped(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - begin

        return call

    with ExitStack() as stack:
        for part, (owner, name) in PARTS.items():
            function = getattr(owner, name)
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, wrapped(part, function))
        yield


@contextmanager
def kept_in(directory: Path, *, keeps: bool) -> Iterator[None]:
    """Packed weights are looked for there, and kept there always or never."""
    places, worth = packed_cache.lasting_directory, loader.is_worth_keeping
    packed_cache.lasting_directory = lambda name: directory
    loader.is_worth_keeping = lambda read_s, pack_s: keeps
    try:
        yield
    finally:
        packed_cache.lasting_directory, loader.is_worth_keeping = places, worth


def keep(directory: Path, config: ModelConfig) -> Path:
    """The entry that a first start makes."""
    with kept_in(directory, keeps=True):
        loaded = loader.load_model(config, torch.device("cpu"))
    assert loaded.cache_writer is not None, "the checkpoint was made just now"
    loaded.cache_writer.wait()
    (entry,) = directory.glob("*.weights")
    return entry


def load(config: ModelConfig) -> tuple[float, dict[str, float]]:
    """What a load takes, in all and its parts; the weights are gone."""
    parts = dict.fromkeys(PARTS, 0.0)
    with timed(parts):
        begin = time.perf_counter()
        loaded = loader.load_model(config, torch.device("cpu"))
        seconds = time.perf_counter() - begin
    del loaded  # which takes time, too
    return seconds, parts


def measure(start: Start, directory: Path, file: Path, config: ModelConfig) -> None:
    """One round, with packed weights in a directory."""
    start.limit_s.append(min(read_seconds(file, flags) for flags in (os.O_DIRECT, 0)))
    forget(file)
    with kept_in(directory, keeps=False):
        seconds, parts = load(config)
        start.load_s.append(seconds)
        for part, taken in parts.items():
            start.parts_s.setdefault(part, []).append(taken)
        start.warm_s.append(load(config)[0])


@click.command()
@click.option("--shape", default="qwen3-0.6b", type=click.Choice(list(SHAPES)), show_default=True)
@click.option("--threads", default=len(machine.usable_cores()), show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(shape: str, threads: int, rounds: int) -> None:
    """Print seconds (medians of the rounds) and shares of the limit, as a Markdown table and JSON."""
    set_num_threads(threads)
    checkpoint, gguf = huggingface(SHAPES[shape]), pure_gguf(SHAPES[shape], "Q4_0")
    weights = checkpoint / "model.safetensors"
    cases: dict[str, tuple[Path, dict[str, Any]]] = {
        "bf16": (weights, {"model": str(checkpoint)}),
        "w8a8 of bf16": (weights, {"model": str(checkpoint), "quantization": "w8a8"}),
        "Q4_0": (gguf, {"model": str(gguf)}),
    }
    environment = machine.environment()
    time.sleep(2)  # of files that changed just now nothing is kept
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
        todo = []
        for name, (file, options) in cases.items():
            config = ModelConfig(**options)
            # What comes first loads the kernels, too.
            entry = keep(Path(folder, name), config)
            todo.append((Start(f"{name}, first", file.stat().st_size), Path(folder, "none"), file, config))
            todo.append((Start(f"{name}, second", entry.stat().st_size), entry.parent, entry, config))
        for _ in range(rounds):
            for start, directory, file, config in todo:
                measure(start, directory, file, config)
        starts = [start for start, *_ in todo]
    data = torch.randint(0, 255, (2**26,), dtype=torch.uint8).numpy().data
    begin = time.perf_counter()
    for at in range(0, len(data), 2**21):
        xxhash.xxh3_128_digest(data[at : at + 2**21])
    checksum_gb_s = len(data) / (time.perf_counter() - begin) / 1e9
    columns = ("start", "MB", "limit", "load", *PARTS, "warm", "of the limit")
    click.echo(report.table(columns, [start.row() for start in starts]))
    click.echo(f"\nChecksums: {checksum_gb_s:.1f} GB/s. {machine.hardware_note(environment)}\n")
    document = {"environment": environment, "checksum_gb_s": checksum_gb_s}
    click.echo(json.dumps(document | {"starts": [asdict(start) for start in starts]}))


if __name__ == "__main__":
    main()
