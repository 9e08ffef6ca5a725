"""Processes are really killed; what must hold is that streams end at once and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from quire.engine.processes import start_time_of
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import Reply, TritonStream, infer, stream
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV
from tests.fixtures.server import STOP_S, ServerProcess, SharedServer

pytestmark = pytest.mark.server

MAX_TOKENS = 16_000
"""Of a stream that is still on when the last of them has begun."""
LONG = {"text_input": "hello", "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 8}
GENERATORS = ("--load-model=generator", "--load-model=generator_unary")
WAIT_S = 60.0
"""For what takes some 2 s, however busy the machine is."""


def served_generators(root: Path, max_model_len: int, **options: Any) -> SharedServer:
    """A server of a tiny llama's generators, two frontends to each, to be entered; for paced streams, too."""
    checkpoint = make_checkpoint("llama", root / "llama", max_position_embeddings=max_model_len)
    stated = {**OPTIONS, **PACED, "max_model_len": max_model_len, **options}
    build_repository(
        checkpoint, root / "repository", instance_count=2, placement="path", engine_options=stated
    )
    return SharedServer(root / "repository", root, GENERATORS, PACED_ENV)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    root = tmp_path_factory.mktemp("death")
    with served_generators(root, MAX_TOKENS + 1000, num_blocks=10_000, max_pause_s=0) as server:
        yield server


@pytest.fixture
def server(shared: SharedServer) -> ServerProcess:
    """For tests that leave it as it was, or ended."""
    return shared.current()


def engines(server: ServerProcess) -> list[psutil.Process]:
    return server.running("quire.engine.loop")


def wait_for_end(process: psutil.Process) -> None:
    """Until it has ended; its parent may take its time to learn with what status."""
    deadline = time.monotonic() + WAIT_S
    while start_time_of(process.pid) is not None:
        assert time.monotonic() < deadline, process
        time.sleep(0.05)


def start_streams(server: ServerProcess, count: int) -> list[TritonStream]:
    calls = [TritonStream(server.grpc_url, "generator", LONG) for _ in range(count)]
    for call in calls:
        call.next()
    return calls


