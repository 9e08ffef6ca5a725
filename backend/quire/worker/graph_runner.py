"""Steps recorded for some sizes and replayed as graphs: DecodeGraphs whole, PromptGraphs without their
attention.

`DecodeGraphs` records steps in which every request computes one token. A recorded step reads what changes
from fixed memory. The host writes there the block table rows that take part, the lengths of their sequences,
their position deltas and adapter slots, and their newest tokens if it knows them. The recorded step itself
computes positions, slots, tables and input ids from these. So a step costs the host one replay and one copy,
or two copies if blocks were appended.

`PromptGraphs` handles other steps of few tokens, and decode steps where attention cannot be recorded. Its
attention runs eagerly between recorded pieces.

A batch is padded to the next recorded size. Padding rows write to a scratch block after the pool, which no
request uses. So kernels need not know of padding, and no request reads anything of it.
"""

from __future__ import annotations

import bisect
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from quire.layers.context import AdapterStep
from quire.models.interface import ForwardInputs, Model
from quire.outputs import ScheduledRequest
from quire.worker.device import to_device
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import KVCache
from quire_kernels import ops
from quire_kernels.metadata import Attend, AttentionMetadata

logger = logging.getLogger("quire")

_FIELDS = ("row", "seq_len", "token", "offset", "slot")

Work = Callable[[], None]


class GraphBackend(Protocol):
    """Records work and replays it on the memory that it used."""

    def warm_up(self, work: Work) -> None:
        """Runs work once before it is recorded, so that compilation and allocation are not recorded."""
        ...

    def begin(self) -> None:
        """Begins to record the work that follows."""
        ...

    def end(self) -> Work:
        """Ends the recording; returns a function that replays it."""
        ...


