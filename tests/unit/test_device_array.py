"""The hand-over by CUDA IPC, on a stand-in for the CUDA runtime whose device memory is main memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.dlpack import to_dlpack

from quire.engine import device_array
from quire.engine.device_array import DeviceArray, DeviceBuffer, read_dlpack
from quire.engine.messages import EmbedsMessage
from quire.engine.shared_array import SharedArray
from quire.errors import EngineError, UnavailableError

ROWS = torch.arange(12, dtype=torch.float32).reshape(4, 3)


class FakeRuntime:
    """cuda.bindings.runtime as far as it is used: every call returns a tuple that begins with the error."""

    cudaIpcMemLazyEnablePeerAccess = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3, cudaMemcpyDeviceToHost=2)

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.open: set[int] = set()
        self.copied = {2: 0, 3: 0}

    def cudaIpcMemHandle_t(self) -> Any:
        return SimpleNamespace(reserved=b"")

    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0,)

    def cudaDeviceSynchronize(self) -> tuple[int]:
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, pointer: int) -> tuple[int]:
        del self.memory[pointer]
        return (0,)

    def cudaMemcpy(self, to: int, source: int, size: int, kind: int) -> tuple[int]:
        ctypes.memmove(to, source, size)
        self.copied[kind] += size
        return (0,)

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(reserved=pointer.to_bytes(8, "little") + bytes(56))

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int, int]:
        pointer = int.from_bytes(handle.reserved[:8], "little")
        if pointer not in self.memory:
            return 201, 0
        self.open.add(pointer)
        return 0, pointer

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[int]:
        self.open.remove(pointer)
        return (0,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Also lets a CPU tensor's capsule pass for one on CUDA."""
    fake = FakeRuntime()
    monkeypatch.setattr(device_array, "_runtime", lambda: fake)
    monkeypatch.setattr(device_array, "_CUDA", 1)

    def tensor_at(pointer: int, shape: tuple[int, int], device: int) -> torch.Tensor:
        block = (ctypes.c_float * (shape[0] * shape[1])).from_address(pointer)
        return torch.from_numpy(np.ctypeslib.as_array(block)).reshape(shape)

    monkeypatch.setattr(device_array, "_tensor_at", tensor_at)
    return fake


def test_the_dlpack_structure_is_read_as_torch_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_array, "_CUDA", 1)
    assert read_dlpack(to_dlpack(ROWS)) == (ROWS.data_ptr(), 0, (4, 3))
    part = ROWS[1:]
    assert read_dlpack(to_dlpack(part))[0] == part.data_ptr()
    with pytest.raises(EngineError, match="not contiguous"):
        read_dlpack(to_dlpack(ROWS.T))
    for wrong in (ROWS.double(), ROWS.int(), ROWS[0], ROWS[None]):
        with pytest.raises(EngineError, match="expected float32"):
            read_dlpack(to_dlpack(wrong))


def test_a_tensor_in_main_memory_is_refused() -> None:
    with pytest.raises(EngineError, match="on CUDA"):
        read_dlpack(to_dlpack(ROWS))


def test_rows_are_copied_once_before_the_engine_and_freed(runtime: FakeRuntime) -> None:
    buffer = DeviceBuffer(to_dlpack(ROWS))
    message = EmbedsMessage(buffer.descriptor(), [(0, 4)], ["x"])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EmbedsMessage).embeds
    assert isinstance(received, DeviceArray)
    opened = received.open()
    assert runtime.copied == {3: 48, 2: 0}
    assert runtime.open == set(), "the handle is closed: the writer may free"
    assert buffer.array.tolist() == ROWS.tolist()
    buffer.close()
    buffer.close()
    assert runtime.memory == {}
    assert opened.tolist() == ROWS.tolist(), "the engine's is its own"
    with pytest.raises(UnavailableError, match="embeddings are gone"):
        received.open()


def test_both_kinds_of_memory_go_through_one_message() -> None:
    for array in (SharedArray(1, 2, (3, 4), 5, 6), DeviceArray(bytes(64), 0, (3, 4))):
        message = EmbedsMessage(array, [], [])
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EmbedsMessage) == message
