"""WorkerProcess: a runner whose model lives in a process of its own.

It is the engine's half of `quire.worker.process`; steps and their results are pickled over a pair of sockets.
The worker's blocks lie in memory that both map: here they are saved, copied and loaded, there computed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.engine.processes import start_time_of
from quire.engine.run_module import RUN_MODULE
from quire.errors import ConfigError, EngineError, WorkerLostError
from quire.kv_tiers import KVTiers
from quire.kv_tiers.moves import move_blocks, read_rows, write_rows
from quire.outputs import ModelRunnerOutput, RunnerInfo, SchedulerOutput
from quire.worker.messages import SLEEP, WAKE, WARM_UP, Failed, Ready

CLOSE_WAIT_S = 10.0
"""How long a worker may take to its end before it is killed."""


class MappedBlocks:
    """The blocks of another process's KV cache, as bytes."""

    def __init__(self, pid: int, fd: int, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(own, num_blocks * block_bytes)
        finally:
            os.close(own)
        self._blocks = np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, block_bytes)

    def read(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """See `BlockAccess`."""
        read_rows(self._blocks, block_ids, out)

    def write(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """See `BlockAccess`."""
        write_rows(self._blocks, block_ids, data)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `BlockAccess`."""
        sources, targets = zip(*pairs, strict=True)
        self._blocks[list(targets)] = self._blocks[list(sources)]


class WorkerProcess:
    """A `Runner` in another process, which ends with this one.

    Raises:
        QuireError: the worker says why it cannot start.
        WorkerLostError: it died, at the start or (of every method) later.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        with theirs:
            command = [sys.executable, RUN_MODULE, "quire.worker.process", "--fd", str(theirs.fileno())]
            command += ["--engine-pid", str(self._pid)]
            command += ["--engine-start-time", str(start_time_of(self._pid) or 0)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._results: deque[ModelRunnerOutput | Failed] = deque()
        """Results of steps that are done and not collected, the oldest first."""
        self._num_computing = 0
        self._tiers: KVTiers | None = None
        try:
            self._send(config)
            self.info = self._take_ready()
        except BaseException:
            self.close()
            raise

    def _take_ready(self) -> RunnerInfo:
        ready = self._receive()
        if isinstance(ready, Failed):
            raise ConfigError(ready.error) if ready.is_ours else EngineError(ready.error)
        assert isinstance(ready, Ready)
        pid, info = self._process.pid, ready.info
        self.kv_cache = MappedBlocks(pid, ready.blocks_fd, info.num_blocks, ready.block_bytes)
        return info

    def sleep(self) -> None:
        """See `Runner`."""
        if hasattr(self, "kv_cache"):
            del self.kv_cache
        self._send(SLEEP)
        if isinstance(failed := self._receive(), Failed):
            raise EngineError(failed.error)

    def wake(self) -> None:
        """See `Runner`."""
        self._send(WAKE)
        self._take_ready()

    def attach(self, tiers: KVTiers | None) -> None:
        """See `Runner`."""
        self._tiers = tiers

    def launch(self, output: SchedulerOutput) -> None:
        """See `Runner`; a step behind one under way begins when that is done, and is planned by then."""
        # Blocks are moved only while nothing is computed on them.
        while self._num_computing:
            self._results.append(self._result())
        move_blocks(output, self.kv_cache, self._tiers)
        self._send(dataclasses.replace(output, kv_saves=[], block_copies=[], kv_loads=[]))
        self._num_computing += 1

    def collect(self) -> ModelRunnerOutput:
        """See `Runner`."""
        result = self._results.popleft() if self._results else self._result()
        if isinstance(result, Failed):
            raise EngineError(result.error)
        if self._tiers is not None:
            result.loads_done = self._tiers.poll()
        return result

    def reset(self) -> None:
        """See `Runner`."""
        while self._num_computing:
            self._result()
        self._results.clear()

    def warm_up(self) -> None:
        """See `Runner`."""
        self._send(WARM_UP)
        if isinstance(failed := self._receive(), Failed):
            raise EngineError(failed.error)

    def check(self) -> None:
        """See `Runner`."""
        if self._process.poll() is not None:
            raise self._lost()

    def close(self) -> None:
        """Ends the process."""
        self._hang_up()
        try:
            self._process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a fork of its owner has no say
            self._hang_up()

    def _hang_up(self) -> None:
        """Tells the worker to end. To close the socket is not enough: forks of this process have it, too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()

    def _result(self) -> ModelRunnerOutput | Failed:
        result: ModelRunnerOutput | Failed = self._receive()
        self._num_computing -= 1
        return result

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise self._lost() from None

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> WorkerLostError:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(1.0)
        return WorkerLostError(f"the worker process is gone (exit status {status})")
