"""Timing on a device, and what the device can do: read rate and bf16 matrix rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP, REPEATS = 3, 10


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(device: torch.device, work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median time of one call, measured on the device; the second-level cache is overwritten in between."""
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            _flush(device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


_flushing: dict[torch.device, torch.Tensor] = {}


def _flush(device: torch.device) -> None:
    memory = _flushing.get(device)
    if memory is None:
        memory = _flushing[device] = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    memory.zero_()


def rates(device: torch.device, num_bytes: int, size: int) -> dict[str, float]:
    """Read and copy rate in bytes/s, and bf16 products in FLOP/s.

    Args:
        device: measured.
        num_bytes: read.
        size: of the square matrices, of random numbers: with zeros the clock is higher than it is in use.
    """
    data = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).fill_(1.0)
    target = torch.empty_like(data)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return {
        "read_bytes_per_s": num_bytes / median_seconds(device, data.sum),
        "copy_bytes_per_s": 2 * num_bytes / median_seconds(device, lambda: target.copy_(data)),
        "bf16_flop_per_s": 2 * size**3 / median_seconds(device, lambda: a @ b),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
    import platform

    found: dict[str, Any] = {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "cuda.core", "transformers", "flashinfer"):
        try:
            found[name] = __import__(name, fromlist=["__version__"]).__version__
        except Exception as error:
            found[name] = f"not there ({type(error).__name__})"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found
