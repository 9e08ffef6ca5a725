"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts. Layers with experts also have a gated shared expert for all
tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.config import DecoderConfig, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel
from quire.models.qwen2 import qwen_window
from quire.models.qwen3_moe import qwen_experts


class Qwen2MoeForCausalLM(DecoderModel):
    """`qkv_bias` is obeyed. If windows are switched on, every other layer below `max_window_layers` has one,
    beginning with the first, unless `layer_types` says otherwise."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=16), dtype)
        window, stop = qwen_window(hf), hf.get("max_window_layers", 28)
        windows = windows_by_layer_type(hf, config.num_layers, window) or tuple(
            window if layer % 2 == 0 and layer < stop else None for layer in range(config.num_layers)
        )
        shared_size = hf.require_int("shared_expert_intermediate_size", 5632)
        return dataclasses.replace(
            config,
            qkv_bias=hf.flag("qkv_bias", True),
            experts=qwen_experts(hf, config.num_layers, gated_shared_size=shared_size),
            sliding_windows=windows,
        )

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            yield path.replace(".shared_experts", ".shared_expert"), module
