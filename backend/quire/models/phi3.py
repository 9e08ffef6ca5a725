"""Phi-3, Phi-3.5 and Phi-4 (mini too): Llama with fused projections; some models rotate part of each head."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class Phi3ForCausalLM(DecoderModel):
    """`partial_rotary_factor` is obeyed. If there is a window, all layers have it."""

    rotates_partly = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(original_max_position_embeddings=4096, rms_norm_eps=1e-5)
        # The first files call its scaling so.
        key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
        rope = hf.get(key, {})
        if isinstance(rope, dict) and "yarn" in (rope.get("type"), rope.get("rope_type")):
            hf = hf.replace(**{key: {**rope, "type": "longrope", "rope_type": "longrope"}})
        config = super().parse_config(hf, dtype)
        windows = (hf.get("sliding_window"),) * config.num_layers
        return dataclasses.replace(config, sliding_windows=windows, fused_qkv=True, fused_gate_up=True)
