"""DecodeGraphs: the steps in which every request computes one token, recorded once per size and replayed.

A recorded step reads everything that changes from memory of its own: which rows of the block table take part,
how long their sequences are, and their newest tokens where the host knows them. What follows from that
(positions, slots, tables, input ids) is computed by the recorded step itself, so that one copy and one replay
is all that a step costs the host.

A batch is padded to the next size. Rows of the padding belong to a sequence of one token in a scratch block
behind the pool, which no request has: kernels need to know nothing of padding, and nothing of it is read.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from quire.models.decoder import DecoderModel
from quire.outputs import ScheduledRequest
from quire.worker.device import to_device
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import KVCache
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata

logger = logging.getLogger("quire")

_FIELDS = ("row", "seq_len", "token", "offset")


class GraphBackend(Protocol):
    """Records work and repeats it."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work` (more than once, perhaps) and returns what repeats it on the memory that it used."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: no two of them run at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # First use compiles, tunes and allocates, none of which may happen while it is recorded.
            work()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        self._pool = self._pool or graph.pool()
        return graph.replay


class Eager:
    """No recording: the same work anew each time. For tests of all the rest where no device has graphs."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work


@dataclass
class DecodeStep:
    """Results of a replay, in memory that the next one overwrites."""

    best: torch.Tensor
    """int64 [n]: `ops.argmax` of the logits"""
    logits: torch.Tensor
    """float32 [n, vocab_size]"""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that are recorded: 1, 2, 4, then multiples of 8, of 16 from 64 on, and the largest."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Recorded decode steps of one model.

    Args:
        model: computes.
        kv_cache: with a scratch block behind its pool.
        batch: its block table is mirrored on the device.
        max_model_len: longest sequence.
        sizes: of batches, ascending.
        backend: records.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_cache: KVCache,
        batch: InputBatch,
        max_model_len: int,
        sizes: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        assert kv_cache.scratch_block is not None, "padding needs a block that no request has"
        self.model, self.kv_cache, self.batch = model, kv_cache, batch
        self.max_model_len = max_model_len
        self.sizes = list(sizes)
        self.backend = backend
        self.num_replays = 0
        self.num_misses = 0
        """Steps of single tokens that were not replayed, as no size is large enough."""
        device = batch.device
        self._device = device
        host = batch.block_table.table
        groups, self._scratch_row, width = host.shape
        self._table = torch.zeros((groups, self._scratch_row + 1, width), dtype=torch.int32, device=device)
        """The block table, and a last row for the padding."""
        self._table[:, -1] = kv_cache.scratch_block
        self._inputs = torch.zeros((len(_FIELDS), self.sizes[-1]), dtype=torch.int64, device=device)
        """Rows as `_FIELDS`: row of the block table, tokens in the sequence, the newest one (-1: the device
        knows it), and what its position in rotary embeddings differs by."""
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=device)
        self._padding = np.array([[self._scratch_row], [1], [0], [0]])
        """A sequence of one token, as a column of the inputs."""
        self._host_seq_lens: list[int] = []
        self._graphs: dict[int, Callable[[], None]] = {}
        self._best = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._logits = torch.empty((self.sizes[-1], model.config.vocab_size), device=device)

    def capture_all(self) -> None:
        """Records every size, the largest first: smaller ones find its memory in the pool."""
        begin = time.monotonic()
        for size in reversed(self.sizes):
            self._graph(size)
        logger.info("recorded decode steps of %s rows in %.1f s", self.sizes, time.monotonic() - begin)

    def can_run(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether a step is one of single tokens that are all sampled from, and not too large."""
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

    def run(self, scheduled: Sequence[ScheduledRequest]) -> DecodeStep:
        """Computes one token of each request; their newest tokens are left in `batch.last_tokens`."""
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
        replay = self._graph(size)
        self._update_table()
        self._inputs[:, :size].copy_(to_device(inputs, self._device), non_blocking=True)
        self._host_seq_lens = inputs[1].tolist()
        replay()
        self.num_replays += 1
        return DecodeStep(self._best[:count], self._logits[:count])

    def _update_table(self) -> None:
        """Brings what was appended to the block table since the last replay to the device."""
        changes = self.batch.block_table.take_changes()
        if len(changes):
            places, blocks = to_device(changes, self._device).unbind()
            _, rows, width = self.batch.block_table.table.shape
            # The mirror has one row more per group.
            places = places + places // (rows * width) * width
            self._table.view(-1)[places] = blocks.int()

    def _graph(self, size: int) -> Callable[[], None]:
        """What computes a step of this size, recorded on first use."""
        if size not in self._graphs:
            # Recording computes, and a step that is computed twice would take its own result for its input.
            self._inputs[:, :size] = to_device(self._padding, self._device)
            self._host_seq_lens = [1] * size
            self._graphs[size] = self.backend.capture(partial(self._compute, size))
        return self._graphs[size]

    def _compute(self, size: int) -> None:
        rows, seq_lens, known, offsets = self._inputs[:, :size].unbind()
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
            # Kernels that are recorded read the lengths on the device; these are for those that cannot be.
            seq_lens_list=self._host_seq_lens,
        )
        metas = [meta, *map(meta.with_blocks, tables[1:].unbind(), slots[1:].unbind())]
        with torch.inference_mode():
            hidden = self.model(input_ids, indices + offsets, self.kv_cache, metas)
            logits = self.model.compute_logits(hidden)
            best = ops.argmax(logits)
            last_tokens[rows] = best
            self._logits[:size].copy_(logits)
            self._best[:size].copy_(best)
