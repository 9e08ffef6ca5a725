"""Registers the Triton kernels of attention and of the KV cache."""

from __future__ import annotations

from typing import Any

import torch

from quire_kernels.triton_lang import lazy

_KV_DTYPES = (*lazy.FLOATS, torch.int8, torch.float8_e4m3fn)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _can_attend(
    *, head_dim: int, kv_dtype: torch.dtype, num_groups: int = 1, block_size: int = 16, **_: Any
) -> bool:
    """Any window and any softcap; at most 256 dimensions, and 64 query heads for a KV head."""
    return _can_write(head_dim=head_dim, kv_dtype=kv_dtype, block_size=block_size) and num_groups <= 64


def _can_write(*, head_dim: int, kv_dtype: torch.dtype, block_size: int = 16, **_: Any) -> bool:
    return (
        head_dim % 16 == 0
        and head_dim <= 256
        and kv_dtype in _KV_DTYPES
        and block_size <= 128
        and _is_power_of_two(block_size)
    )


def _can_rotate(*, head_dim: int, rotary_dim: int, **facts: Any) -> bool:
    return rotary_dim <= head_dim and rotary_dim % 2 == 0 and _can_write(head_dim=head_dim, **facts)


lazy.register("paged_attention", "attention", "paged_attention", predicate=_can_attend)
lazy.register("write_kv", "cache", "write_kv", predicate=_can_write)
lazy.register("norm_rope_write", "cache", "norm_rope_write", predicate=_can_rotate)
lazy.register("copy_blocks", "cache", "copy_blocks", dtypes=())
