"""What requests get when the process of their engine ends; its loop is here, a `sleep` is its process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.engine import link  # noqa: E402
from quire.engine.cache_commands import Inspect  # noqa: E402
from quire.engine.client import EngineClient  # noqa: E402
from quire.engine.connection import EngineConnection  # noqa: E402
from quire.engine.link import EngineLink  # noqa: E402
from quire.engine.processes import start_time_of  # noqa: E402
from quire.engine.supervisor import EngineAddress  # noqa: E402
from quire.errors import UnavailableError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.responder import Responder  # noqa: E402
from tests.triton.test_choices import WAIT_S, Harness  # noqa: E402


def test_requests_of_an_engine_that_dies_are_unavailable_and_not_internal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the code a client knows whether to try again. They are told when an engine cannot be started."""
    monkeypatch.setattr(link, "RESTART_PAUSES_S", (0.0, 0.001))
    harness = Harness(tmp_path)
    address = str(tmp_path / "engine.ipc")
    with subprocess.Popen(["sleep", "600"]) as process:
        pid, start = process.pid, start_time_of(process.pid) or 0
        harness.core.control = lambda command: {"pid": pid}  # type: ignore[method-assign]

        def connect() -> Any:
            if start_time_of(pid) != start:
                raise UnavailableError("there is no engine")
            connection = EngineConnection(harness.context, EngineAddress(pid, f"ipc://{address}", 0, start))
            return connection, connection.hello(10)

        own = harness.responder
        harness.responder = Responder(None, EngineClient([EngineLink(connect)]))
        own.stop()
        own.join(WAIT_S)
        harness.responder.start()
        senders = [harness.submit(SamplingParams(n=count), name=f"t-{count}") for count in (1, 3)]
        for _ in senders:
            assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
        process.kill()
        for sender in senders:
            assert sender.final.wait(WAIT_S)
            (response,) = sender.responses
            assert response.error.code() == fake_pb_utils.TritonError.UNAVAILABLE
            assert "engine process died" in response.error.message()
            assert "there is no engine" in response.error.message()
    late = harness.command(cache_control=Inspect())
    assert late.final.wait(WAIT_S)
    assert late.responses[0].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    harness.close()
