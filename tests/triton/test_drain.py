"""What becomes of requests when Triton would unload the model, of which only asking tells."""

from __future__ import annotations

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.core.request import FinishReason  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton import drain  # noqa: E402
from quire.triton.drain import Drain, ServerAnswer  # noqa: E402
from quire.triton.frontend import TritonPythonModel  # noqa: E402
from tests.fixtures.asking_server import METADATA, MODEL, AskingServer  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_choices import WAIT_S, Harness, tokens  # noqa: E402


def test_the_time_counts_from_the_answer_and_is_over_only_while_the_model_is_to_go() -> None:
    """A server that gives the model requests again, or one wrong answer, must not leave it shut for ever."""
    wanted = True
    drain = Drain(lambda: wanted, 5.0)
    assert not drain.is_over(0.0) and not drain.is_on and drain.next_look == 0.5
    wanted = False
    assert not drain.is_over(0.4) and not drain.is_on, "not asked at each step"
    assert not drain.is_over(0.5) and drain.is_on
    assert not drain.is_over(5.4)
    assert drain.is_over(5.5)
    wanted = True
    assert not drain.is_over(6.0) and not drain.is_on
    wanted = False
    assert not drain.is_over(6.5) and drain.is_on
    assert not drain.is_over(11.4) and drain.next_look == 11.5, "the end does not wait for the next question"
    assert drain.is_over(11.5) and drain.next_look == 12.0, "its thread would spin"


class Model:
    """A frontend of a scripted engine, of which a server of 26.03 asks `is_ready`."""

    def __init__(
        self,
        directory: Path,
        monkeypatch: pytest.MonkeyPatch,
        has_is_ready: bool,
        limit_s: float = 0.2,
        drain_s: float = 0.1,
    ) -> None:
        self.harness = Harness(directory)
        self.model = TritonPythonModel()
        self.model._responder = self.harness.responder
        self.server = AskingServer(self.model.is_ready if has_is_ready else None, limit_s)
        monkeypatch.setattr(fake_pb_utils, "is_model_ready", self.server.is_model_ready)
        self.answer = ServerAnswer("generator", "1", os.getpid())
        self.answer.start()
        self.harness.responder.drain = Drain(self.answer.is_wanted, drain_s)

    def begin(self, name: str) -> fake_pb_utils.ResponseSender:
        sender = self.harness.submit(SamplingParams(), name=name)
        sender.send_delay = lambda: sender.times.append(time.monotonic())
        assert self.harness.core.seen.get(timeout=WAIT_S)[:2] == ("add", name)
        return sender

    def bring(self, name: str, **fields: Any) -> None:
        output = tokens(0, 10, **fields)
        output.request_id = name
        self.harness.core.steps.put([output])

    def close(self) -> None:
        self.harness.close()
        self.server.__exit__(None, None, None)


@pytest.fixture(params=[True, False], ids=["is_ready", "none"])
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setattr(drain, "LOOK_S", 0.02)
    made = Model(tmp_path, monkeypatch, request.param)
    yield made
    made.close()


@pytest.mark.row("G10")
def test_a_server_that_asks_the_instance_has_all_its_requests_answered(model: Model) -> None:
    """From 26.03 on the question whether the model is wanted froze the stub for 5 s, since the server put it
    to the stub; the answer was no, so each request from the second on was refused, for ever."""
    polled: list[bool] = []
    for number in range(20):
        name = f"t-{number}"
        sender = model.begin(name)
        looks = len(model.server.paths)
        wait_until(lambda looks=looks: len(model.server.paths) >= looks + 2)
        polled.append(model.server._ask_instance())
        model.bring(name)
        model.bring(name, finish_reason="stop")
        assert sender.final.wait(WAIT_S)
        errors = [one.error.message() for one in sender.responses if one.error is not None]
        assert not errors, f"request {number}: {errors}"
    assert polled == [True] * 20
    assert model.server.num_frozen == 0
    assert set(model.server.paths) == {MODEL}, "its readiness is the instance's own"


