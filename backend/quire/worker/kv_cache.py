"""The KV cache tensor and its size.

One allocation `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: a block of all layers is
one contiguous piece of memory, so that moving a block (swap, transfer, copy on write) is a single copy.
"""

from __future__ import annotations

import math

import psutil
import torch

from quire.config import CacheConfig, SchedulerConfig
from quire.errors import ConfigError


def block_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in every layer."""
    return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize


def num_blocks_for(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    bytes_per_block: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """How many blocks the pool gets.

    `num_blocks`, else `kv_cache_memory`, else on cuda what `gpu_memory_utilization` leaves after the weights,
    else on cpu what `max_num_seqs` sequences of `max_model_len` need, capped by `cpu_memory_utilization`
    of the memory now available.

    Raises:
        ConfigError: the pool could not hold one sequence of `max_model_len`.
    """
    per_sequence = math.ceil(max_model_len / cache.block_size)
    available: int | None = None
    if cache.num_blocks is not None:
        num_blocks, source = cache.num_blocks, f"num_blocks={cache.num_blocks}"
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // bytes_per_block
        source = f"kv_cache_memory={cache.kv_cache_memory}"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        available = int(total * cache.gpu_memory_utilization) - used
        num_blocks = max(available, 0) // bytes_per_block
        source = f"gpu_memory_utilization={cache.gpu_memory_utilization}"
    else:
        available = int(psutil.virtual_memory().available * cache.cpu_memory_utilization)
        num_blocks = min(available // bytes_per_block, per_sequence * scheduler.max_num_seqs)
        source = f"cpu_memory_utilization={cache.cpu_memory_utilization}"
    if num_blocks < per_sequence:
        raise ConfigError(
            f"{source} gives a KV cache of {num_blocks} blocks ({num_blocks * cache.block_size} tokens, "
            f"{num_blocks * bytes_per_block / 2**20:.1f} MiB), but one sequence of "
            f"max_model_len={max_model_len} needs {per_sequence} blocks "
            f"({per_sequence * bytes_per_block / 2**20:.1f} MiB): raise it or lower max_model_len"
        )
    physical = psutil.virtual_memory().available if device.type == "cpu" else None
    if physical is not None and num_blocks * bytes_per_block > physical:
        raise ConfigError(
            f"{source} asks for a KV cache of {num_blocks * bytes_per_block / 2**20:.0f} MiB, "
            f"but only {physical / 2**20:.0f} MiB of memory are available"
        )
    return num_blocks


def allocate_kv_cache(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The pool, [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    It is written once, so that its memory is really there before the model is called ready: a machine
    that is too small fails at start and not under load.
    """
    shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
    try:
        cache = torch.empty(shape, dtype=dtype, device=device)
        cache.fill_(0)
    except RuntimeError as error:
        size = num_blocks * block_bytes(num_layers, num_kv_heads, head_dim, block_size, dtype)
        raise ConfigError(f"the KV cache of {size / 2**20:.0f} MiB cannot be allocated: {error}") from None
    return cache
