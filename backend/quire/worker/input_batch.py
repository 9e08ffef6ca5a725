"""InputBatch: the runner's state of its requests, and the flat tensors of a step.

The batch is ragged and flat, without padding: the tokens of all rows follow each other, and `query_start_loc`
marks the borders. State is kept by request. A step's arrays are built from it with few numpy calls, most of
them for the whole batch.
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
    """A request for which the runner holds a block table row."""

    row: int
    token_ids: list[int]
    sampling: SamplingRow
    embeds: PromptEmbeds | None = None
    choices: list[SamplingRow] = field(default_factory=list)
    """Sampling rows of choices 1, 2, ... until their first tokens are sampled."""
    position_delta: int = 0
    """Difference between the position of a token after the prompt and its index; see
    `PromptEmbeds.position_delta`."""
    slot: int = -1
    """Slot of the request's adapter; -1: it has none."""
    pooled: torch.Tensor | None = None
    """[hidden_size]: pooling's result so far. For a mean, the float32 sum of the hidden states; for "cls",
    the first token's hidden state. None: nothing was pooled yet, or only the last token counts."""
    num_drafted: int = 0
    """Number of the request's leading inputs that count as computed by the draft model; see `DraftModel`."""

    @property
    def num_prompt_tokens(self) -> int:
        return self.sampling.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the request, including its pending ones (`SamplingRow.num_pending`)."""
        return len(self.token_ids) + self.sampling.num_pending

    def on_sampled(self) -> None:
        """Records that a step has sampled for the request. Forgets `choices`: later steps sample for them as
        requests of their own.

        With beam search the sampled token is not pending: the scheduler sends the tokens that it chooses.
        """
        self.choices = []
        if not self.sampling.is_beam:
            self.sampling.num_pending += 1

    def on_token(self, token_ids: list[int]) -> None:
        """Records that the host now knows the oldest pending token and, if its step had drafts, the tokens
        kept after it: `token_ids`. No effect with beam search."""
        if not self.sampling.is_beam:
            self.sampling.num_pending -= 1
            self.token_ids += token_ids
            # If the draft model has computed the newest token's place, that was with a wrong draft.
            self.num_drafted = min(self.num_drafted, len(self.token_ids) - 1)

    def on_failed(self) -> None:
        """Records that sampling has failed, for which the scheduler will end the request. Token 0 takes the
        place of the oldest pending token (not with beam search), because results of steps in flight will not
        be used."""
        self.on_token([0])
        self.sampling.processors = self.sampling.grammar = None


class PromptRow(NamedTuple):
    """Positions of a row for which the log-probabilities of the next prompt tokens are wanted."""

    number: int
    """Index of the row in the step."""
    most: int
    """Number of most likely tokens to report."""
    first: int
    """Index of the first position, counted in the batch's tokens."""
    targets: list[int]
    """Prompt token after each of the positions."""


class PoolRow(NamedTuple):
    """A row whose request wants an embedding or scores."""

    number: int
    """Index of the row in the step."""
    first: int
    """Index of the row's first token in the batch."""
    end: int
    """Index after the row's last token in the batch."""
    state: CachedRequest
    is_last: bool
    """Whether the prompt ends with this row."""


@dataclass(slots=True)
class StepInputs:
    """Inputs of one step, for the model, the sampler and the pooler."""

    forward: ForwardInputs
    """Inputs of the model. `rows` in them are the tokens to sample after, or None if hidden states of others
    are needed, too (for prompt log-probabilities, for example)."""
    sample_indices: torch.Tensor
    """int64 [num_logits]: indices in the batch of the tokens to sample after. These are the last token of
    each row that samples, and all tokens of a row with drafts."""
    samples: list[tuple[int, CachedRequest]]
    """[num_samples]: index of the row in the step and its request, once for each token to sample."""
    sample_rows: torch.Tensor
    """int64 [num_logits]: block table row of the request that each row of logits belongs to."""
    sampling_rows: list[SamplingRow]
    """[num_samples]: sampling row of each sample."""
    drafts: dict[int, Sequence[int]] = field(default_factory=dict)
    """Draft tokens at the end of each row that has some, by index of the row in the step. The row samples
    after each of them, and after the token before the first."""
    choice_indices: torch.Tensor | None = None
    """int64 [num_samples]: row of logits that each sample uses; None: each sample has its own."""
    first_draws: torch.Tensor | None = None
    """int64 [num_logits]: first sample of each row of logits; None: each row has one sample."""
    prompt_rows: list[PromptRow] = field(default_factory=list)
    """Rows at whose positions prompt log-probabilities are wanted, in ascending order."""
    pool_rows: list[PoolRow] = field(default_factory=list)
    """Rows to pool; nothing is sampled from these."""
    are_decodes: bool = False
    """Whether each row computes one token that the host knows and samples one. False if a request has
    embeddings of images or still wants prompt log-probabilities."""

    @property
    def wants_best_only(self) -> bool:
        """Whether sampling needs only the largest of the untransformed logits of each row. False if a request
        samples for several choices."""
        return self.choice_indices is None and all(row.wants_best_only for row in self.sampling_rows)


