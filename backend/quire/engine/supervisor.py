"""Starts the engine, and lets several frontends share one.

Frontends of one tritonserver with equal engine configurations share an engine: the instances of a model
(`instance_group count: N`) on the same GPUs, and other models with the same checkpoint and options, such as a
non-decoupled variant. They meet in a directory named after the server's process and a hash of the
configuration, of the instance's CUDA_VISIBLE_DEVICES and of the state of the checkpoint's files. So a model
that is loaded again after its checkpoint changed gets a new engine, while models that stayed loaded keep
theirs. The frontend that gets the directory's lock first starts the engine; a frontend that finds the engine
dead starts the next generation.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.config import EngineConfig
from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.engine.heartbeat import Heartbeat
from quire.engine.processes import open_verified_pidfd, start_time_of, wait_readable
from quire.engine.run_module import RUN_MODULE
from quire.engine.runtime_directory import POLL_S, EngineState, RuntimeDirectory
from quire.errors import CheckpointError, ConfigError, EngineStoppedError, UnavailableError
from quire.loader.info import checkpoint_state

logger = logging.getLogger("quire")

KILL_WAIT_S = 1.0
STOP_WAIT_S = 3.0
STOPPED = "the engine was told to stop: the server is shutting down"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Address of an engine; `start_time` is that of its process."""

    pid: int
    address: str
    generation: int
    start_time: int
    directory: Path | None = None
    """Directory with the engine's suspects and heartbeat; None: the engine has none."""

    def in_flight_suspects(self) -> InFlightSuspects:
        """Returns the suspects that the engine recorded as in flight before it died; NO_SUSPECTS: none are
        known."""
        with self._opened() as directory:
            return NO_SUSPECTS if directory is None else directory.read_suspects(self.pid)

    def heartbeat(self) -> Heartbeat | None:
        """Returns the engine's heartbeat; None: there is none to open."""
        with self._opened() as directory:
            return None if directory is None else directory.heartbeat(self.pid)

    def was_stopped(self) -> bool:
        """Returns whether the engine or a successor was told to stop, so that no other may be started."""
        with self._opened() as directory:
            state = None if directory is None else directory.read_state()
        return state is not None and state.state == "stopped"

    @contextlib.contextmanager
    def _opened(self) -> Iterator[RuntimeDirectory | None]:
        found = None
        if self.directory is not None:
            with contextlib.suppress(OSError, ConfigError):
                found = RuntimeDirectory(self.directory)
        try:
            yield found
        finally:
            if found is not None:
                found.close()


