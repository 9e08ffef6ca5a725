"""`.ci/run`: a run that failed explains itself in its last 60 lines, one that passed is noted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.failures import Failures
from tests.rows import ROOT

pytest_plugins = ["pytester"]

PYTEST = "exec $PYTHON -m pytest -q -p no:cacheprovider -p tests.failures --failures .cache/failures.txt"


@dataclass
class Checkout:
    """A repository with `.ci/run` and the tests of one file; `make` is a script of the test's own."""

    folder: Path
    cache: Path

    def start(self, make: str, **env: str) -> subprocess.Popen[str]:
        script = self.folder / "bin" / "make"
        script.write_text(f"#!/bin/sh\n{make}\n", "utf-8")
        script.chmod(0o755)
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PATH": f"{script.parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "XDG_CACHE_HOME": str(self.cache),
            **env,
        }
        return subprocess.Popen(
            [str(self.folder / ".ci" / "run")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, make: str, tests: str = "", **env: str) -> tuple[int, list[str]]:
        """Status, and lines of the output."""
        (self.folder / "test_sample.py").write_text(tests, "utf-8")
        process = self.start(make, **env)
        output, _ = process.communicate()
        return process.returncode, output.splitlines()

    def commit(self) -> str:
        name = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        for command in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "x", "--no-gpg-sign"]):
            subprocess.run(["git", *command], cwd=self.folder, check=True)
        head = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            head, cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout.strip()

    def noted(self) -> list[str]:
        return [file.name for file in (self.cache / "quire-ci").glob("*")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "check*out"
    (folder / ".ci").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / ".gitignore").write_text(".cache/\nbin/\n__pycache__/\n", "utf-8")
    return Checkout(folder, tmp_path / "cache")


@pytest.fixture
def left(checkout: Checkout) -> Iterator[Path]:
    """Where a test writes the id of a process that it leaves."""
    file = checkout.folder / ".cache" / "left"
    yield file
    os.kill(int(file.read_text()), signal.SIGKILL)


FAILING = """
import pathlib, subprocess, sys
import pytest

def deep():
    raise OSError("no space\\nfor it")

@pytest.fixture
def broken():
    deep()

def test_of_a_fixture(broken):
    pass

@pytest.mark.parametrize("case", range(30))
def test_fails(case):
    assert case == 77, "words"

def test_leaves():
    command = [sys.executable, "-c", "import time; time.sleep(600)", "tritonserver"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pathlib.Path(".cache/left").write_text(str(process.pid))
"""


def test_a_run_that_failed_explains_itself_in_its_last_lines(checkout: Checkout, left: Path) -> None:
    status, lines = checkout.run(PYTEST, FAILING)
    assert status == 1
    end = lines[-60:]
    [title] = [place for place, line in enumerate(end) if line.startswith("==== .ci/run: make ended with ")]
    assert end[title + 1 : title + 7] == [
        "FAILED test_sample.py::test_of_a_fixture (setup)  test_sample.py:6",
        "    OSError: no space",
        "    for it",
        "FAILED test_sample.py::test_fails[0]  test_sample.py:17",
        "    AssertionError: words",
        "    assert 0 == 77",
    ]
    assert sum(line == "    AssertionError: words" for line in end[title:]) == 9
    assert "FAILED test_sample.py::test_fails[9]  test_sample.py:17" in end[title:]
    assert "and 14 failures more" in end[title:]
    cores = len(os.sched_getaffinity(0))
    assert any(line.startswith("load ") and f" on {cores} cores," in line for line in end[title:])
    assert any("/dev/shm free: " in line for line in end[title:])
    assert [line.split()[1] for line in end[title:] if line.startswith("left: ")] == [left.read_text()]
    assert end[-1].startswith("==== 30 failed, 1 passed, 1 error in ")
    assert checkout.noted() == []


