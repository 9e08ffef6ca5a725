"""StatesConfig: configuration of a decoder in which some layers keep a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig

MAX_TAPS = 64
"""Most taps that a file may state for the convolution of a Mamba-2 layer or a gated short convolution."""
LAYER_TYPES = {
    "linear_attention": "linear_attention",
    "mamba": "linear_attention",
    "full_attention": "full_attention",
    "attention": "full_attention",
}
"""Kinds of layers, by the names that config.json may have, in decoders with Mamba-2."""


class StateShape(Protocol):
    """Sizes of a layer with a state."""

    @property
    def inner_size(self) -> int:
        """Number of input features of the layer's output projection."""

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of a layer's state; `dtype` is that of activations."""

    def num_weights(self, hidden_size: int) -> int:
        """Returns the number of weights in the layer's input and output projections, without the feed-forward
        part."""


@dataclass(frozen=True, kw_only=True)
class StatesConfig(DecoderConfig):
    """Configuration of a decoder with a state in some layers and attention in the others."""

    state: StateShape
    state_layers: tuple[int, ...]
    """Indices of the layers with a state."""

    @property
    def input_sizes(self) -> dict[str, int]:
        """See DecoderConfig."""
        return {**super().input_sizes, "inputs of out_proj": self.state.inner_size}

    def layer_weights(self, num_experts: int) -> int:
        """See DecoderConfig."""
        each = self.state.num_weights(self.hidden_size) - self._attention_weights
        return super().layer_weights(num_experts) + len(self.state_layers) * each


def layer_kinds(hf: HFConfig, key: str, num_layers: int | None, names: Mapping[str, str]) -> list[str]:
    """Returns the kind of each layer from a list in config.json.

    Args:
        key: key of the list.
        num_layers: required length; None: any but 0.
        names: kinds by the names that the list may have.

    Raises:
        CheckpointError: there is no list, it has another length, or a name that is not in `names`.
    """
    types = hf.get(key)
    is_right = isinstance(types, list) and all(isinstance(one, str) and one in names for one in types)
    if not is_right or len(types) != (num_layers or len(types)) or not types:
        count = "a list" if num_layers is None else f"{num_layers}"
        raise hf.error(f"{key} must be {count} of {', '.join(names)}, got {types!r:.80}")
    return [names[one] for one in types]
