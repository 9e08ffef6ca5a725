"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.models.config import DecoderConfig

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of the operators' activations by those of config.json."""


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        bias, dtype = config.mlp_bias, config.dtype
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up = Linear(
            size,
            gate_up,
            bias=bias,
            dtype=dtype,
            device=device,
            activation=ACTIVATIONS[config.hidden_act],
        )
        self.down = Linear(inner, [("down_proj", size)], bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        out: torch.Tensor = self.down(self.gate_up(x))
        return out

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, memory it fills)."""
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)
