"""An engine that lives and does nothing is found out by its heartbeat and killed: another takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.client import EngineClient  # noqa: E402
from quire.engine.connection import EngineConnection  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.engine.heartbeat import Heartbeat  # noqa: E402
from quire.engine.link import EngineLink  # noqa: E402
from quire.engine.loop import EngineLoop  # noqa: E402
from quire.engine.messages import AbortRequests, EngineInfo  # noqa: E402
from quire.engine.processes import start_time_of  # noqa: E402
from quire.engine.runtime_directory import RuntimeDirectory  # noqa: E402
from quire.engine.supervisor import EngineAddress  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.frontend import TritonPythonModel  # noqa: E402
from quire.triton.responder import Responder  # noqa: E402
from tests.fixtures.fake_runner import FakeRunner  # noqa: E402
from tests.fixtures.frontend import join_restarter  # noqa: E402

WATCHDOG_S = 5.0


class Watched:
    """A client with a link to a process that is stopped; `heartbeat` is what its engine writes."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.process.send_signal(signal.SIGSTOP)
        folder.chmod(0o700)
        self.directory = RuntimeDirectory(folder)
        heartbeat = self.directory.heartbeat(self.process.pid, WATCHDOG_S)
        assert heartbeat is not None
        self.heartbeat = heartbeat
        self.context: zmq.Context[bytes] = zmq.Context()
        self.num_connections = 0

        def connect() -> tuple[EngineConnection, EngineInfo]:
            self.num_connections += 1
            pid = self.process.pid
            address = EngineAddress(pid, f"ipc://{folder}/e", 0, start_time_of(pid) or 0, folder)
            info = EngineInfo(pid, 64, 600, 8, False, 8, 16, 0, "float32", "cpu")
            return EngineConnection(self.context, address), info

        self.link = EngineLink(connect, watchdog_s=WATCHDOG_S)
        self.client = EngineClient([self.link])

    def is_dead(self, wait_s: float = 60.0) -> bool:
        """Asked when it may just have been killed, which takes effect when it is given a core."""
        try:
            return self.process.wait(wait_s) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.client.close()
        join_restarter(self.client)
        self.directory.close()
        self.context.destroy(0)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float, since: float | None = None) -> None:
    """For the client; what it waits for by itself does not pass. `since`: by default from now on."""
    now = time.monotonic() if since is None else since
    monkeypatch.setattr(time, "monotonic", lambda: now + seconds)


