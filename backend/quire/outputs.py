"""Types of the data that passes between the layers: scheduler -> model runner -> scheduler -> frontend.

This module needs no torch, so that `quire.core` stays free of it. A runner may live in another process. Only
the embeddings of a `PromptEmbeds` may be a torch tensor.
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
    """A request that the model runner has not seen yet, or has dropped at a preemption."""

    token_ids: list[int]
    """Prompt, then the output so far if there is any."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    embeds: PromptEmbeds | None = None
    num_choices: int = 1
    """Number of tokens to sample when the row first samples: one for each of choices 0, 1, ..."""
    slot: int = -1
    """Slot that holds the request's adapter; -1: the request has no adapter."""
    num_prompt_logprobs: int = 0
    """Number of leading prompt positions whose log-probabilities the engine does not need, for example as it
    has them from before a preemption. It is ignored unless the request wants `prompt_logprobs`."""


class ScheduledRequest(msgspec.Struct, gc=False):
    """One row of a step: compute tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens)."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: list[list[int]]
    """Blocks appended to the request's table since it was last scheduled, per KV group; all of them if `new`
    is set. -1 is an entry without a block, which is never read."""
    samples: bool
    """Whether the row reaches the request's newest token. The runner then samples after it, unless the prompt
    is pooled, which is then complete."""
    new: NewRequestData | None = None
    given_token_ids: Sequence[int] = ()
    """Tokens to append that the runner did not sample itself (beam search chose them)."""
    num_drafts: int = 0
    """Number of drafts at the end of the row's tokens; if the runner's draft model makes them, the most that
    it may make. The row yields at most one token more than it has drafts."""
    draft_token_ids: Sequence[int] = ()
    """Draft tokens; empty: the runner's draft model makes at most `num_drafts`."""


class KVSave(NamedTuple):
    """One block to copy out of the pool."""

    key: bytes
    block_id: int
    pinned: bool = False
    """Whether the block must stay in the host tier until it is dropped, because it belongs to a swapped
    request."""
    num_clears: int = 0
    """The tiers' `num_clears` when the save was planned. After a later `clear` the block is not written. For
    a pinned block this number is ignored."""


