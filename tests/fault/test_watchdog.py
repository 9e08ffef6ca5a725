"""An engine that is stopped, not dead: health says so, and streams do not wait for it."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.server.healthcheck import ProbeError, probe
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import TritonStream, stream
from tests.fault.test_drain import SHORT, Site
from tests.fault.test_engine_death import WAIT_S, engines
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV, paced_input
from tests.fixtures.server import ServerProcess

pytestmark = pytest.mark.server

MAX_TOKENS = 800
WATCHDOG_S = 8
PROBE_S = 2.0
"""Less than the watchdog takes, so that nothing but the limit ends a probe of an engine that is stopped."""


@pytest.mark.row("G8")
def test_a_stopped_engine_is_unhealthy_and_replaced_and_its_streams_go_on(
    tmp_path: Path, serve_repository: Any
) -> None:
    """For as long as it was stopped Triton said READY, and streams stood still."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=1024)
    options = {**OPTIONS, **PACED, "watchdog_s": WATCHDOG_S}
    build_repository(
        checkpoint, tmp_path / "repository", instance_count=2, placement="path", engine_options=options
    )
    server: ServerProcess = serve_repository(tmp_path / "repository", env=PACED_ENV)
    released = tmp_path / "released"
    released.touch()
    inputs = {"text_input": "hello", "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    inputs |= paced_input(released)
    expected = stream(server.grpc_url, "generator", inputs).token_ids
    assert probe(server.grpc_url, "generator", 60.0)

    def wait_until_healthy() -> None:
        """Until both frontends have an engine: a probe asks twice at least. One that is stopped before is
        waited for as long as a start may take."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                assert probe(server.grpc_url, "generator", 60.0)
                return
            except ProbeError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.1)

    def stop() -> Any:
        """Stops the engine, and returns it; what is healthy says that it is not."""
        (engine,) = engines(server)
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(ProbeError, match="no answer within"):
            probe(server.grpc_url, "generator", PROBE_S)
        assert engine in engines(server), "the probe ended by its own limit, not by the engine's end"
        return engine

    def wait_until_replaced(engine: Any) -> None:
        """A probe is what asks."""
        deadline = time.monotonic() + WAIT_S
        heard: list[str] = []
        while engine in engines(server):
            assert time.monotonic() < deadline, f"a stopped engine is killed; probes heard {heard}"
            try:
                probe(server.grpc_url, "generator", 1.0)
            except ProbeError as error:
                heard.append(str(error))

    wait_until_healthy()
    released.unlink()
    calls = [TritonStream(server.grpc_url, "generator", inputs) for _ in range(8)]
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
    wait_until_healthy()
    wait_until_replaced(stop())  # which nothing but the probe has noticed
    wait_until_healthy()
    assert stream(server.grpc_url, "generator", {**inputs, "max_tokens": 8}).token_ids == expected[:8]
    server.stop()
    assert server.leftovers() == []


def test_a_killed_frontend_is_unhealthy_at_once_and_no_other_is_disturbed(
    tmp_path: Path, serve_repository: Any
) -> None:
    """Triton starts no stub again and ends none of its streams; 24.10 goes on saying READY."""
    site = Site(tmp_path, serve_repository)
    unary = site.tokens("generator_unary")
    # It sends nothing for a while: a stub that dies with a lock of Triton's shared memory takes 24.10 along.
    inputs = {**SHORT, "max_tokens": 16_000, "stream_interval_ms": 60_000}
    call = TritonStream(site.server.grpc_url, "generator", inputs)
    call.next()
    (stub,) = [one for one in site.server.running("backend_stub") if "generator_0_0" in one.cmdline()]
    stub.kill()
    with pytest.raises(ProbeError):
        probe(site.server.grpc_url, "generator", PROBE_S)
    assert site.tokens("generator_unary") == unary, "the engine and its other frontends go on"
    call.cancel()
    site.server.stop()
    assert site.server.leftovers() == []
