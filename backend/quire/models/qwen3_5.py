"""Qwen3.5: Qwen3-Next's layers without experts, and projections that have a tensor each; text only."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.gated_delta import HybridConfig
from quire.layers.hf_config import HFConfig
from quire.models.qwen3_next import HybridModel
from quire.models.vision_language import VisionLanguageModel


class Qwen3_5ForCausalLM(HybridModel):
    """Positions of text are equal on all axes of M-RoPE, which is the plain rotation."""

    interleaved = False

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> HybridConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=4), dtype)
        rope = dataclasses.replace(config.rope, mrope_section=None, mrope_interleaved=False)
        return HybridConfig(**vars(config) | {"rope": rope})


class Qwen3_5ForConditionalGeneration(VisionLanguageModel, Qwen3_5ForCausalLM):
    """The text part; the tower is not loaded, and images are refused."""