class InputBatch:
    """Assigns block table rows to the requests on one worker, and builds the inputs of steps.

    Args:
        kv_cache: the pool that holds the requests' blocks.
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
        """Prompt position from which on log-probabilities are wanted, by id of the requests that still want
        some."""
        self.embedded: set[str] = set()
        """Ids of requests that want embeddings or scores, and no tokens."""
        self.adapted: set[str] = set()
        """Ids of requests with an adapter."""
        self._grammars = grammars
        self._last: StepInputs | None = None
        """Inputs of the previous step, which the next step may advance by one token per row. None: it may
        not, because that step was not all decodes or the device is not a CPU, or there was none."""
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """Newest token sampled for each row of the block table, for a next step that is launched before the
        host knows the token; -1: sampling failed. The last entry belongs to no request.

        Meaningless for rows with drafts, and where steps are not launched ahead.
        """

    def update(self, output: SchedulerOutput) -> None:
        """Applies the scheduler's changes: first the drops, then for each row its new request, the tokens
        that it was given, and its new blocks."""
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
        """Returns the flat tensors for the scheduled rows, in their order. Those on the host are valid until
        the next call."""
        inputs = self._last
        if inputs is None or not self._advance(inputs, scheduled):
            inputs = self._build(scheduled)
            self._last = inputs if inputs.are_decodes and self.device.type == "cpu" else None
        return inputs

    def _advance(self, inputs: StepInputs, scheduled: list[ScheduledRequest]) -> bool:
        """Tries to advance the previous step's inputs in place, for a step in which the same requests compute
        their next tokens. Returns False, and changes nothing, if they do not fit the step."""
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
        metas = [meta, *others]
        if joint := self._joint(given):
            metas = [one.with_joint(joint) for one in metas]
        input_ids = there["tokens"]
        if unknown:
            places, owned = to_device(np.array(unknown).T, self.device).unbind()
            # A row whose logits were not finite ends with an error; its next one computes any token.
            input_ids[places] = self.last_tokens[owned].clamp(min=0)
        forward = ForwardInputs(
            input_ids=input_ids,
            positions=there["positions"],
            kv_cache=self._kv_cache,
            metas=metas,
            embeds=self._embeds(given),
            adapters=self._adapters(scheduled, lens) if self.adapted else None,
            token_types=self._token_types(scheduled, starts) if self.embedded else None,
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
        """Returns the adapter slots of a step's tokens; `lens`: number of tokens in each row. None: no row
        has an adapter."""
        slots = [self.requests[item.request_id].slot for item in scheduled]
        used = frozenset(slots) - {-1}
        if not used:
            return None
        return AdapterStep(to_device(np.repeat(np.array(slots, dtype=np.int32), lens), self.device), used)

    def _token_types(self, scheduled: list[ScheduledRequest], starts: list[int]) -> torch.Tensor | None:
        """Returns the token types of a step. `starts` as for `_pool_rows`. None: all tokens have type 0."""
        types = None
        for item, start, end in zip(scheduled, starts, starts[1:], strict=False):
            second = self.requests[item.request_id].sampling.params.pooling.second_text
            if second:
                types = np.zeros(starts[-1], dtype=np.int64) if types is None else types
                types[start + max(0, second - item.num_computed_tokens) : end] = 1
        return None if types is None else to_device(types, self.device)

    def _pool_rows(self, scheduled: list[ScheduledRequest], starts: list[int]) -> list[PoolRow]:
        """Returns the rows of this step whose request wants an embedding or scores. `starts`: index of each
        row's first token in the batch, then the batch's end."""
        return [
            PoolRow(number, start, end, self.requests[item.request_id], item.samples)
            for number, (item, start, end) in enumerate(zip(scheduled, starts, starts[1:], strict=False))
            if item.request_id in self.embedded
        ]

    def _prompt_rows(self, scheduled: list[ScheduledRequest], starts: list[int]) -> list[PromptRow]:
        """Returns the rows of this step at whose positions prompt log-probabilities are wanted, and drops
        requests from `_prompts` that want no more of them. `starts` as for `_pool_rows`."""
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
        """Repeats the sample of each request with several choices, once for each further choice: all sample
        their first token from one row of logits."""
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
        """Returns `positions` unchanged, or on three axes if one of the requests in `given` has
        `position_ids`."""
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

    @staticmethod
    def _joint(given: list[tuple[PromptEmbeds, ScheduledRequest, int]]) -> list[tuple[int, int]]:
        """Returns the batch rows [begin, end) of each joint span in this step, or of the part of it that the
        step computes."""
        spans = []
        for embeds, item, first in given:
            begin, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
            for token, values in embeds.rows_in(begin, end) if embeds.is_joint else ():
                spans.append((first + token - begin, first + token - begin + len(values)))
        return spans

    def _embeds(
        self, given: list[tuple[PromptEmbeds, ScheduledRequest, int]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns, for the given embeddings that fall into this step, the flat indices of their tokens and
        the embeddings; None: there are none."""
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
