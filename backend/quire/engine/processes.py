"""Identifies processes by pid and start time, as a pid can be reused; names threads."""

from __future__ import annotations

import contextlib
import os
import select
import threading


def start_time_of(pid: int) -> int | None:
    """Returns the start time of a running process in clock ticks since boot; None: it has ended, is a
    zombie, or cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def wait_readable(fd: int, timeout_s: float | None = None) -> bool:
    """Waits until a descriptor is readable or has an error; for a pidfd, until its process has ended. Returns
    False if that takes longer than `timeout_s`; None: no limit.

    `select.select` refuses descriptors above 1023, which a frontend with many clients may have.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def open_verified_pidfd(pid: int, start_time: int) -> int | None:
    """Returns a pidfd of the process with this pid and start time; the caller closes it.

    None: the process has ended, or no pidfd of it can be opened. Signals sent through the pidfd
    (`signal.pidfd_send_signal`) reach no other process.
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
    """Gives Python's running threads their Python names in the kernel, too, so that `top -H`, perf and gdb
    show them. The kernel keeps 15 characters.

    The main thread keeps the process's name. Python names threads so by itself from 3.14 on.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            path = f"/proc/self/task/{thread.native_id}/comm"
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as comm:
                comm.write(thread.name[:15])
