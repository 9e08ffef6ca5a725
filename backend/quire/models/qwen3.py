"""Qwen3, dense: norms on query and key heads, a head_dim independent of hidden_size, no bias by default."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel
from quire.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(DecoderModel):
    """QK-norm. `attention_bias` applies to all four projections."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(head_dim=128, num_key_value_heads=32), dtype)
        bias = hf.flag("attention_bias", False)
        windows = qwen_windows(hf, config.num_layers)
        return dataclasses.replace(
            config, qk_norm=True, qkv_bias=bias, out_bias=bias, sliding_windows=windows
        )
