"""WorkerGroup: a runner whose model lives in several processes, one for each tensor-parallel rank.

It is the engine's half of `quire.worker.process`. Steps and their results are pickled over socket pairs. On
the CPU both sides map the memory of the ranks' blocks: the engine saves, copies and loads blocks, and the
ranks compute on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.engine.processes import start_time_of
from quire.engine.run_module import RUN_MODULE
from quire.errors import ConfigError, EngineError, WorkerLostError
from quire.kv_tiers import BlockAccess, KVTiers
from quire.kv_tiers.moves import move_blocks, read_rows, write_rows
from quire.outputs import ModelRunnerOutput, RowOutput, RunnerInfo, SchedulerOutput
from quire.worker.messages import SLEEP, WAKE, WARM_UP, Failed, Ready, Start

CLOSE_WAIT_S = 10.0
"""Seconds that the workers of a group have to end before those left are killed."""
FAILED_WAIT_S = 5.0
"""Seconds to wait for the other ranks after one has failed. If all ranks fail alike, each should answer in
time; a rank that waits for a failed one may never answer."""


class MappedBlocks:
    """The blocks of all ranks, in memory that both sides map. A block consists of the ranks' parts, one after
    another.

    Args:
        parts: for each rank its process, the descriptor in that process, and the bytes of its part of a
            block.
    """

    def __init__(self, num_blocks: int, parts: Sequence[tuple[int, int, int]]) -> None:
        self._parts: list[tuple[npt.NDArray[np.uint8], slice]] = []
        self.block_bytes = 0
        for pid, fd, part_bytes in parts:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(own, num_blocks * part_bytes)
            finally:
                os.close(own)
            blocks = np.frombuffer(memory, dtype=np.uint8).reshape(num_blocks, part_bytes)
            self._parts.append((blocks, slice(self.block_bytes, self.block_bytes + part_bytes)))
            self.block_bytes += part_bytes

    def read(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """See `BlockAccess`."""
        for blocks, columns in self._parts:
            read_rows(blocks, block_ids, out[:, columns])

    def write(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """See `BlockAccess`."""
        for blocks, columns in self._parts:
            write_rows(blocks, block_ids, data[:, columns])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `BlockAccess`."""
        sources, targets = zip(*pairs, strict=True)
        for blocks, _ in self._parts:
            blocks[list(targets)] = blocks[list(sources)]


