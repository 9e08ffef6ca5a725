"""DraftModel: a smaller model that guesses the next tokens of requests.

Its KV cache has as many blocks as the model's, and a token lies where it does there, by the block table of
the layers that see everything: the scheduler need not know of it. What it writes of a block that requests
share is the same for all of them.

It computes nothing of a request before there are drafts to be made, and then all that it has missed, a prompt
found in the prefix cache among it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from quire.config import ModelConfig
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
"""Tokens of a request that it may have missed in a step like any other."""


def draft_config(config: ModelConfig, target: DecoderConfig) -> ModelConfig:
    """Configuration for loading the draft model: `config` with its path, and with the target's longest
    sequence where `max_model_len` is unset."""
    return replace(
        config,
        model=config.draft_model,
        model_class="",
        max_model_len=config.max_model_len or target.max_position_embeddings,
    )


def check_draft(draft: DecoderConfig, target: DecoderConfig) -> None:
    """Refuses a draft model that cannot guess for a model.

    Raises:
        ConfigError: says why.
    """
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
    """Tokens [begin, end) of a request that are to be computed."""

    row: int
    """Row of the block table."""
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


_NOTHING = _Span(0, 0, 0)


@dataclass(slots=True)
class _Wanted:
    """Drafts that a row lacks."""

    number: int
    """Row of the step."""
    state: CachedRequest
    count: int
    span: _Span = _NOTHING
    """Tokens of the request that the draft model has missed, as many of them as the step has room for."""
    drafts: list[int] = field(default_factory=list)
    """Ids of the draft tokens made so far."""

    @property
    def num_missed(self) -> int:
        return len(self.state.token_ids) - self.state.num_drafted

    @property
    def is_ready(self) -> bool:
        """Whether drafts can follow the span."""
        return self.span.end == len(self.state.token_ids)


class DraftModel:
    """The draft model, what it knows of each request being told by `CachedRequest.num_drafted`.

    Args:
        model: with weights.
        kv_cache: as many blocks as the target's.
        max_tokens: most tokens that are computed of what was missed, in a step.
    """

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
            The rows, of which those of requests that it has not caught up with have no drafts; and whether
            that took longer than drafts do.
        """
        lacking = [
            _Wanted(number, batch.requests[item.request_id], item.num_drafts)
            for number, item in enumerate(scheduled)
            if item.num_drafts and not item.draft_token_ids
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

    def _guess(self, wanted: Sequence[_Wanted], table: BlockTable) -> None:
        """Makes drafts, none where what was missed is too much for a step."""
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
        tokens = [token for one in computed for token in one.state.token_ids[one.span.begin : one.span.end]]
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
        for one in computed:  # but for its last draft
            one.state.num_drafted = one.span.end + max(0, len(one.drafts) - 1)

    def _draw(
        self, input_ids: torch.Tensor, spans: Sequence[_Span], rows: Sequence[SamplingRow], table: BlockTable
    ) -> torch.Tensor:
        """Computes the spans, and draws a token behind each of the first ones.

        Args:
            input_ids: int64 [num_tokens], of all spans.
            rows: of the spans that a token is drawn behind.

        Returns:
            int64 [len(rows)]; any token where the logits are not finite.
        """
        positions, meta, last = self._inputs(spans, table)
        inputs = ForwardInputs(input_ids, positions, self.kv_cache, [meta], last[: len(rows)])
        if rows and all(row.wants_best_only for row in rows):
            return self.model.next_tokens(inputs).clamp(min=0)
        hidden = self.model.forward(inputs)
        if not rows:
            return input_ids[:0]
        return draw(self.model.compute_logits(hidden), rows).token_ids.clamp(min=0)

    def _inputs(
        self, spans: Sequence[_Span], table: BlockTable
    ) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor]:
        """Positions int64 [num_tokens], metadata, and the last token of each span, int64 [num_spans]."""
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
    """Draws with a request's random numbers, by nothing but the logits."""
    asked = sampling.params
    params = SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        typical_p=asked.typical_p,
    )
    return SamplingRow(params, sampling.token_ids, sampling.num_prompt_tokens, frozenset(), sampling.seed)
