"""Copies blocks between pinned host memory and the GPU: many copies in one driver call, if the driver and the
stream allow it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_size_t, c_void_p

from quire_kernels.cuda.launch import check, driver

_NOT_SUPPORTED = 801
"""CUDA_ERROR_NOT_SUPPORTED"""


class _Attributes(ctypes.Structure):
    """Structure CUmemcpyAttributes of the CUDA driver."""

    _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def copy_batch(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Starts independent copies in a stream, in any direction between host and GPU, or within one.

    Sources are read in the stream's order: a block that an earlier kernel in the stream writes is copied as
    written. Host memory must be pinned, because copies of pageable memory are not asynchronous.

    Args:
        targets: addresses; no copy's target overlaps another copy's source or target.
        sources: addresses.
        sizes: bytes of each copy.
        stream: handle of the stream. In the legacy default stream, 0, copies are started one by one.

    Raises:
        RuntimeError: the driver refused; some copies may have been started.
    """
    assert len(targets) == len(sources) == len(sizes), "one entry per copy in every list"
    if len(targets) > 1 and stream != 0 and _copy_at_once(targets, sources, sizes, stream):
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        check(driver().cuMemcpyAsync(c_void_p(target), c_void_p(source), c_size_t(size), c_void_p(stream)))


def _copy_at_once(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> bool:
    """Starts all copies with one driver call. Returns False if the driver has no such call (it came with CUDA
    12.8), or does not support it here. Raises RuntimeError if the driver refuses."""
    batch = getattr(driver(), "cuMemcpyBatchAsync", None)
    if batch is None:
        return False
    count = len(targets)
    addresses, lengths = c_void_p * count, c_size_t * count
    in_stream_order, first, failed = _Attributes(source_order=1), c_size_t(0), c_size_t()
    status = batch(
        addresses(*targets),
        addresses(*sources),
        lengths(*sizes),
        c_size_t(count),
        byref(in_stream_order),
        byref(first),
        c_size_t(1),
        byref(failed),
        c_void_p(stream),
    )
    if status != _NOT_SUPPORTED:
        check(status)
    return bool(status != _NOT_SUPPORTED)