class CudaGraphs:
    """Records CUDA graphs that share one memory pool, so no two of them may run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graph: Any = None
        self._guard: Any = None

    def warm_up(self, work: Work) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        torch.cuda.synchronize()

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._graph, self._guard = torch.cuda.CUDAGraph(), torch.cuda.stream(self._stream)
        self._guard.__enter__()
        # Other threads, which move blocks, may take memory and wait meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Work:
        self._graph.capture_end()
        self._guard.__exit__(None, None, None)
        repeat: Work = self._graph.replay
        return repeat


@contextmanager
def recording(what: str, sizes: Sequence[int]) -> Iterator[None]:
    """A context in which many graphs are recorded; logs how long it took.

    Device memory must not be freed during a recording, so garbage collection is off meanwhile.
    """
    begin = time.monotonic()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    logger.info("recorded %s: %s in %.1f s", what, list(sizes), time.monotonic() - begin)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the batch sizes to record: 1, 2, 4, then multiples of 8, of 16 from 64 on, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Recorded decode steps of one model. Each size is recorded without adapters and, if the model has
    adapter slots, also with them.

    Args:
        kv_cache: a KV cache with a scratch block after its pool.
        batch: the input batch, whose block table is mirrored on the device.
        sizes: batch sizes, ascending.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        batch: InputBatch,
        max_model_len: int,
        sizes: Sequence[int],
        backend: GraphBackend,
        *,
        has_slots: bool = False,
    ) -> None:
        assert kv_cache.scratch_block is not None, "padding needs a block that no request has"
        self.model, self.kv_cache, self.batch = model, kv_cache, batch
        self.max_model_len, self._has_slots = max_model_len, has_slots
        self.sizes = list(sizes)
        self.backend = backend
        self.num_replays = 0
        self.num_misses = 0
        """Number of decode steps that were not replayed, because no recorded size is large enough."""
        device = batch.device
        host = batch.block_table.table
        groups, self._scratch_row, width = host.shape
        self._table = torch.zeros((groups, self._scratch_row + 1, width), dtype=torch.int32, device=device)
        """Copy of the block table on the device, with one more row for padding."""
        self._table[:, -1] = kv_cache.scratch_block
        self._inputs = torch.zeros((len(_FIELDS), self.sizes[-1]), dtype=torch.int64, device=device)
        """Inputs with one row for each of `_FIELDS`: row of the block table, tokens in the sequence, newest
        token (-1: the device knows it), position delta in rotary embeddings, and adapter slot (-1: none)."""
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._padding = np.array([[self._scratch_row], [1], [0], [0], [-1]])
        """Inputs of a padding row, as a column: a sequence of one token."""
        self._graphs: dict[tuple[int, bool], Work] = {}
        self._best = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._input_ids = torch.zeros_like(self._best)
        self._logits = torch.empty((self.sizes[-1], model.config.vocab_size), device=device)

    def capture_all(self) -> None:
        """Records steps of each of `sizes`, the largest first, so that the others reuse its memory in the
        graphs' pool."""
        with recording("decode steps, by rows", self.sizes):
            for size in reversed(self.sizes):
                for is_adapted in {False, self._has_slots}:
                    self._graph(size, is_adapted=is_adapted)

    def can_run(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Returns whether a recorded step can compute these rows. Each row must compute one token and sample
        one token, and not compute a token of a prompt with given embeddings, such as images. Rows to be
        pooled must not be among them. If only the recorded sizes are too small, counts a miss."""
        requests = self.batch.requests
        for item in scheduled:
            if item.num_scheduled_tokens != 1 or not item.samples or requests[item.request_id].choices:
                return False
            embeds = requests[item.request_id].embeds
            if embeds is not None and item.num_computed_tokens < requests[item.request_id].num_prompt_tokens:
                return False
        if len(scheduled) > self.sizes[-1]:
            self.num_misses += 1
            return False
        return True

    def run(self, scheduled: Sequence[ScheduledRequest]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes one token of each request; leaves the most likely next ones in `batch.last_tokens`.

        Returns:
            `ops.argmax` of the logits, int64 [n]; the logits, float32 [n, vocab_size]; the input tokens,
            int64 [n]. The next replay overwrites their memory.
        """
        count = len(scheduled)
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        inputs = np.empty((len(_FIELDS), size), dtype=np.int64)
        inputs[:, count:] = self._padding
        for i, item in enumerate(scheduled):
            state = self.batch.requests[item.request_id]
            position = item.num_computed_tokens
            known = position < len(state.token_ids)
            inputs[0, i] = state.row
            inputs[1, i] = position + 1
            inputs[2, i] = state.token_ids[position] if known else -1
            inputs[3, i] = state.position_delta
            inputs[4, i] = state.slot
        replay = self._graph(size, is_adapted=bool((inputs[4] >= 0).any()))
        self._update_table()
        self._inputs[:, :size].copy_(to_device(inputs, self.batch.device), non_blocking=True)
        replay()
        self.num_replays += 1
        return self._best[:count], self._logits[:count], self._input_ids[:count]

    def _update_table(self) -> None:
        """Copies the block ids appended since the last replay to the device."""
        changes = self.batch.block_table.take_changes()
        if changes.shape[1]:
            places, blocks = to_device(changes, self.batch.device).unbind()
            _, rows, width = self.batch.block_table.table.shape
            # The mirror has one row more per group.
            places = places + places // (rows * width) * width
            self._table.view(-1)[places] = blocks.int()

    def _graph(self, size: int, *, is_adapted: bool) -> Work:
        """Returns the replay of a decode step with `size` rows, which may use adapters if `is_adapted`;
        records it on first use."""
        if (size, is_adapted) not in self._graphs:
            # Recording computes, and a step that is computed twice would take its own result for its input.
            self._inputs[:, :size] = to_device(self._padding, self.batch.device)
            self.backend.warm_up(partial(self._compute, size, is_adapted))
            self.backend.begin()
            self._compute(size, is_adapted)
            self._graphs[size, is_adapted] = self.backend.end()
        return self._graphs[size, is_adapted]

    def _compute(self, size: int, is_adapted: bool) -> None:
        rows, seq_lens, known, offsets, adapter_slots = self._inputs[:, :size].unbind()
        last_tokens = self.batch.last_tokens
        input_ids = torch.where(known < 0, last_tokens[rows], known).clamp(min=0)
        indices = seq_lens - 1
        block_size = self.kv_cache.block_size
        tables = self._table[:, rows]
        columns = (indices // block_size)[None, :, None].expand(tables.shape[0], -1, -1)
        slots = tables.gather(2, columns).squeeze(2).long() * block_size + indices % block_size
        meta = AttentionMetadata(
            query_start_loc=self._starts[: size + 1],
            seq_lens=seq_lens.int(),
            block_table=tables[0],
            slot_mapping=slots[0],
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self.max_model_len,
            query_lens=[1] * size,
            # For the kernels' first run: recorded ones read the lengths on the device.
            seq_lens_list=[1] * size,
        )
        metas = [meta, *map(meta.with_blocks, tables[1:].unbind(), slots[1:].unbind())]
        adapters = AdapterStep(adapter_slots.int(), None) if is_adapted else None
        with torch.inference_mode():
            inputs = ForwardInputs(input_ids, indices + offsets, self.kv_cache, metas, adapters=adapters)
            logits = self.model.compute_logits(self.model.forward(inputs))
            best = ops.argmax(logits)
            last_tokens[rows] = best
            self._input_ids[:size].copy_(input_ids)
            self._logits[:size].copy_(logits)
            self._best[:size].copy_(best)


def token_sizes(max_num_tokens: int, few: bool = False) -> list[int]:
    """Returns the token counts to record in pieces: multiples of 16, of 32 from 128 on, of 64 from 256 on,
    and the largest.

    `few`: whether to add smaller ones, for decode steps.
    """
    smallest = [1, 2, 4, 8] if few else []
    sizes = [*smallest, *range(16, 128, 16), *range(128, 256, 32), *range(256, max_num_tokens, 64)]
    return [*(size for size in sizes if size < max_num_tokens), max_num_tokens]


@dataclass(frozen=True)
class Piece:
    """Recorded work between one layer's attention and the next, before the first or after the last."""

    replay: Work
    attend: Attend | None
    """The attention that follows the piece, as a function of queries and metadata; None: the piece is the
    last."""
    group: int
    """KV group of the layer whose attention follows the piece; 0 for the last piece."""
    heads: torch.Size
    """[num_heads, head_dim] of the queries of the attention that follows the piece; empty for the last
    piece."""


class PromptGraphs:
    """Recorded pieces of steps of any kind, split at each attention.

    Args:
        kv_cache: a KV cache with a scratch block after its pool.
        num_axes: number of position axes: 3 if requests may state positions on three axes, else 1.
        sizes: numbers of tokens, ascending.
        has_slots: whether the model has adapter slots, so that each size is also recorded with adapters.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        num_axes: int,
        sizes: Sequence[int],
        backend: GraphBackend,
        *,
        has_slots: bool = False,
    ) -> None:
        assert kv_cache.scratch_block is not None, "padding needs a block that no request has"
        self.model, self.kv_cache, self.sizes, self.backend = model, kv_cache, list(sizes), backend
        self.num_replays = 0
        self.num_misses = 0
        """Number of steps that were not replayed, because no recorded size is large enough."""
        config, device, longest = model.config, kv_cache.blocks.device, self.sizes[-1]
        # What pieces read and write; the same memory for all sizes and layers.
        self._x = torch.zeros((longest, config.embedded_size), dtype=config.dtype, device=device)
        self._hidden = torch.zeros((longest, config.hidden_size), dtype=config.dtype, device=device)
        self._query = self._attended = torch.empty(0, dtype=config.dtype, device=device)
        """Buffers for the largest layer's queries and attention outputs; allocated at the first warm-up,
        where layers show their sizes."""
        axes = (3,) if num_axes == 3 else ()
        self._positions = torch.zeros((*axes, longest), dtype=torch.int64, device=device)
        block_size = kv_cache.block_size
        self._scratch_slots = (
            torch.arange(longest, device=device) % block_size + kv_cache.scratch_block * block_size
        )
        self._slots = self._scratch_slots.repeat(len(model.kv_groups), 1)
        self._has_slots = has_slots
        self._adapter_slots = torch.full((longest,), -1, dtype=torch.int32, device=device)
        self._pieces: dict[tuple[int, bool], list[Piece]] = {}

    def capture_all(self) -> None:
        """Records steps of each of `sizes`, the largest first, so that the others reuse its memory in the
        graphs' pool."""
        with recording("pieces of steps, by tokens", self.sizes):
            for size in reversed(self.sizes):
                for is_adapted in {False, self._has_slots}:
                    self._pieces_of(size, is_adapted=is_adapted)

    def can_run(self, num_tokens: int) -> bool:
        """Returns whether a recorded size is large enough for this many tokens; if not, counts a miss."""
        if num_tokens > self.sizes[-1]:
            self.num_misses += 1
            return False
        return True

    def run(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns the hidden states of all tokens, [num_tokens, hidden_size]; the next call overwrites their
        memory."""
        count = inputs.metas[0].num_tokens
        size = self.sizes[bisect.bisect_left(self.sizes, count)]
        adapters = inputs.adapters
        pieces = self._pieces_of(size, is_adapted=adapters is not None)
        if adapters is not None:
            self._adapter_slots[:count] = adapters.slots
            self._adapter_slots[count:size] = -1
        self._x[:count] = self.model.embed(inputs)
        self._positions[..., :count] = inputs.positions
        self._slots[:, count:size] = self._scratch_slots[: size - count]
        for slots, meta in zip(self._slots, inputs.metas, strict=True):
            slots[:count] = meta.slot_mapping
        for piece in pieces:
            piece.replay()
            if piece.attend is not None:
                query, attended = self._queries(count, piece.heads)
                attended[:] = piece.attend(query, inputs.metas[piece.group])
        self.num_replays += 1
        return self._hidden[:count]

    def _pieces_of(self, size: int, *, is_adapted: bool) -> list[Piece]:
        """Returns the pieces of a step with this many tokens in order; records them on first use."""
        if (size, is_adapted) not in self._pieces:
            self._pieces[size, is_adapted] = self._record(size, is_adapted)
        return self._pieces[size, is_adapted]

    def _record(self, size: int, is_adapted: bool) -> list[Piece]:
        self._slots[:, :size] = self._scratch_slots[:size]
        self._adapter_slots[:size] = -1
        adapters = AdapterStep(self._adapter_slots[:size], None) if is_adapted else None
        metas = self._metas(size)

        def make_room(group: int, query: torch.Tensor, attend: Attend) -> torch.Tensor:
            needed = self.sizes[-1] * query[0].numel()
            if needed > len(self._query):
                self._query = query.new_zeros(needed)
                self._attended = torch.zeros_like(self._query)
            return attend(query, metas[group])

        self.backend.warm_up(lambda: self._compute(self._interrupted(metas, make_room), adapters))
        pieces: list[Piece] = []

        def cut(group: int, query: torch.Tensor, attend: Attend) -> torch.Tensor:
            kept, attended = self._queries(size, query.shape[1:])
            kept[:] = query
            pieces.append(Piece(self.backend.end(), attend, group, query.shape[1:]))
            self.backend.begin()
            return attended

        self.backend.begin()
        self._compute(self._interrupted(metas, cut), adapters)
        pieces.append(Piece(self.backend.end(), None, 0, torch.Size()))
        return pieces

    @staticmethod
    def _interrupted(
        metas: Sequence[AttentionMetadata], interrupt: Callable[[int, torch.Tensor, Attend], torch.Tensor]
    ) -> list[AttentionMetadata]:
        """Returns metadata that calls `interrupt` at each attention, with its KV group; see
        `AttentionMetadata`."""
        return [replace(meta, interrupt=partial(interrupt, group)) for group, meta in enumerate(metas)]

    def _queries(self, count: int, heads: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns buffers for attention's inputs and outputs, each [count, num_heads, head_dim]."""
        size, shape = count * math.prod(heads), (count, *heads)
        return self._query[:size].view(shape), self._attended[:size].view(shape)

    def _metas(self, size: int) -> list[AttentionMetadata]:
        """Returns metadata, per KV group, of one sequence whose blocks are all the scratch block."""
        scratch, block_size = self.kv_cache.scratch_block, self.kv_cache.block_size
        assert scratch is not None
        blocks = [scratch] * -(-size // block_size)
        meta = AttentionMetadata.build([size], [size], [blocks], block_size, self._slots.device)
        return [meta.with_blocks(meta.block_table, slots[:size]) for slots in self._slots]

    def _compute(self, metas: Sequence[AttentionMetadata], adapters: AdapterStep | None) -> None:
        size = metas[0].num_tokens
        no_ids = self._slots[0, :0]  # `compute` reads none
        inputs = ForwardInputs(no_ids, self._positions[..., :size], self.kv_cache, metas, adapters=adapters)
        with torch.inference_mode():
            self._hidden[:size] = self.model.compute(self._x[:size], inputs)
