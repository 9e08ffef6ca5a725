"""FlashInfer's wrappers over our paged cache: how a batch is described to them, and which plan owns a
wrapper.

A batch is described once per AttentionMetadata and `Shape` (`plan_batch`), and computed once per layer
(`Plan.run`). A layer of the cache is passed without a copy: FlashInfer's layout "HND", [num_pages, 2,
num_kv_heads, page_size, head_dim], allows any stride between pages, if keys and values have the same one.

Memory that no live token wrote must not affect results. After a sequence's end, FlashInfer uses zeros for
values and masks scores by selection. Blocks before a sequence's window might only get weights of zero, and 0
* NaN is NaN, so they are left out of the list of blocks.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire_kernels.metadata import AttentionMetadata

MODULE = "flashinfer"
LAYOUT = "HND"
WORKSPACE_BYTES = 128 << 20
"""Bytes of FlashInfer's workspace, as it recommends. It holds partial results during one call."""
TENSOR_CORE_GROUPS = 4
"""Least number of query heads per KV head for which decode uses tensor cores."""


class Shape(NamedTuple):
    """Facts other than the batch on which a plan depends."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    sliding_window: int | None
    softcap: float | None

    @classmethod
    def from_tensors(
        cls,
        query: torch.Tensor,
        kv_layer: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Shape:
        """Makes the shape from arguments of `ops.paged_attention`."""
        (num_heads, head_dim), (num_kv_heads, block_size) = query.shape[1:], kv_layer.shape[2:4]
        return cls(num_heads, num_kv_heads, head_dim, block_size, query.dtype, scale, sliding_window, softcap)

    @property
    def uses_tensor_cores(self) -> bool:
        return self.num_heads // self.num_kv_heads >= TENSOR_CORE_GROUPS

    def options(self) -> dict[str, Any]:
        """Returns keyword arguments that `plan` of both wrappers takes."""
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.block_size,
            "sm_scale": self.scale,
            # Theirs does not count the token itself.
            "window_left": -1 if self.sliding_window is None else self.sliding_window - 1,
            "logits_soft_cap": self.softcap or 0.0,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class Pages(NamedTuple):
    """Blocks of each sequence's keys and values that its new tokens see. FlashInfer calls blocks pages.

    Arrays that FlashInfer reads on the host are on the host. With a GPU they are pinned, so that the host
    need not wait while they are copied.
    """

    query_starts: torch.Tensor
    """int32 [num_seqs + 1], host: `query_start_loc`."""
    starts: torch.Tensor
    """int32 [num_seqs + 1], host: sequence i has the blocks indices[starts[i]:starts[i + 1]]."""
    indices: torch.Tensor
    """int32 [starts[-1]], on the device: block ids."""
    last_lens: torch.Tensor
    """int32 [num_seqs], host: tokens in each sequence's last block, from 1 to the block size."""
    lens: torch.Tensor
    """int32 [num_seqs], host: tokens in the blocks of each sequence in `indices`."""

    @classmethod
    def from_metadata(cls, meta: AttentionMetadata, block_size: int, sliding_window: int | None) -> Pages:
        """Makes the pages of a batch, without the blocks that no new token sees."""
        device, table = meta.block_table.device, meta.block_table
        query_lens, seq_lens = np.array(meta.query_lens), np.array(meta.seq_lens_list)
        first = np.zeros_like(seq_lens)
        if sliding_window is not None:
            first = (seq_lens - query_lens + 1 - sliding_window).clip(0) // block_size
        counts = -(-seq_lens // block_size) - first
        starts = _starts(counts)
        # Page j of all is the table's place j + offset of its sequence: worked out on the device, so that
        # what is sent there is as long as the batch, not as its contexts.
        offsets = np.arange(len(counts)) * table.shape[1] + first - starts[:-1]
        there = _host(np.stack((counts, offsets)), device).to(device, non_blocking=True)
        total = int(starts[-1])
        places = torch.arange(total, device=device) + there[1].repeat_interleave(there[0], output_size=total)
        return cls(
            query_starts=_host(_starts(query_lens).astype(np.int32), device),
            starts=_host(starts.astype(np.int32), device),
            indices=table.take(places),
            last_lens=_host(((seq_lens - 1) % block_size + 1).astype(np.int32), device),
            lens=_host((seq_lens - first * block_size).astype(np.int32), device),
        )


def _starts(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate(([0], counts.cumsum()))


def _host(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array as a tensor from which `device` can copy without the host waiting: for CUDA a copy in
    pinned memory, else the array's own memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass
class _Slot:
    """A wrapper, and the event after which it can be planned again."""

    wrapper: Any
    copied: Any = None
    """Event after the copy of the latest plan, which the host wrote to pinned memory of the wrapper. None:
    there was no plan, or copies are synchronous."""

    @property
    def is_free(self) -> bool:
        return self.copied is None or self.copied.query()


class Plan:
    """A batch that a wrapper is ready to compute. While this object lives, the wrapper is used for nothing
    else."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(self, query: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """Computes attention in one layer.

        Args:
            query: [num_tokens, num_heads, head_dim].
            kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], with any stride between blocks.

        Returns:
            [num_tokens, num_heads, head_dim] in query's type.
        """
        # Else it fills its result with zeros first.
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._wrapper.run(query, kv_layer, out=out)
        return out


def plan_batch(shape: Shape, meta: AttentionMetadata) -> Plan:
    """Describes a batch to a wrapper that no living plan uses, and returns the plan.

    All steps on a device must run in one stream, or in streams that wait for each other: they share the
    workspace, and a later plan overwrites an earlier plan's memory on the device.
    """
    pages = Pages.from_metadata(meta, shape.block_size, shape.sliding_window)
    is_decode = meta.max_query_len == 1
    device = pages.indices.device
    pool = _pool(device, is_decode, is_decode and shape.uses_tensor_cores)
    slot = _pop_free(pool) or _Slot(_make_wrapper(device, is_decode, is_decode and shape.uses_tensor_cores))
    if is_decode:
        slot.wrapper.plan(
            indptr=pages.starts,
            indices=pages.indices,
            last_page_len=pages.last_lens,
            head_dim=shape.head_dim,
            seq_lens=pages.lens,
            **shape.options(),
        )
    else:
        slot.wrapper.plan(
            qo_indptr=pages.query_starts,
            paged_kv_indptr=pages.starts,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_lens,
            head_dim_qk=shape.head_dim,
            seq_lens=pages.lens,
            causal=True,
            **shape.options(),
        )
    if device.type == "cuda":
        slot.copied = torch.cuda.Event()
        slot.copied.record(torch.cuda.current_stream(device))
    plan = Plan(slot.wrapper)
    weakref.finalize(plan, pool.append, slot).atexit = False
    return plan


def _pop_free(pool: deque[_Slot]) -> _Slot | None:
    """Removes and returns a slot whose wrapper can be planned again; None: there is no slot, or the device
    has not yet copied the latest plan of any of their wrappers.

    The host must not wait for the device when it launches a step ahead, so a caller that gets None makes a
    new wrapper.
    """
    for _ in range(len(pool)):
        try:
            slot = pool.popleft()
        except IndexError:  # another engine in this process was faster
            return None
        if slot.is_free:
            return slot
        pool.append(slot)
    return None


@functools.cache
def _pool(device: torch.device, is_decode: bool, uses_tensor_cores: bool) -> deque[_Slot]:
    """Returns the slots of wrappers of this kind that no plan uses."""
    return deque()


def _make_wrapper(device: torch.device, is_decode: bool, uses_tensor_cores: bool) -> Any:
    """Makes a wrapper with its own index memory: 8 MiB on the device and 8 MiB pinned."""
    flashinfer = importlib.import_module(MODULE)
    # Memory made in inference mode must not be written outside of it, and the wrapper outlives it.
    with torch.inference_mode(False):
        if is_decode:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(device), LAYOUT, use_tensor_cores=uses_tensor_cores
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), LAYOUT)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Returns uint8 [WORKSPACE_BYTES], one per device. It is zeroed at first, as the decode wrapper
    requires."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def try_out(shape: Shape, device: torch.device) -> None:
    """Computes a prompt of two tokens. Raises any error that FlashInfer raises."""
    blocks = list(range(-(-2 // shape.block_size)))
    kv_layer = torch.zeros(
        (len(blocks), 2, shape.num_kv_heads, shape.block_size, shape.head_dim),
        dtype=shape.dtype,
        device=device,
    )
    query = kv_layer.new_zeros((2, shape.num_heads, shape.head_dim))
    meta = AttentionMetadata.build([2], [2], [blocks], shape.block_size, device)
    plan_batch(shape, meta).run(query, kv_layer)
