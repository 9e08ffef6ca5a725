"""DeepSeek V3 and R1 (arXiv 2412.19437), Kimi K2, and other models with the same attention."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.deepseek_v2 import LatentModel


class DeepseekV3ForCausalLM(LatentModel):
    """DeepSeek V3: a token goes to the experts with the largest biased sigmoid scores in its best groups."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        hf = hf.with_defaults(
            n_routed_experts=256,
            n_shared_experts=1,
            moe_intermediate_size=2048,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
        return dataclasses.replace(config, experts=ExpertsConfig.of_deepseek(hf, config.num_layers))


def by_layer_type(hf: HFConfig, experts: ExpertsConfig, num_layers: int) -> ExpertsConfig:
    """Returns the configuration with experts in the layers that `mlp_layer_types` calls sparse; without that
    key, unchanged. Raises CheckpointError if the key is wrong."""
    types = hf.get("mlp_layer_types")
    if types is None:
        return experts
    if not isinstance(types, list) or len(types) != num_layers or {*types} - {"dense", "sparse"}:
        raise hf.error(f"mlp_layer_types {types!r:.60} must be dense or sparse for each layer")
    layers = tuple(layer for layer, one in enumerate(types) if one == "sparse")
    return dataclasses.replace(experts, layers=layers)


class Glm4MoeLiteForCausalLM(LatentModel):
    """GLM-4.7-Flash: DeepSeek V3's experts in the layers that `mlp_layer_types` calls sparse; without that
    key, in all but the first `first_k_dense_replace` (by default 1)."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        experts = ExpertsConfig.of_deepseek(
            hf.with_defaults(first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.8),
            config.num_layers,
        )
        return dataclasses.replace(config, experts=by_layer_type(hf, experts, config.num_layers))


class MiniCPM3ForCausalLM(LatentModel):
    """MiniCPM3: no experts. Embeddings, the terms for the residual stream, and logits are scaled by
    factors."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        size, num_heads = hf.require_int("hidden_size"), hf.require_int("num_attention_heads")
        hf = hf.replace(
            kv_lora_rank=hf.get("kv_lora_rank", 256),
            q_lora_rank=hf.values.get("q_lora_rank", 768),
            qk_nope_head_dim=hf.get("qk_nope_head_dim", 64),
            qk_rope_head_dim=hf.get("qk_rope_head_dim", 32),
            v_head_dim=hf.get("v_head_dim", size // num_heads),
            rope_interleave=False,
        ).with_defaults(tie_word_embeddings=True, rms_norm_eps=1e-5)
        config = super().parse_config(hf, dtype)
        base = hf.with_defaults(dim_model_base=256, scale_depth=1.4)
        depth = base.number("scale_depth", config.num_layers**0.5)
        return dataclasses.replace(
            config,
            embedding_scale=hf.number("scale_emb", 12.0),
            residual_multiplier=depth / config.num_layers**0.5,
            logits_divisor=size / base.require_int("dim_model_base", size),
        )


class YoutuForCausalLM(LatentModel):
    """Youtu: no experts; every layer has a plain feed-forward part."""