@pytest.mark.row("G10")
def test_streams_are_ended_when_the_time_is_over_and_new_requests_refused(model: Model) -> None:
    names = ["t-0", "t-1"]
    streams = [model.begin(name) for name in names]
    wait_until(lambda: len(model.server.paths) > 2)
    assert not model.harness.responder.drain.is_on
    model.server.is_loaded = False
    wait_until(lambda: model.harness.responder.drain.is_on)
    assert not model.model.is_ready()
    late = model.harness.submit(SamplingParams(), name="late")
    for sender in (late, *streams):
        assert sender.final.wait(WAIT_S)
        error = sender.responses[-1].error
        assert error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert "the model is being unloaded" in error.message()
    aborted = [model.harness.core.seen.get(timeout=WAIT_S) for _ in streams]
    assert aborted == [("abort", name, FinishReason.SHUTDOWN) for name in names], aborted
    # Loaded again, and nothing is open that would have it asked.
    model.server.is_loaded = True
    wait_until(lambda: not model.harness.responder.drain.is_on)
    sender = model.begin("t-2")
    model.bring("t-2", finish_reason="stop")
    assert sender.final.wait(WAIT_S) and sender.responses[-1].error is None


@pytest.mark.row("G10")
def test_a_model_that_goes_during_its_first_request_has_been_looked_for(model: Model) -> None:
    """The server was looked for when a request was open, and what had gone by then was never found: the
    request went on to its end, and the unload with it."""
    wait_until(lambda: model.answer._address)
    model.server.is_loaded = False
    sender = model.begin("t-0")
    assert sender.final.wait(WAIT_S)
    assert "the model is being unloaded" in sender.responses[-1].error.message()


class Engine(threading.Thread):
    """Brings a token of each stream every TOKEN_S."""

    TOKEN_S = 0.05

    def __init__(self, model: Model) -> None:
        super().__init__(daemon=True)
        self._model, self._lock, self._over = model, threading.Lock(), threading.Event()
        self._left: dict[str, int] = {}

    def begin(self, name: str, num_tokens: int) -> fake_pb_utils.ResponseSender:
        sender = self._model.begin(name)
        with self._lock:
            self._left[name] = num_tokens
        return sender

    def run(self) -> None:
        next_step = time.monotonic()
        while not self._over.wait(max(0.0, next_step - time.monotonic())):
            next_step += self.TOKEN_S
            with self._lock:
                outputs = []
                for name in self._left:
                    self._left[name] -= 1
                    output = tokens(0, 10, finish_reason=None if self._left[name] else "stop")
                    output.request_id = name
                    outputs.append(output)
                self._left = {name: left for name, left in self._left.items() if left}
            self._model.harness.core.steps.put(outputs)

    def stop(self) -> None:
        self._over.set()
        self.join(WAIT_S)


class Poll(threading.Thread):
    """Asks twice a second whether the model is ready, as an orchestrator does."""

    def __init__(self, server: AskingServer) -> None:
        super().__init__(daemon=True)
        self._server, self._over = server, threading.Event()
        self.answers: list[bool] = []

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.answers.append(self._server._ask_instance())

    def stop(self) -> None:
        self._over.set()
        self.join(WAIT_S)


