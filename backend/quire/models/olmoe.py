"""OLMoE: experts in every layer. One norm covers all of a token's queries, another all its keys."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel
from quire.models.qwen3_moe import qwen_experts


class OlmoeForCausalLM(DecoderModel):
    """`intermediate_size` is the inner size of one expert. `attention_bias` applies to all four
    projections."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        if hf.get("clip_qkv") is not None:
            raise hf.error(f"clip_qkv {hf.get('clip_qkv')!r:.40} is not supported; supported: null")
        hf = hf.with_defaults(rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
        config, bias = super().parse_config(hf, dtype), hf.flag("attention_bias", False)
        sizes = hf.replace(moe_intermediate_size=config.intermediate_size)
        return dataclasses.replace(
            config,
            qk_norm=True,
            qk_norm_whole=True,
            qkv_bias=bias,
            out_bias=bias,
            experts=qwen_experts(sizes.replace(decoder_sparse_step=1, mlp_only_layers=[]), config.num_layers),
        )
