"""GLM-4.5 to 4.7, but not 4.7-Flash: by default half of each head rotates. Experts are DeepSeek V3's."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


class Glm4MoeForCausalLM(DecoderModel):
    """`attention_bias` applies to query, key and value. `use_qk_norm` switches QK-norm on."""

    rotates_partly = True
    has_layers_behind = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
            num_key_value_heads=8,
            n_routed_experts=128,
            n_shared_experts=1,
            num_experts_per_tok=8,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        )
        config = super().parse_config(hf, dtype)
        return dataclasses.replace(
            config,
            qkv_bias=hf.flag("attention_bias", False),
            qk_norm=hf.flag("use_qk_norm", False),
            experts=ExpertsConfig.of_deepseek(hf, config.num_layers),
        )
