"""DeepSeek V2: multi-head latent attention, and experts (arXiv 2405.04434)."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig, LatentConfig
from quire.layers.hf_config import MAX_SIZE, HFConfig
from quire.layers.rotary import RopeConfig, yarn_scale
from quire.models.decoder import DecoderModel


class LatentModel(DecoderModel):
    """Base of models with latent attention. Their checkpoints may hold layers after the last one, for
    multi-token prediction."""

    has_layers_behind = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        latent = LatentConfig.from_hf(hf)
        # In these files head_dim is the rotated part, and each head has its own key and value.
        config = super().parse_config(
            hf.replace(head_dim=latent.rope_dim, num_key_value_heads=hf.get("num_attention_heads")), dtype
        )
        bias = hf.flag("attention_bias", False)
        if bias and latent.query_rank is None:
            raise hf.error("attention_bias true is not supported without q_lora_rank")
        if hf.flag("mlp_bias", False):
            raise hf.error("mlp_bias true is not supported")
        return dataclasses.replace(
            config,
            latent=latent,
            num_kv_heads=1,
            head_dim=latent.kv_rank + latent.rope_dim,
            attention_scale=_attention_scale(hf, latent, config.rope),
            qkv_bias=bias,
            out_bias=bias,
        )


class DeepseekV2ForCausalLM(LatentModel):
    """DeepSeek V2: a token goes to the experts with the largest softmax scores, among those of its best
    groups if `topk_method` is group_limited_greedy."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        hf = hf.with_defaults(n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1407)
        experts = ExpertsConfig.of_deepseek(hf, config.num_layers, scoring="softmax")
        return dataclasses.replace(config, experts=experts)


def _attention_scale(hf: HFConfig, latent: LatentConfig, rope: RopeConfig) -> float:
    """Returns the scale of attention scores: 1 / sqrt(nope_dim + rope_dim). With rope scaling that has
    `mscale_all_dim`, it is multiplied by the square of YaRN's scale for that value. Raises CheckpointError if
    `mscale_all_dim` is not valid, or `factor` is missing beside it."""
    scale: float = (latent.nope_dim + latent.rope_dim) ** -0.5
    all_dim = rope.parameters.get("mscale_all_dim")
    if rope.rope_type == "default" or not all_dim:
        return scale
    if type(all_dim) not in (int, float) or not 0 < all_dim <= MAX_SIZE:
        raise hf.error(f"rope parameter mscale_all_dim {all_dim!r:.40} must be a positive number")
    if rope.parameters.get("factor") is None:
        raise hf.error("rope parameter mscale_all_dim needs the key factor")
    return scale * yarn_scale(rope.parameters["factor"], all_dim) ** 2
