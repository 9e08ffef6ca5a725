"""Rounding: matrices as small numbers with scales, and the tensors that compressed-tensors has for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
_SHRINKS = tuple(1 - step / 20 for step in range(9))
"""Parts of a group's range that are tried: most numbers gain where the largest ones are cut off."""


@dataclass(frozen=True)
class Grid:
    """The numbers that a matrix's weights may become: (code - zero) * scale."""

    scales: torch.Tensor
    """float32 [out_features, groups], exact in the type that is stored."""
    zeros: torch.Tensor | None
    """float32 whole numbers of the same shape; None: 0."""
    bits: int

    def codes(self, weight: torch.Tensor, columns: slice | torch.Tensor | int = slice(None)) -> torch.Tensor:
        """float32 whole numbers, the nearest to weight [out_features, columns of the matrix, or one]."""
        scales, zeros = self._columns_of(columns)
        most = 2 ** (self.bits - 1)
        return (weight / scales + zeros).round_().clamp_(-most, most - 1)

    def values(self, codes: torch.Tensor, columns: slice | torch.Tensor | int = slice(None)) -> torch.Tensor:
        """Weights that the codes stand for, float32; arguments and shape as in `codes`."""
        scales, zeros = self._columns_of(columns)
        return (codes - zeros) * scales

    def per_column(self, in_features: int) -> Grid:
        """The same one with a group for each column."""

        def spread(groups: torch.Tensor) -> torch.Tensor:
            return groups.repeat_interleave(in_features // groups.shape[1], 1)

        return Grid(spread(self.scales), None if self.zeros is None else spread(self.zeros), self.bits)

    def _columns_of(self, columns: slice | torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor | int]:
        return self.scales[:, columns], 0 if self.zeros is None else self.zeros[:, columns]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix of small numbers."""

    codes: torch.Tensor
    """int8 or FP8 [out_features, in_features]."""
    scales: torch.Tensor
    """[out_features, groups], of the checkpoint's type."""
    zeros: torch.Tensor | None = None
    """int8 of the same shape."""

    def dequantize(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        groups = self.codes.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            groups = groups - self.zeros.unsqueeze(2)
        return (groups * self.scales.float().unsqueeze(2)).flatten(1)

    def stored(self, layout: str) -> Iterator[tuple[str, torch.Tensor]]:
        """compressed-tensors' tensors in one of its layouts, by the ends of their names."""
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
    """int8 [rows, n] in [-8, 7] to int32 [rows, ceil(n / 8)]: code + 8, the lowest four bits first."""
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
    """A grid of four bits for each `group` inputs of each output.

    Args:
        weight: float32 [out_features, in_features].
        group: divides in_features.
        dtype: of the stored scales.
        is_symmetric: whether zero is the code 0.
        importance: float32 [in_features], what a squared error of each input's weights counts: of the ranges
            that are tried the one with the least sum is taken. None: the whole range.
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
    """The matrix of a grid's codes, which are float32; its scales are exact in `dtype`."""
    zeros = None if grid.zeros is None else grid.zeros.to(torch.int8)
    return QuantizedMatrix(codes.to(torch.int8), grid.scales.to(dtype), zeros)


def round_rows(weight: torch.Tensor, stored: torch.dtype, dtype: torch.dtype) -> QuantizedMatrix:
    """Each row with a scale of its own, in eight bits.

    Args:
        weight: float32 [out_features, in_features].
        stored: int8 or FP8.
        dtype: of the scales.
    """
    most = 127.0 if stored == torch.int8 else torch.finfo(FP8).max
    scales = (weight.abs().amax(1, keepdim=True) / most).to(dtype)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (weight / scales.float()).clamp_(-most, most)
    return QuantizedMatrix((codes.round_() if stored == torch.int8 else codes).to(stored), scales)
