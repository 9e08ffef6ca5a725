"""A server for the time of a benchmark: `quire serve` on free ports, stopped at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from quire_client import Client

STOP_TIMEOUT = 20.0
POLL = 0.1
PACKAGE_FOLDERS = ("backend", "kernels", "ensemble", "common", "client")
ROLES = ("server", "stub", "engine")


def package_path(checkout: Path) -> dict[str, str]:
    """What a process's environment needs to run the code of another checkout."""
    return {"PYTHONPATH": os.pathsep.join(str(checkout / folder) for folder in (*PACKAGE_FOLDERS, ""))}


@dataclass(frozen=True)
class Served:
    """A running server: HOST:PORT of its gRPC endpoint, and the process id of its `quire serve`."""

    url: str
    pid: int

    def processes(self) -> dict[str, list[int]]:
        """Process ids of tritonserver, of the frontends (stubs) and of the engines."""
        found: dict[str, list[int]] = {role: [] for role in ROLES}
        for one in psutil.Process(self.pid).children(recursive=True):
            command = one.cmdline()
            if one.name() == "tritonserver":
                found["server"].append(one.pid)
            elif "quire.engine.loop" in command:
                found["engine"].append(one.pid)
            elif command and command[0].endswith("triton_python_backend_stub"):
                found["stub"].append(one.pid)
        return found


@contextmanager
def served(
    repository: Path,
    *,
    log: Path,
    timeout: float = 300.0,
    env: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Iterator[Served]:
    """Serves a model repository; yields once it answers.

    Args:
        env: added to the environment.
        checkout: of Quire, whose code serves; None: the one that is installed.

    Raises:
        click.ClickException: it ended or was not ready in time, with the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        ready = Path(folder) / "ready.json"
        command = [
            *(sys.executable, "-m", "quire.cli", "serve", "--model-repository", str(repository)),
            *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--ready-file", str(ready)),
        ]
        added = {**(env or {}), **({} if checkout is None else package_path(checkout))}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | added)
        try:
            yield Served(_wait(process, ready, log, time.monotonic() + timeout), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path, end: float) -> str:
    while not ready.is_file():
        if process.poll() is not None or time.monotonic() > end:
            words = log.read_text("utf-8", "replace").splitlines()[-8:]
            what = "ended" if process.returncode is not None else "is not ready in time"
            raise click.ClickException("\n".join([f"the server {what}; its last lines:", *words]))
        time.sleep(POLL)
    url = str(json.loads(ready.read_text("utf-8"))["grpc"])
    wait_ready(url, end - time.monotonic())
    return url


def wait_ready(url: str, timeout: float) -> None:
    """Waits until the gRPC endpoint says that the server and its models are ready.

    Raises:
        click.ClickException: not within `timeout` seconds.
    """
    end = time.monotonic() + timeout
    with Client(url) as client:
        while not client.server_ready(timeout=2.0):
            if time.monotonic() > end:
                raise click.ClickException(f"{url}: no server is ready there")
            time.sleep(POLL)
