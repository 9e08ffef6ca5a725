"""DraftModel: a smaller model that guesses the next tokens of requests.

Its KV cache has as many blocks as the target model's. A token has the same slot in both, by the block table
of the full-attention layers, so the scheduler allocates nothing for the draft model. Requests that share a
block would all write the same content to it.

The draft model computes nothing of a request before drafts are wanted. Then it computes all tokens that it
has not computed for this request, over several steps if need be. A prompt found in the prefix cache is among
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from quire.config import MTP, ModelConfig
from quire.errors import ConfigError
from quire.layers.config import DecoderConfig
from quire.models.interface import ForwardInputs, Model
from quire.models.kv_groups import kv_groups
from quire.outputs import ScheduledRequest
from quire.request.sampling_params import SamplingParams
from quire.worker.block_table import BlockTable
from quire.worker.device import to_device, to_device_together
from quire.worker.input_batch import CachedRequest, InputBatch
from quire.worker.kv_cache import KVCache
from quire.worker.sampler import draw
from quire.worker.sampling_batch import SamplingRow
from quire_kernels.metadata import AttentionMetadata

_FEW = 16
"""Most tokens of a request that the draft model may lack without the step counting as a catch-up."""


def draft_config(config: ModelConfig, target: DecoderConfig) -> ModelConfig:
    """Returns the configuration for loading the draft model: `config` with the draft model's path and without
    `model_class`. If the draft is the model's own head, both stay. If `max_model_len` is unset, it is the
    target's. All experts are resident."""
    longest = config.max_model_len or target.max_position_embeddings
    config = replace(config, max_model_len=longest, max_resident_experts=None)
    return config if config.draft_model == MTP else replace(config, model=config.draft_model, model_class="")


def check_draft(draft: DecoderConfig, target: DecoderConfig) -> None:
    """Raises ConfigError if the vocabularies differ, if the draft model needs several KV groups, or if all
    layers of the target have a sliding window."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_model: its vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}"
        )
    num_groups = len(kv_groups(draft.kv_windows))
    if num_groups > 1:
        raise ConfigError(f"draft_model: its layers need {num_groups} KV groups, one is possible")
    if None not in target.sliding_windows:
        raise ConfigError(
            "draft_model: all layers of the model have a sliding window, so it keeps no block for every token"
        )


class _Span(NamedTuple):
    """Inputs [begin, end) of a request, to be computed."""

    row: int
    """Row in the block table."""
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


_NOTHING = _Span(0, 0, 0)


@dataclass(slots=True)
class Wanted:
    """A row that lacks drafts."""

    number: int
    """Index of the row in the step."""
    state: CachedRequest
    count: int
    num_inputs: int
    """Number of inputs that the request's known tokens give the draft model."""
    span: _Span = _NOTHING
    """Inputs of the request that the draft model lacks, as many as the step has room for."""
    drafts: list[int] = field(default_factory=list)
    """Ids of the draft tokens made so far."""

    @property
    def num_missed(self) -> int:
        return self.num_inputs - self.state.num_drafted

    @property
    def is_ready(self) -> bool:
        """Whether the span ends at the newest token, so that drafts can follow it."""
        return self.span.end == self.num_inputs