@pytest.mark.slow
@pytest.mark.row("G10")
@pytest.mark.row("G34", clauses=("asked",))
@pytest.mark.parametrize("has_is_ready", [True, False], ids=["is_ready", "none"])
def test_a_minute_of_streams_on_a_server_that_asks_the_instance(
    has_is_ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the limits of the server and of ours: tokens stood still for 5 s, and the model was not ready from
    2.5 s behind the first request on."""
    num_requests, every_s, drain_s = 20, 3.0, 3.0
    model = Model(tmp_path, monkeypatch, has_is_ready, limit_s=5.0, drain_s=drain_s)
    engine, poll = Engine(model), Poll(model.server)
    engine.start()
    poll.start()
    began = time.monotonic()
    senders = []
    for number in range(num_requests):
        time.sleep(max(0.0, began + number * every_s - time.monotonic()))
        senders.append(engine.begin(f"t-{number}", 100))  # 5 s: one or two run at any time
    for sender in senders:
        assert sender.final.wait(WAIT_S)
    poll.stop()
    took_s = time.monotonic() - began
    errors = [str(one.error) for sender in senders for one in sender.responses if one.error is not None]
    assert not errors
    assert all(len(sender.times) >= 100 for sender in senders), "one response a token"
    gaps = [b - a for sender in senders for a, b in zip(sender.times, sender.times[1:], strict=False)]
    print(f"\n{len(gaps)} gaps in {took_s:.1f} s, largest {max(gaps):.3f} s; {len(poll.answers)} polls")
    assert took_s >= 60 and len(poll.answers) > 60 and all(poll.answers)
    assert model.server.num_frozen == 0
    assert max(gaps) <= 0.3

    # Unloaded: what ends in time ends as it would, the rest by what the drain says.
    soon, late = engine.begin("soon", 40), engine.begin("late", 10_000)
    assert late.first.wait(WAIT_S)
    time.sleep(1.0)  # it has asked, and was told that the model is wanted
    model.server.is_loaded = False
    began = time.monotonic()
    wait_until(lambda: model.harness.responder.drain.is_on)
    seen_s = time.monotonic() - began
    refused = model.harness.submit(SamplingParams(), name="refused")
    for sender in (refused, soon, late):
        assert sender.final.wait(WAIT_S)
    drained_s = time.monotonic() - began
    engine.stop()
    print(f"unload seen after {seen_s:.2f} s, drained after {drained_s:.2f} s")
    assert seen_s <= 1.5 and drain_s <= drained_s <= drain_s + 3
    assert soon.responses[-1].error is None
    for sender in (refused, late):
        assert "the model is being unloaded" in sender.responses[-1].error.message()
    model.close()


class Scripted:
    """An HTTP server of this process whose answers are written down; None: none comes before the end."""

    def __init__(self, *statuses: int | None, body: bytes = METADATA) -> None:
        self.left, self.ended, made = list(statuses), threading.Event(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = made.left.pop(0)
                if status is None:
                    made.ended.wait(WAIT_S)
                else:
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((200, 200), [True, True]),
        ((503,), [None]),  # never said yes: another server's, or one that knows no such name
        ((403,), [None]),
        ((200, 503, 503), [True, False]),
        ((200, 404, 400), [True, False]),
        ((200, 503, 200), [True, True]),
        ((200, 503, None), [True, None]),
        ((200, None), [True, None]),
        ((200, 403), [True, None]),
        ((200, 500), [True, None]),
    ],
)
def test_a_no_is_one_that_comes_twice_and_at_once_from_who_said_yes(
    statuses: tuple[int | None, ...], expected: list[bool | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, server = Scripted(200, body=b"# HELP\n"), Scripted(*statuses)
    listeners = [
        SimpleNamespace(status=psutil.CONN_LISTEN, laddr=laddr)
        for laddr in (("127.0.0.1", metrics.http.server_port), ("127.0.0.2", server.http.server_port))
    ]
    monkeypatch.setattr("psutil.Process.net_connections", lambda self, kind: listeners)
    answer = ServerAnswer("generator", "1", os.getpid())
    get = answer._get

    def patient(address: tuple[str, int]) -> tuple[int, bytes]:
        """Waits for an answer that comes, however long it takes, and briefly for the one that does not."""
        monkeypatch.setattr(drain, "ANSWER_S", 0.2 if server.left[0] is None else WAIT_S)
        return get(address)

    monkeypatch.setattr(answer, "_get", patient)
    assert [answer.ask() for _ in expected] == expected
    wait_until(lambda: not server.left and not metrics.left)  # a question is read though who asked has left
    for one in (metrics, server):
        one.close()


def test_a_server_that_took_long_to_start_is_found_by_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause between two searches had grown to seconds by then; a model that was unloaded within them had
    its streams go on to their ends."""
    server, listeners = Scripted(200), []
    monkeypatch.setattr("psutil.Process.net_connections", lambda self, kind: listeners)
    answer = ServerAnswer("generator", "1", os.getpid())
    for _ in range(8):
        assert not answer._search()
    listeners.append(SimpleNamespace(status=psutil.CONN_LISTEN, laddr=("127.0.0.1", server.http.server_port)))
    assert answer.ask() is True
    server.close()


@pytest.mark.parametrize("error", [None, psutil.AccessDenied(), OSError(24, "Too many open files")])
def test_without_an_http_port_nothing_is_known_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Without a free descriptor for the search its thread ended, and nothing was noticed any more."""

    def search(*_: object) -> list[Any]:
        if error is not None:
            raise error
        return []

    said: list[str] = []
    monkeypatch.setattr(drain.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    monkeypatch.setattr("psutil.Process.net_connections", search)
    answer = ServerAnswer("generator", "1", os.getpid())
    num_asked = 2 * drain.MAX_VAIN  # most of them between two searches
    assert [answer.ask() for _ in range(num_asked)] == [None] * num_asked
    (line,) = said
    assert MODEL in line
