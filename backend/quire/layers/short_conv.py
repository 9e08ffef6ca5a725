"""Gated short convolution: a layer whose past is the last few inputs of its convolution. Most layers of LFM2
have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.states import StatesConfig
from quire_kernels import ops


@dataclass(frozen=True, kw_only=True)
class ConvShape:
    """Sizes of a gated short convolution, and whether it has biases."""

    inner_size: int
    """Number of channels, which is the hidden size."""
    num_taps: int
    """Tokens that the convolution covers, the current one included."""
    has_bias: bool
    """Whether the convolution and both projections have biases."""

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a layer's state: the last inputs of the convolution."""
        return (self.num_taps - 1) * self.inner_size * dtype.itemsize

    def num_weights(self, hidden_size: int) -> int:
        """Returns the number of weights in the layer's input and output projections."""
        return 4 * hidden_size * self.inner_size


class Convolution(nn.Module):
    """Weights of a causal convolution over the tokens, with taps of its own for each channel, and with a bias
    if asked for."""

    def __init__(self, num_channels: int, num_taps: int, dtype: torch.dtype, *, has_bias: bool) -> None:
        super().__init__()
        # Shape of checkpoints, [num_channels, 1, num_taps], over memory in the kernels' order.
        taps = torch.empty((num_taps, num_channels), dtype=dtype)
        self.weight = nn.Parameter(taps.T.unsqueeze(1), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = nn.Parameter(torch.empty(num_channels, dtype=dtype), requires_grad=False)

    @property
    def taps(self) -> torch.Tensor:
        """Taps of the convolution, [num_taps, num_channels], contiguous."""
        return self.weight[:, 0].T


class ShortConv(nn.Module):
    """Gated short convolution: out(c * conv(b * x)), where b, c and x are parts of one projection of the
    input."""

    def __init__(self, config: StatesConfig) -> None:
        super().__init__()
        shape = config.state
        assert isinstance(shape, ConvShape)
        self.shape, size, inner = shape, config.hidden_size, shape.inner_size
        self.inputs = Linear(config, size, {"in_proj": 3 * inner}, parallel="column", bias=shape.has_bias)
        self.conv = Convolution(inner, shape.num_taps, config.dtype, has_bias=shape.has_bias)
        self.out = Linear(config, inner, {"out_proj": size}, parallel="row", bias=shape.has_bias)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape, and updates the sequences' states with their new
        tokens."""
        shape, memory = self.shape, context.kv_layer
        assert isinstance(memory, torch.Tensor)
        states = memory[:, : shape.state_bytes(x.dtype)].view(x.dtype)
        b, c, inputs = self.inputs(x, context.adapters).chunk(3, 1)
        mixed = ops.causal_conv(
            b * inputs,
            self.conv.taps,
            states.unflatten(1, (shape.num_taps - 1, shape.inner_size)),
            context.meta,
            bias=self.conv.bias,
            activation=None,
        )
        out: torch.Tensor = self.out(c * mixed, context.adapters)
        return out
