"""Weights of linear layers: what an implementation makes of them at load, and how they are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quire_kernels.grouped_weights import GroupedWeight

QUANTIZATIONS = ("int8", "int4", "w8a8", "fp8", "fp8_weights")
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of FP8."""
INT4_GROUP = 32
"""Input features that share a scale in four bits."""
W8A8_GROUP = 64
"""Input features of a row of activations that share a scale in w8a8."""
_AT_ONCE = 2**18
"""Weights that are quantised at a time."""
INT4_CANDIDATES = (-8.5, -8.0, -7.5, -7.0, 7.0, 7.5)
"""Numbers to which the number of largest magnitude in a group may be scaled, before it is rounded to four
bits, in [-8, 7]. Each group has the candidate with the least squared error."""


@dataclass(frozen=True)
class QuantizedRows:
    """A matrix that is quantised already: a weight is its code times the scale of its row."""

    codes: torch.Tensor
    """int8 or FP8 [out_features, in_features]."""
    scales: torch.Tensor
    """float32 [out_features, 1]."""
    quantization: str
    """"int8", "w8a8", "fp8" or "fp8_weights"; see `ops.pack_linear`."""
    dtype: torch.dtype = torch.float32
    """Type of the layer's inputs."""

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of both tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> torch.Tensor:
        """float32 [out_features, in_features]: what the weights mean."""
        return dequantize_weight(self.codes, self.scales)


class PackedLinear(Protocol):
    """y = x W^T + b, with W in the form in which an implementation reads it fastest."""

    in_features: int
    out_features: int
    """Columns of the result: half of W's rows where an activation gates."""
    nbytes: int
    """Bytes of the weights as they are kept."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features], of `dtype` (None: x's)."""
        ...

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """`ops.argmax` of the float32 result for x [n, in_features], which need not be kept: int64 [n]."""
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 [n] to rows [n, in_features] of W in x's type, where W is not gated, and a GroupedWeight or
        not quantised."""
        ...

    def ungated(self) -> PackedLinear:
        """The layer of a gated W without its activation: its results are the gates, then what they are
        multiplied by. From these in float32 `ops.gate_mul` makes this layer's results, bit for bit on a
        CPU."""
        ...


class PackedHeads(Protocol):
    """y[t, h] = W[h] x[t, h], with a matrix of each head in the form in which it is read fastest."""

    nbytes: int
    """Bytes of the weights as they are kept."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Computes x [num_tokens, num_heads, in_features] into `out` [num_tokens, num_heads, out_features];
        both of the weights' type, and each head of a token contiguous."""
        ...


class PackedExperts(Protocol):
    """The experts of a layer: gated feed-forward parts, of which each token is computed by a few."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum of each token's experts, in the order of their numbers and in float32, times their shares.

        Args:
            x: [num_tokens, hidden_size].
            experts: int64 [num_tokens, num_chosen], those of a token all different.
            shares: float32 of that shape.

        Returns:
            [num_tokens, hidden_size] in x's type.
        """
        ...


class JoinedLinear:
    """Layers of one input, none gated, as one: their outputs lie behind each other.

    For parts that cannot be one matrix, as their weights have different forms. See PackedLinear.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        self.parts = tuple(parts)
        self.in_features = self.parts[0].in_features
        self.out_features = sum(part.out_features for part in self.parts)
        self.nbytes = sum(part.nbytes for part in self.parts)

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        return torch.cat([part(x, dtype) for part in self.parts], dim=-1)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        raise AssertionError("no output head is joined")

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        raise AssertionError("no embedding is joined")

    def ungated(self) -> PackedLinear:
        """See PackedLinear."""
        raise AssertionError("no gated layer is joined")


class ReorderedLinear:
    """A layer whose inputs are put into another order first. See PackedLinear."""

    def __init__(self, layer: PackedLinear, order: torch.Tensor) -> None:
        self.layer, self.order = layer, order
        """`order`: int64 [in_features], which of x's columns the layer has at each place."""
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.nbytes = layer.nbytes + order.nbytes

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        return self.layer(x.index_select(-1, self.order), dtype)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return self.layer.argmax(x.index_select(-1, self.order))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return self.layer.rows(indices).index_select(-1, self.order.argsort())

    def ungated(self) -> PackedLinear:
        """See PackedLinear."""
        return ReorderedLinear(self.layer.ungated(), self.order)


