"""Gemma: scaled embeddings, and norms whose stored scales are 1 less than the scales used."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class GemmaForCausalLM(DecoderModel):
    """Embeddings are tied unless the file says otherwise. Files that name the activation `gelu` mean tanh
    GELU."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        if hf.get("use_bidirectional_attention"):
            raise hf.error("use_bidirectional_attention is not supported: the model generates no text")
        config = super().parse_config(
            hf.with_defaults(head_dim=256, num_key_value_heads=16).replace(
                hidden_act=cls.activation(hf), tie_word_embeddings=hf.flag("tie_word_embeddings", True)
            ),
            dtype,
        )
        bias = hf.flag("attention_bias", False)
        return dataclasses.replace(
            config,
            embedding_scale=float(torch.tensor(config.hidden_size**0.5, dtype=dtype)),
            unit_offset_norms=True,
            qkv_bias=bias,
            out_bias=bias,
        )

    @classmethod
    def activation(cls, hf: HFConfig) -> Any:
        """Returns the name of the feed-forward's activation from `hidden_activation` or, if the file has
        none, `hidden_act`, unchecked. "gelu" becomes tanh GELU."""
        stated = hf.get("hidden_activation") or hf.get("hidden_act", "gelu")
        return "gelu_pytorch_tanh" if stated == "gelu" else stated
