"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import AdapterStep
from quire.layers.linear import Linear


class GatedMLP(nn.Module):
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)), or a variant of it for gpt-oss. Gate and
    up are computed in one product.

    Args:
        config: the model's configuration.
        inner: inner size.
        names: names of gate, up and down in the checkpoint. With `config.fused_gate_up`, only the last is
            used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        inner: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.mlp_bias
        gate, up, down = names
        parts = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {gate: inner, up: inner}
        self.gate_up = Linear(config, size, parts, parallel="column", bias=bias, activation=config.activation)
        self.down = Linear(config, inner, {down: size}, parallel="row", bias=bias)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape."""
        out: torch.Tensor = self.down(self.gate_up(x, adapters), adapters)
        return out


class SquaredReLU(nn.Module):
    """Feed-forward layer without a gate: down(relu(up(x)) ** 2) (So et al., 2021, arXiv 2109.08668).

    Args:
        config: the model's configuration.
        inner: inner size.
        size: size of inputs and outputs.
    """

    def __init__(self, config: DecoderConfig, inner: int, size: int) -> None:
        super().__init__()
        bias = config.mlp_bias
        self.up = Linear(config, size, {"up_proj": inner}, parallel="column", bias=bias)
        self.down = Linear(config, inner, {"down_proj": size}, parallel="row", bias=bias)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """Maps [num_tokens, size] to the same shape."""
        out: torch.Tensor = self.down(self.up(x, adapters).relu().square(), adapters)
        return out
