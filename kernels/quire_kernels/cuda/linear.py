"""Linear layers on GPUs. Plain weights use cuBLAS through torch, followed by our gate kernel if the layer is
gated. Weights of most quantisations use linear.cu.

If the GPU and torch can multiply fp8 by fp8, x has 16 bits and W's sizes are multiples of FLOAT8_MULTIPLE,
"fp8" uses that product and quantises the rows of x at run time. From some 16 rows on this is faster than
linear.cu, up to four times with many rows. Otherwise "fp8" quantises only the weights.
"""

from __future__ import annotations

import copy
import functools
import logging

import torch
import torch.nn.functional as F

from quire_kernels.cuda.compiler import Unit, linear_unit
from quire_kernels.cuda.kernels import ACTIVATIONS, TYPES, Kernels, aligned_rows
from quire_kernels.reference.linear import TorchLinear
from quire_kernels.weights import FP8, INT4_GROUP, PackedLinear, QuantizedRows, quantize_weight

logger = logging.getLogger("quire_kernels")

MAX_ROWS = 64
"""Most rows of 16-bit x for which a QuantizedLinear multiplies with the codes. With more rows, or float32 x,
it dequantises its weights and cuBLAS multiplies."""
CODES = {"int8": "INT8", "w8a8": "INT8", "fp8": "E4M3", "fp8_weights": "E4M3", "int4": "INT4"}
"""Name of the codes of each quantisation in numbers.cuh (`Codes`)."""
FLOAT8_CAPABILITY = (9, 0)
"""Least compute capability of a GPU on which Float8Linear is used."""
FLOAT8_MULTIPLE = 16
"""Both sizes of a matrix must be multiples of this in products of fp8 by fp8."""
_MAX_TOKENS = 32
"""Most tokens (rows of x) that one launch of a product with codes computes."""
# As linear.cu has them.
_WARPS, _WIDEN_WARPS, _WIDEN_TILES = 4, 8, 4
_GROUP = 32
_BLOCKS_PER_MULTIPROCESSOR = 6
_MIN_TILES = 4
"""Least number of input tiles per warp, if the inputs are divided into slices."""
_BYTES = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
_NIBBLES = torch.tensor([[0, 4, 1, 5], [2, 6, 3, 7]])
"""Orders in which eight inputs lie in memory. `_BYTES` is that of codes of eight bits. `_NIBBLES` is that of
codes of four bits: the inputs in the low halves of four bytes, then those in the high halves."""


def pack(
    kernels: Kernels,
    weight: torch.Tensor | QuantizedRows,
    bias: torch.Tensor | None,
    activation: str | None,
    quantization: str | None,
) -> PackedLinear:
    """See `ops.pack_linear`."""
    if quantization == "fp8" and weight.dtype != torch.float32 and has_float8(weight.device):
        result = float8_result(weight.device, weight.dtype)
        if result is not None and not any(size % FLOAT8_MULTIPLE for size in weight.shape):
            return Float8Linear(kernels, weight, bias, activation, result)
    if quantization is not None:
        return QuantizedLinear(kernels, weight, bias, activation, quantization)
    assert isinstance(weight, torch.Tensor)
    return Linear(kernels, weight, bias, activation)


