"""Starts of servers: lost stubs hold none up, and one that does not get ready is reported."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from quire.server.lost_stubs import awaited_stubs
from tests.e2e.conftest import build_vision_repository, write_model
from tests.fixtures.server import ServeRepository, ServerProcess

pytestmark = pytest.mark.server

T = TypeVar("T")
WAIT_S = 120.0
"""For what takes some 5 s, however busy the machine is."""
CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "text" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "text_out" data_type: TYPE_STRING dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
# Says that it has come to a place, and does not go on before it may.
WAITING = """
import os, time

def wait():
    with open({pids!r}, "a") as file:
        file.write(str(os.getpid()) + "\\n")
    while not os.path.exists({go!r}):
        time.sleep(0.05)

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {completing}
        return config

    def initialize(self, args):
        {initializing}

    def execute(self, requests):
        return []
"""


class WaitingModel:
    """A repository of one model, which waits while it completes its configuration, or initializes."""

    def __init__(self, root: Path, place: str) -> None:
        self.repository, self._pids, self._go = root / "repository", root / "pids", root / "go"
        code = {"completing": "pass", "initializing": "pass", place: "wait()"}
        text = WAITING.format(pids=str(self._pids), go=str(self._go), **code)
        write_model(self.repository, "waiting", CONFIG, text)

    def stub(self, index: int) -> psutil.Process:
        """The stub that is the so-manyth to come to the place, once it is there."""
        return until(lambda: psutil.Process(found[index]) if len(found := self.pids()) > index else None)

    def pids(self) -> list[int]:
        """Of all stubs that have come to the place: those of lost ones, too."""
        return [int(line) for line in self._pids.read_text().split()] if self._pids.exists() else []

    def go(self) -> None:
        self._go.touch()


def until(condition: Callable[[], T | None]) -> T:
    """The first result that is not None; AssertionError after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while (result := condition()) is None:
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.05)
    return result


def taken_for_dead(stub: psutil.Process) -> None:
    """Stops a stub until its server does no more than wait for its end, if it has not been lost by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        server = stub.ppid()
        stub.suspend()
        until(lambda: stub.pid in awaited_stubs(server) or not stub.is_running() or None)


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stub_that_is_taken_for_dead_does_not_hold_up_the_start(
    serve_repository: ServeRepository, tmp_path: Path, losses: int
) -> None:
    """A stub that gives no sign of life for a second while it initializes is dead for tritonserver, which
    then waits for its end without a limit. On a busy machine three of four servers were lost so: all their
    models had initialized, and they were never ready. After the first loss everything starts again, after
    others the model.
    """
    model = WaitingModel(tmp_path, "initializing")
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_repository, model.repository)
        for index in range(losses):
            taken_for_dead(model.stub(index))
        model.stub(losses)
        model.go()
        server = served.result(WAIT_S)
    last = model.pids()[-1]  # on a machine that stood still more were lost
    assert last in [process.pid for process in server.descendants()]
    server.end()
    assert server.leftovers() == []


def test_a_stub_that_dies_before_it_has_answered_does_not_hold_up_the_start(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    """Of one that is killed while it completes a configuration, tritonserver awaits the answer for ever."""
    model = WaitingModel(tmp_path, "completing")
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_repository, model.repository)
        model.stub(0).kill()
        model.stub(1)
        model.go()
        assert served.result(WAIT_S).returncode is None


def test_a_start_that_does_not_end_is_reported(tmp_path: Path) -> None:
    model = WaitingModel(tmp_path, "initializing")
    server = ServerProcess(model.repository, tmp_path, startup_timeout_s=math.inf, report_s=math.inf)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start)
        model.stub(0)
        server.report_s = 0.0
        until(lambda: server.report or None)
        server.startup_timeout_s = 0.0
        with pytest.raises(AssertionError, match="not ready in") as caught:
            started.result(WAIT_S)
    shown = str(caught.value)
    shown_pids = {int(pid) for pid in re.findall(r"^(\d+) [\w-]+, [\d.]+ s of CPU: ", shown, re.MULTILINE)}
    assert shown_pids & {*model.pids()}
    assert "TritonPythonModel.initialize (" in shown
    assert "/v2/repository/index: " in shown


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_servers_get_ready_beside_each_other_and_other_work(tmp_path: Path) -> None:
    """Four servers of 14 models each at a time, as often as QUIRE_START_ROUNDS says, on a busy machine.

    Seconds to ready are printed.
    """
    repository, names = build_vision_repository(tmp_path)
    arguments = tuple(f"--load-model={name}" for name in names)

    def seconds(folder: Path) -> float:
        folder.mkdir()
        began = time.monotonic()
        with ServerProcess(repository, folder, arguments, startup_timeout_s=900.0):
            return time.monotonic() - began

    for number in range(int(os.environ.get("QUIRE_START_ROUNDS", "1"))):
        loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            with ThreadPoolExecutor(4) as pool:
                folders = [tmp_path / f"{number}-{index}" for index in range(4)]
                times = list(pool.map(seconds, folders))
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        print(json.dumps({"round": number, "seconds": [round(took, 1) for took in times]}))
