"""Nemotron-H: Mamba-2, attention without rotary embedding, and feed-forward parts with a squared ReLU. Some
models have experts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quire.layers.attention import Attention
from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.context import LayerContext
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.layers.mamba import Mamba2, MambaShape, step_limit
from quire.layers.mlp import SquaredReLU
from quire.layers.moe import SquaredExperts
from quire.layers.states import LAYER_TYPES, MAX_TAPS, StatesConfig, layer_kinds
from quire.models.decoder import DecoderLayer
from quire.models.states import StatesModel

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""


@dataclass(frozen=True, kw_only=True)
class NemotronConfig(StatesConfig):
    """Configuration of Nemotron-H.

    The file counts each Mamba-2, attention and feed-forward part as a layer. A layer here is a Mamba-2 or
    attention part, with the feed-forward part behind it if there is one.
    """

    mixers: tuple[int, ...]
    """For each layer, the number in the file of its Mamba-2 or attention part."""
    feed_forwards: tuple[int | None, ...]
    """For each layer, the number in the file of its feed-forward part; None: it has none."""

    @property
    def input_sizes(self) -> dict[str, int]:
        """See DecoderConfig."""
        latent = None if self.experts is None else self.experts.latent_size
        return super().input_sizes | ({} if latent is None else {"moe_latent_size": latent})

    def layer_weights(self, num_experts: int) -> int:
        """See DecoderConfig."""
        states, size, experts = len(self.state_layers), self.hidden_size, self.experts
        total = states * self.state.num_weights(size)
        total += (self.num_layers - states) * self._attention_weights
        dense = sum(place is not None for place in self.feed_forwards)
        if experts is not None:
            dense -= len(experts.layers)
            latent = experts.latent_size or size
            each = size * (experts.num_experts + 2 * experts.shared_size)
            each += 2 * num_experts * latent * experts.intermediate_size
            each += 0 if experts.latent_size is None else 2 * size * latent
            total += len(experts.layers) * each
        return total + dense * 2 * size * self.intermediate_size


class NemotronLayer(DecoderLayer):
    """Layer with Mamba-2 or attention, and with or without a feed-forward part."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, NemotronConfig)
        self.has_feed_forward = config.feed_forwards[layer] is not None
        if not self.has_feed_forward:
            del self.post_attention_layernorm

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, NemotronConfig)
        return Mamba2(config) if layer in config.state_layers else Attention(config, layer)

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer. A layer without a feed-forward part has a module that does nothing."""
        assert isinstance(config, NemotronConfig)
        if config.feed_forwards[layer] is None:
            return nn.Identity()
        if config.experts is not None and layer in config.experts.layers:
            return SquaredExperts(config, config.experts)
        return SquaredReLU(config, config.intermediate_size, config.hidden_size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See DecoderLayer."""
        if self.has_feed_forward:
            return super().forward(x, residual, context)
        norm = self._norms[0]
        assert norm is not None
        normed, residual = norm.add(x, residual)
        return self.self_attn(normed, context), residual


