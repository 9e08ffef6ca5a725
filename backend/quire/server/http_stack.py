"""The stack that tritonserver's HTTP threads are given, so that no request ends the server by its pieces.

Servers before 25.07 take 16 bytes of a thread's stack for each piece in which a body came, a chunk of it at
worst, and end by a signal when that is all: with the usual 8 MiB at half a million pieces. With the stack
given here the memory goes first, 1 KiB for each piece.
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
    """Limits of the stack (soft, hard) for a server whose threads are to have HTTP_STACK_BYTES of it.

    They keep address space, not memory; a system that counts it all the same (vm.overcommit_memory=2) keeps
    what it has. Where that is less, one line says what it is good for.
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
    """Gives the server our own limits back, for the stubs and engines that it is about to start.

    The size of its threads' stacks is settled when it begins: its first thread shows that this is over.
    """
    deadline = time.monotonic() + _WAIT_S
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has ended
        server = psutil.Process(process.pid)
        while server.num_threads() == 1 and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        resource.prlimit(process.pid, resource.RLIMIT_STACK, limits)
