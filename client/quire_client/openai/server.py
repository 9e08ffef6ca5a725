"""The gateway as a process: its socket and uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from quire_client import _connection as conn
from quire_client.openai.app import GatewaySettings, create_app

GRACE = 5
"""Seconds that answers under way have to end after SIGTERM or Ctrl-C."""


def serve(settings: GatewaySettings, host: str, port: int, *, listening: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Args:
        port: 0 takes a free one.
        listening: is told the base URL for clients, once connections are accepted.

    Raises:
        InvalidArgument: a bad address or timeout of the server.
        OSError: the address cannot be listened at.
    """
    conn.Settings(settings.url, settings.timeout)
    config = uvicorn.Config(
        create_app(settings),
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=config.backlog) as listener:
        shown = f"[{host}]" if ":" in host else host
        listening(f"http://{shown}:{listener.getsockname()[1]}/v1")
        uvicorn.Server(config).run(sockets=[listener])
