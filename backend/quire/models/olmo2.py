"""OLMo 2 and 3: norms after a layer's parts. One norm covers all of a token's queries, another all its
keys."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import OUTPUT_NORMS, DecoderConfig, ropes_by_layer_type, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.layers.rotary import RopeConfig
from quire.models.decoder import DecoderModel


class Olmo2ForCausalLM(DecoderModel):
    """Norms multiply by their scale before they round to the activations' type."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(rms_norm_eps=1e-5), dtype)
        bias = hf.flag("attention_bias", False)
        return dataclasses.replace(
            config,
            norms=OUTPUT_NORMS,
            wide_norms=True,
            qk_norm=True,
            qk_norm_whole=True,
            qkv_bias=bias,
            out_bias=bias,
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three layers with a window, then one without, unless the file says otherwise. Each kind has its own
    rotary embedding."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        theta = hf.get("rope_theta", 500_000.0)
        rope, sliding_rope = ropes_by_layer_type(hf, theta, theta)
        config = super().parse_config(hf.replace(rope_parameters=rope, rope_scaling=None), dtype)
        window = hf.values.get("sliding_window", 4096)
        periodic = tuple(window if (layer + 1) % 4 else None for layer in range(config.num_layers))
        return config.with_sliding_rope(
            windows_by_layer_type(hf, config.num_layers, window) or periodic,
            RopeConfig.from_hf(hf.replace(rope_parameters=sliding_rope, rope_scaling=None), config.head_dim),
        )