class Linear(TorchLinear):
    """See `ops.pack_linear`. Multiplies plain weights with cuBLAS."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> None:
        super().__init__(weight, bias, activation, None)
        self.kernels = kernels
        # Found out now, as it may not be while a graph is recorded.
        can_widen(weight.device.type)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return self.kernels.argmax(self(x, torch.float32))

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        dtype = dtype or x.dtype
        out = product(x, self.weight, self.bias, dtype)
        if self.activation is not None:
            out = self.kernels.gate_mul(out, self.activation)
        return out.to(dtype)


class _CodedLinear(PackedLinear):
    """Base of the layers with codes and scales in linear.cu's layout or torch's; see PackedLinear."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor | QuantizedRows,
        bias: torch.Tensor | None,
        activation: str | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        self.num_rows, self.in_features = weight.shape
        self.kernels, self.activation, self.dtype = kernels, activation, weight.dtype
        self.out_features = self.num_rows if activation is None else self.num_rows // 2
        self.bias = None if bias is None else bias.contiguous()
        self.codes, self.scales = codes, scales
        self.nbytes = codes.nbytes + scales.nbytes

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Raises AssertionError: no table whose rows are looked up is packed in this form."""
        raise AssertionError("no quantised rows are looked up")

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return self.kernels.argmax(self(x, torch.float32))

    def ungated(self) -> PackedLinear:
        """See PackedLinear."""
        out = copy.copy(self)
        out.activation, out.out_features = None, self.num_rows
        return out


class QuantizedLinear(_CodedLinear):
    """See `ops.pack_linear`: weights quantised as one of CODES, in linear.cu's layout. With "w8a8", x is not
    quantised.

    Up to MAX_ROWS rows of 16-bit x, a row's result does not depend on their number. With more rows, or with
    float32 x, it may. Calls must follow one another on one stream.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor | QuantizedRows,
        bias: torch.Tensor | None,
        activation: str | None,
        quantization: str,
    ) -> None:
        codes, scales = quantize_weight(weight, quantization)
        if quantization == "int4":
            codes, scales = _packed_nibbles(codes, scales)
        else:
            if codes.dtype == torch.float8_e4m3fn:
                # The kernels know no code that is NaN; a file may have one.
                scales = scales.where(
                    (codes.view(torch.uint8) & 0x7F != 0x7F).all(1, keepdim=True), torch.nan
                )
            codes, scales = _packed_bytes(codes), scales.flatten().float().contiguous()
        super().__init__(kernels, weight, bias, activation, codes, scales)
        # Float32 rows are products with weights that are widened, from whichever type.
        number = TYPES[torch.bfloat16 if self.dtype == torch.float32 else self.dtype]
        self._unit = linear_unit(number, CODES[quantization])
        self._row_tiles, self._input_tiles = self.codes.shape[:2]
        self._blocks = self._row_tiles // 2
        # Depends on the shape only, so that no result depends on how many rows are computed together.
        wanted = _BLOCKS_PER_MULTIPROCESSOR * kernels.launcher.multiprocessors(weight.device) // self._blocks
        self._slices = max(1, min(wanted, self._input_tiles // (_WARPS * _MIN_TILES)))
        self._tickets = torch.zeros(self._blocks, dtype=torch.int32, device=weight.device)
        can_widen(weight.device.type)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features, (x.dtype, x.shape)
        dtype, rows = dtype or x.dtype, aligned_rows(x)
        if len(rows) > MAX_ROWS or x.dtype == torch.float32:
            out = product(rows, self._widened(), self.bias, dtype)
            if self.activation is not None:
                out = self.kernels.gate_mul(out, self.activation)
        else:
            computed = dtype if dtype == torch.float32 else x.dtype
            out = torch.empty((len(rows), self.out_features), dtype=computed, device=x.device)
            for first in range(0, len(rows), _MAX_TOKENS):
                self._multiply(rows[first : first + _MAX_TOKENS], out[first : first + _MAX_TOKENS])
        return out.to(dtype).view(*x.shape[:-1], self.out_features)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        count = next(size for size in (8, 16, _MAX_TOKENS) if len(x) <= size)
        partial = None
        if self._slices > 1:
            # Of this launch alone: graphs have their own pools.
            sizes = (self._blocks, self._slices, count * 32)
            partial = torch.empty(sizes, dtype=torch.float32, device=x.device)
        values = (
            *(x, self.codes, self.scales, self.bias, out, partial, self._tickets, x.stride(0), out.stride(0)),
            *(len(x), self.in_features, self.out_features, self._input_tiles, self._slices),
            -1 if self.activation is None else ACTIVATIONS[self.activation],
            out.dtype == torch.float32,
        )
        grid = (self._blocks, self._slices)
        self.kernels.launcher.launch(x.device, self._unit, f"linear_{count}", grid, 32 * _WARPS, values)

    def _widened(self) -> torch.Tensor:
        """Returns the dequantised weights [num_rows, in_features] in x's type. Each call computes them."""
        out = torch.empty((self.num_rows, self.in_features), dtype=self.dtype, device=self.codes.device)
        grid = (self._row_tiles, -(-self._input_tiles // (_WIDEN_WARPS * _WIDEN_TILES)))
        name = "widen_float32" if self.dtype == torch.float32 else "widen"
        values = (self.codes, self.scales, out, self.num_rows, self.in_features, self._input_tiles)
        self.kernels.launcher.launch(out.device, self._unit, name, grid, 32 * _WIDEN_WARPS, values)
        return out


class Float8Linear(_CodedLinear):
    """See `ops.pack_linear`: "fp8" as torch's product of fp8 by fp8. Rows of x are quantised at run time.

    Sums are float32, but rounded to 16 bits before the bias is added, even if the result is float32. So
    layers of logits should use "fp8_weights". A row's result may depend on the number of rows.

    Args:
        weight: weights for 16-bit inputs; both sizes are multiples of FLOAT8_MULTIPLE.
        result: type of the product's result; see `float8_result`.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor | QuantizedRows,
        bias: torch.Tensor | None,
        activation: str | None,
        result: torch.dtype,
    ) -> None:
        codes, scales = quantize_weight(weight, "fp8")
        scales = scales.float().reshape(1, -1).contiguous()
        super().__init__(kernels, weight, bias, activation, codes.contiguous(), scales)
        self.result = result

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features, (x.dtype, x.shape)
        codes, scales = self.kernels.quantize_rows(x.reshape(-1, self.in_features))
        if len(codes):
            out = float8_product(codes, scales, self.codes, self.scales, self.result).to(self.dtype)
        else:
            out = torch.empty((0, self.num_rows), dtype=self.dtype, device=x.device)
        if self.bias is not None:
            out += self.bias
        if self.activation is not None:
            out = self.kernels.gate_mul(out, self.activation)
        return out.to(dtype or x.dtype).view(*x.shape[:-1], self.out_features)


def has_float8(device: torch.device) -> bool:
    """Whether the device is a GPU with a compute capability of at least FLOAT8_CAPABILITY."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


@functools.cache
def float8_result(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """Returns the type in which `float8_product` gives its result for rows of `dtype`: `dtype` itself, or
    bfloat16 if torch does not support that.

    None: torch computes no such product here. The first call tries it, so that call must not be made while a
    graph is recorded.
    """
    ones = torch.ones((128, 128), device=device)
    scales, codes, reason = ones[:, :1].contiguous(), ones.to(FP8), ""
    for result in dict.fromkeys((dtype, torch.bfloat16)):
        try:
            float8_product(codes, scales, codes, scales.T, result)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error)
        else:
            return result
    logger.warning("torch multiplies no fp8 by fp8 here, weights are quantised alone: %s", reason)
    return None


def float8_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes x W^T of quantised matrices. Tests replace it by a version for CPUs.

    Args:
        x: float8_e4m3fn [n, in_features], n > 0.
        x_scales: float32 [n, 1].
        weight: float8_e4m3fn [out_features, in_features].
        weight_scales: float32 [1, out_features].
        dtype: type of the result: bfloat16, or another if torch supports it.

    Returns:
        [n, out_features]: the float32 sum of the codes' products, times both scales, rounded.
    """
    return torch._scaled_mm(x, weight.T, x_scales, weight_scales, out_dtype=dtype)


def _tiles(matrix: torch.Tensor, groups: int, size: int) -> torch.Tensor:
    """Divides [rows, n] into [tiles of rows, 2, 8, tiles of inputs, groups, size], padded with zeros."""
    missing = -matrix.shape[1] % (groups * size), -matrix.shape[0] % 32
    filled = F.pad(matrix, (0, missing[0], 0, missing[1]))
    return filled.reshape(len(filled) // 16, 2, 8, -1, groups, size)


def _packed_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Packs eight-bit codes into int8 [tiles of rows, tiles of inputs, 512]; see linear.cu."""
    tiles = _tiles(codes.view(torch.int8), 4, _GROUP // 4)[..., _BYTES.to(codes.device)]
    return tiles.permute(0, 3, 2, 4, 1, 5).reshape(*tiles.shape[::3][:2], 512)


def _packed_nibbles(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs codes in [-8, 7] into uint8 [tiles of rows, tiles of inputs, 512], and their scales into float32
    [tiles of rows, tiles of inputs, 32]; see linear.cu."""
    tiles = _tiles(codes, 2 * 4, _GROUP // 4)
    low, high = ((tiles[..., which] + 8).to(torch.uint8) for which in _NIBBLES.to(codes.device))
    packed = (low | high << 4).unflatten(4, (2, 4)).permute(0, 3, 2, 5, 4, 1, 6)
    of_groups = _tiles(scales, 2, 1).squeeze(5).permute(0, 3, 2, 4, 1)
    return packed.reshape(*packed.shape[:2], 512), of_groups.reshape(*of_groups.shape[:2], 32)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Computes x W^T + b.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], in x's type.
        bias: [out_features], in x's type; None: there is none.
        dtype: type to which the caller will convert the result.

    Returns:
        [..., out_features]: float32 without rounding in between if `dtype` is float32 and torch supports it;
        otherwise x's type.
    """
    if dtype != torch.float32 or x.dtype == torch.float32 or not can_widen(x.device.type):
        return F.linear(x, weight, bias)
    out = float32_product(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes x W^T of matrices of 16-bit numbers, float32 [n, out_features]. Tests replace it by a version
    for CPUs."""
    return torch.mm(x, weight.T, out_dtype=torch.float32)


@functools.cache
def can_widen(device_type: str) -> bool:
    """Whether torch supports `float32_product` on devices of this type. The first call tries it."""
    one = torch.ones((16, 16), dtype=torch.bfloat16, device=device_type)
    try:
        float32_product(one, one)
    except (TypeError, RuntimeError):
        return False
    return True


def why_not_pack(
    in_features: int,
    out_features: int,
    activation: str | None = None,
    quantization: str | None = None,
    **_: object,
) -> str | None:
    """Returns why `pack` does not support a matrix W of this shape with this quantisation; None: it does.
    Quantised rows must consist of whole vectors (int4: whole groups). With gates, half of W's rows must be
    whole tiles, or whole vectors if W is not quantised."""
    if quantization is not None:
        if quantization not in CODES:
            return f"no kernels for {quantization}"
        unit = INT4_GROUP if quantization == "int4" else 8
        if in_features % unit != 0:
            return f"in_features must be a multiple of {unit}"
    tile = 16 if quantization is None else 32
    if activation is not None and out_features % tile != 0:
        return f"out_features must be a multiple of {tile} with gates"
    return None


def probe(quantization: str | None = None, **_: object) -> tuple[Unit, str, int]:
    """See `operators.register`."""
    if quantization is None:
        return Unit("elementwise", (("TYPE", "BFloat16"),)), "gate", 0
    return linear_unit("BFloat16", CODES[quantization]), "linear_8", 0
