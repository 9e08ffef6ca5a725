"""DecoderConfig: a model's configuration under the same names for all model families."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from quire.converters import INT32_MAX
from quire.errors import ConfigError
from quire.layers.hf_config import MAX_HEADS, MAX_SIZE, HFConfig
from quire.layers.pooling import Classifier
from quire.layers.rotary import RopeConfig
from quire.layers.scheme import SCHEMES, LinearScheme
from quire_kernels.ranks import ALONE, Ranks
from quire_kernels.routing import Routing

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Operators' names of activations, by the names in config.json."""
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_SOFTCAP = 10_000
"""Largest cap of attention scores that is accepted. Above it, the error of fast kernels' tanh, times the cap,
might matter. Gemma 2 has 50."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Sizes and routing of mixture-of-experts layers. In such a layer, some of the experts compute each
    token. Inner sizes in one rank's configuration are those of the rank's part."""

    layers: tuple[int, ...]
    """Indices of the layers with experts."""
    num_experts: int
    """Number of a layer's routed experts, without the shared expert."""
    intermediate_size: int
    """Inner size of one routed expert."""
    routing: Routing
    has_score_bias: bool = False
    """Whether each expert has a bias that is added to its score when experts are chosen, but not in its
    share."""
    scales_inputs: bool = False
    """Whether a token's shares multiply the inputs of its routed experts instead of their outputs."""
    shared_size: int = 0
    """Inner size of the shared expert, which computes every token; 0: there is none. Several shared experts
    count as one of their total size."""
    latent_size: int | None = None
    """Size of the vectors to which hidden states are projected for the routed experts; None: they read the
    hidden states themselves. Only SquaredExperts supports it."""
    max_resident: int | None = None
    """Most routed experts of a layer in memory at a time, fewer than `num_experts`; None: all of them are."""

    @classmethod
    def from_hf(
        cls,
        hf: HFConfig,
        count_key: str,
        size_key: str,
        *,
        layers: Iterable[int],
        renormalizes: bool,
        gated_shared_size: int = 0,
    ) -> ExpertsConfig:
        """Reads the experts' sizes under the keys that the family uses; raises CheckpointError.

        Args:
            count_key: key of the number of experts.
            size_key: key of an expert's inner size.
            layers: indices of the layers with experts.
            renormalizes: see `Routing`.
            gated_shared_size: inner size of a shared expert with a gate; 0: there is none.
        """
        num_experts = hf.require_int(count_key, most=MAX_EXPERTS)
        return cls(
            layers=tuple(layers),
            num_experts=num_experts,
            intermediate_size=hf.require_int(size_key),
            routing=Routing(
                num_chosen=hf.require_int("num_experts_per_tok", most=num_experts),
                renormalizes=renormalizes,
                shared="gated" if gated_shared_size else None,
            ),
            shared_size=gated_shared_size,
        )

    @classmethod
    def of_deepseek(
        cls, hf: HFConfig, num_layers: int, *, scoring: Literal["softmax", "sigmoid"] = "sigmoid"
    ) -> ExpertsConfig:
        """Reads the keys of DeepSeek's checkpoints, and of others that use the same keys.

        Version 3 scores experts by sigmoids with a bias, and groups by their two best experts (`topk_method`
        noaux_tc). Version 2 scores experts by softmax. With `topk_method` greedy, it chooses among all
        experts; with group_limited_greedy, it scores groups by their best expert. Softmax shares are never
        renormalised.

        Args:
            scoring: the scoring that the family's class computes. A file may state the same under
                `scoring_func`.

        Raises:
            CheckpointError: a value is missing or wrong, or the family's class does not support it.
        """
        is_sigmoid = scoring == "sigmoid"
        methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
        method = hf.get("topk_method", methods[0])
        # dots.llm1's files have the method's name for its scores.
        scorings = (scoring, "noaux_tc") if is_sigmoid else (scoring,)
        for key, value, known in (
            ("scoring_func", hf.get("scoring_func", scoring), scorings),
            ("topk_method", method, methods),
            ("moe_layer_freq", hf.require_int("moe_layer_freq", 1), (1,)),
        ):
            if value not in known:
                supported = ", ".join(map(str, known))
                raise hf.error(f"{key} {value!r:.40} is not supported; supported: {supported}")
        num_experts = hf.require_int("n_routed_experts", most=MAX_EXPERTS)
        num_groups = num_chosen_groups = 1
        if method != "greedy":
            num_groups = hf.require_int("n_group", 1, most=num_experts)
            num_chosen_groups = hf.require_int("topk_group", 1, most=num_groups)
        group_size, group_best = num_experts // num_groups, 2 if is_sigmoid else 1
        if num_experts % num_groups or group_size < group_best:
            raise hf.error(
                f"n_routed_experts={num_experts} in n_group={num_groups}: groups must be equal, and have "
                f"{group_best} experts or more"
            )
        num_chosen = hf.require_int("num_experts_per_tok", most=num_chosen_groups * group_size)
        renormalizes = hf.flag("norm_topk_prob", False)
        if renormalizes and not is_sigmoid:
            raise hf.error("norm_topk_prob true is not supported with softmax: transformers does not obey it")
        dense, size = hf.get("first_k_dense_replace", 0), hf.require_int("moe_intermediate_size")
        if type(dense) is not int or not 0 <= dense <= num_layers:
            raise hf.error(
                f"first_k_dense_replace must be a number of layers up to {num_layers}, got {dense!r:.40}"
            )
        shared_size = size * hf.require_int("n_shared_experts", most=MAX_SIZE // size)
        return cls(
            layers=tuple(range(dense, num_layers)),
            num_experts=num_experts,
            intermediate_size=size,
            routing=Routing(
                num_chosen=num_chosen,
                renormalizes=renormalizes,
                scoring=scoring,
                scale=hf.number("routed_scaling_factor", 1.0),
                num_groups=num_groups,
                num_chosen_groups=num_chosen_groups,
                group_best=group_best,
                shared="whole",
            ),
            has_score_bias=is_sigmoid,
            shared_size=shared_size,
        )


class NormNames(NamedTuple):
    """Names of a layer's norms, usually those in checkpoints; None: there is no norm in that position."""

    attention_input: str | None
    attention_output: str | None
    """Name of the norm of the attention output, which is applied before that is added to the residual stream.
    `mlp_output` is the same for the feed-forward output."""
    mlp_input: str | None
    mlp_output: str | None


INPUT_NORMS = NormNames("input_layernorm", None, "post_attention_layernorm", None)
SANDWICH_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
OUTPUT_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


class QueryScaling(NamedTuple):
    """Scaling of queries by position, for contexts longer than in training: queries at position p are
    multiplied by 1 + beta * ln(1 + floor((p + offset) / length)). (Llama 4; "Scalable-Softmax Is Superior for
    Attention", arXiv 2501.19399.)"""

    beta: float
    length: int
    offset: int
    """0 or 1, added to the position."""
    layers: tuple[int, ...]
    """Indices of the layers whose queries are scaled."""

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the float32 factors [num_tokens] for int64 positions [num_tokens]."""
        return 1 + self.beta * torch.log(1 + torch.floor((positions + self.offset) / self.length))


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Sizes of sparse attention's indexer; see `Indexer`."""

    topk: int
    """Most positions that a token attends to."""
    num_heads: int
    head_dim: int
    interleaved: bool
    """Whether neighbouring dimensions of an indexer's head rotate together, as in `LatentConfig.interleaved`.
    The first `LatentConfig.rope_dim` dimensions of the head are rotated."""
    shared_layers: tuple[int, ...] = ()
    """Indices of the layers without an indexer. Their tokens attend to the positions that the last indexer
    before them chose."""

    @classmethod
    def from_hf(cls, hf: HFConfig, latent: LatentConfig, *, interleaved: bool) -> IndexConfig:
        """Reads the sizes from config.json; raises CheckpointError."""
        if latent.query_rank is None:
            raise hf.error("q_lora_rank null is not supported: the indexer reads the queries' latent")
        head_dim = hf.require_int("index_head_dim", 128, most=MAX_HEADS)
        if head_dim < latent.rope_dim:
            raise hf.error(f"index_head_dim={head_dim} is less than qk_rope_head_dim={latent.rope_dim}")
        if not latent.interleaved:
            raise hf.error("rope_interleave false is not supported beside an indexer")
        if hf.flag("indexer_rope_interleave", interleaved) != interleaved:
            only = str(interleaved).lower()
            raise hf.error(f"indexer_rope_interleave is always {only} for {hf.architecture}")
        return cls(
            topk=hf.require_int("index_topk", 2048),
            num_heads=hf.require_int("index_n_heads", most=MAX_HEADS),
            head_dim=head_dim,
            interleaved=interleaved,
        )


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention; see `LatentAttention`."""

    kv_rank: int
    """Size of the latent of keys and values. All heads' values, and their keys except for the rotated part,
    are computed from it."""
    query_rank: int | None
    """Size of the latent from which queries are computed; None: queries are computed from the hidden
    state."""
    nope_dim: int
    """Dimensions of a head's queries and keys that are not rotated."""
    rope_dim: int
    """Dimensions of a head's queries and keys that are rotated."""
    value_dim: int
    """Dimensions of a head's values."""
    interleaved: bool
    """Whether neighbouring dimensions rotate together; False: pairs (i, i + rope_dim / 2) do."""
    index: IndexConfig | None = None
    """Sizes of the indexer; None: tokens attend to all positions that they see."""

    @classmethod
    def from_hf(cls, hf: HFConfig) -> LatentConfig:
        """Reads the sizes from config.json; raises CheckpointError."""
        # A null says that there is none, and no key that it is the default.
        has_rank = hf.values.get("q_lora_rank", 1536) is not None
        config = cls(
            kv_rank=hf.require_int("kv_lora_rank", 512, most=MAX_HEADS),
            query_rank=hf.require_int("q_lora_rank", 1536) if has_rank else None,
            nope_dim=hf.require_int("qk_nope_head_dim", 128, most=MAX_HEADS),
            rope_dim=hf.require_int("qk_rope_head_dim", 64, most=MAX_HEADS),
            value_dim=hf.require_int("v_head_dim", 128, most=MAX_HEADS),
            interleaved=hf.flag("rope_interleave", True),
        )
        return config


class AttentionKind(NamedTuple):
    """Properties of a layer's attention by which its kernel is chosen."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Number of positions that a token sees, itself included; None: there is no window."""
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and switches of a decoder. Families with more of them, and encoders, extend this class."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a query, key or value head in attention over the KV cache; some families have layers with
    another size. With `latent`, this and `num_kv_heads` describe the cached vectors instead of the keys and
    values computed from them."""
    max_position_embeddings: int
    """Longest sequence that the checkpoint is made for, in tokens; usually the default of `max_model_len`."""
    dtype: torch.dtype
    """Type of activations, of most weights that are not quantised, and of keys and values in the KV cache
    unless `kv_cache_dtype` says otherwise."""
    rms_norm_eps: float
    activation: str
    """Operators' name of the feed-forward parts' activation: one of ACTIVATIONS' values or, for gpt-oss,
    clamped_swiglu. Nemotron-H's feed-forward parts do not read it."""
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """Window of each layer: number of positions that a token sees, itself included; None: there is no window.
    Encoders count differently, see `EncoderConfig`."""
    other_rope: RopeConfig | None = None
    """Rotary embedding of the layers in `other_rope_layers`; None: there is none besides `rope`."""
    other_rope_layers: tuple[int, ...] = ()
    rope_interleaved: bool = False
    """Whether the checkpoint's heads rotate neighbouring dimensions together. If so, the loader reorders the
    rows of the query and key projections, and the operators rotate pairs half of the rotated dimensions
    apart. With `latent`, `LatentConfig.interleaved` counts instead."""
    query_scaling: QueryScaling | None = None
    chunk_size: int | None = None
    """Positions in a chunk. In `chunked_layers`, a token sees only itself and the tokens before it in its
    chunk; see `AttentionMetadata.chunked`. None: no layer is chunked."""
    chunked_layers: tuple[int, ...] = ()
    attention_scale: float
    attention_softcap: float | None = None
    attention_sinks: bool = False
    """Whether each query head has an attention sink: a score without a value; see `ops.paged_attention`."""
    logits_softcap: float | None = None
    """Cap of the logits, which become softcap * tanh(logit / softcap); None: they are not capped."""
    logits_divisor: float = 1.0
    embedding_scale: float | None = None
    """Factor of token embeddings, not applied to embeddings that a request provides; None: they are not
    scaled."""
    norms: NormNames = INPUT_NORMS
    residual_multiplier: float = 1.0
    """Factor of the attention and feed-forward outputs, after their norms if any, before they are added to
    the residual stream."""
    wide_norms: bool = False
    """Whether norms' scales are float32 and multiply before the result is rounded. `unit_offset_norms`
    includes this."""
    per_layer_size: int = 0
    """Size of an additional input of each layer per token, beside hidden states; 0: there is none. A row of
    `DecoderModel.embed` holds the hidden state, then these inputs of all layers."""
    unit_offset_norms: bool = False
    """Whether norms are as with `wide_norms`, and Hugging Face checkpoints store most of their scales minus
    1."""
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    """Whether checkpoints store the query, key and value projections as one tensor, `qkv_proj`."""
    fused_gate_up: bool = False
    """Whether checkpoints store gate and up of feed-forward layers as one tensor, `gate_up_proj`."""
    mlp_bias: bool = False
    """Whether feed-forward layers, experts and routers have biases. BERT does not read it: its layers have
    them."""
    deepstack_levels: int = 0
    """Number of layers, from the first on, after which deepstack adds image features to the hidden states."""
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    """Sizes of latent attention; None: the model has ordinary attention."""
    qk_norm: bool = False
    """Whether queries and keys are normed: each head by itself, with learned scales, before the rotary
    embedding. `qk_norm_whole`, `qk_norm_behind_rope` and `Llama4Attention` do this otherwise."""
    qk_norm_whole: bool = False
    """Whether, with `qk_norm`, one norm covers all query heads together, and another all key heads."""
    qk_norm_behind_rope: bool = False
    classifier: Classifier | None = None
    """Labels and activation of the checkpoint's classifier; None: the checkpoint has no classifier."""
    scheme: LinearScheme = SCHEMES[None]
    """Scheme by which most linear layers, the embedding and the output head are stored and packed."""
    attention_backend: str | None = None
    """Name of the implementation of attention that the configuration asks for; None: the best one is chosen.
    No checkpoint states it."""
    ranks: Ranks = ALONE
    """Tensor-parallel ranks that compute the model. Numbers of heads and inner sizes here are this rank's."""
    whole: DecoderConfig | None = None
    """Configuration of the whole model, if this one is one rank's part; None: this is the whole model."""
    kv_parts: int = 1
    """Number of parts into which the KV heads are divided. With fewer parts than ranks, several ranks have
    the same part."""

    def __post_init__(self) -> None:
        for window in self.sliding_windows:
            if window is not None and (type(window) is not int or not 1 <= window <= INT32_MAX):
                raise ValueError(f"a sliding window of {window!r:.40}")
        for name in (
            *("attention_scale", "attention_softcap", "logits_softcap", "logits_divisor"),
            *("embedding_scale", "residual_multiplier"),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ValueError(f"{name} of {value!r:.40} is no positive number")
        if (self.attention_softcap or 0) > MAX_SOFTCAP:
            raise ValueError(f"attention_softcap of {self.attention_softcap} is more than {MAX_SOFTCAP}")

    def of_rank(self, ranks: Ranks) -> DecoderConfig:
        """Returns one rank's configuration: its share of each layer's heads and inner features. If there are
        fewer KV heads than ranks, several ranks have the same KV head.

        Raises:
            ConfigError: the ranks cannot divide the query heads or inner features equally, their number is
                neither a divisor nor a multiple of that of KV heads, or tensor parallelism does not support
                the model.
        """
        experts, kv_heads, size = self.experts, self.num_kv_heads, ranks.size
        for key, is_so in self._undivided.items():
            if is_so:
                raise ConfigError(f"tensor_parallel_size={size}: ranks do not divide {key}")
        for name, whole in {"num_attention_heads": self.num_heads, **self.inner_sizes}.items():
            if whole % size:
                raise ConfigError(f"tensor_parallel_size={size} does not divide {name}={whole}")
        if kv_heads % size and size % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide num_key_value_heads={kv_heads}, nor is it a "
                "multiple of it"
            )
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=experts.intermediate_size // size,
                shared_size=experts.shared_size // size,
            )
        return replace(
            self,
            ranks=ranks,
            whole=self,
            kv_parts=min(size, kv_heads),
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, kv_heads // size),
            intermediate_size=self.intermediate_size // size,
            experts=experts,
        )

    @property
    def _undivided(self) -> dict[str, bool]:
        """Names of properties that tensor parallelism does not support, each with whether this model has
        it."""
        return {
            "projections that a checkpoint holds as one": self.fused_qkv or self.fused_gate_up,
            "norms of all heads together": self.qk_norm_whole,
            "layers of different shapes": type(self) is not DecoderConfig,
        }

    @property
    def num_weights(self) -> int:
        """Number of weights in the matrices of the layers, the embedding and the output head. For some
        families it is only about right."""
        experts = self.experts
        tables = 1 if self.tie_word_embeddings else 2
        of_layers = self.layer_weights(0 if experts is None else experts.num_experts)
        return of_layers + tables * self.vocab_size * self.hidden_size

    def layer_weights(self, num_experts: int) -> int:
        """Returns the number of weights in the matrices of all layers, counting `num_experts` routed experts
        and the shared expert in each layer with experts. For some families it is only about right."""
        rows = self.num_layers * 3 * self.intermediate_size
        if self.experts is not None:
            inner = num_experts * self.experts.intermediate_size + self.experts.shared_size
            router = self.experts.num_experts + self.experts.routing.num_gates
            rows += len(self.experts.layers) * (router + 3 * (inner - self.intermediate_size))
        return self.hidden_size * rows + self.num_layers * self._attention_weights

    @property
    def attended_size(self) -> int:
        """Number of input features of attention's output projection: the sizes of all heads' values together.
        Some families have layers with another number."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def _attention_weights(self) -> int:
        """Number of weights in the matrices of one layer's attention. Some families have layers with another
        number."""
        latent = self.latent
        if latent is None:
            return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        query_size = self.num_heads * (latent.nope_dim + latent.rope_dim)
        sizes = self.attended_size + latent.kv_rank + latent.rope_dim
        of_query = self.hidden_size * query_size
        if latent.query_rank is not None:
            of_query = latent.query_rank * (self.hidden_size + query_size)
        expanded = self.num_heads * latent.nope_dim + self.attended_size
        if (index := latent.index) is not None:
            sizes += index.head_dim + index.num_heads
            of_query += (latent.query_rank or 0) * index.num_heads * index.head_dim
        return self.hidden_size * sizes + of_query + latent.kv_rank * expanded

    @property
    def inner_sizes(self) -> dict[str, int]:
        """Inner sizes of the model's feed-forward parts, experts and shared expert, by names for error
        messages."""
        sizes = {"intermediate_size": self.intermediate_size}
        if self.experts is not None:
            if len(self.experts.layers) == self.num_layers:
                del sizes["intermediate_size"]
            sizes["intermediate_size of experts"] = self.experts.intermediate_size
            if self.experts.shared_size:
                sizes["intermediate_size of the shared expert"] = self.experts.shared_size
        return sizes

    @property
    def input_sizes(self) -> dict[str, int]:
        """Numbers of input features to be checked against the groups of `quantization` (see ModelConfig), by
        names for error messages."""
        sizes = {
            "hidden_size": self.hidden_size,
            **self.inner_sizes,
            "inputs of o_proj": self.attended_size,
        }
        if self.latent is not None and self.latent.query_rank is not None:
            sizes["q_lora_rank"] = self.latent.query_rank
        return sizes

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose part of the KV cache it uses: itself or, for some layers at the
        end, an earlier one."""
        return tuple(range(self.num_layers))

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """Windows of the layers that have a part of the KV cache of their own. Such layers come before all
        others."""
        return self.sliding_windows[: max(self.kv_layers) + 1]

    @property
    def embedded_size(self) -> int:
        """Size of a row of the result of `DecoderModel.embed`."""
        return self.hidden_size + self.num_layers * self.per_layer_size

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The different kinds of attention among the layers."""
        kinds = (self._attention_kind(window) for window in self.sliding_windows)
        return tuple(dict.fromkeys(kinds))

    def _attention_kind(self, window: int | None) -> AttentionKind:
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return AttentionKind(*heads, window, self.attention_softcap, self.attention_sinks)

    @property
    def keeps_logits_order(self) -> bool:
        """Whether the order of the logits is that of the output head's products. False: a cap, or a divisor
        that is not a power of two, may round different products to equal logits."""
        return self.logits_softcap is None and math.frexp(self.logits_divisor)[0] == 0.5

    @property
    def embeds_size(self) -> int:
        """Size of an image embedding's row: the embedding, then what each deepstack level adds."""
        return self.hidden_size * (1 + self.deepstack_levels)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Type of the scales of `RMSNorm`."""
        return torch.float32 if self.unit_offset_norms or self.wide_norms else self.dtype

    def with_sliding_rope(self, windows: tuple[int | None, ...], rope: RopeConfig) -> DecoderConfig:
        """Returns this configuration with these windows, and with rotary embedding `rope` in the layers that
        have a window. Raises ValueError if `rope` rotates another number of dimensions than `self.rope`."""
        if rope.rotary_dim != self.rope.rotary_dim:
            sizes = f"{self.rope.rotary_dim} and {rope.rotary_dim}"
            raise ValueError(f"{sizes} dimensions of a head would rotate in different layers")
        layers = tuple(layer for layer, window in enumerate(windows) if window is not None)
        return replace(self, sliding_windows=windows, other_rope=rope, other_rope_layers=layers)

    @classmethod
    def from_hf(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Reads what all families have in common. A family's `parse_config` replaces what differs.

        Raises:
            CheckpointError: a value is missing, wrong or not supported.
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
        if not hf.flag("is_causal", True):
            raise hf.error("is_causal false is not supported: tokens see those before them alone")
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
    """Returns each layer's window according to `layer_types`; None: config.json has no such list.

    Raises:
        CheckpointError: the list has the wrong length, or a type other than full_attention and
            sliding_attention, or names sliding_attention although `window` is None.
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


