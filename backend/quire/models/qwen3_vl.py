"""Qwen3-VL: a Qwen3 decoder with interleaved M-RoPE and deepstack. In deepstack, image features from inner
vision layers are added to the hidden states after the first decoder layers (arXiv 2406.04334)."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.qwen3 import Qwen3ForCausalLM
from quire.models.vision_language import VisionLanguageModel, check_interleaved_mrope


class Qwen3VLForConditionalGeneration(VisionLanguageModel, Qwen3ForCausalLM):
    """A row of image embeddings holds the embedding of one image token, then one level for each of
    `deepstack_visual_indexes`."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(rope_theta=500_000.0, head_dim=128)
        # transformers reads no window here.
        config = super().parse_config(hf.replace(use_sliding_window=False, layer_types=None), dtype)
        check_interleaved_mrope(hf, config.rope)
        vision = hf.get("vision_config", {})
        indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
        if not isinstance(indexes, list) or not len(indexes) < config.num_layers:
            raise hf.error(
                "vision_config.deepstack_visual_indexes must be a list of fewer than the "
                f"{config.num_layers} layers, got {indexes!r:.40}"
            )
        return dataclasses.replace(config, deepstack_levels=len(indexes))
