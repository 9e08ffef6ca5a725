"""FlashInfer's wrappers over our paged cache: what they are told of a batch, and who owns them meanwhile.

A batch is described once per step and KV group (`plan_batch`) and computed once per layer (`Plan.run`). A
layer of the cache is passed as it is: FlashInfer's layout "HND", [num_pages, 2, num_kv_heads, page_size,
head_dim], with any stride from page to page, as long as keys and values have the same.

What no live token wrote never reaches a result: behind a sequence's end FlashInfer takes zeros for values and
masks scores by selection. Blocks before a sequence's window may get weights of zero instead, which leaves a
NaN a NaN: they are not among the pages that it is told of.
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
"""Bytes of FlashInfer's workspace, the size that it recommends. The workspace holds partial results within
one call."""
TENSOR_CORE_GROUPS = 4
"""Fewest query heads for a KV head with which single tokens are computed on tensor cores."""


class Shape(NamedTuple):
    """Facts that a plan depends on, apart from the batch."""

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
        """See `ops.paged_attention`."""
        (num_heads, head_dim), (num_kv_heads, block_size) = query.shape[1:], kv_layer.shape[2:4]
        return cls(num_heads, num_kv_heads, head_dim, block_size, query.dtype, scale, sliding_window, softcap)

    @property
    def uses_tensor_cores(self) -> bool:
        return self.num_heads // self.num_kv_heads >= TENSOR_CORE_GROUPS

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `plan` that have the same names in both wrappers."""
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
    """Pages of the keys and values of each sequence that its new tokens see.

    What FlashInfer reads on the host is on the host, pinned where there is a GPU: neither does the host wait
    for the device, nor the device's queue for a copy.
    """

    query_starts: torch.Tensor
    """int32 [num_seqs + 1], host: `query_start_loc`"""
    starts: torch.Tensor
    """int32 [num_seqs + 1], host: sequence i has the pages indices[starts[i]:starts[i + 1]]"""
    indices: torch.Tensor
    """int32 [starts[-1]], on the device: block ids"""
    last_lens: torch.Tensor
    """int32 [num_seqs], host: tokens in the last page, from 1 to the size of a page"""
    lens: torch.Tensor
    """int32 [num_seqs], host: tokens in all pages of a sequence"""

    @classmethod
    def from_metadata(cls, meta: AttentionMetadata, block_size: int, sliding_window: int | None) -> Pages:
        """Leaves out blocks that no new token sees."""
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
    """The array in memory that `device` can copy from without the host waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass
class _Slot:
    """A wrapper, and when it may be planned again."""

    wrapper: Any
    copied: Any = None
    """An event behind the copy of the latest plan, which the host wrote to pinned memory of the wrapper;
    None: there was no plan, or copies are done at once."""

    @property
    def is_free(self) -> bool:
        return self.copied is None or self.copied.query()


class Plan:
    """A batch that a wrapper is ready to compute; while this lives, the wrapper is for nothing else."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(self, query: torch.Tensor, kv_layer: torch.Tensor) -> torch.Tensor:
        """Attention in one layer.

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
    """Describes a batch to a wrapper that no living plan has.

    Steps on a device are in one stream, or in streams that wait for each other: the workspace is shared, and
    what a plan has on the device is overwritten by a later one's.
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
    """The wrapper whose plan the device finished first; None: it still needs the plans of all.

    A step that is launched ahead must not wait for the device, so another wrapper is made then.
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
    """Wrappers that no plan has."""
    return deque()


def _make_wrapper(device: torch.device, is_decode: bool, uses_tensor_cores: bool) -> Any:
    """A wrapper with index memory of its own, 8 MiB there and 8 MiB pinned."""
    flashinfer = importlib.import_module(MODULE)
    # What is allocated in inference mode may not be written outside of it, and the wrapper lives on.
    with torch.inference_mode(False):
        if is_decode:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                _workspace(device), LAYOUT, use_tensor_cores=uses_tensor_cores
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), LAYOUT)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """uint8 [WORKSPACE_BYTES], once per device; zeros, as the wrapper for single tokens wants it at first."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def try_out(shape: Shape, device: torch.device) -> None:
    """Computes a prompt of two tokens; raises what FlashInfer raises."""
    blocks = list(range(-(-2 // shape.block_size)))
    kv_layer = torch.zeros(
        (len(blocks), 2, shape.num_kv_heads, shape.block_size, shape.head_dim),
        dtype=shape.dtype,
        device=device,
    )
    query = kv_layer.new_zeros((2, shape.num_heads, shape.head_dim))
    meta = AttentionMetadata.build([2], [2], [blocks], shape.block_size, device)
    plan_batch(shape, meta).run(query, kv_layer)
