"""Times on a device, and what the device can do: read rate and bf16 matrix rate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import machine

WARM_UP, REPEATS = 3, 10
FLUSHED_BYTES = {"cuda": 256 << 20, "cpu": 400 << 20}
"""More than the last-level cache holds."""
SETTLE_S = 0.02
"""PyTorch's threads spin for some milliseconds after work, on the cores that others are to have."""
_flushing: dict[torch.device, torch.Tensor] = {}


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Time of one call, on the device's own clock; nothing of what it reads is in a cache."""
    memory = _flushing.get(device)
    if memory is None:
        memory = torch.zeros(FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device).view(torch.float32)
        _flushing[device] = memory
    memory.sum()
    if device.type == "cpu":
        time.sleep(SETTLE_S)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def recorded(device: torch.device, work: Callable[[], Any]) -> Callable[[], Any]:
    """What does the same without the host's time to launch it: a CUDA graph; work that waits for the device,
    as reference implementations do, stays as it is."""
    if device.type == "cpu":
        return work
    work()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        return work
    return graph.replay


def typical(device: torch.device, times: list[float]) -> float:
    """The median; of a CPU the least, as other guests of a shared machine only ever take away."""
    return min(times) if device.type == "cpu" else statistics.median(times)


def rates(device: torch.device, num_bytes: int, size: int) -> dict[str, Any]:
    """Read rate and rate of bf16 products, by PyTorch's kernels; as of `peers.roofline.measure`.

    Args:
        device: measured.
        num_bytes: read.
        size: of the square matrices, of random numbers: with zeros the clock is higher than it is in use.
    """
    data = torch.empty(num_bytes // 4, dtype=torch.float32, device=device).fill_(1.0)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))

    def best(work: Callable[[], Any]) -> float:
        return typical(device, [seconds(device, work) for _ in range(WARM_UP + REPEATS)][WARM_UP:])

    return {
        "read_gb_s": {"device": num_bytes / best(data.sum) / 1e9},
        "matrix_gflop_s": 2 * size**3 / best(lambda: a @ b) / 1e9,
    }


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, the versions and the device."""
    found = machine.environment() | {"device": device.type, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return found
