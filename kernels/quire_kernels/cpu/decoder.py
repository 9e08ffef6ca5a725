"""Computes all layers of a decoder in one call of the C++ kernels, which avoids the cost of a Python call per
operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, Structure, addressof, byref
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch

from quire_kernels import registry
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.moe import NativeExperts, routing_struct
from quire_kernels.cpu.native import KV_TYPES, TYPES, adapter_part, batch_struct, declarations, kv_struct
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of
from quire_kernels.routing import Routing
from quire_kernels.weights import JoinedLinear, PackedExperts, PackedLinear

QKV_PARTS = 3


class NormKind(IntEnum):
    """Kinds of norms of queries and keys; `NormKind` of elementwise.h."""

    EACH_HEAD = 0
    ALL_HEADS = 1
    """One norm over all query heads of a token together, another over all its key heads."""
    BEHIND_ROPE = 2
    """A norm of each head, after the rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class FeedForwardWeights:
    """Weights of a gated feed-forward part."""

    gate_up: PackedLinear
    """Gate and up projections, with the activation."""
    down: PackedLinear


@dataclass(frozen=True, kw_only=True)
class ExpertsWeights:
    """Weights of a layer's experts and their router."""

    router: PackedLinear
    experts: PackedExperts
    routing: Routing
    score_bias: torch.Tensor | None
    """float32 [num_experts], the `bias` of `ops.route`; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayerWeights:
    """Weights of one layer: attention, then a feed-forward part, each with optional RMSNorms before and after
    it and a residual addition. All norm weights have the same type: float32, or the layer's type. With a
    float32 weight, a norm rounds only the product with the weight. A norm of None does not exist."""

    attention_norm: torch.Tensor | None
    qkv: PackedLinear
    """Query, key and value projections. A JoinedLinear of up to QKV_PARTS parts is supported too."""
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    norm_kind: NormKind
    """Kind of `query_norm` and `key_norm`."""
    out: PackedLinear
    attention_output_norm: torch.Tensor | None
    """Norm of the attention output before the residual addition. `feed_forward_output_norm` is that of the
    feed-forward output."""
    feed_forward_norm: torch.Tensor | None
    feed_forward: FeedForwardWeights | ExpertsWeights
    feed_forward_output_norm: torch.Tensor | None
    attention_scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    """float32 [num_heads]: attention sinks; None: there are none."""
    output_factor: float
    """Factor of the attention and feed-forward outputs before the residual additions."""
    sliding_window: int | None
    has_other_rotations: bool
    scales_queries: bool
    """Whether queries are multiplied by the step's `query_factors`."""
    group: int
    """Index of the layer's metadata in the `metas` of a call of NativeDecoder."""


class PartAdapters(Protocol):
    """Adapters of one part of a linear layer, such as the keys of `qkv`; see `ops.add_lora`."""

    a: torch.Tensor
    b: torch.Tensor
    filled: bytearray
    """One byte per slot; 1: the slot's adapter changes the part."""


class LayerAdapters(NamedTuple):
    """Adapters of a layer's linear layers. Each field lists the adapters of one linear layer: one entry for
    each of its parts, in the order of the parts; empty: there are no adapters. Experts have none."""

    qkv: Sequence[PartAdapters]
    out: Sequence[PartAdapters]
    gate_up: Sequence[PartAdapters] = ()
    down: Sequence[PartAdapters] = ()


def can_fuse(
    layers: Sequence[DecoderLayerWeights], head_dim: int, rotary_dim: int, attention: str | None
) -> bool:
    """Whether NativeDecoder can compute these layers. They must be packed for one instruction set, and a
    layer's parts of `qkv` in one format. The registry must choose the implementations of that set for norms,
    rotary embedding, cache writes, attention and routing.

    Args:
        layers: weights of each layer.
        head_dim: size of a head.
        rotary_dim: number of leading dimensions of a head that are rotated.
        attention: name of the wanted attention implementation; None: the registry chooses.

    Raises:
        KernelError: as `registry.pick`.
    """
    linears = [linear for layer in layers for linear in _linears(layer)]
    native = [linear for linear in linears if isinstance(linear, NativeLinear)]
    if len(native) < len(linears) or len({linear.isa for linear in native}) != 1:
        return False
    # Products that share their input take it in the same form.
    if any(
        len(parts) > QKV_PARTS or len({part.struct.format for part in parts}) != 1
        for parts in map(_qkv_parts, layers)
    ):
        return False
    forwards = [layer.feed_forward for layer in layers]
    experts = [one.experts for one in forwards if isinstance(one, ExpertsWeights)]
    if not all(isinstance(one, NativeExperts) and one.isa == native[0].isa for one in experts):
        return False
    isa, dtype = native[0].isa, native[0].dtype
    norm = next(norm for norm in _norms(layers[0]) if norm is not None)
    if norm.dtype not in (dtype, torch.float32):
        return False
    facts: dict[str, dict[str, Any]] = {
        "rms_norm": {"size": norm.shape[0]},
        "rope": {"head_dim": head_dim, "rotary_dim": rotary_dim},
        "write_kv": {"head_dim": head_dim},
        "paged_attention": {"head_dim": head_dim, "wanted": attention},
        **({"route": {}} if experts else {}),
    }
    return all(registry.pick(name, "cpu", dtype, **known).name == isa for name, known in facts.items())


