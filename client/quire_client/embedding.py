"""Embeddings and scores of any number of prompts or pairs of texts: one request for each, at most `MAX_OPEN`
at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from quire_client import _connection as conn
from quire_client.errors import Cancelled, DeadlineExceeded, InvalidArgument, ProtocolError, QuireClientError
from quire_client.protocol import ModelSchema
from quire_client.types import Chunk, Embeddings, Message, Scores

MAX_OPEN = 64
"""Most requests of one call that are in flight at a time; the server batches them."""
_COUNTS = ("finish_reason", "num_input_tokens", "num_cached_tokens")
OUTPUTS = ("embedding", *_COUNTS)
SCORE_OUTPUTS = ("scores", "label", *_COUNTS)
_PROMPT = re.compile(r"(text_input|text_pair|input_ids|messages|prompt): ")

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A prompt, as text or as token ids, or several prompts."""


class ChunkStream(AsyncIterable[Chunk], Protocol):
    """Part of `AsyncStream` that is used here: the chunks of one request's answer."""

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...


class StreamingClient(Protocol):
    """Part of `AsyncClient` that is used here: a model's schema, and answers as streams."""

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
    asked = [(where, _source(prompt)) for where, prompt in _each(prompts, name)]
    chunks = await _pooled(client, asked, OUTPUTS, model=model, timeout=timeout, arguments=arguments)
    return Embeddings(tuple(chunk.extras.embedding for chunk in chunks), *_counts(chunks))


async def classify(
    client: StreamingClient,
    prompts: Prompts,
    *,
    model: str,
    timeout: float | None,
    name: str = "prompts",
    **arguments: Any,
) -> Scores:
    """Implementation of `AsyncClient.classify`.

    Args:
        name: what errors call `prompts`.
    """
    asked = [(where, _source(prompt)) for where, prompt in _each(prompts, name)]
    return await _scores(client, asked, model, timeout, arguments)


async def classify_messages(
    client: StreamingClient,
    messages: Sequence[Message] | Mapping[str, Any] | bytes,
    *,
    model: str,
    timeout: float | None,
    **arguments: Any,
) -> Scores:
    """Returns the scores of a conversation, as reward models give them.

    Args:
        messages: list of messages, an object {"messages": ..., ...}, or JSON text of either.
    """
    asked = [("messages", {"messages": messages})]
    return await _scores(client, asked, model, timeout, arguments)


async def score(
    client: StreamingClient,
    firsts: str | Sequence[str],
    seconds: Sequence[str],
    *,
    model: str,
    timeout: float | None,
    name: str = "seconds",
    **arguments: Any,
) -> Scores:
    """Implementation of `AsyncClient.score`.

    Args:
        name: what errors call `seconds`.
    """
    if not isinstance(firsts, str) and len(firsts) != len(seconds):
        raise InvalidArgument(f"{name}: must be as many as the first texts ({len(firsts)}), or these be one")
    each = [firsts] * len(seconds) if isinstance(firsts, str) else firsts
    asked = [
        (f"{name}[{item}]", {"prompt": first, "text_pair": [second]})
        for item, (first, second) in enumerate(zip(each, seconds, strict=True))
    ]
    return await _scores(client, asked, model, timeout, arguments)


async def _scores(
    client: StreamingClient,
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    model: str,
    timeout: float | None,
    arguments: Mapping[str, Any],
) -> Scores:
    chunks = await _pooled(client, asked, SCORE_OUTPUTS, model=model, timeout=timeout, arguments=arguments)
    values, labels = (tuple(getattr(chunk.extras, name) for chunk in chunks) for name in ("scores", "label"))
    return Scores(values, labels, *_counts(chunks))


async def _pooled(
    client: StreamingClient,
    asked: Sequence[tuple[str, Mapping[str, Any]]],
    outputs: tuple[str, ...],
    *,
    model: str,
    timeout: float | None,
    arguments: Mapping[str, Any],
) -> list[Chunk]:
    """Sends requests and returns the chunk with the result of each, in their order.

    Args:
        asked: what errors call each prompt, and its arguments.
        outputs: outputs to ask for, if the model has them; the first is the result.
    """
    deadline, wanted = conn.Deadline(timeout), outputs[0]
    schema = await client._schema(model, deadline)
    if schema.outputs is not None and wanted not in schema.outputs:
        kind = "embeddings" if wanted == "embedding" else "scores"
        raise InvalidArgument(f"model: {model!r} gives no {kind}")
    under_way: deque[tuple[str, ChunkStream]] = deque()
    chunks: list[Chunk] = []

    async def collect_next() -> None:
        which, stream = under_way.popleft()
        try:
            chunks.append(_only([chunk async for chunk in stream], wanted))
        except QuireClientError as error:
            error.message = _PROMPT.sub(f"{which}: ", error.message, count=1)
            error.args = (error.message,)
            raise

    try:
        for which, given in asked:
            stream = client._answer(
                **{"prompt": None, **given},
                model=model,
                timeout=deadline.remaining(),
                outputs=[output for output in outputs if output in (schema.outputs or outputs)],
                **arguments,
            )
            under_way.append((which, stream))
            await stream.start()
            if len(under_way) == MAX_OPEN:
                await collect_next()
        while under_way:
            await collect_next()
    finally:
        for _, stream in under_way:
            await stream.aclose()
    return chunks


def _each(prompts: Prompts, name: str) -> Iterable[tuple[str, str | Sequence[int]]]:
    """Yields for each prompt what errors call it, and the prompt."""
    # Whatever kind of number a token id is, it has no length.
    is_one = isinstance(prompts, str) or (
        len(prompts) > 0 and not any(hasattr(one, "__len__") for one in prompts)
    )
    if is_one:
        yield name, prompts  # type: ignore[misc]
        return
    for item, prompt in enumerate(prompts):
        yield f"{name}[{item}]", prompt  # type: ignore[misc]


def _source(prompt: str | Sequence[int]) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def _counts(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Returns the input tokens of all prompts together, and those of them that the server's cache had."""
    counts = ((chunk.num_input_tokens or 0, chunk.num_cached_tokens or 0) for chunk in chunks)
    num_input, num_cached = (sum(each) for each in zip(*counts, strict=True)) if chunks else (0, 0)
    return num_input, num_cached


def _only(chunks: Sequence[Chunk], wanted: str) -> Chunk:
    """Returns the chunk that holds the result; raises if the request ended without one."""
    for chunk in chunks:
        if getattr(chunk.extras, wanted):
            return chunk
    reason = next((chunk.finish_reason for chunk in reversed(chunks)), None)
    if reason == "timeout":
        raise DeadlineExceeded("the request's deadline passed before its result was there")
    if reason == "cancelled":
        raise Cancelled("the request was cancelled by its id")
    raise ProtocolError(f"the answer has no {wanted}")
