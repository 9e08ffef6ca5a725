"""Qwen2 and Qwen2.5: biases on query, key and value; windows in the upper layers if switched on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.layers.config import DecoderConfig, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel


def qwen_window(hf: HFConfig) -> Any:
    """Returns the value of `sliding_window`, unchecked, by default 4096; None: it is null, or
    `use_sliding_window` is not true."""
    return hf.values.get("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None


def qwen_windows(hf: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window by `upper_windows`, with the window that `use_sliding_window` switches
    on."""
    return upper_windows(hf, num_layers, qwen_window(hf), first=28)


def upper_windows(hf: HFConfig, num_layers: int, window: Any, *, first: int) -> tuple[int | None, ...]:
    """Returns each layer's window, from `layer_types` if the file has it. Otherwise the layers from
    `max_window_layers` on, by default `first`, have the window `window`."""
    windows = windows_by_layer_type(hf, num_layers, window)
    if windows is not None:
        return windows
    first = hf.get("max_window_layers", first)
    return tuple(window if layer >= first else None for layer in range(num_layers))


class Qwen2ForCausalLM(DecoderModel):
    """Query, key and value have biases, the output projection has none."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf.with_defaults(num_key_value_heads=32), dtype)
        windows = qwen_windows(hf, config.num_layers)
        return dataclasses.replace(config, qkv_bias=True, sliding_windows=windows)
