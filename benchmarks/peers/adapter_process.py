"""An adapter as the harness sees it: a process group that loads, runs workloads, and is stopped between."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import CpuShare
from benchmarks.peers.protocol import RunResult
from benchmarks.peers.workloads import Request


class AdapterError(Exception):
    """The engine failed, died or did not answer in time; one line."""


class AdapterProcess:
    """Starts an adapter; context manager that ends it.

    Args:
        command: program and arguments.
        log: file that gets what the engine prints; its last line stands in errors.
        env: added to the environment.
        load_timeout_s, run_timeout_s: longest waits for an answer.

    Raises:
        AdapterError: it did not become ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        load_timeout_s: float = 900.0,
        run_timeout_s: float = 1800.0,
    ) -> None:
        self._log = log
        self._run_timeout_s = run_timeout_s
        self._pending = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | dict(env or {}),
                start_new_session=True,
            )
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self.ready = self._answer(load_timeout_s)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, requests: Sequence[Request], running: int) -> tuple[RunResult, dict[str, Any]]:
        """One run, and what the machine did meanwhile: shares of CPU time, memory, load average.

        Raises:
            AdapterError: it failed; the engine's state is unknown then, so the process should be closed.
        """
        message = {"requests": [asdict(request) for request in requests], "running": running}
        with self._awake():
            share = CpuShare(self._tree())
            self._send(message)
            answer = self._answer(self._run_timeout_s)
            conditions = share.finish()
        return RunResult(**answer), conditions

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> AdapterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the whole process group."""
        self._selector.close()
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """A stopped engine's threads cannot spin while another is measured."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AdapterError(self._death()) from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        while b"\n" not in self._pending:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise AdapterError(f"no answer within {timeout_s:g} s{self._last_words()}")
            part = self._process.stdout.read()
            if not part:
                raise AdapterError(self._death())
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise AdapterError(answer["error"])
        return answer

    def _death(self) -> str:
        """How the process ended; its group is killed in case it has only closed its stdout."""
        self._signal(signal.SIGKILL)
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        return f"died ({how}){self._last_words()}"

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:200]} (see {self._log})" if lines else ""
