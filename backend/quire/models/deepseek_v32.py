"""DeepSeek V3.2 and GLM-5: latent attention to the positions that an indexer chooses."""

from __future__ import annotations

import dataclasses

import torch

from quire.layers.config import DecoderConfig, IndexConfig
from quire.layers.hf_config import HFConfig
from quire.models.deepseek_v3 import DeepseekV3ForCausalLM, by_layer_type


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek V3.2: V3 with sparse attention."""

    has_interleaved_indexer = False
    """Value of `IndexConfig.interleaved`. A file need not state it, and must not contradict it."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(index_n_heads=64)
        config = super().parse_config(hf, dtype)
        latent, experts = config.latent, config.experts
        assert latent is not None and experts is not None
        index = IndexConfig.from_hf(hf, latent, interleaved=cls.has_interleaved_indexer)
        return dataclasses.replace(
            config,
            latent=dataclasses.replace(latent, index=index),
            experts=by_layer_type(hf, experts, config.num_layers),
        )

    @property
    def is_recordable(self) -> bool:
        """See Model. False, because the indexer's work depends on lengths that the host knows."""
        return False


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: several layers may share an indexer."""

    has_interleaved_indexer = True

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            n_group=1,
            topk_group=1,
            index_n_heads=32,
            rms_norm_eps=1e-5,
        )
        config = super().parse_config(hf, dtype)
        latent = config.latent
        assert latent is not None and latent.index is not None
        index = dataclasses.replace(latent.index, shared_layers=_shared_layers(hf, config.num_layers))
        return dataclasses.replace(config, latent=dataclasses.replace(latent, index=index))


def _shared_layers(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the layers without an indexer: those that `indexer_types` or, without it, `index_topk_pattern`
    calls shared. Without both, every `index_topk_freq`th layer from `index_skip_topk_offset` - 1 on has an
    indexer, and so do all layers before it; the others have none. Raises CheckpointError if a key is wrong or
    the first layer would have none."""
    types, key = hf.get("indexer_types"), "indexer_types"
    if types is None:
        types, key = hf.get("index_topk_pattern"), "index_topk_pattern"
    stated = types
    if types is None:
        every, offset = hf.require_int("index_topk_freq", 1), hf.whole("index_skip_topk_offset", 2)
        types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(num_layers)]
        key, stated = "index_topk_freq", every
    elif isinstance(types, str):
        types = [{"F": "full", "S": "shared"}.get(letter) for letter in types]
    if (
        not isinstance(types, list)
        or len(types) < num_layers
        or not all(one in ("full", "shared") for one in types)
        or types[0] != "full"
    ):
        raise hf.error(f"{key} {stated!r:.60} must be full or shared for each layer, and full for the first")
    return tuple(layer for layer, one in enumerate(types[:num_layers]) if one == "shared")
