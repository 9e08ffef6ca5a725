"""dots.llm1: Qwen3's attention, and DeepSeek V3's experts."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel
from quire.models.qwen2 import upper_windows


class Dots1ForCausalLM(DecoderModel):
    """QK-norm. `attention_bias` applies to attention's four projections. The layers from `max_window_layers`
    on have a window, unless `layer_types` says otherwise or `sliding_window` is null. The window's default is
    4096."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=32), dtype)
        bias, window = hf.flag("attention_bias", False), hf.values.get("sliding_window", 4096)
        return dataclasses.replace(
            config,
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            experts=ExpertsConfig.of_deepseek(hf, config.num_layers),
            sliding_windows=upper_windows(hf, config.num_layers, window, first=62),
        )
