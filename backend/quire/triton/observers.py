"""RequestEnded, the record of a request that has ended, and its observers: metrics, traces and logs."""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.request.sampling_params import SamplingParams


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a request from its arrival to its end, over all its prompts and choices, without their texts.

    Times are CLOCK_MONOTONIC seconds; 0: it never happened.
    """

    request_id: str
    """Request id that the frontend made, unique among all frontends."""
    external_id: str
    """Request id that the client gave; empty if it gave none."""
    model: str
    tenant: str = ""
    adapter: str = ""
    """Name of the LoRA adapter of its first prompt; empty: none."""
    is_command: bool = False
    """Whether it is a cancellation or a cache command, which generates nothing."""
    is_stream: bool = False
    params: SamplingParams | None = None
    """Sampling parameters of its first prompt. They may hold texts (stop strings). None: it was refused
    before they were known."""
    n: int = 0
    """Choices of all its prompts together, with `best_of` all that were generated; 0 for a command, and for a
    request that was refused before its prompts were handed to an engine."""
    arrived_at: float
    """When Triton handed the request to the model."""
    admitted_at: float = 0.0
    """When a prompt of the request first ran."""
    first_token_at: float = 0.0
    """When the engine had the request's first token."""
    first_sent_at: float = 0.0
    """When its first response that is no error was handed to Triton."""
    ended_at: float
    """When its last response was handed to Triton, an error included."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for the request, as the KV cache or a tier had them."""
    num_output_tokens: int = 0
    """Tokens generated for all choices, including tokens that were never sent."""
    num_reasoning_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Draft tokens that speculative decoding tried for the request."""
    num_accepted_drafts: int = 0
    """Draft tokens that were accepted."""
    num_continuations: int = 0
    """Number of engines that died while they had the request."""
    paused_s: float = 0.0
    """Seconds for which the request was paused because its engine had died; of several choices, the longest
    pause counts."""
    result_cached: bool | None = None
    """Whether its result came from the result cache; None: it was not looked up."""
    finish_reason: str
    """Finish reason of the choice that ended last, a value of `FinishReason`; after an error `error`,
    `cancelled` or `shutdown`."""
    error_code: str = ""
    """Name of Triton's status code, where it ended by an error."""
    is_chat: bool = False
    """Whether its prompt was chat messages."""
    caller_trace: dict[str, str] = {}
    """W3C trace context from the client; empty if it sent none or tracing is off."""
    server_trace: dict[str, str] = {}
    """W3C trace context of Triton's span for the request; empty if there is none."""


class RequestObserver(Protocol):
    """Receives a record of each ended request.

    Called on the responder's thread between two sends, so it must be quick. Exceptions are logged.
    """

    def ended(self, record: RequestEnded) -> None:
        """Called exactly once for each request that came to the model, when its end is decided and, unless
        Triton refused it, sent."""


class StreamMeter(Protocol):
    """Measures stream responses that have tokens. It must be quick: the responder's thread calls it."""

    def first(self, seconds: float, /) -> None:
        """Records that a stream's first response was sent `seconds` after the request arrived."""

    def interval(self, seconds: float, count: int, /) -> None:
        """Records a further response of a choice: it has `count` tokens, each of which took `seconds`."""
