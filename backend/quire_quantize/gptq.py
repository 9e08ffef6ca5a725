"""GPTQ: rounds columns one after the other, and adjusts the columns that follow to make up for the error.

Frantar et al., 2023 (arXiv 2210.17323). Columns with the largest inputs are rounded first. The groups' scales
are chosen before that, so a checkpoint need not store this order.
"""

from __future__ import annotations

import torch

from quire_quantize.rounding import Grid

BLOCK = 128
"""Number of columns in a block. Their errors are applied together to all columns after the block: one large
product instead of many small ones."""
_DAMPING = 0.01
"""First fraction of the gram matrix's mean diagonal that is added to its diagonal. If the factorisation
fails, ten times as much is tried, and so on."""


def gptq_codes(weight: torch.Tensor, gram: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Chooses codes on a grid with which the layer's outputs are close to those of the unrounded weights.
    Returns float32 whole numbers of weight's shape.

    Args:
        weight: float32 [out_features, in_features].
        gram: float32 [in_features, in_features], the mean of x x^T over inputs x.
        grid: scales and zeros of the codes; see `group_grid`.
    """
    order = torch.argsort(gram.diagonal(), descending=True)
    upper = _inverse_factor(gram[order][:, order])
    weight, fine = weight[:, order], grid.per_column(weight.shape[1])
    codes = torch.empty_like(weight)
    num_columns = weight.shape[1]
    for start in range(0, num_columns, BLOCK):
        end = min(start + BLOCK, num_columns)
        block = weight[:, start:end]
        errors = torch.empty_like(block)
        for column in range(start, end):
            own, place = order[column], column - start
            found = fine.codes(block[:, place], int(own))
            error = (block[:, place] - fine.values(found, int(own))) / upper[column, column]
            block[:, place:] -= torch.outer(error, upper[column, column:end])
            codes[:, own], errors[:, place] = found, error
        weight[:, end:] -= errors @ upper[start:end, end:]
    return codes


def _inverse_factor(gram: torch.Tensor) -> torch.Tensor:
    """Returns the upper triangular U with U^T U = gram^-1, after damping gram."""
    size = gram.diagonal().mean().clamp(min=1e-12)
    damping = _DAMPING
    while True:
        damped = gram + torch.eye(len(gram)) * (size * damping)
        lower, info = torch.linalg.cholesky_ex(damped)
        if not info:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not info:
                return upper
        assert damping < 1e6, "a gram matrix is never negative"
        damping *= 10
