"""InternLM 2, 2.5 and 3, whose checkpoints bring their own classes: Llama with other names and switches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch

from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.decoder import DecoderModel
from quire_common.weight_files import NamedTensor

_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "wo": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "output": "lm_head",
}


class InternLM2ForCausalLM(DecoderModel):
    """InternLM 2: tensor `wqkv` holds, for each KV head, its queries, its key and its value."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        bias = hf.flag("bias", True)
        return dataclasses.replace(super().parse_config(hf, dtype), qkv_bias=bias, out_bias=bias)

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model."""
        prefix, found, end = stored.name.rpartition("wqkv.")
        if not found:
            yield stored
            return
        config, rows = self.config.whole or self.config, stored.tensor.shape[0]
        group = config.num_heads // config.num_kv_heads
        size = (group + 2) * config.head_dim
        if end not in ("weight", "bias") or rows != size * config.num_kv_heads:
            raise CheckpointError(
                f"{stored.file}: {stored.name} has {rows} rows, config.json means "
                f"{size * config.num_kv_heads}"
            )
        for name, first, last in (("q", 0, group), ("k", group, group + 1), ("v", group + 1, group + 2)):
            change = partial(_of_heads, group=group, head_dim=config.head_dim, first=first, last=last)
            one = stored._replace(name=f"{prefix}{name}_proj.{end}", tensor=change(stored.tensor))
            if stored.offset is not None:
                one = one._replace(change=change, raw=stored.tensor)
            yield one

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return ".".join(_NAMES.get(part, part) for part in name.split("."))


def _of_heads(rows: torch.Tensor, *, group: int, head_dim: int, first: int, last: int) -> torch.Tensor:
    """Returns the rows of some heads. For each KV head, `rows` holds `group` query heads, a key head and a
    value head; of these, the heads with index `first` up to, but not including, `last` are returned."""
    return rows.unflatten(0, (-1, group + 2, head_dim))[:, first:last].flatten(0, 2)


class InternLM3ForCausalLM(DecoderModel):
    """InternLM 3: `qkv_bias` applies to query, key and value. `bias` applies to the other linear layers of a
    decoder layer."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        bias = hf.flag("bias", False)
        return dataclasses.replace(
            super().parse_config(hf, dtype),
            qkv_bias=hf.flag("qkv_bias", False),
            out_bias=bias,
            mlp_bias=bias,
        )
