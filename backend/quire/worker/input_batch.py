"""InputBatch: what the runner remembers of its requests, and the flat tensors of a step.

The batch is ragged and flat (no padding): tokens of all rows one after the other, with `query_start_loc`
marking the borders. State is kept by request; a step's arrays are built from it with a handful of numpy
calls whose number does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.layers.context import AdapterStep
from quire.models.interface import ForwardInputs
from quire.models.kv_spec import KVLayers
from quire.outputs import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.request.logits_processors import LogitsProcessor, RowProcessors
from quire.request.multimodal import PromptEmbeds
from quire.request.sampling_params import choice_seed
from quire.worker.block_table import BlockTable
from quire.worker.device import to_device, to_device_together
from quire.worker.grammar import Grammars, RowGrammar
from quire.worker.sampling_batch import SamplingRow
from quire_kernels.metadata import AttentionMetadata


@dataclass(slots=True)
class CachedRequest:
    """A request the runner holds a block-table row for."""

    row: int
    token_ids: list[int]
    sampling: SamplingRow
    embeds: PromptEmbeds | None = None
    choices: list[SamplingRow] = field(default_factory=list)
    """Rows of choices 1, 2, ... until the first tokens are drawn."""
    position_delta: int = 0
    """Position of a token behind the prompt less its index; see `PromptEmbeds.position_delta`."""
    slot: int = -1
    """Slot of the request's adapter; -1: it has none."""
    pooled: torch.Tensor | None = None
    """float32 [hidden_size]: sum of the hidden states so far, where their mean is wanted."""
    num_drafted: int = 0
    """Leading tokens whose keys and values a draft model has."""

    @property
    def num_prompt_tokens(self) -> int:
        return self.sampling.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those known to the device only included."""
        return len(self.token_ids) + self.sampling.num_pending

    def on_sampled(self) -> None:
        """A token is drawn for it, choice 0's where there are several: later draws are single.

        With beam search the token is none of the sequence's yet: the scheduler gives those it chooses.
        """
        self.choices = []
        if not self.sampling.is_beam:
            self.sampling.num_pending += 1

    def on_token(self, token_ids: list[int]) -> None:
        """The host learns of the oldest token drawn, and of those behind it that were drawn of drafts."""
        if not self.sampling.is_beam:
            self.sampling.num_pending -= 1
            self.token_ids += token_ids
            # Behind its last right draft is what the newest token stands in place of.
            self.num_drafted = min(self.num_drafted, len(self.token_ids) - 1)

    def on_failed(self) -> None:
        """The oldest token drawn is none, and the request ends. What a step under way draws for it does not
        matter: any token stands for the one that is missing, and nobody is asked who would see it."""
        self.on_token([0])
        self.sampling.processors = self.sampling.grammar = None


class PromptRow(NamedTuple):
    """Positions of a row that are asked for the log-probabilities of the prompt's tokens behind them."""

    number: int
    """Index of the row in the step."""
    most: int
    """How many of the most likely tokens are to be told."""
    first: int
    """The first of the positions, as a token of the batch."""
    targets: list[int]
    """The token of the prompt behind each of them."""


class PoolRow(NamedTuple):
    """Tokens of a row whose hidden states make an embedding."""

    number: int
    """Row of the step."""
    first: int
    """The first of them, as a token of the batch."""
    end: int
    """The one behind the last of them."""
    state: CachedRequest
    is_last: bool
    """Whether the prompt is complete with them."""


@dataclass(slots=True)
class StepInputs:
    """Tensors of one step."""

    forward: ForwardInputs
    """Inputs of the model. Its `rows` are the tokens that are sampled from, or all where log-probabilities of
    the prompt or embeddings need their hidden states."""
    sample_indices: torch.Tensor
    """int64 [num_logits]: the last token of each row that samples, and those before it that drafts follow."""
    samples: list[tuple[int, CachedRequest]]
    """[num_samples]: row of the step and its request, once for each choice or draft to draw."""
    sample_rows: torch.Tensor
    """int64 [num_logits]: the requests' rows of the block table."""
    sampling_rows: list[SamplingRow]
    """[num_samples]"""
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Draft tokens at the end of a row, by row of the step. The row samples behind each of them, and behind
    the token before the first."""
    choice_indices: torch.Tensor | None = None
    """int64 [num_samples]: which row of logits each sample is drawn from; None: each has its own."""
    first_draws: torch.Tensor | None = None
    """int64 [num_logits]: of each row of logits, its first sample; None: each has one."""
    prompt_rows: list[PromptRow] = field(default_factory=list)
    """In ascending order."""
    pool_rows: list[PoolRow] = field(default_factory=list)
    """Nothing is sampled of these."""
    are_decodes: bool = False
    """Whether each row is one token, which the host knows, and one is drawn of it."""

    @property
    def wants_best_only(self) -> bool:
        """Whether of each row that samples the largest of the model's own logits is all that matters."""
        return self.choice_indices is None and all(row.wants_best_only for row in self.sampling_rows)


