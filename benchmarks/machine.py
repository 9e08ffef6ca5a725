"""The machine: what it is, and how much of it a run had for itself."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("torch", "transformers", "numpy", "tritonclient", "nvidia-pytriton"),
    *("triton", "cuda-core", "flashinfer-python"),
)
_FACTS = ("Thread(s) per core", "L1d cache", "L2 cache", "L3 cache", "Hypervisor vendor")
_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_bf16", "amx_int8", "amx_tile"),
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, Any]:
    """What figures depend on: machine, load by others, versions, commit."""
    cpu = cpuinfo()
    flags = cpu.get("flags", "").split()
    lscpu = _pairs(_output("lscpu") or "")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")),
        "host": platform.node(),
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "lscpu": {name: lscpu[name] for name in _FACTS if name in lscpu},
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "transparent_hugepages": _HUGE_PAGES.read_text().strip() if _HUGE_PAGES.is_file() else None,
        "cores": os.cpu_count(),
        "usable_cores": len(usable_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "loadavg": [round(x, 2) for x in os.getloadavg()],
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def hardware_note(env: Mapping[str, Any]) -> str:
    """An `environment` in two lines, for the end of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items())
    commit = f"{(env['commit'] or 'unknown')[:12]}{' (changed)' if env['dirty'] else ''}"
    load = "/".join(f"{x:g}" for x in env["loadavg"])
    return (
        f"{env['cpu']}, {env['usable_cores']} of {env['cores']} cores, {env['memory_gib']} GiB, "
        f"GPU: {env['gpu'] or 'none'}, load average before: {load}.\n"
        f"Commit {commit}, {env['date']}, Python {env['python']}, {versions}."
    )


def cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor: model name, vendor_id, flags ..."""
    with contextlib.suppress(OSError):
        return _pairs(Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0])
    return {}


def _pairs(text: str) -> dict[str, str]:
    parted = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in parted}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"}
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _gpu() -> str | None:
    # The driver's own file: nvidia-smi may be missing, and importing torch for this takes seconds.
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_pairs(file.read_text("utf-8", "replace")).get("Model", "") for file in files]
    return ", ".join(filter(None, names)) or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
