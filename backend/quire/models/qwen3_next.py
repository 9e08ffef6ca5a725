"""Qwen3-Next: by default three layers with gated DeltaNet, then one with gated attention. In layers with
experts, one more expert computes all tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.attention import GatedAttention
from quire.layers.config import DecoderConfig
from quire.layers.gated_delta import DeltaShape, GatedDeltaNet, HybridConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderLayer
from quire.models.qwen3_moe import qwen_experts
from quire.models.states import StatesModel


class HybridLayer(DecoderLayer):
    """Layer with gated DeltaNet or gated attention."""

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, HybridConfig)
        return GatedDeltaNet(config) if layer in config.state_layers else GatedAttention(config, layer)


class HybridModel(StatesModel):
    """Qwen decoder with gated DeltaNet in some layers and gated attention in the others. The tensors `mtp.*`,
    for multi-token prediction, are not loaded."""

    layer_class = HybridLayer
    state_name = "linear_attn"
    rotates_partly = True
    accepts_image_embeds = False
    interleaved: bool
    """See DeltaShape."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> HybridConfig:
        """See DecoderModel."""
        if not hf.flag("attn_output_gate", True):
            raise hf.error("attn_output_gate false is not supported: transformers gates attention's output")
        base = super().parse_config(hf.with_defaults(head_dim=256, partial_rotary_factor=0.25), dtype)
        bias = hf.flag("attention_bias", False)
        return HybridConfig(
            **vars(base) | {"qk_norm": True, "unit_offset_norms": True, "qkv_bias": bias, "out_bias": bias},
            state=DeltaShape.from_hf(hf, interleaved=cls.interleaved),
            state_layers=_state_layers(hf, base.num_layers),
        )

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            yield path.replace(".shared_experts", ".shared_expert"), module

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See Model. The scale of the gated norm is kept as stored; 1 is not added."""
        return tensor if ".linear_attn." in name else super().convert(name, tensor)

    def ignores(self, name: str) -> bool:
        """See Model."""
        return name.startswith("mtp.") or super().ignores(name)


class Qwen3NextForCausalLM(HybridModel):
    """Experts in every layer, unless the file says otherwise."""

    interleaved = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> HybridConfig:
        """See DecoderModel."""
        defaults = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        hf = hf.with_defaults(num_key_value_heads=2, norm_topk_prob=True, **defaults)
        config = super().parse_config(hf, dtype)
        size = hf.require_int("shared_expert_intermediate_size", 512)
        experts = qwen_experts(hf, config.num_layers, gated_shared_size=size)
        return HybridConfig(**vars(config) | {"experts": experts})


def _state_layers(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that `layer_types` calls linear_attention; without that list, all but every
    `full_attention_interval`th layer. Raises CheckpointError if one of these keys is wrong."""
    types = hf.get("layer_types")
    if types is None:
        interval = hf.require_int("full_attention_interval", 4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        raise hf.error(f"layer_types must be {num_layers} of {' and '.join(known)}, got {types!r:.80}")
    return tuple(layer for layer, one in enumerate(types) if one == known[0])
