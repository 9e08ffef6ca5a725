"""Copies arrays to the device, and tensors to the host, while the host goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Alignment in bytes that suffices for every type that is sent, and for the vector loads of kernels."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns the array as a tensor on `device`; the host does not wait for the copy. On a CPU the tensor
    shares the array's memory.

    The copy goes through pinned memory, because a copy from pageable memory would wait for the device.
    torch's allocator reuses pinned memory only after the copies from it have ended.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(
    arrays: Mapping[str, npt.NDArray[Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Copies several arrays to the device like `to_device`, in one copy."""
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
    """Copies of tensors to the host that are under way; later changes to device tensors do not affect them.
    Tensors that are already on the host are not copied and must not change."""

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
        """Waits for the copies and returns the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
