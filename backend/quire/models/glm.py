"""GLM-4 of both generations: by default half of each head rotates, in neighbouring pairs. Gate and up are one
tensor."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, NormNames
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class GlmForCausalLM(DecoderModel):
    """glm-4-9b ("hf" form): query, key and value have biases unless the file switches them off."""

    rotates_partly = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(
            partial_rotary_factor=0.5, head_dim=128, num_key_value_heads=2, rms_norm_eps=1.5625e-7
        )
        return dataclasses.replace(
            super().parse_config(hf, dtype),
            rope_interleaved=True,
            qkv_bias=hf.flag("attention_bias", True),
            fused_gate_up=True,
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms on both sides of a layer's parts."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        norms = NormNames(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        )
        return dataclasses.replace(super().parse_config(hf, dtype), norms=norms)
