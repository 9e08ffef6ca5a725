"""A server in a folder that is not its own, with hostile messages, and busy: through its real front."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

import pytest
from click.testing import CliRunner

from quire.cli import main
from tests.e2e.conftest import ENDLESS, NarrowServer
from tests.e2e.triton_calls import TritonStream, infer, stream
from tests.fault.test_engine_death import engines
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

SHORT = {"text_input": "hello", "stream": True, "max_tokens": 8, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": ENDLESS, **paced_input()}

HOSTILE = {
    "nested": '{"command": "inspect", "a": ' + "[" * 984 + "]" * 984 + "}",
    "nested and unended": "[" * 60_000,
    "integer beyond 64 bits": '{"command": "unpin", "session": 1' + "0" * 40 + "}",
    "lone surrogate": '{"command": "unpin", "session": "\\ud800"}',
    "unknown field": '{"command": "reset", "also": 1}',
    "long": '{"command": "' + "a" * 70_000 + '"}',
}


@pytest.fixture
def server(narrow: NarrowServer) -> ServerProcess:
    return narrow.server


def health(server: ServerProcess, timeout_s: float = 60) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["healthcheck", "--url", server.grpc_url, f"--timeout={timeout_s}"])
    return result.exit_code, result.output


def test_nothing_is_imported_from_the_working_directory(narrow: NarrowServer) -> None:
    """The engine was started by -m, which puts the server's working directory first on the import path."""
    reply = stream(narrow.server.grpc_url, "generator", SHORT)
    assert (reply.error, len(reply.token_ids)) == (None, 8)
    assert not narrow.imported.exists(), narrow.imported.read_text()


def test_hostile_commands_are_refused_and_disturb_nobody(server: ServerProcess) -> None:
    """A command nested 984 deep ended the engine: its refusal showed it by repr, which cannot go so deep."""
    (engine,) = engines(server)
    good = stream(server.grpc_url, "generator", SHORT).token_ids
    beside = TritonStream(server.grpc_url, "generator", LONG, request_id="beside")
    beside.next()
    for name, command in [*HOSTILE.items()] * 6:
        with pytest.raises(Exception, match="cache_control: ") as refused:
            infer(server.grpc_url, "generator_unary", {"cache_control": command})
        assert refused.value.status() == "StatusCode.INVALID_ARGUMENT", name  # type: ignore[attr-defined]
        assert len(str(refused.value)) < 500, name
    answer = stream(server.grpc_url, "generator", {"cache_control": '{"command": "inspect"}'})
    assert json.loads(answer.text)["num_blocks"] == NarrowServer.NUM_BLOCKS
    assert stream(server.grpc_url, "generator", SHORT).token_ids == good
    stream(server.grpc_url, "generator", {"cancel": True}, request_id="beside")
    reply = beside.read_all()
    assert (reply.error, reply.finish_reasons[-1]) == (None, "cancelled")
    assert reply.token_ids[:8] == good
    assert engines(server) == [engine]


def test_the_probe_tells_a_busy_engine_from_one_that_stands_still(server: ServerProcess) -> None:
    """As a request like others it waited behind them, and a liveness probe killed servers under load."""
    status, said = health(server)
    assert status == 0 and "a token came" in said, said
    (engine,) = engines(server)
    names = [f"long-{i}" for i in range(NarrowServer.SEATS + NarrowServer.WAITING)]
    calls = []
    try:
        for name in names:
            calls.append(TritonStream(server.grpc_url, "generator", LONG, request_id=name))
            if len(calls) <= NarrowServer.SEATS:
                calls[-1].next()
        wait_until(lambda: _num_waiting(server) >= NarrowServer.WAITING, "not all have arrived")
        refused = str(stream(server.grpc_url, "generator", SHORT).error)
        assert "max_waiting_requests" in refused
        status, said = health(server)
        assert status == 0 and "steps get done" in said, said
        engine.send_signal(signal.SIGSTOP)
        status, said = health(server, timeout_s=3)
        assert status == 1 and "NOT healthy" in said, said
        engine.send_signal(signal.SIGCONT)
        status, said = health(server)
        assert status == 0, said
    finally:
        engine.send_signal(signal.SIGCONT)
        for name in names:
            stream(server.grpc_url, "generator", {"cancel": True}, request_id=name)
    replies = [call.read_all() for call in calls]
    assert {reply.finish_reasons[-1] for reply in replies} == {"cancelled"}
    assert engines(server) == [engine]


def _num_waiting(server: ServerProcess) -> float:
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=60) as response:
        text = response.read().decode()
    values = re.findall(r"^quire_requests_waiting\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return max(map(float, values), default=0.0)
