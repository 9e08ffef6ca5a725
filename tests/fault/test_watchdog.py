"""Processes that are stopped or gone: health says so, streams do not wait for them, and nothing stays."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from quire.server.healthcheck import ProbeError, probe
from tests.e2e.triton_calls import TritonStream, stream
from tests.fault.test_engine_death import HELD, SHORT, WAIT_S, engines, start_streams
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

MAX_TOKENS = 800
PROBE_S = 2.0
"""For a probe of what does not answer."""


@pytest.mark.row("G8")
def test_a_stopped_engine_is_unhealthy_and_replaced_and_its_streams_go_on(
    mortal: ServerProcess, tmp_path: Path
) -> None:
    """For as long as it was stopped Triton said READY, and streams stood still."""
    released = tmp_path / "released"
    released.touch()
    inputs = {"text_input": "hello", "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    inputs |= paced_input(released)
    expected = stream(mortal.grpc_url, "generator", inputs).token_ids
    heard: list[str] = []

    def is_healthy(timeout_s: float) -> bool:
        """Of both frontends: a probe asks twice at least."""
        try:
            return bool(probe(mortal.grpc_url, "generator", timeout_s))
        except ProbeError as error:
            heard.append(str(error))
            return False

    def stop() -> psutil.Process:
        """Stops the engine, and returns it; what is healthy says that it is not."""
        (engine,) = engines(mortal)
        os.kill(engine.pid, signal.SIGSTOP)
        assert not is_healthy(PROBE_S)
        return engine

    def wait_until_replaced(engine: psutil.Process) -> None:
        """A probe is what asks."""
        wait_until(lambda: engine not in engines(mortal) or (is_healthy(1.0) and False), lambda: heard)

    wait_until(lambda: is_healthy(60.0), lambda: heard)
    released.unlink()
    calls = [TritonStream(mortal.grpc_url, "generator", inputs) for _ in range(8)]
    for call in calls:
        call.next()
    with ThreadPoolExecutor(len(calls)) as pool:
        replies = [pool.submit(call.read_all) for call in calls]
        engine = stop()
        assert not any(reply.done() for reply in replies)
        released.touch()
        for reply in replies:
            assert reply.result().error is None and reply.result().token_ids == expected
    wait_until_replaced(engine)
    wait_until(lambda: is_healthy(60.0), lambda: heard)
    wait_until_replaced(stop())  # which nothing but the probe has noticed
    wait_until(lambda: is_healthy(60.0), lambda: heard)
    assert stream(mortal.grpc_url, "generator", {**inputs, "max_tokens": 8}).token_ids == expected[:8]


def test_a_killed_frontend_is_unhealthy_at_once_and_no_other_is_disturbed(mortal: ServerProcess) -> None:
    """Triton starts no stub again and ends none of its streams; 24.10 goes on saying READY."""
    before = stream(mortal.grpc_url, "generator", SHORT).token_ids
    # Nothing is sent: a stub that dies with a lock of Triton's shared memory takes 24.10 along.
    (stub,) = [one for one in mortal.running("backend_stub") if "generator_unary_0_0" in one.cmdline()]
    stub.kill()
    with pytest.raises(ProbeError):
        probe(mortal.grpc_url, "generator_unary", PROBE_S)
    assert stream(mortal.grpc_url, "generator", SHORT).token_ids == before, "its engine and the others go on"


@pytest.mark.row("G10")
def test_a_killed_tritonserver_takes_everything_with_it(mortal: ServerProcess) -> None:
    start_streams(mortal, 4, {**HELD, "max_tokens": MAX_TOKENS})
    (triton,) = [process for process in mortal.descendants() if process.name() == "tritonserver"]
    triton.kill()
    assert mortal.process is not None
    mortal.process.wait(WAIT_S)
    assert mortal.leftovers() == []
