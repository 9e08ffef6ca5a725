"""Gemma 4. Layers with and without a window may have heads of different sizes. In some models the last layers
share keys and values with earlier ones, and each layer has an input of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from quire.layers.config import (
    MAX_EXPERTS,
    SANDWICH_NORMS,
    AttentionKind,
    DecoderConfig,
    ExpertsConfig,
    ropes_by_layer_type,
    windows_by_layer_type,
)
from quire.layers.context import AdapterStep, LayerContext
from quire.layers.embedding import Embedding
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Router, Routes
from quire.layers.norm import RMSNorm, UnitNorm
from quire.layers.rotary import RopeConfig
from quire.models.decoder import DecoderLayer, DecoderModel
from quire.models.interface import ForwardInputs
from quire.models.kv_spec import AttentionKV, KVSpec
from quire.models.stacked_experts import split_experts
from quire.models.vision_language import VisionLanguageModel
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.routing import Routing

_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
"""RoPE parameters of full-attention layers, for files whose `rope_parameters` state none."""
_PLACEHOLDERS = (("image", 258_880), ("video", 258_884), ("audio", 258_881))
_OF_SHARED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_PARTS = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """Gemma 4's configuration. `head_dim` and `num_kv_heads` describe layers with a window."""

    full_head_dim: int
    """Head size of full-attention layers. Their number of KV heads is `full_kv_heads`."""
    full_kv_heads: int
    values_are_keys: bool
    """Whether full-attention layers use their keys, before norm and rotation, as values."""
    num_shared: int
    """Number of layers at the end that share KV: each reads the keys and values of the last layer of its kind
    before these layers. Kinds: with and without a window."""
    widens_shared: bool
    """Whether the layers that share KV have a feed-forward part of twice the size."""
    per_layer_vocab_size: int
    placeholders: tuple[int, ...]
    """Ids of the tokens that images, videos and audio replace; empty: the model has no tower."""
    pad_token_id: int
    """Token as which placeholders are looked up."""
    has_joint_images: bool
    """Whether the tokens of an image see each other in both directions, in layers with a window."""

    @property
    def inner_sizes(self) -> dict[str, int]:
        """See DecoderConfig. A layer with experts has a dense part, too."""
        return {"intermediate_size": self.intermediate_size} | super().inner_sizes

    def layer_weights(self, num_experts: int) -> int:
        """See DecoderConfig."""
        count = super().layer_weights(num_experts)
        if self.experts is not None:
            count += self.num_layers * 3 * self.hidden_size * self.intermediate_size
        return count

    @property
    def input_sizes(self) -> dict[str, int]:
        """See DecoderConfig."""
        sizes = super().input_sizes
        sizes["inputs of o_proj without a window"] = self.num_heads * self.full_head_dim
        if self.per_layer_size:
            sizes["hidden_size_per_layer_input"] = self.per_layer_size
        return sizes

    def _attention_kind(self, window: int | None) -> AttentionKind:
        kind = super()._attention_kind(window)
        if window is not None:
            return kind
        return kind._replace(num_kv_heads=self.full_kv_heads, head_dim=self.full_head_dim)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """See DecoderConfig."""
        count = self.num_layers - self.num_shared
        kinds = [window is None for window in self.sliding_windows]
        last = {kind: layer for layer, kind in enumerate(kinds[:count])}
        return (*range(count), *(last[kind] for kind in kinds[count:]))


