"""AttentionMetadata: the sequences of one ragged batch. Most layers of a KV group share it in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")
SHORT_QUERY = 16
"""A batch has long queries (a fact of `attention_facts`) if a sequence has more new tokens than this.
The CUDA C++ kernels read the context again for every few new tokens, and leave such batches to others."""
NO_SINKS = "no attention sinks"
"""Reason why an implementation of `ops.paged_attention` does not support a call with attention sinks."""
Attend = Callable[[torch.Tensor, "AttentionMetadata"], torch.Tensor]


def attention_facts(
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    block_size: int,
    kv_dtype: torch.dtype,
    sliding_window: int | None,
    softcap: float | None,
    max_query_len: int = 1,
    *,
    sinks: bool = False,
    joint: bool = False,
) -> dict[str, Any]:
    """Returns facts of a call, besides its device and type, by which an implementation of
    `ops.paged_attention` is chosen."""
    return {
        "head_dim": head_dim,
        "num_groups": num_heads // num_kv_heads,
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "sliding_window": sliding_window is not None,
        "softcap": softcap is not None,
        "sinks": sinks,
        "long_queries": max_query_len > SHORT_QUERY,
        "joint": joint,
    }


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Sequences of a ragged batch: which tokens belong to each, and where their keys and values are.

    Sequence i owns the batch rows [query_start_loc[i], query_start_loc[i + 1]). They are the last
    query_lens[i] of its seq_lens[i] tokens. Prefill, chunked prefill and decode differ in these numbers.
    """

    query_start_loc: torch.Tensor
    """int32 [num_seqs + 1]: first batch row of each sequence, then the number of tokens."""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: context length of each sequence, its new tokens included."""
    block_table: torch.Tensor
    """int32 [num_seqs, max_blocks]: block ids. All must be valid ids, but attention reads no blocks after a
    sequence's last one, and none that no new token sees."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset of each new token."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_lens: list[int]
    """Number of new tokens of each sequence, on the host, so that CPU code and launch grids need no sync."""
    seq_lens_list: list[int]
    """seq_lens on the host; 1 for each sequence while a decode step is recorded."""
    joint: torch.Tensor | None = None
    """bool [num_seqs], on the host: whether a sequence's new tokens see each other in both directions, as an
    image's tokens do in some models; None: no sequence's do."""
    interrupt: Callable[[torch.Tensor, Attend], torch.Tensor] | None = field(
        default=None, compare=False, repr=False
    )
    """Function to call instead of computing an attention, used to record the work between attentions. It gets
    the queries, and a function that computes the attention for any batch. It returns a tensor, in the
    queries' shape, that holds the result or will hold it later. None: attention is computed."""
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that one layer computes and later layers of the step use; see `plan`."""
    shared_plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Values that do not depend on the blocks. Batches that `with_blocks` makes share them; see
    `shared_plan`."""

    def with_blocks(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> AttentionMetadata:
        """Returns the same batch with the blocks of another KV group."""
        return replace(self, block_table=block_table, slot_mapping=slot_mapping, plans={})

    def of_states(self, block_size: int) -> AttentionMetadata:
        """Returns the batch with each sequence's last block only, which holds its state in a KV group of
        states. `block_size`: tokens per block."""

        def last_blocks() -> AttentionMetadata:
            columns = ((self.seq_lens - 1) // block_size).long()[:, None]
            return replace(self, block_table=self.block_table.gather(1, columns), plans={})

        return self.plan("states", last_blocks)

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the value stored under `key`; the first call computes it.

        Args:
            key: names the use of the value and everything besides this batch that it depends on.
            make: computes the value.
        """
        if key not in self.plans:
            self.plans[key] = make()
        value: T = self.plans[key]
        return value

    def shared_plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns a value as `plan` does, which the results of `with_blocks` share. It must not depend on
        `block_table` or `slot_mapping`."""
        if key not in self.shared_plans:
            self.shared_plans[key] = make()
        value: T = self.shared_plans[key]
        return value

    def with_joint(self, spans: Sequence[tuple[int, int]]) -> AttentionMetadata:
        """Returns the batch in which the tokens of each span see each other in both directions. Each span
        becomes a sequence of its own, and so do the tokens before and after it in the same sequence.

        Args:
            spans: batch rows [begin, end) of each span, ascending. Each lies in one sequence.
        """
        begins = {begin for begin, _ in spans}
        cuts = begins | {end for _, end in spans}
        rows, query_lens, seq_lens, joint = [], [], [], []
        start = 0
        for row, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens_list, strict=True)):
            stop = start + query_len
            ends = sorted(cut for cut in cuts if start < cut < stop)
            for end in (*ends, stop):
                rows.append(row)
                query_lens.append(end - start)
                seq_lens.append(seq_len - (stop - end))
                joint.append(start in begins)
                start = end
        device = self.seq_lens.device
        return replace(
            self,
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=self.block_table[torch.tensor(rows, device=device)],
            max_query_len=max(query_lens),
            query_lens=query_lens,
            seq_lens_list=seq_lens,
            joint=torch.tensor(joint),
            plans={},
            shared_plans={},
        )

    def causal(self) -> AttentionMetadata:
        """Returns the batch without joint sequences, for layers in which no token sees those after it."""
        plain, outer = self, self.interrupt
        if self.joint is not None:
            plain = self.plan("causal", lambda: replace(self, joint=None, plans={}, shared_plans={}))
        if outer is None:
            return plain

        def interrupt(query: torch.Tensor, attend: Attend) -> torch.Tensor:
            return outer(query, lambda query, meta: attend(query, meta.causal()))

        return replace(plain, interrupt=interrupt)

    def chunked(self, size: int, block_size: int) -> AttentionMetadata:
        """Returns the batch for chunked attention, in which a token sees only tokens of its own chunk. A
        sequence's new tokens in one chunk become a sequence of their own, whose context starts at the
        chunk's start.

        Args:
            size: tokens in a chunk, a multiple of block_size. The first chunk starts at position 0.
            block_size: tokens per block.
        """
        assert size % block_size == 0, (size, block_size)
        if self.max_seq_len <= size:
            return self
        chunked = self.plan(("chunked", size), lambda: self._chunked(size, size // block_size))
        outer = self.interrupt
        if outer is None:
            return chunked

        def interrupt(query: torch.Tensor, attend: Attend) -> torch.Tensor:
            return outer(query, lambda query, meta: attend(query, meta.chunked(size, block_size)))

        return replace(chunked, interrupt=interrupt)

    def _chunked(self, size: int, width: int) -> AttentionMetadata:
        """Makes the batch for `chunked`. `width`: blocks in a chunk."""
        device, firsts = self.seq_lens.device, torch.arange(width, device=self.seq_lens.device)
        if self.max_query_len == 1:
            # On the device, so that it may be recorded.
            chunks = ((self.seq_lens - 1) // size).clamp(min=0)
            columns = (chunks[:, None] * width + firsts).clamp(max=self.block_table.shape[1] - 1)
            return replace(
                self,
                seq_lens=self.seq_lens - chunks * size,
                seq_lens_list=[length - max(length - 1, 0) // size * size for length in self.seq_lens_list],
                block_table=self.block_table.gather(1, columns.long()),
                max_seq_len=size,
                interrupt=None,
                plans={},
                shared_plans={},
            )
        rows, query_lens, seq_lens, chunks_of = [], [], [], []
        for row, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens_list, strict=True)):
            position = seq_len - query_len
            while position < seq_len:
                chunk = position // size
                end = min(seq_len, (chunk + 1) * size)
                rows.append(row)
                chunks_of.append(chunk)
                query_lens.append(end - position)
                seq_lens.append(end - chunk * size)
                position = end
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
        columns = (torch.tensor(chunks_of, device=device)[:, None] * width + firsts).clamp(
            max=self.block_table.shape[1] - 1
        )
        return replace(
            self,
            query_start_loc=starts,
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=self.block_table[torch.tensor(rows, device=device)].gather(1, columns),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens=query_lens,
            seq_lens_list=seq_lens,
            interrupt=None,
            plans={},
            shared_plans={},
        )

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Makes metadata from plain lists; there must be at least one sequence.

        Args:
            query_lens: new tokens per sequence, each at least 1.
            seq_lens: context length per sequence, new tokens included.
            block_ids: blocks of each sequence, in order; at least ceil(seq_len / block_size) each.
            block_size: tokens per block.
            device: device of the tensors.
        """
        assert len(query_lens) == len(seq_lens) == len(block_ids), "one entry per sequence in every list"
        starts, slots = [0], []
        for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_ids, strict=True):
            assert 1 <= query_len <= seq_len <= len(blocks) * block_size, (query_len, seq_len, len(blocks))
            starts.append(starts[-1] + query_len)
            slots += [
                blocks[p // block_size] * block_size + p % block_size
                for p in range(seq_len - query_len, seq_len)
            ]
        width = max(len(blocks) for blocks in block_ids)
        table = [[*blocks, *[0] * (width - len(blocks))] for blocks in block_ids]
        return cls(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            num_tokens=starts[-1],
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens=list(query_lens),
            seq_lens_list=list(seq_lens),
        )
