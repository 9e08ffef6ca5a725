"""The decoder of the Llama family: everything that differs between its members is in DecoderConfig."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire.errors import CheckpointError, ConfigError
from quire.layers.attention import Attention
from quire.layers.config import DecoderConfig
from quire.layers.context import AdapterStep, LayerContext
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear, Part, Weight
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding, neighbours_apart
from quire.models.kv_groups import kv_groups
from quire.models.kv_spec import AttentionKV, KVLayers, KVSpec, LatentKV
from quire.roofline import ModelWork
from quire_common.host_memory import trim_heap
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.cpu.decoder import (
    DecoderLayerWeights,
    ExpertsWeights,
    FeedForwardWeights,
    LayerAdapters,
    NativeDecoder,
    can_fuse,
)
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of

_GIVE_BACK = 2**25
"""Bytes of packed weights behind which what they were loaded into is given back: of thousands of experts not
after each, as that takes milliseconds."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each between norms (`DecoderConfig.norms`) and added to the residual
    stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn: nn.Module = self.make_attention(config, layer)
        self.mlp = self.make_mlp(config, layer)
        self.residual_multiplier = config.residual_multiplier
        self.has_other_rope = layer in config.other_rope_layers
        self.is_chunked = config.chunk_size is not None and layer in config.chunked_layers
        scaling = config.query_scaling
        self.scales_queries = scaling is not None and layer in scaling.layers
        self._norms: list[RMSNorm | None] = []
        for name in config.norms:
            norm = None if name is None else RMSNorm(config, config.hidden_size)
            self._norms.append(norm)
            if name is not None:
                self.add_module(name, norm)

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The attention of a layer: [num_tokens, hidden_size] and its LayerContext to the same."""
        return Attention(config, layer) if config.latent is None else LatentAttention(config)

    @property
    def kv_shape(self) -> tuple[int, int] | None:
        """(KV heads, size of each) of what the layer keeps, in no more bytes than the model's KV spec says;
        None: it is what that says."""
        return None

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The feed-forward of a layer, or its experts: [num_tokens, hidden_size] to the same."""
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return GatedMLP(config, config.intermediate_size)
        return MixtureOfExperts(config, experts)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output of this layer, residual stream it is still to be added to, if any), both
        [num_tokens, hidden_size].

        Each addition is done by the norm that follows it, in one operator.
        """
        attention_input, attention_output, mlp_input, mlp_output = self._norms
        normed, residual = _add(attention_input, x, residual)
        attended = self._output(attention_output, self.self_attn(normed, context))
        normed, residual = _add(mlp_input, attended, residual)
        return self._output(mlp_output, self.mlp(normed, context.adapters)), residual

    def _output(self, norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
        """Term that is added to the residual stream: `x`, normalised and scaled as the model has it."""
        normed = x if norm is None else norm(x)
        return normed if self.residual_multiplier == 1 else normed * self.residual_multiplier

    def fused_weights(self, group: int) -> DecoderLayerWeights:
        """Weights and switches with which `NativeDecoder` computes the layer; `group`: index of the layer's
        metadata among those of a step."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, Attention)
        forward: FeedForwardWeights | ExpertsWeights
        if isinstance(mlp, MixtureOfExperts):
            router, bias = mlp.gate, mlp.gate.e_score_correction_bias
            forward = ExpertsWeights(
                router=router.packed,
                experts=mlp.packed,
                routing=router.routing,
                score_bias=None if bias is None else bias.data,
            )
        else:
            assert isinstance(mlp, GatedMLP)
            forward = FeedForwardWeights(gate_up=mlp.gate_up.packed, down=mlp.down.packed)
        q_norm, k_norm, sinks = attention.q_norm, attention.k_norm, attention.sinks
        norms = [None if norm is None else norm.weight.data for norm in self._norms]
        return DecoderLayerWeights(
            attention_norm=norms[0],
            qkv=attention.qkv.packed,
            query_norm=None if q_norm is None else q_norm.weight.data,
            key_norm=None if k_norm is None else k_norm.weight.data,
            norm_kind=attention.norm_kind,
            out=attention.out.packed,
            attention_output_norm=norms[1],
            feed_forward_norm=norms[2],
            feed_forward=forward,
            feed_forward_output_norm=norms[3],
            output_factor=self.residual_multiplier,
            attention_scale=attention.scale,
            softcap=attention.softcap,
            sinks=None if sinks is None else sinks.data,
            sliding_window=attention.sliding_window,
            has_other_rotations=self.has_other_rope,
            scales_queries=self.scales_queries,
            group=group,
        )

    def adapters(self) -> LayerAdapters:
        """Memory for the adapters of what `fused_weights` has."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, Attention)
        linears = [attention.qkv, attention.out]
        if isinstance(mlp, GatedMLP):
            linears += [mlp.gate_up, mlp.down]
        return LayerAdapters(*(linear.slots for linear in linears))


def _add(
    norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `RMSNorm.add`; without a norm the sum, twice."""
    if norm is not None:
        return norm.add(x, residual)
    total = x if residual is None else x + residual
    return total, total


