"""Mamba-2: a selective state space whose past is a state of fixed size (Dao and Gu, 2024, arXiv
2405.21060)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from quire.layers.context import LayerContext
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear
from quire.layers.short_conv import Convolution
from quire.layers.states import StatesConfig
from quire_kernels import ops
from quire_kernels.state_space import StateSpace


@dataclass(frozen=True, kw_only=True)
class MambaShape:
    """Sizes and switches of a Mamba-2 layer."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Number of groups of heads; the heads of a group share the inputs `b` and `c`."""
    state_dim: int
    """Numbers in the state of one dimension of a head."""
    num_taps: int
    """Tokens that the convolution covers, the current one included."""
    conv_bias: bool
    proj_bias: bool
    step_limit: tuple[float, float]
    """See `StateSpace`."""

    def check(self, hf: HFConfig, heads: str, groups: str, taps: str) -> None:
        """Raises CheckpointError if `num_groups` does not divide `num_heads`, or `num_taps` is less than 2.

        Args:
            hf: config.json, for the error.
            heads: key of `num_heads` in config.json.
            groups: key of `num_groups`.
            taps: key of `num_taps`.
        """
        if self.num_heads % self.num_groups:
            raise hf.error(f"{heads}={self.num_heads} is no multiple of {groups}={self.num_groups}")
        if self.num_taps < 2:
            raise hf.error(f"{taps} must be at least 2, got {self.num_taps}")

    @property
    def inner_size(self) -> int:
        """Size of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Size of `b`, and of `c`, of all groups together."""
        return self.num_groups * self.state_dim

    @property
    def num_channels(self) -> int:
        """Number of the convolution's channels: the heads' inputs, `b` and `c`."""
        return self.inner_size + 2 * self.group_size

    @property
    def space_bytes(self) -> int:
        """Bytes of all heads' states, which are always float32."""
        return 4 * self.inner_size * self.state_dim

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a layer's state: the heads' states, then the last inputs of the
        convolution."""
        return self.space_bytes + (self.num_taps - 1) * self.num_channels * dtype.itemsize

    def num_weights(self, hidden_size: int) -> int:
        """Returns the number of weights in the layer's input and output projections."""
        return hidden_size * (2 * self.inner_size + self.num_channels + self.num_heads)


def step_limit(hf: HFConfig) -> tuple[float, float]:
    """Returns `time_step_limit`, by default (0, infinity). Raises CheckpointError unless it is a pair of
    numbers of at least 0, the second no less than the first."""
    limit = hf.get("time_step_limit", (0.0, math.inf))
    is_pair = isinstance(limit, list | tuple) and len(limit) == 2
    # transformers writes infinity as this object, and others as the number that Python's JSON has.
    limit = [math.inf if one == {"__float__": "Infinity"} else one for one in limit] if is_pair else limit
    if not is_pair or any(type(one) not in (int, float) for one in limit) or not 0 <= limit[0] <= limit[1]:
        raise hf.error(f"time_step_limit must be two numbers in ascending order, got {limit!r:.80}")
    return float(limit[0]), float(limit[1])


class Scale(nn.Module):
    """Scale of a norm, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


class Mamba2(nn.Module):
    """Mamba-2 layer: an input projection, a short convolution, the state space with its gated norm, and the
    output projection."""

    def __init__(self, config: StatesConfig) -> None:
        super().__init__()
        shape = config.state
        assert isinstance(shape, MambaShape)
        self.shape, self.eps, size = shape, config.rms_norm_eps, config.hidden_size
        parts = {"in_proj": shape.inner_size + shape.num_channels + shape.num_heads}
        self.inputs = Linear(config, size, parts, parallel="column", bias=shape.proj_bias)
        self.conv1d = Convolution(shape.num_channels, shape.num_taps, config.dtype, has_bias=shape.conv_bias)
        self.A_log, self.dt_bias, self.D = (
            nn.Parameter(torch.empty(shape.num_heads, dtype=torch.float32), requires_grad=False)
            for _ in range(3)
        )
        self.norm = Scale(shape.inner_size)
        self.out = Linear(config, shape.inner_size, {"out_proj": size}, parallel="row", bias=shape.proj_bias)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape, and updates the sequences' states with their new
        tokens."""
        shape, meta, memory = self.shape, context.meta, context.kv_layer
        assert isinstance(memory, torch.Tensor)
        states = memory[:, : shape.space_bytes].view(torch.float32)
        inputs = memory[:, shape.space_bytes : shape.state_bytes(x.dtype)].view(x.dtype)
        gate, mixed, step = self.inputs(x, context.adapters).split(
            [shape.inner_size, shape.num_channels, shape.num_heads], 1
        )
        mixed = ops.causal_conv(
            mixed,
            self.conv1d.taps,
            inputs.unflatten(1, (shape.num_taps - 1, shape.num_channels)),
            meta,
            bias=self.conv1d.bias,
        )
        values, b, c = mixed.split([shape.inner_size, shape.group_size, shape.group_size], 1)
        mixed = ops.mamba2(
            values.unflatten(1, (shape.num_heads, shape.head_dim)),
            b.unflatten(1, (shape.num_groups, shape.state_dim)),
            c.unflatten(1, (shape.num_groups, shape.state_dim)),
            step,
            gate,
            StateSpace(self.A_log, self.dt_bias, self.D, self.norm.weight, self.eps, shape.step_limit),
            states.unflatten(1, (shape.num_heads, shape.state_dim, shape.head_dim)),
            meta,
        )
        out: torch.Tensor = self.out(mixed, context.adapters)
        return out