class Gemma4Attention(nn.Module):
    """Attention with norms of queries, keys and values; the norm of values has no scale. A layer may read the
    keys and values of another layer."""

    def __init__(self, config: Gemma4Config, layer: int) -> None:
        super().__init__()
        self.sliding_window, self.backend = config.sliding_windows[layer], config.attention_backend
        is_full = self.sliding_window is None
        self.head_dim = config.full_head_dim if is_full else config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.full_kv_heads if is_full else config.num_kv_heads
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.writes = config.kv_layers[layer] == layer
        parts = {"q_proj": query_size}
        if self.writes:
            parts["k_proj"] = kv_size
            if not (is_full and config.values_are_keys):
                parts["v_proj"] = kv_size
            self.k_norm = RMSNorm(config, self.head_dim)
            self.v_norm = UnitNorm(config, self.head_dim)
        self.q_norm = RMSNorm(config, self.head_dim)
        self.qkv = Linear(config, config.hidden_size, parts, parallel="column", bias=config.qkv_bias)
        self.out = Linear(
            config, query_size, {"o_proj": config.hidden_size}, parallel="row", bias=config.out_bias
        )

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape. Writes the new tokens' keys and values to the
        cache, unless the layer reads those of another."""
        cos, sin, kv_layer, meta = context.cos, context.sin, context.kv_layer, context.meta
        if self.sliding_window is None:
            meta = meta.causal()
        heads = self.qkv(x, context.adapters).unflatten(1, (-1, self.head_dim))
        query = ops.rope(self.q_norm(heads[:, : self.num_heads].contiguous()), cos, sin)
        if self.writes:
            key = heads[:, self.num_heads :][:, : self.num_kv_heads].contiguous()
            value = self.v_norm(heads[:, -self.num_kv_heads :].contiguous())
            ops.write_kv(ops.rope(self.k_norm(key), cos, sin), value, kv_layer, meta.slot_mapping)
        attended = ops.paged_attention(
            query,
            kv_layer,
            meta,
            scale=1.0,
            sliding_window=self.sliding_window,
            implementation=self.backend,
        )
        out: torch.Tensor = self.out(attended.flatten(1), context.adapters)
        return out


class Gemma4Router(Router):
    """Router that norms and scales its input. Each expert's share has a learned factor."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts, "proj")
        self.norm, self.factor = UnitNorm(config, config.hidden_size), config.hidden_size**-0.5
        self.scale, self.per_expert_scale = (
            nn.Parameter(torch.empty(size, dtype=config.dtype), requires_grad=False)
            for size in (config.hidden_size, experts.num_experts)
        )

    def forward(self, x: torch.Tensor) -> Routes:  # type: ignore[override]
        """See Router."""
        experts, shares = super().forward(self.norm(x) * self.scale * self.factor)
        return Routes(experts, shares * self.per_expert_scale[experts])


