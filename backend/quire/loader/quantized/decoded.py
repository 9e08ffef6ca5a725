"""Decoded: the weights of one part of a layer, decoded from the checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.weights import QuantizedRows

Matrix: TypeAlias = "torch.Tensor | GroupedWeight | QuantizedRows"
"""Matrix [out_features, in_features]. A tensor is float32 when it is decoded."""


@dataclass(frozen=True)
class Decoded:
    """A decoded matrix. Its columns may be in another order than the inputs."""

    matrix: Matrix
    order: torch.Tensor | None = None
    """int64 [in_features]: index of the input for each column; None: columns are in the inputs' order."""

    def dequantize(self) -> torch.Tensor:
        """Returns [out_features, in_features] with columns in the inputs' order: float32, or in the type of
        `matrix` if that is a tensor."""
        matrix = self.matrix if isinstance(self.matrix, torch.Tensor) else self.matrix.dequantize()
        return matrix if self.order is None else matrix[:, self.order.argsort()]


def grouped(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    bits: int,
    group: int | None,
    *,
    table: tuple[int, ...] | None = None,
    row_scales: torch.Tensor | None = None,
) -> Matrix:
    """Makes a matrix whose weights are (code - zero) * scale, with `table` and `row_scales` as in
    GroupedWeight.

    Args:
        codes: uint8 [out_features, in_features].
        scales: float32 [out_features, groups].
        zeros: int32 of the scales' shape, or one number for all groups.
        bits: bits of a code.
        group: number of inputs that share a scale, fewer in the last group; None: all inputs.
        table: values that the codes stand for; see GroupedWeight.
        row_scales: see GroupedWeight.

    Returns:
        A GroupedWeight. If that does not support this group size and in_features, the dequantised matrix,
        float32 [out_features, in_features].
    """
    num_columns = codes.shape[1]
    group = min(group or num_columns, num_columns)
    if isinstance(zeros, torch.Tensor) and (zeros == zeros[0, 0]).all():
        zeros = int(zeros[0, 0])
    minimums = None
    if not isinstance(zeros, int) or zeros > 128:
        # Subtracted after the product, which float32 computes exactly with 16-bit scales.
        minimums, zeros = scales * zeros, 0
    if num_columns % max(32, group) == 0 and (group == 16 or group % 32 == 0):
        return GroupedWeight(
            codes=codes,
            scales=scales if minimums is not None else _narrow(scales),
            bits=bits,
            group=group,
            zero=zeros,
            table=table,
            minimums=minimums,
            row_scales=row_scales,
        )
    values = codes.float() if table is None else torch.tensor(table).float()[codes.long()]
    wide = (values - zeros) * _by_column(scales, group, num_columns)
    if minimums is not None:
        wide -= _by_column(minimums, group, num_columns)
    return wide if row_scales is None else wide * row_scales.unsqueeze(1)


def in_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | int,
    bits: int,
    group: int | None,
    g_idx: torch.Tensor,
) -> Decoded:
    """Decodes a matrix as `grouped` does. Here g_idx, int32 [in_features], gives the group of each input.

    Columns are sorted by group, so that each group's columns are adjacent, as the kernels need. The inputs
    must then be reordered too, which costs little compared with the product.

    Raises:
        ValueError: a group has not `group` inputs (the last one may have fewer), or g_idx names a group that
            does not exist.
    """
    columns = torch.arange(codes.shape[1])
    sorted_groups, order = torch.sort(g_idx.long(), stable=True)
    if not torch.equal(sorted_groups, columns // (group or len(columns))):
        raise ValueError(f"g_idx does not divide the inputs among {scales.shape[1]} groups of one size")
    if torch.equal(order, columns):
        return Decoded(grouped(codes, scales, zeros, bits, group))
    return Decoded(grouped(codes[:, order], scales, zeros, bits, group), order)


def _by_column(values: torch.Tensor, group: int, num_columns: int) -> torch.Tensor:
    return values.repeat_interleave(group, 1)[:, :num_columns]


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """Returns the scales in a 16-bit type if that changes none of them; otherwise as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).float(), scales):
            return scales.to(dtype)
    return scales
