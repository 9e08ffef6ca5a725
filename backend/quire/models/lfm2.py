"""LFM2: gated short convolutions in some layers (in released models, most), attention in the others. LFM2-MoE
has experts in all layers behind the first `num_dense_layers`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.attention import Attention
from quire.layers.config import MAX_EXPERTS, DecoderConfig, ExpertsConfig, NormNames
from quire.layers.hf_config import MAX_SIZE, HFConfig
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts
from quire.layers.short_conv import ConvShape, ShortConv
from quire.layers.states import MAX_TAPS, StatesConfig, layer_kinds
from quire.models.decoder import DecoderLayer
from quire.models.states import StatesModel
from quire_kernels.routing import Routing

_NAMES = ("w1", "w3", "w2")
"""Names of the gate, up and down projections in checkpoints."""


class Lfm2Attention(Attention):
    """Attention whose output projection is named `out_proj`."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        size = self.num_heads * self.head_dim
        self.out = Linear(config, size, {"out_proj": config.hidden_size}, parallel="row", bias=False)


class Lfm2Layer(DecoderLayer):
    """Layer with a gated short convolution or attention."""

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, StatesConfig)
        return ShortConv(config) if layer in config.state_layers else Lfm2Attention(config, layer)

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        if config.experts is None or layer not in config.experts.layers:
            return GatedMLP(config, config.intermediate_size, _NAMES)
        return MixtureOfExperts(config, config.experts, _NAMES)


class Lfm2ForCausalLM(StatesModel):
    """`layer_types`, or without it `full_attn_idxs`, says which layers have attention; without both, all do.

    The feed-forward inner size is `block_ff_dim` or, without it, `intermediate_size`, if
    `block_auto_adjust_ff_dim` is false. Otherwise it is two thirds of that, times `block_ffn_dim_multiplier`,
    rounded up to a multiple of `block_multiple_of`.
    """

    layer_class = Lfm2Layer
    state_name = "conv"

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> StatesConfig:
        """See DecoderModel."""
        hf = hf.with_defaults(num_key_value_heads=8, rope_theta=1_000_000.0)
        hf = hf.replace(
            intermediate_size=cls._intermediate_size(hf),
            rms_norm_eps=hf.number("norm_eps", 1e-5),
            tie_word_embeddings=hf.flag("tie_embedding", hf.flag("tie_word_embeddings", True)),
            hidden_act="silu",
        )
        base = super().parse_config(hf, dtype)
        num_taps = hf.require_int("conv_L_cache", 3, most=MAX_TAPS)
        if num_taps < 2:
            raise hf.error(f"conv_L_cache must be at least 2, got {num_taps}")
        shape = ConvShape(
            inner_size=base.hidden_size, num_taps=num_taps, has_bias=hf.flag("conv_bias", False)
        )
        kinds = cls._kinds(hf, base.num_layers)
        return StatesConfig(
            **vars(base) | {"qk_norm": True, "norms": NormNames("operator_norm", None, "ffn_norm", None)},
            state=shape,
            state_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        )

    @classmethod
    def _intermediate_size(cls, hf: HFConfig) -> int:
        size = hf.require_int("block_ff_dim", hf.get("intermediate_size", 12288))
        if not hf.flag("block_auto_adjust_ff_dim", True):
            return size
        multiple = hf.require_int("block_multiple_of", 256)
        size = int(hf.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        return -(-size // multiple) * multiple

    @classmethod
    def _kinds(cls, hf: HFConfig, num_layers: int) -> list[str]:
        """Returns conv or full_attention for each layer."""
        if hf.get("layer_types") is not None:
            names = {"conv": "conv", "full_attention": "full_attention", "attention": "full_attention"}
            return layer_kinds(hf, "layer_types", num_layers, names)
        places = hf.get("full_attn_idxs", list(range(num_layers)))
        if not isinstance(places, list) or any(type(one) is not int for one in places):
            raise hf.error(f"full_attn_idxs must be a list of layers' numbers, got {places!r:.80}")
        places = set(places)
        return ["full_attention" if layer in places else "conv" for layer in range(num_layers)]

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            path = "model.embedding_norm" if path == "model.norm" else path
            for ours, theirs in (
                (".mlp", ".feed_forward"),
                (".q_norm", ".q_layernorm"),
                (".k_norm", ".k_layernorm"),
            ):
                path = path.replace(ours, theirs)
            yield path, module


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """Experts are chosen by sigmoid scores, plus a bias unless `use_expert_bias` is false. The first
    `num_dense_layers` layers have no experts, but a feed-forward part of inner size `intermediate_size`. The
    file must have `layer_types`."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> StatesConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        scoring = hf.get("scoring_func", "sigmoid")
        if scoring != "sigmoid":
            raise hf.error(f"scoring_func {scoring!r:.40} is not supported; supported: sigmoid")
        dense, num_layers = hf.whole("num_dense_layers", 2, most=MAX_SIZE), config.num_layers
        num_experts = hf.require_int("num_experts", 32, most=MAX_EXPERTS)
        experts = ExpertsConfig(
            layers=tuple(range(min(dense, num_layers), num_layers)),
            num_experts=num_experts,
            intermediate_size=hf.require_int("moe_intermediate_size", 1792),
            routing=Routing(
                num_chosen=hf.require_int("num_experts_per_tok", 4, most=num_experts),
                renormalizes=hf.flag("norm_topk_prob", True),
                scoring="sigmoid",
                scale=hf.number("routed_scaling_factor", 1.0),
                epsilon=1e-6,
            ),
            has_score_bias=hf.flag("use_expert_bias", True),
        )
        return StatesConfig(**vars(config) | {"experts": experts})

    @classmethod
    def _intermediate_size(cls, hf: HFConfig) -> int:
        return hf.require_int("intermediate_size", 7168)

    @classmethod
    def _kinds(cls, hf: HFConfig, num_layers: int) -> list[str]:
        return super()._kinds(
            hf.replace(full_attn_idxs=None, layer_types=hf.get("layer_types", [])), num_layers
        )

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return name.replace(".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias")
