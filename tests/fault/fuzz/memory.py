"""How much the processes of a server hold, so that what grows for ever is seen."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.fault.fuzz.target import Target
from tests.fixtures.server import ServerProcess


def private_mib(target: Target) -> dict[str, float]:
    """By process, the anonymous memory it has in RAM; shared regions do not count, which never shrink.

    One that has just ended has none.
    """
    return {name: _anonymous_kib(process.pid) / 1024 for name, process in target.processes().items()}


def descriptors(target: Target) -> dict[str, int]:
    found = {}
    for name, process in target.processes().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[name] = process.num_fds()
    return found


def _anonymous_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def anonymous_mib(server: ServerProcess) -> dict[str, float]:
    """Likewise of the processes of a server without a gateway, by name and number."""
    found = {}
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            found[f"{process.name()} {process.pid}"] = _anonymous_kib(process.pid) / 1024
    return found