class DraftModel:
    """Runs the draft model. `CachedRequest.num_drafted` counts the inputs of each request that it has
    computed. An input is a token.

    Args:
        model: the draft model, with weights.
        kv_cache: its KV cache, with as many blocks as the target's.
        max_tokens: most missing tokens that it computes in a step.
    """

    _SHIFT = 0
    """Index of a request's token in its first input."""

    def __init__(self, model: Model, kv_cache: KVCache, max_tokens: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._max_tokens = max_tokens
        self._device = kv_cache.blocks.device

    def fill(
        self, scheduled: list[ScheduledRequest], batch: InputBatch
    ) -> tuple[list[ScheduledRequest], bool]:
        """Makes the drafts that rows of a step lack.

        Returns:
            The rows, without drafts for requests that the draft model has not caught up with; and whether
            catching up made the step longer than drafts alone would.
        """
        lacking = [
            Wanted(number, state, item.num_drafts, len(state.token_ids) - self._SHIFT)
            for number, item in enumerate(scheduled)
            if item.num_drafts and not item.draft_token_ids
            for state in (batch.requests[item.request_id],)
        ]
        if not lacking:
            return scheduled, False
        self._guess(lacking, batch.block_table)
        filled = list(scheduled)  # the rows themselves are the scheduler's
        for one in lacking:
            item = scheduled[one.number]
            filled[one.number] = msgspec.structs.replace(
                item,
                num_drafts=len(one.drafts),
                draft_token_ids=one.drafts,
                num_scheduled_tokens=item.num_scheduled_tokens - item.num_drafts + len(one.drafts),
            )
        return filled, any(one.span.size > _FEW or not one.is_ready for one in lacking)

    def prepare(self, inputs: ForwardInputs) -> None:
        """Asks in the target's inputs for the hidden states that `keep` needs; here for none."""

    def keep(self, hidden: torch.Tensor, inputs: ForwardInputs) -> None:
        """Stores what the draft model needs of the target's hidden states [num_tokens, hidden_size], for a
        step's tokens; here nothing."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies what `keep` stored, for blocks that the target's pool copies: (source, target) pairs. Here
        it does nothing."""

    def _guess(self, wanted: Sequence[Wanted], table: BlockTable) -> None:
        """Makes drafts for the rows, except those that lack too many tokens for this step."""
        left = self._max_tokens
        # Who has missed least goes first: long prompts make nobody else wait.
        for one in sorted(wanted, key=lambda one: one.num_missed):
            begin, count = one.state.num_drafted, min(one.num_missed, left)
            one.span = _Span(one.state.row, begin, begin + count)
            left -= count
        # Those with most drafts go first, so that the last forwards are of the first rows.
        ready = sorted((one for one in wanted if one.is_ready), key=lambda one: -one.count)
        computed = [*ready, *(one for one in wanted if one.span.size and not one.is_ready)]
        spans = [one.span for one in computed]
        tokens = [
            token
            for one in computed
            for token in one.state.token_ids[one.span.begin + self._SHIFT : one.span.end + self._SHIFT]
        ]
        rows = [_plain(one.state.sampling) for one in ready]
        drawn = [self._draw(to_device(np.array(tokens, dtype=np.int64), self._device), spans, rows, table)]
        for number in range(1, ready[0].count if ready else 0):
            rows = rows[: sum(one.count > number for one in ready)]
            for row in rows:
                row.num_pending += 1
            spans = [_Span(span.row, span.end, span.end + 1) for span in spans[: len(rows)]]
            drawn.append(self._draw(drawn[-1][: len(rows)], spans, rows, table))
        there = iter(torch.cat(drawn).tolist())
        for one in (one for step in drawn for one in ready[: len(step)]):
            one.drafts.append(next(there))
        for one in computed:
            one.state.num_drafted = self._num_computed(one)

    def _num_computed(self, one: Wanted) -> int:
        """Returns how many inputs of a request stay computed if all its drafts are right."""
        return one.span.end + max(0, len(one.drafts) - 1)  # but for its last draft

    def _draw(
        self, input_ids: torch.Tensor, spans: Sequence[_Span], rows: Sequence[SamplingRow], table: BlockTable
    ) -> torch.Tensor:
        """Computes the spans, and samples a token after each of the first len(rows) spans.

        Args:
            input_ids: int64 [num_tokens], tokens of all spans.
            rows: sampling rows of the spans to sample after.

        Returns:
            int64 [len(rows)]; token 0 where the logits hold NaN or have no finite maximum.
        """
        positions, meta, last = self._inputs(spans, table)
        return self._compute(
            ForwardInputs(input_ids, positions, self.kv_cache, [meta], last[: len(rows)]), rows
        )

    def _compute(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Computes a batch of inputs. Returns what `_draw` does."""
        if rows and all(row.wants_best_only for row in rows):
            return self.model.next_tokens(inputs).clamp(min=0)
        hidden = self.model.forward(inputs)
        if not rows:
            return inputs.input_ids[:0]
        return draw(self.model.compute_logits(hidden), rows).token_ids.clamp(min=0)

    def _inputs(
        self, spans: Sequence[_Span], table: BlockTable
    ) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
        """Returns positions int64 [num_tokens], metadata, and the index of each span's last token, int64
        [num_spans]."""
        rows, lens, ends = [one.row for one in spans], [one.size for one in spans], [one.end for one in spans]
        starts = np.concatenate(([0], np.cumsum(lens)))
        positions = np.concatenate([np.arange(one.begin, one.end) for one in spans])
        longest = max(ends)
        there = to_device_together(
            {
                "starts": starts.astype(np.int32),
                "seq_lens": np.array(ends, dtype=np.int32),
                "positions": positions,
                "last": starts[1:] - 1,
                # The first group's layers see everything, where any do.
                "table": table.rows(rows, longest)[0],
                "slots": table.slots(np.repeat(rows, lens), positions)[0],
            },
            self._device,
        )
        meta = AttentionMetadata(
            query_start_loc=there["starts"],
            seq_lens=there["seq_lens"],
            block_table=there["table"],
            slot_mapping=there["slots"],
            num_tokens=len(positions),
            max_query_len=max(lens),
            max_seq_len=longest,
            query_lens=lens,
            seq_lens_list=ends,
        )
        return there["positions"], meta, there["last"]


def _plain(sampling: SamplingRow) -> SamplingRow:
    """Returns a sampling row with a request's random numbers, temperature and filters, but without other
    transforms."""
    asked = sampling.params
    params = SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        typical_p=asked.typical_p,
    )
    return SamplingRow(params, sampling.token_ids, sampling.num_prompt_tokens, frozenset(), sampling.seed)
