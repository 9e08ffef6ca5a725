"""Multi-head latent attention over the paged KV cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The cache holds a latent per token, and a rotated part of the keys that is the same for all heads. Every
head's value, and the rest of its key, are linear functions of the latent (`kv_b_proj`: keys by W_UK, values
by W_UV). These matrices can be applied in two ways:

- absorbed: W_UK^T is applied to a head's query, whose scores are then computed with the cached vector
  directly. The cached latent is also the value, and W_UV is applied to the weighted sum. This is attention
  with one KV head.
- expanded: keys and values of all heads are computed from the context's latents, for ordinary attention.

For each new token and each token that it sees, the absorbed form costs work in proportion to the latent's
size, the expanded form in proportion to a head's. But the expanded form first computes the keys and values of
the whole context, which only pays for long chunks of prompts. On a CPU everything is absorbed: the two forms
round differently, and a token's bits must not depend on how its prompt is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.indexer import Chosen, Indexer
from quire.layers.linear import AsStoredLinear, Linear
from quire.layers.norm import RMSNorm
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of
from quire_kernels.weights import PackedHeads

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, whatever epsilon config.json states."""
EXPANDED_BYTES = 2**30
"""Most bytes for the keys and values of the contexts that a layer expands in a step. A step that would need
more is absorbed whole."""
GATHERED_BYTES = 2**26
"""Most bytes of chosen vectors that sparse attention copies at once, unless one token needs more."""
_CHOSEN = "chosen positions"
"""Key in a step's `AttentionMetadata.plans` under which the last indexer's choice of positions is kept."""


class Part(NamedTuple):
    """Part of a batch: the sequences computed in expanded form, or those computed in absorbed form."""

    rows: torch.Tensor
    """int64 [n]: batch rows of the sequences' new tokens."""
    meta: AttentionMetadata
    blocks: torch.Tensor
    """int64 [num_blocks]: blocks of the sequences' contexts, one sequence after the other. For the expanded
    form, `meta` numbers blocks in this order."""


