"""What these tests call a container, without an image: how it ends."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.docker.images import Container, Image, missing_tools, run
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.skipif(
    bool(missing_tools()), reason=f"not on this machine: {', '.join(missing_tools())}"
)
SLEEPERS = ["sh", "-c", "sleep 1000 & setsid sleep 1000 & echo ready; exec sleep 1000"]
NUMBER = 100 + os.getpid() % 150
"""Of a network that another run of these tests beside this one has not."""
PROCESSES = 4
"""`unshare` and the three that sleep."""


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """A system of five programs and their libraries."""
    root = tmp_path / "root"
    for folder in ("bin", "tmp", "dev", "proc", "sys", "models", "var/cache/quire"):
        (root / folder).mkdir(parents=True)
    for name in ("sh", "env", "sleep", "setsid", "setpriv"):
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, root / "bin")
        for library in re.findall(r"/\S+", run("ldd", program)):
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    return Image("sleepers", root, {"Env": ["PATH=/bin"], "User": "1000:1000", "Cmd": SLEEPERS})


def start(image: Image, folder: Path) -> Container:
    for name in ("models", "cache"):
        (folder / name).mkdir()
    running = Container(image, folder / "models", folder / "cache", NUMBER, folder / "log")

    def is_ready() -> bool:
        assert running._outer.poll() is None, running.log.read_text("utf-8")
        return "ready" in running.log.read_text("utf-8")

    wait_until(is_ready)
    return running


def test_none_of_its_processes_outlives_a_container_that_is_closed(image: Image, tmp_path: Path) -> None:
    """They once did: who changes the user loses the signal that a parent's death would have sent."""
    running = start(image, tmp_path)
    assert len(running.processes()) == PROCESSES
    running.close()
    assert not run("ip", "netns", "list").count(running._namespace)


def test_containers_end_with_the_tests_that_started_them(image: Image, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def tests() -> None:
        there.send(start(image, tmp_path).processes())
        signal.pause()

    process = context.Process(target=tests)
    process.start()
    started = here.recv()
    assert len(started) == PROCESSES
    process.kill()
    process.join()
    run("ip", "netns", "delete", f"quire-test-{NUMBER}")
    wait_until(lambda: not [pid for pid in started if Path(f"/proc/{pid}/root/bin/sleep").exists()])
