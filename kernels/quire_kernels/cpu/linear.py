"""Linear layers on the C++ kernels."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch

from quire_kernels.cpu.native import TYPES, Activation, Format, as_rows, declarations
from quire_kernels.host_memory import aligned_bytes
from quire_kernels.weights import INT4_GROUP, W8A8_GROUP, quantize_weight

BLOCK_COLUMNS = 32
"""Columns of a block, as in gemm.h."""
INPUTS_MULTIPLE = 32
"""in_features of every weight; half of a gated one's rows are a multiple of half of it."""
_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
_QUANTISED = {"int8": Format.INT8, "int4": Format.INT4, "w8a8": Format.W8A8}
ACTIVATIONS = {
    None: Activation.NONE,
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
}


def can_pack(
    in_features: int,
    out_features: int,
    activation: str | None,
    quantization: str | None = None,
    **_: object,
) -> bool:
    """Whether the kernels take a matrix of this shape."""
    if quantization is not None and quantization not in _QUANTISED:
        return False
    multiple = W8A8_GROUP if quantization == "w8a8" else INPUTS_MULTIPLE
    return in_features % multiple == 0 and (activation is None or out_features % BLOCK_COLUMNS == 0)


class NativeLinear:
    """See `ops.pack_linear`."""

    def __init__(
        self,
        isa: str,
        library: ctypes.CDLL,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        quantization: str | None,
    ) -> None:
        self.isa, self.library = isa, library
        num_columns, self.in_features = weight.shape
        self.out_features = num_columns if activation is None else num_columns // 2
        self.dtype = weight.dtype
        scales = None
        source = weight.detach()
        if quantization is None:
            kind = _FORMATS[weight.dtype]
        else:
            kind = _QUANTISED[quantization]
            source, scales = quantize_weight(source, quantization)
        padded = -(-num_columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
        self.struct = declarations().structure("Weight")(
            None, None, None, num_columns, self.in_features, int(kind), int(ACTIVATIONS[activation])
        )
        self._data = aligned_bytes(library.quire_weight_bytes(byref(self.struct)))
        self.struct.data = self._data.data_ptr()
        self._scales = self._bias = None
        if scales is not None:
            groups = self.in_features // INT4_GROUP if kind is Format.INT4 else 1
            self._scales = torch.empty(padded * groups)
            self.struct.scales = self._scales.data_ptr()
        wide_bias = None
        if bias is not None:
            wide_bias = bias.detach().float().contiguous()
            self._bias = torch.empty(padded)
            self.struct.bias = self._bias.data_ptr()
        source = source.contiguous()
        library.quire_pack(
            source.data_ptr(),
            None if scales is None else scales.data_ptr(),
            None if wide_bias is None else wide_bias.data_ptr(),
            byref(self.struct),
        )
        self.nbytes = self._data.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        assert self.struct.format in _FORMATS.values() and not self.struct.activation, (
            "W is not kept as it was"
        )
        indices = indices.contiguous()
        out = torch.empty((indices.shape[0], self.in_features), dtype=self.dtype)
        self.library.quire_unpack_rows(
            TYPES[self.dtype], byref(self.struct), indices.data_ptr(), indices.shape[0], out.data_ptr()
        )
        return out

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        assert x.dtype == self.dtype and not self.struct.activation, (x.dtype, self.struct.activation)
        rows = as_rows(x)
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        self.library.quire_linear_argmax(
            TYPES[x.dtype],
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            byref(self.struct),
            out.data_ptr(),
        )
        return out

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features, (x.dtype, x.shape)
        rows = as_rows(x)
        out = torch.empty((rows.shape[0], self.out_features), dtype=dtype or x.dtype)
        self.library.quire_linear(
            TYPES[x.dtype],
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            byref(self.struct),
            TYPES[out.dtype],
            out.data_ptr(),
            out.stride(0),
        )
        return out.view(*x.shape[:-1], self.out_features)
