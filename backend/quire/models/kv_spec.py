"""KV specs: what a layer keeps of each token, as its model says it.

Pool, block manager, tiers and transfers know a block as bytes; only the spec and the operators of its layers
know what these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire_kernels.quantized_kv import KVLayer, QuantizedKV, piece_bytes

QUANTIZED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of keys and values in memory by `kv_cache_dtype`, where that is not "auto"."""


class KVSpec(Protocol):
    """Layout of one layer's keys and values for the tokens of a block; all such layers of a pool have one
    spec."""

    def layer_bytes(self, block_size: int) -> int:
        """Bytes of `block_size` tokens."""

    def view(self, memory: torch.Tensor, block_size: int) -> KVLayer:
        """The layer's part of the pool as its operators take it.

        Args:
            memory: uint8 [num_blocks, layer_bytes], the last dimension contiguous.
            block_size: tokens per block.
        """


class KVLayers(Protocol):
    """A pool, as a model sees it."""

    block_size: int
    """Tokens per block."""

    def layer(self, index: int, shape: tuple[int, int] | None = None) -> KVLayer:
        """View of the pool for the layer at position `index` of its group; for `shape` see
        `DecoderLayer.kv_shape`."""

    def states(self, index: int) -> torch.Tensor:
        """Bytes of the layer at position `index` of a group of states: uint8 [num_blocks, state_bytes or a
        few more], the last dimension contiguous."""


@dataclass(frozen=True)
class AttentionKV:
    """A key and a value per KV head, with the scales of both where they are quantised.

    In memory: keys before values, then heads; a quantised head's scales lie right behind its data.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The computation's, and the cache's if it is not quantised."""
    kv_cache_dtype: str = "auto"
    """See `CacheConfig`."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of keys and values in memory."""
        return QUANTIZED_DTYPES.get(self.kv_cache_dtype, self.dtype)

    def layer_bytes(self, block_size: int) -> int:
        """See `KVSpec`."""
        if self.kv_cache_dtype in QUANTIZED_DTYPES:
            head = piece_bytes(block_size, self.head_dim)
        else:
            head = block_size * self.head_dim * self.dtype.itemsize
        return 2 * self.num_kv_heads * head

    def view(self, memory: torch.Tensor, block_size: int) -> KVLayer:
        """See `KVSpec`."""
        heads = memory.view(memory.shape[0], 2, self.num_kv_heads, -1)
        if self.kv_cache_dtype in QUANTIZED_DTYPES:
            return QuantizedKV.from_pieces(heads, self.stored_dtype, block_size)
        return heads.view(self.dtype).unflatten(-1, (block_size, self.head_dim))


@dataclass(frozen=True)
class LatentKV:
    """One vector, which is the key and the value of all heads: a latent and behind it a rotated part.

    (DeepSeek-V2, arXiv 2405.04434.)
    """

    size: int
    """kv_lora_rank + qk_rope_head_dim."""
    dtype: torch.dtype

    def layer_bytes(self, block_size: int) -> int:
        """See `KVSpec`."""
        return block_size * self.size * self.dtype.itemsize

    def view(self, memory: torch.Tensor, block_size: int) -> KVLayer:
        """See `KVSpec`: keys and values are the same memory."""
        data, token = memory.view(self.dtype), self.size
        shape = (data.shape[0], 2, 1, block_size, token)
        return data.as_strided(shape, (data.stride(0), 0, block_size * token, token, 1))
