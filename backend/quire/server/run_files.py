"""Files of one run of `quire serve`: the shared-memory regions of its stubs, a lock, and a directory for
sockets and for model repositories that the run writes.

Their names contain the run's id, so that a later start can remove them if the processes were killed. The
server and its stubs inherit the lock, which tells a later start whether the run is over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

SHM = Path("/dev/shm")
PREFIX = "quire-"
_LOCK_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{8}}-lock")


class RunFiles:
    """Files of this run.

    `shm_prefix` begins the names of the lock and of the stubs' shared-memory regions in /dev/shm. `directory`
    is private to the user; its name is short, as a socket's path has 107 bytes at most. The server must
    inherit `lock_fd`. The lock becomes free when the last process that has this descriptor has closed it or
    ended, even if it was killed.
    """

    def __init__(self) -> None:
        run_id = secrets.token_hex(4)
        self.shm_prefix = f"{PREFIX}{run_id}-"
        # It has its name once it is held: a start beside us takes a free one for that of a run that is over.
        unnamed = SHM / f".{self.shm_prefix}lock"
        self.lock_fd = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(SHM / f"{self.shm_prefix}lock")
        self.directory = _directory(run_id)
        self.directory.mkdir(mode=0o700)

    def remove(self) -> None:
        _remove(self.shm_prefix)
        os.close(self.lock_fd)


def remove_stale() -> None:
    """Removes the files of this user's runs whose lock is free (after a SIGKILL of the whole group, say).

    Everybody can make files in /dev/shm. So only locks that belong to this user and have a run's name count.
    """
    for lock in SHM.glob(f"{PREFIX}*-lock"):
        if not _LOCK_NAME.fullmatch(lock.name):
            continue
        try:
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # removed by its owner meanwhile, another user's, or no file
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                continue
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
    directory = _directory(shm_prefix.removeprefix(PREFIX).removesuffix("-"))
    with contextlib.suppress(FileNotFoundError):
        if directory.lstat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)  # which leaves links alone
    # The lock goes last: until then a start that is interrupted here can be finished by the next one.
    for path in sorted(SHM.glob(f"{shm_prefix}*"), key=lambda path: path.name.endswith("-lock")):
        path.unlink(missing_ok=True)
