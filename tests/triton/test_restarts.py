"""An engine that died is replaced: at once, later, or when what it lacks is back; only a stop ends that."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.engine import link  # noqa: E402
from quire.engine.client import EngineClient  # noqa: E402
from quire.engine.connection import EngineConnection  # noqa: E402
from quire.engine.link import EngineLink  # noqa: E402
from quire.engine.messages import EngineInfo, Goodbye, frontend_message_decoder  # noqa: E402
from quire.engine.processes import start_time_of  # noqa: E402
from quire.engine.runtime_directory import EngineState, RuntimeDirectory  # noqa: E402
from quire.engine.supervisor import EngineAddress  # noqa: E402
from quire.errors import CheckpointError, EngineStoppedError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.responder import Responder  # noqa: E402
from tests.fixtures.frontend import join_restarter  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402

WAIT_S = 60.0
OUTPUTS = frozenset({"text_output"})


class Engines:
    """Stands where the supervisor does: engines are processes that only live, and `script` says what the next
    attempts to start one bring. `allowed` holds them back until a test lets them go on."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.address = f"ipc://{directory}/engine.ipc"
        self.directory = directory / "run"
        self.router.bind(self.address)
        self.script: list[Exception] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.num_calls = self.num_attempts = 0
        self.allowed = threading.Semaphore(1)

    def connect(self) -> tuple[EngineConnection, EngineInfo]:
        self.num_calls += 1
        self.allowed.acquire()
        self.num_attempts += 1
        if self.script:
            raise self.script.pop(0)
        self.process = subprocess.Popen(["sleep", "600"])
        start_time = start_time_of(self.process.pid)
        assert start_time is not None
        address = EngineAddress(self.process.pid, self.address, self.num_attempts, start_time, self.directory)
        connection = EngineConnection(self.context, address)
        return connection, EngineInfo(self.process.pid, 64, 600, 8, False, 8, 16, 0, "float32", "cpu")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[], tuple[Engines, Responder]]]:
    made: list[tuple[Engines, Responder]] = []

    def start() -> tuple[Engines, Responder]:
        engines = Engines(tmp_path)
        served = Responder(None, EngineClient([EngineLink(engines.connect)]))
        served.start()
        made.append((engines, served))
        return engines, served

    yield start
    for engines, served in made:
        served.stop()
        served.join(WAIT_S)
        assert not served.is_alive()
        engines.allowed.release()
        join_restarter(served.engine)
        engines.kill()
        engines.router.close()
        engines.context.term()


def ask(served: Responder) -> fake_pb_utils.InferenceResponse:
    """The answer to a request while there is no engine."""
    sender = fake_pb_utils.ResponseSender()
    parsed = ParsedRequest([1], SamplingParams(), "", OUTPUTS, OUTPUTS)
    served.submit(RequestHandle(sender, "r", ""), parsed)
    assert sender.final.wait(WAIT_S)
    return sender.responses[0]


def test_every_kind_of_failure_is_tried_again_and_requests_are_told_why(
    make: Callable[[], tuple[Engines, Responder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failure to restart was the last; one that was no QuireError did not even change what requests were
    told, since it ended the thread that tried."""
    monkeypatch.setattr(link, "RESTART_PAUSES_S", (0.0, 0.001))
    engines, served = make()
    engines.script = [CheckpointError("llama/config.json: no such file"), MemoryError("out of it")]
    engines.kill()
    (lost,) = served.engine.links
    wait_until(lambda: not lost.is_up)
    for words in ("the engine process died and is being restarted", "no such file", "out of it"):
        error = ask(served).error
        assert error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert words in error.message() and "retry after 1.0 s" in error.message()
        attempts = engines.num_attempts
        engines.allowed.release()
        wait_until(lambda attempts=attempts: engines.num_attempts > attempts)
        wait_until(lambda words=words: words not in lost._down_reason or lost.is_up)
    wait_until(lambda: lost.is_up)
    assert engines.num_attempts == 4


def test_pauses_grow_until_an_engine_has_lived_for_a_while(
    make: Callable[[], tuple[Engines, Responder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies of its first request must not be started as fast as it dies."""
    engines, served = make()
    waited: list[float] = []
    (lost,) = served.engine.links
    monkeypatch.setattr(lost, "_pause", lambda seconds, died: waited.append(seconds))
    for _ in range(8):
        engines.allowed.release()
        process = engines.process
        engines.kill()
        wait_until(lambda process=process: engines.process is not process)
        wait_until(lambda: lost.is_up and engines.num_attempts == len(waited) + 1)
    assert waited == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    lost._connected_at -= link.SOUND_S
    engines.allowed.release()
    engines.kill()
    wait_until(lambda: len(waited) == 9)
    assert waited[-1] == 0.0


def test_an_operators_stop_is_the_end_of_it(make: Callable[[], tuple[Engines, Responder]]) -> None:
    engines, served = make()
    engines.script = [EngineStoppedError("the engine was told to stop")]
    engines.allowed.release()
    engines.kill()
    wait_until(lambda: served.engine.links[0]._next_attempt is None)
    error = ask(served).error
    assert "told to stop" in error.message() and "retry" not in error.message()
    assert engines.num_attempts == 2


def test_a_stop_ends_a_pause(
    make: Callable[[], tuple[Engines, Responder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two attempts to start an engine nobody looked for it, for half a minute: the server ended
    before, and what waited for an engine got no final response."""
    monkeypatch.setattr(link, "RESTART_PAUSES_S", (10 * WAIT_S,))
    engines, served = make()
    sender = fake_pb_utils.ResponseSender()
    served.submit(RequestHandle(sender, "r", ""), ParsedRequest([1], SamplingParams(), "", OUTPUTS, OUTPUTS))
    wait_until(lambda: bool(served._requests.generations))
    engines.script = [EngineStoppedError("the engine was told to stop")]
    engines.allowed.release()
    engines.kill()
    wait_until(lambda: served._continuation._paused_until)
    assert engines.process is not None and not sender.final.is_set()
    with RuntimeDirectory.locked(engines.directory) as directory:
        directory.write_state(EngineState("stopped", engines.process.pid, 0, 0))
    assert sender.final.wait(WAIT_S)
    assert "told to stop" in sender.responses[0].error.message()


def test_an_engine_that_is_there_after_the_end_is_left_at_once(
    make: Callable[[], tuple[Engines, Responder]],
) -> None:
    """Its connection stayed open: the engine had a frontend that served nobody; the context never ended."""
    engines, served = make()
    engines.kill()
    wait_until(lambda: engines.num_calls == 2)
    served.stop()
    served.join(WAIT_S)
    engines.allowed.release()
    assert engines.router.poll(WAIT_S * 1000)
    assert frontend_message_decoder.decode(engines.router.recv_multipart()[-1]) == Goodbye()
