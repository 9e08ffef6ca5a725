"""Runs the ModelRunner of one rank in its own process: the other half of `quire.engine.worker_group`.

It receives a Start over its socket, and answers with Ready or Failed. After Ready it computes
SchedulerOutputs and carries out the requests WARM_UP, SLEEP and WAKE until the socket is closed or the engine
is dead. On the CPU the engine maps the memory of the KV cache, too: the engine moves blocks, this process
computes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import threading
from multiprocessing.connection import Connection

import click

from quire.engine.processes import open_verified_pidfd, wait_readable
from quire.errors import QuireError, describe
from quire.outputs import ModelRunnerOutput, SchedulerOutput
from quire.worker.messages import SLEEP, WAKE, WARM_UP, Failed, Ready, Start
from quire.worker.model_runner import ModelRunner, resolve_device
from quire_common import logs
from quire_kernels.ranks import Ranks

logger = logging.getLogger("quire")

_PR_SET_PDEATHSIG = 1


def serve(connection: Connection) -> None:
    """Answers the messages of the connection until it is closed, or only the first if the runner cannot be
    made."""
    start: Start = connection.recv()
    ranks = Ranks(start.rank, start.num_ranks)
    try:
        device = resolve_device(start.config.model.device, ranks)
        # Without this, gloo uses the network interface that the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks.join(start.store, device)
        runner = ModelRunner(start.config, ranks=ranks)
    except Exception as error:
        is_ours = isinstance(error, QuireError)
        connection.send(Failed(str(error) if is_ours else describe(error), is_ours))
        return
    connection.send(_ready(runner))
    gc.collect()
    gc.freeze()
    while True:
        try:
            request: SchedulerOutput | str = connection.recv()
        except EOFError:
            return
        answer: ModelRunnerOutput | Ready | Failed | None = None
        try:
            if isinstance(request, SchedulerOutput):
                runner.launch(request)
                answer = runner.collect()
            elif request == SLEEP:
                runner.sleep()
            elif request == WAKE:
                runner.wake()
                answer = _ready(runner)
            else:
                assert request == WARM_UP, request
                runner.warm_up()
        except QuireError as error:
            answer = Failed(str(error), is_ours=True)
        except Exception as error:
            logger.exception("worker: a step failed")
            runner.reset()
            answer = Failed(describe(error))
        connection.send(answer)


def _ready(runner: ModelRunner) -> Ready:
    return Ready(runner.info, runner.kv_cache.block_bytes, runner.kv_cache.fd)


def end_with(pid: int, start_time: int) -> None:
    """Makes this process end when another one ends, even while this one is loading a model, for example.
    Raises SystemExit if the other one cannot be watched, usually because it has already ended.

    The socket does not show that the engine is dead while a fork of it lives.
    """
    pidfd = open_verified_pidfd(pid, start_time)
    if pidfd is None:
        raise SystemExit("worker: its engine is gone")

    def wait() -> None:
        wait_readable(pidfd)
        os._exit(1)

    threading.Thread(target=wait, name="quire-engine-watch", daemon=True).start()


@click.command()
@click.option("--fd", type=int, required=True)
@click.option("--engine-pid", type=int, required=True)
@click.option("--engine-start-time", type=int, required=True)
@click.option("--killed-with-engine", is_flag=True)
def main(fd: int, engine_pid: int, engine_start_time: int, killed_with_engine: bool) -> None:
    """Computes for the engine at the other end of socket FD."""
    logs.set_up("worker")
    if killed_with_engine:  # by the system, so that one which is stopped ends, too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with(engine_pid, engine_start_time)
    # It ends when its engine closes the socket or dies, and not before: the engine may have work to finish.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        serve(connection)
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the engine is gone


if __name__ == "__main__":
    main()
