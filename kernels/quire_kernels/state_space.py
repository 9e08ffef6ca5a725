"""StateSpace: the weights of a Mamba-2 layer that `ops.mamba2` reads."""

from __future__ import annotations

from typing import NamedTuple

import torch


class StateSpace(NamedTuple):
    """Weights and constants of a Mamba-2 layer besides projections and convolution. Tensors are float32 and
    contiguous."""

    log_decay: torch.Tensor
    """[num_heads]: logarithm of each head's rate of decay (A_log in checkpoints)."""
    step_bias: torch.Tensor
    """[num_heads], added to the steps before softplus (dt_bias)."""
    skip: torch.Tensor
    """[num_heads]: factor with which a head's input is added to its output (D)."""
    norm: torch.Tensor
    """[num_heads * head_dim]: scale of the gated norm."""
    eps: float
    """Number added to the mean square in the gated norm."""
    step_limit: tuple[float, float]
    """Least and greatest step after softplus; the greatest may be infinite."""
