"""Values that the client returns: chunks of a stream, results of whole requests, models of a server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""One chat message: {"role": "user", "content": "..."}."""


ToolCall = dict[str, Any]
"""One call of a tool in OpenAI's form: {"id": ..., "type": "function", "function": {"name": ...,
"arguments": "..."}}. A delta also has an `index`, the number of the call that it extends."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields that few responses have: reasoning, tool calls, the prompt's log-probabilities, and others."""

    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str | None = None
    server_timing: Mapping[str, Any] | None = None
    num_reasoning_tokens: int | None = None
    prompt_logprobs: Any = None
    batch_index: int = 0
    embedding: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    label: str = ""


NO_EXTRAS = Extras()


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
    extras: Extras = NO_EXTRAS
    """The rare fields. They are one field because each field of a chunk costs time in every response."""

    @property
    def reasoning(self) -> str:
        """New text of what the model thinks before it answers."""
        return self.extras.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """New pieces of calls, see `ToolCall`."""
        return self.extras.tool_calls

    @property
    def stop_reason(self) -> str | None:
        """The stop string, or the token id as text, that ended the choice; on its last chunk."""
        return self.extras.stop_reason

    @property
    def server_timing(self) -> Mapping[str, Any] | None:
        """Milliseconds in the server so far (`queue`, `prefill` ...) and some counts, if asked for; else
        None. The values of a choice's last chunk cover its whole time."""
        return self.extras.server_timing

    @property
    def prompt_logprobs(self) -> Any:
        """Parsed JSON of the model's `prompt_logprobs` output, on one chunk per prompt; else None."""
        return self.extras.prompt_logprobs

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens of the choice so far, if asked for; else None."""
        return self.extras.num_reasoning_tokens

    @property
    def batch_index(self) -> int:
        """Number of the prompt, where the request has several."""
        return self.extras.batch_index

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
        """Output tokens divided by `total`; None when their number is 0 or unknown."""
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
    reasoning: str = ""
    """Text of the model's reasoning before its answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str | None = None
    """The stop string, or the token id as text, that ended the choice; None if neither did."""
    server_timing: Mapping[str, Any] | None = None
    """Milliseconds in the server and some counts, if asked for; else None."""
    num_reasoning_tokens: int | None = None
    batch_index: int = 0
    """Number of the prompt, if the request has several. The choices of each prompt begin at `index` 0."""


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
    prompt_logprobs: tuple[Any, ...] = ()
    """`prompt_logprobs` of each prompt in turn, up to the last that has some; None for a prompt whose request
    ended before its first token. Empty if not asked for."""

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def stop_reason(self) -> str | None:
        return self.choices[0].stop_reason

    @property
    def server_timing(self) -> Mapping[str, Any] | None:
        return self.choices[0].server_timing

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens of all choices together; None where the model does not tell."""
        counts = [c.num_reasoning_tokens for c in self.choices if c.num_reasoning_tokens is not None]
        return sum(counts) if counts else None

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
class Embeddings:
    """Embeddings of several prompts."""

    vectors: tuple[tuple[float, ...], ...]
    """One embedding per prompt, in the order of the prompts."""
    num_input_tokens: int
    """Input tokens of all prompts together."""
    num_cached_tokens: int
    """Input tokens that the server's KV cache had."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of several prompts or pairs of texts."""

    values: tuple[tuple[float, ...], ...]
    """Scores of each prompt or pair, one for each label, in the order of the prompts."""
    labels: tuple[str, ...]
    """Label of the largest score of each prompt or pair."""
    num_input_tokens: int
    """Input tokens of all prompts or pairs together."""
    num_cached_tokens: int
    """Input tokens that the server's KV cache had."""


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
    """Whether the model may stream; None if unknown, as for an ensemble."""


def collect(request_id: str, model: str, started_at: float, chunks: Sequence[Chunk]) -> Result:
    """Merges a request's chunks into its result; without chunks the result has one empty choice.

    Args:
        started_at: `time.perf_counter()` when the request was sent. The total time ends with the last chunk,
            not when the transport ends after it.
    """
    end = chunks[-1].received_at if chunks else time.perf_counter()
    first = next((c.received_at for c in chunks if c.text or c.num_tokens), None)
    ttft = None if first is None else first - started_at
    choices: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        choices.setdefault((chunk.batch_index, chunk.index), []).append(chunk)
    by_prompt: dict[int, Chunk] = {}
    for chunk in chunks:
        if chunk.num_input_tokens is not None:
            by_prompt.setdefault(chunk.batch_index, chunk)
    prompts = by_prompt.values()
    prompt_logprobs = {c.batch_index: c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None}
    return Result(
        request_id,
        model,
        tuple(_choice(*key, choices[key]) for key in sorted(choices)) or (_choice(0, 0, ()),),
        Timing(ttft, end - started_at, sum(c.num_tokens for c in chunks)),
        _sum(c.num_input_tokens for c in prompts),
        _sum(c.num_cached_tokens for c in prompts),
        tuple(prompt_logprobs.get(prompt) for prompt in range(max(prompt_logprobs, default=-1) + 1)),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Sum of the counts that are not None; None if all are None."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _choice(batch_index: int, index: int, chunks: Sequence[Chunk]) -> Choice:
    """Merges the chunks of a choice. For values such as the finish reason, the last one that is not None
    counts."""

    def last(name: str) -> Any:
        told = (getattr(chunk, name) for chunk in reversed(chunks))
        return next((value for value in told if value is not None), None)

    return Choice(
        index,
        "".join(c.text for c in chunks),
        tuple(t for c in chunks for t in c.token_ids),
        last("finish_reason"),
        tuple(c.logprobs for c in chunks if c.logprobs is not None),
        last("cumulative_logprob"),
        "".join(c.reasoning for c in chunks),
        merge_tool_calls(delta for c in chunks for delta in c.tool_calls),
        last("stop_reason"),
        last("server_timing"),
        last("num_reasoning_tokens"),
        batch_index,
    )


def merge_tool_calls(deltas: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Merges deltas of tool calls into whole calls, ordered by `index`."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        call = calls.setdefault(
            delta.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""
    return tuple(calls[index] for index in sorted(calls))
