"""Runs the CUDA sources on a CPU: compiled by g++ against a host version of device.cuh.

`EmulatedLauncher` takes the place of the driver, so the Python side of the operators is the one that GPUs
use. x86-64 and g++ only. What it shows and what it cannot is said in device.cuh beside this.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from quire_common.cache import cache_directory
from quire_kernels.cuda.compiler import INCLUDES, SOURCES, Unit
from quire_kernels.cuda.launch import Launcher

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w")


def is_available() -> bool:
    """Whether this machine can compile and run the emulation."""
    return platform.machine() == "x86_64" and shutil.which("g++") is not None


class EmulatedLauncher(Launcher):
    """Runs each kernel to its end; a deadlock or a misaligned access ends the process with a message."""

    def __init__(self, multiprocessors: int = 3, sources: Path = SOURCES) -> None:
        self.count = multiprocessors
        self.sources = sources
        self.seed = 1
        """Decides in which order blocks and warps run; 0: the plain order."""
        self.launches: list[str] = []

    def multiprocessors(self, device: torch.device) -> int:
        """See Launcher."""
        return self.count

    def start(
        self,
        device: torch.device,
        unit: Unit,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int,
    ) -> None:
        """See Launcher."""
        self.launches.append(kernel)
        function = getattr(_library(unit, self.sources), kernel)
        size = (ctypes.c_int * 3)(*grid, 1)
        function(size, threads, shared_bytes, ctypes.c_uint(self.seed), ctypes.byref(params))


@functools.cache
def _library(unit: Unit, sources: Path) -> ctypes.CDLL:
    digest = hashlib.sha256(repr((unit, FLAGS)).encode())
    for path in [sources / f"{unit.source}.cu", HERE / "device.cuh", *sorted(INCLUDES.iterdir())]:
        digest.update(path.read_bytes())
    path = cache_directory("emulated") / f"{unit.source}-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            defines = [f"-D{name}={value}" for name, value in unit.defines]
            source = str(sources / f"{unit.source}.cu")
            places = [f"-I{HERE}", f"-I{INCLUDES}"]
            command = ["g++", *FLAGS, *places, *defines, "-x", "c++", source, "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            made.replace(path)
    return ctypes.CDLL(str(path))
