"""Granite 3 MoE: every layer has experts. A checkpoint stores all experts of a layer in two tensors: gate
with up, and down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

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
        yield from split_stacked(stored, self.config, _PARTS)

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace(".block_sparse_moe.router.layer.", ".mlp.gate.")


def split_stacked(
    stored: NamedTensor, config: DecoderConfig, parts: Mapping[str, tuple[str, ...]]
) -> Iterator[NamedTensor]:
    """Splits a tensor of Granite's stacked experts by expert; yields any other tensor as it is.

    Args:
        stored: tensor of a checkpoint.
        config: the model's configuration.
        parts: for each name of a stacked tensor, the names of the parts that an expert's slice consists of.
    """
    prefix, separator, rest = stored.name.partition(".block_sparse_moe.")
    names = parts.get(rest.removesuffix(".weight"))
    if not separator or names is None:
        yield stored
        return
    assert config.experts is not None
    yield from split_experts(stored, f"{prefix}.mlp.experts", names, config.experts.num_experts)
