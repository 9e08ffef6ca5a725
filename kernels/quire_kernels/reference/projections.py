"""What lies between the projection of queries, keys and values and attention, operator by operator."""

from __future__ import annotations

import torch

from quire_kernels.quantized_kv import KVLayer
from quire_kernels.registry import implementation


@implementation("norm_rope_write", "reference")
def norm_rope_write(
    qkv: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `ops.norm_rope_write`."""
    from quire_kernels import ops  # which imports this

    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    sizes = [num_heads, num_kv_heads]
    rotated, value = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query, key = rotated.split(sizes, dim=1)
        rotated = torch.cat((_norm(query, norms[0], eps), _norm(key, norms[1], eps)), dim=1)
    query, key = ops.rope(rotated, cos, sin).split(sizes, dim=1)
    ops.write_kv(key, value, kv_layer, slot_mapping)
    return query


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """A float32 weight over a narrower x multiplies before the result is rounded."""
    from quire_kernels import ops

    return ops.rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)
