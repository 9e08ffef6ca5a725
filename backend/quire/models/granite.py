"""Granite, dense: Llama with factors for embeddings, scores, logits and terms for the residual stream."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with the factors of maximal update parametrisation (Yang et al., 2022, arXiv 2203.03466)."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        return dataclasses.replace(
            super().parse_config(hf, dtype),
            embedding_scale=hf.number("embedding_multiplier", 1.0),
            attention_scale=hf.number("attention_multiplier", 1.0),
            residual_multiplier=hf.number("residual_multiplier", 1.0),
            logits_divisor=hf.number("logits_scaling", 1.0),
        )
