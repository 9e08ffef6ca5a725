"""`Batch`: several prompts of token ids as one request, for servers that accept only one such prompt per
request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from quire_client.aio import AsyncStream
from quire_client.types import Chunk, Result, collect

AHEAD = 4
"""Room for chunks that wait for the reader, per stream of the batch. All streams share the queue."""


class Batch(AsyncIterator[Chunk]):
    """Several requests to one model, read as one; a chunk's `batch_index` is the number of its request.

    `start` sends them all. If one fails, all are ended.
    """

    def __init__(self, streams: Sequence[AsyncStream]) -> None:
        self.request_id = streams[0].request_id
        """Id of the first request."""
        self._streams = streams
        self._chunks: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue(AHEAD * len(streams))
        self._readers: list[asyncio.Task[None]] = []
        self._num_open = len(streams)

    async def start(self) -> None:
        """Sends the requests; raises as `AsyncStream.start`."""
        try:
            for stream in self._streams:
                await stream.start()
        except BaseException:
            await self.aclose()
            raise
        self._readers = [
            asyncio.create_task(self._read(number, stream)) for number, stream in enumerate(self._streams)
        ]

    async def _read(self, number: int, stream: AsyncStream) -> None:
        try:
            async for chunk in stream:
                extras = dataclasses.replace(chunk.extras, batch_index=number)
                await self._chunks.put(dataclasses.replace(chunk, extras=extras))
        except Exception as error:
            await self._chunks.put(error)
        else:
            await self._chunks.put(None)

    @property
    def done(self) -> bool:
        return all(stream.done for stream in self._streams)

    def __aiter__(self) -> Batch:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while self._num_open:
                item = await self._chunks.get()
                if isinstance(item, BaseException):
                    raise item
                if item is not None:
                    return item
                self._num_open -= 1
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def result(self) -> Result:
        """Reads all streams to their ends and returns one result with the choices of all."""
        chunks = [chunk async for chunk in self]
        return collect(self.request_id, self._streams[0].model, self._streams[0].started_at, chunks)

    async def aclose(self) -> None:
        """Cancels the requests that have not ended; returns when the server has been told, or has not
        answered for a few seconds."""
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)
        await asyncio.gather(*(stream.cancel() for stream in self._streams))

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
