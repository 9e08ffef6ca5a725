"""Low-rank adapters, for any device and floating type."""

from __future__ import annotations

import torch

from quire_kernels.registry import implementation


@implementation("add_lora", "reference")
def add_lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ops.add_lora`. It computes all rows for each slot in turn, so the host need not read `slots`."""
    wide = x.float()
    for slot in range(a.shape[0]):
        added = y.float() + wide @ a[slot].float().T @ b[slot].float().T
        y.copy_(torch.where((slots == slot).unsqueeze(1), added.to(y.dtype), y))
