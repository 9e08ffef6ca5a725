"""Values that the client returns: chunks of a stream, results of whole requests, models of a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""One chat message: {"role": "user", "content": "..."}."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a streamed answer. The server may put several tokens into one chunk."""

    text: str
    """New text since the last chunk of this choice; may be empty while a character is incomplete."""
    token_ids: tuple[int, ...] = ()
    """New token ids; empty when the model does not return them."""
    finish_reason: str | None = None
    """`stop`, `length` ... on the last chunk of a choice, None before."""
    index: int = 0
    """Number of the choice."""
    final: bool = False
    """True on the last chunk of the request (never, where the server sends its final flag alone)."""
    logprobs: Any = None
    """Parsed JSON of the model's `logprobs` output, aligned with `token_ids`."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    """Tokens of this chunk, as the server counts them."""
    received_at: float = 0.0
    """`time.perf_counter()` when the response arrived, seconds."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the server's KV cache had."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the choice so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens in this chunk, by the ids or else by the server's count; 0 when neither is known."""
        if self.token_ids:
            return len(self.token_ids)
        return self.num_output_tokens or 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request as the client saw them, in seconds from sending it."""

    ttft: float | None
    """Time until the first token (or text) came; None when the answer was empty."""
    total: float
    num_tokens: int
    """Output tokens of all choices; 0 when the model does not tell."""

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over the whole time."""
        return self.num_tokens / self.total if self.num_tokens and self.total > 0 else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[Any, ...] = ()
    """The `logprobs` of each response in turn."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities, where the choices were ranked by it (best_of, beam search)."""


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a finished request returned."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    timing: Timing
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Input tokens that the server's KV cache had."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        return self.timing.num_tokens


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model of a server's repository."""

    name: str
    version: str
    state: str
    """READY, LOADING, UNAVAILABLE ..."""
    reason: str = ""
    """Why it is not ready."""
    ready: bool = False
    kind: str = ""
    """`ensemble`, the backend's name (`quire`, `python` ...), or empty when the server does not tell."""
    decoupled: bool | None = None
    """True: may stream; None: unknown."""


def collect(request_id: str, model: str, started_at: float, chunks: Sequence[Chunk]) -> Result:
    """The result that a request's chunks add up to; without any it is one empty choice.

    Args:
        started_at: `time.perf_counter()` at sending. The answer's time ends with the last chunk, not with the
            transport's own end after it.
    """
    end = chunks[-1].received_at if chunks else time.perf_counter()
    first = next((c.received_at for c in chunks if c.text or c.num_tokens), None)
    ttft = None if first is None else first - started_at
    indices = sorted({c.index for c in chunks}) or [0]
    return Result(
        request_id,
        model,
        tuple(_choice(i, [c for c in chunks if c.index == i]) for i in indices),
        Timing(ttft, end - started_at, sum(c.num_tokens for c in chunks)),
        next((c.num_input_tokens for c in chunks if c.num_input_tokens is not None), None),
        next((c.num_cached_tokens for c in chunks if c.num_cached_tokens is not None), None),
    )


def _choice(index: int, chunks: Sequence[Chunk]) -> Choice:
    reasons = [c.finish_reason for c in chunks if c.finish_reason]
    sums = [c.cumulative_logprob for c in chunks if c.cumulative_logprob is not None]
    return Choice(
        index,
        "".join(c.text for c in chunks),
        tuple(t for c in chunks for t in c.token_ids),
        reasons[-1] if reasons else None,
        tuple(c.logprobs for c in chunks if c.logprobs is not None),
        sums[-1] if sums else None,
    )
