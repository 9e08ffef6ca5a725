"""Granite 3 MoE: every layer has experts. A checkpoint stores all experts of a layer in two tensors: gate
with up, and down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.hf_config import HFConfig
from quire.models.granite import GraniteForCausalLM
from quire_common.weight_files import NamedTensor

_PARTS = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """`intermediate_size` is the inner size of one expert. A token's weights are the softmax over the logits
    of its chosen experts."""

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
        """See DecoderModel. Splits [num_experts, out_features, in_features] into each expert's tensors."""
        prefix, separator, rest = stored.name.partition(".block_sparse_moe.")
        parts = _PARTS.get(rest.removesuffix(".weight"))
        if not separator or parts is None:
            yield stored
            return
        tensor, experts = stored.tensor, self.config.experts
        assert experts is not None
        if tensor.ndim != 3 or tensor.shape[0] != experts.num_experts or tensor.shape[1] % len(parts):
            raise CheckpointError(
                f"{stored.file}: {stored.name} has shape {list(tensor.shape)}, config.json means "
                f"{experts.num_experts} experts"
            )
        offset = stored.offset
        for expert, content in enumerate(tensor):
            for part, rows in zip(parts, content.chunk(len(parts)), strict=True):
                name = f"{prefix}.mlp.experts.{expert}.{part}.weight"
                yield stored._replace(name=name, tensor=rows, offset=offset)
                offset = None if offset is None else offset + rows.nbytes

    def canonical_name(self, name: str) -> str:
        """See DecoderModel."""
        return name.replace(".block_sparse_moe.router.layer.", ".mlp.gate.")
