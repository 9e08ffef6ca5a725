"""Gemma 2: alternating windows, soft-capped scores and logits, norms on both sides of a layer's parts."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.context import LayerContext
from quire.layers.norm import RMSNorm
from quire.models.config import DecoderConfig, windows_by_layer_type
from quire.models.decoder import DecoderLayer
from quire.models.gemma import GemmaForCausalLM
from quire.models.hf_config import HFConfig


class Gemma2Layer(DecoderLayer):
    """Attention and feed-forward, each between two norms: the second one applies before the addition."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = RMSNorm(config, config.hidden_size)
        self.post_feedforward_layernorm = RMSNorm(config, config.hidden_size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        normed, residual = self.input_layernorm.add(x, residual)
        attended = self.post_attention_layernorm(self.self_attn(normed, context))
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed, context.adapters)), residual


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Every other layer has a window, beginning with the first, unless `layer_types` says otherwise."""

    layer_class = Gemma2Layer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        window = hf.get("sliding_window", 4096)
        alternating = tuple(None if layer % 2 else window for layer in range(config.num_layers))
        return dataclasses.replace(
            config,
            sliding_windows=windows_by_layer_type(hf, config.num_layers, window) or alternating,
            attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            # A key that is there and null switches the cap off.
            attention_softcap=hf.values.get("attn_logit_softcapping", 50.0),
            logits_softcap=hf.values.get("final_logit_softcapping", 30.0),
        )
