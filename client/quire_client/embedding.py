"""Embeddings of any number of prompts: one request per prompt, at most `MAX_OPEN` at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterable, Sequence
from typing import Any, Protocol

from quire_client import _connection as conn
from quire_client.errors import Cancelled, DeadlineExceeded, InvalidArgument, ProtocolError, QuireClientError
from quire_client.protocol import ModelSchema
from quire_client.types import Chunk, Embeddings

MAX_OPEN = 64
"""Most requests in flight at a time; the server batches them."""
OUTPUTS = ("embedding", "finish_reason", "num_input_tokens", "num_cached_tokens")
_PROMPT = re.compile(r"(text_input|input_ids|prompt): ")

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A text, its token ids, or several of either."""


class ChunkStream(AsyncIterable[Chunk], Protocol):
    """Part of `AsyncStream` that `embed` uses: the chunks of one request's answer."""

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


class StreamingClient(Protocol):
    """Part of `AsyncClient` that `embed` uses: a model's schema, and answers as streams."""

    async def _schema(self, model: str, deadline: conn.Deadline | None = None) -> ModelSchema: ...

    def _answer(self, prompt: str | None, **arguments: Any) -> ChunkStream: ...


async def embed(
    client: StreamingClient,
    prompts: Prompts,
    *,
    model: str,
    timeout: float | None,
    name: str = "prompts",
    **arguments: Any,
) -> Embeddings:
    """Implementation of `AsyncClient.embed`.

    Args:
        name: what errors call `prompts`.
    """
    deadline = conn.Deadline(timeout)
    schema = await client._schema(model, deadline)
    if schema.outputs is not None and "embedding" not in schema.outputs:
        raise InvalidArgument(f"model: {model!r} gives no embeddings")
    # Whatever kind of number a token id is, it has no length.
    is_one = isinstance(prompts, str) or (
        len(prompts) > 0 and not any(hasattr(one, "__len__") for one in prompts)
    )
    under_way: deque[ChunkStream] = deque()
    chunks: list[Chunk] = []

    async def collect_next() -> None:
        stream = under_way.popleft()
        try:
            chunks.append(_only([chunk async for chunk in stream]))
        except QuireClientError as error:
            which = name if is_one else f"{name}[{len(chunks)}]"
            error.message = _PROMPT.sub(f"{which}: ", error.message, count=1)
            error.args = (error.message,)
            raise

    try:
        for prompt in [prompts] if is_one else prompts:
            given: dict[str, Any] = {} if isinstance(prompt, str) else {"input_ids": prompt}
            stream = client._answer(
                prompt if isinstance(prompt, str) else None,
                model=model,
                timeout=deadline.remaining(),
                outputs=[output for output in OUTPUTS if output in (schema.outputs or OUTPUTS)],
                **given,
                **arguments,
            )
            under_way.append(stream)
            await stream.start()
            if len(under_way) == MAX_OPEN:
                await collect_next()
        while under_way:
            await collect_next()
    finally:
        for stream in under_way:
            await stream.aclose()
    return Embeddings(
        tuple(chunk.extras.embedding for chunk in chunks),
        sum(chunk.num_input_tokens or 0 for chunk in chunks),
        sum(chunk.num_cached_tokens or 0 for chunk in chunks),
    )


def _only(chunks: Sequence[Chunk]) -> Chunk:
    """Returns the chunk that holds the embedding; raises if the request ended without one."""
    for chunk in chunks:
        if chunk.extras.embedding:
            return chunk
    reason = next((chunk.finish_reason for chunk in reversed(chunks)), None)
    if reason == "timeout":
        raise DeadlineExceeded("the request's deadline passed before its embedding was there")
    if reason == "cancelled":
        raise Cancelled("the request was cancelled by its id")
    raise ProtocolError("the answer has no embedding")