class NemotronHForCausalLM(StatesModel):
    """`layers_block_type`, `layer_types` or `hybrid_override_pattern`, the first of these that the file has,
    says what the layers are. The tensors `mtp.*`, for multi-token prediction, are not loaded."""

    layer_class = NemotronLayer
    state_name = "self_attn"

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> NemotronConfig:
        """See DecoderModel."""
        _refuse_others(hf)
        layers = _layers(hf)
        base = super().parse_config(
            hf.with_defaults(num_key_value_heads=8, head_dim=128, intermediate_size=21504).replace(
                num_hidden_layers=len(layers),
                rms_norm_eps=hf.number("layer_norm_epsilon", 1e-5),
                hidden_act="silu",  # of Mamba-2; the feed-forward parts have a squared ReLU
                partial_rotary_factor=None,
                rope_parameters=None,
                rope_scaling=None,
            ),
            dtype,
        )
        shape = MambaShape(
            num_heads=hf.require_int("mamba_num_heads", 128, most=MAX_HEADS),
            head_dim=hf.require_int("mamba_head_dim", 64, most=MAX_HEADS),
            num_groups=hf.require_int("n_groups", 8, most=MAX_HEADS),
            state_dim=hf.require_int("ssm_state_size", 128, most=MAX_HEADS),
            num_taps=hf.require_int("conv_kernel", 4, most=MAX_TAPS),
            conv_bias=hf.flag("use_conv_bias", True),
            proj_bias=hf.flag("use_bias", False),
            step_limit=step_limit(hf),
        )
        shape.check(hf, "mamba_num_heads", "n_groups", "conv_kernel")
        with_experts = tuple(index for index, one in enumerate(layers) if one.feed_forward == "moe")
        bias = hf.flag("mlp_bias", False)
        if bias and with_experts:
            raise hf.error("mlp_bias true is not supported in models with experts")
        return NemotronConfig(
            **vars(base)
            | {
                "rope": base.rope.without_rotation(),
                "wide_norms": True,
                "mlp_bias": bias,
                "experts": _experts(hf, with_experts),
            },
            state=shape,
            state_layers=tuple(i for i, one in enumerate(layers) if one.mixer == "linear_attention"),
            mixers=tuple(one.place for one in layers),
            feed_forwards=tuple(None if one.feed_forward is None else one.place + 1 for one in layers),
        )

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        config = self.config
        assert isinstance(config, NemotronConfig)
        for path, module in super()._named_modules():
            found = re.match(r"model\.layers\.(\d+)\.(\w+)", path)
            if found:
                layer, part = int(found[1]), found[2]
                is_mixer = part in ("self_attn", "input_layernorm")
                place = config.mixers[layer] if is_mixer else config.feed_forwards[layer]
                name = "norm" if part.endswith("layernorm") else "mixer"
                path = f"model.layers.{place}.{name}{path[found.end() :]}"
            yield path, module

    def canonical_name(self, name: str) -> str:
        """See Model."""
        name = re.sub(r"^backbone\.", "model.", name)
        return name.replace("model.embeddings.", "model.embed_tokens.").replace(
            "model.norm_f.", "model.norm."
        )

    def ignores(self, name: str) -> bool:
        """See Model."""
        return name.startswith("mtp.") or super().ignores(name)


@dataclass
class _Layer:
    """A Mamba-2 or attention part, and the feed-forward part behind it, if there is one."""

    place: int
    """Number of the Mamba-2 or attention part in the file; that of the feed-forward part is one more."""
    mixer: str
    feed_forward: str | None = None


def _layers(hf: HFConfig) -> list[_Layer]:
    """Returns the layers that the file's parts make; raises CheckpointError."""
    key = next(
        (key for key in ("layers_block_type", "layer_types") if hf.get(key)), "hybrid_override_pattern"
    )
    if key == "hybrid_override_pattern":
        pattern = hf.get(key)
        listed = hf.replace(**{key: list(pattern) if isinstance(pattern, str) else pattern})
        kinds = layer_kinds(listed, key, None, _PATTERN)
    else:
        kinds = layer_kinds(hf, key, None, {**LAYER_TYPES, "mlp": "mlp", "moe": "moe"})
    layers: list[_Layer] = []
    for place, kind in enumerate(kinds):
        if kind not in ("mlp", "moe"):
            layers.append(_Layer(place, kind))
        elif layers and layers[-1].place == place - 1:
            layers[-1].feed_forward = kind
        else:
            raise hf.error(
                f"{key}: feed-forward layer {place} without Mamba-2 or attention before it is not supported"
            )
    return layers


def _refuse_others(hf: HFConfig) -> None:
    """Raises CheckpointError for activations that are not supported, for attention biases and for tied
    embeddings."""
    for key, only in (
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
    ):
        if hf.get(key, only) != only:
            raise hf.error(f"{key} {hf.get(key)!r:.40} is not supported; supported: {only}")


def _experts(hf: HFConfig, layers: tuple[int, ...]) -> ExpertsConfig | None:
    """Reads the configuration of the experts in `layers`; None: `layers` is empty. Raises CheckpointError."""
    if not layers:
        return None
    defaults = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    # Their number says nothing of the shared expert's size here.
    hf = hf.with_defaults(norm_topk_prob=True, **defaults).replace(
        n_shared_experts=1, first_k_dense_replace=0
    )
    experts = ExpertsConfig.of_deepseek(hf, len(layers))
    latent = None if hf.get("moe_latent_size") is None else hf.require_int("moe_latent_size")
    return dataclasses.replace(
        experts,
        layers=layers,
        routing=dataclasses.replace(experts.routing, shared=None),
        shared_size=hf.require_int("moe_shared_expert_intermediate_size", 7688),
        latent_size=latent,
    )