class RemoteBlocks:
    """Blocks on the GPUs of other processes; this process cannot reach them."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def read(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Raises NotImplementedError: this process cannot reach the blocks."""
        raise NotImplementedError

    def write(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Raises NotImplementedError: this process cannot reach the blocks."""
        raise NotImplementedError

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raises NotImplementedError: this process cannot reach the blocks."""
        raise NotImplementedError


class Worker:
    """A worker process, and the socket to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self.connection = connection.Connection(os.dup(self._socket.fileno()))
        with theirs:
            command = [sys.executable, RUN_MODULE, "quire.worker.process", "--fd", str(theirs.fileno())]
            command += ["--engine-pid", str(self._pid)]
            command += ["--engine-start-time", str(start_time_of(self._pid) or 0)]
            # The system counts a thread's end for its process's.
            if threading.current_thread() is threading.main_thread():
                command.append("--killed-with-engine")
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def send(self, message: object) -> None:
        """Sends a message; raises WorkerLostError if the process is gone."""
        try:
            self.connection.send(message)
        except OSError:
            raise self.lost() from None

    def receive(self) -> Any:
        """Returns the worker's next message; raises as `send`."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.lost() from None

    def lost(self) -> WorkerLostError:
        """Returns the error to raise for a worker that is gone; waits at most a second for its exit
        status."""
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(1.0)
        return WorkerLostError(f"the worker process of rank {self.rank} is gone (exit status {status})")

    def hang_up(self) -> None:
        """Tells the worker to end. Does nothing in a fork of the process that made this object. (Closing the
        socket is not enough, because forks may hold it, too.)"""
        if os.getpid() != self._pid:
            return  # a fork of its owner has no say
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.connection.close()


class WorkerGroup:
    """A `Runner` in `tensor_parallel_size` other processes, which end with this one.

    Raises:
        QuireError: a worker reports why it cannot start.
        WorkerLostError: a worker died, or failed while others wait for it. Methods that talk to the workers
            raise it, too.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._results: deque[ModelRunnerOutput | Failed] = deque()
        """Results of finished steps that were not collected, the oldest first."""
        self._num_computing = 0
        self._answers: dict[int, Any] = {}
        """Answers by rank that arrived while other ranks are still waited for."""
        self._tiers: KVTiers | None = None
        size = config.model.tensor_parallel_size
        self._meeting = os.memfd_create("quire-ranks")
        self._workers: list[Worker] = []
        try:
            self._workers += map(Worker, range(size))
            for worker in self._workers:
                worker.send(Start(config, worker.rank, size, f"/proc/{os.getpid()}/fd/{self._meeting}"))
            self.info = self._take_ready()
        except BaseException:
            self._kill()
            self.close()
            raise

    def _take_ready(self) -> RunnerInfo:
        answers = self._receive()
        ready = [answer for answer in answers if isinstance(answer, Ready)]
        info = ready[0].info
        parts = [
            (worker.process.pid, one.blocks_fd, one.block_bytes)
            for worker, one in zip(self._workers, ready, strict=True)
            if one.blocks_fd is not None
        ]
        self.kv_cache: BlockAccess = (
            MappedBlocks(info.num_blocks, parts)
            if parts
            else RemoteBlocks(sum(one.block_bytes for one in ready))
        )
        return dataclasses.replace(
            info,
            num_threads=sum(one.info.num_threads for one in ready),
            kv_cache_bytes=sum(one.info.kv_cache_bytes for one in ready),
            kv_identity=info.kv_identity and {"ranks": [one.info.kv_identity for one in ready]},
        )

    def sleep(self) -> None:
        """See `Runner`."""
        if hasattr(self, "kv_cache"):
            del self.kv_cache
        self._ask(SLEEP)

    def wake(self) -> None:
        """See `Runner`."""
        self._send(WAKE)
        self._take_ready()

    def attach(self, tiers: KVTiers | None) -> None:
        """See `Runner`."""
        if tiers is not None and isinstance(self.kv_cache, RemoteBlocks):
            raise ConfigError("KV tiers need tensor_parallel_size=1 on GPUs: ranks do not move blocks")
        self._tiers = tiers

    def launch(self, output: SchedulerOutput) -> None:
        """See `Runner`. Waits first until the ranks have computed the steps launched before."""
        # Blocks are moved only while nothing is computed on them.
        while self._num_computing:
            self._results.append(self._result())
        if not isinstance(self.kv_cache, RemoteBlocks):
            move_blocks(output, self.kv_cache, self._tiers)
            output = dataclasses.replace(output, kv_saves=[], block_copies=[], kv_loads=[])
        self._send(output)
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
        self._ask(WARM_UP)

    def check(self) -> None:
        """See `Runner`."""
        for worker in self._workers:
            if worker.process.poll() is not None:
                raise worker.lost()

    def close(self) -> None:
        """Ends the worker processes."""
        self._hang_up()
        deadline = time.monotonic() + CLOSE_WAIT_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        if self._meeting >= 0:
            os.close(self._meeting)
            self._meeting = -1

    def __del__(self) -> None:
        self._hang_up()

    def _hang_up(self) -> None:
        for worker in self._workers:
            worker.hang_up()

    def _kill(self) -> None:
        """Kills all worker processes. (A rank that waits for one that is gone or has failed would not notice
        that its socket is closed.)"""
        for worker in self._workers:
            worker.process.kill()

    def _result(self) -> ModelRunnerOutput | Failed:
        """Receives each rank's result of the next step, in the order of launches. Returns the failure of a
        rank, else the first rank's result. Rows for which the ranks have not sampled the same tokens have an
        error in it."""
        results = self._receive_all()
        self._num_computing -= 1
        for one in results:
            if isinstance(one, Failed):
                return one
        first: ModelRunnerOutput = results[0]
        first.rows = [_agreed(rows) for rows in zip(*(one.rows for one in results), strict=True)]
        return first

    def _ask(self, message: str) -> None:
        """Sends a request to all ranks and returns when all have carried it out."""
        self._send(message)
        self._receive()

    def _send(self, message: object) -> None:
        try:
            for worker in self._workers:
                worker.send(message)
        except BaseException:
            # Some have it, or a part of it: of what they would compute next no two would mean the same.
            self._kill()
            raise

    def _receive(self) -> list[Any]:
        """Returns one answer per rank; raises if one of them is a failure."""
        answers = self._receive_all()
        for answer in answers:
            if isinstance(answer, Failed):
                raise ConfigError(answer.error) if answer.is_ours else EngineError(answer.error)
        return answers

    def _receive_all(self) -> list[Any]:
        """Waits for the next message of each worker and returns them in the order of the ranks."""
        answers = self._answers  # kept where this is interrupted: nobody answers twice
        failed: tuple[int, Failed] | None = None
        deadline: float | None = None
        while len(answers) < len(self._workers):
            waiting = {one.connection: one for one in self._workers if one.rank not in answers}
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait(list(waiting), timeout)
            if not ready:
                assert failed is not None
                rank, failure = failed
                raise WorkerLostError(f"rank {rank} failed, and others wait for it: {failure.error}")
            for one in ready:
                worker = next(waiting[own] for own in waiting if own is one)
                answer = answers[worker.rank] = worker.receive()
                if isinstance(answer, Failed) and failed is None:
                    failed, deadline = (worker.rank, answer), time.monotonic() + FAILED_WAIT_S
        self._answers = {}
        return [answers[worker.rank] for worker in self._workers]


def _agreed(rows: tuple[RowOutput, ...]) -> RowOutput:
    """Returns the output of a row, given each rank's output for it: the first rank's if all have sampled the
    same tokens. If they have not, or a rank reports an error, the output has an error, which ends this row's
    request alone. (A random custom logits processor, or a grammar that timed out on one rank, can cause
    this.)"""
    for row in rows:
        if row.error:
            return row
    if any(_tokens(row) != _tokens(rows[0]) for row in rows[1:]):
        return RowOutput(error="the ranks have not drawn the same tokens")
    return rows[0]


def _tokens(row: RowOutput) -> list[list[int]]:
    return [one.token_ids for one in (row, *row.choices)]
