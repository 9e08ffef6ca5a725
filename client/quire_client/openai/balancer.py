"""`Balancer`: several servers with the same models behind one gateway."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import weakref
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from quire_client.aio import AsyncClient, AsyncStream
from quire_client.errors import ConnectError
from quire_client.openai.batch import Batch

Started = TypeVar("Started", bound=AsyncStream | Batch)

PROBE_INTERVAL = 1.0
"""Seconds between two questions to a server whether it is ready."""
PROBE_TIMEOUT = 2.0
RECONNECT: tuple[tuple[str, Any], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),
)
"""How soon a server that was gone is tried again: gRPC by itself waits for up to two minutes. The last bounds
one attempt where nothing answers."""


class Server:
    """One of the servers, and which requests it has."""

    def __init__(self, url: str, timeout: float | None) -> None:
        self.url = url
        self.client = AsyncClient(url, timeout=timeout, channel_options=RECONNECT)
        self.is_ready = True
        self._num_starting = 0
        self._streams: weakref.WeakSet[AsyncStream | Batch] = weakref.WeakSet()

    @property
    def num_open(self) -> int:
        """Requests that it was given and that are not over."""
        return self._num_starting + sum(not stream.done for stream in self._streams)

    async def start(self, starting: Awaitable[Started]) -> Started:
        """A request of this server, counted from now on."""
        with self.counted():
            stream = await starting
        self._streams.add(stream)
        return stream

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts as a request while it lasts."""
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which a ConnectError marks the server as not ready, until `ask` finds it ready again."""
        try:
            yield
        except ConnectError:
            self.is_ready = False
            raise

    async def ask(self) -> bool:
        """Whether it is ready, asked now."""
        self.is_ready = await self.client.server_ready(timeout=PROBE_TIMEOUT)
        return self.is_ready

    async def probe(self) -> None:
        """Asks for ever."""
        while True:
            await self.ask()
            await asyncio.sleep(PROBE_INTERVAL)


class Balancer:
    """Gives each request a server that is ready: the one of its session, else that with the fewest streams.

    A request stays with its server, which alone can cancel it. Nothing is sent twice: what a server had that
    dies, ends with an error.

    Args:
        urls: HOST:PORT of the servers' gRPC endpoints.
        timeout: seconds for one request, None: no limit.

    Raises:
        InvalidArgument: a bad address or timeout.
    """

    def __init__(self, urls: Sequence[str], timeout: float | None) -> None:
        self.servers = [Server(url, timeout) for url in urls]
        self._probes: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Balancer:
        if len(self.servers) > 1:
            self._probes = [asyncio.create_task(server.probe()) for server in self.servers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for server in self.servers:
            await server.client.close()

    def pick(self, sampling: Mapping[str, Any] | None = None) -> Server:
        """A server for a request with these parameters; any where none is ready: its error tells why."""
        ready = [server for server in self.servers if server.is_ready] or self.servers
        session = (sampling or {}).get("session")
        if session is None:
            return min(ready, key=lambda server: server.num_open)
        # Rendezvous hashing: when a server goes, only its own sessions move.
        key = f"{(sampling or {}).get('tenant', '')}\0{session}".encode("utf-8", "surrogatepass")
        return max(ready, key=lambda server: hashlib.sha256(server.url.encode() + b"\0" + key).digest())

    async def health(self) -> dict[str, bool]:
        """Whether each server is ready, by its address."""
        answers = await asyncio.gather(*(server.ask() for server in self.servers))
        return {server.url: ready for server, ready in zip(self.servers, answers, strict=True)}
