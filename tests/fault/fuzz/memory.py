"""How much the processes of a server hold, so that what grows for ever is seen."""

from __future__ import annotations

from pathlib import Path

from tests.fault.fuzz.target import Target
from tests.fixtures.server import ServerProcess


def private_mib(target: Target) -> dict[str, float]:
    """By process, the anonymous memory it has in RAM; shared regions do not count, which never shrink.

    One that has just ended has none.
    """
    return {name: _anonymous_kib(process.pid) / 1024 for name, process in target.processes().items()}


def descriptors(target: Target) -> dict[str, int]:
    return {name: process.num_fds() for name, process in target.processes().items()}


def _anonymous_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def anonymous_mib(server: ServerProcess) -> dict[str, float]:
    """Likewise of the processes of a server without a gateway, by name and number."""
    return {
        f"{process.name()} {process.pid}": _anonymous_kib(process.pid) / 1024
        for process in server.descendants()
    }
