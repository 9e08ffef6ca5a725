"""The gateway as a process: its socket and uvicorn."""

from __future__ import annotations

import asyncio
import copy
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvicorn.config
import uvicorn.logging
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire_client import _connection as conn
from quire_client.openai.app import GatewaySettings, create_app

GRACE_S = 5
"""Default number of seconds that running answers have to finish after SIGTERM or Ctrl-C."""
HEADER_TIMEOUT = 20.0
"""Most seconds from the opening of a connection, or from the first byte of a later request, to the end of the
request's headers."""
MAX_CONNECTIONS = 4096
"""Number of open connections at which uvicorn begins to answer requests with 503."""


class _Protocol(H11Protocol):
    """Uvicorn's protocol for HTTP/1.1, which here also closes connections on which a request's headers do not
    arrive in time. Uvicorn itself keeps these open: it limits the silence after an answer."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Starts the timer for the next request's headers unless it runs. Stops it while a request is being
        answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watch()
        elif self._late is None:
            self._late = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)

    def _stop_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class LogFormatter(uvicorn.logging.DefaultFormatter):
    """Uvicorn's log formatter, with tracebacks that lack the texts of the exceptions: these may repeat what a
    client wrote."""

    def formatException(self, ei: Any) -> str:
        parts: list[str] = []
        error: BaseException | None = ei[1]
        while error is not None and len(parts) < 10:
            parts.append("".join([*traceback.format_tb(error.__traceback__), type(error).__name__]))
            error = error.__cause__ or error.__context__
        return "\nled to\n".join(reversed(parts))


@dataclass(frozen=True)
class Tls:
    """Paths of two files in PEM: a certificate with its chain, and its private key, which has no password."""

    certificate: Path
    key: Path


def make_config(app: Starlette, tls: Tls | None = None, grace_s: int = GRACE_S) -> uvicorn.Config:
    """Returns the uvicorn configuration for the gateway's application."""
    logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["formatters"]["default"]["()"] = LogFormatter
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=logs,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=grace_s,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )


def serve(
    settings: GatewaySettings,
    host: str,
    port: int,
    *,
    listening: Callable[[str], None],
    tls: Tls | None = None,
    grace_s: int = GRACE_S,
) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
        port: port to listen on; 0: any free one.
        listening: called with the base URL for clients once connections are accepted.
        tls: certificate and key; None: plain HTTP.
        grace_s: seconds that running answers have to finish after SIGTERM or Ctrl-C.

    Raises:
        InvalidArgument: a bad address or timeout of the server.
        ValueError: the file of keys is wrong, or the log, the certificate or its key cannot be used.
        OSError: the gateway cannot listen on the address.
    """
    for url in settings.urls:
        conn.Settings(url, settings.timeout)
    config = make_config(create_app(settings), tls, grace_s)
    if tls is not None:
        try:
            config.load()
        except OSError as error:
            raise ValueError(f"{tls.certificate}, {tls.key}: {error.strerror or error}") from None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=config.backlog) as listener:
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        listening(f"{scheme}://{shown}:{listener.getsockname()[1]}/v1")
        uvicorn.Server(config).run(sockets=[listener])
