"""Gemma 2: alternating windows, soft-capped scores and logits, norms on both sides of a layer's parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.layers.config import SANDWICH_NORMS, DecoderConfig, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.gemma import GemmaForCausalLM


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Every other layer has a window, beginning with the first, unless `layer_types` says otherwise."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=4), dtype)
        window = hf.get("sliding_window", 4096)
        alternating = tuple(None if layer % 2 else window for layer in range(config.num_layers))
        return dataclasses.replace(
            config,
            norms=SANDWICH_NORMS,
            sliding_windows=windows_by_layer_type(hf, config.num_layers, window) or alternating,
            attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            # A key that is there and null switches the cap off.
            attention_softcap=hf.values.get("attn_logit_softcapping", 50.0),
            logits_softcap=hf.values.get("final_logit_softcapping", 30.0),
        )

    @classmethod
    def activation(cls, hf: HFConfig) -> Any:
        """See GemmaForCausalLM. Returns `hidden_activation` as it is, by default tanh GELU; `hidden_act` is
        not read."""
        return hf.get("hidden_activation", "gelu_pytorch_tanh")
