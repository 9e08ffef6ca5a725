"""KVCache: the memory of the paged KV cache, and how large it gets.

One allocation of `num_blocks` pieces. A block holds what all layers of one KV group keep of `block_size`
tokens, or of a whole request, one layer after the other, so that moving it (swap, transfer, copy on write) is
a single copy. Layers have equally many bytes of it, the most that one needs. What lies inside is said by the
model's KV spec, and by the layers that keep a state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quire.config import CacheConfig, EngineConfig, SchedulerConfig
from quire.errors import ConfigError
from quire.kv_tiers.moves import read_rows, write_rows
from quire.models.interface import Model
from quire.models.kv_groups import KVGroup, blocks_per_sequence, layers_per_group
from quire.models.kv_spec import AttentionKV, KVSpec
from quire_common.host_memory import aligned_bytes, shared_bytes
from quire_common.machine import available_memory
from quire_kernels import ops
from quire_kernels.cuda.copy import copy_batch
from quire_kernels.quantized_kv import KVLayer

logger = logging.getLogger("quire")

DEFAULT_CPU_SHARE = 0.25
"""Most of a host's free memory for a pool whose size nobody stated."""
DEFAULT_CPU_BYTES = 2 * 2**30
"""Bytes of such a pool, unless one sequence needs more: the host has other work."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory as they are when the pool is made, after everything else."""

    free: int
    total: int | None = None
    """Bytes that a GPU has in all; None: the memory is the host's."""

    @classmethod
    def measure(cls, device: torch.device, num_ranks: int = 1) -> DeviceMemory:
        """Memory as it is now: a GPU's, or on the host an equal share for each rank of what is available."""
        if device.type == "cuda":
            return cls(*torch.cuda.mem_get_info(device))
        return cls(available_memory() // num_ranks)


def num_blocks_for(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    bytes_per_block: int,
    blocks_per_sequence: int,
    max_model_len: int,
    memory: DeviceMemory,
) -> int:
    """How many blocks the pool gets.

    `num_blocks`, else `kv_cache_memory`, else on cuda what `gpu_memory_utilization` leaves after the weights,
    else on cpu what `max_num_seqs` sequences of `max_model_len` need, capped by `cpu_memory_utilization`
    of the memory now available. Where that is not stated either, `DEFAULT_CPU_BYTES` is a cap too, unless one
    sequence needs more.

    Args:
        blocks_per_sequence: what one sequence of `max_model_len` needs at most, over all KV groups.
        memory: of the device.

    Raises:
        ConfigError: the pool could not hold one sequence of `max_model_len`.
    """
    if cache.num_blocks is not None:
        num_blocks, source = cache.num_blocks, f"num_blocks={cache.num_blocks}"
    elif cache.kv_cache_memory is not None:
        num_blocks = cache.kv_cache_memory // bytes_per_block
        source = f"kv_cache_memory={cache.kv_cache_memory}"
    elif memory.total is not None:
        used = memory.total - memory.free
        available = int(memory.total * cache.gpu_memory_utilization) - used
        num_blocks = max(available, 0) // bytes_per_block
        source = f"gpu_memory_utilization={cache.gpu_memory_utilization}"
    else:
        share = cache.cpu_memory_utilization or DEFAULT_CPU_SHARE
        num_blocks = min(
            int(memory.free * share) // bytes_per_block, blocks_per_sequence * scheduler.max_num_seqs
        )
        if cache.cpu_memory_utilization is None:
            num_blocks = min(num_blocks, max(DEFAULT_CPU_BYTES // bytes_per_block, blocks_per_sequence))
        source = f"cpu_memory_utilization={share}"
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"{source} gives a KV cache of {num_blocks} blocks "
            f"({num_blocks * bytes_per_block / 2**20:.1f} MiB), but one sequence of "
            f"max_model_len={max_model_len} needs {blocks_per_sequence} blocks "
            f"({blocks_per_sequence * bytes_per_block / 2**20:.1f} MiB): raise it or lower max_model_len"
        )
    if memory.total is None and num_blocks * bytes_per_block > memory.free:
        raise ConfigError(
            f"{source} asks for a KV cache of {num_blocks * bytes_per_block / 2**20:.0f} MiB, "
            f"but only {memory.free / 2**20:.0f} MiB of memory are available"
        )
    return num_blocks


_ALIGNMENT = 16
"""Bytes whose multiple a state begins at."""
_LARGE_BLOCKS = 64
"""Tokens whose multiple a block beside states has: as tiles of attention have them."""


def _block_size(cache: CacheConfig, model: Model) -> int:
    """Tokens per block: `block_size`, or, where that is the default and layers keep states, so many that the
    keys and values of a block have at least as many bytes as a state."""
    state_bytes = max(group.state_bytes for group in model.kv_groups)
    has_attention = not all(group.is_state for group in model.kv_groups)
    if cache.block_size != CacheConfig.block_size or not (state_bytes and has_attention):
        return cache.block_size
    spec = model.kv_spec(cache.kv_cache_dtype)
    if spec.layer_bytes(cache.block_size) >= state_bytes:
        return cache.block_size
    size = -(-state_bytes // spec.layer_bytes(_LARGE_BLOCKS)) * _LARGE_BLOCKS
    logger.info("block_size=%d: its keys and values are as large as a state of %d bytes", size, state_bytes)
    return size


@dataclass(frozen=True)
class KVLayout:
    """Contents of a block in a model's KV cache, and the number of blocks that a sequence needs."""

    spec: KVSpec
    layers_per_block: int
    block_size: int
    max_model_len: int
    groups: tuple[KVGroup, ...]
    max_step_tokens: int
    draft_bytes: int = 0
    """Bytes of the draft model's keys and values for a block's tokens, in a pool of its own; 0: there is no
    draft model."""

    @classmethod
    def from_config(cls, config: EngineConfig, model: Model, draft: Model | None = None) -> KVLayout:
        """Layout for a model and its draft model, if any; neither needs weights for that.

        Raises:
            ConfigError: `max_model_len` exceeds what the checkpoint allows, `block_size` does not divide the
                size of its attention chunks, or its layers keep states and drafts are to be tried.
        """
        shape, asked = model.config, config.model.max_model_len
        size, kv_type = _block_size(config.cache, model), config.cache.kv_cache_dtype
        draft_bytes = 0
        if draft is not None:
            draft_bytes = layers_per_group(draft.kv_groups) * draft.kv_spec(kv_type).layer_bytes(size)
        limit = shape.rope.longest_model_len
        if asked is not None and asked > limit:
            raise ConfigError(f"max_model_len={asked} exceeds the checkpoint's limit of {limit} tokens")
        if shape.chunk_size is not None and shape.chunk_size % size:
            raise ConfigError(
                f"block_size={size} does not divide the checkpoint's attention_chunk_size of "
                f"{shape.chunk_size}"
            )
        groups = model.kv_groups if draft is None else model.kv_groups + draft.kv_groups
        if config.scheduler.num_draft_tokens and any(group.is_state for group in groups):
            raise ConfigError(
                f"num_draft_tokens={config.scheduler.num_draft_tokens}: layers of this model keep a state, "
                "which cannot take back a draft"
            )
        return cls(
            spec=model.kv_spec(kv_type),
            layers_per_block=layers_per_group(model.kv_groups),
            block_size=size,
            max_model_len=asked or shape.max_position_embeddings,
            groups=model.kv_groups,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
            draft_bytes=draft_bytes,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block that each layer has."""
        num_bytes = self.spec.layer_bytes(self.block_size)
        state_bytes = max(group.state_bytes for group in self.groups)
        if not state_bytes:
            return num_bytes
        return -(-max(num_bytes, state_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """In all pools."""
        return self.layers_per_block * self.layer_bytes + self.draft_bytes

    def blocks_per_sequence(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds at any time, over all KV groups."""
        return blocks_per_sequence(self.groups, num_tokens, self.block_size, self.max_step_tokens)

    def num_blocks(self, config: EngineConfig, memory: DeviceMemory) -> int:
        """Blocks of the pool; see `num_blocks_for`."""
        return num_blocks_for(
            config.cache,
            config.scheduler,
            bytes_per_block=self.block_bytes,
            blocks_per_sequence=self.blocks_per_sequence(self.max_model_len),
            max_model_len=self.max_model_len,
            memory=memory,
        )


class KVCache:
    """The pool, as the operators see it (`layer`) and as the movers of whole blocks do.

    It is written once, so that its memory is really there before the model is called ready: a machine that is
    too small fails at start and not under load.

    Args:
        spec: what a layer keeps of a token.
        layers_per_group: layers that a block has room for.
        block_size: tokens per block.
        layer_bytes: bytes of a block that each layer has; None: what `spec` needs.
        has_scratch: whether there is a block more, `scratch_block`, which the scheduler does not know of.
        is_shared: whether other processes map it (host memory alone), by `fd`.

    Raises:
        ConfigError: the memory cannot be allocated.
    """

    def __init__(
        self,
        num_blocks: int,
        spec: KVSpec,
        layers_per_group: int,
        block_size: int,
        device: torch.device,
        layer_bytes: int | None = None,
        has_scratch: bool = False,
        is_shared: bool = False,
    ) -> None:
        self.scratch_block = num_blocks if has_scratch else None
        """Block of padding rows, which nothing reads; None: there are none."""
        num_blocks += has_scratch
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = layers_per_group * (layer_bytes or spec.layer_bytes(block_size))
        size = num_blocks * self.block_bytes
        logger.info("allocating a KV cache of %.1f MiB (kv_cache_memory changes it)", size / 2**20)
        self.fd: int | None = None
        try:
            if device.type != "cpu":
                pool = torch.empty(size, dtype=torch.uint8, device=device)
            elif is_shared:
                pool, self.fd = shared_bytes(size)
            else:
                pool = aligned_bytes(size)
            self.blocks = pool.view(num_blocks, self.block_bytes).fill_(0)
            """uint8 [num_blocks, block_bytes]"""
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the KV cache of {size / 2**20:.0f} MiB cannot be allocated: {error}"
            ) from None
        self._spec, self._memory = spec, self.blocks.view(num_blocks, layers_per_group, -1).unbind(1)
        self._layers: dict[tuple[int, tuple[int, int] | None], KVLayer] = {}
        # Copying eight bytes at a time is several times as fast; blocks of 8 tokens and more can be.
        self._words = self.blocks.view(torch.int64) if self.block_bytes % 8 == 0 else self.blocks

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def layer(self, index: int, shape: tuple[int, int] | None = None) -> KVLayer:
        """View of the pool for the operators of the layer at position `index` of its group; for `shape` see
        `DecoderLayer.kv_shape`."""
        if (index, shape) not in self._layers:
            spec = self._spec
            if shape is not None:
                assert isinstance(spec, AttentionKV)
                spec = replace(spec, num_kv_heads=shape[0], head_dim=shape[1])
            memory = self._memory[index][:, : spec.layer_bytes(self.block_size)]
            self._layers[index, shape] = spec.view(memory, self.block_size)
        return self._layers[index, shape]

    def states(self, index: int) -> torch.Tensor:
        """Bytes of the layer at position `index` of a group of states: uint8 [num_blocks, state_bytes or a
        few more]."""
        return self._memory[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pairs of distinct targets; all sources are read before any is written."""
        source, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(self.blocks.device)
        ops.copy_blocks(self._words, source, target)

    def read(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copies n blocks to `out` [n, block_bytes], after all that has been queued on the device."""
        if self.blocks.device.type == "cpu":
            read_rows(self.blocks.numpy(), block_ids, out)
            return
        staging = self._staging(len(block_ids))
        self._copy(block_ids, staging, to_host=True)
        out[...] = staging.numpy()

    def write(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Copies `data` [n, block_bytes] to n distinct blocks that nothing else uses; there on return."""
        if self.blocks.device.type == "cpu":
            write_rows(self.blocks.numpy(), block_ids, data)
            return
        staging = self._staging(len(block_ids))
        staging.numpy()[...] = data
        self._copy(block_ids, staging, to_host=False)

    def _copy(self, block_ids: Sequence[int], staging: torch.Tensor, *, to_host: bool) -> None:
        """Copies from or to pinned memory, by the device's copy engines: kernels go on beside it."""
        device = self.blocks.device
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        pool, size = self.blocks.data_ptr(), self.block_bytes
        there = [pool + block_id * size for block_id in block_ids]
        here = [staging.data_ptr() + row * size for row in range(len(block_ids))]
        targets, sources = (here, there) if to_host else (there, here)
        copy_batch(targets, sources, [size] * len(block_ids), stream.cuda_stream)
        stream.synchronize()

    def _staging(self, count: int) -> torch.Tensor:
        """Pinned memory for `count` blocks; torch keeps what is given back, so this is cheap."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=True)
