"""The operators, as models call them. Each picks its implementation through the registry.

KV cache: one allocation `kv_cache[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` (keys at
index 0 of the third dimension, values at 1), so that one block of all layers is contiguous. A layer's view is
`kv_cache[:, layer]`. The slot of a token is `block_id * block_size + offset`.
"""

from __future__ import annotations

import torch

# Registers the implementations.
import quire_kernels.reference  # noqa: F401
from quire_kernels import registry
from quire_kernels.metadata import AttentionMetadata


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over its paged context, for prefill, decode and any mixture.

    Keys and values of the new tokens are already in the cache (`write_kv`). The token at position p sees the
    positions (p - sliding_window, p], or [0, p] without a window.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a layer's view of the cache;
            num_heads is a multiple of num_kv_heads, consecutive query heads share a KV head.
        meta: the batch.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: number of positions a token sees, itself included.
        softcap: scores become softcap * tanh(score / softcap).

    Returns:
        [num_tokens, num_heads, head_dim] in query's type; softmax and sums are float32.
    """
    function = registry.select(
        "paged_attention",
        query.device.type,
        query.dtype,
        head_dim=query.shape[2],
        num_groups=query.shape[1] // kv_layer.shape[2],
        block_size=kv_layer.shape[3],
        kv_dtype=kv_layer.dtype,
        sliding_window=sliding_window is not None,
        softcap=softcap is not None,
    )
    out: torch.Tensor = function(query, kv_layer, meta, scale, sliding_window, softcap)
    return out


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores the keys and values of new tokens in their slots.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], rotated already.
        value: the same shape.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim]; written in place.
        slot_mapping: int64 [num_tokens]; every slot is valid, and no two tokens share one.
    """
    registry.select(
        "write_kv",
        key.device.type,
        key.dtype,
        head_dim=key.shape[2],
        block_size=kv_layer.shape[3],
        kv_dtype=kv_layer.dtype,
    )(key, value, kv_layer, slot_mapping)


def copy_blocks(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies whole blocks of all layers inside the cache.

    Args:
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; written in place.
        source: int64 [n], block ids.
        target: int64 [n], block ids, distinct, none of them in `source`.
    """
    registry.select("copy_blocks", kv_cache.device.type, kv_cache.dtype)(kv_cache, source, target)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; the mean of squares is float32, the type stays x's."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: torch.Tensor = function(x, weight, eps, None)[0]
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, then normalises: (rms_norm(x + residual), x + residual), the sum in x's type."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: tuple[torch.Tensor, torch.Tensor] = function(x, weight, eps, residual)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the rotate-half kind: pairs are (i, i + rotary_dim / 2).

    Args:
        x: [num_tokens, num_heads, head_dim], queries or keys or both behind each other.
        cos: float32 [num_tokens, rotary_dim / 2]; rotary_dim may be smaller than head_dim (partial rotary
            embedding: the dimensions after it pass unchanged). M-RoPE differs in how these are made only.
        sin: as cos.

    Returns:
        A new tensor of x's shape and type.
    """
    out: torch.Tensor = registry.select(
        "rope", x.device.type, x.dtype, head_dim=x.shape[-1], rotary_dim=2 * cos.shape[-1]
    )(x, cos, sin)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [num_tokens, 2 * size], gate first; returns [num_tokens, size]."""
    out: torch.Tensor = registry.select("silu_mul", gate_up.device.type, gate_up.dtype)(gate_up)
    return out


def gelu_mul(gate_up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate) * up of gate_up [num_tokens, 2 * size]; `approximate` is "none" or "tanh"."""
    out: torch.Tensor = registry.select("gelu_mul", gate_up.device.type, gate_up.dtype)(gate_up, approximate)
    return out
