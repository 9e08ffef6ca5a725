"""Scaling: multiplies the columns of a linear layer by factors, and divides the layer's inputs by the same
factors in the module that computes these inputs.

The model computes the same, but is rounded more precisely. SmoothQuant (Xiao et al., 2023, arXiv 2211.10438)
makes large inputs smaller, because inputs are quantised to eight bits. AWQ (Lin et al., 2024, arXiv
2306.00978) makes columns with large inputs larger, because their rounding errors matter most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.layers.config import DecoderConfig
from quire_quantize.calibration import InputStatistics
from quire_quantize.rounding import Grid

Tensors = dict[str, torch.Tensor]
"""Tensors of one decoder layer in float32, by their names in the layer, such as "mlp.up_proj.weight"."""
SMOOTHING = 0.5
"""SmoothQuant's migration strength: the exponent that decides how much of an input's size moves into its
column."""
_STEPS = 20


@dataclass(frozen=True)
class InputGroup:
    """Linear layers with the same input."""

    path: str
    """Path, in the decoder layer, of the `Linear` module that joins the layers."""
    parts: tuple[str, ...]
    source: str
    """Name of the module that computes the input: a norm, or a linear layer. Each output of a linear layer
    becomes one input or several."""

    @property
    def weights(self) -> list[str]:
        """Names of the layers' weight matrices."""
        return [f"{part}.weight" for part in self.parts]


def input_groups(tensors: Tensors) -> list[InputGroup]:
    """Returns the groups of a decoder layer's linear layers that share an input."""
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
    """Returns SmoothQuant's factors [in_features] for matrices with the same input."""
    columns = torch.cat(list(weights)).abs().amax(0).clamp(min=1e-5)
    return (inputs.largest.clamp(min=1e-5) ** SMOOTHING / columns ** (1 - SMOOTHING)).clamp(min=1e-5)


def awq_factors(
    weights: Sequence[torch.Tensor],
    inputs: InputStatistics,
    grid_of: Callable[[torch.Tensor], Grid],
    shared: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns AWQ's factors [in_features] for matrices with the same input: of some powers of the inputs'
    mean sizes, those for which rounding to the grids of `grid_of` changes the products least.

    Args:
        weights: the matrices.
        inputs: statistics of their input.
        grid_of: chooses a grid for a scaled matrix.
        shared: function that makes the values of inputs from the same output of the source equal; see
            `sharing`.
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
    """Returns a function that makes factors [in_features] equal, by their mean, for inputs that come from the
    same output of the group's source. Several query heads share a value head."""
    if group.source != "self_attn.v_proj":
        return lambda factors: factors
    heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)

    def shared(factors: torch.Tensor) -> torch.Tensor:
        return factors.view(heads).mean(1, keepdim=True).expand(heads).flatten()

    return shared


def scale(tensors: Tensors, group: InputGroup, factors: torch.Tensor, config: DecoderConfig) -> None:
    """Divides a group's inputs by factors in the module that computes these inputs, and multiplies the
    group's columns by the factors.

    Args:
        tensors: tensors of the decoder layer; changed ones are replaced in it.
        group: the group of linear layers.
        factors: float32 [in_features]; `sharing` must already have been applied.
        config: the model's configuration.
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
