"""Ranks live no longer than their engine, whoever else has got hold of their sockets; those that do not go on
together end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine import worker_group
from quire.engine.worker_group import Worker, WorkerGroup
from quire.errors import ConfigError, EngineError, WorkerLostError
from quire.outputs import ModelRunnerOutput, RowOutput, SchedulerOutput
from quire.plan.capacity import predict
from quire.worker.messages import Failed, Start
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.runner_of import runner_of

WAIT_S = 60.0
"""Less than an engine waits before it kills."""

ENGINE = """
import os, subprocess, sys
from quire.engine.processes import start_time_of
from quire.engine.run_module import RUN_MODULE
fd = int(sys.argv[1])
command = [sys.executable, str(RUN_MODULE), "quire.worker.process", "--fd", str(fd)]
command += ["--engine-pid", str(os.getpid()), "--engine-start-time", str(start_time_of(os.getpid()))]
command += sys.argv[2:]
process = subprocess.Popen(command, pass_fds=[fd])
print(process.pid, flush=True)
process.wait()
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    options = {"model": str(path), "max_model_len": 64, "num_blocks": 16, "num_threads": 1}
    return EngineConfig.from_mapping({**options, "tensor_parallel_size": 2})


@pytest.fixture
def fork() -> Iterator[Callable[[WorkerGroup], None]]:
    """Gives another process what a fork of the engine's has: the sockets."""
    made = []

    def give(group: WorkerGroup) -> None:
        fds = [worker.connection.fileno() for worker in group._workers]
        made.append(subprocess.Popen(["sleep", "600"], pass_fds=fds))

    yield give
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_ranks_end_with_their_engine_though_a_fork_lives(
    config: EngineConfig, fork: Callable[[WorkerGroup], None], how: str
) -> None:
    """`quire.LLM` in a program that forks, for loaders of data say: the fork had the sockets too, so ranks
    waited for steps. A close took 10 s and killed them, and a forgotten engine's kept their memory."""
    group = WorkerGroup(config)
    fork(group)
    processes = [worker.process for worker in group._workers]
    if how == "closed":
        group.close()
    del group
    assert [process.wait(WAIT_S) for process in processes] == [0, 0]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_ends_with_an_engine_that_is_killed_though_a_fork_lives(
    tmp_path: Path, is_stopped: bool
) -> None:
    """It waited for a message for ever; and one that was loading its model went on with that. One that stood
    still, which is what its engine was killed for, kept its memory."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", ENGINE, str(theirs.fileno()), "--killed-with-engine"]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
        assert engine.stdout is not None
        with engine.stdout:
            worker = psutil.Process(int(engine.stdout.readline()))
        if is_stopped:
            # It has told the system when it asks for a message.
            connection = Connection(os.dup(ours.fileno()))
            connection.send(Start(EngineConfig(), 0, 1, str(tmp_path / "store")))
            assert isinstance(connection.recv(), Failed)
            os.kill(worker.pid, signal.SIGSTOP)
        engine.kill()
        engine.wait()
        gone, _ = psutil.wait_procs([worker], WAIT_S)
        assert gone or worker.status() == psutil.STATUS_ZOMBIE


def test_what_an_interrupted_step_brings_is_not_taken_for_the_next_ones(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the engine waited for its ranks: the result came all the same, and each later step got
    that of the step before. All later outputs were wrong, and none failed."""
    llm = LLM(**config.to_mapping())
    greedy, prompt = SamplingParams(max_tokens=6, ignore_eos=True), [5, 6, 7, 8]
    expected = llm.generate([prompt], greedy)[0].token_ids
    group = runner_of(llm.core)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(group, "_receive_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9, 10, 11]], greedy)
    assert llm.generate([prompt], greedy)[0].token_ids == expected
    llm.core.close()


class Scripted:
    """In the place of two ranks: what they answer, sent over real sockets. None: nothing ever."""

    def __init__(self, group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.group = group
        pairs = [Pipe() for _ in group._workers]
        self.ends = [theirs for _, theirs in pairs]
        for worker, (ours, _) in zip(group._workers, pairs, strict=True):
            monkeypatch.setattr(worker, "connection", ours)
        # Of a step that has failed some are still to answer.
        monkeypatch.setattr(group, "_num_computing", 0)
        monkeypatch.setattr(group, "_answers", {})

    def answer(self, *answers: object) -> ModelRunnerOutput:
        """What the group makes of a step that is answered so, by rank."""
        self.group.launch(SchedulerOutput(1))
        for end, answer in zip(self.ends, answers, strict=True):
            end.recv()
            if answer is not None:
                end.send(answer)
        return self.group.collect()


@pytest.fixture(scope="module")
def two_ranks(config: EngineConfig) -> Iterator[WorkerGroup]:
    group = WorkerGroup(config)
    yield group
    group.close()


def test_a_plan_foresees_the_pool_of_ranks(config: EngineConfig, two_ranks: WorkerGroup) -> None:
    asked = config.replace(num_blocks=None, kv_cache_memory="1MiB")
    rank, one = predict(asked, "cpu", 2**30), predict(asked.replace(tensor_parallel_size=1), "cpu", 2**30)
    assert rank.block_bytes * 2 == one.block_bytes == two_ranks.kv_cache.block_bytes
    assert rank.num_blocks == 2 * one.num_blocks
    assert rank.block_bytes * 2 * two_ranks.info.num_blocks == two_ranks.info.kv_cache_bytes
    assert one.weight_bytes / 2 < rank.weight_bytes < one.weight_bytes / 2 + 2048, "but for the norms"


def drew(*token_ids: int) -> ModelRunnerOutput:
    return ModelRunnerOutput([RowOutput(token_ids=list(token_ids))])


def test_a_row_of_which_ranks_drew_different_tokens_fails_alone(
    two_ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One would compute the next step with another token, and the sums of both would mean nothing. All
    requests of the step failed with it, as a grammar's whose time was up on one rank."""
    ranks = Scripted(two_ranks, monkeypatch)
    assert ranks.answer(drew(5, 6), drew(5, 6)).rows[0].token_ids == [5, 6]

    def both(row: RowOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput([row, RowOutput(token_ids=[9])])

    one = RowOutput(token_ids=[5], choices=[RowOutput(token_ids=[6])])
    for other, error in (
        (RowOutput(token_ids=[7]), "the ranks have not drawn the same tokens"),
        (RowOutput(token_ids=[5], choices=[RowOutput(token_ids=[8])]), "the ranks have not drawn the same"),
        (RowOutput(error="no token"), "no token"),
    ):
        for answers in ((both(one), both(other)), (both(other), both(one))):
            failed, row = ranks.answer(*answers).rows
            assert failed.error.startswith(error) and not row.error and row.token_ids == [9]


def test_a_step_that_fails_on_all_ranks_fails_and_on_one_of_them_ends_the_engine(
    two_ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other would wait in a collective for ever."""
    ranks = Scripted(two_ranks, monkeypatch)
    with pytest.raises(EngineError, match=r"^no memory$"):
        ranks.answer(Failed("no memory"), Failed("no memory"))
    monkeypatch.setattr(worker_group, "FAILED_WAIT_S", 0.1)
    with pytest.raises(WorkerLostError, match=r"^rank 1 failed, and others wait for it: no memory$"):
        ranks.answer(None, Failed("no memory"))


def test_an_interrupt_between_the_answers_of_two_ranks(
    two_ranks: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when one rank had answered and the other not: the engine waited for the first one's answer for
    ever."""
    ranks = Scripted(two_ranks, monkeypatch)
    wait = worker_group.connection.wait

    def interrupted(waiting: list[Connection], timeout: float | None) -> list[object]:
        if len(waiting) == 1:
            raise KeyboardInterrupt
        return wait(waiting, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(worker_group.connection, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.answer(drew(5), None)
    ranks.ends[1].send(drew(5))
    two_ranks.reset()
    assert ranks.answer(drew(6), drew(6)).rows[0].token_ids == [6]


def test_an_interrupt_between_two_ranks_that_get_a_step(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computed another step afterwards, and their sums meant nothing."""
    group = WorkerGroup(config)

    def interrupted(message: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(group._workers[1], "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.launch(SchedulerOutput(1))
    group.reset()
    with pytest.raises(WorkerLostError):
        group.launch(SchedulerOutput(2))
        group.collect()
    group.close()


@pytest.mark.row("F1", clauses=("dead",))
def test_a_dead_rank_is_noticed_whichever_it_is(config: EngineConfig) -> None:
    """Also at the start, where the others wait for it to join them."""
    for rank in (0, 1):
        group = WorkerGroup(config)
        group.check()
        group._workers[rank].process.kill()
        group._workers[rank].process.wait()
        lost = f"^the worker process of rank {rank} is gone .exit status -9.$"
        with pytest.raises(WorkerLostError, match=lost):
            group.check()
        with pytest.raises(WorkerLostError, match=lost):
            group.launch(SchedulerOutput(1))
            group.collect()
        group.close()
        assert all(worker.process.poll() is not None for worker in group._workers)


def test_a_rank_that_dies_at_the_start_ends_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Worker] = []

    class Short(Worker):
        def send(self, message: object) -> None:
            super().send(message)
            made.append(self)
            if self.rank == 1:
                self.process.kill()

    monkeypatch.setattr(worker_group, "Worker", Short)
    with pytest.raises(WorkerLostError, match="rank 1 is gone"):
        WorkerGroup(config)
    assert [worker.process.poll() for worker in made] == [-9, -9]


def test_what_ranks_do_not_have_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_lora needs tensor_parallel_size=1"):
        config.replace(enable_lora=True)
    path = make_checkpoint("llama", tmp_path, tokenizer=False, intermediate_size=129)
    with pytest.raises(ConfigError, match="does not divide intermediate_size=129"):
        WorkerGroup(config.replace(model=str(path)))