class EngineSupervisor:
    """Manages the engine that a frontend shares with others.

    Args:
        config: the model's configuration. Frontends that share an engine have equal ones, apart from the keys
            of FrontendConfig.
        server_pid: the tritonserver with which the engine ends; also part of the directory's name.
        environment: environment variables set for the engine (an instance's CUDA_VISIBLE_DEVICES). Frontends
            that share an engine have equal ones.
    """

    def __init__(
        self, config: EngineConfig, server_pid: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        self.server_pid = server_pid
        self.server_start_time = start_time_of(server_pid) or 0
        self.environment = dict(environment or {})
        self._checkpoint = self._checkpoint_state()
        values = {
            **config.of_engine.to_mapping(),
            "environment": self.environment,
            "checkpoint": self._checkpoint,
        }
        server = _server_name(server_pid, self.server_start_time)
        key = _digest(json.dumps(values, sort_keys=True))
        self.directory = runtime_base() / f"{server}-{key}"
        self._address: EngineAddress | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()

    def begin(self) -> None:
        """Starts the engine if there is none, without waiting until it is ready. Does nothing if the
        directory's lock is held, as by another frontend that starts the engine.

        Raises:
            QuireError: the directory cannot be used, the checkpoint was replaced since this frontend was
                loaded, the engine that this frontend used was told to stop, or `close` was called.
        """
        with contextlib.suppress(TimeoutError), self._met(0.0) as directory:
            self._running(directory)

    def ensure(self) -> EngineAddress:
        """Returns the address of the engine when it is ready, after starting it if necessary. May be called
        again, also after a failure.

        Raises:
            CheckpointError: the engine reports why it cannot start (one line), or the checkpoint was replaced
                since this frontend was loaded.
            ConfigError: the directory is not of this user alone, or cannot be opened.
            EngineStoppedError: an engine was told to stop (SIGTERM), and this frontend starts no other.
            UnavailableError: the engine ended without a report, was not ready within `startup_timeout_s` or
                before `close` was called, or the operating system refused something, such as to write to the
                directory.
        """
        with self._met() as directory:
            state, process = directory.read_state(), self._process
            # What `begin` has begun may have ended by now, and is not tried again before that is told.
            is_ours = process is not None and state is not None and state.pid == process.pid
            if state is None or not is_ours or state.state not in ("starting", "failed"):
                state = self._running(directory)
            self._address = self._wait_ready(directory, state)
            return self._address

    @contextlib.contextmanager
    def _met(self, timeout_s: float = math.inf) -> Iterator[RuntimeDirectory]:
        """Locks the directory, with this frontend registered in it.

        Raises:
            TimeoutError: `timeout_s` is 0, and another process or thread holds the lock.
            ConfigError: the directory is not of this user alone, or cannot be opened.
            UnavailableError: the directory cannot be created or locked, `close` was called, or the work in
                the context has raised an OSError.
        """
        try:
            with RuntimeDirectory.locked(self.directory, timeout_s) as directory:
                if self._closing.is_set():  # what begins here now, nobody would end
                    raise UnavailableError("the model is being unloaded")
                directory.mark()
                yield directory
        except OSError as error:
            if isinstance(error, TimeoutError) and not timeout_s:
                raise
            reason = f"{self.directory}: {error.strerror or error}"
            raise UnavailableError(f"the engine cannot be reached or started: {reason}") from None

    def _running(self, directory: RuntimeDirectory) -> EngineState:
        """Returns the state of the running or starting engine, after starting one if there is none.

        Raises:
            EngineStoppedError: the engine that this frontend used, or a later one, was told to stop.
            CheckpointError: as `_start`.
        """
        self.reap()
        state = directory.read_state()
        if state is not None and state.state == "stopped" and self._address is not None:
            raise EngineStoppedError(STOPPED)
        if state is None or not state.is_alive or state.state in ("failed", "stopped"):
            if state is not None:
                wait_or_kill(state.pid, state.start_time, STOP_WAIT_S)
                directory.tidy(state.pid)
            state = self._start(directory, 0 if state is None else state.generation + 1)
        return state

    def _checkpoint_state(self) -> list[tuple[str, int, int]]:
        model = self.config.model
        return checkpoint_state(model.model, model.tokenizer, model.draft_checkpoint)

    def _start(self, directory: RuntimeDirectory, generation: int) -> EngineState:
        """Starts an engine process and returns its state. The process waits until that is recorded, and ends
        if this frontend dies before.

        Raises:
            CheckpointError: the checkpoint's files have changed since this frontend was loaded.
        """
        now = self._checkpoint_state()
        if now and now != self._checkpoint:  # if there is none, the engine says what is missing
            raise CheckpointError(
                f"{self.config.model.model}: has changed since the model was loaded: load the model again"
            )
        sweep(self.directory.parent)
        directory.write("config.json", json.dumps(self.config.of_engine.to_mapping()).encode())
        command = [engine_python(), RUN_MODULE, "quire.engine.loop"]
        command += ["--directory", str(self.directory), "--generation", str(generation)]
        command += ["--server-pid", str(self.server_pid), "--server-start-time", str(self.server_start_time)]
        environment = {**engine_environment(), **self.environment}
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        # An engine that is gone already is found so by the thread that waits for it.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as go:
            pid = self._process.pid
            state = EngineState("starting", pid, start_time_of(pid) or 0, generation)
            directory.write_state(state)
            go.write(b"\n")
        return state

    def _wait_ready(self, directory: RuntimeDirectory, begun: EngineState) -> EngineAddress:
        """Waits for a starting engine and returns its address. The engine may have been started by a frontend
        that has died since.

        Raises:
            CheckpointError: the engine says that it cannot start, and why.
            EngineStoppedError: this frontend has started it, and SIGTERM ended it early in its start.
            UnavailableError: it ended, was not ready within `startup_timeout_s`, or this model is being
                unloaded.
        """
        deadline = time.monotonic() + self.config.frontend.startup_timeout_s
        while True:
            is_alive = begun.is_alive  # before what it says is read
            state = directory.read_state()
            if state is not None and state.is_of(begun):
                if state.state == "ready":
                    return EngineAddress(
                        state.pid, state.address, state.generation, state.start_time, self.directory
                    )
                if state.state == "failed":
                    wait_or_kill(state.pid, state.start_time, KILL_WAIT_S)
                    self.reap()
                    raise CheckpointError(state.error)
            if not is_alive:
                status = None if self._process is None else self._process.poll()
                self.reap()
                if status == -signal.SIGTERM:  # too early to say so itself
                    directory.write_state(msgspec.structs.replace(begun, state="stopped"))
                    raise EngineStoppedError(STOPPED)
                how = "" if status is None else f" with status {status}"
                raise UnavailableError(f"the engine process ended{how} before it was ready")
            if time.monotonic() > deadline:
                wait_or_kill(begun.pid, begun.start_time, 0)
                self.reap()
                limit = self.config.frontend.startup_timeout_s
                raise UnavailableError(f"the engine was not ready within startup_timeout_s={limit:g}")
            if self._closing.wait(POLL_S):
                raise UnavailableError("the model is being unloaded")

    def reap(self) -> None:
        """Collects the exit status of the engine that this frontend started last, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None

    def close(self, timeout_s: float) -> None:
        """Leaves the engine; called after the goodbye to it. The last frontend waits for the engine to end,
        kills it after `timeout_s`, because an unloaded model must free its memory, and removes the directory.

        If other frontends use the engine, it continues. If another frontend has the directory locked for too
        long, or the directory cannot be used, nothing is waited for or removed.
        """
        self._closing.set()  # a thread that waits for an engine here has the directory locked
        try:
            # At least until a thread of ours that waits for an engine has released it.
            with RuntimeDirectory.locked(self.directory, max(timeout_s, KILL_WAIT_S)) as directory:
                directory.unmark()
                if directory.has_frontends():
                    return
                state = directory.read_state()
                if state is not None:
                    wait_or_kill(state.pid, state.start_time, timeout_s)
                self.reap()
                directory.remove()
        except TimeoutError:
            # Another frontend waits for an engine to start, for minutes perhaps: it is the one to tidy up.
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.suppress(OSError, ConfigError))
                directory = RuntimeDirectory(self.directory)
                stack.callback(directory.close)
                directory.unmark()
        except (OSError, ConfigError) as error:
            logger.warning("frontend: the engine is left to itself: %s", error)


def runtime_base() -> Path:
    """Returns the folder for engines' directories: QUIRE_RUNTIME_DIR, else XDG_RUNTIME_DIR if this user alone
    can access it, else the system's folder for temporary files."""
    if named := os.environ.get("QUIRE_RUNTIME_DIR"):
        return Path(named)
    own = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
    with contextlib.suppress(OSError):
        found = own.stat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return own
    return Path(tempfile.gettempdir())


def sweep(base: Path) -> None:
    """Removes directories that servers which are gone have left behind, usually because they were killed.

    Skips other users' directories, and those that are locked, or used by an engine or a registered frontend.
    Engines and locks are noticed even if their processes are not visible here (in another container with the
    same folder).
    """
    for path in base.glob(f"quire-{os.getuid()}-*"):
        found = _NAME.fullmatch(path.name)
        if found is None:
            continue
        pid = int(found["pid"])
        if found["server"] == _server_name(pid, start_time_of(pid) or 0):
            continue
        with contextlib.suppress(OSError, ConfigError), RuntimeDirectory.locked(path, 0.0, make=False) as old:
            if not old.is_in_use():
                old.remove()


_NAME = re.compile(r"(?P<server>quire-[0-9]{1,10}-(?P<pid>[0-9]{1,9})-[0-9a-f]{8})-[0-9a-f]{12}")


def _server_name(pid: int, start_time: int) -> str:
    """Returns the prefix of the directory names of a server's engines.

    It includes a hash of start time and boot id, because a container's server may have the pid of its
    predecessor, whose files may still exist.
    """
    return f"quire-{os.getuid()}-{pid}-{_digest(f'{start_time} {_boot_id()}')[:8]}"


def _boot_id() -> str:
    """Returns the system's boot id; empty: it cannot be read, as in some sandboxes."""
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def wait_or_kill(pid: int, start_time: int, timeout_s: float) -> None:
    """Waits for the process with this pid and start time to end, and kills it after `timeout_s`."""
    pidfd = open_verified_pidfd(pid, start_time)
    if pidfd is None:
        return
    try:
        if not wait_readable(pidfd, timeout_s):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            wait_readable(pidfd, KILL_WAIT_S)
    finally:
        os.close(pidfd)


def engine_python() -> str:
    """Returns the Python interpreter for the engine: QUIRE_PYTHON if set, else one of this installation or of
    PATH. (A Triton stub's own `sys.executable` is not reliable.)"""
    named = os.environ.get("QUIRE_PYTHON")
    if named:
        return named
    version = f"python{sysconfig.get_python_version()}"
    for candidate in (Path(sys.prefix) / "bin" / version, Path(sys.prefix) / "bin" / "python3"):
        if candidate.exists():
            return str(candidate)
    return shutil.which("python3") or sys.executable


def engine_environment() -> dict[str, str]:
    """Returns the environment variables for the engine: this process's, changed so that our packages are
    importable, text is UTF-8 whatever the stub's locale is, and threads of GNU OpenMP spin only briefly
    (unless GOMP_SPINCOUNT is set)."""
    environment = dict(os.environ)
    environment["PYTHONUTF8"] = "1"
    # OpenMP's threads spin while they wait for each other, by default for milliseconds. Where another process
    # wants a core, the one that is waited for does not run: a step of 5 ms takes 180 (docs/lab-notes.md).
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    folders: dict[str, None] = {}
    for package in ("quire", "quire_kernels", "quire_ensemble", "quire_common"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not importable"
        folders.setdefault(str(Path(spec.origin).parent.parent))
    for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
        if folder:  # an empty one stands for the working directory
            folders.setdefault(folder)
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment
