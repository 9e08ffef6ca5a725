"""The decoder that most model families share. Families differ in DecoderConfig, in class attributes, and in
the methods that they override."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from quire.errors import CheckpointError, ConfigError
from quire.layers.attention import Attention
from quire.layers.classifier import ClassifierHead
from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding
from quire.layers.expert_offload import OffloadedExperts
from quire.layers.hf_config import HFConfig
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear, Part, Weight
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding, neighbours_apart
from quire.models.interface import ForwardInputs, Model
from quire.models.kv_groups import kv_groups
from quire.models.kv_spec import AttentionKV, KVLayers, KVSpec, LatentKV
from quire.outputs import ExpertCounts
from quire.roofline import ModelWork
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


class DecoderLayer(nn.Module):
    """Decoder layer: usually attention, then a feed-forward part. `DecoderConfig.norms` says which of them
    have a norm before or after them. Each output is added to the residual stream."""

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
        """Makes a layer's attention module, or one that takes its place, such as Mamba-2. The module usually
        maps [num_tokens, hidden_size] and a LayerContext to [num_tokens, hidden_size]."""
        return Attention(config, layer) if config.latent is None else LatentAttention(config, layer)

    @property
    def kv_shape(self) -> tuple[int, int] | None:
        """(number of KV heads, size of a head) in this layer's cache, for families whose layers differ in
        this. It must not need more bytes than the model's KV spec. None: the layer has the spec's shape."""
        return None

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """Makes a layer's feed-forward module, which may consist of experts. The module maps [num_tokens,
        hidden_size] to the same shape."""
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return GatedMLP(config, config.intermediate_size)
        return MixtureOfExperts(config, experts)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes the layer.

        A norm that follows an addition does the addition too (`RMSNorm.add`).

        Returns:
            (output, residual stream), both [num_tokens, hidden_size]. The caller must add the output to the
            residual stream. If the second is None, the output contains the residual stream already.
        """
        attention_input, attention_output, mlp_input, mlp_output = self._norms
        normed, residual = _add(attention_input, x, residual)
        attended = self._output(attention_output, self.self_attn(normed, context))
        normed, residual = _add(mlp_input, attended, residual)
        return self._output(mlp_output, self.feed_forward(normed, residual, context)), residual

    def feed_forward(
        self, normed: torch.Tensor, residual: torch.Tensor, context: LayerContext
    ) -> torch.Tensor:
        """Computes the feed-forward part.

        Args:
            normed: [num_tokens, hidden_size], the residual stream after attention, normed if the layer has a
                norm before the feed-forward part.
            residual: the residual stream itself. Most families do not read it.
            context: the layer's other inputs.

        Returns:
            [num_tokens, hidden_size], not yet added to the residual stream.
        """
        out: torch.Tensor = self.mlp(normed, context.adapters)
        return out

    def _output(self, norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
        """Returns the term for the residual stream: `x` after the output norm, if any, times
        `residual_multiplier`."""
        normed = x if norm is None else norm(x)
        return normed if self.residual_multiplier == 1 else normed * self.residual_multiplier

    def fused_weights(self, group: int) -> DecoderLayerWeights:
        """Returns the weights and switches with which `NativeDecoder` computes the layer. `group`: index of
        the layer's metadata in the step's list."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, Attention)
        forward: FeedForwardWeights | ExpertsWeights
        if isinstance(mlp, MixtureOfExperts):
            router, bias = mlp.gate, mlp.gate.e_score_correction_bias
            assert not isinstance(mlp.packed, OffloadedExperts), "operators compute them"
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
        """Returns the adapter memory of the attention's linear layers, and of the feed-forward layers unless
        they are experts, for `NativeDecoder`."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, Attention)
        linears = [attention.qkv, attention.out]
        if isinstance(mlp, GatedMLP):
            linears += [mlp.gate_up, mlp.down]
        return LayerAdapters(*(linear.slots for linear in linears))


def _add(
    norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls `RMSNorm.add`. Without a norm it returns the sum twice."""
    if norm is not None:
        return norm.add(x, residual)
    total = x if residual is None else x + residual
    return total, total


class DecoderModel(nn.Module, Model):
    """Decoder that computes what a DecoderConfig describes.

    A family subclasses this and overrides what differs, usually `parse_config`. Weights are uninitialised
    until the loader has filled all of `weights()`.

    Args:
        config: the checkpoint's configuration, or a rank's part of it.
        max_model_len: longest sequence served, in tokens. Some rope types depend on it, and on a GPU the size
            of the table of rotations.
        device: device on which the weights are made.
    """

    layer_class: type[DecoderLayer] = DecoderLayer
    rotates_partly: bool = False
    """Whether the family obeys `partial_rotary_factor`. Other families rotate whole heads in transformers, so
    here they refuse a file that states less (CheckpointError)."""
    has_layers_behind: bool = False
    """Whether checkpoints may hold extra layers after the last one, for multi-token prediction. The model
    ignores them; `models/mtp.py` can make a draft head of the first."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.kv_groups = kv_groups(config.kv_windows, self.state_bytes(config))
        own = {
            layer: (group, position)
            for group, one in enumerate(self.kv_groups)
            for position, layer in enumerate(one.layers)
        }
        self._places = {layer: own[source] for layer, source in enumerate(config.kv_layers)}
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
            self.score: ClassifierHead | None = None
            if config.classifier is not None:
                self.score = ClassifierHead(size, len(config.classifier.labels), bias=False)
            self.make_parts(config)
            for name, module in self._named_modules():
                if isinstance(module, Linear | Embedding):
                    module.allocate(config.scheme, name)

    def make_parts(self, config: DecoderConfig) -> None:
        """Makes a family's additional modules. Embeddings, layers, final norm and head exist already; a
        family may remove some of them here."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See Model."""
        config = DecoderConfig.from_hf(hf, dtype)
        if config.rope.rotary_dim != config.head_dim and not cls.rotates_partly:
            raise hf.error(
                f"partial_rotary_factor: {config.rope.rotary_dim} of a head's {config.head_dim} dimensions "
                "would rotate, and in transformers all do"
            )
        return config

    def state_bytes(self, config: DecoderConfig) -> Mapping[int, int]:
        """Returns the bytes of each recurrent state, by layer, for layers that keep a state in place of keys
        and values."""
        return {}

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """Returns the spec of the KV cache: what a layer with attention keeps of a token. Some layers differ
        from it (`DecoderLayer.kv_shape`, `DecoderConfig.kv_layers`).

        Args:
            kv_cache_dtype: see `CacheConfig`.

        Raises:
            ConfigError: this model does not support `kv_cache_dtype`.
        """
        config = self.config
        if config.latent is not None:
            if kv_cache_dtype != "auto":
                raise ConfigError(
                    f"kv_cache_dtype={kv_cache_dtype} is not supported for models with latent attention: "
                    "their cache holds one small vector per token in the model's type"
                )
            index = config.latent.index
            return LatentKV(config.head_dim, config.dtype, 0 if index is None else index.head_dim)
        return AttentionKV(config.num_kv_heads, config.head_dim, config.dtype, kv_cache_dtype)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        native = self._native_for(inputs)
        if native is None:
            return self.compute(self.embed(inputs), inputs)
        return self._call_native(native, inputs)

    def next_tokens(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        native = self._native_for(inputs)
        if native is None or not native.chooses:
            return self.best_tokens(self.forward(inputs))
        return self._call_native(native, inputs, best=True)

    def _native_for(self, inputs: ForwardInputs) -> NativeDecoder | None:
        """Returns the decoder that computes all layers in one call with this batch and cache; None: there is
        none."""
        native = self._native
        if native is None or inputs.taps or not native.can_use(self._layers_of(inputs.kv_cache)[0]):
            return None
        # One call has no place for levels; operators give its bits.
        return None if self.config.deepstack_levels and inputs.embeds is not None else native

    def _call_native(
        self, native: NativeDecoder, inputs: ForwardInputs, *, best: bool = False
    ) -> torch.Tensor:
        """Computes `forward`, with all layers in one native call. `best`: computes `next_tokens` instead,
        which needs a decoder that can choose tokens."""
        input_ids, positions, rows = inputs.input_ids, inputs.positions, inputs.rows
        scaling, other, adapters = self.config.query_scaling, self.other_rotary, inputs.adapters
        longest = inputs.metas[0].max_seq_len
        if positions.ndim == 1:
            rotations = self.rotary.table_to(longest)
        else:
            rotations, positions = self.rotary.rotations(positions), torch.arange(input_ids.shape[0])
        return native(
            input_ids if native.looks_up and inputs.embeds is None else self.embed(inputs),
            rotations,
            positions,
            self._layers_of(inputs.kv_cache),
            self._with_chunked(inputs),
            torch.arange(input_ids.shape[0]) if rows is None else rows,
            other_rotations=None if other is None else other.table_to(longest),
            query_factors=None if scaling is None else scaling.factors(positions),
            adapters=None if adapters is None else adapters.slots,
            best=best,
        )

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        x, embeds = self.embed_tokens(inputs.input_ids), inputs.embeds
        if embeds is not None:
            x.index_copy_(0, embeds[0], embeds[1][:, : self.config.hidden_size].to(x.dtype))
        return x

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        hidden = self.norm.add(*self.run_layers(x, inputs))[0]
        return hidden if inputs.rows is None else hidden[inputs.rows]

    def run_layers(self, x: torch.Tensor, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes all layers from `x`, usually the result of `embed`. Appends the inputs of the layers
        `inputs.taps` to `inputs.tapped`. Returns the last layer's result of `DecoderLayer.forward`."""
        positions, kv_cache, embeds = inputs.positions, inputs.kv_cache, inputs.embeds
        angles = self.rotary(positions)
        other_angles = angles if self.other_rotary is None else self.other_rotary(positions)
        scaling = self.config.query_scaling
        factors = None if scaling is None else scaling.factors(positions)
        metas = self._with_chunked(inputs)
        residual: torch.Tensor | None = None
        size, own_size = self.config.hidden_size, self.config.per_layer_size
        x, *per_layer = x.split([size, *[own_size] * len(self.layers)], 1) if own_size else [x]
        for index, layer in enumerate(self.layers):
            if index in inputs.taps:
                inputs.tapped.append(x if residual is None else x + residual)
            group, position = self._places[index]
            assert isinstance(layer, DecoderLayer)
            if layer.is_chunked:
                group += len(self.kv_groups)
            cos, sin = other_angles if layer.has_other_rope else angles
            kv_layer, meta = kv_cache.layer(position, layer.kv_shape), metas[group]
            if group < len(self.kv_groups) and self.kv_groups[group].is_state:
                kv_layer, meta = kv_cache.states(position), meta.of_states(kv_cache.block_size)
            context = LayerContext(
                *(cos, sin, kv_layer, meta, inputs.adapters),
                factors if layer.scales_queries else None,
                per_layer[index] if per_layer else None,
            )
            x, residual = layer(x, residual, context)
            if embeds is not None and index < self.config.deepstack_levels:
                level = embeds[1][:, (index + 1) * size : (index + 2) * size]
                x.index_add_(0, embeds[0], level.to(x.dtype))
        return x, residual

    def _with_chunked(self, inputs: ForwardInputs) -> Sequence[AttentionMetadata]:
        """Returns the metadata of each KV group. If the configuration has a `chunk_size`, the chunked
        metadata of each group follows."""
        size = self.config.chunk_size
        if size is None:
            return inputs.metas
        block_size = data_of(inputs.kv_cache.layer(0)).shape[3]
        return [*inputs.metas, *(meta.chunked(size, block_size) for meta in inputs.metas)]

    def take_slots(self) -> None:
        """See Model."""
        if self._native is not None:
            layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
            self._native.take_adapters([layer.adapters() for layer in layers])

    @property
    def is_fused(self) -> bool:
        """See Model."""
        return self._native is not None

    def _layers_of(self, kv_cache: KVLayers) -> list[KVLayer]:
        """Returns each layer's view of the pool, in the shape of the KV spec. The same list is returned while
        the pool stays the same."""
        if self._kv_layers is None or self._kv_layers[0] is not kv_cache:
            places = (self._places[index] for index in range(len(self.layers)))
            self._kv_layers = kv_cache, [kv_cache.layer(position) for _, position in places]
        return self._kv_layers[1]

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """See Model."""
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding):
                yield name, module

    def finish(self) -> int:
        """See Model."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts | LatentAttention):
                module.finish(self.norm.weight.device.type)
        for one, following in itertools.pairwise(self._mixtures):
            if one.offloaded is not None and following.offloaded is not None:
                one.offloaded.following = following.gate, following.offloaded
        self._native = self._fuse()
        num_bytes = self._absorbed_bytes + sum(module.nbytes for _, module in self.packed_modules())
        num_bytes += sum(one.slot_bytes for one in self._mixtures)
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def packed_bytes(self, device_type: str) -> int:
        """See Model."""
        num_bytes = sum(module.packed_bytes(device_type) for _, module in self.packed_modules())
        num_bytes -= sum(one.offloaded_bytes(device_type) for one in self._mixtures)
        return self._absorbed_bytes + num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    @property
    def _mixtures(self) -> list[MixtureOfExperts]:
        """Mixture-of-experts layers, in order."""
        return [module for module in self.modules() if isinstance(module, MixtureOfExperts)]

    def count_experts(self, counts: ExpertCounts) -> bool:
        """See Model."""
        offloaded = [one.offloaded for one in self._mixtures if one.offloaded is not None]
        for one in offloaded:
            one.counts = counts
        return bool(offloaded)

    @property
    def _absorbed_bytes(self) -> int:
        """Bytes of the matrices that latent attention derives from its weights and keeps beside them; 0
        without latent attention."""
        return sum(module.absorbed_bytes for module in self.modules() if isinstance(module, LatentAttention))

    def _fuse(self) -> NativeDecoder | None:
        """Makes the decoder that computes all layers in one call; None: no kernel for that fits the model."""
        config, kind = self.config, self.layer_class
        if config.ranks.size > 1:
            return None  # there is no place in it for sums over the ranks
        if config.experts is not None and (
            config.experts.scales_inputs or config.experts.max_resident is not None
        ):
            return None
        if kind.forward is not DecoderLayer.forward and kind.fused_weights is DecoderLayer.fused_weights:
            return None
        if config.latent is not None or any(group.is_state for group in self.kv_groups):
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
        """See Model."""
        config, experts = self.config, self.config.experts
        size, latent = config.hidden_size, config.latent
        value_size = config.head_dim if latent is None else latent.kv_rank
        num_bytes = sum(module.packed.nbytes for module in self.modules() if isinstance(module, Linear))
        num_bytes += sum(one.slot_bytes - one.unread_bytes for one in self._mixtures)
        return ModelWork(
            layer_bytes=num_bytes,
            layer_flops=2 * config.layer_weights(0 if experts is None else experts.routing.num_chosen),
            head_bytes=self.lm_head.packed.nbytes,
            head_flops=2 * size * config.vocab_size // config.ranks.size,
            kv_token_bytes=kv_token_bytes,
            pair_flops=2 * config.num_heads * (config.head_dim + value_size),
            windows=config.sliding_windows,
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        config, logits = self.config, self.lm_head.logits(hidden)
        if config.logits_divisor != 1:
            logits = logits / config.logits_divisor
        cap = config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """See Model."""
        assert self.score is not None, "the checkpoint is no classifier"
        return self.score(pooled)

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        if not self.config.keeps_logits_order:
            return ops.argmax(self.compute_logits(hidden))
        return self.lm_head.best(hidden)

    def weights(self) -> Iterator[Weight]:
        """See Model."""
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
        """Yields each module with its path in the names of `weights`. A Linear's parts are siblings of its
        path."""
        for path, module in self.named_modules():
            yield path if path in ("lm_head", "score") else f"model.{path}", module

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """See Model."""
        config = self.config
        if config.unit_offset_norms and name.endswith("norm.weight"):
            return tensor.float() + 1.0
        if config.rope_interleaved and name.rpartition(".")[0].endswith((".q_proj", ".k_proj")):
            return self._apart(name, tensor)
        return tensor

    def _apart(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorders the rows of a stored tensor of a query or key projection with `neighbours_apart`. Returns
        a copy of a tensor without such rows (a single number, a shape). Raises CheckpointError for other
        tensors, such as rows packed into words."""
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

    def ignores(self, name: str) -> bool:
        """See Model. True for the rotary frequencies of old Llama checkpoints, for an output head if
        embeddings are tied, and, with `has_layers_behind`, for tensors of layers after the last one."""
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        return (
            name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and self.config.tie_word_embeddings)
            or (self.has_layers_behind and layer is not None and int(layer[1]) >= self.config.num_layers)
        )
