"""ERNIE 4.5, dense: Llama whose rotary embedding rotates neighbouring dimensions together."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class Ernie4_5ForCausalLM(DecoderModel):
    """`use_bias` gives biases to the linear layers of attention and feed-forward parts."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        defaults = {"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True}
        hf = hf.with_defaults(**defaults, rms_norm_eps=1e-5, rope_theta=500_000.0)
        bias = hf.flag("use_bias", False)
        return dataclasses.replace(
            super().parse_config(hf, dtype),
            rope_interleaved=True,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
