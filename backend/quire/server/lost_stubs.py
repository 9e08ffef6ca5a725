"""Stubs that a start would wait for without an end.

While a stub initializes, tritonserver wants a sign of life once a second (once in 5 s from 25.08 on), which a
thread of the stub gives every 0.3 s. Where that thread does not run in time, because the machine is busy or
was paused, the server takes the stub for dead, and waits for the end of its process before it says so. The
stub lives, goes on to initialize, and then waits for work: nothing is logged, no port opens, and one of the
threads that load models is gone. (In 24.10 that is in stub_launcher.cc of python_backend:
`ReceiveMessageFromStub` fails, and `Launch` leaves by `WaitForStubProcess`.) A stub that dies before its
first answer is waited for as well.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import time
from pathlib import Path

import psutil

STUB = "triton_python_backend_stub"
GRACE_S = 10.0
"""For stubs that end by themselves: they have answered, and the server waits for them, too. To kill one does
no harm."""
KILL_GRACE_S = 1.0
"""Soon: what a lost stub sends goes to memory that the server has freed, which can end the server."""
LOOK_S = 1.0

_WAIT4 = {"x86_64": "61", "aarch64": "260"}.get(platform.machine(), "")
_MODEL_PY, _NAME = 1, 8
"""Places in a stub's command line."""


class LostStubs:
    """Looks for lost stubs in the start of one tritonserver, which is a process below this one.

    Args:
        server: process id of tritonserver.
        grace_s: for how long it has to have waited for a stub.
    """

    def __init__(self, server: int, grace_s: float) -> None:
        self._server = server
        self._grace_s = grace_s
        self._looked = -math.inf
        self._names: dict[int, str] = {}
        self._since: dict[int, float] = {}
        self._killed: set[int] = set()

    @property
    def suspects(self) -> list[str]:
        """Names of the stubs that the server was waiting for at the last look."""
        return [self._names[pid] for pid in self._since]

    def look(self) -> dict[int, str]:
        """Names of the lost ones (`<model>_<group>_<number>`) by process id, as of LOOK_S ago at most."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            waited_for = awaited_stubs(self._server)
            self._names |= waited_for
            self._since = {pid: self._since.get(pid, now) for pid in waited_for}
        return {pid: self._names[pid] for pid, since in self._since.items() if now - since >= self._grace_s}

    def kill(self, pid: int) -> bool:
        """Kills a lost stub. Its server then fails to load the model, or loads
        it again. Returns False where an earlier call has killed it."""
        self._since[pid] = time.monotonic() + GRACE_S
        is_first = pid not in self._killed
        if is_first:
            self._killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return is_first


def awaited_stubs(server: int) -> dict[int, str]:
    """Names by process id of the stubs whose end a thread of `server` waits for, and of those that have ended
    and nobody has waited for; none where the system does not say what threads do."""
    found = {}
    with contextlib.suppress(OSError, psutil.NoSuchProcess):
        for task in Path(f"/proc/{server}/task").iterdir():
            with contextlib.suppress(OSError):
                number, *arguments = (task / "syscall").read_text("ascii").split()
                if number == _WAIT4 and (name := _instance_of(pid := int(arguments[0], 16))):
                    found[pid] = name
        for child in psutil.Process(server).children():
            if child.status() == psutil.STATUS_ZOMBIE and child.name() == STUB[:15]:
                found.setdefault(child.pid, f"a stub that has died ({child.pid})")
    return found


def _instance_of(pid: int) -> str | None:
    """The instance that a stub serves. None: it is none, or one that only completes a configuration, which
    the server never takes for dead."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not arguments[0].endswith(STUB) or len(arguments) <= _NAME:
        return None
    name = arguments[_NAME]
    return None if name == Path(arguments[_MODEL_PY]).parent.parent.name else name
