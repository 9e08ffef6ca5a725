"""HunYuan, dense: Llama with norms of queries and keys after the rotary embedding."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.layers.rotary import first_stated
from quire.models.llama import LlamaForCausalLM


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Rope scaling with `alpha` multiplies theta by a power of `alpha`, whatever the sequence's length."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(rms_norm_eps=1e-5)
        rope = hf.get("rope_scaling") or hf.get("rope_parameters", {})
        alpha = rope.get("alpha") if isinstance(rope, dict) else None
        if alpha:
            size = hf.require_int("head_dim")
            theta = first_stated(rope.get("rope_theta"), hf.get("rope_theta"), 10000.0)
            theta *= alpha ** (size / (size - 2))
            hf = hf.replace(rope_parameters={"rope_type": "default", "rope_theta": theta}, rope_scaling=None)
        config = super().parse_config(hf, dtype)
        return dataclasses.replace(config, qk_norm=True, qk_norm_behind_rope=True, mlp_bias=False)

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace(".query_layernorm.", ".q_norm.").replace(".key_layernorm.", ".k_norm.")
