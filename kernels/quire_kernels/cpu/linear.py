"""Linear layers on the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from typing import Any

import torch

from quire_common.host_memory import aligned_bytes
from quire_kernels.block_weights import BLOCK_KINDS, BlockKind, BlockWeight
from quire_kernels.cpu.native import TYPES, Activation, Format, ScaleType, as_rows, declarations
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.weights import W8A8_GROUP, QuantizedRows, quantize_weight

BLOCK_COLUMNS = 32
"""Output features in a block of packed weights; `block_columns` of gemm.h."""
INPUTS_MULTIPLE = 32
"""in_features of every weight must be a multiple of this (w8a8: of W8A8_GROUP). A gated weight's number of
rows must be a multiple of BLOCK_COLUMNS."""
_FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
_RESTORED = (*_FORMATS.values(), Format.GROUPED)
_QUANTISED = {"int8": Format.INT8, "int4": Format.INT4, "w8a8": Format.W8A8}
_SCALE_TYPES = {
    torch.float32: ScaleType.FLOAT32,
    torch.float16: ScaleType.FLOAT16,
    torch.bfloat16: ScaleType.BFLOAT16,
}
TABLE_ZERO = 128
"""Number added to the values of a table, and to the `zero` of a weight that has a table: the kernels read the
values as unsigned bytes."""
ACTIVATIONS = {
    None: Activation.NONE,
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_tanh": Activation.GELU_TANH,
    "clamped_swiglu": Activation.CLAMPED_SWIGLU,
}


def why_not_pack(
    in_features: int,
    out_features: int,
    activation: str | None = None,
    quantization: str | None = None,
    **_: object,
) -> str | None:
    """Returns why the kernels do not support a matrix W of this shape, with this quantisation; None: they do.
    `out_features` are W's rows."""
    if quantization is not None and quantization not in _QUANTISED:
        return f"no kernels for {quantization}"
    multiple = W8A8_GROUP if quantization == "w8a8" else INPUTS_MULTIPLE
    if in_features % multiple != 0:
        return f"in_features must be a multiple of {multiple}"
    if activation is not None and out_features % BLOCK_COLUMNS != 0:
        return f"out_features must be a multiple of {BLOCK_COLUMNS} with gates"
    return None