def test_an_engine_that_is_silent_within_a_step_is_killed_past_its_limit(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 2048 tokens may take three times as long as one of few; a stopped process dies of SIGKILL."""
    began = time.monotonic()
    watched.heartbeat.beat(2048)
    pass_time(monkeypatch, 3 * WATCHDOG_S - 1, began)
    watched.client.check()
    assert watched.client.is_ready
    pass_time(monkeypatch, 3 * WATCHDOG_S + 1)
    assert not watched.client.is_ready
    watched.client.check()
    assert not watched.is_dead(0.2), "a moment after all were frozen it may be overdue"
    pass_time(monkeypatch, 3 * WATCHDOG_S + 3)
    watched.client.check()
    assert watched.is_dead()
    assert watched.client.next_check > time.monotonic(), "its thread spun until the kernel was done"


def test_an_engine_that_was_frozen_with_all_others_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.heartbeat.beat()
    for seconds in (100.0, 200.0, 300.0):
        pass_time(monkeypatch, seconds)
        watched.client.check()
        watched.heartbeat.beat()
        watched.client.check()
    assert not watched.is_dead(0.2) and watched.client.is_ready


def test_an_idle_engine_is_healthy_until_it_does_not_look_at_a_message(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.heartbeat.rest()
    pass_time(monkeypatch, 1e6)
    watched.client.check()
    assert watched.client.is_ready
    monkeypatch.undo()
    watched.link.send(AbortRequests([], "cancelled"))
    watched.heartbeat.rest()
    pass_time(monkeypatch, 1e6)
    assert watched.client.is_ready, "it looked, and rests again"
    monkeypatch.undo()
    began = time.monotonic()
    watched.link.send(AbortRequests([], "cancelled"))
    pass_time(monkeypatch, WATCHDOG_S - 1, began)
    assert watched.client.is_ready
    for seconds in (WATCHDOG_S + 1, WATCHDOG_S + 3):
        pass_time(monkeypatch, seconds)
        watched.client.check()
    assert watched.is_dead()


def test_more_messages_do_not_prolong_what_the_first_may_take(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steady requests an engine that was stopped while it rested would have lived for ever."""
    watched.heartbeat.rest()
    watched.link.send(AbortRequests([], "cancelled"))
    began = time.monotonic()
    for seconds in (WATCHDOG_S / 2, WATCHDOG_S + 1, WATCHDOG_S + 3):
        monkeypatch.setattr(time, "monotonic", lambda now=began + seconds: now)
        watched.link.send(AbortRequests([], "cancelled"))
        watched.client.check()
    assert watched.is_dead()


def test_a_watchdog_of_0_never_bites(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "heartbeat", os.O_RDWR | os.O_CREAT)
    heartbeat = Heartbeat(fd)
    heartbeat.beat(10)
    assert not heartbeat.is_overdue and heartbeat.read()[1] == float("inf")


@pytest.mark.row("G8")
def test_the_model_is_ready_while_its_engine_is(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers from 26.03 on call this; it asks nobody."""
    model = TritonPythonModel()
    served = Responder(None, watched.client)
    model._responder = served
    assert not model.is_ready(), "the thread does not run yet"
    monkeypatch.setattr(served, "is_alive", lambda: True)
    assert model.is_ready()
    watched.heartbeat.beat()
    pass_time(monkeypatch, WATCHDOG_S + 1)
    assert not model.is_ready(), "stuck"
    monkeypatch.undo()
    monkeypatch.setattr(served, "is_alive", lambda: True)
    monkeypatch.setattr(watched.link, "_restart", lambda died: None)
    assert model.is_ready()
    monkeypatch.setattr(served.drain, "_ends_at", 1.0)
    assert not model.is_ready(), "it is being unloaded"
    monkeypatch.setattr(served.drain, "_ends_at", None)
    assert model.is_ready()
    watched.process.kill()
    watched.client.wait(60_000)
    watched.client.receive()
    assert not model.is_ready(), "the engine died, and no other is there yet"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_is_waited_for_has_the_time_of_its_tokens(depth: int) -> None:
    """With steps launched ahead the newest one's tokens alone were counted when the oldest was waited for: a
    prompt's chunk had no longer than the token behind it, and a sound engine was killed, again and again."""
    may_begin, seen, allowed = threading.Event(), [0], []

    class Waiting(FakeRunner):
        def execute(self, output: Any) -> Any:
            assert may_begin.wait(60.0)
            allowed.append((sum(row.num_scheduled_tokens for row in output.scheduled), seen[-1]))
            return super().execute(output)

    config = EngineConfig.from_mapping({"model": "fake", "block_size": 4})
    executor = RunnerExecutor(Waiting(64, 4, max_model_len=100), depth=depth, threaded=True)
    core, launch = EngineCore(config, executor), executor.launch
    executor.launch = lambda output: (may_begin.clear(), launch(output))[1]  # type: ignore[method-assign]
    context: zmq.Context[bytes] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        loop = EngineLoop(core, router)
        loop.heartbeat = SimpleNamespace(  # type: ignore[assignment]
            beat=lambda num_tokens: (seen.append(num_tokens), may_begin.set()), rest=loop.stop
        )
        core.add_request("a", [5] * 30, SamplingParams(max_tokens=3, ignore_eos=True))
        loop.run()
    context.destroy(0)
    core.close()
    assert allowed[0][0] == 30 and all(tokens <= limit for tokens, limit in allowed), allowed


def test_a_loop_beats_before_each_step_and_rests_without_work(tmp_path: Path) -> None:
    config = EngineConfig.from_mapping({"model": "fake", "block_size": 4})
    core = EngineCore(config, RunnerExecutor(FakeRunner(64, 4, max_model_len=100)))
    context: zmq.Context[bytes] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        loop = EngineLoop(core, router)
        seen: list[object] = []
        loop.heartbeat = SimpleNamespace(  # type: ignore[assignment]
            beat=seen.append, rest=lambda: (seen.append("rest"), loop.stop())
        )
        core.add_request("a", [5] * 30, SamplingParams(max_tokens=3, ignore_eos=True))
        original = core.step
        core.step = lambda meanwhile: (loop._beat(), original(None))[1]  # type: ignore[method-assign]
        loop.run()
        assert seen.index("rest") == len(seen) - 2
    context.destroy(0)
