"""Loads the C++ kernels of an instruction set through ctypes, and makes the structures that they take.

ctypes releases the GIL during a call of a kernel, so other threads of the engine continue.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from ctypes import Structure
from enum import IntEnum

import torch

from quire_kernels.cpu.compiler import SOURCES, BuildError, load, supported_isas
from quire_kernels.declarations import Declarations
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, QuantizedKV

logger = logging.getLogger("quire_kernels")

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of the types of activations (`Type`) and of a plain KV cache (`KVType`)."""
KV_TYPES = {**TYPES, torch.int8: 2}


class Format(IntEnum):
    """Formats of packed weights; `Format` of gemm.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    W8A8 = 4
    GROUPED = 5


class ScaleType(IntEnum):
    """Types of the scales of grouped weights; `ScaleType` of gemm.h."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3
    NIBBLES = 4


class Activation(IntEnum):
    """Activations of the gate in a gated product; `Activation` of gemm.h. NONE: no gate."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    CLAMPED_SWIGLU = 4


@functools.cache
def declarations() -> Declarations:
    """Returns the structures and functions of src/ that Python uses."""
    names = (
        "layout.h",
        "elementwise.h",
        "gated_delta.h",
        "mamba.h",
        "gemm.h",
        "blocks.h",
        "pack.h",
        "moe.h",
        "lora.h",
        "decoder.h",
        "sampling.h",
        "quire.cpp",
    )
    return Declarations("\n".join((SOURCES / name).read_text("utf-8") for name in names))


_loaded: list[ctypes.CDLL] = []
_load_seconds: list[float] = []


def load_seconds() -> float:
    """Returns the seconds that this process has spent loading and compiling libraries."""
    return sum(_load_seconds)


@functools.cache
def library(isa: str) -> ctypes.CDLL | None:
    """Returns the kernels for an instruction set. The first call loads them, or compiles them if it must.
    None: they are not available. The log says why, unless `supported_isas` lacks the instruction set."""
    begin = time.monotonic()
    try:
        if isa not in supported_isas():
            return None
        loaded = load(isa)
    except (BuildError, OSError) as error:
        logger.warning("no C++ kernels for %s, PyTorch is used instead: %s", isa, error)
        return None
    finally:
        _load_seconds.append(time.monotonic() - begin)
    for name, (result, arguments) in declarations().functions("quire_").items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.quire_init():
        logger.warning("no C++ kernels for %s: the system does not let this process use AMX", isa)
        return None
    loaded.quire_set_num_threads(torch.get_num_threads())
    _loaded.append(loaded)
    return loaded


def set_num_threads(count: int) -> None:
    """Sets the number of threads that share the work of each kernel, and of PyTorch's operators. The thread
    that calls a kernel is one of them."""
    torch.set_num_threads(count)
    for loaded in _loaded:
        loaded.quire_set_num_threads(count)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., size] as [n, size]. Each row is contiguous, but rows may have gaps between them."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def kv_struct(kv_layer: KVLayer) -> Structure:
    """Returns the C++ structure for a layer's view of the cache. The view must live as long as the
    structure."""
    data, scales = kv_layer if isinstance(kv_layer, QuantizedKV) else (kv_layer, None)
    _, _, num_kv_heads, block_size, head_dim = data.shape
    strides = data.stride()
    assert strides[3:] == (head_dim, 1), strides
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if scales is not None:
        assert scales.stride(3) == 1, scales.stride()
        scale_strides = scales.stride()[:3]
    return declarations().structure("KVLayer")(
        data.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *strides[:3],
        *scale_strides,
        KV_TYPES[data.dtype],
        block_size,
        num_kv_heads,
        head_dim,
    )


def adapter_part(a: torch.Tensor, b: torch.Tensor, filled: bytearray | None = None) -> Structure:
    """Returns the C++ structure for the adapters of a layer's part. The arguments must live as long as the
    structure.

    Args:
        a: adapters' A matrices; see `ops.add_lora`.
        b: adapters' B matrices; see `ops.add_lora`.
        filled: one byte per slot, 1 if its adapter changes the part; None: all do.
    """
    return declarations().structure("AdapterPart")(
        a.data_ptr(),
        b.data_ptr(),
        a.stride()[0],
        b.stride()[0],
        b.shape[1],
        None if filled is None else ctypes.addressof(ctypes.c_char.from_buffer(filled)),
    )


def batch_struct(meta: AttentionMetadata) -> Structure:
    """Returns the C++ structure for a batch. The batch's tensors must live as long as the structure."""
    assert meta.block_table.stride(1) == 1 or meta.block_table.shape[1] == 1, meta.block_table.stride()
    assert meta.slot_mapping.is_contiguous()
    return declarations().structure("Batch")(
        meta.query_start_loc.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.block_table.data_ptr(),
        meta.block_table.stride(0),
        meta.slot_mapping.data_ptr(),
        len(meta.query_lens),
        meta.num_tokens,
        None if meta.joint is None else meta.joint.data_ptr(),
    )
