"""RuntimeDirectory: the directory in which the frontends of an engine meet and the engine reports its state.

It belongs to one user alone, which is checked at each opening: in a folder that is open to all, anyone could
have created it first. RuntimeDirectory opens files by name in the open directory, never through a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from quire.adapters import SavedAdapters
from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.engine.heartbeat import Heartbeat
from quire.engine.processes import start_time_of
from quire.errors import ConfigError

POLL_S = 0.02
MAX_STATE_BYTES = 64 * 1024
MAX_SUSPECTS_BYTES = 4 * 2**20
"""Most bytes read of an engine's suspects: enough for the ids of as many requests as it may run."""
MAX_ADAPTERS_BYTES = 64 * 2**20
"""Most bytes read of an engine's saved adapters: enough for the names and paths of a thousand."""
MAX_SOCKET_PATH = 107
"""Most bytes in the path of a Unix socket, a limit of the kernel."""

logger = logging.getLogger("quire")

_MARKER = re.compile(r"frontend-([0-9]{1,9})-([0-9]{1,18})")


class EngineState(msgspec.Struct, frozen=True):
    """State of the latest engine of a directory; `start_time` distinguishes its process from a later one with
    its pid."""

    state: Literal["starting", "ready", "failed", "stopped"]
    """"stopped": the engine was told to stop. A frontend that has used an engine of this directory then
    starts no other."""
    pid: int
    start_time: int
    generation: int
    address: str = ""
    error: str = ""
    """Reason of the failure, in one line; empty: it has not failed."""

    @property
    def is_alive(self) -> bool:
        return start_time_of(self.pid) == self.start_time

    def is_of(self, other: EngineState) -> bool:
        """Returns whether both states describe the same process."""
        return (self.pid, self.start_time) == (other.pid, other.start_time)


_decoder = msgspec.json.Decoder(EngineState)
_adapters_decoder = msgspec.json.Decoder(SavedAdapters)
_suspects_decoder = msgspec.json.Decoder(InFlightSuspects)


