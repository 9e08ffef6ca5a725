"""Values that the client returns, such as chunks of a stream, results of whole requests, and models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""One chat message, for example {"role": "user", "content": "..."}."""


ToolCall = dict[str, Any]
"""One call of a tool in OpenAI's form: {"id": ..., "type": "function", "function": {"name": ...,
"arguments": "..."}}. A delta, which is a piece of a call, also has an `index`, the number of the call. Only a
call's first delta has the other fields but `arguments`."""


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields of a chunk that are mostly empty: reasoning, tool calls, the prompt's log-probabilities, and
    others."""

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
    """One part of an answer, streamed or not. The server may put several tokens into one chunk."""

    text: str
    """Text that is new since the choice's previous chunk; may be empty, for example while a character is
    incomplete. With `output_mode` "cumulative" it is all text so far."""
    token_ids: tuple[int, ...] = ()
    """Ids of the tokens that are new since the choice's previous chunk; empty if the response has none for
    this chunk. With `output_mode` "cumulative" they are those of all tokens so far."""
    finish_reason: str | None = None
    """`stop`, `length` ... on the last chunk of a choice; None before, and where the server does not tell."""
    index: int = 0
    """Number of the choice among those of its prompt, from 0."""
    final: bool = False
    """Whether the server marked this chunk as the last of its request. A server may also send this mark
    alone, without a chunk."""
    logprobs: Any = None
    """Parsed JSON of the model's `logprobs` output, for a model of Quire a list with one entry per token of
    the chunk; None if the response has no such output."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    """Number of tokens of this chunk, as the server counts them; None if it does not tell."""
    received_at: float = 0.0
    """When the client took the response from the call: `time.perf_counter()`, in seconds."""
    num_cached_tokens: int | None = None
    """Number of the prompt's tokens that the server's KV cache had; None if the server does not tell."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the choice's tokens so far; None if the server does not tell."""
    extras: Extras = NO_EXTRAS
    """Further values, which most chunks do not have. They are one field because each field of a chunk costs
    time in every response."""

    @property
    def reasoning(self) -> str:
        """Text of the model's reasoning that is new since the choice's previous chunk. With `output_mode`
        "cumulative" it is all of that text so far."""
        return self.extras.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """New pieces (deltas) of tool calls, see `ToolCall`. With `output_mode` "cumulative" these are the
        calls so far."""
        return self.extras.tool_calls

    @property
    def stop_reason(self) -> str | None:
        """The stop string, or the token id as text, that ended the choice, on its last chunk. None elsewhere,
        and where nothing of the kind ended it or the server does not tell."""
        return self.extras.stop_reason

    @property
    def server_timing(self) -> Mapping[str, Any] | None:
        """Milliseconds that the choice has spent in the server (`queue`, `prefill` ...) and some counts, up
        to this chunk. None: the response does not have them, mostly because they were not asked for."""
        return self.extras.server_timing

    @property
    def prompt_logprobs(self) -> Any:
        """Parsed JSON of the model's `prompt_logprobs` output, with entries on at most one chunk per prompt.
        Other chunks have None or an empty list."""
        return self.extras.prompt_logprobs

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens of the choice so far; None if the server does not tell, mostly because
        it was not asked."""
        return self.extras.num_reasoning_tokens

    @property
    def batch_index(self) -> int:
        """Number of the prompt, from 0, where the request has several; else 0."""
        return self.extras.batch_index

    @property
    def num_tokens(self) -> int:
        """Number of tokens in this chunk, by the ids or else by the server's count; 0 if neither is known."""
        if self.token_ids:
            return len(self.token_ids)
        return self.num_output_tokens or 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one request as the client saw them, in seconds from sending it, and its number of tokens."""

    ttft: float | None
    """Time until the first chunk with text or tokens came; None if there was none."""
    total: float
    num_tokens: int
    """Number of tokens of all chunks together; 0 if the server does not tell."""

    @property
    def tokens_per_second(self) -> float | None:
        """`num_tokens` divided by `total`; None if either is 0."""
        return self.num_tokens / self.total if self.num_tokens and self.total > 0 else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers in a request's result."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[Any, ...] = ()
    """The `logprobs` of the choice's chunks that have some, in order."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the choice's tokens; None if the server does not tell. The client
    asks for it with `best_of` and beam search."""
    reasoning: str = ""
    """Text of the model's reasoning; empty if the server tells none."""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str | None = None
    """The stop string, or the token id as text, that ended the choice; None if neither did, or the server
    does not tell."""
    server_timing: Mapping[str, Any] | None = None
    """Milliseconds that the choice spent in the server, and some counts; None if the server does not tell,
    mostly because it was not asked."""
    num_reasoning_tokens: int | None = None
    batch_index: int = 0
    """Number of the prompt, from 0, if the request has several; else 0. The choices of each prompt begin at
    `index` 0."""


@dataclass(frozen=True, slots=True)
class Result:
    """Answer to a whole request: the chunks that came, merged."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    timing: Timing
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Number of input tokens, of all prompts together, that the server's KV cache had; None if the server
    does not tell."""
    prompt_logprobs: tuple[Any, ...] = ()
    """`prompt_logprobs` of each prompt in turn, up to the last that has some; None for a prompt before that
    which has none, for example because its request ended early. Empty if no prompt has some."""

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
        """Number of reasoning tokens of all choices together; None if the server does not tell, mostly
        because it was not asked."""
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
    """Embeddings of one or more prompts."""

    vectors: tuple[tuple[float, ...], ...]
    """One embedding per prompt, in the order of the prompts."""
    num_input_tokens: int
    """Number of input tokens of all prompts together."""
    num_cached_tokens: int
    """Number of input tokens, of all prompts together, that the server's KV cache had."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one or more prompts or pairs of texts."""

    values: tuple[tuple[float, ...], ...]
    """Scores of each prompt or pair, one for each label, in the order of the prompts."""
    labels: tuple[str, ...]
    """Label of the largest score of each prompt or pair; empty if the model has no labels for its scores."""
    num_input_tokens: int
    """Input tokens of all prompts or pairs together."""
    num_cached_tokens: int
    """Number of input tokens, of all prompts or pairs together, that the server's KV cache had."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model of a server's repository."""

    name: str
    version: str
    state: str
    """State of the model: READY, LOADING, UNAVAILABLE ..."""
    reason: str = ""
    """The server's reason why the model is in this state; mostly empty if it is ready."""
    ready: bool = False
    kind: str = ""
    """`ensemble`, or the name of the backend or platform (`quire`, `python` ...); empty if unknown."""
    decoupled: bool | None = None
    """Whether the model may answer a request with several responses (a stream); None if unknown, as for an
    ensemble."""


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
    prompt_logprobs: dict[int, Any] = {}
    for chunk in chunks:  # where they were asked for by name, later responses have empty ones
        if chunk.prompt_logprobs is not None and not prompt_logprobs.get(chunk.batch_index):
            prompt_logprobs[chunk.batch_index] = chunk.prompt_logprobs
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
    """Merges the chunks of a choice. Texts, token ids and the like are joined. Of other values, such as the
    finish reason, the last one that is not None is taken."""

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
