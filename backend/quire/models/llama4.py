"""Llama 4, text: chunked attention, layers without rotary embedding, and experts with scaled inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers.attention import Attention
from quire.layers.config import (
    MAX_EXPERTS,
    DecoderConfig,
    ExpertsConfig,
    QueryScaling,
    layers_without_rope,
)
from quire.layers.context import AdapterStep
from quire.layers.hf_config import HFConfig
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts
from quire.layers.norm import UnitNorm
from quire.models.decoder import DecoderLayer, DecoderModel
from quire.models.vision_language import VisionLanguageModel
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.cpu.decoder import NormKind
from quire_kernels.routing import Routing


class Llama4Attention(Attention):
    """Llama 4's attention. In layers with rotary embedding, queries and keys are normed after it, without
    learned scales, unless `use_qk_norm` is false."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(dataclasses.replace(config, qk_norm=False), layer)
        if config.qk_norm and layer not in config.other_rope_layers:
            self.norm_kind = NormKind.BEHIND_ROPE
            self.q_norm = self.k_norm = UnitNorm(config, self.head_dim)


class Llama4Experts(MixtureOfExperts):
    """Llama 4's experts: those with a token's largest logits, and a shared one. The token's input to each
    chosen expert is multiplied by the sigmoid of that expert's logit."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts, router_name="router")
        self.shared_expert = GatedMLP(config, experts.shared_size)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """See MixtureOfExperts."""
        logits = self.gate.packed(x, torch.float32)
        experts, _ = ops.route(logits, self.gate.routing, None)
        shares = logits.gather(1, experts).sigmoid().to(x.dtype)
        scaled = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)
        whole = torch.ones((scaled.shape[0], 1), dtype=torch.float32, device=x.device)
        routed = self.packed(scaled, experts.view(-1, 1), whole).view(*experts.shape, -1)
        return self.shared_expert(x, adapters) + self.gate.ranks.sum(routed.sum(1))


class Llama4Layer(DecoderLayer):
    """Llama 4's layer, with a feed-forward part or experts."""

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        return Llama4Attention(config, layer)

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return GatedMLP(config, config.intermediate_size)
        return Llama4Experts(config, experts)


class Llama4ForCausalLM(DecoderModel):
    """Llama 4's text model. Every fourth layer has full attention without rotary embedding, the others have
    chunked attention, unless the file says otherwise."""

    layer_class = Llama4Layer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        sizes = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
        hf = hf.with_defaults(**sizes)
        config = super().parse_config(
            hf.replace(intermediate_size=hf.require_int("intermediate_size_mlp", 16384)), dtype
        )
        layers = range(config.num_layers)
        chunk_size = None
        if hf.values.get("attention_chunk_size", 8192) is not None:
            chunk_size = hf.require_int("attention_chunk_size", 8192)
        without, bias = layers_without_rope(hf, config.num_layers), hf.flag("attention_bias", False)
        chunked, scaling = _chunked_layers(hf, without, config.num_layers), None
        if hf.flag("attn_temperature_tuning", True):
            beta, length = hf.number("attn_scale", 0.1), hf.require_int("floor_scale", 8192)
            scaling = QueryScaling(beta, length, 1, without)
        step = hf.require_int("interleave_moe_layer_step", 1)
        of_experts = hf.get("moe_layers", list(range(step - 1, config.num_layers, step)))
        if not isinstance(of_experts, list) or any(layer not in layers for layer in of_experts):
            raise hf.error(f"moe_layers must be a list of layers' numbers, got {of_experts!r:.80}")
        count = hf.require_int("num_local_experts", 16, most=MAX_EXPERTS)
        size = hf.require_int("intermediate_size", 8192)
        experts = ExpertsConfig(
            layers=tuple(of_experts),
            num_experts=count,
            intermediate_size=size,
            routing=Routing(
                num_chosen=hf.require_int("num_experts_per_tok", 1, most=count), renormalizes=False
            ),
            scales_inputs=True,
            shared_size=size,
        )
        return dataclasses.replace(
            config,
            rope_interleaved=True,
            other_rope=config.rope.without_rotation(),
            other_rope_layers=without,
            query_scaling=scaling,
            qk_norm=hf.flag("use_qk_norm", True),
            qkv_bias=bias,
            out_bias=bias,
            experts=experts if of_experts else None,
            chunk_size=chunk_size,
            chunked_layers=chunked,
        )

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits [num_experts, in_features, out_features] into each expert's tensors."""
        prefix, separator, matrix = stored.name.partition(".feed_forward.experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(matrix)
        if not separator or parts is None:
            yield stored
            return
        tensor, experts = stored.tensor, self.config.experts
        count = 0 if experts is None else experts.num_experts
        if tensor.ndim != 3 or tensor.shape[0] != count or tensor.shape[2] % len(parts):
            raise CheckpointError(
                f"{stored.file}: {stored.name} has shape {list(tensor.shape)}, config.json means {count} "
                "experts"
            )
        for expert, content in enumerate(tensor):
            for index, part in enumerate(parts):
                name = f"{prefix}.feed_forward.experts.{expert}.{part}.weight"
                change = partial(_columns, index=index, count=len(parts))
                one = stored._replace(name=name, tensor=change(content))
                if stored.offset is not None:
                    offset = stored.offset + expert * content.nbytes
                    one = one._replace(offset=offset, change=change, raw=content)
                yield one

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            yield path.replace(".mlp", ".feed_forward"), module


def _columns(tensor: torch.Tensor, *, index: int, count: int) -> torch.Tensor:
    """Returns part `index` of `count` equal parts of the output features of `tensor` [in_features,
    out_features], as [out_features / count, in_features]."""
    return tensor.T.chunk(count)[index]


def _chunked_layers(hf: HFConfig, without: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the layers with chunked attention: those that `layer_types` calls chunked_attention or, if the
    file has no such list, those that are not in `without`. Raises CheckpointError if the list has a wrong
    length or another name."""
    types = hf.get("layer_types") or [
        "full_attention" if layer in without else "chunked_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"full_attention", "chunked_attention"}:
        raise hf.error(
            f"layer_types must be {num_layers} times full_attention or chunked_attention, got {types!r:.80}"
        )
    return tuple(layer for layer, name in enumerate(types) if name == "chunked_attention")


class Llama4ForConditionalGeneration(VisionLanguageModel, Llama4ForCausalLM):
    """Llama 4's text part. Images are not supported."""

    accepts_image_embeds = False

    def ignores(self, name: str) -> bool:
        """See DecoderModel."""
        return name.startswith("vision_model.") or super().ignores(name)
