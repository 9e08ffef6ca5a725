"""An engine that is stopped, not dead: health says so, and streams do not wait for it."""

from __future__ import annotations

import contextlib
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
from tests.fixtures.server import ServerProcess

pytestmark = pytest.mark.server

MAX_TOKENS = 2000
PROBE_S = 5.0
"""The default of `quire healthcheck`; it answers within 6 s."""


@pytest.mark.row("G8")
def test_a_stopped_engine_is_unhealthy_and_replaced_and_its_streams_go_on(
    tmp_path: Path, serve_repository: Any
) -> None:
    """For as long as it was stopped Triton said READY, and streams stood still."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=MAX_TOKENS + 100)
    options = {**OPTIONS, "max_model_len": MAX_TOKENS + 100, "num_blocks": 4000, "watchdog_s": 8}
    build_repository(
        checkpoint, tmp_path / "repository", instance_count=2, placement="path", engine_options=options
    )
    server: ServerProcess = serve_repository(tmp_path / "repository")
    inputs = {"text_input": "hello", "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    expected = stream(server.grpc_url, "generator", inputs).token_ids
    assert probe(server.grpc_url, "generator", 60.0)

    def stop() -> None:
        """Stops the engine; what is healthy says that it is not."""
        (engine,) = engines(server)
        os.kill(engine.pid, signal.SIGSTOP)
        begin = time.monotonic()
        # The other frontend may not have joined the engine yet; it, too, is asked sooner or later.
        with pytest.raises(ProbeError, match=r"no answer within|is being restarted"):
            probe(server.grpc_url, "generator", PROBE_S)
        assert time.monotonic() - begin < 6.0
        deadline = time.monotonic() + WAIT_S
        while engine in engines(server):
            assert time.monotonic() < deadline, "a stopped engine is killed"
            with contextlib.suppress(ProbeError):
                probe(server.grpc_url, "generator", 1.0)

    calls = [TritonStream(server.grpc_url, "generator", inputs) for _ in range(8)]
    for call in calls:
        call.next()
    with ThreadPoolExecutor(len(calls)) as pool:
        replies = [pool.submit(call.read_all) for call in calls]
        stop()
        for reply in replies:
            assert reply.result().error is None and reply.result().token_ids == expected
    stop()  # which nothing but the probe has noticed
    deadline = time.monotonic() + 60
    while (reply := stream(server.grpc_url, "generator", {**inputs, "max_tokens": 8})).error is not None:
        assert time.monotonic() < deadline, reply.error
        time.sleep(0.1)
    assert reply.token_ids == expected[:8]
    assert probe(server.grpc_url, "generator", 60.0)
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
    begin = time.monotonic()
    with pytest.raises(ProbeError):
        probe(site.server.grpc_url, "generator", PROBE_S)
    assert time.monotonic() - begin < 6.0
    assert site.tokens("generator_unary") == unary, "the engine and its other frontends go on"
    call.cancel()
    site.server.stop()
    assert site.server.leftovers() == []
