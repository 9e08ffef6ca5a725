"""Mistral and Ministral: sliding-window attention, in all layers or by `layer_types`."""

from __future__ import annotations

import dataclasses

import torch

from quire.models.config import DecoderConfig, windows_by_layer_type
from quire.models.decoder import DecoderModel
from quire.models.hf_config import HFConfig


class MistralForCausalLM(DecoderModel):
    """A window of `sliding_window` positions in every layer unless the file says otherwise."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        window = hf.get("sliding_window")
        windows = windows_by_layer_type(hf, config.num_layers, window)
        return dataclasses.replace(config, sliding_windows=windows or (window,) * config.num_layers)


MinistralForCausalLM = MistralForCausalLM
