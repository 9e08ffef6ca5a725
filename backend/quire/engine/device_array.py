"""DeviceArray: an array on a GPU handed from a frontend to the engine by CUDA IPC, not through main memory.

It has not run on a GPU: tests drive it with a stand-in for the CUDA runtime over main memory.
The frontend has no torch, so it reads the tensor by the DLPack structure and copies it, on the device, into
an allocation of its own: Triton takes its memory back when `execute` returns, and IPC shares allocations.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.engine.shared_array import EmbedsBuffer
from quire.errors import EngineError, UnavailableError

_CUDA, _FLOAT, _BITS = 2, 2, 32
"""DLPack's codes for CUDA memory and floats, and the bits of a float32."""


class _DLTensor(ctypes.Structure):
    """DLPack's DLTensor, version 0.8 (https://dmlc.github.io/dlpack/latest/c_api.html). Capsules named
    "dltensor" hold one."""

    _fields_: ClassVar = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DeviceArray(msgspec.Struct, frozen=True, tag="device"):
    """Location of a float32 array on a GPU. `open` must be called while the writer still holds its
    DeviceBuffer."""

    handle: bytes
    """cudaIpcMemHandle_t, 64 bytes."""
    device: int
    shape: tuple[int, int]

    def open(self) -> Any:
        """Returns a copy as a torch tensor on the device; the writer may free its memory afterwards.

        Raises:
            UnavailableError: the memory cannot be opened, as when the writer is gone.
            EngineError: another call of CUDA fails.
        """
        cudart = _runtime()
        _check(cudart.cudaSetDevice(self.device))
        handle = cudart.cudaIpcMemHandle_t()
        handle.reserved = self.handle
        try:
            pointer = _check(cudart.cudaIpcOpenMemHandle(handle, cudart.cudaIpcMemLazyEnablePeerAccess))
        except EngineError as error:
            raise UnavailableError(f"the request's embeddings are gone: {error}") from None
        try:
            return _tensor_at(pointer, self.shape, self.device).clone()
        finally:
            _check(cudart.cudaDeviceSynchronize())
            _check(cudart.cudaIpcCloseMemHandle(pointer))


class DeviceBuffer(EmbedsBuffer):
    """The writer's side of a DeviceArray: owns a device allocation with the rows until `close`."""

    def __init__(self, capsule: Any, limit: int | None = None) -> None:
        """Copies the tensor of a DLPack capsule ("dltensor") on its device.

        Raises:
            EngineError: not a contiguous two-dimensional float32 tensor on a CUDA device, or CUDA failed.
            UnavailableError: the buffers of this process would together exceed `limit` bytes.
        """
        self._pointer = 0  # what __del__ needs if the next lines fail
        pointer, self.device, self.shape = read_dlpack(capsule)
        self.num_bytes = 4 * self.shape[0] * self.shape[1]
        self._reserve(self.num_bytes, limit)
        cudart = _runtime()
        _check(cudart.cudaSetDevice(self.device))
        self._pointer = int(_check(cudart.cudaMalloc(self.num_bytes)))
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _check(cudart.cudaMemcpy(self._pointer, pointer, self.num_bytes, kind))

    def descriptor(self) -> DeviceArray:
        handle = _check(_runtime().cudaIpcGetMemHandle(self._pointer))
        return DeviceArray(bytes(handle.reserved), self.device, self.shape)

    @property
    def array(self) -> npt.NDArray[np.float32]:
        """Returns a copy in main memory, used only to hash the content."""
        host = np.empty(self.shape, dtype=np.float32)
        cudart = _runtime()
        kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _check(cudart.cudaMemcpy(host.ctypes.data, self._pointer, self.num_bytes, kind))
        return host

    def close(self) -> None:
        """Frees the memory; may be called again."""
        if self._pointer:
            pointer, self._pointer = self._pointer, 0
            _check(_runtime().cudaFree(pointer))


def read_dlpack(capsule: Any) -> tuple[int, int, tuple[int, int]]:
    """Returns address, device and shape of a contiguous two-dimensional float32 CUDA tensor; raises
    EngineError for others."""
    tensor = _dl_tensor(capsule)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    kind = (tensor.device_type, tensor.code, tensor.bits, tensor.lanes)
    if kind != (_CUDA, _FLOAT, _BITS, 1) or tensor.ndim != 2:
        raise EngineError(f"image_embeds: expected float32 [rows, hidden] on CUDA, got {kind} {shape}")
    if tensor.strides and (tensor.strides[0], tensor.strides[1]) != (shape[1], 1):
        raise EngineError("image_embeds: the tensor is not contiguous")
    return (tensor.data or 0) + tensor.byte_offset, tensor.device_id, (shape[0], shape[1])


def _dl_tensor(capsule: Any) -> _DLTensor:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _DLTensor.from_address(get(capsule, b"dltensor"))


def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


def _check(result: tuple[Any, ...]) -> Any:
    """Returns the value of a CUDA runtime call, whose result is (error, value) or (error,); raises if it
    failed."""
    if int(result[0]):
        raise EngineError(f"CUDA error {result[0]}")
    return result[1] if len(result) > 1 else None


def _tensor_at(pointer: int, shape: tuple[int, int], device: int) -> Any:
    """Returns a torch tensor over device memory that the tensor does not own."""
    import torch

    class Memory:
        __cuda_array_interface__: ClassVar = {
            "shape": shape,
            "typestr": "<f4",
            "data": (pointer, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=f"cuda:{device}")
