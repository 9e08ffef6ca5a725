"""Gemma 3: Gemma 2's layers with QK-norm. Layers with a window have another rotary embedding than the
others."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ropes_by_layer_type, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.layers.rotary import RopeConfig
from quire.models.gemma2 import Gemma2ForCausalLM
from quire.models.vision_language import VisionLanguageModel


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five layers with a window, then one without, unless the file says otherwise. Scores are not
    soft-capped."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        rope, sliding_rope = ropes_by_layer_type(
            hf, hf.get("rope_theta", 1_000_000.0), hf.get("rope_local_base_freq", 10_000.0)
        )
        config = super().parse_config(hf.replace(rope_parameters=rope, rope_scaling=None), dtype)
        window = hf.get("sliding_window", 4096)
        period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern", 6)
        periodic = tuple(window if (layer + 1) % period else None for layer in range(config.num_layers))
        windows = windows_by_layer_type(hf, config.num_layers, window) or periodic
        config = config.with_sliding_rope(
            windows,
            RopeConfig.from_hf(hf.replace(rope_parameters=sliding_rope, rope_scaling=None), config.head_dim),
        )
        return dataclasses.replace(
            config,
            qk_norm=True,
            # transformers reads attn_logit_softcapping too, and does not use it.
            attention_softcap=None,
            logits_softcap=hf.get("final_logit_softcapping"),
        )


class Gemma3ForConditionalGeneration(VisionLanguageModel, Gemma3ForCausalLM):
    """The text part of a Gemma 3 model with a vision tower. The tokens of an image see each other in both
    directions; a layer's window limits only how far back they see."""

    has_joint_images = True
