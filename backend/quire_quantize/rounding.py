"""Rounding: quantises matrices to codes with scales, and names the tensors in which compressed-tensors stores
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
_SHRINKS = tuple(1 - step / 20 for step in range(9))
"""Fractions of a group's range that are tried. Clipping the largest weights often makes the others more
precise."""


@dataclass(frozen=True)
class Grid:
    """Grid of the values that a matrix's weights may have: (code - zero) * scale."""

    scales: torch.Tensor
    """float32 [out_features, groups]; columns in place of groups after `per_column`. The values are exact in
    the type in which the checkpoint stores scales."""
    zeros: torch.Tensor | None
    """float32 whole numbers in the shape of `scales`; None: all are 0."""
    bits: int

    def codes(self, weight: torch.Tensor, columns: slice | torch.Tensor | int = slice(None)) -> torch.Tensor:
        """Returns the codes nearest to `weight` as float32 whole numbers in the shape of `weight`. The grid
        must have a scale for each column (see `per_column`).

        Args:
            weight: float32 [out_features, number of columns], or [out_features] if `columns` is an integer.
            columns: which of the matrix's columns `weight` holds.
        """
        scales, zeros = self._columns_of(columns)
        most = 2 ** (self.bits - 1)
        return (weight / scales + zeros).round_().clamp_(-most, most - 1)

    def values(self, codes: torch.Tensor, columns: slice | torch.Tensor | int = slice(None)) -> torch.Tensor:
        """Returns the float32 weights that codes stand for; shapes and `columns` are those of the method
        `codes`."""
        scales, zeros = self._columns_of(columns)
        return (codes - zeros) * scales

    def per_column(self, in_features: int) -> Grid:
        """Returns the same grid with a scale for each column."""

        def spread(groups: torch.Tensor) -> torch.Tensor:
            return groups.repeat_interleave(in_features // groups.shape[1], 1)

        return Grid(spread(self.scales), None if self.zeros is None else spread(self.zeros), self.bits)

    def _columns_of(self, columns: slice | torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor | int]:
        return self.scales[:, columns], 0 if self.zeros is None else self.zeros[:, columns]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantised matrix: codes with scales and zeros."""

    codes: torch.Tensor
    """int8 or FP8 [out_features, in_features]."""
    scales: torch.Tensor
    """[out_features, groups], in the checkpoint's type."""
    zeros: torch.Tensor | None = None
    """int8 [out_features, groups]; None: all are 0."""

    def dequantize(self) -> torch.Tensor:
        """Returns the weights, float32 [out_features, in_features]."""
        groups = self.codes.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            groups = groups - self.zeros.unsqueeze(2)
        return (groups * self.scales.float().unsqueeze(2)).flatten(1)

    def stored(self, layout: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (suffix, tensor) for each tensor in which compressed-tensors stores this matrix."""
        yield "weight_scale", self.scales
        if layout != "pack-quantized":
            assert self.zeros is None
            yield "weight", self.codes
            return
        yield "weight_packed", pack_words(self.codes)
        yield "weight_shape", torch.tensor(self.codes.shape)
        if self.zeros is not None:
            yield "weight_zero_point", pack_words(self.zeros.T).T.contiguous()


def pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Packs int8 [rows, n] in [-8, 7] into int32 [rows, ceil(n / 8)]. A word holds eight codes, each
    increased by 8 to fit four bits, the first in the lowest bits."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8), value=-8)
    nibbles = (codes + 8).to(torch.uint8).unflatten(1, (-1, 2))
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).contiguous().view(torch.int32)


def group_grid(
    weight: torch.Tensor,
    group: int,
    dtype: torch.dtype,
    *,
    is_symmetric: bool,
    importance: torch.Tensor | None = None,
) -> Grid:
    """Chooses a four-bit grid with a scale for each `group` inputs of each output.

    Args:
        weight: float32 [out_features, in_features].
        group: inputs that share a scale; divides in_features.
        dtype: type of the stored scales.
        is_symmetric: whether the code 0 stands for zero.
        importance: float32 [in_features], weight of each input's squared error. Several ranges are tried for
            each group, and the one with the least weighted error is used. None: the whole range is used.
    """
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best: Grid | None = None
    least = torch.full_like(low, torch.inf)
    for shrink in _SHRINKS if importance is not None else (1.0,):
        width = 2 * torch.maximum(-low, high) if is_symmetric else high - low
        scales = (width * (shrink / 15)).to(dtype).float()
        scales = torch.where(scales == 0, 1.0, scales)
        zeros = None if is_symmetric else (-8 - low * shrink / scales).round_().clamp_(-8, 7)
        grid = Grid(scales, zeros, 4)
        if importance is None:
            return grid
        fine = grid.per_column(weight.shape[1])
        errors = (fine.values(fine.codes(weight)) - weight).square_().mul_(importance)
        sums = errors.unflatten(1, (-1, group)).sum(2)
        is_better = sums < least
        if best is not None:
            scales = torch.where(is_better, scales, best.scales)
            if zeros is not None and best.zeros is not None:
                zeros = torch.where(is_better, zeros, best.zeros)
        best, least = Grid(scales, zeros, 4), torch.minimum(sums, least)
    assert best is not None
    return best


def on_grid(codes: torch.Tensor, grid: Grid, dtype: torch.dtype) -> QuantizedMatrix:
    """Makes a QuantizedMatrix of a grid's float32 codes. The grid's scales must be exact in `dtype`."""
    zeros = None if grid.zeros is None else grid.zeros.to(torch.int8)
    return QuantizedMatrix(codes.to(torch.int8), grid.scales.to(dtype), zeros)


def round_rows(weight: torch.Tensor, stored: torch.dtype, dtype: torch.dtype) -> QuantizedMatrix:
    """Quantises each row to eight bits with its own scale.

    Args:
        weight: float32 [out_features, in_features].
        stored: type of the codes, int8 or FP8.
        dtype: type of the scales.
    """
    most = 127.0 if stored == torch.int8 else torch.finfo(FP8).max
    scales = (weight.abs().amax(1, keepdim=True) / most).to(dtype)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (weight / scales.float()).clamp_(-most, most)
    return QuantizedMatrix((codes.round_() if stored == torch.int8 else codes).to(stored), scales)
