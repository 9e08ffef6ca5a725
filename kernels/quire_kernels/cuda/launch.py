"""Launches kernels in torch's current stream of a device, through the CUDA driver.

The driver is called with ctypes. Such a call takes a few microseconds, and depends on no binding's version.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

from quire_kernels.cuda.compiler import SOURCES, CompileError, Resources, Unit, cubin
from quire_kernels.declarations import Declarations

logger = logging.getLogger("quire_kernels")

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""
_SHARED, _LOCAL, _REGISTERS = 1, 3, 4
"""CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, _LOCAL_SIZE_BYTES and _NUM_REGS"""
_INVALID_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""
FREE_SHARED = 48 << 10
"""Bytes of shared memory that a thread block may use without a special attribute."""


class Launcher:
    """Launches kernels in torch's current stream. A subclass in the tests emulates a GPU."""

    def multiprocessors(self, device: torch.device) -> int:
        """Returns the number of the device's multiprocessors."""
        return _multiprocessors(device.index)

    def launch(
        self,
        device: torch.device,
        unit: Unit,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        values: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Launches a kernel.

        Args:
            device: device of the tensors in `values`.
            unit: source that defines the kernel.
            kernel: name of the kernel.
            grid: number of thread blocks in x and y.
            threads: threads per thread block.
            values: fields of the kernel's one parameter structure, in order: numbers, tensors for pointers
                (None for null), tuples for structures. Tensors may be freed after the launch, because torch's
                allocator keeps the stream's order.
            shared_bytes: bytes of dynamic shared memory per thread block.

        Raises:
            CompileError: the kernel cannot be compiled, or there is no driver.
            RuntimeError: the driver refuses it.
        """
        structure = _parameters(unit.source, kernel)
        assert len(values) == len(structure._fields_), (kernel, len(values))
        params = structure(*map(_field, values))
        self.start(device, unit, kernel, grid, threads, params, shared_bytes)

    def start(
        self,
        device: torch.device,
        unit: Unit,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        params: ctypes.Structure,
        shared_bytes: int,
    ) -> None:
        """Launches a kernel; see `launch`. `params` is read before this returns."""
        function = loaded(unit, kernel, device.index, shared_bytes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        arguments = (function, *grid, 1, threads, 1, 1, shared_bytes, stream, pointers, None)
        status = driver().cuLaunchKernel(*arguments)
        if status == _INVALID_CONTEXT:
            # The thread's first use of the device, which torch's allocator served from its cache.
            ensure_context(device.index)
            status = driver().cuLaunchKernel(*arguments)
        check(status)


@functools.cache
def _parameters(source: str, kernel: str) -> Any:
    return Declarations((SOURCES / f"{source}.cu").read_text("utf-8")).parameters(kernel)


def _field(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(_field, value)) if isinstance(value, tuple) else value


@functools.cache
def driver() -> Any:
    """Returns libcuda; raises CompileError if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CompileError(f"no CUDA driver: {error}") from error


def check(status: int) -> None:
    """Raises RuntimeError unless a driver call succeeded."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")


def ensure_context(device: int) -> None:
    """If the thread has no current context, makes the device's primary context current, which torch uses too.

    It only makes calls that are allowed while a stream is captured.
    """
    context = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check(driver().cuCtxSetCurrent(context))


@functools.cache
def architecture(device: int) -> str:
    """Returns NVRTC's name of the device's architecture, such as "sm_80". On Hopper it is "sm_90a", where "a"
    stands for features that only Hopper has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


@functools.cache
def _multiprocessors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _module(unit: Unit, device: int) -> ctypes.c_void_p:
    code = cubin(unit, architecture(device))
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        ensure_context(device)
        check(driver().cuModuleLoadData(ctypes.byref(module), code))
    return module


@functools.cache
def loaded(unit: Unit, kernel: str, device: int, shared_bytes: int = 0) -> ctypes.c_void_p:
    """Returns the driver's handle of a kernel. The first call loads it, compiled if the cache lacks it.

    Raises:
        CompileError: it cannot be compiled, or there is no driver.
        RuntimeError: the driver refuses it.
    """
    function = ctypes.c_void_p()
    check(driver().cuModuleGetFunction(ctypes.byref(function), _module(unit, device), kernel.encode()))
    if shared_bytes > FREE_SHARED:
        check(driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes))
    found = loaded_resources(function)
    if found.local_bytes:
        logger.warning("%s of %s spills %d bytes per thread", kernel, unit, found.local_bytes)
    return function


def loaded_resources(function: ctypes.c_void_p) -> Resources:
    """Returns the resources of a loaded kernel, as the driver reports them."""
    values = []
    for attribute in (_REGISTERS, _LOCAL, _SHARED):
        value = ctypes.c_int()
        check(driver().cuFuncGetAttribute(ctypes.byref(value), attribute, function))
        values.append(value.value)
    return Resources(*values)
