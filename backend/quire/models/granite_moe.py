"""Granite 3 MoE: every layer has experts. A checkpoint stores all experts of a layer in two tensors: gate
with up, and down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.granite import GraniteForCausalLM
from quire.models.stacked_experts import split_experts
from quire_common.weight_files import NamedTensor

_PARTS = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """`intermediate_size` is the inner size of one expert. The shares of a token's experts are the softmax
    over their logits."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(num_local_experts=8, num_experts_per_tok=2)
        config = super().parse_config(hf, dtype)
        experts = ExpertsConfig.from_hf(
            hf, "num_local_experts", "intermediate_size", layers=range(config.num_layers), renormalizes=True
        )
        return dataclasses.replace(config, experts=experts)

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits stacked experts."""
        prefix, separator, rest = stored.name.partition(".block_sparse_moe.")
        parts = _PARTS.get(rest.removesuffix(".weight"))
        if not separator or parts is None:
            yield stored
            return
        assert self.config.experts is not None
        yield from split_experts(stored, prefix, parts, self.config.experts.num_experts)

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace(".block_sparse_moe.router.layer.", ".mlp.gate.")
