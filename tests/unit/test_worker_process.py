"""A worker process lives no longer than its engine, whoever else has got hold of their socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.worker_process import WorkerProcess
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
process = subprocess.Popen(command, pass_fds=[fd])
print(process.pid, flush=True)
process.wait()
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))
    options = {"model": str(path), "max_model_len": 64, "num_blocks": 16, "num_threads": 1}
    return EngineConfig.from_mapping({**options, "worker_process": True})


@pytest.fixture
def fork() -> Iterator[Callable[[WorkerProcess], None]]:
    """Gives another process what a fork of the engine's has: the socket."""
    made = []

    def give(worker: WorkerProcess) -> None:
        fd = worker._connection.fileno()
        made.append(subprocess.Popen(["sleep", "600"], pass_fds=[fd]))

    yield give
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_worker_ends_with_its_engine_though_a_fork_lives(
    config: EngineConfig, fork: Callable[[WorkerProcess], None], how: str
) -> None:
    """`quire.LLM` in a program that forks, for loaders of data say: the fork had the socket too, so the
    worker waited for steps. A close took 10 s and killed it, and a forgotten engine's kept its memory."""
    worker = WorkerProcess(config)
    fork(worker)
    process = worker._process
    if how == "closed":
        worker.close()
    del worker
    assert process.wait(WAIT_S) == 0


def test_a_worker_ends_with_an_engine_that_is_killed_though_a_fork_lives() -> None:
    """It waited for a message for ever; and one that was loading its model went on with that."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", ENGINE, str(theirs.fileno())]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
        assert engine.stdout is not None
        with engine.stdout:
            worker = psutil.Process(int(engine.stdout.readline()))
        engine.kill()
        engine.wait()
        gone, _ = psutil.wait_procs([worker], WAIT_S)
        assert gone or worker.status() == psutil.STATUS_ZOMBIE


def test_what_an_interrupted_step_brings_is_not_taken_for_the_next_ones(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while the engine waited for its worker: the result came all the same, and each later step got
    that of the step before. All later outputs were wrong, and none failed."""
    llm = LLM(**config.to_mapping())
    greedy, prompt = SamplingParams(max_tokens=6, ignore_eos=True), [5, 6, 7, 8]
    expected = llm.generate([prompt], greedy)[0].token_ids
    worker = runner_of(llm.core)

    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[9, 10, 11]], greedy)
    assert llm.generate([prompt], greedy)[0].token_ids == expected
    llm.core.close()
