"""Processes are really killed; what must hold is that streams end at once and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient.utils import InferenceServerException

from quire.engine.processes import start_time_of
from tests.e2e.conftest import OPTIONS, engine_of, write_generator
from tests.e2e.triton_calls import Reply, TritonStream, infer, stream
from tests.fault.conftest import served_generators
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV, paced_input
from tests.fixtures.server import STOP_S, ServerProcess, SharedServer
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

MAX_TOKENS = 16_000
"""Of a stream that a test ends."""
LONG = {"text_input": "hello", "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
HELD = {**LONG, **paced_input()}
"""It does not end by itself."""
SHORT = {**LONG, "max_tokens": 8}
WAIT_S = 120.0
"""For what takes some 2 s, however busy the machine is."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    root = tmp_path_factory.mktemp("death")
    size = {"max_model_len": MAX_TOKENS + 1000, "num_blocks": 10_000}
    with served_generators(root, **size, max_pause_s=0) as server:
        yield server


@pytest.fixture
def server(shared: SharedServer) -> ServerProcess:
    """For tests that leave it as it was, or ended."""
    return shared.current()


def engines(server: ServerProcess) -> list[psutil.Process]:
    return server.running("quire.engine.loop")


def wait_for_end(process: psutil.Process) -> None:
    """Until it has ended; its parent may take its time to learn with what status."""
    wait_until(lambda: start_time_of(process.pid) is None, str(process))


def start_streams(
    server: ServerProcess, count: int, inputs: dict[str, Any] = LONG, model: str = "generator"
) -> list[TritonStream]:
    calls = [TritonStream(server.grpc_url, model, inputs) for _ in range(count)]
    for call in calls:
        call.next()
    return calls


def wait_for_running(server: ServerProcess, count: int) -> None:
    """Until the engine says at /metrics that it computes so many."""

    def running() -> list[float]:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return [float(n) for n in re.findall(r"^quire_requests_running\{.*\} (\S+)$", text, re.MULTILINE)]

    wait_until(lambda: count in running(), running)


def served_again(server: ServerProcess, words: str) -> Reply:
    """The first answer that is no refusal; each of those has the words."""

    def answer() -> Reply | None:
        reply = stream(server.grpc_url, "generator", SHORT)
        assert reply.error is None or words in str(reply.error)
        return reply if reply.error is None else None

    reply = wait_until(answer, "the engine did not come back")
    assert reply is not None
    return reply


def read_all(calls: list[TritonStream]) -> list[Reply]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(TritonStream.read_all, calls))


@pytest.mark.row("G9", whole=True)
def test_a_killed_engine_fails_its_streams_at_once_and_comes_back(server: ServerProcess) -> None:
    """As `max_pause_s` is 0: else they go on (test_continuation.py)."""
    before = stream(server.grpc_url, "generator", SHORT).token_ids
    (engine,) = engines(server)
    others = {process.pid for process in server.descendants()} - {engine.pid}
    calls = start_streams(server, 8, HELD)
    with ThreadPoolExecutor(2) as pool:
        # A stream's error has no status code on this server, a single answer's has.
        unary = {**HELD, "stream": False}
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
    assert served_again(server, "try again").token_ids == before
    assert len(engines(server)) == 1
    assert others <= {process.pid for process in server.descendants()}, "the server's processes are the same"
    # Every frontend found the new engine, the non-decoupled model's too.
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda _: stream(server.grpc_url, "generator", SHORT).token_ids, range(16)))
    assert again == [before] * 16
    assert len(engines(server)) == 1


@pytest.mark.row("F1", clauses=("dead",))
def test_a_killed_rank_takes_its_engine_along_and_all_come_back(
    tmp_path: Path, serve_repository: Any
) -> None:
    """While streams run, when the other rank waits for it; and while nobody asks for anything. A killed
    engine leaves no rank."""
    checkpoint = make_checkpoint("llama", tmp_path / "ranks")
    options = {**OPTIONS, **PACED, "tensor_parallel_size": 2}
    write_generator(tmp_path / "repository", "ranks", checkpoint, **options, max_pause_s=0)
    server: ServerProcess = serve_repository(tmp_path / "repository", env=PACED_ENV)
    short = {**SHORT, "ignore_eos": True}
    before = stream(server.grpc_url, "ranks", short).token_ids

    def engine_and_ranks(*gone: psutil.Process) -> list[psutil.Process]:
        """Those of the next engine, which answers as the first one did."""

        def answer() -> Reply | None:
            reply = stream(server.grpc_url, "ranks", short)
            assert reply.error is None or "engine" in str(reply.error)
            return reply if reply.error is None else None

        reply = wait_until(answer, "the engine did not come back")
        assert reply is not None and reply.token_ids == before
        engine = engine_of(server, checkpoint)
        ranks = [one for one in engine.children() if "quire.worker.process" in one.cmdline()]
        assert len(ranks) == 2 and not {engine, *ranks} & set(gone)
        return [engine, *ranks]

    first = engine_and_ranks()
    calls = start_streams(server, 4, {**HELD, "max_tokens": 1000}, "ranks")
    first[-1].kill()
    assert all(reply.error is not None for reply in read_all(calls))
    second = engine_and_ranks(*first)
    second[-1].kill()
    wait_for_end(second[0])
    engine, *ranks = engine_and_ranks(*second)
    engine.kill()
    for rank in ranks:
        wait_for_end(rank)
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

    def told() -> str:
        reason = str(stream(server.grpc_url, "generator", SHORT).error)
        assert "llama" in reason or "process died" in reason
        return reason if "llama" in reason else ""

    reason = wait_until(told, "the reason is never told")
    assert "could not be restarted, which is tried again" in reason
    assert re.search(r"retry after \d+\.\d s", reason)
    away.rename(checkpoint)
    assert served_again(server, "").token_ids == before
    assert len(engines(server)) == 1


@pytest.mark.row("G10", clauses=("shutdown", "nothing-left"))
def test_sigterm_during_streams_ends_them_and_leaves_nothing(server: ServerProcess) -> None:
    calls = start_streams(server, 8, HELD)
    took = server.stop()
    assert took < STOP_S, f"stopping took {took:.2f} s"
    assert server.leftovers() == []
    for call in calls:
        call.client.close()