class NativeDecoder:
    """The layers of a decoder and its final norm, computed in one call.

    Args:
        layers: weights of each layer, all packed for the same instruction set.
        final_norm: weight [hidden_size] of the final norm.
        eps: epsilon of every norm.
        num_heads: number of query heads.
        head_dim: size of a head.
        rotary_dim: number of leading dimensions of a head that are rotated.
        embedding: table in which token ids are looked up; None: the caller looks them up. A table of other
            kernels or of another type counts as None; see `looks_up`.
        head: output head with which best tokens are chosen; None: the caller chooses them. A head of other
            kernels or of another type counts as None; see `chooses`.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayerWeights],
        final_norm: torch.Tensor,
        *,
        eps: float,
        num_heads: int,
        head_dim: int,
        rotary_dim: int,
        embedding: PackedLinear | None = None,
        head: PackedLinear | None = None,
    ) -> None:
        first = _qkv_parts(layers[0])[0]
        self.library, self.dtype, self.hidden_size = first.library, first.dtype, final_norm.shape[0]
        self.rotary_dim = rotary_dim
        table, logits = self._usable(embedding), self._usable(head)
        self.looks_up, self.chooses = table is not None, logits is not None
        experts = [_experts_struct(layer) for layer in layers]
        self._layers = structs = _array("DecoderLayer", map(_layer_struct, layers, experts))
        # What the structure points into.
        self._owned: tuple[Any, ...] = (list(layers), experts, final_norm, table, logits)
        self._struct = declarations().structure("Decoder")(
            TYPES[self.dtype],
            TYPES[final_norm.dtype],
            len(layers),
            self.hidden_size,
            num_heads,
            head_dim,
            rotary_dim // 2,
            eps,
            addressof(structs),
            final_norm.data_ptr(),
            None if table is None else addressof(table.struct),
            None if logits is None else addressof(logits.struct),
        )
        self._kv: tuple[list[KVLayer], Array[Any]] | None = None
        self._step = declarations().structure("Step")

    def _usable(self, table: PackedLinear | None) -> NativeLinear | None:
        if not isinstance(table, NativeLinear) or table.library is not self.library:
            return None
        return table if table.dtype == self.dtype else None

    def take_adapters(self, layers: Sequence[LayerAdapters]) -> None:
        """Gives every layer its adapter slots. They have the layers' type."""
        for struct, layer in zip(self._layers, layers, strict=True):
            for name, parts in layer._asdict().items():
                made = _array("AdapterPart", [adapter_part(part.a, part.b, part.filled) for part in parts])
                rank = parts[0].a.shape[1] if parts else 0
                adapters = declarations().structure("Adapters")(addressof(made), len(parts), rank)
                setattr(struct, f"{name}_adapters", adapters)
                self._owned += (made, parts)

    def can_use(self, kv_layer: KVLayer) -> bool:
        """Whether the kernels can read a cache of this view's type."""
        return data_of(kv_layer).dtype in KV_TYPES

    def __call__(
        self,
        x: torch.Tensor,
        rotations: torch.Tensor,
        positions: torch.Tensor,
        kv_layers: list[KVLayer],
        metas: Sequence[AttentionMetadata],
        rows: torch.Tensor,
        *,
        other_rotations: torch.Tensor | None = None,
        query_factors: torch.Tensor | None = None,
        adapters: torch.Tensor | None = None,
        best: bool = False,
    ) -> torch.Tensor:
        """Computes the layers, and stores the new tokens' keys and values.

        Args:
            x: int64 token ids [num_tokens] if this object `looks_up`; or embeddings [num_tokens,
                hidden_size], which are overwritten.
            rotations: float32 [num_positions, rotary_dim]: cosines, then sines.
            positions: int64 [num_tokens]: row of `rotations` for each token.
            kv_layers: view of each layer's cache. The list must not be changed afterwards, because structures
                made from it are kept while the same list is passed.
            metas: metadata of each KV group.
            rows: int64 [num_rows], ascending: tokens whose result is returned. If empty, the call ends when
                the last layer's keys and values are stored.
            other_rotations: rotations of the layers with another rotary embedding; None: there are none.
            query_factors: float32 [num_tokens]: factors of the queries; None: no layer scales queries.
            adapters: int32 [num_tokens], contiguous: slot of each token's adapter, -1 for no adapter; None:
                no token has one.
            best: whether to return the best next tokens, which needs a decoder that `chooses`.

        Returns:
            [num_rows, hidden_size] after the final norm; with `best`, int64 [num_rows] as
            `PackedLinear.argmax` returns them.
        """
        are_ids = x.dtype == torch.int64
        assert x.is_contiguous() and (self.looks_up if are_ids else x.dtype == self.dtype), x.dtype
        assert are_ids or x.shape[1] == self.hidden_size, x.shape
        other_rotations = rotations if other_rotations is None else other_rotations
        for table in (rotations, other_rotations):
            assert table.is_contiguous() and table.shape[1] == self.rotary_dim, table.shape
        assert self.chooses or not best
        if self._kv is None or self._kv[0] is not kv_layers:
            self._kv = (kv_layers, _array("KVLayer", map(kv_struct, kv_layers)))
        batches = _array("Batch", map(batch_struct, metas))
        num_rows = rows.shape[0]
        if best:
            out = torch.empty(num_rows, dtype=torch.int64)
        else:
            out = torch.empty((num_rows, self.hidden_size), dtype=self.dtype)
        step = self._step(
            x.data_ptr() if are_ids else None,
            None if are_ids else x.data_ptr(),
            rotations.data_ptr(),
            other_rotations.data_ptr(),
            positions.data_ptr(),
            None if query_factors is None else query_factors.data_ptr(),
            addressof(self._kv[1]),
            addressof(batches),
            rows.data_ptr(),
            num_rows,
            None if adapters is None else adapters.data_ptr(),
            None if best else out.data_ptr(),
            out.data_ptr() if best else None,
        )
        self.library.quire_decoder_forward(byref(self._struct), byref(step))
        return out