def test_a_run_of_which_pytest_was_killed_says_what_was_known(checkout: Checkout) -> None:
    tests = """
import os, signal

def test_fails():
    assert 0

def test_kills():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    status, lines = checkout.run(PYTEST, tests)
    assert status == 128 + signal.SIGKILL
    end = lines[-60:]
    assert any(line.startswith("running since ") and "::test_kills" in line for line in end)
    assert "FAILED test_sample.py::test_fails  test_sample.py:5" in end
    assert end[-1].startswith("pytest did not end: 1 tests ended by ")


def test_a_file_that_cannot_be_imported(checkout: Checkout) -> None:
    status, lines = checkout.run(PYTEST, "import no_such_module\n")
    assert status == 2
    place = lines.index("FAILED test_sample.py (collection)")
    assert lines[place + 1] == "    ModuleNotFoundError: No module named 'no_such_module'"
    assert lines[-1].startswith("==== 1 error in ")


@pytest.mark.parametrize("make", [PYTEST, "exit 0"])
def test_a_run_without_pytest_s_end_is_none_that_passed(checkout: Checkout, make: str) -> None:
    """It was noted as one: a test had ended its process with 0, before the others."""
    tests = "import os\n\ndef test_ends():\n    os._exit(0)\n\ndef test_fails():\n    assert 0\n"
    (checkout.folder / "test_sample.py").write_text(tests, "utf-8")
    checkout.commit()
    status, lines = checkout.run(make, tests)
    assert (status, checkout.noted()) == (1, [])
    assert any(line.startswith("==== .ci/run: make ended with status 0 ") for line in lines)


def test_an_error_that_is_no_utf_8_is_a_failure_as_others_are(checkout: Checkout) -> None:
    """The plugin failed of it, and with it the run, whose other tests did not come to their turn."""
    tests = "def test_fails():\n    assert 0, '\\ud800'\n\ndef test_passes():\n    pass\n"
    status, lines = checkout.run(PYTEST, tests)
    assert status == 1
    assert r"    AssertionError: \ud800" in lines
    assert lines[-1].startswith("==== 1 failed, 1 passed in ")


def test_two_runs_may_share_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moved the other's unfinished file away, and ended by that."""
    first, second = (Failures(tmp_path / "failures.txt", tmp_path) for _ in range(2))
    replace = Path.replace

    def between(unfinished: Path, file: Path) -> Path:
        with monkeypatch.context() as other:
            other.setattr(Path, "replace", replace)
            other.setattr(os, "getpid", lambda: 1)
            second.pytest_runtest_logstart("test_of_the_second")
        return replace(unfinished, file)

    monkeypatch.setattr(Path, "replace", between)
    first.pytest_runtest_logstart("test_of_the_first")
    assert "test_of_the_first" in (tmp_path / "failures.txt").read_text("utf-8")


def test_a_run_that_did_not_come_to_pytest(checkout: Checkout) -> None:
    """What an earlier run has left says nothing."""
    known = checkout.folder / ".cache" / "failures.txt"
    known.parent.mkdir()
    known.write_text("==== 1 failed\n", "utf-8")
    status, lines = checkout.run("echo 'no network'; exit 2")
    assert status == 2
    assert lines[0] == "no network"
    assert "pytest did not start: see above" in lines
    assert not any("1 failed" in line for line in lines)


def test_a_run_that_is_ended_ends_the_tests_and_says_so(checkout: Checkout) -> None:
    process = checkout.start("echo $$; exec sleep 600")
    assert process.stdout is not None
    made = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "==== .ci/run: ended by SIGTERM after " in output
    assert not made.is_running()


def test_a_run_that_passed_ends_in_pytest_s_line_and_is_noted(checkout: Checkout) -> None:
    tests = """
import signal, sys

def test_has_no_input_and_the_signals_of_a_foreground():
    assert sys.stdin.read() == ''
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
"""
    (checkout.folder / "test_sample.py").write_text(tests, "utf-8")
    commit = checkout.commit()
    status, lines = checkout.run(PYTEST + " -s", tests)
    assert (status, checkout.noted()) == (0, [commit])
    assert lines[-1].startswith("1 passed in ")
    assert ": ==== 1 passed in " in (checkout.cache / "quire-ci" / commit).read_text("utf-8")


def test_a_part_of_the_tests_and_a_changed_tree_are_not_noted(checkout: Checkout) -> None:
    tests = "def test_x():\n    pass\n"
    (checkout.folder / "test_sample.py").write_text(tests, "utf-8")
    checkout.commit()
    assert checkout.run(PYTEST, tests, PYTEST_ADDOPTS="-k x")[0] == 0
    assert checkout.noted() == []
    assert checkout.run(PYTEST, tests + "changed = 1\n")[0] == 0
    assert checkout.noted() == []


def test_a_failed_test_shows_the_end_of_its_server_s_log(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(
        "import pytest\n"
        "from tests.fixtures.server import ServerProcess, pytest_runtest_makereport\n"
        "@pytest.fixture\n"
        "def server(tmp_path):\n"
        "    server = ServerProcess(tmp_path, tmp_path)\n"
        "    kernel = 'quire engine[7] INFO linear: avx2 on cpu torch.float32 {}'\n"
        "    server.log.write_text('\\n'.join(f'{kernel}\\nline {i}' for i in range(100)))\n"
        "    return server\n"
    )
    pytester.makepyfile("def test_fails(server):\n    assert 0\n")
    result = pytester.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    shown = [line for line in result.outlines if line.startswith(("line ", "quire engine"))]
    assert shown == [f"line {i}" for i in range(70, 100)]
