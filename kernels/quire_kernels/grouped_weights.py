"""GroupedWeight: a matrix of small integers, a scale for every few neighbouring inputs, as files have it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR_GROUP = 256
"""Inputs that share a factor, where scales are integers themselves (GGUF's K-quants)."""
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """weight = scale * (value - zero) - minimum, where value is the code, or what `table` has for it.

    This form is on the way from a file to what computes (`ops.pack_linear`): codes take a byte each here.
    Integer scales are multiplied by their factor in float32, which is exact.
    """

    codes: torch.Tensor
    """uint8 [out_features, in_features], below 2 ** bits; or, of four bits, [out_features, in_features / 32,
    16]: of 32 inputs the first half in the low halves of bytes."""
    scales: torch.Tensor
    """[out_features, in_features / group], of SCALE_TYPES."""
    bits: int
    """2, 3, 4, 5, 6 or 8."""
    group: int
    """Inputs that share a scale: 16, or a multiple of 32."""
    zero: int = 0
    """0 to 128."""
    table: tuple[int, ...] | None = None
    """Of four bits: 16 integers in [-128, 127]."""
    minimums: torch.Tensor | None = None
    """As scales; those that are integers are not negative."""
    factors: torch.Tensor | None = None
    """float16 [out_features, in_features / FACTOR_GROUP] with integer scales, else None."""
    minimum_factors: torch.Tensor | None = None
    """The same of integer minimums."""
    row_scales: torch.Tensor | None = None
    """float32 [out_features]: what a row is multiplied by in the end; None: by nothing."""

    def __post_init__(self) -> None:
        num_rows, num_columns = self.shape
        groups = (num_rows, num_columns // self.group)
        assert self.codes.dtype == torch.uint8 and num_columns % max(self.group, 32) == 0, self.codes.shape
        assert self.bits in (2, 3, 4, 5, 6, 8) and (self.group == 16 or self.group % 32 == 0), self.group
        assert self.scales.shape == groups and self.scales.dtype in SCALE_TYPES, self.scales.shape
        assert self.table is None or (len(self.table) == 16 and self.bits == 4)
        is_integer = self.scales.dtype == torch.int8
        assert (self.factors is not None) == is_integer
        assert (self.minimum_factors is not None) == (is_integer and self.minimums is not None)
        assert self.minimums is None or (
            self.minimums.shape == groups and self.minimums.dtype == self.scales.dtype
        )

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        num_rows, *others = self.codes.shape
        return torch.Size((num_rows, 2 * math.prod(others) if self.is_halved else others[0]))

    @property
    def is_halved(self) -> bool:
        """Whether a byte of the codes holds two."""
        return self.codes.dim() == 3

    @property
    def nbytes(self) -> int:
        """Bytes of the codes in their bits, and of all else."""
        others = (self.scales, self.minimums, self.factors, self.minimum_factors, self.row_scales)
        return math.prod(self.shape) * self.bits // 8 + sum(one.nbytes for one in others if one is not None)

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.codes.device

    def rows(self, which: slice | torch.Tensor) -> GroupedWeight:
        """Some of the rows, in an order."""

        def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[which]

        return GroupedWeight(
            codes=self.codes[which],
            scales=self.scales[which],
            bits=self.bits,
            group=self.group,
            zero=self.zero,
            table=self.table,
            minimums=part(self.minimums),
            factors=part(self.factors),
            minimum_factors=part(self.minimum_factors),
            row_scales=part(self.row_scales),
        )

    def dequantize(self) -> torch.Tensor:
        """float32 [out_features, in_features]: what the weights mean."""
        codes = self.codes
        if self.is_halved:
            codes = torch.cat((codes & 15, codes >> 4), 2).flatten(1)
        if self.table is None:
            values = codes.float() - self.zero
        else:
            values = torch.tensor(self.table).float()[codes.long()] - self.zero
        groups = values.unflatten(1, (-1, self.group))
        groups = groups * _wide(self.scales, self.factors).unsqueeze(2)
        if self.minimums is not None:
            groups = groups - _wide(self.minimums, self.minimum_factors).unsqueeze(2)
        rows = groups.flatten(1)
        return rows if self.row_scales is None else rows * self.row_scales.unsqueeze(1)


def _wide(scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    wide = scales.float()
    if factors is None:
        return wide
    return wide * factors.float().repeat_interleave(wide.shape[1] // factors.shape[1], 1)
