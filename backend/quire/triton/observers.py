"""RequestEnded, the record of a request that has ended, and its observers: metrics, traces and logs."""

from __future__ import annotations

from typing import Protocol

import msgspec

from quire.request.sampling_params import SamplingParams


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One request from its arrival to its end, with all its prompts and choices; it has no text of either.

    Times are CLOCK_MONOTONIC seconds; 0: that never came.
    """

    request_id: str
    """Ours, unique among all frontends."""
    external_id: str
    """The client's; empty: none was given."""
    model: str
    tenant: str = ""
    adapter: str = ""
    """Name of the LoRA adapter of its first prompt; empty: none."""
    is_command: bool = False
    """A cancellation or a cache command, which generates nothing."""
    is_stream: bool = False
    params: SamplingParams | None = None
    """Sampling parameters of its first prompt. They may hold texts (stop strings). None: it was refused
    before they were known."""
    n: int = 0
    """Choices of all its prompts together, with `best_of` all that were generated; 0 where `params` is
    None."""
    arrived_at: float
    """When Triton handed it to the model."""
    admitted_at: float = 0.0
    """When the first of its prompts first ran."""
    first_token_at: float = 0.0
    """When the engine had its first token."""
    first_sent_at: float = 0.0
    """When its first response was handed to Triton."""
    ended_at: float
    """When its last response was handed to Triton, an error included."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for it."""
    num_output_tokens: int = 0
    """Tokens generated for all choices, including those that the end kept from being sent."""
    num_reasoning_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Tokens that were tried before they were known."""
    num_accepted_drafts: int = 0
    """How many of them were right."""
    num_continuations: int = 0
    """Engines that died and had it."""
    paused_s: float = 0.0
    """Seconds from these deaths to the next token each, or to its end."""
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
    """W3C trace context of who sent it; empty: none was given, or nobody traces here."""
    server_trace: dict[str, str] = {}
    """Likewise of Triton's own span of it."""


class RequestObserver(Protocol):
    """Told on the responder's thread, between two sends: it must be quick, and what it raises is logged."""

    def ended(self, record: RequestEnded) -> None:
        """Called exactly once for each request that came to the model, when its end is decided and, unless
        Triton refused it, sent."""


class StreamMeter(Protocol):
    """Told of streams' responses with tokens, on the responder's thread: it must be very quick."""

    def first(self, seconds: float, /) -> None:
        """A request's first, so long after its arrival."""

    def interval(self, seconds: float, count: int, /) -> None:
        """A further one of a choice with `count` tokens, each of which took so long."""
