"""Processes by pid and start time, as a pid alone may have gone to another process; names of threads."""

from __future__ import annotations

import contextlib
import os
import select
import threading


def start_time_of(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None: there is none, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def wait_readable(fd: int, timeout_s: float | None = None) -> bool:
    """Waits until there is something to read, of a pidfd until its process has ended; False after the time.

    `select.select` would refuse a descriptor above 1023, and a frontend with many clients has such.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def open_verified_pidfd(pid: int, start_time: int) -> int | None:
    """A pidfd, to be closed by the caller, of the process that had `pid` and began at `start_time`.

    None: it has ended. Signals go through it (`signal.pidfd_send_signal`): they meet nobody else, ever.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    if start_time_of(pid) != start_time:  # after opening: from here on the descriptor cannot change hands
        os.close(pidfd)
        return None
    return pidfd


def name_threads() -> None:
    """Has the kernel call the threads that run now as Python does: `top -H`, perf and gdb tell them apart.

    The main thread keeps the process's name. Python does it by itself from 3.14 on.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            path = f"/proc/self/task/{thread.native_id}/comm"
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as comm:
                comm.write(thread.name[:15])
