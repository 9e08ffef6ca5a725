"""Measures a device's memory bandwidth and matrix product rate, with which profiles are compared. It usually
takes about half a second."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from quire.roofline import DeviceLimits

READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Bytes to read per device type: more than most caches hold."""
SIZES = {"cpu": (1024, 2048), "cuda": (8192, 8192)}
"""Number of rows, and of features, in the matrix product per device type."""
REPEATS = 5


@functools.lru_cache
def measure_limits(device: torch.device, dtype: torch.dtype, num_threads: int) -> DeviceLimits:
    """Measures a device's memory bandwidth and matrix product rate, once in a process for the same arguments.
    The best of a few runs counts, because other load can only slow a run down.

    Args:
        dtype: type of the product's operands. Kernels of quantised models may use a faster type.
        num_threads: number of threads for both measurements, on a CPU.

    Raises:
        RuntimeError: torch fails, for example because there is not enough memory.
    """
    rows, features = SIZES[device.type]
    threads_before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            memory = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
            read = memory.nbytes / _shortest(memory.sum, device)
            del memory
            x = torch.ones(rows, features, dtype=dtype, device=device)
            weight = torch.ones(features, features, dtype=dtype, device=device)
            product = _shortest(lambda: torch.nn.functional.linear(x, weight), device)
    finally:
        torch.set_num_threads(threads_before)
    name = str(dtype).removeprefix("torch.")
    method = f"torch: sum of {READ_BYTES[device.type] >> 20} MiB, {rows} x {features} x {features} in {name}"
    return DeviceLimits(read, 2 * rows * features**2 / product, method)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of REPEATS runs, after one run that does not count."""
    seconds = []
    for _ in range(1 + REPEATS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
