"""Gives tritonserver's HTTP threads a large stack, so that a request in many pieces hardly ends the server.

Servers before 25.07 use 16 bytes of a thread's stack for each piece in which a body arrives, such as a chunk.
When the stack is used up, a signal ends them: with the usual 8 MiB at half a million pieces. With the stack
given here, most machines lack the memory for so many pieces, as each takes 1 KiB.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
from pathlib import Path

import click
import psutil

HTTP_STACK_BYTES = 1 << 30
BYTES_PER_PIECE = 16
_UNLIMITED_BYTES = 2 << 20
"""Bytes of stack that glibc gives a thread where the stack has no limit."""
_WAIT_S = 5.0
_POLL_S = 0.002


def limits_for_server(limits: tuple[int, int]) -> tuple[int, int]:
    """Returns limits of the stack (soft, hard) that give a server's threads HTTP_STACK_BYTES, if possible.

    A stack's size reserves address space, not memory. Where the system counts that as memory
    (vm.overcommit_memory=2), the limits stay as they are. If the stack is smaller than HTTP_STACK_BYTES, a
    line on stderr says how many pieces a request may safely have.

    Args:
        limits: the present limits.
    """
    soft, hard = limits
    if _overcommit_mode() != "2":
        soft = HTTP_STACK_BYTES if hard == resource.RLIM_INFINITY else min(HTTP_STACK_BYTES, hard)
    stack = _UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft
    if stack < HTTP_STACK_BYTES:
        click.echo(
            f"quire: threads have a stack of {stack} bytes, which cannot be raised to {HTTP_STACK_BYTES} "
            f"(ulimit -Hs, vm.overcommit_memory): an HTTP request whose body comes in more than "
            f"{stack // 2 // BYTES_PER_PIECE} pieces may end this server",
            err=True,
        )
    return soft, hard


def _overcommit_mode() -> str:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text("utf-8").strip()
    except OSError:
        return "0"


def restore_limits(process: subprocess.Popen[bytes], limits: tuple[int, int]) -> None:
    """Sets a started server's stack limits back to `limits`, for the stubs and engines that it will start.

    A process fixes the stack size of its threads as it begins. So this waits for the server's second thread,
    _WAIT_S seconds at most.
    """
    deadline = time.monotonic() + _WAIT_S
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended
        server = psutil.Process(process.pid)
        while server.num_threads() == 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        resource.prlimit(process.pid, resource.RLIMIT_STACK, limits)
