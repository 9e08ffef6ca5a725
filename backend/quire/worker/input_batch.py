"""InputBatch: what the runner remembers of its requests, and the flat tensors of a step.

The batch is ragged and flat (no padding): tokens of all rows one after the other, with `query_start_loc`
marking the borders. State is kept by request; a step's arrays are built from it with a handful of numpy
calls whose number does not depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.multimodal import PromptEmbeds
from quire.outputs import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.worker.block_table import BlockTable
from quire.worker.sampler import SamplingRow
from quire_kernels.metadata import AttentionMetadata


@dataclass(slots=True)
class CachedRequest:
    """A request the runner holds a block-table row for."""

    row: int
    token_ids: list[int]
    sampling: SamplingRow
    embeds: PromptEmbeds | None = None


@dataclass(slots=True)
class StepInputs:
    """Tensors of one step."""

    input_ids: torch.Tensor
    """int64 [num_tokens]"""
    positions: torch.Tensor
    """int64 [num_tokens]; [3, num_tokens] where a row's positions have three axes."""
    meta: AttentionMetadata
    sample_indices: torch.Tensor
    """int64 [num_samples]: the last token of each row that samples."""
    sample_request_ids: list[str]
    sampling_rows: list[SamplingRow]
    embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64 [n], float32 [n, hidden_size]): tokens whose embedding is given."""


class InputBatch:
    """Owner of the requests' rows on one worker."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_table = BlockTable(max_num_seqs, max_blocks, block_size)
        self.requests: dict[str, CachedRequest] = {}
        self.device = device

    def update(self, output: SchedulerOutput) -> None:
        """Applies the scheduler's differences: drops first, then new rows and new blocks."""
        for request_id in output.dropped_request_ids:
            dropped = self.requests.pop(request_id, None)
            if dropped is not None:
                self.block_table.release(dropped.row)
        for scheduled in output.scheduled:
            if scheduled.new is not None:
                self._add(scheduled.request_id, scheduled.new)
            if scheduled.new_block_ids:
                self.block_table.append(self.requests[scheduled.request_id].row, scheduled.new_block_ids)

    def _add(self, request_id: str, new: NewRequestData) -> None:
        assert request_id not in self.requests, f"{request_id} is already in the batch"
        seed = new.sampling_params.seed
        token_ids = list(new.token_ids)
        sampling = SamplingRow(
            params=new.sampling_params,
            token_ids=token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            eos_token_ids=new.eos_token_ids,
            seed=0 if seed is None else seed,
        )
        self.requests[request_id] = CachedRequest(self.block_table.assign(), token_ids, sampling, new.embeds)

    def prepare(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """Builds the flat tensors for the scheduled rows, in their order."""
        count = len(scheduled)
        states = [self.requests[s.request_id] for s in scheduled]
        rows = np.fromiter((s.row for s in states), np.int64, count)
        computed = np.fromiter((s.num_computed_tokens for s in scheduled), np.int64, count)
        lens = np.fromiter((s.num_scheduled_tokens for s in scheduled), np.int64, count)
        starts = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lens, out=starts[1:])
        num_tokens = int(starts[-1])

        flat: list[int] = []
        for state, item in zip(states, scheduled, strict=True):
            begin = item.num_computed_tokens
            flat.extend(state.token_ids[begin : begin + item.num_scheduled_tokens])
        assert len(flat) == num_tokens, "the scheduler asked for tokens that are not known yet"
        input_ids = np.asarray(flat, dtype=np.int64)
        positions: npt.NDArray[np.int64] = np.arange(num_tokens, dtype=np.int64)
        positions += np.repeat(computed - starts[:-1], lens)
        slots = self.block_table.slots(np.repeat(rows, lens), positions)

        seq_lens = computed + lens
        width = int(self.block_table.num_blocks[rows].max())
        block_table = self.block_table.table[rows, :width]
        sampling = [i for i, item in enumerate(scheduled) if item.samples]
        device = self.device
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts.astype(np.int32)).to(device),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
            block_table=torch.from_numpy(block_table).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            num_tokens=num_tokens,
            max_query_len=int(lens.max()),
            max_seq_len=int(seq_lens.max()),
            query_lens=lens.tolist(),
            seq_lens_list=seq_lens.tolist(),
        )
        return StepInputs(
            input_ids=torch.from_numpy(input_ids).to(device),
            positions=torch.from_numpy(self._axes(positions, states, scheduled, starts)).to(device),
            meta=meta,
            sample_indices=torch.from_numpy(starts[1:][sampling] - 1).to(device),
            sample_request_ids=[scheduled[i].request_id for i in sampling],
            sampling_rows=[states[i].sampling for i in sampling],
            embeds=self._embeds(states, scheduled, starts),
        )

    @staticmethod
    def _axes(
        positions: npt.NDArray[np.int64],
        states: list[CachedRequest],
        scheduled: list[ScheduledRequest],
        starts: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.int64]:
        """`positions` as they are, or on three axes where a request states its own."""
        if not any(state.embeds is not None and state.embeds.position_ids is not None for state in states):
            return positions
        axes = np.tile(positions, (3, 1))
        for state, item, start in zip(states, scheduled, starts, strict=False):
            if state.embeds is None or state.embeds.position_ids is None:
                continue
            own = state.embeds.position_ids[:, item.num_computed_tokens :][:, : item.num_scheduled_tokens]
            behind = start + own.shape[1]
            axes[:, start:behind] = own
            axes[:, behind : start + item.num_scheduled_tokens] += state.embeds.position_delta
        return axes

    def _embeds(
        self,
        states: list[CachedRequest],
        scheduled: list[ScheduledRequest],
        starts: npt.NDArray[np.int64],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The given embeddings that fall into this step, and the flat tokens they belong to."""
        indices: list[npt.NDArray[np.int64]] = []
        rows: list[torch.Tensor] = []
        for state, item, start in zip(states, scheduled, starts, strict=False):
            if state.embeds is None:
                continue
            begin = item.num_computed_tokens
            for token, given in state.embeds.rows_in(begin, begin + item.num_scheduled_tokens):
                first = int(start) + token - begin
                indices.append(np.arange(first, first + len(given), dtype=np.int64))
                # A copy of what lies in shared memory: torch is not to be given read-only memory.
                rows.append(given if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given)))
        if not rows:
            return None
        flat = torch.cat([part.to(self.device) for part in rows])
        return torch.from_numpy(np.concatenate(indices)).to(self.device), flat
