"""Qwen3.5: Qwen3-Next's layers, with or without experts. Checkpoints hold the input projections of gated
DeltaNet in four tensors instead of two. With a tower, positions may have three axes (interleaved M-RoPE)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from quire.layers.gated_delta import HybridConfig
from quire.layers.hf_config import HFConfig
from quire.models.qwen3_moe import qwen_experts
from quire.models.qwen3_next import HybridModel
from quire.models.stacked_experts import split_experts
from quire.models.vision_language import VisionLanguageModel, check_interleaved_mrope
from quire_common.weight_files import NamedTensor

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Qwen3_5ForCausalLM(HybridModel):
    """The text model. Plain rotary embedding stands in for M-RoPE, as positions of text are equal on all
    axes. Subclasses with a tower have M-RoPE."""

    interleaved = False

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> HybridConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=4), dtype)
        if cls.accepts_image_embeds:
            check_interleaved_mrope(hf, config.rope)
            return config
        rope = dataclasses.replace(config.rope, mrope_section=None, mrope_interleaved=False)
        return HybridConfig(**vars(config) | {"rope": rope})


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Every layer has experts. A checkpoint stores a layer's routed experts together in two tensors, or each
    expert in three tensors of its own."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> HybridConfig:
        """See DecoderModel."""
        defaults = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        hf = hf.with_defaults(num_key_value_heads=2, **defaults)
        # Every layer has experts, so files state no size of other feed-forward parts.
        config = super().parse_config(hf.replace(intermediate_size=512), dtype)
        size = hf.require_int("shared_expert_intermediate_size", 512)
        hf = hf.replace(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
        experts = qwen_experts(hf, config.num_layers, gated_shared_size=size)
        return HybridConfig(**vars(config) | {"experts": experts})

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits stacked experts."""
        prefix, separator, matrix = stored.name.partition(".mlp.experts.")
        parts = _PARTS.get(matrix)
        if not separator or parts is None or self.ignores(stored.name):
            yield stored
            return
        assert self.config.experts is not None
        yield from split_experts(stored, f"{prefix}.mlp.experts", parts, self.config.experts.num_experts)


class Qwen3_5ForConditionalGeneration(VisionLanguageModel, Qwen3_5ForCausalLM):
    """The text part of a Qwen3.5 model with a tower."""

    accepts_image_embeds = True


class Qwen3_5MoeForConditionalGeneration(VisionLanguageModel, Qwen3_5MoeForCausalLM):
    """The text part of a Qwen3.5 model with experts and a tower."""

    accepts_image_embeds = True
