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
"""Seconds between two readiness probes of a server."""
PROBE_TIMEOUT = 2.0
RECONNECT: tuple[tuple[str, Any], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 2000),
)
"""gRPC options that reconnect soon to a server that was gone; gRPC's default waits for up to two minutes. The
last option bounds one connection attempt to which nothing answers."""


class Server:
    """One of the gateway's servers: its client, whether it is ready, and how many requests it has."""

    def __init__(self, url: str, timeout: float | None) -> None:
        self.url = url
        self.client = AsyncClient(url, timeout=timeout, channel_options=RECONNECT)
        self.is_ready = True
        self._num_starting = 0
        self._streams: weakref.WeakSet[AsyncStream | Batch] = weakref.WeakSet()

    @property
    def num_open(self) -> int:
        """Number of unfinished requests, among those that `start` and `counted` count. A `Batch` is one."""
        return self._num_starting + sum(not stream.done for stream in self._streams)

    async def start(self, starting: Awaitable[Started]) -> Started:
        """Starts a request on this server; it counts in `num_open` from now until it ends."""
        with self.counted():
            stream = await starting
        self._streams.add(stream)
        return stream

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Context manager that counts as one request in `num_open` while it is open."""
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager in which a ConnectError marks the server as not ready, until `ask` finds it
        ready."""
        try:
            yield
        except ConnectError:
            self.is_ready = False
            raise

    async def ask(self) -> bool:
        """Asks the server now whether it is ready, and returns the answer; False if none comes."""
        self.is_ready = await self.client.server_ready(timeout=PROBE_TIMEOUT)
        return self.is_ready

    async def probe(self) -> None:
        """Calls `ask` again and again, with PROBE_INTERVAL seconds between the calls, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(PROBE_INTERVAL)


class Balancer:
    """Chooses a server for a request, among those last seen ready if there are any: the server of the
    request's session, or without a session the one with the fewest requests.

    A request stays with its server, because only this server can cancel it. It is not repeated on another: if
    a server dies, its requests end with an error.

    Args:
        urls: HOST:PORT of the servers' gRPC endpoints.
        timeout: default timeout of the clients' requests, in seconds; None: no limit.

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
        """Returns the server for a request with these parameters. If none is ready, it returns one anyway,
        whose error then says why."""
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