class InputBatch:
    """Owner of the requests' rows on one worker.

    Args:
        kv_cache: the pool of the blocks in their tables.
        block_size: tokens per block.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        kv_cache: KVLayers,
        block_size: int,
        device: torch.device,
        num_groups: int = 1,
        grammars: Grammars | None = None,
        processors: Mapping[str, Callable[..., LogitsProcessor]] | None = None,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_table = BlockTable(num_groups, max_num_seqs, max_blocks, block_size)
        self.requests: dict[str, CachedRequest] = {}
        self.device = device
        self._kv_cache = kv_cache
        self._processors = processors or {}
        self._prompts: dict[str, int] = {}
        """First prompt position whose log-probabilities are to be computed, by id of the requests that ask
        for them."""
        self.embedded: set[str] = set()
        """Requests whose embeddings are wanted, not tokens."""
        self.adapted: set[str] = set()
        """Requests with an adapter."""
        self._grammars = grammars
        self._last: StepInputs | None = None
        """Inputs of the step before, which the next step may bring forward by a token of each row. None: it
        may not, as that step was not all decodes or the device is not a CPU."""
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """The newest token drawn for each row of the block table, -1 where there was none to draw.

        For the next step, which may be under way before the host knows it. The last entry is no request's.
        """

    def update(self, output: SchedulerOutput) -> None:
        """Applies the scheduler's differences: drops first, then new rows, new tokens and new blocks."""
        for request_id in output.dropped_request_ids:
            dropped = self.requests.pop(request_id, None)
            if dropped is not None:
                self.block_table.release(dropped.row)
                self._prompts.pop(request_id, None)
                self.embedded.discard(request_id)
                self.adapted.discard(request_id)
        for scheduled in output.scheduled:
            if scheduled.new is not None:
                self._add(scheduled.request_id, scheduled.new)
            if scheduled.given_token_ids:
                self.requests[scheduled.request_id].token_ids += scheduled.given_token_ids
            if any(scheduled.new_block_ids):
                self.block_table.append(self.requests[scheduled.request_id].row, scheduled.new_block_ids)

    def _add(self, request_id: str, new: NewRequestData) -> None:
        assert request_id not in self.requests, f"{request_id} is already in the batch"
        token_ids, named = list(new.token_ids), new.sampling_params.logits_processors
        sampling, *choices = (
            SamplingRow(
                params=new.sampling_params,
                token_ids=token_ids,
                num_prompt_tokens=new.num_prompt_tokens,
                eos_token_ids=new.eos_token_ids,
                seed=choice_seed(new.sampling_params.seed or 0, index),
                grammar=self._grammar(new),
                processors=RowProcessors(self._processors, named) if named else None,
            )
            for index in range(new.num_choices)
        )
        if new.sampling_params.prompt_logprobs is not None:
            self._prompts[request_id] = new.num_prompt_logprobs
        if new.sampling_params.dimensions:
            self.embedded.add(request_id)
        if new.slot >= 0:
            self.adapted.add(request_id)
        delta = 0 if new.embeds is None else new.embeds.position_delta
        self.requests[request_id] = CachedRequest(
            self.block_table.assign(), token_ids, sampling, new.embeds, choices, delta, new.slot
        )

    def _grammar(self, new: NewRequestData) -> RowGrammar | None:
        structured = new.sampling_params.structured_output
        if structured is None:
            return None
        assert self._grammars is not None, "this worker has no grammars"
        return self._grammars.begin(structured, new.num_prompt_tokens, new.sampling_params.ignore_eos)

    def prepare(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """The flat tensors for the scheduled rows, in their order; on the host they are valid until the next
        call."""
        inputs = self._last
        if inputs is None or not self._advance(inputs, scheduled):
            inputs = self._build(scheduled)
            self._last = inputs if inputs.are_decodes and self.device.type == "cpu" else None
        return inputs

    def _advance(self, inputs: StepInputs, scheduled: list[ScheduledRequest]) -> bool:
        """Brings the inputs of the step before forward, in place, if the same requests compute their next
        tokens; else nothing changes."""
        if len(scheduled) != len(inputs.samples):
            return False
        tokens, seq_lens, entered = [], [], []
        size, forward = self.block_table.block_size, inputs.forward
        first, metas = forward.metas[0], forward.metas
        for item, (number, state), position in zip(
            scheduled, inputs.samples, first.seq_lens_list, strict=True
        ):
            if (
                self.requests[item.request_id] is not state
                or item.num_computed_tokens != position
                or item.num_scheduled_tokens != 1
                or not item.samples
                or position >= len(state.token_ids)
            ):
                return False
            tokens.append(state.token_ids[position])
            seq_lens.append(position + 1)
            if position % size == 0:
                entered.append((number, state.row, position // size))
        longest = max(seq_lens)
        if longest > first.block_table.shape[1] * size:
            return False
        forward.input_ids.numpy()[:] = tokens
        for tensor in (forward.positions, first.seq_lens, *(meta.slot_mapping for meta in metas)):
            array = tensor.numpy()
            array += 1
        for number, row, column in entered:
            for meta, table in zip(metas, self.block_table.table, strict=True):
                block_id = table[row, column]
                meta.block_table.numpy()[number, column] = block_id
                meta.slot_mapping.numpy()[number] = int(block_id) * size
        first = replace(first, max_seq_len=longest, seq_lens_list=seq_lens, plans={}, shared_plans={})
        others = (first.with_blocks(meta.block_table, meta.slot_mapping) for meta in metas[1:])
        forward.metas = [first, *others]
        return True

    def _build(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        rows: list[int] = []
        starts, lens, seq_lens = [0], [], []
        # Of each token.
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        unknown: list[tuple[int, int]] = []
        given: list[tuple[PromptEmbeds, ScheduledRequest, int]] = []
        sample_indices: list[int] = []
        sampled: list[tuple[int, CachedRequest]] = []
        sampling_rows: list[SamplingRow] = []
        drafts: dict[int, Sequence[int]] = {}
        for number, item in enumerate(scheduled):
            state = self.requests[item.request_id]
            begin, count = item.num_computed_tokens, item.num_scheduled_tokens
            row, known, end = state.row, state.token_ids, begin + count
            if state.embeds is not None:
                given.append((state.embeds, item, len(tokens)))
            if count == 1 and begin < len(known):
                tokens.append(known[begin])
                positions.append(begin)
                owners.append(row)
            elif item.draft_token_ids:
                tokens += [known[begin], *item.draft_token_ids]
                positions += range(begin, end)
                owners += [row] * count
            else:
                tokens += known[begin:end]
                positions += range(begin, end)
                owners += [row] * count
                if end > len(known):
                    # The newest token, drawn in a step whose result the host has not seen. Where there are
                    # more of these, the others were computed by steps before this one.
                    assert end == state.num_tokens and max(begin, len(known)) == end - 1, (item, state)
                    unknown.append((len(tokens), row))
                    tokens.append(0)
            rows.append(row)
            starts.append(len(positions))
            lens.append(count)
            seq_lens.append(end)
            if item.draft_token_ids:
                drafts[number] = item.draft_token_ids
                sampled += [(number, state)] * count
                sample_indices += range(len(tokens) - count, len(tokens))
                sampling_rows += state.sampling.behind(item.draft_token_ids)
            elif item.samples and item.request_id not in self.embedded:
                sampled.append((number, state))
                sample_indices.append(len(tokens) - 1)
                sampling_rows.append(state.sampling)
        num_tokens = len(positions)
        assert len(tokens) == num_tokens, "the scheduler asked for tokens that are not known yet"

        flat, longest = np.array((tokens, positions, owners)), max(seq_lens)
        tables, slots = self.block_table.rows(rows, longest), self.block_table.slots(flat[2], flat[1])
        there = to_device_together(
            {
                "starts": np.array(starts, dtype=np.int32),
                "seq_lens": np.array(seq_lens, dtype=np.int32),
                "tokens": flat[0],
                "positions": self._axes(flat[1], given),
                "sample_indices": np.array(sample_indices, dtype=np.int64),
                "sample_rows": np.array([state.row for _, state in sampled], dtype=np.int64),
                **{f"table {group}": table for group, table in enumerate(tables)},
                **{f"slots {group}": slots for group, slots in enumerate(slots)},
            },
            self.device,
        )
        meta = AttentionMetadata(
            query_start_loc=there["starts"],
            seq_lens=there["seq_lens"],
            block_table=there["table 0"],
            slot_mapping=there["slots 0"],
            num_tokens=num_tokens,
            max_query_len=max(lens),
            max_seq_len=longest,
            query_lens=lens,
            seq_lens_list=seq_lens,
        )
        others = (
            meta.with_blocks(there[f"table {group}"], there[f"slots {group}"])
            for group in range(1, len(tables))
        )
        input_ids = there["tokens"]
        if unknown:
            places, owned = to_device(np.array(unknown).T, self.device).unbind()
            # A row whose logits were not finite ends with an error; its next one computes any token.
            input_ids[places] = self.last_tokens[owned].clamp(min=0)
        forward = ForwardInputs(
            input_ids=input_ids,
            positions=there["positions"],
            kv_cache=self._kv_cache,
            metas=[meta, *others],
            embeds=self._embeds(given),
            adapters=self._adapters(scheduled, lens) if self.adapted else None,
        )
        inputs = StepInputs(
            forward=forward,
            sample_indices=there["sample_indices"],
            samples=sampled,
            sample_rows=there["sample_rows"],
            sampling_rows=sampling_rows,
            drafts=drafts,
        )
        if self._prompts:
            inputs.prompt_rows = self._prompt_rows(scheduled, starts)
        if self.embedded:
            inputs.pool_rows = self._pool_rows(scheduled, starts)
        if not (inputs.prompt_rows or inputs.pool_rows):
            forward.rows = inputs.sample_indices
        if any(state.choices for _, state in sampled):
            self._draw_several(inputs)
        else:
            inputs.are_decodes = num_tokens == len(sampled) == len(scheduled) and not (
                given or unknown or inputs.prompt_rows
            )
        return inputs

    def _adapters(self, scheduled: list[ScheduledRequest], lens: list[int]) -> AdapterStep | None:
        """Adapter slots of a step's tokens; `lens`: tokens of each row. None: no row has an adapter."""
        slots = [self.requests[item.request_id].slot for item in scheduled]
        used = frozenset(slots) - {-1}
        if not used:
            return None
        return AdapterStep(to_device(np.repeat(np.array(slots, dtype=np.int32), lens), self.device), used)

    def _pool_rows(self, scheduled: list[ScheduledRequest], starts: list[int]) -> list[PoolRow]:
        """Rows of this step whose request wants an embedding; `starts`: each row's first token of the batch,
        and the batch's end."""
        return [
            PoolRow(number, start, end, self.requests[item.request_id], item.samples)
            for number, (item, start, end) in enumerate(zip(scheduled, starts, starts[1:], strict=False))
            if item.request_id in self.embedded
        ]

    def _prompt_rows(self, scheduled: list[ScheduledRequest], starts: list[int]) -> list[PromptRow]:
        """Rows of this step whose request wants log-probabilities of its prompt; `starts`: each row's first
        token of the batch."""
        rows = []
        for number, (item, start) in enumerate(zip(scheduled, starts, strict=False)):
            known = self._prompts.get(item.request_id)
            if known is None:
                continue
            state, end = self.requests[item.request_id], item.num_computed_tokens + item.num_scheduled_tokens
            begin, last = max(item.num_computed_tokens, known), state.num_prompt_tokens - 1
            targets = state.token_ids[begin + 1 : min(end, last) + 1]
            if targets:
                count = state.sampling.params.prompt_logprobs or 0
                rows.append(PromptRow(number, count, start + begin - item.num_computed_tokens, targets))
            if end >= last:
                del self._prompts[item.request_id]
        return rows

    def _draw_several(self, inputs: StepInputs) -> None:
        """Repeats the samples of requests whose choices all draw their first token from one row of logits."""
        draws = [
            (index, sample, row)
            for index, sample in enumerate(inputs.samples)
            for row in (inputs.sampling_rows[index], *sample[1].choices)
        ]
        choice_indices = np.array([index for index, _, _ in draws])
        inputs.samples = [sample for _, sample, _ in draws]
        inputs.sampling_rows = [row for _, _, row in draws]
        inputs.choice_indices = to_device(choice_indices, self.device)
        inputs.first_draws = to_device(np.unique(choice_indices, return_index=True)[1], self.device)

    @staticmethod
    def _axes(
        positions: npt.NDArray[np.int64], given: list[tuple[PromptEmbeds, ScheduledRequest, int]]
    ) -> npt.NDArray[np.int64]:
        """`positions` as they are, or on three axes where a request states its own."""
        if all(embeds.position_ids is None for embeds, _, _ in given):
            return positions
        axes = np.tile(positions, (3, 1))
        for embeds, item, start in given:
            if embeds.position_ids is None:
                continue
            own = embeds.position_ids[:, item.num_computed_tokens :][:, : item.num_scheduled_tokens]
            behind = start + own.shape[1]
            axes[:, start:behind] = own
            axes[:, behind : start + item.num_scheduled_tokens] += embeds.position_delta
        return axes

    def _embeds(
        self, given: list[tuple[PromptEmbeds, ScheduledRequest, int]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The given embeddings that fall into this step, and the flat tokens they belong to."""
        indices: list[npt.NDArray[np.int64]] = []
        rows: list[torch.Tensor] = []
        for embeds, item, start in given:
            begin = item.num_computed_tokens
            for token, values in embeds.rows_in(begin, begin + item.num_scheduled_tokens):
                first = start + token - begin
                indices.append(np.arange(first, first + len(values), dtype=np.int64))
                # A copy of what lies in shared memory: torch is not to be given read-only memory.
                rows.append(
                    values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
                )
        if not rows:
            return None
        flat = torch.cat([part.to(self.device) for part in rows])
        return to_device(np.concatenate(indices), self.device), flat
