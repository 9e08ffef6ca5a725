"""Qwen3 with experts in all or some of its layers."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.qwen2 import qwen_window
from quire.models.qwen3 import Qwen3ForCausalLM


def qwen_experts(hf: HFConfig, num_layers: int, *, gated_shared_size: int = 0) -> ExpertsConfig:
    """Reads the configuration of experts, which every `decoder_sparse_step`th layer has, except
    `mlp_only_layers`. Raises CheckpointError."""
    # transformers 5 writes num_local_experts.
    count_key = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    step, dense = hf.require_int("decoder_sparse_step", 1), hf.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise hf.error(f"mlp_only_layers must be a list of layers' numbers, got {dense!r:.40}")
    return ExpertsConfig.from_hf(
        hf,
        count_key,
        "moe_intermediate_size",
        layers=[layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense],
        renormalizes=hf.flag("norm_topk_prob", False),
        gated_shared_size=gated_shared_size,
    )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """If a window is switched on, all layers have it."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(head_dim=None, num_key_value_heads=4), dtype)
        windows = (qwen_window(hf),) * config.num_layers
        experts = qwen_experts(hf, config.num_layers)
        return dataclasses.replace(config, experts=experts, sliding_windows=windows)