def _array(name: str, structs: Iterable[Structure]) -> Array[Any]:
    """Returns a ctypes array of `structs`, which all have the C++ type `name`."""
    made = list(structs)
    array: Array[Any] = (declarations().structure(name) * len(made))(*made)
    return array


def _norms(layer: DecoderLayerWeights) -> tuple[torch.Tensor | None, ...]:
    """Returns the layer's norm weights, in the order of the C++ structure."""
    return (
        *(layer.attention_norm, layer.feed_forward_norm),
        *(layer.attention_output_norm, layer.feed_forward_output_norm),
        *(layer.query_norm, layer.key_norm),
    )


def _qkv(layer: DecoderLayerWeights) -> Sequence[PackedLinear]:
    return layer.qkv.parts if isinstance(layer.qkv, JoinedLinear) else (layer.qkv,)


def _linears(layer: DecoderLayerWeights) -> list[PackedLinear]:
    """Returns the linear layers of a decoder layer, including the router but not the experts."""
    forward = layer.feed_forward
    last = [forward.router] if isinstance(forward, ExpertsWeights) else [forward.gate_up, forward.down]
    return [*_qkv(layer), layer.out, *last]


def _qkv_parts(layer: DecoderLayerWeights) -> list[NativeLinear]:
    parts = [part for part in _qkv(layer) if isinstance(part, NativeLinear)]
    assert parts, layer.qkv
    return parts


def _struct_of(linear: PackedLinear | None) -> Structure:
    assert linear is None or isinstance(linear, NativeLinear), linear
    empty: Structure = declarations().structure("Weight")()
    return empty if linear is None else linear.struct


def _layer_struct(layer: DecoderLayerWeights, experts: Structure | None) -> Structure:
    forward, parts = layer.feed_forward, _qkv(layer)
    gate_up = down = router = None
    routing = declarations().structure("Routing")()
    if isinstance(forward, ExpertsWeights):
        router, num_gates = forward.router, forward.routing.num_gates
        routing = routing_struct(forward.routing, router.out_features - num_gates, forward.score_bias)
    else:
        gate_up, down = forward.gate_up, forward.down
    linears = [*parts, *[None] * (QKV_PARTS - len(parts)), layer.out, gate_up, down, router]
    return declarations().structure("DecoderLayer")(
        *(None if norm is None else norm.data_ptr() for norm in _norms(layer)),
        layer.norm_kind,
        *map(_struct_of, linears),
        None if experts is None else addressof(experts),
        routing,
        None if layer.sinks is None else layer.sinks.data_ptr(),
        layer.attention_scale,
        layer.softcap or 0.0,
        layer.output_factor,
        layer.sliding_window or 0,
        layer.has_other_rotations,
        layer.scales_queries,
        layer.group,
    )


def _experts_struct(layer: DecoderLayerWeights) -> Structure | None:
    forward = layer.feed_forward
    if not isinstance(forward, ExpertsWeights):
        return None
    assert isinstance(forward.experts, NativeExperts), forward.experts
    struct: Structure = forward.experts.struct(forward.routing.num_routes)
    return struct
