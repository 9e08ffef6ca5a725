"""Gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.models.config import DecoderConfig
from quire_kernels import ops

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ops.silu_mul,
    "swish": ops.silu_mul,
    "gelu": ops.gelu_mul,
    "gelu_new": lambda gate_up: ops.gelu_mul(gate_up, "tanh"),
    "gelu_pytorch_tanh": lambda gate_up: ops.gelu_mul(gate_up, "tanh"),
}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        bias, dtype = config.mlp_bias, config.dtype
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up = Linear(size, gate_up, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, [("down_proj", size)], bias=bias, dtype=dtype, device=device)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        out: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return out

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, memory it fills)."""
        yield from self.gate_up.weights(prefix)
        yield from self.down.weights(prefix)
