"""Types of the data that passes between the layers: scheduler -> model runner -> scheduler -> frontend.

These are the only types that cross a layer. They hold no torch tensors, so that `quire.core` stays free
of torch and a runner may live in another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from quire.adapters import AdapterLoad, AdapterTarget
from quire.layers.pooling import Pooling
from quire.models.kv_groups import KVGroup
from quire.request.multimodal import PromptEmbeds
from quire.request.sampling_params import SamplingParams
from quire.roofline import DeviceLimits, ModelWork


@dataclass(slots=True)
class NewRequestData:
    """Data of a request that the model runner has not seen yet, or has dropped at a preemption."""

    token_ids: list[int]
    """Prompt and, after a preemption, the output so far."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    embeds: PromptEmbeds | None = None
    num_choices: int = 1
    """How many tokens are to be drawn when the row first samples: those of choices 0, 1, ..."""
    slot: int = -1
    """Where its adapter lies as long as it runs; -1: it has none."""
    num_prompt_logprobs: int = 0
    """Leading positions of the prompt whose log-probabilities need not be computed, where they are asked
    for."""


class ScheduledRequest(msgspec.Struct, gc=False):
    """One row of a step: compute tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens)."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[list[int]]
    """Blocks appended to the request's table since it was last scheduled, per KV group (all of them when
    `new`; entries of -1 are blocks outside the window, never read)."""
    samples: bool
    """True when the row reaches the request's last known token, so that a token is sampled from it."""
    new: NewRequestData | None = None
    given_token_ids: Sequence[int] = ()
    """Tokens the runner did not sample itself (beam search chose them), to be appended to what it knows."""
    num_drafts: int = 0
    """How many of its tokens, the last ones, are guesses: one is drawn behind the token before them, and
    behind each that was right."""
    draft_token_ids: Sequence[int] = ()
    """These guesses; empty: the runner's draft model makes them, or fewer."""


class KVSave(NamedTuple):
    """One block to copy out of the pool."""

    key: bytes
    block_id: int
    pinned: bool = False
    """Whether it must stay in the host tier until it is dropped: part of a swapped request."""
    num_clears: int = 0
    """The tiers' `num_clears` when it was planned; unless pinned, it is not written after a later one."""


