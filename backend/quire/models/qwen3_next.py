"""Qwen3-Next: by default three layers with gated DeltaNet, then one with gated attention. Layers have
experts, one of them shared by all tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from quire.layers.attention import GatedAttention
from quire.layers.config import DecoderConfig
from quire.layers.gated_delta import DeltaShape, GatedDeltaNet, HybridConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderLayer, DecoderModel
from quire.models.qwen3_moe import qwen_experts
from quire.roofline import ModelWork


class HybridLayer(DecoderLayer):
    """Layer with gated DeltaNet or gated attention."""

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, HybridConfig)
        return GatedDeltaNet(config) if layer in config.delta_layers else GatedAttention(config, layer)


class HybridModel(DecoderModel):
    """Qwen decoder with gated DeltaNet in some layers and gated attention in the others. The tensors `mtp.*`,
    for multi-token prediction, are not loaded."""

    layer_class = HybridLayer
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
            delta=DeltaShape.from_hf(hf, interleaved=cls.interleaved),
            delta_layers=_delta_layers(hf, base.num_layers),
        )

    def state_bytes(self, config: DecoderConfig) -> Mapping[int, int]:
        """See DecoderModel."""
        assert isinstance(config, HybridConfig)
        return dict.fromkeys(config.delta_layers, config.delta.state_bytes(config.dtype))

    def work(self, kv_token_bytes: int) -> ModelWork:
        """See DecoderModel. The bytes of states are not counted."""
        work = super().work(kv_token_bytes)
        assert isinstance(self.config, HybridConfig)
        return dataclasses.replace(work, windows=work.windows[len(self.config.delta_layers) :])

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        of_delta = {
            f"model.layers.{layer}.self_attn": f"model.layers.{layer}.linear_attn"
            for layer, one in enumerate(self.layers)
            if isinstance(one, HybridLayer) and isinstance(one.self_attn, GatedDeltaNet)
        }
        for path, module in super()._named_modules():
            found = re.match(r"model\.layers\.\d+\.self_attn", path)
            if found:
                path = of_delta.get(found[0], found[0]) + path[found.end() :]
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


def _delta_layers(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the layers that `layer_types` calls linear_attention. Without that list, these are all but
    every `full_attention_interval`th layer. Raises CheckpointError."""
    types = hf.get("layer_types")
    if types is None:
        interval = hf.require_int("full_attention_interval", 4)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        raise hf.error(f"layer_types must be {num_layers} of {' and '.join(known)}, got {types!r:.80}")
    return tuple(layer for layer, one in enumerate(types) if one == known[0])
