"""EXAONE 4: norms after a layer's parts, and QK-norm. In models with windows, layers without a window have no
rotary embedding."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import OUTPUT_NORMS, DecoderConfig, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class Exaone4ForCausalLM(DecoderModel):
    """Three layers with a window, then one with full attention, unless the file says otherwise. Unless
    `sliding_window` is null, only the layers with a window have a rotary embedding."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=32, rms_norm_eps=1e-5), dtype)
        config = dataclasses.replace(config, norms=OUTPUT_NORMS, qk_norm=True)
        window = hf.values.get("sliding_window", 4096)
        if window is None:
            return config
        windows = windows_by_layer_type(hf, config.num_layers, window)
        if windows is None:
            period = hf.require_int("sliding_window_pattern", 4)
            windows = tuple(window if (layer + 1) % period else None for layer in range(config.num_layers))
        return dataclasses.replace(
            config.with_sliding_rope(windows, config.rope), rope=config.rope.without_rotation()
        )
