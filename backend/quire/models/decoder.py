"""The decoder of the Llama family: everything that differs between its members is in DecoderConfig."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire.layers.attention import Attention
from quire.layers.context import AdapterStep, LayerContext
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear, Weight
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import DecoderConfig
from quire.models.hf_config import HFConfig
from quire.models.kv_groups import kv_groups
from quire.models.kv_spec import AttentionKV, KVLayers, KVSpec
from quire.roofline import ModelWork
from quire_ensemble.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.cpu.decoder import (
    DecoderLayerWeights,
    ExpertsWeights,
    FeedForwardWeights,
    LayerAdapters,
    NativeDecoder,
    can_fuse,
)
from quire_kernels.host_memory import give_back
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer

_GIVE_BACK = 2**25
"""Bytes of packed weights behind which what they were loaded into is given back: of thousands of experts not
after each, as that takes milliseconds."""


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config, config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config, config.hidden_size)
        self.mlp = self.make_mlp(config, layer)

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """The feed-forward of a layer: [num_tokens, hidden_size] to the same."""
        return GatedMLP(config, config.intermediate_size)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of this layer, residual stream it is still to be added to), both [num_tokens, hidden_size].

        Each addition is done by the norm that follows it, in one operator.
        """
        normed, residual = self.input_layernorm.add(x, residual)
        attended = self.self_attn(normed, context)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed, context.adapters), residual

    def fused_weights(self, group: int) -> DecoderLayerWeights:
        """What computes the layer; `group` is the KV group it is in."""
        attention, mlp = self.self_attn, self.mlp
        forward: FeedForwardWeights | ExpertsWeights
        if isinstance(mlp, MixtureOfExperts):
            router = mlp.router
            forward = ExpertsWeights(
                router=router.packed,
                experts=mlp.packed,
                num_chosen=router.num_chosen,
                renormalizes=router.renormalizes,
            )
        else:
            assert isinstance(mlp, GatedMLP)
            forward = FeedForwardWeights(gate_up=mlp.gate_up.packed, down=mlp.down.packed)
        q_norm, k_norm, sinks = attention.q_norm, attention.k_norm, attention.sinks
        return DecoderLayerWeights(
            input_norm=self.input_layernorm.weight.data,
            qkv=attention.qkv.packed,
            query_norm=None if q_norm is None else q_norm.weight.data,
            key_norm=None if k_norm is None else k_norm.weight.data,
            out=attention.out.packed,
            post_attention_norm=self.post_attention_layernorm.weight.data,
            feed_forward=forward,
            attention_scale=attention.scale,
            softcap=attention.softcap,
            sinks=None if sinks is None else sinks.data,
            sliding_window=attention.sliding_window,
            group=group,
        )

    def adapters(self) -> LayerAdapters:
        """Memory for the adapters of what `fused_weights` has."""
        attention, mlp = self.self_attn, self.mlp
        linears = [attention.qkv, attention.out]
        if isinstance(mlp, GatedMLP):
            linears += [mlp.gate_up, mlp.down]
        return LayerAdapters(*(linear.slots for linear in linears))


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

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.kv_groups = kv_groups(config.sliding_windows)
        """Layers that share a block table; `forward` wants one AttentionMetadata for each group."""
        self._places = {
            layer: (group, position)
            for group, (_, layers) in enumerate(self.kv_groups)
            for position, layer in enumerate(layers)
        }
        self._packed_bytes = 0
        """Of modules packed since memory was last given back."""
        self._native: NativeDecoder | None = None
        self._kv_layers: tuple[KVLayers, list[KVLayer]] | None = None
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device)
        sliding = config.sliding_rope
        self.sliding_rotary = None if sliding is None else RotaryEmbedding(sliding, max_model_len, device)
        vocab_size, size, dtype = config.vocab_size, config.hidden_size, config.dtype
        is_tied = config.tie_word_embeddings
        with device:
            self.embed_tokens = Embedding(
                vocab_size, size, dtype=dtype, scale=config.embedding_scale, is_head=is_tied
            )
            self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_layers))
            self.norm = RMSNorm(config, size)
            self.lm_head = self.embed_tokens
            if not is_tied:
                self.lm_head = Embedding(vocab_size, size, dtype=dtype, is_looked_up=False, is_head=True)
            for name, module in self._named_modules():
                if isinstance(module, Linear | Embedding):
                    module.allocate(config.scheme, name)

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """The family's reading of config.json; raises CheckpointError."""
        return DecoderConfig.from_hf(hf, dtype)

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """What each layer keeps of a token.

        Args:
            kv_cache_dtype: see `CacheConfig`.
        """
        config = self.config
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
    ) -> torch.Tensor:
        """Computes the new tokens of a ragged batch and stores their keys and values.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens] (or [3, num_tokens] for M-RoPE).
            kv_cache: written in place; layer i of a group lies at position i of the group's blocks.
            metas: which tokens belong together, and where their context is in the blocks of each KV group.
            embeds: (int64 [n], [n, hidden_size]): batch rows whose embedding is given, not looked up.
            rows: int64 [n], ascending: batch rows whose result is wanted; None: all.
            adapters: None: no token has one.

        Returns:
            [num_tokens or n, hidden_size], the final norm applied.
        """
        native = self._native_for(kv_cache)
        if native is None:
            return self.compute(self.embed(input_ids, embeds), positions, kv_cache, metas, rows, adapters)
        if rows is None:
            rows = torch.arange(input_ids.shape[0])
        return self._call_native(native, input_ids, positions, kv_cache, metas, embeds, rows, adapters)

    def next_tokens(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVLayers,
        metas: Sequence[AttentionMetadata],
        embeds: tuple[torch.Tensor, torch.Tensor] | None,
        rows: torch.Tensor,
        adapters: AdapterStep | None = None,
    ) -> torch.Tensor:
        """`best_tokens` of what `forward` gives for these: int64 [n]; one call where the layers are one."""
        native = self._native_for(kv_cache)
        if native is None or not native.chooses:
            return self.best_tokens(
                self.forward(input_ids, positions, kv_cache, metas, embeds, rows, adapters)
            )
        return self._call_native(
            native, input_ids, positions, kv_cache, metas, embeds, rows, adapters, best=True
        )

    def _call_native(
        self,
        native: NativeDecoder,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVLayers,
        metas: Sequence[AttentionMetadata],
        embeds: tuple[torch.Tensor, torch.Tensor] | None,
        rows: torch.Tensor,
        adapters: AdapterStep | None,
        *,
        best: bool = False,
    ) -> torch.Tensor:
        x = input_ids if native.looks_up and embeds is None else self.embed(input_ids, embeds)
        if positions.ndim == 1:
            rotations = self.rotary.table_to(metas[0].max_seq_len)
        else:
            rotations, positions = self.rotary.rotations(positions), torch.arange(input_ids.shape[0])
        slots = None if adapters is None else adapters.slots
        layers = self._layers_of(kv_cache)
        return native(x, rotations, positions, layers, metas, rows, adapters=slots, best=best)

    def embed(
        self, input_ids: torch.Tensor, embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """What the first layer gets, [num_tokens, hidden_size]; arguments as of `forward`."""
        x = self.embed_tokens(input_ids)
        if embeds is not None:
            x.index_copy_(0, *embeds)
        return x

    def compute(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVLayers,
        metas: Sequence[AttentionMetadata],
        rows: torch.Tensor | None = None,
        adapters: AdapterStep | None = None,
    ) -> torch.Tensor:
        """`forward` behind `embed`; `x` may be overwritten."""
        angles = self.rotary(positions)
        sliding_angles = angles if self.sliding_rotary is None else self.sliding_rotary(positions)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            group, position = self._places[index]
            cos, sin = angles if self.kv_groups[group].window is None else sliding_angles
            context = LayerContext(cos, sin, kv_cache.layer(position), metas[group], adapters)
            x, residual = layer(x, residual, context)
        hidden = self.norm.add(x, residual)[0]
        return hidden if rows is None else hidden[rows]

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
        """What computes all layers in one call over this cache; None: nothing does."""
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
            give_back()  # what was loaded: else all weights are in memory twice in the end
            self._packed_bytes = 0

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """What has a packed form, by name."""
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding):
                yield name, module

    def finish(self) -> int:
        """Completes the model once all `packed_modules` are packed; returns what `pack` does."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.finish(self.norm.weight.device.type)
        self._native = self._fuse()
        num_bytes = sum(module.nbytes for _, module in self.packed_modules())
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def packed_bytes(self, device_type: str) -> int:
        """What `pack` will return on such a device, about: before any weight is loaded."""
        num_bytes = sum(module.packed_bytes(device_type) for _, module in self.packed_modules())
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def _fuse(self) -> NativeDecoder | None:
        """All layers as one call, where there are kernels for that and the layers are the common ones."""
        config = self.config
        if (
            self.layer_class.forward is not DecoderLayer.forward
            or self.sliding_rotary is not None
            or config.unit_offset_norms
        ):
            return None
        layers = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layers.append(layer.fused_weights(self._places[index][0]))
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
            # A cap may round different logits to one number.
            head=self.lm_head.packed if config.logits_softcap is None else None,
        )

    def work(self, kv_token_bytes: int) -> ModelWork:
        """What steps of the packed model take; `kv_token_bytes` is what a layer keeps of a token."""
        config = self.config
        heads, size = config.num_heads * config.head_dim, config.hidden_size
        num_bytes = sum(module.packed.nbytes for module in self.modules() if isinstance(module, Linear))
        unread = sum(module.unread_bytes for module in self.modules() if isinstance(module, MixtureOfExperts))
        return ModelWork(
            layer_bytes=num_bytes - unread,
            layer_flops=2 * config.layer_weights(0 if config.experts is None else config.experts.num_chosen),
            head_bytes=self.lm_head.packed.nbytes,
            head_flops=2 * size * config.vocab_size,
            kv_token_bytes=kv_token_bytes,
            pair_flops=4 * heads,
            windows=config.sliding_windows,
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of `forward` to float32 [n, vocab_size]."""
        logits = self.lm_head.logits(hidden)
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """`ops.argmax` of `compute_logits(hidden)`: int64 [n], -1 where there is none."""
        # A cap may round different logits to one number.
        if self.config.logits_softcap is not None:
            return ops.argmax(self.compute_logits(hidden))
        return self.lm_head.best(hidden)

    def weights(self) -> Iterator[Weight]:
        """What every tensor that the model needs fills."""
        for path, module in self._named_modules():
            if isinstance(module, Linear | Embedding):
                yield from module.weights()
            for name, parameter in module.named_parameters(recurse=False):
                yield Weight(f"{path}.{name}", parameter, 0 if name == "sinks" else None)

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by the names of their tensors."""
        for path, module in self.named_modules():
            yield path if path == "lm_head" else f"model.{path}", module

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept of a checkpoint's tensor; `name` is one of `weights()`."""
        if self.config.unit_offset_norms and name.endswith("norm.weight"):
            return tensor.float() + 1.0
        return tensor

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """What a tensor of the checkpoint holds, under names that `canonical_name` takes: mostly itself."""
        yield stored

    def canonical_name(self, name: str) -> str:
        """The name in `weights()` of a checkpoint's tensor."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it.

        Old Llama checkpoints store the rotary frequencies; tied ones may repeat the embedding as head.
        """
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )
