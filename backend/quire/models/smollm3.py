"""SmolLM3: Llama in which some layers, by default every fourth, have no rotary embedding."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, layers_without_rope, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """`no_rope_layers` holds 0 for layers without rotary embedding. If a window is switched on, these layers
    have it, unless `layer_types` says otherwise."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(num_key_value_heads=4, tie_word_embeddings=True, rope_theta=2_000_000.0)
        config = super().parse_config(hf, dtype)
        without = layers_without_rope(hf, config.num_layers)
        window = hf.get("sliding_window") if hf.flag("use_sliding_window", False) else None
        windows = tuple(window if layer in without else None for layer in range(config.num_layers))
        return dataclasses.replace(
            config,
            other_rope=config.rope.without_rotation(),
            other_rope_layers=without,
            sliding_windows=windows_by_layer_type(hf, config.num_layers, window) or windows,
        )
