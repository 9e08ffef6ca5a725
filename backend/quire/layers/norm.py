"""Root-mean-square norms: RMSNorm with a learned scale, UnitNorm without one."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire_kernels import ops


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, with a learned scale.

    If the scale is float32 and x narrower, their product is rounded to x's type (as in Gemma). If the scale
    has x's type, the normalised x is rounded to it before the scale multiplies it (as in Llama).
    """

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.norm_dtype), requires_grad=False)
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, in its shape and type."""
        if x.dtype == self.weight.dtype:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.rms_norm(x.float(), self.weight, self.eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (normalised sum, sum) of x and the residual stream. A residual of None counts as zero."""
        if residual is None:
            return self(x), x
        if x.dtype == self.weight.dtype:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        total = x + residual
        return self.forward(total), total


class UnitNorm(RMSNorm):
    """RMSNorm without a learned scale. Checkpoints store nothing for it."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__(config, size)
        del self.weight
        self.register_buffer("weight", torch.ones(size, dtype=config.norm_dtype), persistent=False)
