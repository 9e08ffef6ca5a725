"""Self-attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire_kernels import ops
from quire_kernels.cpu.decoder import NormKind


class Attention(nn.Module):
    """Self-attention: projections, optional query and key norms, rotary embedding, cache write and paged
    attention, with optional sinks.

    Args:
        config: the model's configuration.
        layer: index of the layer; it decides the sliding window.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.sliding_window = config.sliding_windows[layer]
        self.backend = config.attention_backend
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        if config.fused_qkv:
            parts = {"qkv_proj": sum(parts.values())}
        self.qkv = Linear(
            config,
            config.hidden_size,
            parts,
            parallel="column",
            bias=config.qkv_bias,
            num_parts={"k_proj": config.kv_parts, "v_proj": config.kv_parts},
        )
        self.out = Linear(
            config, query_size, {"o_proj": config.hidden_size}, parallel="row", bias=config.out_bias
        )
        self.norm_eps = config.rms_norm_eps
        self.norm_kind = NormKind.EACH_HEAD
        if config.qk_norm_whole:
            self.norm_kind = NormKind.ALL_HEADS
        elif config.qk_norm_behind_rope:
            self.norm_kind = NormKind.BEHIND_ROPE
        sizes = (query_size, kv_size) if config.qk_norm_whole else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (RMSNorm(config, size) if config.qk_norm else None for size in sizes)
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Computes attention for each token's input, [num_tokens, input features], and returns [num_tokens,
        hidden_size]. Writes the new tokens' keys and values to the cache."""
        attended = self._attend(self.qkv(x, context.adapters), context)
        out: torch.Tensor = self.out(attended, context.adapters)
        return out

    def _attend(self, qkv: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Writes the new tokens' keys and values to the cache, and returns the heads' attention outputs
        [num_tokens, num_heads * head_dim], the input of `out`. `qkv` holds each token's queries, then keys,
        then values."""
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query = self._queries(heads, context)
        if context.query_factors is not None:
            query = (query * context.query_factors[:, None, None]).to(query.dtype)
        attended: torch.Tensor = ops.paged_attention(
            query,
            context.kv_layer,
            context.meta,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            implementation=self.backend,
        )
        return attended.flatten(1)

    def _queries(self, heads: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Returns the rotated queries [num_tokens, num_heads, head_dim], normalised if the layer has norms.
        Writes the new tokens' keys and values to the cache."""
        cos, sin, kv_layer, slots = context.cos, context.sin, context.kv_layer, context.meta.slot_mapping
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
            if self.norm_kind != NormKind.EACH_HEAD:
                query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
                if self.norm_kind == NormKind.ALL_HEADS:
                    query = self.q_norm(query.flatten(1)).view(query.shape)
                    key = self.k_norm(key.flatten(1)).view(key.shape)
                query, key = ops.rope(query, cos, sin), ops.rope(key, cos, sin)
                if self.norm_kind == NormKind.BEHIND_ROPE:
                    query, key = self.q_norm(query), self.k_norm(key)
                ops.write_kv(key, value, kv_layer, slots)
                return query
        return ops.norm_rope_write(heads, self.num_heads, norms, self.norm_eps, cos, sin, kv_layer, slots)


class GatedAttention(Attention):
    """Attention whose heads' outputs are multiplied by the sigmoid of a gate before the output projection.
    `q_proj` computes the gate too: each head's query is followed by its gate."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv = Linear(
            config,
            config.hidden_size,
            {"q_proj": 2 * query_size, "k_proj": kv_size, "v_proj": kv_size},
            parallel="column",
            bias=config.qkv_bias,
        )

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """See Attention."""
        size = self.num_heads * self.head_dim
        queries, others = self.qkv(x, context.adapters).tensor_split([2 * size], 1)
        query, gate = queries.unflatten(1, (self.num_heads, 2, self.head_dim)).unbind(2)
        attended = self._attend(torch.cat([query.flatten(1), others], 1), context)
        out: torch.Tensor = self.out(attended * gate.flatten(1).sigmoid(), context.adapters)
        return out