class Gemma4Experts(MixtureOfExperts):
    """Experts beside a dense feed-forward part. They and their router read the residual stream, each after a
    norm of its own."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts)
        self.gate = Gemma4Router(config, experts)
        self.norm = RMSNorm(config, config.hidden_size)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """See MixtureOfExperts."""
        return self.gate.ranks.sum(self.packed(self.norm(x), *self.gate(x)))


class Gemma4Layer(DecoderLayer):
    """Gemma 3's layer. If the model has experts, their normed result is added to the normed result of the
    dense feed-forward part. If it has per-layer inputs, this layer's one (`context.per_layer`) is gated by
    the hidden state, projected, normed and added. The result is multiplied by a learned scalar."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.activation, size = config.activation, config.per_layer_size
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=config.dtype), requires_grad=False)
        self.moe: Gemma4Experts | None = None
        if config.experts is not None:
            self.moe = Gemma4Experts(config, config.experts)
            self.post_feedforward_layernorm_1 = RMSNorm(config, config.hidden_size)
            self.post_feedforward_layernorm_2 = RMSNorm(config, config.hidden_size)
        self.gate: Linear | None = None
        if size:
            hidden = config.hidden_size
            self.gate = Linear(config, hidden, {"per_layer_input_gate": size}, parallel=None, bias=False)
            self.projection = Linear(
                config, size, {"per_layer_projection": hidden}, parallel=None, bias=False
            )
            self.post_per_layer_input_norm = RMSNorm(config, hidden)

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, Gemma4Config)
        return Gemma4Attention(config, layer)

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, Gemma4Config)
        is_wide = config.widens_shared and config.kv_layers[layer] != layer
        return GatedMLP(config, config.intermediate_size * (2 if is_wide else 1))

    def feed_forward(
        self, normed: torch.Tensor, residual: torch.Tensor, context: LayerContext
    ) -> torch.Tensor:
        """See DecoderLayer."""
        out = super().feed_forward(normed, residual, context)
        if self.moe is None:
            return out
        routed = self.post_feedforward_layernorm_2(self.moe(residual))
        return self.post_feedforward_layernorm_1(out) + routed

    @property
    def kv_shape(self) -> tuple[int, int]:
        """See DecoderLayer."""
        assert isinstance(self.self_attn, Gemma4Attention)
        return self.self_attn.num_kv_heads, self.self_attn.head_dim

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See DecoderLayer. The output contains the residual stream already."""
        out, residual = super().forward(x, residual, context)
        x = out if residual is None else out + residual
        if self.gate is not None:
            assert context.per_layer is not None
            gate = self.gate(x, context.adapters)
            mixed = ops.gate_mul(torch.cat([gate, context.per_layer], 1), self.activation)
            x = x + self.post_per_layer_input_norm(self.projection(mixed, context.adapters))
        return x * self.layer_scalar, None


class Gemma4ForCausalLM(DecoderModel):
    """Five layers with a window, then one without, unless `layer_types` says otherwise. The last layer
    always has full attention. Every layer or none has experts."""

    layer_class = Gemma4Layer
    has_tower = False

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        if hf.get("use_bidirectional_attention") == "all":
            raise hf.error("use_bidirectional_attention 'all' is not supported: the model generates no text")
        defaults = {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True}
        hf = hf.with_defaults(**defaults, hidden_activation="gelu_pytorch_tanh")
        full, sliding = ropes_by_layer_type(hf, 1_000_000.0, 10_000.0)
        if not (hf.get("rope_parameters") or {}).get("full_attention"):
            full = _FULL_ROPE
        base = super().parse_config(
            hf.replace(rope_parameters=sliding, rope_scaling=None, hidden_act=hf.get("hidden_activation")),
            dtype,
        )
        count, window = base.num_layers, hf.require_int("sliding_window", 512)
        types = hf.get("layer_types") or [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(count)
        ]
        windows = windows_by_layer_type(hf.replace(layer_types=types), count, window)
        assert windows is not None
        windows = (*windows[:-1], None)
        shape = _full_shape(hf, windows, base)
        own_size = hf.whole("hidden_size_per_layer_input", 256)
        own_vocab_size = hf.require_int("vocab_size_per_layer_input", 262_144)
        if own_size and own_vocab_size < base.vocab_size:
            raise hf.error(
                f"vocab_size_per_layer_input={own_vocab_size} is less than vocab_size={base.vocab_size}"
            )
        config = Gemma4Config(
            **vars(base)
            | {
                "rope": RopeConfig.from_hf(hf.replace(rope_parameters=full, rope_scaling=None), shape[0]),
                "other_rope": base.rope,
                "other_rope_layers": tuple(i for i, window in enumerate(windows) if window is not None),
                "sliding_windows": windows,
                "experts": _experts(hf, count) if hf.flag("enable_moe_block", False) else None,
                "norms": SANDWICH_NORMS,
                "wide_norms": True,
                "attention_scale": 1.0,
                "qkv_bias": hf.flag("attention_bias", False),
                "out_bias": hf.flag("attention_bias", False),
                "embedding_scale": float(torch.tensor(base.hidden_size**0.5, dtype=dtype)),
                "logits_softcap": hf.get("final_logit_softcapping"),
                "per_layer_size": own_size,
            },
            full_head_dim=shape[0],
            full_kv_heads=shape[1],
            values_are_keys=hf.flag("attention_k_eq_v", False),
            num_shared=hf.whole("num_kv_shared_layers", 0, most=count - 1),
            widens_shared=hf.flag("use_double_wide_mlp", False),
            per_layer_vocab_size=own_vocab_size,
            placeholders=tuple(
                hf.require_int(f"{kind}_token_id", token) for kind, token in _PLACEHOLDERS if cls.has_tower
            ),
            pad_token_id=hf.whole("pad_token_id", 0, most=base.vocab_size - 1),
            has_joint_images=cls.has_tower and hf.get("use_bidirectional_attention") == "vision",
        )
        kinds = {window is None for window in windows[: count - config.num_shared]}
        if kinds != {window is None for window in windows}:
            raise hf.error(
                f"num_kv_shared_layers={config.num_shared} leaves no layer of some type before them"
            )
        return config

    def make_parts(self, config: DecoderConfig) -> None:
        """See DecoderModel."""
        assert isinstance(config, Gemma4Config)
        self.has_joint_images = config.has_joint_images
        size, total = config.per_layer_size, config.num_layers * config.per_layer_size
        if not size:
            return
        scale = float(torch.tensor(size**0.5, dtype=config.dtype, device="cpu"))
        self.embed_tokens_per_layer = Embedding(
            config.per_layer_vocab_size, total, dtype=config.dtype, scale=scale
        )
        parts = {"per_layer_model_projection": total}
        self.projection = Linear(config, config.hidden_size, parts, parallel=None, bias=False)
        self.per_layer_projection_norm = RMSNorm(config, size)

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """See DecoderModel. Each row holds the hidden state, then the per-layer inputs of all layers, if the
        model has them."""
        assert isinstance(self.config, Gemma4Config)
        ids, size = inputs.input_ids, self.config.per_layer_size
        for token in self.config.placeholders:
            ids = ids.masked_fill(ids == token, self.config.pad_token_id)
        x = super().embed(replace(inputs, input_ids=ids))
        if not size:
            return x
        projected = (self.projection(x) * self.config.hidden_size**-0.5).unflatten(1, (-1, size))
        own = self.embed_tokens_per_layer(ids).view(projected.shape)
        mixed = (self.per_layer_projection_norm(projected) + own) * 2**-0.5
        return torch.cat([x, mixed.flatten(1)], 1)

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """See DecoderModel. Returns the spec of the kind of layer that needs more bytes."""
        config = self.config
        assert isinstance(config, Gemma4Config)
        shapes = ((config.num_kv_heads, config.head_dim), (config.full_kv_heads, config.full_head_dim))
        specs = [AttentionKV(*shape, config.dtype, kv_cache_dtype) for shape in shapes]
        return max(specs, key=lambda spec: spec.layer_bytes(1))

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits stacked experts."""
        prefix, separator, matrix = stored.name.rpartition(".experts.")
        parts = _STACKED.get(matrix)
        if not separator or parts is None or self.config.experts is None:
            yield stored
        else:
            yield from split_experts(stored, f"{prefix}.experts", parts, self.config.experts.num_experts)

    def canonical_name(self, name: str) -> str:
        """See Model."""
        return re.sub(
            r"\.router\.(scale|per_expert_scale)$", r".router.gate.\1", super().canonical_name(name)
        )

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for path, module in super()._named_modules():
            path = path.replace(".moe.gate", ".router.gate").replace(
                ".moe.norm", ".pre_feedforward_layernorm_2"
            )
            yield path.replace(".moe.", "."), module

    def ignores(self, name: str) -> bool:
        """See DecoderModel. Weights for the keys and values of layers that read another layer's are ignored
        too."""
        found = _OF_SHARED.match(name)
        if found is not None and int(found[1]) < self.config.num_layers:
            return self.config.kv_layers[int(found[1])] != int(found[1])
        return super().ignores(name)


