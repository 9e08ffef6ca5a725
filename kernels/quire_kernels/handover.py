"""Handing a batch on: for implementations of attention that know a shape, but not every batch of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from quire_kernels import registry
from quire_kernels.metadata import AttentionMetadata, facts_of_call
from quire_kernels.quantized_kv import KVLayer

logger = logging.getLogger("quire_kernels")


def hand_over(
    skipped: frozenset[str],
    why: str,
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """`ops.paged_attention` by the first implementation in the registry's order that can.

    Forced choices do not count here: who hands over is what was chosen.

    Args:
        skipped: names of those that must not be asked: who hands over, and who would hand back.
        why: which batches are handed over, for the log, which says it once.
        query: as the rest, see `ops.paged_attention`.

    Raises:
        KernelError: there is none.
    """
    facts = facts_of_call(query, kv_layer, sliding_window, softcap)
    function = _next(skipped, why, (query.device.type, query.dtype, *facts.items()))
    out: torch.Tensor = function(query, kv_layer, meta, scale, sliding_window, softcap)
    return out


@functools.cache
def _next(skipped: frozenset[str], why: str, key: tuple[Any, ...]) -> Callable[..., Any]:
    device_type, dtype, *facts = key
    for candidate in registry.implementations("paged_attention"):
        if candidate.name not in skipped and candidate.can_do(device_type, dtype, dict(facts)):
            logger.info("paged_attention: %s for %s", candidate.name, why)
            return candidate.function
    raise registry.KernelError(f"no implementation of paged_attention for {why}: {key}")
