"""What becomes of requests when Triton would unload the model, of which only asking tells."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.request import FinishReason
from quire.sampling_params import SamplingParams
from quire.triton import drain
from quire.triton.drain import Drain, ServerAnswer
from tests.fixtures import fake_pb_utils
from tests.triton.test_choices import WAIT_S, Harness


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


def test_a_server_is_asked_only_while_its_first_thread_is_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """24.10 hangs when it is asked while it ends, and its first thread stirs every second then. Here that is
    a process which does so when it is told to."""
    asked: list[str] = []

    def is_model_ready(model_name: str, model_version: str) -> bool:
        asked.append(f"{model_name} {model_version}")
        if len(asked) == 3:
            raise RuntimeError("no memory")
        return len(asked) == 1

    monkeypatch.setattr(drain, "STILL_S", 0.2)
    stir = "import sys, time\nprint(flush=True)\nsys.stdin.read(1)\nwhile True: time.sleep(0.02)"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", stir], **pipes) as server:
        assert server.stdout is not None and server.stdout.readline(), "it is still from here on"
        answer = ServerAnswer(SimpleNamespace(is_model_ready=is_model_ready), "generator", "1", server.pid)
        assert answer.is_wanted() is None, "nothing is known yet"
        deadline = time.monotonic() + WAIT_S
        while (found := answer.is_wanted()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [found, answer.is_wanted(), answer.is_wanted()] == [True, False, None]
        assert asked == ["generator 1"] * 3
        monkeypatch.setattr(drain, "STILL_S", WAIT_S)  # it may be given no core for a while
        assert server.stdin is not None
        server.stdin.write(b"x")
        server.stdin.flush()
        while answer.is_wanted() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked.clear()
        for _ in range(40):
            assert answer.is_wanted() is None
            time.sleep(0.01)
        server.kill()
    assert not asked
    assert answer.is_wanted() is None


@pytest.mark.row("G10")
def test_streams_are_ended_when_the_time_is_over_and_new_requests_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.02)
    wanted = True
    harness = Harness(tmp_path)
    harness.responder.drain = Drain(lambda: wanted, 0.1)
    streams = [harness.submit(SamplingParams(n=count), name=f"t-{count}") for count in (1, 2)]
    for _ in streams:
        assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
    wanted = False
    deadline = time.monotonic() + WAIT_S
    while not harness.responder.drain.is_on:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    late = harness.submit(SamplingParams(), name="late")
    for sender in (late, *streams):
        assert sender.final.wait(WAIT_S)
        error = sender.responses[-1].error
        assert error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert "the model is being unloaded" in error.message()
    aborted = [harness.core.seen.get(timeout=WAIT_S) for _ in streams]
    assert aborted == [("abort", f"t-{count}", FinishReason.SHUTDOWN) for count in (1, 2)], aborted
    harness.close()
