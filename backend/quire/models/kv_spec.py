"""KV specs: how layers with attention lay out what they keep of tokens.

The pool, block manager, tiers and transfers treat a block as bytes. The spec and the layers know what these
mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire_kernels.quantized_kv import KVLayer, QuantizedKV, piece_bytes

QUANTIZED_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Stored types of keys and values, by `kv_cache_dtype`, where that is not "auto"."""


class KVSpec(Protocol):
    """Layout of one layer's keys and values, or latents, for the tokens of a block. A pool has one spec. For
    a layer whose heads have another number or size, `KVLayers.layer` uses the spec with that shape."""

    def layer_bytes(self, block_size: int) -> int:
        """Returns the bytes that one layer needs for `block_size` tokens."""

    def view(self, memory: torch.Tensor, block_size: int) -> KVLayer:
        """Returns one layer's part of the pool in the form that its operators read.

        Args:
            memory: uint8 [num_blocks, layer_bytes], the last dimension contiguous.
            block_size: tokens per block.
        """


class KVLayers(Protocol):
    """A KV cache pool, in the form that a model uses."""

    block_size: int
    """Tokens per block."""

    def layer(self, index: int, shape: tuple[int, int] | None = None) -> KVLayer:
        """Returns the pool's view for the layer at position `index` of its group. For `shape` see
        `DecoderLayer.kv_shape`."""

    def states(self, index: int) -> torch.Tensor:
        """Returns the states of the layer at position `index` of its group: uint8 [num_blocks, at least
        state_bytes], the last dimension contiguous."""


@dataclass(frozen=True)
class AttentionKV:
    """Spec of a key and a value per token and KV head, with the scales of both if they are quantised.

    In a layer's part of a block, keys lie before values, and each is divided into heads. A quantised head's
    scales follow its data.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Type of the model's activations, and of the cache if it is not quantised."""
    kv_cache_dtype: str = "auto"
    """See `CacheConfig`."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of keys and values in the cache."""
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
    """Spec of one vector per token, which stands for the keys and values of all heads: a latent, then the
    rotated part of the keys.

    (DeepSeek-V2, arXiv 2405.04434.) With sparse attention, a block has room for an indexer's keys of its
    tokens behind the vectors of all of them; see `layers/indexer.py`.
    """

    size: int
    """Length of the vector: kv_lora_rank + qk_rope_head_dim."""
    dtype: torch.dtype
    index_size: int = 0
    """Size of a token's indexer key; 0: the model has no indexer."""

    def layer_bytes(self, block_size: int) -> int:
        """See `KVSpec`."""
        return block_size * (self.size + self.index_size) * self.dtype.itemsize

    def view(self, memory: torch.Tensor, block_size: int) -> KVLayer:
        """See `KVSpec`. Keys and values are views of the same memory, without the indexer's keys."""
        data, token = memory.view(self.dtype), self.size
        shape = (data.shape[0], 2, 1, block_size, token)
        return data.as_strided(shape, (data.stride(0), 0, block_size * token, token, 1))
