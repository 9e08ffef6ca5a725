"""What passes between the layers: scheduler -> model runner -> scheduler -> frontend.

These are the only types that cross a layer. They hold no torch tensors, so that `quire.core` stays free
of torch and a runner may live in another process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.multimodal import PromptEmbeds
from quire.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """What a runner must know of a request it has not seen, or has dropped at a preemption."""

    token_ids: list[int]
    """Prompt and, after a preemption, the output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    embeds: PromptEmbeds | None = None


@dataclass(slots=True)
class ScheduledRequest:
    """One row of a step: compute tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens)."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[int]
    """Blocks appended to the request's table since it was last scheduled (all of them when `new`)."""
    samples: bool
    """True when the row reaches the request's last known token, so that a token is sampled from it."""
    new: NewRequestData | None = None


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. `dropped_request_ids` go first: their rows' memory may be reused by `scheduled`."""

    step: int
    scheduled: list[ScheduledRequest]
    dropped_request_ids: list[str]
    """Finished, aborted or preempted since the previous step: the runner forgets them."""
    total_num_scheduled_tokens: int

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the sampled token first, then of the k most likely."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class ModelRunnerOutput:
    """Sampled tokens of the step, for exactly the scheduled rows with `samples`."""

    sampled_token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Rows that failed alone (logits without a finite entry): the request ends with this message."""


class EngineCoreOutput(msgspec.Struct, omit_defaults=True):
    """What one step brought for one request; `finish_reason` is set exactly once, on the last one."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str = ""
    """Name of the Triton status code when `error` is set."""


@dataclass(slots=True)
class SchedulerStats:
    """State of the scheduler and the block pool after a step, for metrics and traces."""

    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    """Since start."""
    num_scheduled_tokens: int
    """Since start: tokens computed, recomputation included."""
    num_cached_tokens: int = 0
    """Since start: tokens not computed, as the prefix cache had them."""
    num_cached_blocks: int = 0
    """Blocks kept for their content alone."""


@dataclass(slots=True)
class RequestOutput:
    """What a caller sees of a request: a delta, or the whole when it does not stream."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_code: str = ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
