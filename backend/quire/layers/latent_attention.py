"""Multi-head latent attention over the paged KV cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of all heads are linear functions of one latent per token, and a rotated part of the keys is
the same for all heads; the cache holds these two alone. What a head makes of the latent (`kv_b_proj`: keys by
W_UK, values by W_UV) can be applied on either side:

- absorbed: a head's query becomes W_UK^T q, so that its scores are those of one key of all heads, the cached
  vector, whose latent is the value too; of the weighted latents W_UV makes the head's values. This is
  attention with one KV head.
- expanded: keys and values of all heads are made of the context's latents, for ordinary attention.

What a new token and one that it sees cost grows with the latent in the first form, and with a head in the
second, which has to make the whole context's keys and values first: that pays for long chunks of prompts. On
a CPU all is absorbed: one form has other bits than the other, and a token's must not depend on its chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.scheme import LinearScheme
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of
from quire_kernels.weights import PackedHeads

_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, whatever config.json says of the others."""
EXPANDED_BYTES = 2**30
"""Most memory for keys and values of a step's expanded contexts; with more, a step is absorbed."""


class UpProjection(Linear):
    """`kv_b_proj`, keys and values of all heads; quantised only where the checkpoint has it so."""

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """See Linear."""
        super().allocate(scheme.of_routers, path)


class Part(NamedTuple):
    """Some sequences of a batch."""

    rows: torch.Tensor
    """int64 [n]: batch rows of their new tokens."""
    meta: AttentionMetadata
    blocks: torch.Tensor
    """int64 [num_blocks]: those of their contexts, one sequence after the other, which `meta` numbers so."""


class LatentAttention(nn.Module):
    """Projections through latents and their norms, rotary embedding, cache write and paged attention."""

    def __init__(self, config: DecoderConfig) -> None:
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
        self.kv_up = UpProjection(
            config, latent.kv_rank, {"kv_b_proj": expanded_size}, parallel="column", bias=False
        )
        self.out = Linear(
            config, config.attended_size, {"o_proj": config.hidden_size}, parallel="row", bias=config.out_bias
        )
        self.least_expanded: int | None = None
        """New tokens of a sequence from which on its context is expanded; None: never."""

    def finish(self, device_type: str) -> None:
        """Makes what absorbs `kv_b_proj`, once it is packed."""
        latent, dtype = self.latent, self.kv_up.dtype
        # Of whatever format it is: the matrix is what it makes of ones.
        ones = torch.eye(latent.kv_rank, dtype=dtype, device=self.kv_a_layernorm.weight.device)
        matrices = self.kv_up.packed(ones).T.view(self.num_heads, -1, latent.kv_rank)
        keys, values = matrices.split([latent.nope_dim, latent.value_dim], dim=1)
        self.absorb: PackedHeads = ops.pack_heads(keys.transpose(1, 2).contiguous())
        self.to_values: PackedHeads = ops.pack_heads(values.contiguous())
        if device_type != "cpu":
            # Twice as many as make up for the products with `kv_b_proj`: a token of a prompt sees half of it.
            gain = 2 * latent.kv_rank - latent.nope_dim - latent.value_dim
            cost = latent.kv_rank * (latent.nope_dim + latent.value_dim)
            self.least_expanded = 2 * cost // gain if gain > 0 else None

    @property
    def absorbed_bytes(self) -> int:
        """Bytes of the matrices that `finish` makes."""
        latent = self.latent
        numbers = self.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
        return numbers * self.kv_up.dtype.itemsize

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; writes the new tokens' latents into the cache."""
        kv_layer, meta, adapters = context.kv_layer, context.meta, context.adapters
        latent = self.latent
        kv_size = latent.kv_rank + latent.rope_dim
        first, kv = self.down(x, adapters).tensor_split([-kv_size], dim=1)
        if self.q_up is not None:
            first = self.q_up(self.q_a_layernorm(first), adapters)
        heads = first.unflatten(1, (self.num_heads, -1))
        query, rotary = heads[..., : latent.nope_dim], heads[..., latent.nope_dim :]
        rotary = torch.cat((rotary, kv[:, None, latent.kv_rank :]), dim=1)
        if latent.interleaved:  # pairs of neighbours to pairs of halves, which changes no product
            rotary = rotary.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        rotary = ops.rope(rotary, context.cos, context.sin)
        key = torch.cat((self.kv_a_layernorm(kv[:, : latent.kv_rank]), rotary[:, -1]), dim=1).unsqueeze(1)
        ops.write_kv(key, key, kv_layer, meta.slot_mapping)
        out = x.new_empty((x.shape[0], self.num_heads, latent.value_dim))
        expanded, absorbed = self._split(meta, data_of(kv_layer).shape[3])
        if expanded is None:
            self._absorbed(query, rotary[:, :-1], kv_layer, meta, out)
        else:
            rows = expanded.rows
            out[rows] = self._expanded(query[rows], rotary[rows, :-1], kv_layer, expanded)
        if absorbed is not None:
            rest = out.new_empty((len(absorbed.rows), *out.shape[1:]))
            self._absorbed(query[absorbed.rows], rotary[absorbed.rows, :-1], kv_layer, absorbed.meta, rest)
            out[absorbed.rows] = rest
        attended: torch.Tensor = self.out(out.flatten(1), adapters)
        return attended

    def _absorbed(
        self,
        query: torch.Tensor,
        rotary: torch.Tensor,
        kv_layer: KVLayer,
        meta: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """Attention of queries [n, num_heads, nope_dim] and their rotated parts, over latents; into `out`."""
        rank = self.latent.kv_rank
        latent_query = query.new_empty((*query.shape[:2], rank + rotary.shape[2]))
        self.absorb(query, latent_query[..., :rank])
        latent_query[..., rank:] = rotary
        attended = ops.paged_attention(
            latent_query, kv_layer, meta, scale=self.scale, implementation=self.backend
        )
        self.to_values(attended[..., :rank], out)

    def _expanded(
        self, query: torch.Tensor, rotary: torch.Tensor, kv_layer: KVLayer, part: Part
    ) -> torch.Tensor:
        """The same over keys and values of all heads, [n, num_heads, value_dim]."""
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
        """Size of an expanded key or value: the larger of both, in whole vectors of every kernel."""
        latent = self.latent
        return -(-max(latent.nope_dim + latent.rope_dim, latent.value_dim) // 32) * 32

    def _split(self, meta: AttentionMetadata, block_size: int) -> tuple[Part | None, Part | None]:
        """Sequences of a batch that are expanded, and the others, which are absorbed (None: there are none);
        (None, None): all are absorbed."""
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


def _part(meta: AttentionMetadata, sequences: list[int], block_size: int, *, renumber: bool) -> Part:
    """Some sequences of a batch; `renumber`: with blocks 0, 1, ... in the place of their own."""
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
