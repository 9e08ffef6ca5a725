"""Streams answers as server-sent events, and cancels a request when its HTTP client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from quire_client.aio import AsyncStream
from quire_client.errors import QuireClientError
from quire_client.openai.batch import Batch
from quire_client.openai.errors import describe
from quire_client.openai.observer import GONE, Exchange
from quire_client.openai.replies import ReplyFormat
from quire_client.types import Chunk

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Else nginx collects the events into one.
    (b"x-accel-buffering", b"no"),
]


class Exchanges:
    """Work that runs for HTTP clients. Each piece of work is cancelled when its client disconnects."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, receive: Any, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` and returns its result; cancels it when the client disconnects or this task is
        cancelled.

        The work runs in a plain task. A task group of anyio would cancel again at every `await`, also at
        those with which the cancelled work tells the server that the request is over.

        Args:
            receive: the request's ASGI `receive`; the body has already been read.

        Raises:
            ClientDisconnect: the client disconnected before the work was done.
            Exception: raised by the work.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # taken, so that asyncio does not report it as lost

    async def close(self) -> None:
        """Cancels all running work, and waits until it has ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class EventStream:
    """ASGI response: the chunks of a stream as `data: {...}` events, ended by `data: [DONE]`.

    The status 200 is sent at once. So a QuireClientError of the stream becomes an event
    `data: {"error": {...}}`, after which no `[DONE]` follows.
    """

    exchanges: Exchanges
    stream: AsyncStream | Batch
    first: Chunk | None
    """First chunk, which was already read from the stream; None if the stream ended before it."""
    reply: ReplyFormat
    num_choices: int
    exchange: Exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = asyncio.Event()
        try:
            await self.exchanges.run(receive, self._send(send, sent))
        except ClientDisconnect:
            if not sent.is_set():  # closing the connection after the answer's end is a disconnect, too
                self.exchange.status = GONE

    async def _send(self, send: Any, sent: asyncio.Event) -> None:
        async with self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for event in self._events():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            sent.set()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        counts_tokens = self.exchange.counts_tokens or self.reply.include_usage
        lengths: dict[int, int] = {}
        open_choices = set(range(self.num_choices))
        for index in sorted(open_choices):
            opening = self.reply.opening(index)
            if opening is not None:
                yield _event(opening)
        try:
            async for chunk in self._chunks():
                if counts_tokens:
                    self.exchange.streamed(chunk)
                index = self.reply.index_of(chunk)
                length, is_first = lengths.get(index, 0), index not in lengths
                delta = self.reply.delta(chunk, length, is_first=is_first)
                lengths[index] = length + len(chunk.text)
                counts = self.exchange.usage if self.reply.continuous_usage else None
                if delta is not None:
                    yield _event(_with_usage(delta, counts))
                if chunk.finish_reason:
                    open_choices.discard(index)
                    yield _event(_with_usage(self.reply.closing(index, chunk), counts))
        except QuireClientError as error:
            yield _event(describe(error)[1])
            return
        for index in sorted(open_choices):
            yield _event(self.reply.closing(index, None))
        if self.reply.include_usage:
            yield _event(self.reply.counts(self.exchange.usage))
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[Chunk]:
        if self.first is not None:
            yield self.first
        async for chunk in self.stream:
            yield chunk


def _with_usage(part: dict[str, Any], counts: dict[str, Any] | None) -> dict[str, Any]:
    return part if counts is None else {**part, "usage": counts}


def _event(value: dict[str, Any]) -> bytes:
    # JSON escapes line breaks, so an event is one line whatever its text holds.
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
