"""Writing and copying the paged KV cache, whose layout `ops` describes."""

from __future__ import annotations

import torch

from quire_kernels.quantized_kv import SCALE_DTYPE, KVLayer, QuantizedKV
from quire_kernels.registry import implementation


@implementation("write_kv", "reference")
def write_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """See `ops.write_kv`."""
    # [num_tokens, 2, num_kv_heads, head_dim]
    new = torch.stack((key, value), dim=1)
    if not isinstance(kv_layer, QuantizedKV):
        _scatter(new, kv_layer, slot_mapping)
        return
    data, scales = quantize(new, kv_layer.data.dtype)
    # As bytes: not every device can index float8.
    _scatter(data.view(torch.int8), kv_layer.data.view(torch.int8), slot_mapping)
    _scatter(scales, kv_layer.scales, slot_mapping)


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises symmetrically with one scale per vector: x is about data * scales[..., None].

    Args:
        x: [..., size], of any floating type.
        dtype: int8 or float8_e4m3fn.

    Returns:
        (data, `dtype` [..., size]; scales, SCALE_DTYPE [...]).
    """
    x = x.float()
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    # Zeros get the smallest scale rather than none, which would make them NaN.
    smallest = torch.finfo(SCALE_DTYPE).tiny
    scales = (x.abs().amax(-1) / limit).clamp_(min=smallest).to(SCALE_DTYPE)
    # A scale that was rounded down leaves numbers up to 2 ** -9 above the limit: they round to it.
    # Where a scale is infinite, zeros make it NaN. A NaN of e4m3 would not: kernels read it as a number.
    data = (x / scales.float().unsqueeze(-1)).nan_to_num_(0.0)
    return (data.round_() if dtype == torch.int8 else data).to(dtype), scales


def _scatter(new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes new [num_tokens, 2, num_kv_heads, ...] into the slots of cache [num_blocks, 2, num_kv_heads,
    block_size, ...]. If values are the keys, only keys are written."""
    if cache.stride(1) == 0:  # values are keys
        new, cache = new[:, :1], cache[:, :1]
    block_size = cache.shape[3]
    block = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offset = slot_mapping - block * block_size
    # [num_blocks, block_size, 2, num_kv_heads, ...], a view
    cache.movedim(3, 1)[block, offset] = new


@implementation("copy_blocks", "reference")
def copy_blocks(blocks: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `ops.copy_blocks`."""
    blocks.index_copy_(0, target, blocks.index_select(0, source))
