"""Arrays to the device and back without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes: of any type that is sent, and of kernels' vector loads."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; the host does not wait for the copy.

    Staged through pinned memory: a copy from pageable memory would wait until the device has come to it.
    torch's allocator hands such memory out again only after the copies from it.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(
    arrays: Mapping[str, npt.NDArray[Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copies several arrays to the device as `to_device` does, in one copy."""
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    flat, starts, start = staging.numpy(), [], 0
    for array, size in zip(arrays.values(), sizes, strict=True):
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        starts.append(start)
        start += size
    there = staging.to(device, non_blocking=True)
    return {
        name: there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for (name, array), start in zip(arrays.items(), starts, strict=True)
    }


class HostCopy:
    """Copies of tensors on their way to the host: what becomes of the tensors later does not matter. Those on
    the host are there, and must stay as they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: Any = None
        if not tensors or tensors[0].device.type == "cpu":
            self._tensors = list(tensors)
            return
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
