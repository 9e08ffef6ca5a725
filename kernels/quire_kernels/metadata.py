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
    """What implementations of `ops.paged_attention` are chosen by, beside device and type."""
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
    """Which tokens belong to which sequence, and where their keys and values are.

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
    """What implementations derive once per step and reuse in every layer; see `plan`."""
    shared_plans: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """The part of it that does not depend on the blocks, for all KV groups of the step; see `shared_plan`."""

    def with_blocks(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> AttentionMetadata:
        """The same batch over the blocks of another KV group."""
        return replace(self, block_table=block_table, slot_mapping=slot_mapping, plans={})

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