def _experts(hf: HFConfig, num_layers: int) -> ExpertsConfig:
    """Reads the experts' sizes and routing; raises CheckpointError."""
    count = hf.require_int("num_experts", most=MAX_EXPERTS)
    chosen = hf.require_int("top_k_experts", most=count)
    return ExpertsConfig(
        layers=tuple(range(num_layers)),
        num_experts=count,
        intermediate_size=hf.require_int("moe_intermediate_size"),
        routing=Routing(num_chosen=chosen, renormalizes=True),
    )


def _full_shape(hf: HFConfig, windows: tuple[int | None, ...], base: DecoderConfig) -> tuple[int, int]:
    """Returns (head_dim, number of KV heads) of the layers without a window.

    Files state them under keys of their own; transformers 5 writes `per_layer_config`, by layer.

    Raises:
        CheckpointError: a value is wrong, or layers of one kind differ.
    """
    by_layer = hf.get("per_layer_config")
    if by_layer is None:
        heads = base.num_kv_heads
        if hf.flag("attention_k_eq_v", False):
            heads = hf.require_int("num_global_key_value_heads", heads, most=MAX_HEADS)
        return hf.require_int("global_head_dim", 512, most=MAX_HEADS), heads
    if not isinstance(by_layer, dict) or not all(isinstance(own, dict) for own in by_layer.values()):
        raise hf.error(f"per_layer_config must be an object for each layer's number, got {by_layer!r:.80}")
    shapes = set()
    for layer, window in enumerate(windows):
        own = HFConfig(hf.path, {**hf.values, **(by_layer.get(str(layer)) or {})})
        shape = tuple(own.require_int(key, most=MAX_HEADS) for key in ("head_dim", "num_key_value_heads"))
        if window is None:
            shapes.add(shape)
        elif shape != (base.head_dim, base.num_kv_heads):
            raise hf.error("per_layer_config: layers with a window differ: not supported")
    if len(shapes) != 1:
        raise hf.error("per_layer_config: layers without a window differ: not supported")
    ((size, heads),) = shapes
    return size, heads


class Gemma4ForConditionalGeneration(VisionLanguageModel, Gemma4ForCausalLM):
    """The text part of a Gemma 4 checkpoint with towers for images and, in some, audio. Audio is not
    supported."""

    has_tower = True

    def ignores(self, name: str) -> bool:
        """See DecoderModel."""
        return name.removeprefix("model.").startswith(_OTHER_PARTS) or super().ignores(name)
