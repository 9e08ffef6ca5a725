"""AttentionMetadata: the shape of one ragged batch, shared by the layers of a KV group in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")
SHORT_QUERY = 16
"""Most new tokens per sequence of a batch that is for implementations which read the context again for every
few of them."""
NO_SINKS = "no attention sinks"
"""Why an implementation of `ops.paged_attention` without them cannot compute a call."""
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
) -> dict[str, Any]:
    """Facts by which implementations of `ops.paged_attention` are chosen, beside device and type."""
    return {
        "head_dim": head_dim,
        "num_groups": num_heads // num_kv_heads,
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "sliding_window": sliding_window is not None,
        "softcap": softcap is not None,
        "sinks": sinks,
        "long_queries": max_query_len > SHORT_QUERY,
    }


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Sequences of a ragged batch: which tokens belong to each, and where their keys and values are.

    Sequence i owns the batch rows [query_start_loc[i], query_start_loc[i + 1]); they are the last
    query_lens[i] of its seq_lens[i] tokens. Prefill, a chunk of a prefill and decode differ in these
    numbers only.
    """

    query_start_loc: torch.Tensor
    """int32 [num_seqs + 1]"""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: context length, the new tokens included."""
    block_table: torch.Tensor
    """int32 [num_seqs, max_blocks]; valid ids, of which two kinds are never read as data: those past a
    sequence's last block, and those of blocks wholly outside the window."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset of each new token."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_lens: list[int]
    """query_start_loc's differences on the host, so that CPU code and launch grids need no sync."""
    seq_lens_list: list[int]
    """seq_lens on the host."""
    interrupt: Callable[[torch.Tensor, Attend], torch.Tensor] | None = field(
        default=None, compare=False, repr=False
    )
    """Gets an attention's queries, and what computes it for a batch, instead of it being computed; returns
    where the result will lie, of the queries' shape. For recording what is between attentions."""
    plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Plans: values that implementations derive once per step and reuse in every layer; see `plan`."""
    shared_plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Plans that do not depend on the blocks, shared by all KV groups of the step; see `shared_plan`."""

    def with_blocks(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> AttentionMetadata:
        """The same batch over the blocks of another KV group."""
        return replace(self, block_table=block_table, slot_mapping=slot_mapping, plans={})

    def of_states(self, block_size: int) -> AttentionMetadata:
        """The batch over the last block of each sequence alone, where a group of states has its state."""

        def last_blocks() -> AttentionMetadata:
            columns = ((self.seq_lens - 1) // block_size).long()[:, None]
            return replace(self, block_table=self.block_table.gather(1, columns), plans={})

        return self.plan("states", last_blocks)

    def plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value stored under `key`, made on first use.

        Args:
            key: names the implementation and everything the value depends on apart from this batch.
            make: computes the value.
        """
        if key not in self.plans:
            self.plans[key] = make()
        value: T = self.plans[key]
        return value

    def shared_plan(self, key: Hashable, make: Callable[[], T]) -> T:
        """The same for what depends on neither `block_table` nor `slot_mapping`: the groups share it."""
        if key not in self.shared_plans:
            self.shared_plans[key] = make()
        value: T = self.shared_plans[key]
        return value

    def chunked(self, size: int, block_size: int) -> AttentionMetadata:
        """The batch as attention in chunks has it, where a token sees those before it in its chunk alone:
        each sequence's tokens in one chunk are a sequence of their own, which begins with the chunk.

        Args:
            size: of a chunk, a multiple of block_size; chunks begin at position 0 of a sequence.
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
        """`width`: blocks of a chunk."""
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
        """Metadata from plain lists, for tests, tools and warm-up.

        Args:
            query_lens: new tokens per sequence, each at least 1.
            seq_lens: context length per sequence, new tokens included.
            block_ids: blocks of each sequence, in order; at least ceil(seq_len / block_size) each.
            block_size: tokens per block.
            device: where the tensors go.
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
