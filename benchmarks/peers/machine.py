"""The machine: what it is, and how much of it a run had for itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import environment

_FACTS = (
    "Model name",
    "Thread(s) per core",
    "L1d cache",
    "L2 cache",
    "L3 cache",
    "Hypervisor vendor",
)
_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "amx_tile",
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def describe() -> dict[str, Any]:
    """`report.environment()` with the processor's caches and vector extensions, and huge pages."""
    described = environment()
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        text = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}
        ).stdout
        facts = {
            name.strip(): value.strip()
            for name, _, value in (line.partition(":") for line in text.splitlines())
        }
        described["lscpu"] = {name: facts[name] for name in _FACTS if name in facts}
        flags = facts.get("Flags", "").split()
        described["cpu_flags"] = [flag for flag in _FLAGS if flag in flags]
    if _HUGE_PAGES.is_file():
        described["transparent_hugepages"] = _HUGE_PAGES.read_text().strip()
    return described


def usable_cores() -> list[int]:
    """Numbers of the cores this process may use."""
    return sorted(os.sched_getaffinity(0))


def available_gib() -> float:
    """Memory that can be had without swapping."""
    return float(psutil.virtual_memory().available) / 2**30


class CpuShare:
    """Measures from its making to `finish` who used the usable time of all cores."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._start = time.monotonic()
        self._busy, self._total = _cpu_seconds()
        self._own = self._own_seconds()

    def finish(self) -> dict[str, Any]:
        """`others_cpu`: share of all cores' time that went to other processes or to other guests of the
        host (steal), 0..1; `own_cpu`: of the processes given; their memory; the load average.
        """
        busy, total = _cpu_seconds()
        passed = max(total - self._total, 1e-9)
        own = self._own_seconds() - self._own
        return {
            "others_cpu": min(1.0, max(0.0, (busy - self._busy - own) / passed)),
            "own_cpu": own / passed,
            "rss_gib": sum(self._each(lambda process: process.memory_info().rss)) / 2**30,
            "loadavg": round(os.getloadavg()[0], 2),
        }

    def _own_seconds(self) -> float:
        times = self._each(psutil.Process.cpu_times)
        return sum(one.user + one.system + one.children_user + one.children_system for one in times)

    def _each(self, read: Any) -> list[Any]:
        values = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                values.append(read(process))
        return values


def _cpu_seconds() -> tuple[float, float]:
    """Busy and total time of all cores since boot; time stolen by the host counts as busy."""
    times = psutil.cpu_times()
    # Linux counts guests' time in user time already.
    fields = [value for name, value in times._asdict().items() if not name.startswith("guest")]
    total = sum(fields)
    return total - times.idle - getattr(times, "iowait", 0.0), total