class RuntimeDirectory:
    """An open directory that only this user, and root, can access.

    Raises:
        ConfigError: it cannot be opened, is a link, is not a directory, or belongs or is accessible to
            other users.
        FileNotFoundError: it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link is no directory either
            raise ConfigError(f"{path}: {error.strerror}: {_REMEDY}") from None
        found = os.fstat(self._fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            self.close()
            whose = f"owner {found.st_uid}, mode {found.st_mode & 0o7777:o}"
            raise ConfigError(f"{path} is not of this user alone ({whose}): {_REMEDY}")

    def close(self) -> None:
        os.close(self._fd)

    @classmethod
    @contextmanager
    def locked(
        cls, path: Path, timeout_s: float = math.inf, *, make: bool = True
    ) -> Iterator[RuntimeDirectory]:
        """Opens the directory, creating it if `make`, and holds its lock in the context.

        Raises:
            TimeoutError: another process or thread held the lock for all of `timeout_s`.
            FileNotFoundError: it does not exist, and `make` is False.
            ConfigError: it is not of this user alone, or cannot be opened.
            OSError: it cannot be created or locked.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Not by itself, which takes a link to nowhere above it for what is there: we would try for ever.
            if make:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            with contextlib.ExitStack() as stack:
                try:
                    directory = cls(path)
                    stack.callback(directory.close)
                    lock = directory._open("lock", os.O_RDWR | os.O_CREAT)
                except FileNotFoundError:
                    if not make:
                        raise
                    continue  # removed by the one who had it locked, as it is below
                stack.callback(os.close, lock)
                _lock(lock, deadline)
                if os.fstat(lock).st_nlink == 0:
                    continue
                yield directory
                return

    def read(self, name: str, most: int = MAX_STATE_BYTES) -> bytes | None:
        """Returns at most the first `most` bytes of a file; None: the file cannot be opened."""
        try:
            fd = self._open(name, os.O_RDONLY)
        except OSError:
            return None
        with open(fd, "rb") as file:
            return file.read(most)

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file atomically: readers see the old content or the new one."""
        temporary = f".{name}.{secrets.token_hex(4)}"
        fd = self._open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError:
            os.unlink(temporary, dir_fd=self._fd)
            raise

    def read_state(self) -> EngineState | None:
        """Returns the engine's state; None: no engine was started, or its state cannot be read."""
        try:
            return _decoder.decode(self.read("state.json") or b"")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def write_state(self, state: EngineState) -> None:
        self.write("state.json", msgspec.json.encode(state))

    def read_suspects(self, pid: int) -> InFlightSuspects:
        """Returns the suspects that the engine with this pid recorded last; NO_SUSPECTS: none can be read."""
        try:
            return _suspects_decoder.decode(self.read(f"at-risk-{pid}", MAX_SUSPECTS_BYTES) or b"")
        except (msgspec.MsgspecError, ValueError):
            return NO_SUSPECTS

    def write_suspects(self, pid: int, suspects: InFlightSuspects) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the engine
            self.write(f"at-risk-{pid}", msgspec.json.encode(suspects))

    def read_adapters(self) -> SavedAdapters | None:
        """Returns the adapters that the latest engine recorded; None: none can be read."""
        try:
            return _adapters_decoder.decode(self.read("adapters.json", MAX_ADAPTERS_BYTES) or b"")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def write_adapters(self, saved: SavedAdapters) -> None:
        try:
            self.write("adapters.json", msgspec.json.encode(saved))
        except OSError as error:  # a full disk must not end the engine
            logger.error("engine: an engine in its place will not know of its adapters: %s", error)

    def heartbeat(self, pid: int, watchdog_s: float | None = None) -> Heartbeat | None:
        """Opens the heartbeat of the engine with this pid; None: there is none.

        Args:
            watchdog_s: seconds that the engine may be silent. Only the engine passes it, which creates the
                file. None: an existing file is opened.
        """
        flags = os.O_RDWR | (0 if watchdog_s is None else os.O_CREAT)
        try:
            fd = self._open(f"heartbeat-{pid}", flags)
        except FileNotFoundError:
            return None
        return Heartbeat(fd, watchdog_s or 0.0)

    def tidy(self, pid: int) -> None:
        """Removes the sockets, suspects and heartbeats of engines, all of which must have ended, and
        temporary files. Keeps suspects and heartbeat of the latest engine, with this pid, because its other
        frontends may not have read them yet."""
        kept = {f"at-risk-{pid}", f"heartbeat-{pid}"}
        for name in os.listdir(self._fd):  # noqa: PTH208 (of the open one)
            if name.startswith(("at-risk-", "heartbeat-", "engine-", ".")) and name not in kept:
                os.unlink(name, dir_fd=self._fd)

    def socket_path(self) -> Path:
        """Returns a path with a random name in the directory, for a new socket.

        Raises:
            ConfigError: the path is longer than a socket's may be.
        """
        path = self.path / f"engine-{secrets.token_hex(4)}.ipc"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            limit = f"a socket's path has at most {MAX_SOCKET_PATH} bytes"
            raise ConfigError(f"{path}: {limit}: set QUIRE_RUNTIME_DIR to a shorter one")
        return path

    def mark(self) -> None:
        """Registers this process as a frontend in the directory."""
        os.close(self._open(_marker(), os.O_WRONLY | os.O_CREAT))

    def unmark(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_marker(), dir_fd=self._fd)

    def has_frontends(self) -> bool:
        """Returns whether a living process that is visible here is registered as a frontend."""
        found = filter(None, map(_MARKER.fullmatch, os.listdir(self._fd)))  # noqa: PTH208 (of the open one)
        return any(start_time_of(int(pid)) == int(start) for pid, start in (one.groups() for one in found))

    def hold(self) -> None:
        """Marks the directory as used by an engine until its process ends in any way, or closes this
        object."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def is_in_use(self) -> bool:
        """Returns whether an engine uses the directory or it `has_frontends`. If no engine does, none can
        `hold` the directory until this object is closed."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return self.has_frontends()

    def remove(self) -> None:
        """Removes the directory, whose lock the caller must hold. Ends without an error where that fails.

        The lock is the last file to be removed. A process that finds the lock gone starts over, in a new
        directory or in the empty one.
        """
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._fd), key="lock".__eq__):  # noqa: PTH208 (of the open one)
                os.unlink(name, dir_fd=self._fd)
            self.path.rmdir()

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600, dir_fd=self._fd)


def _lock(fd: int, deadline: float) -> None:
    if deadline == math.inf:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process has it locked") from None
            time.sleep(POLL_S)


_REMEDY = "remove it, or set QUIRE_RUNTIME_DIR to a private directory"


def _marker() -> str:
    return f"frontend-{os.getpid()}-{start_time_of(os.getpid())}"
