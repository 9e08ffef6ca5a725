"""Gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.models.config import DecoderConfig


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(
            config,
            size,
            {"gate_proj": inner, "up_proj": inner},
            parallel="column",
            bias=bias,
            activation=config.activation,
        )
        self.down = Linear(config, inner, {"down_proj": size}, parallel="row", bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        out: torch.Tensor = self.down(self.gate_up(x))
        return out