class DecoderModel(nn.Module):
    """Token ids to hidden states to logits, over a paged KV cache.

    A family subclasses this and overrides `parse_config` (and whatever else differs). Weights are
    uninitialised until the loader has filled all of `weights()`.

    Args:
        config: of the checkpoint.
        max_model_len: longest sequence served; matters to some rope types only.
        device: where the weights are made.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    rotates_partly: bool = False
    """Whether the family obeys `partial_rotary_factor`; in transformers the others rotate whole heads."""
    has_layers_behind: bool = False
    """Whether checkpoints may have layers behind the last one, which predict further tokens."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.kv_groups = kv_groups(config.kv_windows)
        """Layers that share a block table; `forward` wants one AttentionMetadata for each group."""
        own = {
            layer: (group, position)
            for group, (_, layers) in enumerate(self.kv_groups)
            for position, layer in enumerate(layers)
        }
        self._places = {layer: own[source] for layer, source in enumerate(config.kv_layers)}
        self._packed_bytes = 0
        """Bytes of the modules packed since memory was last given back."""
        self._native: NativeDecoder | None = None
        self._kv_layers: tuple[KVLayers, list[KVLayer]] | None = None
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device)
        other = config.other_rope
        self.other_rotary = None if other is None else RotaryEmbedding(other, max_model_len, device)
        vocab_size, size, dtype = config.vocab_size, config.hidden_size, config.dtype
        is_tied = config.tie_word_embeddings
        with device:
            self.embed_tokens = Embedding(
                vocab_size,
                size,
                dtype=dtype,
                scale=config.embedding_scale,
                is_head=is_tied,
                ranks=config.ranks,
            )
            self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config, size)
            self.lm_head = self.embed_tokens
            if not is_tied:
                self.lm_head = Embedding(
                    vocab_size, size, dtype=dtype, is_looked_up=False, is_head=True, ranks=config.ranks
                )
            self.make_parts(config)
            for name, module in self._named_modules():
                if isinstance(module, Linear | Embedding):
                    module.allocate(config.scheme, name)

    def make_parts(self, config: DecoderConfig) -> None:
        """Makes what a family has beside embeddings, layers, norm and head."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """The family's reading of config.json; raises CheckpointError."""
        config = DecoderConfig.from_hf(hf, dtype)
        if config.rope.rotary_dim != config.head_dim and not cls.rotates_partly:
            raise hf.error(
                f"partial_rotary_factor: {config.rope.rotary_dim} of a head's {config.head_dim} dimensions "
                "would rotate, and in transformers all do"
            )
        return config

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """Spec of the KV cache: what each layer keeps of a token.

        Args:
            kv_cache_dtype: see `CacheConfig`.

        Raises:
            ConfigError: the model's cache cannot have it.
        """
        config = self.config
        if config.latent is not None:
            if kv_cache_dtype != "auto":
                raise ConfigError(
                    f"kv_cache_dtype={kv_cache_dtype} is not supported for models with latent attention: "
                    "their cache holds one small vector per token in the model's type"
                )
            return LatentKV(config.head_dim, config.dtype)
        return AttentionKV(config.num_kv_heads, config.head_dim, config.dtype, kv_cache_dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVLayers,
        metas: Sequence[AttentionMetadata],
        embeds: tuple[torch.Tensor, torch.Tensor] | None = None,
        rows: torch.Tensor | None = None,
        adapters: AdapterStep | None = None,
        *,
        best: bool = False,
    ) -> torch.Tensor:
        """Computes the new tokens of a ragged batch and stores their keys and values.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens] (or [3, num_tokens] for M-RoPE).
            kv_cache: written in place; layer i of a group lies at position i of the group's blocks.
            metas: which tokens belong together, and where their context is in the blocks of each KV group.
            embeds: (int64 [n], [n, embeds_size]): batch rows whose embedding is given, not looked up, and
                what they add behind the first layers, if the model has levels of deepstack.
            rows: int64 [n], ascending: batch rows whose result is wanted; None: all.
            adapters: None: no token has one.
            best: whether the result is to be `best_tokens` of the hidden states.

        Returns:
            [num_tokens or n, hidden_size], the final norm applied; with `best` int64 [num_tokens or n].
        """
        # One call has no place for levels; operators give its bits.
        native = None if self.config.deepstack_levels and embeds is not None else self._native_for(kv_cache)
        scaling = self.config.query_scaling
        metas = self._with_chunked(kv_cache, metas)
        has_chosen = False
        if native is None:
            x = self.embed(input_ids, embeds)
            out = self.compute(x, positions, kv_cache, metas, rows, adapters, embeds)
        else:
            x = input_ids if native.looks_up and embeds is None else self.embed(input_ids, embeds)
            if positions.ndim == 1:
                rotations = self.rotary.table_to(metas[0].max_seq_len)
            else:
                rotations, positions = self.rotary.rotations(positions), torch.arange(input_ids.shape[0])
            if rows is None:
                rows = torch.arange(input_ids.shape[0])
            other, has_chosen = self.other_rotary, best and native.chooses
            out = native(
                x,
                rotations,
                positions,
                self._layers_of(kv_cache),
                metas,
                rows,
                other_rotations=None if other is None else other.table_to(metas[0].max_seq_len),
                query_factors=None if scaling is None else scaling.factors(positions),
                adapters=None if adapters is None else adapters.slots,
                best=has_chosen,
            )
        return self.best_tokens(out) if best and not has_chosen else out

    def embed(
        self, input_ids: torch.Tensor, embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Input of the first layer, [num_tokens, embedded_size]; the arguments are those of `forward`."""
        x = self.embed_tokens(input_ids)
        if embeds is not None:
            x.index_copy_(0, embeds[0], embeds[1][:, : self.config.hidden_size])
        return x

    def compute(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVLayers,
        metas: Sequence[AttentionMetadata],
        rows: torch.Tensor | None = None,
        adapters: AdapterStep | None = None,
        embeds: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`forward` behind `embed`; `x` may be overwritten."""
        angles = self.rotary(positions)
        other_angles = angles if self.other_rotary is None else self.other_rotary(positions)
        scaling = self.config.query_scaling
        factors = None if scaling is None else scaling.factors(positions)
        metas = self._with_chunked(kv_cache, metas)
        residual: torch.Tensor | None = None
        size, own_size = self.config.hidden_size, self.config.per_layer_size
        x, *per_layer = x.split([size, *[own_size] * len(self.layers)], 1) if own_size else [x]
        for index, layer in enumerate(self.layers):
            group, position = self._places[index]
            assert isinstance(layer, DecoderLayer)
            if layer.is_chunked:
                group += len(self.kv_groups)
            cos, sin = other_angles if layer.has_other_rope else angles
            context = LayerContext(
                *(cos, sin, kv_cache.layer(position, layer.kv_shape), metas[group], adapters),
                factors if layer.scales_queries else None,
                per_layer[index] if per_layer else None,
            )
            x, residual = layer(x, residual, context)
            if embeds is not None and index < self.config.deepstack_levels:
                x.index_add_(0, embeds[0], embeds[1][:, (index + 1) * size : (index + 2) * size])
        hidden = self.norm.add(x, residual)[0]
        return hidden if rows is None else hidden[rows]

    def _with_chunked(
        self, kv_cache: KVLayers, metas: Sequence[AttentionMetadata]
    ) -> Sequence[AttentionMetadata]:
        """Metadata of each KV group, and behind them, if some layers are chunked, the same in chunks."""
        size = self.config.chunk_size
        if size is None or len(metas) > len(self.kv_groups):
            return metas
        block_size = data_of(kv_cache.layer(0)).shape[3]
        return [*metas, *(meta.chunked(size, block_size) for meta in metas)]

    def take_slots(self) -> None:
        """Computes with the adapters in its linear layers' slots, which are there now."""
        if self._native is not None:
            layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
            self._native.take_adapters([layer.adapters() for layer in layers])

    @property
    def is_fused(self) -> bool:
        """Whether all layers are one call."""
        return self._native is not None

    def _native_for(self, kv_cache: KVLayers) -> NativeDecoder | None:
        """Decoder that computes all layers in one call over this cache; None: there is none."""
        native = self._native
        return native if native is not None and native.can_use(self._layers_of(kv_cache)[0]) else None

    def _layers_of(self, kv_cache: KVLayers) -> list[KVLayer]:
        """Each layer's view of the pool, the same list each time."""
        if self._kv_layers is None or self._kv_layers[0] is not kv_cache:
            places = (self._places[index] for index in range(len(self.layers)))
            self._kv_layers = kv_cache, [kv_cache.layer(position) for _, position in places]
        return self._kv_layers[1]

    def pack(self) -> int:
        """Brings the loaded weights into the form that computes, layer by layer; to be called once.

        Returns:
            Bytes of all weights as they are kept.
        """
        for _, module in self.packed_modules():
            self.pack_module(module)
        return self.finish()

    def pack_module(self, module: Linear | Embedding) -> None:
        """Packs one of `packed_modules`."""
        module.pack()
        self._packed_bytes += module.nbytes
        if self._packed_bytes >= _GIVE_BACK:
            trim_heap()  # what was loaded: else all weights are in memory twice in the end
            self._packed_bytes = 0

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """Modules that have a packed form, by name."""
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding):
                yield name, module

    def finish(self) -> int:
        """Completes the model once all `packed_modules` are packed; returns what `pack` does."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts | LatentAttention):
                module.finish(self.norm.weight.device.type)
        self._native = self._fuse()
        num_bytes = self._absorbed_bytes + sum(module.nbytes for _, module in self.packed_modules())
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def packed_bytes(self, device_type: str) -> int:
        """Bytes that `pack` will return on such a device, about; known before any weight is loaded."""
        num_bytes = sum(module.packed_bytes(device_type) for _, module in self.packed_modules())
        return self._absorbed_bytes + num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    @property
    def _absorbed_bytes(self) -> int:
        """Bytes of the matrices that latent attention makes of its weights and keeps beside them."""
        return sum(module.absorbed_bytes for module in self.modules() if isinstance(module, LatentAttention))

    def _fuse(self) -> NativeDecoder | None:
        """All layers as one call, where there are kernels for that and the layers can say what they are."""
        config, kind = self.config, self.layer_class
        if config.ranks.size > 1:
            return None  # there is no place in it for sums over the ranks
        if config.experts is not None and config.experts.scales_inputs:
            return None
        if kind.forward is not DecoderLayer.forward and kind.fused_weights is DecoderLayer.fused_weights:
            return None
        if config.latent is not None:
            return None
        layers = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            chunked = len(self.kv_groups) if layer.is_chunked else 0
            layers.append(layer.fused_weights(self._places[index][0] + chunked))
        if not can_fuse(layers, config.head_dim, config.rope.rotary_dim, config.attention_backend):
            return None
        embedding = self.embed_tokens
        is_plain = embedding.table is None and embedding.scale is None
        return NativeDecoder(
            layers,
            self.norm.weight.data,
            eps=config.rms_norm_eps,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.rotary_dim,
            embedding=embedding.packed if is_plain else None,
            head=self.lm_head.packed if config.keeps_logits_order else None,
        )

    def work(self, kv_token_bytes: int) -> ModelWork:
        """Bytes that steps of the packed model read, and operations that they compute; `kv_token_bytes` is
        what a layer keeps of a token."""
        config, experts = self.config, self.config.experts
        size, latent = config.hidden_size, config.latent
        value_size = config.head_dim if latent is None else latent.kv_rank
        num_bytes = sum(module.packed.nbytes for module in self.modules() if isinstance(module, Linear))
        unread = sum(module.unread_bytes for module in self.modules() if isinstance(module, MixtureOfExperts))
        return ModelWork(
            layer_bytes=num_bytes - unread,
            layer_flops=2 * config.layer_weights(0 if experts is None else experts.routing.num_chosen),
            head_bytes=self.lm_head.packed.nbytes,
            head_flops=2 * size * config.vocab_size // config.ranks.size,
            kv_token_bytes=kv_token_bytes,
            pair_flops=2 * config.num_heads * (config.head_dim + value_size),
            windows=config.sliding_windows,
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of `forward` to float32 [n, vocab_size]."""
        config, logits = self.config, self.lm_head.logits(hidden)
        if config.logits_divisor != 1:
            logits = logits / config.logits_divisor
        cap = config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """`ops.argmax` of `compute_logits(hidden)`: int64 [n], -1 where there is none."""
        if not self.config.keeps_logits_order:
            return ops.argmax(self.compute_logits(hidden))
        return self.lm_head.best(hidden)

    def weights(self) -> Iterator[Weight]:
        """Weights to be filled, one for every tensor that the model needs."""
        for path, module in self._named_modules():
            if isinstance(module, Linear | Embedding):
                yield from module.weights()
            for name, parameter in module.named_parameters(recurse=False):
                part, ranks = None, self.config.ranks
                if name == "sinks" and ranks.size > 1:
                    count = parameter.shape[0]
                    part = Part(0, ranks.rank * count, ranks.size * count)
                yield Weight(f"{path}.{name}", parameter, part)

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by the names of their tensors."""
        for path, module in self.named_modules():
            yield path if path == "lm_head" else f"model.{path}", module

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a checkpoint's tensor into what the model keeps; `name` is one of `weights()`."""
        config = self.config
        if config.unit_offset_norms and name.endswith("norm.weight"):
            return tensor.float() + 1.0
        if config.rope_interleaved and name.rpartition(".")[0].endswith((".q_proj", ".k_proj")):
            return self._apart(name, tensor)
        return tensor

    def _apart(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See `neighbours_apart`, for what a checkpoint has of a projection."""
        config, count = self.config, tensor.shape[0] if tensor.ndim else 1
        heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        if name.endswith((".weight", ".bias", ".weight_packed", ".weight_scale")) and (
            not tensor.numel() or count == heads * config.head_dim
        ):
            return neighbours_apart(tensor, config.head_dim, config.rope.rotary_dim)
        if tensor.numel() > 1 and not name.endswith(".weight_shape"):
            raise CheckpointError(
                f"{name}: neighbouring dimensions rotate together, so its rows must be put in another order, "
                "and this kind of quantised weights does not have them one by one: not supported"
            )
        return tensor.clone()

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """Splits a tensor of the checkpoint into those that it holds, mostly itself alone, under names that
        `canonical_name` takes."""
        yield stored

    def canonical_name(self, name: str) -> str:
        """The name in `weights()` of a checkpoint's tensor."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it.

        Old Llama checkpoints store the rotary frequencies; tied ones may repeat the embedding as head.
        """
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and self.config.tie_word_embeddings)
            or (self.has_layers_behind and layer is not None and int(layer[1]) >= self.config.num_layers)
        )
