"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.layers.moe import MixtureOfExperts
from quire.models.decoder import DecoderLayer
from quire.models.mistral import MistralForCausalLM


class MixtralLayer(DecoderLayer):
    """Mixtral's layer: attention, and experts whose matrices are named w1 (gate), w3 (up) and w2 (down)."""

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        experts = config.experts
        assert experts is not None
        return MixtureOfExperts(config, experts, ("w1", "w3", "w2"))


class MixtralForCausalLM(MistralForCausalLM):
    """`intermediate_size` is the inner size of one expert. The shares of a token's experts are the softmax
    over their logits."""

    layer_class = MixtralLayer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(sliding_window=None, rope_theta=1_000_000.0, rms_norm_eps=1e-5)
        config = super().parse_config(hf, dtype)
        experts = ExpertsConfig.from_hf(
            hf, "num_local_experts", "intermediate_size", layers=range(config.num_layers), renormalizes=True
        )
        return dataclasses.replace(config, experts=experts)

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            yield path.replace(".mlp", ".block_sparse_moe"), module