class LatentAttention(nn.Module):
    """Multi-head latent attention: projections through latents, norms, rotary embedding, cache write and
    paged attention."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.num_heads, self.latent, self.scale = config.num_heads, latent, config.attention_scale
        self.backend = config.attention_backend
        query_size = self.num_heads * (latent.nope_dim + latent.rope_dim)
        kv_size = latent.kv_rank + latent.rope_dim
        first = {"q_proj": query_size} if latent.query_rank is None else {"q_a_proj": latent.query_rank}
        self.down = Linear(
            config,
            config.hidden_size,
            {**first, "kv_a_proj_with_mqa": kv_size},
            parallel="column",
            bias=config.qkv_bias,
            num_parts={"q_a_proj": 1, "kv_a_proj_with_mqa": 1},
        )
        self.q_up: Linear | None = None
        if latent.query_rank is not None:
            self.q_a_layernorm = RMSNorm(config, latent.query_rank)
            self.q_a_layernorm.eps = _NORM_EPS
            self.q_up = Linear(
                config, latent.query_rank, {"q_b_proj": query_size}, parallel="column", bias=False
            )
        self.kv_a_layernorm = RMSNorm(config, latent.kv_rank)
        self.kv_a_layernorm.eps = _NORM_EPS
        expanded_size = self.num_heads * (latent.nope_dim + latent.value_dim)
        self.kv_up = AsStoredLinear(
            config, latent.kv_rank, {"kv_b_proj": expanded_size}, parallel="column", bias=False
        )
        self.out = Linear(
            config, config.attended_size, {"o_proj": config.hidden_size}, parallel="row", bias=config.out_bias
        )
        self.indexer: Indexer | None = None
        if latent.index is not None and layer not in latent.index.shared_layers:
            self.indexer = Indexer(config)
        self.least_expanded: int | None = None
        """Least number of new tokens with which a sequence may be expanded; None: no sequence may be."""

    def finish(self, device_type: str) -> None:
        """Makes the matrices of the absorbed form from `kv_b_proj`, once that is packed. On devices other
        than a CPU, sets `least_expanded`."""
        latent, dtype = self.latent, self.kv_up.dtype
        # Whatever its format is, its product with the identity is the matrix.
        ones = torch.eye(latent.kv_rank, dtype=dtype, device=self.kv_a_layernorm.weight.device)
        matrices = self.kv_up.packed(ones).T.view(self.num_heads, -1, latent.kv_rank)
        keys, values = matrices.split([latent.nope_dim, latent.value_dim], dim=1)
        self.absorb: PackedHeads = ops.pack_heads(keys.transpose(1, 2).contiguous())
        self.to_values: PackedHeads = ops.pack_heads(values.contiguous())
        if device_type != "cpu":
            # Twice the break-even with the products of `kv_b_proj`: a token sees half of its prompt.
            gain = 2 * latent.kv_rank - latent.nope_dim - latent.value_dim
            cost = latent.kv_rank * (latent.nope_dim + latent.value_dim)
            self.least_expanded = 2 * cost // gain if gain > 0 else None

    @property
    def absorbed_bytes(self) -> int:
        """Bytes of the matrices that `finish` makes, without padding."""
        latent = self.latent
        numbers = self.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
        return numbers * self.kv_up.dtype.itemsize

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape, and writes the new tokens' latents and rotated
        keys to the cache."""
        kv_layer, meta, adapters = context.kv_layer, context.meta, context.adapters
        latent = self.latent
        kv_size = latent.kv_rank + latent.rope_dim
        first, kv = self.down(x, adapters).tensor_split([-kv_size], dim=1)
        if self.q_up is not None:
            first = self.q_a_layernorm(first)
            if self.indexer is not None:
                meta.plans[_CHOSEN] = self.indexer(x, first, context)
            first = self.q_up(first, adapters)
        heads = first.unflatten(1, (self.num_heads, -1))
        query, rotary = heads[..., : latent.nope_dim], heads[..., latent.nope_dim :]
        rotary = torch.cat((rotary, kv[:, None, latent.kv_rank :]), dim=1)
        if latent.interleaved:  # pairs of neighbours to pairs of halves, which changes no product
            rotary = rotary.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        rotary = ops.rope(rotary, context.cos, context.sin)
        key = torch.cat((self.kv_a_layernorm(kv[:, : latent.kv_rank]), rotary[:, -1]), dim=1).unsqueeze(1)
        ops.write_kv(key, key, kv_layer, meta.slot_mapping)
        out = x.new_empty((x.shape[0], self.num_heads, latent.value_dim))
        chosen: Chosen | None = None if latent.index is None else meta.plans[_CHOSEN]
        if chosen is None:
            self._dense(query, rotary[:, :-1], kv_layer, meta, out)
        else:
            self._sparse(query, rotary[:, :-1], data_of(kv_layer), meta, chosen, out)
        attended: torch.Tensor = self.out(out.flatten(1), adapters)
        return attended

    def _dense(
        self,
        query: torch.Tensor,
        rotary: torch.Tensor,
        kv_layer: KVLayer,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Computes attention without an indexer's choice into `out`, each sequence in the form that `_split`
        chooses.

        Args:
            query: see `_absorbed`.
            rotary: see `_absorbed`.
            out: see `_absorbed`.
        """
        expanded, absorbed = self._split(meta, data_of(kv_layer).shape[3])
        if expanded is None:
            self._absorbed(query, rotary, kv_layer, meta, out)
        else:
            rows = expanded.rows
            out[rows] = self._expanded(query[rows], rotary[rows], kv_layer, expanded)
        if absorbed is not None:
            rest = out.new_empty((len(absorbed.rows), *out.shape[1:]))
            self._absorbed(query[absorbed.rows], rotary[absorbed.rows], kv_layer, absorbed.meta, rest)
            out[absorbed.rows] = rest

    def _absorbed(
        self,
        query: torch.Tensor,
        rotary: torch.Tensor,
        kv_layer: KVLayer,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Computes the absorbed form.

        Args:
            query: [n, num_heads, nope_dim], the queries without their rotated parts.
            rotary: [n, num_heads, rope_dim], the rotated parts.
            out: [n, num_heads, value_dim], to be filled.
        """
        rank = self.latent.kv_rank
        latent_query = query.new_empty((*query.shape[:2], rank + rotary.shape[2]))
        self.absorb(query, latent_query[..., :rank])
        latent_query[..., rank:] = rotary
        attended = ops.paged_attention(
            latent_query, kv_layer, meta, scale=self.scale, implementation=self.backend
        )
        self.to_values(attended[..., :rank], out)

    def _sparse(
        self,
        query: torch.Tensor,
        rotary: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        chosen: Chosen,
        out: torch.Tensor,
    ) -> None:
        """Computes `_absorbed` over the chosen positions only. Their vectors are copied to blocks of each
        token's own, so the work for a token is bounded."""
        topk, (block_size, size) = chosen.blocks.shape[1], cache.shape[3:]
        width = -(-topk // block_size)
        step = max(GATHERED_BYTES // (width * block_size * size * cache.dtype.itemsize), 1)
        parts = meta.plan(("chosen", step, topk, width), lambda: list(_alone(meta, step, topk, width)))
        for number, part in enumerate(parts):
            rows = slice(number * step, number * step + part.num_tokens)
            vectors = cache[chosen.blocks[rows], 0, 0, chosen.offsets[rows]]  # [tokens, topk, size]
            vectors = F.pad(vectors, (0, 0, 0, width * block_size - topk))
            own = vectors.view(-1, 1, 1, block_size, size).expand(-1, 2, -1, -1, -1)
            self._absorbed(query[rows], rotary[rows], own, part, out[rows])

    def _expanded(
        self, query: torch.Tensor, rotary: torch.Tensor, kv_layer: KVLayer, part: Part
    ) -> torch.Tensor:
        """Computes the expanded form for the sequences of `part`; `query` and `rotary` as in `_absorbed`.
        Returns [n, num_heads, value_dim]."""
        latent = self.latent
        cached = data_of(kv_layer)[part.blocks, 0, 0]  # [num_blocks, block_size, kv_rank + rope_dim]
        expanded = self.kv_up.packed(cached[..., : latent.kv_rank].flatten(0, 1))
        keys, values = expanded.view(*cached.shape[:2], self.num_heads, -1).tensor_split(
            [latent.nope_dim], dim=3
        )
        size = self.head_size
        shape = (cached.shape[0], 2, self.num_heads, cached.shape[1], size)
        layer = expanded.new_zeros(shape)
        layer[:, 0, ..., : latent.nope_dim] = keys.transpose(1, 2)
        layer[:, 0, ..., latent.nope_dim : latent.nope_dim + latent.rope_dim] = cached[
            :, None, :, latent.kv_rank :
        ]
        layer[:, 1, ..., : latent.value_dim] = values.transpose(1, 2)
        whole = query.new_zeros((*query.shape[:2], size))
        whole[..., : latent.nope_dim] = query
        whole[..., latent.nope_dim : latent.nope_dim + latent.rope_dim] = rotary
        return ops.paged_attention(whole, layer, part.meta, scale=self.scale)[..., : latent.value_dim]

    @property
    def head_size(self) -> int:
        """Padded size of an expanded key or value: the larger of the two, rounded up to a multiple of 32 for
        the kernels."""
        latent = self.latent
        return -(-max(latent.nope_dim + latent.rope_dim, latent.value_dim) // 32) * 32

    def _split(self, meta: AttentionMetadata, block_size: int) -> tuple[Part | None, Part | None]:
        """Divides a batch's sequences into (those to expand, those to absorb). The second is None if all are
        expanded; both are None if all are absorbed."""
        least = self.least_expanded
        # Recorded pieces end at one attention, over the cache.
        if least is None or meta.interrupt is not None or meta.max_query_len < least:
            return None, None
        return meta.plan(("latent", least, block_size), lambda: self._make_split(meta, block_size, least))

    def _make_split(
        self, meta: AttentionMetadata, block_size: int, least: int
    ) -> tuple[Part | None, Part | None]:
        is_long = [length >= least for length in meta.query_lens]
        long = [i for i, one in enumerate(is_long) if one]
        num_blocks = sum(-(-meta.seq_lens_list[i] // block_size) for i in long)
        numbers = self.latent.nope_dim + self.latent.value_dim + 2 * self.head_size
        if num_blocks * block_size * self.num_heads * numbers * self.kv_up.dtype.itemsize > EXPANDED_BYTES:
            return None, None
        others = [i for i, one in enumerate(is_long) if not one]
        expanded = _part(meta, long, block_size, renumber=True)
        return expanded, _part(meta, others, block_size, renumber=False) if others else None


def _alone(meta: AttentionMetadata, step: int, topk: int, width: int) -> Iterator[AttentionMetadata]:
    """Yields metadata for a batch's tokens, `step` of them at a time. Each token is a sequence of its own,
    with `topk` positions, or all that it sees if these are fewer, in `width` blocks of its own."""
    device = meta.block_table.device
    lengths = [
        min(position + 1, topk)
        for query_len, seq_len in zip(meta.query_lens, meta.seq_lens_list, strict=True)
        for position in range(seq_len - query_len, seq_len)
    ]
    for begin in range(0, len(lengths), step):
        part = lengths[begin : begin + step]
        count = len(part)
        yield AttentionMetadata(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(part, dtype=torch.int32, device=device),
            block_table=torch.arange(count * width, dtype=torch.int32, device=device).view(count, width),
            slot_mapping=meta.slot_mapping[begin : begin + count],
            num_tokens=count,
            max_query_len=1,
            max_seq_len=max(part),
            query_lens=[1] * count,
            seq_lens_list=part,
        )


def _part(meta: AttentionMetadata, sequences: list[int], block_size: int, *, renumber: bool) -> Part:
    """Makes the Part of some of a batch's sequences. `renumber`: number their blocks 0, 1, ... instead of by
    block id."""
    device = meta.block_table.device
    starts = [0]
    for length in meta.query_lens:
        starts.append(starts[-1] + length)
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in sequences]).to(device)
    table = meta.block_table[torch.tensor(sequences, device=device)]
    counts = [-(-meta.seq_lens_list[i] // block_size) for i in sequences]
    blocks, ranges, begin = [], [], 0
    for row, count in zip(table, counts, strict=True):
        blocks.append(row[:count])
        ranges.append(range(begin, begin + count))
        begin += count
    lengths = [meta.query_lens[i] for i in sequences], [meta.seq_lens_list[i] for i in sequences]
    part = AttentionMetadata.build(*lengths, ranges, block_size, device)
    if not renumber:
        part = part.with_blocks(table, meta.slot_mapping[rows])
    return Part(rows, part, torch.cat(blocks).long())
