"""QuantizedKV: a layer's keys and values in eight bits. A token's key and value in a KV head
have a scale each."""

from __future__ import annotations

from typing import NamedTuple

import torch

SCALE_DTYPE = torch.bfloat16
"""Type of the scales. It has float32's range in two bytes, for very large and very small keys and values. The
short mantissa costs hardly any precision, because numbers are divided by the rounded scale."""

KV_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Number by which the GPU kernels know each quantised cache type; 0 means a plain cache."""


class QuantizedKV(NamedTuple):
    """Views of a layer's part of a quantised cache. A number of a key or value is data * scale."""

    data: torch.Tensor
    """int8 or float8_e4m3fn [num_blocks, 2, num_kv_heads, block_size, head_dim]"""
    scales: torch.Tensor
    """SCALE_DTYPE [num_blocks, 2, num_kv_heads, block_size]"""

    @classmethod
    def from_pieces(cls, pieces: torch.Tensor, dtype: torch.dtype, block_size: int) -> QuantizedKV:
        """Makes views of memory in which each head of a block has its data, followed by its scales.

        Args:
            pieces: uint8 [num_blocks, 2, num_kv_heads, piece_bytes(...)], the last dimension contiguous.
            dtype: int8 or float8_e4m3fn.
            block_size: tokens per block.
        """
        size = pieces.shape[-1] - block_size * SCALE_DTYPE.itemsize
        head_dim = size // block_size
        # Not `unflatten`, which invents strides for dimensions of size 1: implementations go by them.
        data = pieces.view(dtype).as_strided(
            (*pieces.shape[:-1], block_size, head_dim), (*pieces.stride()[:-1], head_dim, 1)
        )
        return cls(data, pieces[..., size:].view(SCALE_DTYPE))


KVLayer = torch.Tensor | QuantizedKV
"""A layer's KV cache, as the attention operators read it: a tensor [num_blocks, 2, num_kv_heads, block_size,
head_dim], or a QuantizedKV."""


def piece_bytes(block_size: int, head_dim: int) -> int:
    """Returns the bytes of one head's quantised keys or values in a block, scales included."""
    return block_size * (head_dim + SCALE_DTYPE.itemsize)


def data_of(kv_layer: KVLayer) -> torch.Tensor:
    """Returns the data [num_blocks, 2, num_kv_heads, block_size, head_dim] of a plain or quantised layer."""
    return kv_layer.data if isinstance(kv_layer, QuantizedKV) else kv_layer