def quantized_bytes(num_rows: int, num_columns: int, quantization: str) -> int:
    """Bytes of what `quantize_weight` makes of a matrix, four bits in half a byte each."""
    if quantization == "int4":
        return num_rows * num_columns // 2 + 4 * num_rows * (num_columns // INT4_GROUP)
    return num_rows * num_columns + 4 * num_rows


def quantize_weight(
    weight: torch.Tensor | QuantizedRows, quantization: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric weight-only quantisation, without calibration data.

    Args:
        weight: [out_features, in_features], floating point; int4: in_features is a multiple of INT4_GROUP.
            Rows that are quantised already are left as they are.
        quantization: "int8", "w8a8", "fp8" and "fp8_weights", a scale per output feature, or "int4", one for
            each INT4_GROUP of its inputs.

    Returns:
        [out_features, in_features], int8 in [-127, 127] or [-8, 7], or FP8 in [-FP8_MAX, FP8_MAX], rounded to
        nearest even; and float32 [out_features, groups]: a weight is about its number times its scale. NaN
        and infinities become NaN scales, and no code is NaN.
    """
    assert quantization in QUANTIZATIONS, quantization
    if isinstance(weight, QuantizedRows):
        return weight.codes, weight.scales
    parts = [_quantized(rows.float(), quantization) for rows in _in_parts(weight)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes, scales


def _in_parts(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Some rows after the others: what is computed with them stays in a cache, but on "meta"."""
    return weight.split(len(weight) if weight.is_meta else max(1, _AT_ONCE // weight.shape[1]))


def _quantized(wide: torch.Tensor, quantization: str) -> tuple[torch.Tensor, torch.Tensor]:
    if quantization in ("fp8", "fp8_weights"):
        extreme = wide.abs().amax(1, keepdim=True)
        scales = torch.where(extreme.isfinite(), extreme, torch.nan) / FP8_MAX
        # Clamped, since a quotient may round to more than FP8_MAX. A scale of zero is that of zeros only.
        return (wide / scales).nan_to_num_(0.0).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales
    if quantization != "int4":
        scales = wide.abs().amax(1, keepdim=True) / 127
        return _codes(wide, scales, -127, 127), scales
    return _four_bits(wide, torch.float32)


def _four_bits(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in [-8, 7], and scales of `dtype`: those with which the codes are right."""
    groups = wide.unflatten(1, (-1, INT4_GROUP))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, least = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    for candidate in INT4_CANDIDATES:
        scales = (extreme / candidate).to(dtype).float()
        error = (groups - _codes(groups, scales, -8, 7) * scales).square().sum(2, keepdim=True)
        # NaN errors, of what is not finite, keep the NaN scale.
        is_better = ~(error >= least)
        best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
    return _codes(groups, best, -8, 7).flatten(1), best.squeeze(2).to(dtype)


def group_weight(weight: torch.Tensor) -> GroupedWeight:
    """A matrix in four bits and a half, as w4a8 has it.

    Args:
        weight: [out_features, in_features], floating point; in_features is a multiple of INT4_GROUP.

    Returns:
        Codes as int4 has them, with scales of bfloat16: those of tiny weights would be zero in float16.
    """
    parts = [_four_bits(rows.float(), torch.bfloat16) for rows in _in_parts(weight)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return GroupedWeight(codes=codes.add_(8).to(torch.uint8), scales=scales, bits=4, group=INT4_GROUP, zero=8)


def dequantize_weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [out_features, in_features] of what `quantize_weight` gave."""
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).flatten(1)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation of activations, as they come.

    Args:
        x: [n, in_features], floating point; in_features is a multiple of W8A8_GROUP.

    Returns:
        int8 [n, groups, W8A8_GROUP], in [-127, 127], and float32 [n, groups, 1]: a number is about its code
        times its group's scale. Groups with NaN or infinities have NaN scales.
    """
    groups = x.float().unflatten(1, (-1, W8A8_GROUP))
    extreme = groups.abs().amax(2, keepdim=True)
    extreme = torch.where(extreme.isfinite(), extreme, torch.nan)
    codes = (groups * (127 / extreme)).round_()
    return codes.nan_to_num_(0.0).to(torch.int8), extreme / 127


def _codes(values: torch.Tensor, scales: torch.Tensor, low: int, high: int) -> torch.Tensor:
    # A scale of zero is that of zeros only.
    codes = (values / scales).round_().clamp_(low, high)
    return codes.nan_to_num_(0.0).to(torch.int8)
