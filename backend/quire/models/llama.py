"""Llama 2, 3, 3.1, 3.2 and other models with architecture LlamaForCausalLM."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    """Llama: `attention_bias` switches biases on for all four attention projections, `mlp_bias` for the
    feed-forward layers."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        bias = hf.flag("attention_bias", False)
        return dataclasses.replace(
            super().parse_config(hf, dtype),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
        )
