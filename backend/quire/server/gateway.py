"""The OpenAI gateway that `quire serve` runs beside tritonserver."""

from __future__ import annotations

import http.client
import importlib.util
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import click

from quire.engine.run_module import RUN_MODULE
from quire.errors import ConfigError

RESTART_S, MAX_RESTART_S = 1.0, 32.0
"""Least and longest time from one start of the gateway to the next: it doubles while gateways end within it,
as each start computes for a second or two."""

REACH_S = 5.0
"""Longest time for its way to a server that is ready."""


def check_installed() -> None:
    """Raises ConfigError where the gateway's packages are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("quire_client", "uvicorn", "starlette")):
        raise ConfigError("--openai-port: needs the gateway: pip install 'quire-triton-client[openai]'")


class Gateway:
    """`quire-client openai` as a child process. Where it ends while the server serves, it starts again.

    Args:
        address: it listens at.
        port: it listens at; held for it (`bind_port`).
        grpc_url: the server's gRPC address.
        exit_timeout_s: that answers under way have to end, once it is asked to.
        prepare: runs in the child before the gateway.
    """

    def __init__(
        self, address: str, port: int, grpc_url: str, exit_timeout_s: int, prepare: Callable[[], None]
    ) -> None:
        self._address, self._port = address, port
        command = [sys.executable, RUN_MODULE, "quire_client.cli", "openai", "--url", grpc_url]
        command += ["--host", address, "--port", str(port)]
        self._command = [*command, "--exit-timeout", str(exit_timeout_s)]
        # gRPC would go by the environment's proxy to an address of this machine that is not 127.0.0.1, too.
        server = grpc_url.rpartition(":")[0].strip("[]")
        self._environment = {**os.environ, "no_grpc_proxy": server}
        self._prepare = prepare
        self._started_at = -math.inf
        self._restart_s = RESTART_S
        self._is_ending = False
        self._answers_since: float | None = None
        self.due = math.inf
        """Time (monotonic) of the next start; infinite while the process runs."""
        self.start()

    def start(self) -> None:
        """Starts the process. What it prints is an address that may be another one outside a container."""
        self._started_at, self.due = time.monotonic(), math.inf
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=self._prepare,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, probe_address: str) -> bool:
        """Whether it answers, and has reached the server: one that was asked while models were loading tries
        again in a second, and says until then that the server is away.

        A server that hides from it whether it is ready (`--grpc-restricted-protocol=health:...`) is taken for
        reached after REACH_S.
        """
        connection = http.client.HTTPConnection(probe_address, self._port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if self._answers_since is None:
            self._answers_since = time.monotonic()
        return status == 200 or time.monotonic() - self._answers_since > REACH_S

    def reap(self) -> None:
        """Takes the status of a process that has ended, and plans the next start."""
        status = self._process.wait()
        if self._is_ending:
            return
        click.echo(f"quire: the OpenAI gateway ended with status {status}; its reasons are above", err=True)
        now = time.monotonic()
        if now - self._started_at > MAX_RESTART_S:
            self._restart_s = RESTART_S
        self.due = max(now, self._started_at + self._restart_s)
        self._restart_s = min(2 * self._restart_s, MAX_RESTART_S)

    def terminate(self) -> None:
        """Asks the process to end with the answers under way; no other one is started."""
        self._is_ending, self.due = True, math.inf
        self._process.terminate()