def wait_for_running(server: ServerProcess, count: int) -> None:
    """Until the engine says at /metrics that it computes so many."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
            found = re.findall(r"^quire_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        if count in map(float, found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def read_all(calls: list[TritonStream]) -> list[Reply]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(TritonStream.read_all, calls))


@pytest.mark.row("G9", whole=True)
def test_a_killed_engine_fails_its_streams_at_once_and_comes_back(server: ServerProcess) -> None:
    """As `max_pause_s` is 0: else they go on (test_continuation.py)."""
    before = stream(server.grpc_url, "generator", SHORT).token_ids
    (engine,) = engines(server)
    others = {process.pid for process in server.descendants()} - {engine.pid}
    calls = start_streams(server, 8)
    with ThreadPoolExecutor(2) as pool:
        # A stream's error has no status code on this server, a single answer's has.
        unary = {**LONG, "stream": False}
        single = [pool.submit(infer, server.grpc_url, "generator_unary", unary) for _ in range(2)]
        wait_for_running(server, len(calls) + len(single))
        os.kill(engine.pid, signal.SIGKILL)
        replies = read_all(calls)
        for call in single:
            with pytest.raises(InferenceServerException, match="engine process died") as failed:
                call.result(WAIT_S)
            assert failed.value.status() == "StatusCode.UNAVAILABLE"
    for reply in replies:
        assert reply.error is not None
        assert "engine process died" in str(reply.error)
    # Requests are refused, not lost, until the next engine is ready.
    deadline = time.monotonic() + 60
    pause = threading.Event()
    while (reply := stream(server.grpc_url, "generator", SHORT)).error is not None:
        assert "try again" in str(reply.error)
        assert time.monotonic() < deadline, "the engine did not come back"
        pause.wait(0.05)
    assert reply.token_ids == before
    assert len(engines(server)) == 1
    assert others <= {process.pid for process in server.descendants()}, "the server's processes are the same"
    # Every frontend found the new engine, the non-decoupled model's too.
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: stream(server.grpc_url, "generator", SHORT).token_ids, range(16)))
    assert again == [before] * 16
    assert len(engines(server)) == 1


@pytest.mark.row("F1", clauses=("dead",))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_worker_takes_its_engine_along_and_both_come_back(
    tmp_path: Path, serve_repository: Any, ranks: int
) -> None:
    """While streams run, and while nobody asks for anything; a killed engine leaves no worker. Of two ranks
    one is killed, while the other waits for it."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=MAX_TOKENS + 1000)
    options = {**OPTIONS, "max_model_len": MAX_TOKENS + 1000, "num_blocks": 10_000}
    options |= {"worker_process": True, "tensor_parallel_size": ranks, "max_pause_s": 0}
    build_repository(checkpoint, tmp_path / "repository", placement="path", engine_options=options)
    server: ServerProcess = serve_repository(tmp_path / "repository", "--load-model=generator")
    before = stream(server.grpc_url, "generator", SHORT).token_ids

    def next_worker(*gone: int) -> psutil.Process:
        """The last worker of the next engine, which answers as the first one did."""
        deadline, pause = time.monotonic() + 120, threading.Event()
        while (reply := stream(server.grpc_url, "generator", SHORT)).error is not None:
            assert "try again" in str(reply.error) or "engine" in str(reply.error)
            assert time.monotonic() < deadline, "the engine did not come back"
            pause.wait(0.05)
        assert reply.token_ids == before
        workers = server.running("quire.worker.process")
        assert len(engines(server)) == 1 and len(workers) == ranks
        assert not {worker.pid for worker in workers} & set(gone)
        return workers[-1]

    worker = next_worker()
    calls = start_streams(server, 4)
    worker.kill()
    assert all(reply.error is not None for reply in read_all(calls))
    idle = next_worker(worker.pid)
    (engine,) = engines(server)
    idle.kill()
    wait_for_end(engine)
    last = next_worker(worker.pid, idle.pid)
    (engine,) = engines(server)
    engine.kill()
    wait_for_end(last)
    next_worker(last.pid)
    server.stop()
    assert server.leftovers() == []


def test_an_engine_that_cannot_start_is_tried_until_its_checkpoint_is_back(server: ServerProcess) -> None:
    """One failed restart was for ever, while Triton went on saying READY: the checkpoint was on a share that
    was gone for a minute, and the service stayed down until somebody looked."""
    before = stream(server.grpc_url, "generator", SHORT).token_ids
    (engine,) = engines(server)
    checkpoint = server.log.parent / "llama"
    away = checkpoint.rename(checkpoint.with_name("away"))
    os.kill(engine.pid, signal.SIGKILL)
    pause, deadline = threading.Event(), time.monotonic() + 60
    while "llama" not in (reason := str(stream(server.grpc_url, "generator", SHORT).error)):
        assert "process died" in reason
        assert time.monotonic() < deadline, "the reason is never told"
        pause.wait(0.05)
    assert "could not be restarted, which is tried again" in reason
    assert re.search(r"retry after \d+\.\d s", reason)
    away.rename(checkpoint)
    deadline = time.monotonic() + 120
    while (reply := stream(server.grpc_url, "generator", SHORT)).error is not None:
        assert time.monotonic() < deadline, "the engine did not come back"
        pause.wait(0.05)
    assert reply.token_ids == before
    assert len(engines(server)) == 1


@pytest.mark.row("G10", clauses=("shutdown", "nothing-left"))
def test_sigterm_during_streams_ends_them_and_leaves_nothing(server: ServerProcess) -> None:
    calls = start_streams(server, 8)
    took = server.stop()
    assert took < STOP_S, f"stopping took {took:.2f} s"
    assert server.leftovers() == []
    for call in calls:
        call.client.close()


@pytest.mark.row("G10")
def test_a_killed_tritonserver_takes_everything_with_it(server: ServerProcess) -> None:
    start_streams(server, 4)
    (triton,) = [process for process in server.descendants() if process.name() == "tritonserver"]
    triton.kill()
    assert server.process is not None
    server.process.wait(WAIT_S)
    assert server.leftovers() == []
