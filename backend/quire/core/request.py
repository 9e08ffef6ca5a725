"""Request: the engine's state of one sequence, owned by the thread that owns the scheduler."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.adapters import Adapter
from quire.outputs import TokenLogprobs
from quire.request.multimodal import PromptEmbeds
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams

if TYPE_CHECKING:
    from quire.core.drafts import Drafter


class RequestStatus(enum.IntEnum):
    """Stage of a request; `FINISHED` is terminal."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FinishReason(str, enum.Enum):
    """The reason why a request ended. If a request has several choices, each of them has its own reason."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    SHUTDOWN = "shutdown"
    TOOL_CALLS = "tool_calls"
    """Set by a frontend in place of STOP if the answer holds tool calls and all of them are complete."""

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class RequestBlocks:
    """Blocks that one request holds in the pool."""

    blocks: list[list[int]]
    """Block ids per KV group, the same number in each; NULL_BLOCK for an entry without a block."""
    released: list[int]
    """Number of leading blocks that are NULL_BLOCK, per KV group."""
    num_cached: int = 0
    """Number of leading blocks of keys and values that need not be offered to the prefix cache any more."""


class SwappedBlocks(NamedTuple):
    """Blocks of a preempted request in the host tier."""

    num_tokens: int
    """Number of computed tokens whose keys and values, or states, these blocks hold."""
    keys: list[dict[int, bytes]]
    """Key of each block by its position in the block table, per KV group."""


_DEFAULT_SCHEDULING = SchedulingParams()


class Request:
    """One sequence being generated, or a prompt being pooled.

    There are no phases. `num_computed_tokens` counts tokens whose KV is in the cache, or will be when the
    planned steps and loads are done. Under the scheduler's budget it catches up with `num_tokens` (prompt and
    output known so far) plus `num_pending_tokens` (which those steps will sample). A preempted request has
    `num_computed_tokens == 0` again and keeps its output.
    """

    __slots__ = (
        "adapter",
        "admitted_at",
        "arrival_time",
        "block_hashes",
        "drafter",
        "embeds",
        "end_token_ids",
        "eos_token_ids",
        "external_id",
        "finish_reason",
        "group_id",
        "in_runner",
        "index",
        "is_paused",
        "load_id",
        "num_cached_tokens",
        "num_computed_before_preemption",
        "num_computed_tokens",
        "num_deaths",
        "num_forced_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sequences",
        "plain_decode_until",
        "prompt_logprobs",
        "rank",
        "request_id",
        "reuses_prefix",
        "sampling_params",
        "scheduling",
        "status",
        "stop_reason",
        "swapped",
        "table",
        "token_ids",
        "uses_tiers",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float | None = None,
        scheduling: SchedulingParams = _DEFAULT_SCHEDULING,
        external_id: str = "",
        embeds: PromptEmbeds | None = None,
        reuses_prefix: bool = True,
        adapter: Adapter | None = None,
    ) -> None:
        assert prompt_token_ids, "an empty prompt is refused before it becomes a Request"
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.eos_token_ids = eos_token_ids
        self.end_token_ids = frozenset(sampling_params.stop_token_ids)
        """Token ids that end the request if it then has at least `min_tokens` output tokens."""
        if not sampling_params.ignore_eos:
            self.end_token_ids |= eos_token_ids
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.admitted_at = 0.0
        """When the request was first admitted, in seconds on the scheduler's clock; 0: not yet. A choice that
        forks begins with its parent's value."""
        self.scheduling = scheduling
        self.external_id = external_id
        self.embeds = embeds
        self.adapter = adapter
        """LoRA adapter of the request; None: the base model."""
        self.block_hashes: list[bytes] = []
        self.rank: tuple[float, ...] = (0.0, 0)
        """Rank in the queue: smaller is usually served earlier. Set once by the queue policy, and unique:
        the second entry is an arrival number. Choices that fork have the rank of their parent, with their
        index as a third entry."""
        self.num_sequences = sampling_params.num_sequences
        """Number of seats that the request occupies while it runs: its own, and one for each choice that will
        fork from it."""
        self.index = 0
        """Index of the choice or beam; 0 for a request that has not forked."""
        self.group_id = request_id
        """Id that all choices or beams of a request have in common: the `request_id` of the first. It differs
        from `request_id` only in those that forked from another one."""
        self.is_paused = False
        """Whether this beam gets no rows until all other beams of its group have reported their
        candidates."""
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        """Number of planned rows that sample and whose results are not processed yet. A row counts as one
        token, even with drafts."""
        self.drafter: Drafter | None = None
        """Guesses the next tokens; None: no drafts, or this engine has generated no token yet."""
        self.num_forced_tokens = 0
        """Number of newest tokens to send to the runner with the next row, because beam search chose them and
        the runner did not sample them."""
        self.num_computed_before_preemption = 0
        """Most computed tokens that the request had when it gave up its blocks. Those found cached are
        included, even if they could not be loaded."""
        self.num_cached_tokens = 0
        """Number of tokens found cached at the first admission; for a forked choice all prompt tokens. A load
        of the request's blocks that fails sets it to 0."""
        self.prompt_logprobs: list[TokenLogprobs] | None = (
            None if sampling_params.prompt_logprobs is None else []
        )
        """Log-probabilities of the computed prompt tokens, from the second on; None: not wanted, or already
        returned."""
        self.in_runner = False
        """Whether the runner has a row for the request."""
        self.table: RequestBlocks | None = None
        """The request's blocks; None: it has none. Only the KVCacheManager changes them."""
        self.plain_decode_until = 0
        """Number of computed tokens up to which each one-token row is a plain decode: it samples one token,
        and needs neither a new block nor other work of the planner. 0 while the request does not run."""
        self.load_id: int | None = None
        """Id of the load from a KV tier that is under way; the request computes nothing until it ends. None:
        no load."""
        self.swapped: SwappedBlocks | None = None
        """Blocks that were copied to the host tier at the latest preemption and are kept there; None: there
        are none."""
        self.reuses_prefix = reuses_prefix
        """Whether cached prefixes may be used; False if pooling needs hidden states of other tokens than the
        last."""
        self.uses_tiers = reuses_prefix
        """Whether the request's blocks may be found in KV tiers, and be swapped out. False if `reuses_prefix`
        is, and after a load of its blocks has failed."""
        self.num_preemptions = 0
        self.num_deaths = 0
        """Number of deaths of the request's engines, counted anew from each death at which the request was
        not an in-flight suspect (`core/probation.py`). Above 0, it was sent to an earlier engine."""
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Number of tokens still to compute, pending ones included; usually 1 while the request decodes."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def decodes(self) -> bool:
        """Whether one token is left to compute, after which another is sampled. Never for a pooled prompt,
        which samples none."""
        return self.num_missing == 1 and not self.sampling_params.dimensions

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Returns a copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading tokens that a cached prefix may cover. Leaves out the last token, which the next
        is sampled from, and prompt tokens whose log-probabilities are wanted and not yet known. 0 if
        `reuses_prefix` is False."""
        if not self.reuses_prefix:
            return 0
        count = len(self.token_ids) - 1
        return count if self.prompt_logprobs is None else min(count, len(self.prompt_logprobs))

    def add_prompt_logprobs(self, found: list[TokenLogprobs], end: int) -> None:
        """Adds the prompt log-probabilities of a row that computed the tokens before `end`. Entries that were
        computed again after a preemption are added once."""
        assert self.prompt_logprobs is not None, self
        begin = min(end, self.num_prompt_tokens - 1) - len(found)
        num_known = len(self.prompt_logprobs) - begin
        assert num_known >= 0, f"{self}: no log-probabilities before {begin}"
        self.prompt_logprobs += found[num_known:]

    def take_prompt_logprobs(self, last: list[TokenLogprobs] | None) -> list[TokenLogprobs | None] | None:
        """Returns one entry for each prompt token, the first of them None. Later calls return None, as do all
        calls if no prompt log-probabilities are wanted.

        Args:
            last: log-probabilities from the row that computed the end of the prompt.
        """
        if self.prompt_logprobs is None:
            return None
        self.add_prompt_logprobs(last or [], self.num_prompt_tokens)
        found, self.prompt_logprobs = self.prompt_logprobs, None
        assert len(found) == self.num_prompt_tokens - 1, (self, len(found))
        return [None, *found]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def check_stop(self, max_model_len: int) -> bool:
        """Sets `finish_reason` and `stop_reason` if the newest token ends the request; returns whether it
        does. Stop strings are left to the frontend."""
        end = self.end_by(self.token_ids[-1], len(self.token_ids) - self.num_prompt_tokens, max_model_len)
        if end is None:
            return False
        self.finish_reason, self.stop_reason = end
        return True

    def end_by(
        self, token_id: int, num_output_tokens: int, max_model_len: int
    ) -> tuple[FinishReason, int | None] | None:
        """Returns the finish reason and the stop reason if `token_id`, as the last of `num_output_tokens`
        output tokens, ends the request; None: it does not. The stop reason is the token id, or None for
        LENGTH and, without `ignore_eos`, for EOS."""
        if token_id in self.end_token_ids and num_output_tokens >= self.sampling_params.min_tokens:
            is_eos = token_id in self.eos_token_ids and not self.sampling_params.ignore_eos
            return FinishReason.STOP, None if is_eos else token_id
        if num_output_tokens >= self.max_output_tokens(max_model_len):
            return FinishReason.LENGTH, None
        return None

    def max_output_tokens(self, max_model_len: int) -> int:
        """Returns the most output tokens that the request may have."""
        limit = max_model_len - self.num_prompt_tokens
        max_tokens = self.sampling_params.max_tokens
        return limit if max_tokens is None or max_tokens > limit else max_tokens

    @property
    def log_fields(self) -> dict[str, str]:
        """Returns the ids that log records of the request carry."""
        return {"request_id": self.request_id, "external_id": self.external_id}

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
