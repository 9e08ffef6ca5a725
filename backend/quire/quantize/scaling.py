"""Scaling: a linear layer's columns are multiplied by factors that what makes its inputs is divided by.

The model computes the same, and is rounded better. SmoothQuant (Xiao et al., 2023, arXiv 2211.10438) makes
large inputs smaller, since they are to be of eight bits; AWQ (Lin et al., 2024, arXiv 2306.00978) makes
columns larger whose inputs are large, since their rounding errors count most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.layers.config import DecoderConfig
from quire.quantize.calibration import InputStatistics
from quire.quantize.rounding import Grid

Tensors = dict[str, torch.Tensor]
"""Tensors of one decoder layer, float32, by their names in the layer: "mlp.up_proj.weight"."""
SMOOTHING = 0.5
"""SmoothQuant's migration strength: how much of an input's size its column takes up."""
_STEPS = 20


@dataclass(frozen=True)
class InputGroup:
    """Linear layers with the same input."""

    path: str
    """In the decoder layer, of the `Linear` that they are parts of."""
    parts: tuple[str, ...]
    source: str
    """Module that makes the input: a norm, or a linear layer whose outputs each become one input or
    several."""

    @property
    def weights(self) -> list[str]:
        """Names of the parts' matrices."""
        return [f"{part}.weight" for part in self.parts]


def input_groups(tensors: Tensors) -> list[InputGroup]:
    """Groups of a decoder layer's linear layers that share an input."""
    norms = ("pre_feedforward_layernorm", "post_attention_layernorm")
    before_mlp = next(norm for norm in norms if f"{norm}.weight" in tensors)
    return [
        InputGroup(
            "self_attn.qkv", tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v")), "input_layernorm"
        ),
        InputGroup("self_attn.out", ("self_attn.o_proj",), "self_attn.v_proj"),
        InputGroup("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj"), before_mlp),
        InputGroup("mlp.down", ("mlp.down_proj",), "mlp.up_proj"),
    ]


def smoothing_factors(weights: Sequence[torch.Tensor], inputs: InputStatistics) -> torch.Tensor:
    """SmoothQuant's factors [in_features] for matrices that share inputs."""
    columns = torch.cat(list(weights)).abs().amax(0).clamp(min=1e-5)
    return (inputs.largest.clamp(min=1e-5) ** SMOOTHING / columns ** (1 - SMOOTHING)).clamp(min=1e-5)


def awq_factors(
    weights: Sequence[torch.Tensor],
    inputs: InputStatistics,
    grid_of: Callable[[torch.Tensor], Grid],
    shared: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """AWQ's factors [in_features] for matrices that share inputs: of powers of the inputs' sizes those after
    which rounding changes the products least.

    Args:
        weights: of the matrices.
        inputs: of them.
        grid_of: chooses the grid that a matrix will be rounded to.
        shared: makes factors equal that belong to one output of what comes before.
    """
    sizes = shared(inputs.sizes).clamp(min=1e-4)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS):
        factors = sizes ** (step / _STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight in weights:
            scaled = weight * factors
            fine = grid_of(scaled).per_column(scaled.shape[1])
            change = fine.values(fine.codes(scaled)) / factors - weight
            error += float((change @ inputs.gram * change).sum())
        if error < least:
            best, least = factors, error
    return best


def sharing(group: InputGroup, config: DecoderConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes factors [in_features] equal where inputs come of the same output of the group's source: a value
    head is several query heads' (the mean is taken)."""
    if group.source != "self_attn.v_proj":
        return lambda factors: factors
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)

    def shared(factors: torch.Tensor) -> torch.Tensor:
        return factors.view(heads).mean(1, keepdim=True).expand(heads).flatten()

    return shared


def scale(tensors: Tensors, group: InputGroup, factors: torch.Tensor, config: DecoderConfig) -> None:
    """Divides a group's inputs by factors where they come from, and multiplies the columns by them.

    Args:
        tensors: of the decoder layer; those concerned are replaced.
        group: of linear layers.
        factors: float32 [in_features]; `sharing` leaves them as they are.
        config: of the model.
    """
    for name in group.weights:
        tensors[name] = tensors[name] * factors
    name = f"{group.source}.weight"
    if group.source.endswith("norm"):
        offset = 1.0 if config.unit_offset_norms else 0.0
        tensors[name] = (tensors[name] + offset) / factors - offset
        return
    if group.source == "self_attn.v_proj":
        heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        factors = factors.view(heads)[:, 0].flatten()
    tensors[name] = tensors[name] / factors.unsqueeze(1)
    bias = f"{group.source}.bias"
    if bias in tensors:
        tensors[bias] = tensors[bias] / factors
