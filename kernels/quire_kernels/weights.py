"""Weights of linear layers: interfaces of packed layers, layers made of others, and quantisation."""

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
"""Input features that share a scale in int4 and w4a8."""
W8A8_GROUP = 64
"""Input features that share a scale in w8a8, in each row of activations."""
_AT_ONCE = 2**18
"""Approximate number of weights that are quantised at a time."""
INT4_CANDIDATES = (-8.5, -8.0, -7.5, -7.0, 7.0, 7.5)
"""Values to which a group's number of largest magnitude may be scaled before the group is rounded to four
bits, in [-8, 7]. For each group, the value with the least squared error is chosen."""


@dataclass(frozen=True)
class QuantizedRows:
    """A quantised matrix: a weight is its code times the scale of its row."""

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
        """Returns the weights, float32 [out_features, in_features]."""
        return dequantize_weight(self.codes, self.scales)


class PackedLinear(Protocol):
    """Linear layer y = x W^T + b, followed by an activation if the layer has one. W has the form that the
    implementation reads."""

    in_features: int
    out_features: int
    """Output features: W's rows, or half of them if the layer has an activation."""
    nbytes: int
    """Bytes of the packed weights, without the bias; the PyTorch implementation leaves out codes of w8a8."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the result [num_tokens, out_features] for x [num_tokens, in_features], as numbers of type
        `dtype` (None: x's type)."""
        ...

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `ops.argmax` of the float32 result for x [n, in_features], int64 [n]. The result itself
        need not be stored."""
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns rows [n, in_features] of W in the type of the layer's inputs, for int64 indices [n]. W must
        not be gated, and must be a GroupedWeight, a BlockWeight or not quantised."""
        ...

    def ungated(self) -> PackedLinear:
        """Returns the layer of a gated W without its activation. Its output holds the gates, then the
        features that they multiply. If `ops.gate_mul` is applied to its float32 output and the result is
        rounded to x's type, that is this layer's result: bit for bit with the C++ kernels, elsewhere but for
        rounding."""
        ...


class PackedHeads(Protocol):
    """Products y[t, h] = W[h] x[t, h] with a matrix W[h] per head. The matrices have the form that the
    implementation reads."""

    nbytes: int
    """Bytes of the packed weights."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Multiplies x [num_tokens, num_heads, in_features] into `out` [num_tokens, num_heads, out_features].
        Both have the weights' type, and each head of a token is contiguous."""
        ...


class PackedExperts(Protocol):
    """Experts of a layer: feed-forward parts, usually gated, a few of which compute each token."""

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns each token's sum of its experts' results times their shares, added in float32 in the order
        of the experts' numbers.

        Args:
            x: [num_tokens, hidden_size].
            experts: int64 [num_tokens, num_chosen]: numbers of each token's experts, all different; -1: none.
                At least one token has an expert.
            shares: float32 [num_tokens, num_chosen]: factors of their results.
            sums: float32 [num_tokens, hidden_size], contiguous: sums to which the results are added, in
                place; None: zeros.

        Returns:
            [num_tokens, hidden_size] in x's type: the sums, rounded.
        """
        ...

    def replace(self, expert: int, gate_up: PackedLinear, down: PackedLinear) -> None:
        """Uses other weights, of the same form, for one expert."""
        ...


class JoinedLinear:
    """Joins layers without activation that have the same input. Their outputs follow each other.

    It is used for parts that cannot be one matrix, for example because their weights have different forms.
    See PackedLinear; only a call is supported.
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
        """Raises AssertionError: output heads are not joined."""
        raise AssertionError("no output head is joined")

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Raises AssertionError: embeddings are not joined."""
        raise AssertionError("no embedding is joined")

    def ungated(self) -> PackedLinear:
        """Raises AssertionError: gated layers are not joined."""
        raise AssertionError("no gated layer is joined")


class ReorderedLinear:
    """A layer whose inputs are reordered first. See PackedLinear."""

    def __init__(self, layer: PackedLinear, order: torch.Tensor) -> None:
        self.layer, self.order = layer, order
        """`order`: int64 [in_features], the column of x that becomes each input of the layer."""
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
    """Returns the bytes of the result of `quantize_weight`, counting four-bit codes as half a byte."""
    if quantization == "int4":
        return num_rows * num_columns // 2 + 4 * num_rows * (num_columns // INT4_GROUP)
    return num_rows * num_columns + 4 * num_rows


def quantize_weight(
    weight: torch.Tensor | QuantizedRows, quantization: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a matrix symmetrically, without calibration data.

    Args:
        weight: [out_features, in_features], floating point. For int4, in_features is a multiple of
            INT4_GROUP. The codes and scales of QuantizedRows are returned as they are.
        quantization: "int8", "w8a8", "fp8" or "fp8_weights", with a scale per output feature; or "int4", with
            a scale per INT4_GROUP inputs of an output feature.

    Returns:
        Codes [out_features, in_features]: int8 in [-127, 127] or [-8, 7], or FP8 in [-FP8_MAX, FP8_MAX],
        rounded to nearest even. And scales, float32 [out_features, groups]. A weight is about code * scale.
        The scale of a row (int4: of a group) with NaN or infinities is not finite, and code * scale is then
        NaN for all of its weights. Codes that are computed here are never NaN.
    """
    assert quantization in QUANTIZATIONS, quantization
    if isinstance(weight, QuantizedRows):
        return weight.codes, weight.scales
    parts = [_quantized(rows.float(), quantization) for rows in _in_parts(weight)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes, scales


def _in_parts(weight: torch.Tensor) -> Sequence[torch.Tensor]:
    """Divides a matrix into groups of rows that fit in a CPU cache. A matrix on "meta" is not divided."""
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
    """Returns codes in [-8, 7], and scales of type `dtype`. The codes are chosen for these rounded scales."""
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
    """Quantises a matrix to four bits with 16-bit scales, as w4a8 does (4.5 bits per weight).

    Args:
        weight: [out_features, in_features], floating point; in_features is a multiple of INT4_GROUP.

    Returns:
        The matrix with bfloat16 scales, and codes that are chosen as in int4, plus 8. In float16, scales of
        tiny weights would become zero.
    """
    parts = [_four_bits(rows.float(), torch.bfloat16) for rows in _in_parts(weight)]
    codes, scales = (torch.cat(column) for column in zip(*parts, strict=True))
    return GroupedWeight(codes=codes.add_(8).to(torch.uint8), scales=scales, bits=4, group=INT4_GROUP, zero=8)


def dequantize_weight(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the weights, float32 [out_features, in_features], for the result of `quantize_weight`."""
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(2)).flatten(1)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises activations symmetrically at run time.

    Args:
        x: [n, in_features], floating point; in_features is a multiple of W8A8_GROUP.

    Returns:
        int8 [n, groups, W8A8_GROUP] in [-127, 127], and float32 scales [n, groups, 1]. A value is about code
        * scale. Groups with NaN or infinities have NaN scales.
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
