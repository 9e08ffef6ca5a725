"""Qwen3 with experts in all or some of its layers."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from quire.layers.moe import MixtureOfExperts
from quire.models.config import DecoderConfig, ExpertsConfig
from quire.models.decoder import DecoderLayer
from quire.models.hf_config import HFConfig
from quire.models.qwen2 import qwen_window
from quire.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeLayer(DecoderLayer):
    """Attention, and experts or one feed-forward."""

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        experts = config.experts
        assert experts is not None
        if layer not in experts.layers:
            return super().make_mlp(config, layer)
        return MixtureOfExperts(config, experts)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """A window, if switched on, is that of all layers."""

    layer_class = Qwen3MoeLayer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        # transformers 5 writes num_local_experts.
        count_key = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
        experts = ExpertsConfig.from_hf(
            hf,
            count_key,
            "moe_intermediate_size",
            layers=_sparse_layers(hf, config.num_layers),
            renormalizes=hf.flag("norm_topk_prob", False),
        )
        windows = (qwen_window(hf),) * config.num_layers
        return dataclasses.replace(config, experts=experts, sliding_windows=windows)


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[int]:
    """Every `decoder_sparse_step`th layer, but for those in `mlp_only_layers`."""
    step, dense = hf.require_int("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise hf.error(f"mlp_only_layers must be a list of layers' numbers, got {dense!r:.40}")
    return [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
