"""MiniMax-M2: Mixtral with sigmoid routers. One norm covers all of a token's queries, another all its
keys."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.models.mixtral import MixtralForCausalLM


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    """`partial_rotary_factor` or, if the file lacks this key, `rotary_dim` says how many dimensions of a head
    rotate; without both keys, all do."""

    rotates_partly = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        scoring = hf.get("scoring_func", "sigmoid")
        if scoring != "sigmoid":
            raise hf.error(f"scoring_func {scoring!r:.40} is not supported; supported: sigmoid")
        hf = hf.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=5_000_000.0, rms_norm_eps=1e-6)
        hf = hf.with_defaults(num_local_experts=256, num_experts_per_tok=8).replace(sliding_window=None)
        if hf.get("rotary_dim") is not None:
            size = hf.require_int("head_dim", 128, most=MAX_HEADS)
            hf = hf.with_defaults(partial_rotary_factor=hf.require_int("rotary_dim", most=size) / size)
        config = super().parse_config(hf, dtype)
        assert config.experts is not None
        routing = dataclasses.replace(config.experts.routing, scoring="sigmoid")
        return dataclasses.replace(
            config,
            qk_norm=True,
            qk_norm_whole=True,
            experts=dataclasses.replace(config.experts, routing=routing, has_score_bias=True),
        )

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace("moe.e_score_correction_bias", "moe.gate.e_score_correction_bias")