class KVLoad(NamedTuple):
    """Blocks to copy into the pool in the background. Nothing may read them before the end of the load is
    reported."""

    load_id: int
    blocks: list[tuple[bytes, int]]
    """(key, block id), in the order of the sequence."""


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step. Blocks are saved first, then copied, then loads begin. `scheduled` is computed
    last; rows are dropped and adapters are loaded into slots before that."""

    step: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    dropped_request_ids: list[str] = field(default_factory=list)
    """Ids of requests that ended or were preempted; the runner drops their rows, if it has them."""
    kv_saves: list[KVSave] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) blocks inside the pool; all sources are read before any target is written."""
    kv_loads: list[KVLoad] = field(default_factory=list)
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    is_timed: bool = False
    """Whether the runner must report its times (`ModelRunnerOutput.timing`)."""

    @property
    def is_empty(self) -> bool:
        """Whether the step computes nothing; it may still move blocks."""
        return not self.scheduled

    @property
    def has_work(self) -> bool:
        """Whether the plan has anything for the runner to do."""
        return bool(
            self.scheduled
            or self.dropped_request_ids
            or self.kv_saves
            or self.block_copies
            or self.kv_loads
            or self.adapter_loads
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: first of the sampled (or the prompt's) token, then of the k most
    likely."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int = 0
    """Rank of the first token by likelihood; 1: no other is more likely, 0: not counted (beam search)."""


class RowOutput(msgspec.Struct):
    """Result of one row of a step; it has no tokens if the row does not sample."""

    token_ids: list[int] = []
    """Sampled tokens in order, any number."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities for each of `token_ids`; None: there are none."""
    error: str = ""
    """Error of this row alone (such as logits without a finite entry), which ends its request; empty:
    none."""
    is_final: bool = False
    """Whether nothing can follow the last token, because the request's grammar has ended."""
    error_code: str = ""
    """Name of the error's Triton status code; empty: INTERNAL, or there is no error."""
    choices: list[RowOutput] = []
    """Results of choices 1, 2, ... in the step in which a row with `num_choices` > 1 first samples."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt tokens that follow tokens of the row, without leading ones that are
    already known. None: not wanted, or none are new."""
    embedding: bytes = b""
    """Embedding or scores of the prompt, float32, little endian; empty: not wanted, the row does not complete
    the prompt, or there is an `error`."""
    num_drafts: int = 0
    """Number of drafts in the row. If the runner made them, it may be less than was asked for."""

    def cut(self, count: int) -> None:
        """Drops the tokens after the first `count`."""
        if count < len(self.token_ids):
            self.token_ids = self.token_ids[:count]
            self.logprobs = self.logprobs and self.logprobs[:count]


@dataclass(slots=True)
class StepTiming:
    """Times of a step's phases in a runner, in CLOCK_MONOTONIC seconds."""

    phases: list[tuple[str, float, float]]
    """(name, begin, end) of each phase on the runner's thread."""
    device: tuple[float, float] | None = None
    """Begin and end of the phases "model" and "sample" on a device that works beside that thread; None: there
    is no such device, or nothing was computed."""
    limits: DeviceLimits | None = None

    @property
    def computing(self) -> tuple[float, float] | None:
        """Begin and end of the phases "model" and "sample": `device`, or without it those on the thread.
        None: nothing was computed."""
        spans = [phase for phase in self.phases if phase[0] in ("model", "sample")]
        return self.device or ((spans[0][1], spans[-1][2]) if spans else None)


NOTHING = RowOutput()
"""Output of rows without a result; must not be changed."""


class ExpertCounts(msgspec.Struct):
    """Counts of offloaded experts since start, over all layers of a rank; see `max_resident_experts`. A layer
    needs an expert once per step, for all its tokens."""

    num_hits: int = 0
    """Number of times that a layer needed an expert which had a slot."""
    num_misses: int = 0
    """Number of times that a layer needed an expert without a slot, so that the step waited for its load."""
    num_prefetches: int = 0
    """Number of experts without a slot that the system was asked to read, because their layer would probably
    need them, before the layer was reached."""
    num_prefetch_hits: int = 0
    """Number of the experts in `num_prefetches` that their layer then needed; also part of `num_misses`."""
    num_loaded_bytes: int = 0
    """Bytes copied into slots by all loads of experts."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """Results of a step."""

    rows: list[RowOutput]
    """Results of the rows in `SchedulerOutput.scheduled`, in the same order."""
    loads_done: list[tuple[int, int]] = field(default_factory=list)
    """(load id, number of its leading blocks that are valid) of loads that ended since the last report."""
    timing: StepTiming | None = None
    """Times of a step with `is_timed`; None: not wanted, or the runner does not know them."""
    has_caught_up: bool = False
    """Whether the step took longer than its tokens suggest, because a draft model lacked many tokens."""
    experts: ExpertCounts | None = None
    """Counts of offloaded experts; None: no expert is offloaded."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Properties of a runner and its model for the engine and its frontends."""

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
    """Identity of computed keys and values, as JSON: weights, shape, code and device, which decide the
    bits. Empty unless blocks or results are kept where other processes may find them."""
    hidden_size: int = 0
    deepstack_levels: int = 0
    """Number of layers, from the first on, after which image features are added to the hidden states
    again."""
    pooling: Pooling = field(default_factory=Pooling)
    takes_position_ids: bool = False
    """Whether prompt positions may have three axes (M-RoPE)."""
    accepts_image_embeds: bool = True
    """Whether requests may give `image_embeds`."""
    has_joint_images: bool = False
    """Whether the tokens of an image see each other in both directions."""
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 0
    """Number of CPU threads that compute steps, in each rank; 0: another device computes them."""
    start_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the runner's start, or of its latest wake, by the phase's name."""
    work: ModelWork | None = None
    """Least bytes and operations that steps of the model need; None: not known."""
    adapter_targets: tuple[AdapterTarget, ...] = ()
    """Products of the model that adapters may change; empty without `enable_lora`."""


class EngineCoreOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """Output for one choice of a request, usually of one step. An output with a `finish_reason` is the
    choice's last; one with an `error` is the last of all choices."""

    request_id: str
    """Id that was given to the engine, the same for every choice."""
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens taken from the prefix cache or a KV tier at the request's first admission; for
    a forked choice, all of them. Set in the first output of a choice if that has tokens or an embedding."""
    error: str | None = None
    error_code: str = ""
    """Name of the Triton status code of `error`."""
    index: int = 0
    """Index of the choice, in [0, n). A request has ended when each of its choices has a `finish_reason`; an
    output with `error` ends all of them."""
    cumulative_logprob: float | None = None
    """Sum of the choice's log-probabilities, set with `finish_reason` if beam search ranked it; else None."""
    admitted_at: float = 0.0
    """When the request first ran, in seconds of the scheduler's clock. Set in the first output of a choice,
    and in its last if it was ended from outside; 0: not set, or it never ran."""
    first_token_at: float = 0.0
    """When the choice's first token, or its embedding, was processed, in seconds of the scheduler's clock.
    Set in the first output of a choice if that has either; 0: not set."""
    num_preemptions: int = 0
    """How often the choice lost its blocks by a preemption, a failed load or a failed step; in beam search
    the most of one beam. Set with `finish_reason` unless there is an `error`."""
    num_draft_tokens: int = 0
    """Number of draft tokens of the choice that steps of this engine have verified so far."""
    num_accepted_drafts: int = 0
    """Number of the draft tokens in `num_draft_tokens` that became output."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each prompt token, None for the first token. Set in the first output of choice 0
    if the request wants them and that output has tokens."""
    seed: int | None = None
    """Seed of the request, set in the first output of choice 0 if that has tokens. None: not set (as in beam
    search), or a greedy request that states no seed."""
    embedding: bytes = b""
    """Embedding or scores as in `RowOutput`, set with `finish_reason`; empty: tokens are wanted, or the
    prompt was not completed."""

    def by_token(self) -> Iterator[EngineCoreOutput]:
        """Yields this output's tokens, each in an output of its own with the token's log-probabilities. Only
        the last has `finish_reason`, `stop_reason` and `cumulative_logprob`; all have the other fields."""
        before_end = {"finish_reason": None, "stop_reason": None, "cumulative_logprob": None}
        last = len(self.new_token_ids) - 1
        for at, token_id in enumerate(self.new_token_ids):
            logprobs = None if self.logprobs is None else [self.logprobs[at]]
            beside = {} if at == last else before_end
            yield msgspec.structs.replace(self, new_token_ids=[token_id], logprobs=logprobs, **beside)


class WaitingCounts(msgspec.Struct, frozen=True):
    """Number of sequences in the queue by what they wait for; the sum is all of them. Choices that have not
    forked yet count as one sequence."""

    choices: int = 0
    """Number of beams that wait for the other beams of their request."""
    tenant: int = 0
    """Number that wait because their tenant is at its limit of running requests."""
    adapter: int = 0
    """Number that wait for a slot for their adapter, or for the adapter's weights."""
    seats: int = 0
    blocks: int = 0
    budget: int = 0
    step: int = 0
    """Number that wait for the next step and, as far as is known, for nothing else."""


class SchedulerStats(msgspec.Struct, frozen=True):
    """State of the scheduler and the block pool at one time, for metrics and traces."""

    step: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    """Number of preemptions since start."""
    num_scheduled_tokens: int
    """Number of tokens in the steps planned since start, drafts and recomputation included."""
    num_cached_tokens: int = 0
    """Number of tokens since start that requests took from the prefix cache or a KV tier when they were first
    admitted."""
    num_cached_blocks: int = 0
    """Number of blocks without references whose content is cached."""
    num_pinned_blocks: int = 0
    num_swaps: int = 0
    """Number of preemptions since start with a planned move of the blocks to the host tier."""
    num_loaded_tokens: int = 0
    """Number of tokens since start that need not be computed, thanks to complete loads from KV tiers, also
    after swaps."""
    num_recomputed_tokens: int = 0
    """Number of tokens since start that were computed again after a preemption."""
    num_queried_tokens: int = 0
    """Number of tokens since start that new requests had when they were admitted, without the engine's own
    requests."""
    num_draft_tokens: int = 0
    """Number of draft tokens that steps verified since start."""
    num_accepted_drafts: int = 0
    """Number of these draft tokens that became output."""
    num_batch_rows: int = 0
    """Number of rows in the latest step that had any; `num_batch_tokens` is the number of its tokens. Both
    are 0 while no request is unfinished."""
    num_batch_tokens: int = 0
    num_loading: int = 0
    """Number of requests whose blocks are being loaded from a KV tier, including some that have ended."""
    waiting: WaitingCounts = WaitingCounts()
    num_adapter_slots: int = 0
    """Number of slots with an adapter that running requests use."""
    num_adapter_hits: int = 0
    """Number of requests since start that found their adapter in a slot when they began."""
    num_adapter_loads: int = 0
    """Number of loads of adapters into slots since start."""
    num_adapter_evictions: int = 0
    """Number of adapters since start that were replaced in their slot by another."""
    experts: ExpertCounts = msgspec.field(default_factory=ExpertCounts)
    """Counts of offloaded experts."""


@dataclass(slots=True)
class RequestOutput:
    """Output of one choice of a request for its caller: what came since the choice's previous output, or all
    of it so far."""

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
    """Text of the model's reasoning, which is then not in `text`; empty if the answer is not parsed for
    reasoning."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls as OpenAI's deltas: pieces of a call have its index; the first piece has its id and name."""
    item: int = 0
    """Index of the prompt that the choice belongs to, for a request with several prompts."""
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens of the choice so far, without the opening tag and with the closing tag; 0 if
    the answer is not parsed for reasoning."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of each prompt token, None for the first token; set only in the first output of
    choice 0."""
    embedding: bytes = b""
    """Embedding or scores as in `EngineCoreOutput`."""
    others: list[RequestOutput] = field(default_factory=list)
    """Choices 1, 2, ... of the same request; only `quire.LLM` sets them."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def after(self, before: RequestOutput | None) -> RequestOutput:
        """Appends this delta to `before` and returns this object, which then holds both. Joins text,
        reasoning, tool calls, token ids and log-probabilities; all other fields stay this delta's. `before`
        must not be used again; None: this delta is the first."""
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
    """Appends the pieces in `deltas` to whole calls, and returns the whole calls; `calls` must not be used
    again."""
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append(delta)
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