class KVLoad(NamedTuple):
    """Blocks to copy into the pool, in the background; they hold nothing valid until it is reported done."""

    load_id: int
    blocks: list[tuple[bytes, int]]
    """(key, block id), in the order of the sequence."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work, to be done in this order: drop `dropped_request_ids`, save, copy, begin the loads,
    bring adapters into slots, compute `scheduled`."""

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    dropped_request_ids: list[str] = field(default_factory=list)
    """Finished, aborted or preempted since the previous step: the runner forgets them."""
    kv_saves: list[KVSave] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) inside the pool; all sources are read before any target is written."""
    kv_loads: list[KVLoad] = field(default_factory=list)
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    is_timed: bool = False
    """Whether the runner is to tell how long it took (`ModelRunnerOutput.timing`)."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute; there may be blocks to move."""
        return not self.scheduled

    @property
    def has_work(self) -> bool:
        """Whether the runner must see this plan at all."""
        return bool(
            self.scheduled
            or self.dropped_request_ids
            or self.kv_saves
            or self.block_copies
            or self.kv_loads
            or self.adapter_loads
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the sampled (or the prompt's) token first, then of the k most
    likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int = 0
    """Rank of the first token by likelihood; 1: none is more likely, 0: not counted (beam search)."""


class RowOutput(msgspec.Struct):
    """Result of one row of a step; without tokens where the row does not sample."""

    token_ids: list[int] = []
    """The tokens that follow, in their order: any number."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each token, where asked for."""
    error: str = ""
    """The row failed alone (logits without a finite entry): its request ends with this message."""
    is_final: bool = False
    """Whether nothing can follow the last token: the request's grammar is at its end."""
    error_code: str = ""
    """Name of the Triton status code; empty: INTERNAL."""
    choices: list[RowOutput] = []
    """The beginnings of choices 1, 2, ... of a row with `num_choices` > 1."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt's next token after each token that the row computed, without leading
    ones that are known already. None: not asked for, or none are new."""
    embedding: bytes = b""
    """Embedding of the prompt, float32, little endian, where it is wanted and the row completes the prompt;
    else empty."""
    num_drafts: int = 0
    """Drafts that the row had, where the runner made them."""

    def cut(self, count: int) -> None:
        """Forgets the tokens behind the first `count`."""
        if count < len(self.token_ids):
            self.token_ids = self.token_ids[:count]
            self.logprobs = self.logprobs and self.logprobs[:count]


@dataclass(slots=True)
class StepTiming:
    """When a runner did what of one step, in CLOCK_MONOTONIC seconds."""

    phases: list[tuple[str, float, float]]
    """(name, begin, end), on the runner's thread."""
    device: tuple[float, float] | None = None
    """From the first to the last kernel, on a device that works beside that thread."""
    limits: DeviceLimits | None = None

    @property
    def computing(self) -> tuple[float, float] | None:
        """From the beginning to the end of what computes, wherever that is; None: nothing did."""
        spans = [phase for phase in self.phases if phase[0] in ("model", "sample")]
        return self.device or ((spans[0][1], spans[-1][2]) if spans else None)


NOTHING = RowOutput()
"""The output of rows that bring nothing; not to be changed."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """Results of a step."""

    rows: list[RowOutput]
    """One per scheduled row, in their order."""
    loads_done: list[tuple[int, int]] = field(default_factory=list)
    """(load id, how many of its leading blocks are valid) of loads that ended since the last step."""
    timing: StepTiming | None = None
    """Times of a step with `is_timed`; None: not asked for, or the runner does not know them."""
    has_caught_up: bool = False
    """Whether a draft model has computed prompts, so that the step took longer than its tokens say."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts about a runner and its model that the engine and its frontends need."""

    num_blocks: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_groups: tuple[KVGroup, ...]
    kv_cache_bytes: int = 0
    block_size: int = 0
    """Tokens per block; 0: as configured."""
    kv_identity: dict[str, Any] = field(default_factory=dict)
    """Everything that decides the bits of keys and values, as JSON can hold it; empty unless other processes
    may find them."""
    hidden_size: int = 0
    deepstack_levels: int = 0
    """Layers, from the first on, behind which the rows of images add to the hidden states once more."""
    pooling: Pooling = field(default_factory=Pooling)
    takes_position_ids: bool = False
    """Whether positions of prompts may have three axes (M-RoPE)."""
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 0
    """Threads that compute steps on the CPU; 0: another device does."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds that phases of the runner's start took, by name."""
    work: ModelWork | None = None
    """Least bytes and operations that steps of the runner's model need; None: nobody knows."""
    adapter_targets: tuple[AdapterTarget, ...] = ()
    """Products of the model that adapters may change; empty without `enable_lora`."""


class EngineCoreOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """Output of one step for one choice of a request. The choice's last output, and only that, has a
    `finish_reason`."""

    request_id: str
    """The id that was given to the engine, the same for every choice."""
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for this request, on the first output of a choice."""
    error: str | None = None
    error_code: str = ""
    """Name of the Triton status code when `error` is set."""
    index: int = 0
    """Choice, in [0, n). A request has ended when each of its choices has a `finish_reason`; an output
    with `error` ends all of them."""
    cumulative_logprob: float | None = None
    """Sum over the whole choice, with its `finish_reason`, where beam search ranked it."""
    admitted_at: float = 0.0
    """When the request first ran, in seconds of the scheduler's clock. Set in outputs that have
    `first_token_at` or `finish_reason`; 0: not set, or it never ran."""
    first_token_at: float = 0.0
    """When the choice's first token was taken in, on its first output."""
    num_preemptions: int = 0
    """How often the choice was preempted, with its `finish_reason`."""
    num_draft_tokens: int = 0
    """Tokens of the choice that were tried before they were known, so far."""
    num_accepted_drafts: int = 0
    """How many of them were right."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each token of the prompt, None for the first token. They are on the first output
    of a request that asks for them, which is one of choice 0."""
    seed: int | None = None
    """Seed of the request's random draws, on the first output of choice 0; None: nothing is drawn."""
    embedding: bytes = b""
    """Embedding as in `RowOutput`, on the output with the `finish_reason`; empty: tokens are wanted."""

    def by_token(self) -> Iterator[EngineCoreOutput]:
        """The same as outputs of one token each; what is of the end comes with the last."""
        before_end = {"finish_reason": None, "stop_reason": None, "cumulative_logprob": None}
        last = len(self.new_token_ids) - 1
        for at, token_id in enumerate(self.new_token_ids):
            logprobs = None if self.logprobs is None else [self.logprobs[at]]
            beside = {} if at == last else before_end
            yield msgspec.structs.replace(self, new_token_ids=[token_id], logprobs=logprobs, **beside)


class WaitingCounts(msgspec.Struct, frozen=True):
    """Waiting sequences by what they wait for; together they are all of them."""

    choices: int = 0
    """They wait for other sequences of their own request."""
    tenant: int = 0
    """They wait until their tenant has fewer running requests than it may have."""
    adapter: int = 0
    """They wait for a slot for their adapter, or for its weights."""
    seats: int = 0
    blocks: int = 0
    budget: int = 0
    step: int = 0
    """They wait for the next step and, so much is known, for nothing else."""


class SchedulerStats(msgspec.Struct, frozen=True):
    """State of the scheduler and the block pool after a step, for metrics and traces."""

    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    """Preemptions since start."""
    num_scheduled_tokens: int
    """Tokens computed since start, recomputation included."""
    num_cached_tokens: int = 0
    """Tokens not computed since start, as the prefix cache had them."""
    num_cached_blocks: int = 0
    """Blocks kept for their content alone."""
    num_pinned_blocks: int = 0
    num_swaps: int = 0
    """Preemptions since start that kept the blocks in the host tier."""
    num_loaded_tokens: int = 0
    """Tokens not computed since start, as a KV tier had them."""
    num_recomputed_tokens: int = 0
    """Tokens computed again since start, after a preemption."""
    num_queried_tokens: int = 0
    """Tokens of the requests whose beginnings were looked up in the prefix cache, since start."""
    num_draft_tokens: int = 0
    """Tokens that were tried before they were known, since start."""
    num_accepted_drafts: int = 0
    """How many of them were right."""
    num_batch_rows: int = 0
    """Rows of the latest step; 0 where there is no request."""
    num_batch_tokens: int = 0
    num_loading: int = 0
    """Requests whose blocks are being loaded from a KV tier: running ones, and some that have ended
    meanwhile."""
    waiting: WaitingCounts = WaitingCounts()
    num_adapter_slots: int = 0
    """Slots with an adapter that running requests use."""
    num_adapter_hits: int = 0
    """Requests since start that found their adapter in a slot when they began."""
    num_adapter_loads: int = 0
    """Adapters brought into slots since start."""
    num_adapter_evictions: int = 0
    """Adapters brought into slots since start in the place of another."""


@dataclass(slots=True)
class RequestOutput:
    """Output of one choice of a request for its caller: a delta, or the whole when it does not stream."""

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
    index: int = 0
    cumulative_logprob: float | None = None
    reasoning: str = ""
    """The model's reasoning before its answer, kept apart from `text` where its format is known."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls in the form of OpenAI's deltas: pieces of a call have its index, the first its id and name."""
    item: int = 0
    """Index of the prompt that the choice belongs to, in a request with several prompts."""
    num_reasoning_tokens: int = 0
    """Tokens of the choice so far behind the tag that opens reasoning, up to the closing one with its own."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each token of the prompt, None for the first token; on the first output of choice
    0 alone."""
    embedding: bytes = b""
    """Embedding as in `EngineCoreOutput`."""
    others: list[RequestOutput] = field(default_factory=list)
    """Choices 1, 2, ... of the same request, where it was asked for more than one (`quire.LLM`)."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def after(self, before: RequestOutput | None) -> RequestOutput:
        """This delta behind everything that `before` holds, as one output; `before` is not used again."""
        if before is None:
            return self
        self.text = before.text + self.text
        self.reasoning = before.reasoning + self.reasoning
        self.tool_calls = joined_calls(before.tool_calls, self.tool_calls)
        before.token_ids += self.token_ids
        self.token_ids = before.token_ids
        if before.logprobs is not None:
            before.logprobs += self.logprobs or []
            self.logprobs = before.logprobs
        return self


def joined_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole calls and the pieces behind them, as whole calls; the first are not used again."""
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append(delta)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
