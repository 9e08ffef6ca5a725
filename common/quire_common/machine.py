"""Processors and memory that this process may use on the machine, within the limits of control groups.

A container sees the whole machine in /proc. What it may take stands in its control group and in each one
above that: one that takes more memory is killed, one with more threads than its quota stands still for part
of every period, with its threads waiting for each other. Both versions of control groups are read, also where
a machine has them side by side.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def num_cpus(root: Path = ROOT) -> int:
    """Processors for threads that compute: those of the affinity mask, no more than the quota pays for.

    A quota of two and a half is two: threads that share a step wait for the slowest.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for group in _groups("cpu", root):
        numbers = _numbers(group / "cpu.max") or (
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        )
        if len(numbers) == 2 and 0 < numbers[0] < float("inf"):  # -1 and "max" are no quota
            count = min(count, int(numbers[0] // numbers[1]))
    return max(1, count)


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be taken without swapping or being killed: of the machine, and of each control group.

    Files that a group has read or written count as its memory; what is on disk is given back on demand.
    """
    available = int(psutil.virtual_memory().available)
    for group in _groups("memory", root):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            for limit in _numbers(group / name)
        ]
        usage = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes")
        if usage and math.isfinite(min(limits, default=math.inf)):
            available = min(available, int(min(limits) - usage[0]) + _clean_files(group))
    return max(0, available)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups this process is in, of every hierarchy with a controller, upwards."""
    try:
        # Names of mount points are bytes.
        member = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return  # not Linux
    paths: dict[str, str] = {}
    for line in member:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        place, _, kind = line.partition(" - ")
        fields, (file_system, *_, options) = place.split(), kind.split()
        if file_system == "cgroup2":
            found = paths.get("")
        elif file_system == "cgroup" and controller in options.split(","):
            found = paths.get(controller)
        else:
            continue
        if found is None:
            continue
        # In a container the mount shows a part of the tree, often the process's own group as its top.
        shown, point = Path(fields[3]), root / fields[4].lstrip("/")
        inside = Path(found)
        is_shown = inside.is_relative_to(shown) and ".." not in inside.parts
        below = inside.relative_to(shown) if is_shown else Path()
        yield from (point / folder for folder in (below, *below.parents))


def _numbers(path: Path) -> tuple[float, ...]:
    """Returns the numbers in a small file, with "max" as infinity; empty if there is no file."""
    try:
        words = path.read_text("utf-8").split()
        return tuple(float("inf") if word == "max" else float(word) for word in words)
    except (OSError, ValueError):
        return ()


def _clean_files(group: Path) -> int:
    """Bytes of cached files that need not be written first, however recently they were used; files in memory
    (tmpfs) and locked ones are none of them. Only this is sure to come back: nothing of the kernel's own."""
    try:
        lines = (group / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    found = dict(line.split()[:2] for line in lines)

    def size(*names: str) -> int:
        return int(next((found[name] for name in names if name in found), 0))

    # With "total_", version 1 counts the groups below as its usage does.
    cached = sum(size(f"total_{kind}_file", f"{kind}_file") for kind in ("active", "inactive"))
    unwritten = sum(size(f"total_{kind}", f"file_{kind}") for kind in ("dirty", "writeback"))
    return max(0, cached - unwritten)
