"""Processors and memory that this process may use on the machine, within the limits of control groups.

A container sees the whole machine in /proc. Its limits are those of its control group and of each group above
that. A container that takes more memory is killed. With more busy threads than its quota of processors, it
stands still for part of every period, and its threads wait for each other. Both versions of control groups
are read, also on a machine that has both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def num_cpus(root: Path = ROOT) -> int:
    """Returns the number of processors for computing threads: those of the affinity mask (without one, all),
    but no more than each control group's quota, and at least 1.

    A quota of two and a half counts as two, because threads that share a step wait for the slowest.
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
    """Returns the bytes that can be taken without swapping or being killed: the least of what the machine and
    each control group have left.

    The kernel counts cached files as a group's memory. Those that are also on disk, and are not locked, count
    as left here, because the kernel gives their memory back on demand.
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
    """Yields the folders of this process's control groups, in each mounted hierarchy that may have this
    controller from the process's own group upwards. If that group lies outside the mounted part, yields the
    part's top alone."""
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
    """Returns the numbers in a small file, with "max" as infinity; empty if the file cannot be read, or holds
    anything else."""
    try:
        words = path.read_text("utf-8").split()
        return tuple(float("inf") if word == "max" else float(word) for word in words)
    except (OSError, ValueError):
        return ()


def _clean_files(group: Path) -> int:
    """Returns the bytes that a control group's cached files occupy and that can be freed without writing to
    disk; 0 if they are not known. Files in memory (tmpfs), locked files and the kernel's own memory do not
    count, because they are not sure to be given back."""
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