class NativeLinear:
    """See `ops.pack_linear`. The constructor only allocates memory; `pack_dense` and `pack_grouped` fill it
    with weights, scales and bias.

    Args:
        shape: shape of W, [rows, in_features]. A row of W is a column of the packed weights.
        num_scales: number of float32 scales of each row of W that are kept beside the packed codes.
        groups: the structure Groups of grouped weights; None: the weights are not grouped.
    """

    def __init__(
        self,
        isa: str,
        library: ctypes.CDLL,
        shape: torch.Size,
        dtype: torch.dtype,
        kind: Format,
        activation: str | None,
        *,
        num_scales: int,
        has_bias: bool,
        groups: ctypes.Structure | None = None,
    ) -> None:
        self.isa, self.library, self.dtype = isa, library, dtype
        num_columns, self.in_features = shape
        self.out_features = num_columns if activation is None else num_columns // 2
        padded = -(-num_columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
        self._scales, self._bias = torch.empty(padded * num_scales), torch.empty(padded * has_bias)
        self.struct = declarations().structure("Weight")(
            None,
            self._scales.data_ptr() if num_scales else None,
            self._bias.data_ptr() if has_bias else None,
            num_columns,
            self.in_features,
            int(kind),
            int(ACTIVATIONS[activation]),
            *([] if groups is None else [groups]),
        )
        self._data = aligned_bytes(library.quire_weight_bytes(byref(self.struct)))
        self.struct.data = self._data.data_ptr()
        self.nbytes = self._data.nbytes + self._scales.nbytes
        self.table: torch.Tensor | None = None
        """uint8 [16]: the values of a table plus TABLE_ZERO, kept here because `struct` points to them; None:
        there is no table."""

    def state(self) -> dict[str, Any]:
        """Returns everything that `restored` needs, on this processor and with this library: JSON values and
        tensors."""
        struct = type(self.struct).from_buffer_copy(self.struct)
        struct.data = struct.scales = struct.bias = struct.groups.table = None
        return {
            "isa": self.isa,
            "dtype": str(self.dtype).removeprefix("torch."),
            "struct": bytes(struct).hex(),
            "data": self._data,
            "scales": self._scales,
            "bias": self._bias,
            "table": self.table,
        }

    @classmethod
    def restored(cls, library: ctypes.CDLL, state: Mapping[str, Any]) -> NativeLinear:
        """Rebuilds a layer from its `state`. The tensors must be aligned like `aligned_bytes`."""
        self = cls.__new__(cls)
        self.isa, self.library, self.dtype = state["isa"], library, getattr(torch, state["dtype"])
        self._data, self._scales, self._bias = state["data"], state["scales"], state["bias"]
        self.table = state["table"]
        self.struct = struct = (
            declarations().structure("Weight").from_buffer_copy(bytes.fromhex(state["struct"]))
        )
        struct.data, struct.groups.table = self._data.data_ptr(), _pointer(self.table)
        struct.scales = self._scales.data_ptr() if self._scales.numel() else None
        struct.bias = self._bias.data_ptr() if self._bias.numel() else None
        self.in_features, num_columns = struct.num_inputs, struct.num_columns
        self.out_features = num_columns // 2 if struct.activation else num_columns
        self.nbytes = self._data.nbytes + self._scales.nbytes
        return self

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        assert self.struct.format in _RESTORED and not self.struct.activation, "W is not kept as it was"
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

    def ungated(self) -> NativeLinear:
        """See PackedLinear."""
        return _UngatedLinear(self)

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


class _UngatedLinear(NativeLinear):
    """A gated layer without its activation. In the packed columns, 16 gates and 16 ups take turns
    (`packed_row` in pack.h)."""

    def __init__(self, gated: NativeLinear) -> None:
        vars(self).update(vars(gated))
        self.struct = type(gated.struct).from_buffer_copy(gated.struct)
        self.struct.activation = int(Activation.NONE)
        self.out_features = gated.struct.num_columns

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        packed = super().__call__(x, dtype)
        return packed.unflatten(-1, (-1, 2, BLOCK_COLUMNS // 2)).transpose(-3, -2).flatten(-3)


def pack_dense(
    isa: str,
    library: ctypes.CDLL,
    weight: torch.Tensor | QuantizedRows,
    bias: torch.Tensor | None,
    activation: str | None,
    quantization: str | None,
) -> NativeLinear:
    """See `ops.pack_linear`."""
    kind = _FORMATS[weight.dtype] if quantization is None else _QUANTISED[quantization]
    numbers, num_scales = None, 0 if quantization is None else 1
    if isinstance(weight, torch.Tensor) and quantization != "int4":
        numbers = weight.detach().contiguous()
    else:  # numbers in int4 are a search, and left to PyTorch
        assert quantization is not None
        codes, scales = (part.contiguous() for part in quantize_weight(weight, quantization))
        num_scales = scales.shape[1]
    wide_bias = None if bias is None else bias.detach().float().contiguous()
    packed = NativeLinear(
        isa,
        library,
        weight.shape,
        weight.dtype,
        kind,
        activation,
        num_scales=num_scales,
        has_bias=bias is not None,
    )
    if numbers is None:
        library.quire_pack(codes.data_ptr(), scales.data_ptr(), _pointer(wide_bias), byref(packed.struct))
    else:
        library.quire_pack_numbers(
            TYPES[weight.dtype], numbers.data_ptr(), _pointer(wide_bias), byref(packed.struct)
        )
    return packed


def pack_grouped(
    isa: str,
    library: ctypes.CDLL,
    weight: GroupedWeight | BlockWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> NativeLinear:
    """See `ops.pack_linear`."""
    means: BlockKind | GroupedWeight
    if isinstance(weight, BlockWeight):
        means = BLOCK_KINDS[weight.kind]
        scale_type, has_minimums = ScaleType[means.scale_type], means.has_minimums
        numbers = [weight.blocks, None, None, None]
        kind = int(weight.kind)
    else:
        means, kind = weight, 0
        scale_type, has_minimums = _SCALE_TYPES[weight.scales.dtype], weight.minimums is not None
        row_scales = None if weight.row_scales is None else weight.row_scales.float()
        numbers = [weight.codes, weight.scales, weight.minimums, row_scales]
    zero, table = means.zero, None
    if means.table is not None:
        zero += TABLE_ZERO
        table = torch.tensor(means.table).add_(TABLE_ZERO).to(torch.uint8)
    groups = declarations().structure("Groups")(
        _pointer(table), int(scale_type), means.bits, means.group, zero, has_minimums
    )
    packed = NativeLinear(
        isa,
        library,
        weight.shape,
        dtype,
        Format.GROUPED,
        activation,
        num_scales=int(numbers[3] is not None),
        has_bias=bias is not None,
        groups=groups,
    )
    packed.table = table
    numbers.append(None if bias is None else bias.detach().float())
    sources = [None if tensor is None else tensor.contiguous() for tensor in numbers]
    source = declarations().structure("GroupedSource")(*map(_pointer, sources), kind)
    library.quire_pack_grouped(byref(source), byref(packed.struct))
    return packed


class NativeHeads:
    """See `ops.pack_heads`."""

    def __init__(self, isa: str, library: ctypes.CDLL, weight: torch.Tensor) -> None:
        self.library, self.dtype = library, weight.dtype
        self._heads = [pack_dense(isa, library, matrix, None, None, None) for matrix in weight]
        make = declarations().structure("Weight") * len(self._heads)
        self._structs = make(*(head.struct for head in self._heads))
        self.nbytes = sum(head.nbytes for head in self._heads)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See PackedHeads."""
        assert x.dtype == out.dtype == self.dtype and x.stride(2) == out.stride(2) == 1, (x.dtype, x.stride())
        self.library.quire_head_linear(
            TYPES[x.dtype],
            x.data_ptr(),
            *x.stride()[:2],
            x.shape[0],
            self._structs,
            x.shape[1],
            out.data_ptr(),
            *out.stride()[:2],
        )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
