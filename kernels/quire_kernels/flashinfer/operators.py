"""Registers FlashInfer as implementation "flashinfer" of `paged_attention`.

If an installed FlashInfer cannot be imported, or cannot compute attention of a shape, this is logged once and
the next implementation is used, unless "flashinfer" was asked for by name. FlashInfer plans a batch on the
host, so a CUDA graph that recorded it would not fit other batches: see `Implementation.is_recordable`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Any

import torch

from quire_kernels import registry
from quire_kernels.flashinfer.wrappers import MODULE, Plan, Shape, plan_batch, try_out
from quire_kernels.metadata import NO_SINKS, AttentionMetadata, attention_facts
from quire_kernels.quantized_kv import KVLayer

logger = logging.getLogger("quire_kernels")

NAME = "flashinfer"
PRIORITY = 15
"""Priority above the Triton language, and below CUDA C++, which leaves long queries to others."""
CAPABILITY = (8, 0)
HEAD_DIMS = (64, 128, 256)
"""Head sizes for which FlashInfer compiles both of its kernels, prefill and decode."""
_HALVES = (torch.bfloat16, torch.float16)
_UNPLANNED = "unplanned"
"""Name of the fact that FlashInfer has no plan for a call's batch, and so leaves the call to others."""


@functools.cache
def why_unavailable() -> str | None:
    """Returns why FlashInfer cannot be used on this machine; None: it can. The first call imports FlashInfer
    if it is installed and there is a GPU for it."""
    if importlib.util.find_spec(MODULE) is None:
        return "flashinfer-python is not installed (pip install flashinfer-python==0.7.2.post1)"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY:
        return f"it needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # whatever a package raises that does not fit the rest of the machine
        reason = f"import {MODULE} failed: {type(error).__name__}: {error}"
        logger.warning("no FlashInfer, the next implementation is used: %s", reason)
        return reason
    return None


@functools.cache
def why_it_fails(
    head_dim: int, num_groups: int, block_size: int, dtype: torch.dtype, has_window: bool, has_softcap: bool
) -> str | None:
    """Returns the error that FlashInfer has with attention of this shape here; None: there is no error. The
    first call for a shape tries a prompt of two tokens, which needs FlashInfer's prefill kernel, and logs a
    warning if that fails."""
    shape = Shape(
        num_heads=num_groups,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        scale=head_dim**-0.5,
        sliding_window=block_size if has_window else None,
        softcap=30.0 if has_softcap else None,
    )
    try:
        try_out(shape, torch.device("cuda", torch.cuda.current_device()))
    except Exception as error:  # of a package, a compiler or a driver
        reason = f"{type(error).__name__}: {error}"
        logger.warning("no FlashInfer attention of %s, the next implementation is used: %s", shape, reason)
        return reason
    return None


def _why_not(
    *,
    head_dim: int,
    kv_dtype: torch.dtype,
    num_groups: int = 1,
    block_size: int = 16,
    sliding_window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    **_: Any,
) -> str | None:
    """Returns why FlashInfer cannot compute attention of this shape here; None: it can. A quantised cache is
    not supported: FlashInfer has one scale for all tokens, ours has one per token and KV head."""
    if sinks:
        return NO_SINKS
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}"
    if kv_dtype not in _HALVES:
        return f"no cache of {kv_dtype}"
    shape = (head_dim, num_groups, block_size, kv_dtype, sliding_window, softcap)
    return why_unavailable() or why_it_fails(*shape)


@registry.implementation(
    "paged_attention",
    NAME,
    devices=("cuda",),
    dtypes=_HALVES,
    priority=PRIORITY,
    predicate=_why_not,
    leaves=(_UNPLANNED, "joint"),
    is_recordable=False,
)
def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Computes `ops.paged_attention`. If FlashInfer fails to plan the batch, the best other implementation
    computes it."""
    assert isinstance(kv_layer, torch.Tensor), "the predicate refuses quantised caches"
    shape = Shape.from_tensors(query, kv_layer, scale, sliding_window, softcap)
    plan = meta.plan((NAME, shape), lambda: _try_plan(shape, meta))
    if plan is not None:
        return plan.run(query, kv_layer)
    sizes = (shape.num_heads, shape.head_dim, shape.num_kv_heads, shape.block_size, shape.dtype)
    facts = attention_facts(*sizes, sliding_window, softcap, meta.max_query_len) | {_UNPLANNED: True}
    following = registry.select("paged_attention", query.device.type, query.dtype, wanted=NAME, **facts)
    out: torch.Tensor = following(query, kv_layer, meta, scale, sliding_window, softcap)
    return out


_failures: set[str] = set()
"""Kinds of plans that failed. A warning is logged once for each."""


def _try_plan(shape: Shape, meta: AttentionMetadata) -> Plan | None:
    try:
        return plan_batch(shape, meta)
    except Exception as error:  # of a package or a compiler, before anything is handed to the device
        kind = f"{type(error).__name__} {shape}"
        if kind not in _failures:
            _failures.add(kind)
            logger.warning("no FlashInfer plan, the next implementation is used: %s: %s", kind, error)
        return None
