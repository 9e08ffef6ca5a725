"""KVCache: the memory of the paged KV cache, and its size.

The cache is one allocation of `num_blocks` blocks. A block holds the data of all layers of one KV group,
layer after layer, for `block_size` tokens or for the state of one request. So a block can be swapped, saved
or copied without regard to its layers. Each layer has the same number of bytes in a block, enough for the one
that needs most. The model's KV spec, and layers that keep a state, define the content.
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
"""Largest fraction of a host's free memory for a decoder's pool without a configured size or
`cpu_memory_utilization`."""
DEFAULT_CPU_BYTES = 2 * 2**30
"""Most bytes of a decoder's pool in host memory (of each rank's part, if there are several) without a
configured size or `cpu_memory_utilization`, unless one sequence needs more: the host has other work to do."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory just before the pool is created, when the weights are loaded."""

    free: int
    total: int | None = None
    """Bytes of the GPU's memory; None: the memory is the host's."""

    @classmethod
    def measure(cls, device: torch.device, num_ranks: int = 1) -> DeviceMemory:
        """Measures the present memory: a GPU's, or on the host each rank's equal share of the available
        memory."""
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
    """Returns the number of blocks in the pool.

    The size is `num_blocks`, else `kv_cache_memory`. Else on cuda it is the `gpu_memory_utilization` share of
    the GPU, less all memory in use. Else on cpu it is what `max_num_seqs` sequences of `max_model_len` need,
    capped by `cpu_memory_utilization` of the memory now available. If that is not configured either, the caps
    are `DEFAULT_CPU_SHARE` of that memory and, unless one sequence needs more, `DEFAULT_CPU_BYTES`.

    Args:
        blocks_per_sequence: most blocks that one sequence of `max_model_len` needs, over all KV groups.
        memory: the device's memory.

    Raises:
        ConfigError: the pool could not hold one sequence of `max_model_len`, or on a host it would be larger
            than the available memory.
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


def _hidden_bytes(config: EngineConfig, model: Model, draft: Model) -> int:
    """Returns the bytes that are kept for each token for a draft head; 0: the draft model is no head. Raises
    ConfigError if the head has another hidden size or type than the model, or there are several ranks."""
    size, shape = draft.fed_size, model.config
    if size and size != shape.hidden_size:
        raise ConfigError(f"draft_model: its hidden_size is {size}, the model's {shape.hidden_size}")
    if size and draft.config.dtype != shape.dtype:
        raise ConfigError(
            f"draft_model: the head's type is {draft.config.dtype}, the model's {shape.dtype}: state dtype"
        )
    if size and config.model.tensor_parallel_size > 1:
        raise ConfigError("draft_model: a head needs tensor_parallel_size=1: ranks do not divide it")
    return size * shape.dtype.itemsize


_ALIGNMENT = 16
"""Alignment of a state in bytes."""
_LARGE_BLOCKS = 64
"""Block sizes that are derived from states are multiples of this many tokens."""


def _block_size(cache: CacheConfig, model: Model) -> int:
    """Returns the tokens per block: usually `tokens_per_block`. More, a multiple of `_LARGE_BLOCKS`, if
    `block_size` is unset, and a layer's keys and values would otherwise take fewer bytes of a block than the
    state of another layer."""
    state_bytes = max(group.state_bytes for group in model.kv_groups)
    has_attention = not all(group.is_state for group in model.kv_groups)
    if cache.block_size is not None or not (state_bytes and has_attention):
        return cache.tokens_per_block
    spec = model.kv_spec(cache.kv_cache_dtype)
    if spec.layer_bytes(cache.tokens_per_block) >= state_bytes:
        return cache.tokens_per_block
    size = -(-state_bytes // spec.layer_bytes(_LARGE_BLOCKS)) * _LARGE_BLOCKS
    logger.info("block_size=%d: its keys and values are as large as a state of %d bytes", size, state_bytes)
    return size


def _longest_whole(limits: SchedulerConfig, asked: int | None, limit: int) -> int:
    """Returns the longest prompt of an encoder, which computes prompts in one step.

    Args:
        asked: configured `max_model_len`; None: as long as a step and the checkpoint allow.
        limit: the checkpoint's limit.

    Raises:
        ConfigError: `asked` exceeds the tokens of one request in a step.
    """
    if asked is not None and asked > limits.max_row_tokens:
        raise ConfigError(
            f"max_model_len={asked}: this model computes a prompt in one step, which has at most "
            f"{limits.max_row_tokens} tokens (max_num_batched_tokens, max_prefill_tokens_per_request)"
        )
    if asked is None and limit > limits.max_row_tokens:
        logger.info(
            "max_model_len=%d of %d: a prompt is computed in one step (max_num_batched_tokens)",
            limits.max_row_tokens,
            limit,
        )
    return asked or min(limit, limits.max_row_tokens)


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
    """Bytes per block of the draft model's keys and values, in a pool of its own, and of the hidden states
    kept for a draft head; 0: there is no draft model."""
    keeps_nothing: bool = False
    """Whether blocks only count tokens, because the model is an encoder."""

    @classmethod
    def from_config(cls, config: EngineConfig, model: Model, draft: Model | None = None) -> KVLayout:
        """Returns the layout for a model and its draft model, if any; neither needs its weights.

        Raises:
            ConfigError: `max_model_len` exceeds the checkpoint's limit (for an encoder also the tokens of one
                request in a step), `block_size` does not divide the size of the checkpoint's attention
                chunks, layers keep states although drafts are configured, the model or its draft model does
                not support `kv_cache_dtype`, or the draft is a head that does not fit the model or the number
                of ranks.
        """
        shape, asked = model.config, config.model.max_model_len
        size, kv_type = _block_size(config.cache, model), config.cache.kv_cache_dtype
        draft_bytes = 0
        if draft is not None:
            draft_bytes = layers_per_group(draft.kv_groups) * draft.kv_spec(kv_type).layer_bytes(size)
            draft_bytes += _hidden_bytes(config, model, draft) * size
        limit = shape.rope.longest_model_len
        if asked is not None and asked > limit:
            raise ConfigError(f"max_model_len={asked} exceeds the checkpoint's limit of {limit} tokens")
        if shape.chunk_size is not None and shape.chunk_size % size:
            raise ConfigError(
                f"block_size={size} does not divide the checkpoint's attention_chunk_size of "
                f"{shape.chunk_size}"
            )
        longest = asked or shape.max_position_embeddings
        if model.is_encoder:
            longest = _longest_whole(config.scheduler, asked, shape.max_position_embeddings)
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
            max_model_len=longest,
            groups=model.kv_groups,
            max_step_tokens=config.scheduler.max_num_batched_tokens,
            draft_bytes=draft_bytes,
            keeps_nothing=model.is_encoder,
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes that each layer has in a block."""
        num_bytes = self.spec.layer_bytes(self.block_size)
        state_bytes = max(group.state_bytes for group in self.groups)
        if not state_bytes:
            return num_bytes
        return -(-max(num_bytes, state_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes in all, `draft_bytes` included."""
        return self.layers_per_block * self.layer_bytes + self.draft_bytes

    def blocks_per_sequence(self, num_tokens: int) -> int:
        """Returns a number of blocks, over all KV groups, that is enough for a sequence of this many
        tokens."""
        return blocks_per_sequence(self.groups, num_tokens, self.block_size, self.max_step_tokens)

    def num_blocks(self, config: EngineConfig, memory: DeviceMemory) -> int:
        """Returns the number of blocks in the pool; see `num_blocks_for`. For an encoder, unless `num_blocks`
        is configured, it is what `max_num_seqs` prompts of `max_model_len` need."""
        if self.keeps_nothing and config.cache.num_blocks is None:
            return self.blocks_per_sequence(self.max_model_len) * config.scheduler.max_num_seqs
        return num_blocks_for(
            config.cache,
            config.scheduler,
            bytes_per_block=self.block_bytes,
            blocks_per_sequence=self.blocks_per_sequence(self.max_model_len),
            max_model_len=self.max_model_len,
            memory=memory,
        )


class KVCache:
    """The pool, accessed by layer (`layer`, `states`) or by whole blocks.

    Its memory is written once when it is made, so that a lack of memory shows then, and not under load.

    Args:
        spec: what a layer keeps of a token.
        layers_per_group: number of layers in a block.
        block_size: tokens per block.
        layer_bytes: bytes of each layer in a block; None: what `spec` needs.
        has_scratch: whether to allocate one more block, `scratch_block`, which the scheduler does not know
            of.
        is_shared: whether other processes may map the memory by `fd` (on the host only).

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
        """Id of the block for padding rows of recorded steps, which no request uses; None: there is none."""
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
            """The memory as uint8 [num_blocks, block_bytes], the scratch block included."""
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
        """Returns the part of the pool for the layer at position `index` of its group; for `shape` see
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
        """Returns the bytes of the layer at position `index` of a group of states: uint8 [num_blocks, at
        least state_bytes]."""
        return self._memory[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks, given as (source, target) pairs with distinct targets; all sources are read before
        any target is written."""
        source, target = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.to(self.blocks.device)
        ops.copy_blocks(self._words, source, target)

    def read(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copies n blocks to `out` [n, block_bytes], on a GPU after the work that was queued before."""
        if self.blocks.device.type == "cpu":
            read_rows(self.blocks.numpy(), block_ids, out)
            return
        staging = self._staging(len(block_ids))
        self._copy(block_ids, staging, to_host=True)
        out[...] = staging.numpy()

    def write(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Copies `data` [n, block_bytes] to n distinct blocks that nothing else uses; complete on return."""
        if self.blocks.device.type == "cpu":
            write_rows(self.blocks.numpy(), block_ids, data)
            return
        staging = self._staging(len(block_ids))
        staging.numpy()[...] = data
        self._copy(block_ids, staging, to_host=False)

    def _copy(self, block_ids: Sequence[int], staging: torch.Tensor, *, to_host: bool) -> None:
        """Copies blocks from or to pinned memory on a stream of its own, after the work that was queued
        before; waits for the copies."""
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
        """Returns pinned memory for `count` blocks. It is cheap once torch has memory of this size cached."""
        return torch.empty((count, self.block_bytes), dtype=torch.uint8, pin_memory=True)
