"""Writing and copying the paged KV cache, whose layout `ops` describes."""

from __future__ import annotations

import torch

from quire_kernels.registry import implementation


@implementation("write_kv", "reference")
def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `ops.write_kv`."""
    block_size = kv_layer.shape[3]
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    # [num_blocks, block_size, 2, num_kv_heads, head_dim], a view
    by_slot = kv_layer.permute(0, 3, 1, 2, 4)
    by_slot[block, offset] = torch.stack((key, value), dim=1)


@implementation("copy_blocks", "reference")
def copy_blocks(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    kv_cache[target] = kv_cache[source]
