"""Blocks between pinned host memory and the GPU: many copies in one driver call where the driver has it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any


class CopyError(RuntimeError):
    """The driver refused a copy."""


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def copy_batch(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Starts independent copies in a stream; each may go to the host, to the GPU, or stay there.

    Sources are read in the stream's order, so blocks that a kernel in the stream has just written are copied
    as written. Host memory is pinned: of pageable memory the copies would not be asynchronous.

    Args:
        targets: addresses; no copy's target overlaps another copy's source or target.
        sources: addresses.
        sizes: bytes.
        stream: handle of the stream; of the legacy default stream, 0, copies are started one by one.

    Raises:
        CopyError: the driver refused; some copies may have been started.
    """
    assert len(targets) == len(sources) == len(sizes), "one entry per copy in every list"
    if not targets:
        return
    driver = _driver()
    if len(targets) > 1 and stream != 0 and _copy_at_once(driver, targets, sources, sizes, stream):
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        (status,) = driver.cuMemcpyAsync(target, source, size, stream)
        _check(status)


def _copy_at_once(
    driver: Any, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
) -> bool:
    """False where the driver has no such call: it is one of CUDA 12.8."""
    batch = getattr(driver, "cuMemcpyBatchAsync", None)
    if batch is None:
        return False
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    addresses = [[driver.CUdeviceptr(address) for address in side] for side in (targets, sources)]
    try:
        # Bindings 12 return the index of the copy that failed too, bindings 13 do not.
        status, *_ = batch(*addresses, list(sizes), len(targets), [attributes], [0], 1, stream)
    except RuntimeError:
        # The binding knows a function that the installed driver lacks.
        return False
    if int(status) == _NOT_SUPPORTED:
        return False
    _check(status)
    return True


_NOT_SUPPORTED = 801
"""CUDA_ERROR_NOT_SUPPORTED"""


def _check(status: Any) -> None:
    if int(status):
        raise CopyError(f"the CUDA driver refused a copy: {status}")
