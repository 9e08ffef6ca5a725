"""GroupedWeight: a matrix of integer codes. In each row, each group of neighbouring inputs
has a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the 16 codes of four-bit floating point (two exponent bits, one mantissa bit), times two."""


@dataclass(frozen=True, kw_only=True)
class GroupedWeight:
    """Matrix of weights (scale * (value - zero) - minimum) * row_scale. The value is the code, or the entry
    of `table` for the code.

    `ops.pack_linear` packs it. Each code takes one byte here.
    """

    codes: torch.Tensor
    """uint8 [out_features, in_features], less than 2 ** bits; in_features is a multiple of `group` and 32."""
    scales: torch.Tensor
    """[out_features, in_features / group], of a type in SCALE_TYPES."""
    bits: int
    """Bits of a code: 2, 3, 4, 5, 6 or 8."""
    group: int
    """Inputs that share a scale: 16, or a multiple of 32."""
    zero: int = 0
    """Number subtracted from each value, 0 to 128."""
    table: tuple[int, ...] | None = None
    """16 integers in [-128, 127], the values of four-bit codes; None: a code is its own value."""
    minimums: torch.Tensor | None = None
    """Minimum of each group, which is subtracted, with the shape and type of `scales`; None: there is
    none."""
    row_scales: torch.Tensor | None = None
    """float32 [out_features]: factor of each row, applied last; None: there is none."""

    def __post_init__(self) -> None:
        num_rows, num_columns = self.shape
        groups = (num_rows, num_columns // self.group)
        assert self.codes.dtype == torch.uint8 and num_columns % max(self.group, 32) == 0, self.codes.shape
        assert self.bits in (2, 3, 4, 5, 6, 8) and (self.group == 16 or self.group % 32 == 0), self.group
        assert self.scales.shape == groups and self.scales.dtype in SCALE_TYPES, self.scales.shape
        assert self.table is None or (len(self.table) == 16 and self.bits == 4)
        assert self.minimums is None or (
            self.minimums.shape == groups and self.minimums.dtype == self.scales.dtype
        )

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, if the codes were packed bit by bit."""
        others = (self.scales, self.minimums, self.row_scales)
        return math.prod(self.shape) * self.bits // 8 + sum(one.nbytes for one in others if one is not None)

    @property
    def device(self) -> torch.device:
        """Device of all tensors of the weight."""
        return self.codes.device

    def rows(self, which: slice | torch.Tensor) -> GroupedWeight:
        """Returns a matrix of some of the rows, in the given order."""

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
            row_scales=part(self.row_scales),
        )

    def dequantize(self) -> torch.Tensor:
        """Returns the weights, float32 [out_features, in_features]."""
        if self.table is None:
            values = self.codes.float() - self.zero
        else:
            values = torch.tensor(self.table).float()[self.codes.long()] - self.zero
        groups = values.unflatten(1, (-1, self.group)) * self.scales.float().unsqueeze(2)
        if self.minimums is not None:
            groups = groups - self.minimums.float().unsqueeze(2)
        rows = groups.flatten(1)
        return rows if self.row_scales is None else rows * self.row_scales.unsqueeze(1)
