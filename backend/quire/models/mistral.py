"""Mistral, Ministral and Ministral 3: all, some or none of the layers have sliding-window attention."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, QueryScaling, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    """Every layer has a window of `sliding_window` positions (4096 if the file has no such key; null: no
    layer has one), unless `layer_types` says otherwise."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=8), dtype)
        window = hf.values.get("sliding_window", 4096)  # a null switches it off
        windows = windows_by_layer_type(hf, config.num_layers, window)
        return dataclasses.replace(config, sliding_windows=windows or (window,) * config.num_layers)


MinistralForCausalLM = MistralForCausalLM

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""RoPE parameters for Ministral 3 files that state none."""


class Ministral3ForCausalLM(MistralForCausalLM):
    """Ministral 3: the queries of all layers are scaled by position; see `QueryScaling`. There is no window
    unless the file states one."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(sliding_window=None, head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5)
        rope = hf.get("rope_scaling") or hf.get("rope_parameters")
        if rope is None:
            hf = hf.replace(rope_parameters=_ROPE)
            rope = _ROPE
        config = super().parse_config(hf, dtype)
        scaling = QueryScaling(
            HFConfig(hf.path, rope).number("llama_4_scaling_beta", None),
            config.rope.original_max_position_embeddings,
            0,
            tuple(range(config.num_layers)),
        )
        return dataclasses.replace(config, query_scaling=scaling)