def ropes_by_layer_type(
    hf: HFConfig, theta: Any, sliding_theta: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope parameters of full-attention layers, and those of layers with a window.

    Args:
        theta: theta of full-attention layers if their parameters state none.
        sliding_theta: theta of layers with a window if their parameters state none.

    Raises:
        CheckpointError: rope_parameters holds something other than an object for each type.
    """
    by_type = hf.get("rope_parameters", {})
    if not isinstance(by_type, dict) or not all(isinstance(value, dict | None) for value in by_type.values()):
        raise hf.error("rope_parameters must hold an object for each type of layer")
    # In older files, rope_scaling applies to full-attention layers only.
    full = {**(by_type.get("full_attention") or {}), **hf.get("rope_scaling", {})}
    sliding = by_type.get("sliding_attention") or {}
    return {"rope_theta": theta, **full}, {"rope_theta": sliding_theta, **sliding}


def layers_without_rope(hf: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers without rotary embedding: those with a 0 in `no_rope_layers`. If that
    key is missing or empty, every `no_rope_layer_interval`th layer, by default every fourth. Raises
    CheckpointError if one of these is wrong."""
    flags = hf.get("no_rope_layers")
    if not flags:
        interval = hf.require_int("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise hf.error(f"no_rope_layers must be {num_layers} numbers 0 or 1, got {flags!r:.80}")
    return tuple(layer for layer, flag in enumerate(flags) if not flag)
