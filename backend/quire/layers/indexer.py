"""Indexer of sparse attention (DeepSeek-V3.2, "DSA"): chooses the positions that a token attends to.

The indexer is a small attention of its own, with one key per position. A position's score is the sum over its
heads of weight * max(0, query . key); the weights are the token's. Of the positions that it sees, the token
attends to the `topk` with the largest scores, or to all if they are fewer.

A position's key lies in the layer's part of the KV cache, behind the latents of its block (`LatentKV`). So
whatever keeps, shares or moves blocks keeps, shares or moves these keys too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.linear import AsStoredLinear
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of

_NORM_EPS = 1e-6
"""Epsilon of the norm of the indexer's keys. It is not read from config.json."""
SCORE_BYTES = 2**28
"""Most bytes of the heads' scores that are computed at once, unless one token needs more."""


class Chosen(NamedTuple):
    """The positions that each token of a batch attends to, in ascending order."""

    blocks: torch.Tensor
    """int64 [num_tokens, topk]: block ids of the positions. If a token sees fewer positions than `topk`, the
    last of them is repeated."""
    offsets: torch.Tensor
    """int64 [num_tokens, topk]: offsets of the positions in their blocks."""


class Indexer(nn.Module):
    """Indexer: queries, keys and weights of its heads, the cache write, and the choice of positions.

    Its linear layers are quantised only if the checkpoint's are, because other scores choose other positions.
    Every tensor-parallel rank has the whole indexer.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None and latent.index is not None and latent.query_rank is not None
        index = self.index = latent.index
        self.rope_dim = latent.rope_dim
        self.queries = AsStoredLinear(
            config,
            latent.query_rank,
            {"wq_b": index.num_heads * index.head_dim},
            parallel=None,
            bias=False,
        )
        self.down = AsStoredLinear(
            config,
            config.hidden_size,
            {"wk": index.head_dim, "weights_proj": index.num_heads},
            parallel=None,
            bias=False,
        )
        self.k_norm = nn.LayerNorm(index.head_dim, eps=_NORM_EPS, dtype=config.dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor, query_latent: torch.Tensor, context: LayerContext) -> Chosen | None:
        """Writes the new tokens' keys to the cache, and chooses positions.

        Args:
            x: [num_tokens, hidden_size], the layer's input.
            query_latent: [num_tokens, query_rank], the latent of the layer's queries, normed.
            context: the layer's other inputs.

        Returns:
            The positions that each token attends to; None: every token attends to all that it sees.
        """
        index, meta = self.index, context.meta
        key, weights = self.down(x).tensor_split([index.head_dim], dim=1)
        heads = self.queries(query_latent).unflatten(1, (index.num_heads, -1))
        heads = torch.cat((heads, self.k_norm(key).unsqueeze(1)), dim=1)
        if index.interleaved:  # pairs of neighbours to pairs of halves, which changes no product
            turned, rest = heads.tensor_split([self.rope_dim], dim=2)
            heads = torch.cat((turned.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2), rest), dim=2)
        heads = ops.rope(heads, context.cos, context.sin)
        keys, key = key_cache(context.kv_layer, index.head_dim), heads[:, -1:].contiguous()
        ops.write_kv(key, key, keys, meta.slot_mapping)
        if meta.max_seq_len <= index.topk:
            return None
        # Both factors are positive, so they may follow the ReLU.
        factor = (index.head_dim * index.num_heads) ** -0.5
        return choose(heads[:, :-1].float(), weights.float() * factor, keys, meta, index.topk)


def key_cache(kv_layer: KVLayer, head_dim: int) -> torch.Tensor:
    """Returns the indexer's keys in a layer of a `LatentKV` cache: [num_blocks, 2, 1, block_size, head_dim].
    Both indices of the second dimension are the same memory."""
    data = data_of(kv_layer)
    num_blocks, _, _, block_size, size = data.shape
    shape, strides = (
        (num_blocks, 2, 1, block_size, head_dim),
        (data.stride(0), 0, block_size * head_dim, head_dim, 1),
    )
    return data.as_strided(shape, strides, data.storage_offset() + block_size * size)


def choose(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, meta: AttentionMetadata, topk: int
) -> Chosen:
    """Chooses for each token the `topk` positions with the largest scores among those that it sees, or all
    of these if they are fewer. Of positions with equal scores, the first are chosen.

    On a CPU, each token's scores are computed alone, over exactly the positions that it sees. Products of
    other shapes may round differently, and a token's bits must not depend on its chunk.

    Args:
        query: float32 [num_tokens, num_heads, head_dim].
        weights: float32 [num_tokens, num_heads].
        keys: see `key_cache`; those of the new tokens are written.
        meta: the batch.
        topk: number of positions.
    """
    device, block_size = query.device, keys.shape[3]
    sequences, last = meta.plan("tokens", lambda: _tokens(meta))
    chosen = torch.arange(topk, device=device).repeat(len(query), 1)
    start = 0
    for i, (query_len, seq_len) in enumerate(zip(meta.query_lens, meta.seq_lens_list, strict=True)):
        first = seq_len - query_len
        if seq_len > topk:
            blocks = meta.block_table[i, : -(-seq_len // block_size)].long()
            known = keys[blocks, 0, 0].flatten(0, 1).float()
            tile = max(SCORE_BYTES // (4 * seq_len * query.shape[1]), 1)
            for begin in range(max(first, topk), seq_len, tile):
                end = min(begin + tile, seq_len)
                rows = slice(start + begin - first, start + end - first)
                is_cpu = device.type == "cpu"
                scores = _scores(query[rows], weights[rows], known[:end], each_alone=is_cpu)
                order = scores.sort(dim=1, descending=True, stable=True).indices
                chosen[rows] = order[:, :topk].sort(dim=1).values
        start += query_len
    chosen = torch.minimum(chosen, last[:, None])
    blocks = meta.block_table[sequences[:, None], chosen // block_size].long()
    return Chosen(blocks, chosen % block_size)


def _scores(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, *, each_alone: bool
) -> torch.Tensor:
    """Computes the scores of `choose` for tokens of one sequence that follow each other.

    Args:
        query: float32 [num_tokens, num_heads, head_dim].
        weights: float32 [num_tokens, num_heads].
        keys: float32 [positions, head_dim], from the sequence's first position to the last of these tokens.
        each_alone: compute one token after the other, over exactly the positions that it sees.

    Returns:
        float32 [num_tokens, positions], -inf at positions that a token does not see.
    """
    first = len(keys) - len(query)
    if each_alone:
        scores = query.new_full((len(query), len(keys)), float("-inf"))
        for i, (heads, weight) in enumerate(zip(query, weights, strict=True), start=1):
            scores[i - 1, : first + i] = weight @ torch.relu(heads @ keys[: first + i].T)
        return scores
    scores = (weights.unsqueeze(1) @ torch.relu(query @ keys.T)).squeeze(1)
    unseen = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
    return scores.masked_fill_(unseen, float("-inf"))


def _tokens(meta: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the index of the sequence of each token of a batch, and the token's position in it, int64
    [num_tokens] each."""
    counts, device = torch.tensor(meta.query_lens), meta.block_table.device
    sequences = torch.arange(len(counts)).repeat_interleave(counts)
    ends = torch.tensor(meta.seq_lens_list) - counts.cumsum(0)
    return sequences.to(device), (torch.arange(meta.num_tokens) + ends[sequences]).to(device)
