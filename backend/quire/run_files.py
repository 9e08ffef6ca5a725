"""What one `quire serve` keeps outside its processes: shared-memory regions and a directory for sockets.

Both carry the run's id, so that they can be removed whatever happened to the processes; the lock that all of
them inherit tells a later start which runs are over.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

SHM = Path("/dev/shm")
PREFIX = "quire-"


class RunFiles:
    """Files of this run. `shm_prefix` begins the name of each of its regions in /dev/shm; `directory` is its
    own, private and short, because a socket's path has 107 bytes at most.

    `lock_fd` is to be inherited by every process of the run: the lock is free only when the last of them is
    gone, however it went.
    """

    def __init__(self) -> None:
        run_id = secrets.token_hex(4)
        self.shm_prefix = f"{PREFIX}{run_id}-"
        self.directory = _directory(run_id)
        self.directory.mkdir(mode=0o700)
        self.lock_fd = os.open(SHM / f"{self.shm_prefix}lock", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        _remove(self.shm_prefix)
        os.close(self.lock_fd)


def remove_stale() -> None:
    """Remove the files of runs whose processes are all gone (a SIGKILL of the whole group, say)."""
    for lock in SHM.glob(f"{PREFIX}*-lock"):
        try:
            fd = os.open(lock, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            continue  # removed by its owner meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(lock.name.removesuffix("lock"))
        finally:
            os.close(fd)


def _directory(run_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{PREFIX}run-{run_id}"


def _remove(shm_prefix: str) -> None:
    shutil.rmtree(_directory(shm_prefix.removeprefix(PREFIX).removesuffix("-")), ignore_errors=True)
    # The lock goes last: until then a start that is interrupted here can be finished by the next one.
    for path in sorted(SHM.glob(f"{shm_prefix}*"), key=lambda path: path.name.endswith("-lock")):
        path.unlink(missing_ok=True)
