"""DecoderConfig: what the decoder must know of a checkpoint, whatever its family calls it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quire.converters import INT32_MAX
from quire.layers.rotary import RopeConfig
from quire.layers.scheme import SCHEMES, LinearScheme
from quire.models.hf_config import MAX_HEADS, HFConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of the operators' activations by those of config.json."""
MAX_LAYERS = 4096
MAX_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture-of-experts layers: each token is computed by some of a layer's experts."""

    layers: tuple[int, ...]
    """Which layers have them; the others have a feed-forward of `intermediate_size`."""
    num_experts: int
    """Of a layer."""
    num_chosen: int
    """By a token."""
    intermediate_size: int
    """Of one expert."""
    renormalizes: bool
    """Whether the weights of a token's experts sum to 1; else they are shares among all experts."""

    @classmethod
    def from_hf(
        cls, hf: HFConfig, count_key: str, size_key: str, *, layers: Iterable[int], renormalizes: bool
    ) -> ExpertsConfig:
        """Reads the sizes under their keys, which families call differently; raises CheckpointError."""
        num_experts = hf.require_int(count_key, most=MAX_EXPERTS)
        return cls(
            layers=tuple(layers),
            num_experts=num_experts,
            num_chosen=hf.require_int("num_experts_per_tok", most=num_experts),
            intermediate_size=hf.require_int(size_key),
            renormalizes=renormalizes,
        )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and switches of a Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest sequence the checkpoint states; the default of `max_model_len`."""
    dtype: torch.dtype
    """Type of weights, activations and the KV cache."""
    rms_norm_eps: float
    activation: str
    """The gate's activation as the operators name it: one of ACTIVATIONS' values."""
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """How many positions a token sees in each layer, itself included; None: all."""
    sliding_rope: RopeConfig | None = None
    """Rotary embedding of the layers with a window, where it differs from `rope`."""
    attention_scale: float
    attention_softcap: float | None = None
    attention_sinks: bool = False
    """Whether each query head has a score whose value is nothing; see `ops.paged_attention`."""
    logits_softcap: float | None = None
    """Logits become softcap * tanh(logit / softcap)."""
    embedding_scale: float | None = None
    """What the embeddings of tokens (not those given by a request) are multiplied by."""
    unit_offset_norms: bool = False
    """Checkpoints hold the norms' scales less 1, which are float32 and apply before rounding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    """Of feed-forward layers, and of experts and what chooses them."""
    experts: ExpertsConfig | None = None
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotary embedding."""
    scheme: LinearScheme = SCHEMES[None]
    """That of the linear layers."""
    attention_backend: str | None = None
    """Implementation of attention that was asked for; None: the best one. No checkpoint states it."""

    def __post_init__(self) -> None:
        for window in self.sliding_windows:
            if window is not None and (type(window) is not int or not 1 <= window <= INT32_MAX):
                raise ValueError(f"a sliding window of {window!r:.40}")
        for name in ("attention_scale", "attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ValueError(f"{name} of {value!r:.40} is no positive number")

    @property
    def num_weights(self) -> int:
        """Of the matrices."""
        experts = self.experts
        tables = 1 if self.tie_word_embeddings else 2
        of_layers = self.layer_weights(0 if experts is None else experts.num_experts)
        return of_layers + tables * self.vocab_size * self.hidden_size

    def layer_weights(self, num_experts: int) -> int:
        """Of the matrices of all layers, with so many of a layer's experts."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = self.num_layers * (2 * heads + 2 * kv_heads + 3 * self.intermediate_size)
        if self.experts is not None:
            of_experts = self.experts.num_experts + 3 * num_experts * self.experts.intermediate_size
            rows += len(self.experts.layers) * (of_experts - 3 * self.intermediate_size)
        return self.hidden_size * rows

    @property
    def inner_sizes(self) -> dict[str, int]:
        """Sizes between the products of the feed-forward layers that there are, by their names."""
        sizes = {"intermediate_size": self.intermediate_size}
        if self.experts is not None:
            if len(self.experts.layers) == self.num_layers:
                del sizes["intermediate_size"]
            sizes["intermediate_size of experts"] = self.experts.intermediate_size
        return sizes

    @property
    def norm_dtype(self) -> torch.dtype:
        """Type of the norms' scales."""
        return torch.float32 if self.unit_offset_norms else self.dtype

    @classmethod
    def from_hf(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """The part all families share; a family's `parse_config` replaces what differs.

        Raises:
            CheckpointError: a value is missing or not supported.
        """
        hidden_size = hf.require_int("hidden_size")
        num_heads = hf.require_int("num_attention_heads", most=MAX_HEADS)
        num_layers = hf.require_int("num_hidden_layers", most=MAX_LAYERS)
        num_kv_heads = hf.require_int("num_key_value_heads", num_heads, most=MAX_HEADS)
        head_dim = hf.require_int("head_dim", hidden_size // num_heads, most=MAX_HEADS)
        if num_heads % num_kv_heads:
            raise hf.error(
                f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
            )
        activation = hf.get("hidden_act", "silu")
        if activation not in ACTIVATIONS:
            raise hf.error(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return cls(
            vocab_size=hf.require_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=hf.require_int("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=hf.require_int("max_position_embeddings", most=INT32_MAX),
            dtype=dtype,
            rms_norm_eps=hf.number("rms_norm_eps", 1e-6),
            activation=ACTIVATIONS[activation],
            tie_word_embeddings=hf.flag("tie_word_embeddings", False),
            rope=RopeConfig.from_hf(hf, head_dim),
            sliding_windows=(None,) * num_layers,
            attention_scale=head_dim**-0.5,
        )


def windows_by_layer_type(hf: HFConfig, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Windows of each layer from `layer_types`; None where config.json has no such list.

    Raises:
        CheckpointError: wrong length, or a type other than full_attention and sliding_attention.
    """
    types = hf.get("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        raise hf.error(f"layer_types has {len(types)} entries for {num_layers} layers")
    if window is None and "sliding_attention" in types:
        raise hf.error("layer_types names sliding_attention, but no sliding_window is switched on")
    windows = {"full_attention": None, "sliding_attention": window}
    for name in types:
        if name not in windows:
            raise hf.error(f"layer type {name!r} is not supported; supported: {', '.join(windows)}")
    return tuple(windows[name] for name in types)
