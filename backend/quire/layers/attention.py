"""Self-attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.config import DecoderConfig
from quire_kernels import ops


class Attention(nn.Module):
    """Projections, optional query and key norms, rotary embedding, cache write and paged attention, with
    optional sinks.

    Args:
        config: of the model.
        layer: index; decides the sliding window.
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
        self.qkv = Linear(
            config,
            config.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            parallel="column",
            bias=config.qkv_bias,
        )
        self.out = Linear(
            config, query_size, {"o_proj": config.hidden_size}, parallel="row", bias=config.out_bias
        )
        self.norm_eps = config.rms_norm_eps
        self.q_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None
        self.sinks: nn.Parameter | None = None
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; writes the new tokens' keys and values into the cache."""
        cos, sin, kv_layer, meta, adapters = context
        heads = self.qkv(x, adapters).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight)
        query = ops.norm_rope_write(
            heads, self.num_heads, norms, self.norm_eps, cos, sin, kv_layer, meta.slot_mapping
        )
        attended = ops.paged_attention(
            query,
            kv_layer,
            meta,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            implementation=self.backend,
        )
        out: torch.Tensor = self.out(attended.flatten(1), adapters)
        return out
