"""Self-attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.config import DecoderConfig
from quire_kernels import ops


class Attention(nn.Module):
    """Projections, optional query and key norms, rotary embedding, cache write and paged attention.

    Args:
        config: of the model.
        layer: index; decides the sliding window.
    """

    def __init__(self, config: DecoderConfig, layer: int, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.sliding_window = config.sliding_windows[layer]
        self.backend = config.attention_backend
        dtype = config.dtype
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv = Linear(
            config.hidden_size,
            [("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)],
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            query_size, [("o_proj", config.hidden_size)], bias=config.out_bias, dtype=dtype, device=device
        )
        self.norm_eps = config.rms_norm_eps
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if config.qk_norm:
            eps, norm_dtype = config.rms_norm_eps, config.norm_dtype
            self.query_norm = RMSNorm(self.head_dim, eps, dtype=norm_dtype, device=device)
            self.key_norm = RMSNorm(self.head_dim, eps, dtype=norm_dtype, device=device)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; writes the new tokens' keys and values into the cache."""
        cos, sin, kv_layer, meta = context
        heads = self.qkv(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm.weight, self.key_norm.weight)
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
            implementation=self.backend,
        )
        out: torch.Tensor = self.out(attended.flatten(1))
        return out

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, memory it fills)."""
        yield from self.qkv.weights(prefix)
        yield from self.out.weights(prefix)
        if self.query_norm is not None and self.key_norm is not None:
            yield from self.query_norm.weights(f"{prefix}q_norm")
            yield from self.key_norm.weights(f"{prefix}k_norm")
