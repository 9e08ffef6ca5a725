"""The C++ kernels through ctypes: structures of src/*.h, and the library of an instruction set.

ctypes releases the GIL during a call, so that other threads of the engine go on meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

from quire_kernels.cpu.compiler import BuildError, load, supported_isas
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, QuantizedKV

logger = logging.getLogger("quire_kernels")

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Codes of activations' types (Type), and of plain KV (KVType)."""
KV_TYPES = {**TYPES, torch.int8: 2}


class Format(IntEnum):
    """Of packed weights."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    W8A8 = 4


class Activation(IntEnum):
    """Of a gated product, by name in `ACTIVATIONS`; NONE is a plain product."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3


class CWeight(Structure):
    """Weight of gemm.h."""

    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("num_columns", c_int64),
        ("num_inputs", c_int64),
        ("format", c_int32),
        ("activation", c_int32),
    ]


class CKVLayer(Structure):
    """KVLayer of layout.h."""

    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("block_stride", c_int64),
        ("kv_stride", c_int64),
        ("head_stride", c_int64),
        ("scale_block_stride", c_int64),
        ("scale_kv_stride", c_int64),
        ("scale_head_stride", c_int64),
        ("type", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
    ]


class CBatch(Structure):
    """Batch of layout.h."""

    _fields_ = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("slot_mapping", c_void_p),
        ("num_seqs", c_int32),
        ("num_tokens", c_int32),
    ]


class CDecoderLayer(Structure):
    """DecoderLayer of decoder.h."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", CWeight),
        ("out", CWeight),
        ("gate_up", CWeight),
        ("down", CWeight),
        ("attention_scale", c_float),
        ("softcap", c_float),
        ("window", c_int32),
        ("group", c_int32),
    ]


class CDecoder(Structure):
    """Decoder of decoder.h."""

    _fields_ = [
        ("type", c_int32),
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("half_rotary_dim", c_int32),
        ("eps", c_float),
        ("layers", POINTER(CDecoderLayer)),
        ("final_norm", c_void_p),
    ]


class CStep(Structure):
    """Step of decoder.h."""

    _fields_ = [
        ("residual", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("kv", POINTER(CKVLayer)),
        ("batches", POINTER(CBatch)),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("out", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "quire_init": (c_int32, ()),
    "quire_set_num_threads": (None, (c_int32,)),
    "quire_weight_bytes": (c_int64, (POINTER(CWeight),)),
    "quire_pack": (None, (c_void_p, c_void_p, c_void_p, POINTER(CWeight))),
    "quire_unpack_rows": (None, (c_int32, POINTER(CWeight), c_void_p, c_int64, c_void_p)),
    "quire_linear": (
        None,
        (c_int32, c_void_p, c_int64, c_int64, POINTER(CWeight), c_int32, c_void_p, c_int64),
    ),
    "quire_linear_argmax": (None, (c_int32, c_void_p, c_int64, c_int64, POINTER(CWeight), c_void_p)),
    "quire_rms_norm": (
        None,
        (c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_float, c_int32, c_void_p, c_int32),
    ),
    "quire_rope": (
        None,
        (
            c_int32,
            c_void_p,
            c_int64,
            c_int64,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
            c_void_p,
            c_int32,
        ),
    ),
    "quire_write_kv": (
        None,
        (c_int32, c_void_p, c_int64, c_void_p, c_int64, POINTER(CKVLayer), c_void_p, c_int32),
    ),
    "quire_argmax": (None, (c_void_p, c_int64, c_int64, c_int32, c_void_p)),
    "quire_gate": (None, (c_int32, c_int32, c_void_p, c_int64, c_int32, c_void_p, c_int32)),
    "quire_paged_attention": (
        None,
        (
            c_int32,
            c_void_p,
            c_int64,
            c_int32,
            c_void_p,
            POINTER(CKVLayer),
            POINTER(CBatch),
            c_float,
            c_int32,
            c_float,
        ),
    ),
    "quire_decoder_forward": (None, (POINTER(CDecoder), POINTER(CStep))),
}


_loaded: list[ctypes.CDLL] = []


@functools.cache
def library(isa: str) -> ctypes.CDLL | None:
    """The kernels for an instruction set, compiled on first use; None, which is logged, without them."""
    try:
        if isa not in supported_isas():
            return None
        loaded = load(isa)
    except (BuildError, OSError) as error:
        logger.warning("no C++ kernels for %s, PyTorch is used instead: %s", isa, error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.quire_init():
        logger.warning("no C++ kernels for %s: the system does not let this process use AMX", isa)
        return None
    loaded.quire_set_num_threads(torch.get_num_threads())
    _loaded.append(loaded)
    return loaded


def set_num_threads(count: int) -> None:
    """Threads that share the work of every kernel, the calling one included."""
    torch.set_num_threads(count)
    for loaded in _loaded:
        loaded.quire_set_num_threads(count)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] as [n, size] whose rows are contiguous, one by one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def kv_struct(kv_layer: KVLayer) -> CKVLayer:
    """The structure for a layer's view of the cache, which must outlive it."""
    data, scales = kv_layer if isinstance(kv_layer, QuantizedKV) else (kv_layer, None)
    _, _, num_kv_heads, block_size, head_dim = data.shape
    strides = data.stride()
    assert strides[3:] == (head_dim, 1), strides
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if scales is not None:
        assert scales.stride(3) == 1, scales.stride()
        scale_strides = scales.stride()[:3]
    return CKVLayer(
        data.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *strides[:3],
        *scale_strides,
        KV_TYPES[data.dtype],
        block_size,
        num_kv_heads,
        head_dim,
    )


def batch_struct(meta: AttentionMetadata) -> CBatch:
    """The structure for a batch, whose tensors must outlive it."""
    assert meta.block_table.stride(1) == 1 or meta.block_table.shape[1] == 1, meta.block_table.stride()
    assert meta.slot_mapping.is_contiguous()
    return CBatch(
        meta.query_start_loc.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.block_table.data_ptr(),
        meta.block_table.stride(0),
        meta.slot_mapping.data_ptr(),
        len(meta.query_lens),
        meta.num_tokens,
    )
