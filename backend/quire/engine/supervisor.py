"""Who starts the engine, and how several frontends come to share one.

Every frontend of one tritonserver that asks for an equal engine configuration gets the same engine: the
instances of a model (`instance_group count: N`) and other models over it, such as a non-decoupled variant.
They meet in a directory named after the server's pid and a hash of the configuration; whoever takes its file
lock first starts the engine, and whoever finds it dead starts the next generation.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import CheckpointError, EngineStoppedError, UnavailableError

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A running engine."""

    pid: int
    address: str
    generation: int


class EngineSupervisor:
    """One frontend's view of the engine it shares.

    Args:
        config: the engine's configuration; equal ones share an engine.
        server_pid: the tritonserver everything ends with; also part of the meeting place's name.
        environment: variables of the engine that set it apart (CUDA_VISIBLE_DEVICES of an instance).
    """

    def __init__(
        self, config: EngineConfig, server_pid: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        self.server_pid = server_pid
        self.environment = dict(environment or {})
        values = {**config.to_mapping(), "environment": self.environment}
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
        base = Path(os.environ.get("QUIRE_RUNTIME_DIR") or tempfile.gettempdir())
        self.directory = base / f"quire-{os.getuid()}-{server_pid}-{key}"
        self._marker = self.directory / f"frontend-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self, *, not_generation: int = -1) -> EngineAddress:
        """The running engine, started if there is none.

        Args:
            not_generation: a generation known to be dead; another is started in its place.

        Raises:
            CheckpointError: the engine says why it cannot start (one line).
            UnavailableError: it ended without a word, was not ready in `startup_timeout_s`, or was told
                to stop (SIGTERM).
        """
        with self._locked():
            self._marker.touch()
            state = self._read_state()
            generation = 0
            if state is not None:
                if state["state"] == "stopped":
                    raise EngineStoppedError("the engine was told to stop: the server is shutting down")
                generation = int(state["generation"])
                alive = generation != not_generation and _is_alive(int(state["pid"]))
                if state["state"] == "ready" and alive:
                    return EngineAddress(state["pid"], state["address"], generation)
                generation += 1
            return self._start(generation)

    def _start(self, generation: int) -> EngineAddress:
        self.reap()
        (self.directory / "config.json").write_text(json.dumps(self.config.to_mapping()), encoding="utf-8")
        (self.directory / "state.json").unlink(missing_ok=True)
        command = [engine_python(), "-m", "quire.engine.loop", "--directory", str(self.directory)]
        command += ["--server-pid", str(self.server_pid), "--generation", str(generation)]
        self._process = subprocess.Popen(
            command, env={**engine_environment(), **self.environment}, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + self.config.frontend.startup_timeout_s
        while True:
            state = self._read_state()
            if state is not None and state["generation"] == generation:
                if state["state"] == "ready":
                    return EngineAddress(state["pid"], state["address"], generation)
                self._process.wait()
                raise CheckpointError(state["error"])
            status = self._process.poll()
            if status is not None and self._read_state() is None:
                raise UnavailableError(f"the engine process ended with status {status} before it was ready")
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                limit = self.config.frontend.startup_timeout_s
                raise UnavailableError(f"the engine was not ready within startup_timeout_s={limit:g}")
            time.sleep(POLL_S)

    def reap(self) -> None:
        """Collects the exit status of an engine this frontend started, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None

    def close(self, timeout_s: float) -> None:
        """After the goodbye: the last frontend waits for the engine to end and tidies up.

        An engine that other frontends still use goes on. One that does not end by itself in `timeout_s` is
        killed: a model that is being unloaded must not leave its memory behind.
        """
        with self._locked():
            self._marker.unlink(missing_ok=True)
            others = [path for path in self.directory.glob("frontend-*") if _is_alive(_pid_of(path))]
            if others:
                return
            state = self._read_state()
            if state is not None:
                _wait_or_kill(int(state["pid"]), timeout_s)
            if self._process is not None:
                self._process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _read_state(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.directory / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        assert isinstance(state, dict)
        return state


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pid_of(marker: Path) -> int:
    return int(marker.name.rpartition("-")[2])


def _wait_or_kill(pid: int, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([pidfd], [], [], timeout_s)
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], 1.0)
    finally:
        os.close(pidfd)


def engine_python() -> str:
    """The interpreter of the engine: a stub's own `sys.executable` cannot be trusted."""
    named = os.environ.get("QUIRE_PYTHON")
    if named:
        return named
    version = f"python{sysconfig.get_python_version()}"
    for candidate in (Path(sys.prefix) / "bin" / version, Path(sys.prefix) / "bin" / "python3"):
        if candidate.exists():
            return str(candidate)
    return shutil.which("python3") or sys.executable


def engine_environment() -> dict[str, str]:
    """Environment of the engine: our packages importable, and UTF-8 whatever the stub's locale is."""
    environment = dict(os.environ)
    environment["PYTHONUTF8"] = "1"
    # OpenMP's threads spin while they wait for each other, by default for milliseconds. Where another process
    # wants a core, the one that is waited for does not run: a step of 5 ms takes 180 (docs/lab-notes.md).
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    folders: dict[str, None] = {}
    for package in ("quire", "quire_kernels", "quire_ensemble"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not importable"
        folders.setdefault(str(Path(spec.origin).parent.parent))
    if environment.get("PYTHONPATH"):
        folders.setdefault(environment["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment
