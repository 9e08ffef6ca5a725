"""A matrix product for each head, for any device and floating type."""

from __future__ import annotations

import torch

from quire_kernels.registry import implementation


@implementation("head_linear", "reference")
class TorchHeads:
    """See `ops.pack_heads`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See PackedHeads."""
        out.copy_(torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1))
