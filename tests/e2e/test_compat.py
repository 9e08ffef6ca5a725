"""The script for other servers (tests/compat) on the one here, 24.10, whose own faults it has to name."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import tests.compat.__main__ as compat
from tests.compat import checks
from tests.compat.site import Failed, Known, NotShown, Site
from tests.fixtures.server import MODEL_REPOSITORY, ROOT, ServeRepository, ServerProcess

PASSED = (
    "two_requests",
    "long_stream",
    "ensemble",
    "cancellation",
    "slow_reader",
    "empty_list",
    "big_bodies",
    "bad_header",
)
KEY = "control=open"
EXPLICIT = (
    "--",
    "--model-control-mode=explicit",
    "--load-model=*",
    f"--http-restricted-api=model-repository:{KEY}",
    f"--grpc-restricted-protocol=model-repository:{KEY}",
)


def lines(server: ServerProcess, *options: str, status: int = 0) -> dict[str, str]:
    """State by check, in the order of the script's lines."""
    command = [sys.executable, "-m", "tests.compat", f"grpc://{server.grpc_url}", f"http://{server.http_url}"]
    run = subprocess.run(
        [*command, "--seconds", "2", *options], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    print(run.stdout)
    assert run.returncode == status, run.stdout + run.stderr
    first, *rest = run.stdout.splitlines()
    assert first == "Triton 2.51: generator, chat"
    return {line[11:].partition(":")[0]: line[:11].strip() for line in rest}


@pytest.mark.slow
def test_each_check_passes(demo_server: ServerProcess) -> None:
    assert lines(demo_server) == {**dict.fromkeys(PASSED, "pass"), "unload": "not shown"}


@pytest.mark.slow
def test_models_are_unloaded_an_engine_is_killed_and_the_server_ends(
    serve_repository: ServeRepository,
) -> None:
    server = serve_repository(MODEL_REPOSITORY, *EXPLICIT)
    found = lines(server, "--key", KEY, "--pid", str(server.pid))
    assert found == dict.fromkeys((*PASSED, "unload", "engine_killed", "sigterm"), "pass")
    assert server.process is not None
    print(f"exit status {server.process.wait(60)}")
    assert server.leftovers() == []


@pytest.mark.slow
def test_a_killed_stub_is_a_known_fault_of_24_10(serve_repository: ServeRepository) -> None:
    server = serve_repository(MODEL_REPOSITORY, "--load-model=chat", "--load-model=generator_unary")
    found = lines(server, "--pid", str(server.pid), "--kill-stub")
    assert found == {**dict.fromkeys(PASSED, "pass"), "unload": "not shown", "stub_killed": "known"}


def test_what_a_version_is_known_for_is_no_fault_of_it_alone() -> None:
    """26.08 is not sent the header that ends it, and refuses an empty list; 24.10 may do neither."""
    refused = b'{"error":"a tensor without dimensions"}'

    def site(*version: int) -> Any:
        options = SimpleNamespace(dangerous=False)
        return SimpleNamespace(version=version, options=options, unary="", generate=lambda _: (400, refused))

    with pytest.raises(Known, match=r"26\.06 to 26\.08"):
        checks.bad_header(site(2, 72))
    with pytest.raises(NotShown, match="no model"):
        checks.bad_header(site(2, 73))
    with pytest.raises(Known, match="without dimensions"):
        checks.empty_list(site(2, 72))
    with pytest.raises(Failed, match="without dimensions"):
        checks.empty_list(site(2, 51))


def test_a_fault_is_a_line_and_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next check runs all the same."""

    def failing(site: object) -> str:
        raise Failed("on purpose")

    def raising(site: object) -> str:
        raise KeyError("by mistake")

    made = SimpleNamespace(version=(2, 51), generator="generator", ensemble="", check_alive=lambda: None)
    monkeypatch.setattr(compat, "Site", lambda options: made)
    monkeypatch.setattr(compat, "CHECKS", (failing, raising))
    monkeypatch.setattr(sys, "argv", ["compat", "grpc://localhost:1", "http://localhost:1"])
    assert compat.main() == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "FAIL       failing: on purpose",
        "FAIL       raising: KeyError: 'by mistake'",
    ]


@pytest.mark.parametrize(
    "body",
    [None, b"<html>", b"{}", b"[]", b'{"version": "dev"}', b'{"version": "2.73.0"}'],
    ids=["nobody", "page", "no-version", "list", "word", "no-grpc"],
)
def test_without_a_server_it_is_one_line(
    body: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no Triton, or has no gRPC there, ended it by a traceback."""
    if body is not None:
        monkeypatch.setattr(Site, "http", lambda *_: (200, body))
    monkeypatch.setattr(sys, "argv", ["compat", "grpc://localhost:1", "http://localhost:1"])
    assert compat.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL       server: ")


def test_it_ends_although_a_failed_check_has_left_a_stream_open() -> None:
    """The thread of the stream was waited for, for ever, behind the last line."""
    program = (
        "import runpy, sys, threading\nthreading.Thread(target=threading.Event().wait).start()\n"
        "sys.argv = ['compat', 'grpc://localhost:1', 'http://localhost:1']\n"
        "runpy.run_module('tests.compat', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert run.returncode == 1 and run.stdout.startswith(b"FAIL       server: ")


@pytest.mark.parametrize("option", ["--kill-stub", "--key=control"])
def test_an_option_that_would_do_nothing_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compat", "grpc://localhost:1", "http://localhost:1", option])
    with pytest.raises(SystemExit, match="2"):
        compat.main()
    assert option.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]
