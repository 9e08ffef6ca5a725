"""Gateway: the OpenAI gateway as a child process of `quire serve`, beside tritonserver."""

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
"""Least seconds from one start of the gateway to the next, as each start computes for a second or two: at
first RESTART_S, doubled with each restart up to MAX_RESTART_S, and RESTART_S again after a run that lasted
longer than MAX_RESTART_S."""

REACH_S = 5.0
"""Seconds from the gateway's first answer until `Gateway.is_ready` no longer waits for it to reach the
server."""


def check_installed() -> None:
    """Raises ConfigError if packages of the gateway are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("quire_client", "uvicorn", "starlette")):
        raise ConfigError("--openai-port: needs the gateway: pip install 'quire-triton-client[openai]'")


class Gateway:
    """`quire-client openai` as a child process. If it ends, `due` says when the caller has to start it again.

    Args:
        address: address at which it listens.
        port: port at which it listens; `bind_port` keeps it free for the gateway.
        grpc_url: the server's gRPC address.
        exit_timeout_s: seconds that answers under way may go on once the gateway is asked to end.
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
        """Time (CLOCK_MONOTONIC seconds) at which the caller has to call `start`; infinite: none is due."""
        self.start()

    def start(self) -> None:
        """Starts the process. Its standard output has an address that may be wrong outside a container, so it
        is dropped."""
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
        """Whether the gateway answers and has reached the server.

        A gateway that could not reach the server tries again in a second, and until then answers that the
        server is away. If the gateway answers, the server counts as reached in any case REACH_S after the
        first answer, because it may restrict questions about its health
        (`--grpc-restricted-protocol=health:...`).
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
        """Collects the exit status of the process, which has ended. Sets `due` to the time of the next start,
        unless `terminate` was called."""
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
        """Asks the process to end once its answers under way have ended (see `exit_timeout_s`). The process
        will not be due for another start."""
        self._is_ending, self.due = True, math.inf
        self._process.terminate()
