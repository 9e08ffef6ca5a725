"""Seed-OSS: Llama with biases on query, key and value by default."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class SeedOssForCausalLM(DecoderModel):
    """The bias of attention's output projection has a switch of its own, `attention_out_bias`."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        return dataclasses.replace(
            super().parse_config(hf.with_defaults(head_dim=128, num_key_value_heads=8), dtype),
            qkv_bias=hf.flag("attention_bias", True),
            out_bias=hf.flag("attention_out_bias", False),
            mlp_bias=hf.flag("mlp_bias", False),
        )
