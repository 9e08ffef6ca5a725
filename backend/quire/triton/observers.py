"""RequestEnded, the record of a request that has ended. Protocols of observers and of a stream's meter."""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.request.sampling_params import SamplingParams


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a request from its arrival to its end, over all its prompts and choices, without their texts.

    Fields whose names end in `_at` are times in CLOCK_MONOTONIC seconds; 0: not known, or never.
    """

    request_id: str
    """Request id that the frontend made, unique among all frontends."""
    external_id: str
    """Request id that the client gave; empty: it gave none, or the request was refused before it was read."""
    model: str
    tenant: str = ""
    adapter: str = ""
    """Name of the LoRA adapter of its first prompt; empty: none, or the request was refused before it was
    parsed."""
    is_command: bool = False
    """Whether it was parsed as a cancellation or a cache command, which generates nothing."""
    is_stream: bool = False
    params: SamplingParams | None = None
    """Sampling parameters of its first prompt; for a command, the defaults. They may hold texts (stop
    strings). None: the request was refused before it was parsed."""
    n: int = 0
    """Choices of all its prompts together, with `best_of` all that are generated; 0 for a command and for
    most refused requests."""
    arrived_at: float
    """When the frontend took the request from Triton."""
    admitted_at: float = 0.0
    """When a prompt of the request first ran, as far as an engine has told. If no engine was asked, when the
    answer began."""
    first_token_at: float = 0.0
    """When the engine had the request's first token, embedding or scores. If no engine was asked, when the
    answer began."""
    first_sent_at: float = 0.0
    """When the sending of its first response that is no error began."""
    ended_at: float
    """When its last response, which may be an error, was handed to Triton or refused by it."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for the request, as the KV cache or a tier had them."""
    num_output_tokens: int = 0
    """Tokens of all its choices up to their ends, as far as the frontend has received them. Some may never
    have been sent."""
    num_reasoning_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Draft tokens that speculative decoding tried for the request, as far as is known. Those of an engine
    that died do not count."""
    num_accepted_drafts: int = 0
    """Number of these draft tokens that were accepted."""
    num_continuations: int = 0
    """Number of deaths of engines that paused the request. If they differ between its choices, the largest
    counts."""
    paused_s: float = 0.0
    """Seconds for which the request was paused because its engine had died; of several choices, the longest
    pause counts."""
    result_cached: bool | None = None
    """Whether its result came from the result cache; None: it was not looked up."""
    finish_reason: str
    """Finish reason of the choice that ended last, a value of `FinishReason`; after an error `error`,
    `cancelled` or `shutdown`."""
    error_code: str = ""
    """Name of Triton's status code if the request ended with an error, else empty."""
    is_chat: bool = False
    """Whether its answer is one to chat messages; false if it was refused before it was parsed, or wants an
    embedding or scores."""
    caller_trace: dict[str, str] = {}
    """W3C trace context from the client; empty: none that can be used, or tracing is off."""
    server_trace: dict[str, str] = {}
    """W3C trace context of Triton's span for the request; empty: none that can be used, or tracing is off."""


class RequestObserver(Protocol):
    """Receives a record of each ended request.

    The responder's thread calls it between two sends, so it must be quick. Exceptions are logged.
    """

    def ended(self, record: RequestEnded) -> None:
        """Called once for a request or command: when its end is decided and, unless Triton refused it,
        sent."""


class StreamMeter(Protocol):
    """Measures stream responses that have tokens. It must be quick: the responder's thread calls it."""

    def first(self, seconds: float, /) -> None:
        """Records that a stream's first response was sent `seconds` after the request arrived."""

    def interval(self, seconds: float, count: int, /) -> None:
        """Records a further response of a choice: it has `count` tokens, which took `seconds` each on
        average."""
