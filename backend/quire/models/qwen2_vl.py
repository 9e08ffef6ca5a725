"""Qwen2-VL and Qwen2.5-VL: a Qwen2 decoder with rotary positions on three axes (M-RoPE)."""

from __future__ import annotations

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.vision_language import VisionLanguageModel


class Qwen2VLForConditionalGeneration(VisionLanguageModel, Qwen2ForCausalLM):
    """The text part of Qwen2-VL or Qwen2.5-VL. Image tokens have positions in time, height and width."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(
            num_key_value_heads=8, rope_theta=1_000_000.0, rms_norm_eps=1e-5, max_window_layers=80
        )
        config = super().parse_config(hf, dtype)
        if config.rope.mrope_section is None:
            raise hf.error("rope parameters have no mrope_section")
        return config


Qwen2_5_VLForConditionalGeneration = Qwen2VLForConditionalGeneration
