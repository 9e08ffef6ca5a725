"""RMSNorm."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire_kernels import ops


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale, over the last dimension.

    A float32 scale over a narrower x multiplies before the result is rounded to x's type (as Gemma does it),
    one of x's type after that (as Llama does it).
    """

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=config.norm_dtype), requires_grad=False)
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised x, in its shape and type."""
        if x.dtype == self.weight.dtype:
            return ops.rms_norm(x, self.weight, self.eps)
        return ops.rms_norm(x.float(), self.weight, self.eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of x and the residual stream, which is None before the first layer."""
        if residual is None:
            return self(x), x
        if x.dtype == self.weight.dtype:
            return ops.add_rms_norm(x, residual, self.weight, self.eps)
        total = x + residual
        return self.forward(total), total


class UnitNorm(RMSNorm):
    """The same without a learned scale: a checkpoint has nothing for it."""

    def __init__(self, config: DecoderConfig, size: int) -> None:
        super().__init__(config, size)
        del self.weight
        self.register_buffer("weight", torch.ones(size, dtype=config.norm_dtype), persistent=False)
