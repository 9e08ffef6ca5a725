"""Gated DeltaNet: linear attention whose past is a state of fixed size (arXiv 2412.06464). Most layers of
Qwen3-Next have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.layers.context import AdapterStep, LayerContext
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.short_conv import Convolution
from quire.layers.states import MAX_TAPS, StatesConfig
from quire_kernels import ops


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of a gated DeltaNet layer, and the form of its projections in checkpoints."""

    num_key_heads: int
    num_heads: int
    """Number of value heads, each with a state; a multiple of `num_key_heads`."""
    key_dim: int
    value_dim: int
    num_taps: int
    """Tokens that the convolution covers, the current one included."""
    interleaved: bool
    """Whether a checkpoint stores the input projections as `in_proj_qkvz` and `in_proj_ba`, interleaved by
    key head. If not, it stores `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`."""

    @classmethod
    def from_hf(cls, hf: HFConfig, *, interleaved: bool) -> DeltaShape:
        """Reads the keys `linear_*`; raises CheckpointError if a value is wrong."""
        shape = cls(
            num_key_heads=hf.require_int("linear_num_key_heads", 16, most=MAX_HEADS),
            num_heads=hf.require_int("linear_num_value_heads", 32, most=MAX_HEADS),
            key_dim=hf.require_int("linear_key_head_dim", 128, most=MAX_HEADS),
            value_dim=hf.require_int("linear_value_head_dim", 128, most=MAX_HEADS),
            num_taps=hf.require_int("linear_conv_kernel_dim", 4, most=MAX_TAPS),
            interleaved=interleaved,
        )
        if shape.num_heads % shape.num_key_heads:
            raise hf.error(
                f"linear_num_value_heads={shape.num_heads} is no multiple of "
                f"linear_num_key_heads={shape.num_key_heads}"
            )
        if shape.num_taps < 2:
            raise hf.error(f"linear_conv_kernel_dim must be at least 2, got {shape.num_taps}")
        return shape

    @property
    def key_size(self) -> int:
        """Size of all heads' keys together, which is also the size of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def inner_size(self) -> int:
        """Size of all heads' values together."""
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of the convolution's channels: queries, keys and values."""
        return 2 * self.key_size + self.inner_size

    @property
    def rule_bytes(self) -> int:
        """Bytes of all heads' states, which are always float32."""
        return 4 * self.num_heads * self.key_dim * self.value_dim

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a layer's state: the heads' states, then the last inputs of the
        convolution."""
        return self.rule_bytes + (self.num_taps - 1) * self.num_channels * dtype.itemsize

    def num_weights(self, hidden_size: int) -> int:
        """Returns the number of weights in the layer's input and output projections."""
        return hidden_size * (self.num_channels + 2 * self.inner_size + 2 * self.num_heads)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(StatesConfig):
    """Configuration of a decoder with gated DeltaNet in some layers and gated attention in the others."""

    state: DeltaShape

    def layer_weights(self, num_experts: int) -> int:
        """See DecoderConfig."""
        gates = (self.num_layers - len(self.state_layers)) * self.hidden_size * self.num_heads * self.head_dim
        return super().layer_weights(num_experts) + gates


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer: input projections, a short convolution, the gated delta rule, a norm per head, an
    output gate, and the output projection.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        shape = self.shape = config.state
        parts, gates = (
            {"in_proj_qkv": shape.num_channels, "in_proj_z": shape.inner_size},
            {"in_proj_b": shape.num_heads, "in_proj_a": shape.num_heads},
        )
        if shape.interleaved:
            parts, gates = {"in_proj_qkvz": sum(parts.values())}, {"in_proj_ba": sum(gates.values())}
        size = config.hidden_size
        self.inputs = Linear(config, size, parts, parallel="column", bias=False)
        # Apart: files with quantised weights leave these as they are.
        self.gates = Linear(config, size, gates, parallel="column", bias=False)
        self.conv1d = Convolution(shape.num_channels, shape.num_taps, config.dtype, has_bias=False)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(shape.num_heads, dtype=torch.float32), requires_grad=False)
            for _ in range(2)
        )
        self.norm = RMSNorm(config, shape.value_dim)
        self.out = Linear(config, shape.inner_size, {"out_proj": size}, parallel="row", bias=False)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape, and updates the sequences' states with their new
        tokens."""
        shape, meta, memory = self.shape, context.meta, context.kv_layer
        assert isinstance(memory, torch.Tensor)
        end = shape.state_bytes(x.dtype)
        states, inputs = memory[:, : shape.rule_bytes], memory[:, shape.rule_bytes : end]
        mixed, z, b, a = self._project(x, context.adapters)
        mixed = ops.causal_conv(
            mixed,
            self.conv1d.taps,
            inputs.view(x.dtype).unflatten(1, (shape.num_taps - 1, shape.num_channels)),
            meta,
        )
        query, key, value = mixed.split([shape.key_size, shape.key_size, shape.inner_size], 1)
        attended = ops.gated_delta_rule(
            query.unflatten(1, (shape.num_key_heads, shape.key_dim)),
            key.unflatten(1, (shape.num_key_heads, shape.key_dim)),
            value.unflatten(1, (shape.num_heads, shape.value_dim)),
            a,
            b,
            self.A_log,
            self.dt_bias,
            states.view(torch.float32).unflatten(1, (shape.num_heads, shape.key_dim, shape.value_dim)),
            meta,
        )
        gated = ops.gated_norm(attended, self.norm.weight, self.norm.eps, z)
        out: torch.Tensor = self.out(gated, context.adapters)
        return out

    def _project(self, x: torch.Tensor, adapters: AdapterStep | None) -> tuple[torch.Tensor, ...]:
        """Returns four tensors: the queries, keys and values together; the output gate; and the inputs `b`
        and `a` of the gated delta rule."""
        shape, y, gates = self.shape, self.inputs(x, adapters), self.gates(x, adapters)
        if not shape.interleaved:
            return (*y.split([shape.num_channels, shape.inner_size], 1), *gates.chunk(2, 1))
        shared = shape.inner_size // shape.num_key_heads
        query, key, value, z = y.unflatten(1, (shape.num_key_heads, -1)).split(
            [shape.key_dim, shape.key_dim, shared, shared], 2
        )
        b, a = gates.unflatten(1, (shape.num_key_heads, -1)).chunk(2, 2)
        mixed = y.new_empty((len(y), shape.num_channels))
        places = mixed.split([shape.key_size, shape.key_size, shape.inner_size], 1)
        for place, part in zip(places, (query, key, value), strict=True):
            place.unflatten(1, (shape.num_key_heads, -1)).copy_(part)
        return mixed, *(part.flatten(1) for part in (z, b, a))
