"""Processes by pid and start time: a pid alone may have gone to another process."""

from __future__ import annotations

import os
import select


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
