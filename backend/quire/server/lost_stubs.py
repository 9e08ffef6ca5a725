"""Finds lost stubs: those whose end tritonserver waits for though they never end, so that a start hangs.

While a stub initializes, tritonserver expects a sign of life once a second (once in 5 s from 25.08 on). A
thread of the stub gives it every 0.3 s. If that thread does not run in time, because the machine is busy or
was paused, the server considers the stub dead, and waits for the end of its process before it reports that.
The stub lives, goes on to initialize, and then waits for work: nothing is logged, no port opens, and one of
the threads that load models stands still. (In 24.10 that is in stub_launcher.cc of python_backend:
`ReceiveMessageFromStub` fails, and `Launch` leaves by `WaitForStubProcess`.) The server also waits for a stub
that died before its first answer.
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
"""Seconds that the server must have waited for a stub before the stub counts as lost. Until then it may be
one that has answered and ends by itself, for which the server waits too. To kill such a stub does no harm."""
KILL_GRACE_S = 1.0
"""The same time as GRACE_S, for starts that kill lost stubs. It is short, as a lost stub may write to memory
that the server has freed, which can end the server."""
LOOK_S = 1.0

_WAIT4 = {"x86_64": "61", "aarch64": "260"}.get(platform.machine(), "")
_MODEL_PY, _NAME = 1, 8
"""Positions of the path of `model.py`, and of the name of what the stub serves, in a stub's command line."""


class LostStubs:
    """Finds the lost stubs in the start of one tritonserver, which must be a descendant of this process.

    Args:
        server: process id of tritonserver.
        grace_s: seconds that the server must have waited for a stub before the stub counts as lost.
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
        """Names of the stubs, lost or not, that the server was waiting for at the last look."""
        return [self._names[pid] for pid in self._since]

    def look(self) -> dict[int, str]:
        """Returns the names of the lost stubs by process id, as found at most LOOK_S ago. A name is that of
        the model instance, `<model>_<group>_<number>`, or says that the stub has died."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            waited_for = awaited_stubs(self._server)
            self._names |= waited_for
            self._since = {pid: self._since.get(pid, now) for pid in waited_for}
        return {pid: self._names[pid] for pid, since in self._since.items() if now - since >= self._grace_s}

    def kill(self, pid: int) -> bool:
        """Kills a lost stub. The server then usually fails to load the model, or loads it again.

        Returns:
            False if an earlier call has sent it the signal already; then this call sends none.
        """
        self._since[pid] = time.monotonic() + GRACE_S
        is_first = pid not in self._killed
        if is_first:
            self._killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return is_first


def awaited_stubs(server: int) -> dict[int, str]:
    """Returns the names, by process id, of the stubs whose end a thread of `server` waits for, and of its
    zombie stubs.

    Waiting threads are not found where the system does not show their system calls.
    """
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
    """Returns the name of the model instance that a stub serves.

    None: the process is no stub, or a stub that only completes a configuration, which the server never
    considers dead.
    """
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    if not arguments[0].endswith(STUB) or len(arguments) <= _NAME:
        return None
    name = arguments[_NAME]
    return None if name == Path(arguments[_MODEL_PY]).parent.parent.name else name
