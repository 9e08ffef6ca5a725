"""ERNIE 4.5 with experts. By default all layers but the first have them, with shared experts beside them that
compute every token."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import MAX_EXPERTS, DecoderConfig, ExpertsConfig
from quire.layers.hf_config import MAX_SIZE, HFConfig
from quire.models.ernie4_5 import Ernie4_5ForCausalLM
from quire_kernels.routing import Routing


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """A token's experts are chosen by softmax scores plus a bias."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(head_dim=None, num_key_value_heads=4), dtype)
        if config.mlp_bias:
            raise hf.error("use_bias true is not supported: experts have none")
        num_layers = config.num_layers
        first, last, step = (
            hf.get(f"moe_layer_{key}", default)
            for key, default in (("start_index", 1), ("end_index", -1), ("interval", 1))
        )
        if any(type(one) is not int or abs(one) > MAX_SIZE for one in (first, last, step)) or step < 1:
            raise hf.error(
                "moe_layer_start_index, moe_layer_end_index and moe_layer_interval must be numbers of "
                f"layers, got {first!r:.20}, {last!r:.20} and {step!r:.20}"
            )
        last = num_layers - 1 if last == -1 else last
        num_experts = hf.require_int("moe_num_experts", 64, most=MAX_EXPERTS)
        size, num_shared = hf.require_int("moe_intermediate_size", 1536), hf.get("moe_num_shared_experts", 2)
        if type(num_shared) is not int or not 0 <= num_shared <= MAX_EXPERTS:
            raise hf.error(
                f"moe_num_shared_experts must be a number up to {MAX_EXPERTS}, got {num_shared!r:.40}"
            )
        experts = ExpertsConfig(
            layers=tuple(one for one in range(num_layers) if (one + 1) % step == 0 and first <= one <= last),
            num_experts=num_experts,
            intermediate_size=size,
            routing=Routing(
                num_chosen=hf.require_int("moe_k", 6, most=num_experts),
                renormalizes=True,
                least_sum=hf.number("moe_norm_min", 1e-12),
                shared="whole" if num_shared else None,
            ),
            has_score_bias=True,
            shared_size=size * num_shared,
        )
        return dataclasses.replace(config, experts=experts)

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace("mlp.moe_statics.", "mlp.gate.")

    def ignores(self, name: str) -> bool:
        """See DecoderModel. Tensors for multi-token prediction (`model.mtp_*`) are ignored too."""
        return name.startswith("model.mtp_") or super().ignores(name)
