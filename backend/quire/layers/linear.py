"""Linear layers, whose tensors may be those of several parts of a checkpoint, joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import AdapterStep
from quire.layers.scheme import LayerTensors, LinearScheme
from quire_kernels import ops
from quire_kernels.weights import PackedLinear


class Part(NamedTuple):
    """Where a rank's part lies in a tensor that the ranks divide."""

    dim: int
    """Dimension that is divided."""
    begin: int
    """Index of the first of its elements there."""
    whole: int
    """Size of the dimension."""


class Weight(NamedTuple):
    """Memory that one tensor of a checkpoint fills."""

    name: str
    memory: torch.Tensor
    part: Part | None = None
    """This rank's part of the tensor; None: the whole."""


class PartSlots:
    """Memory for the adapters of one part of a layer: of each slot A [max_rank, in_features] and B
    [out_features, max_rank], zeros where an adapter has less."""

    def __init__(
        self, num_slots: int, max_rank: int, in_features: int, out_features: int, like: dict[str, Any]
    ) -> None:
        self.a = torch.zeros((num_slots, max_rank, in_features), **like)
        self.b = torch.zeros((num_slots, out_features, max_rank), **like)
        self.filled = bytearray(num_slots)
        """1: the slot's adapter changes this part."""

    def clear(self, slot: int) -> None:
        """Makes it add nothing."""
        if self.filled[slot]:
            self.a[slot].zero_()
            self.b[slot].zero_()
            self.filled[slot] = 0

    def fill(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Takes A [rank, in_features] and B [out_features, rank], the slot being clear."""
        self.a[slot, : a.shape[0]].copy_(a, non_blocking=True)
        self.b[slot, :, : b.shape[1]].copy_(b, non_blocking=True)
        self.filled[slot] = 1

    def is_used(self, step: AdapterStep) -> bool:
        """Whether an adapter of the step may change this part."""
        return step.used is None or any(self.filled[slot] for slot in step.used)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class Linear(nn.Module):
    """y = x W^T + b, with W of one or several named parts that share the input.

    Merging (q, k, v; gate and up) makes one large product of several small ones. The output holds the parts
    behind each other, in the order given.

    Args:
        config: of the model: its type.
        in_features: size of the input.
        parts: output features of each part, by its name in the checkpoint.
        parallel: what tensor-parallel ranks divide: the output features of each part ("column"), which the
            next layer then takes divided, or the input features ("row"): the sum of what the ranks compute is
            the result. None: nothing, each rank has the whole.
        bias: whether every part has a bias.
        activation: of two parts of one size, gate and up: the result is activation(gate) * up. See
            `ops.pack_linear`.
        num_parts: into how many a part is divided, by its name; else each rank has one of its own.

    Sizes are this rank's.
    """

    tensors: LayerTensors
    """Tensors that the loader fills, between `allocate` and `pack`."""
    packed: PackedLinear
    """Weights in the form that computes; there are none before `pack`."""

    def __init__(
        self,
        config: DecoderConfig,
        in_features: int,
        parts: Mapping[str, int],
        *,
        parallel: Literal["column", "row"] | None,
        bias: bool,
        activation: str | None = None,
        num_parts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.ranks = config.ranks
        self._num_parts = {name: num_parts.get(name, config.ranks.size) for name in parts}
        self.in_features, self.parts, self.bias, self.dtype = in_features, dict(parts), bias, config.dtype
        self.parallel, self.activation = parallel, activation
        self.slots: list[PartSlots] = []
        """Slots for adapters of each part; empty where there are none. See `worker/adapter_memory.py`."""

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """x [num_tokens, in_features] to [num_tokens, sum of the parts], or half of it with an activation."""
        y = self._compute(x, adapters)
        return self.ranks.sum(y) if self.parallel == "row" else y

    def _compute(self, x: torch.Tensor, adapters: AdapterStep | None) -> torch.Tensor:
        """This rank's part of `forward`."""
        if adapters is None or not any(part.is_used(adapters) for part in self.slots):
            return self.packed(x)
        # Float32 in between, as where the activation is of the product: rows without adapter keep their bits.
        y = self.packed(x) if self.activation is None else self._ungated(x, torch.float32)
        term = y if y.dtype == x.dtype else torch.zeros_like(y, dtype=x.dtype)
        columns = term.split(list(self.parts.values()), dim=1)
        for part, own in zip(self.slots, columns, strict=True):
            if part.is_used(adapters):
                ops.add_lora(own, x, part.a, part.b, adapters.slots)
        if term is not y:
            y += term
        return y if self.activation is None else ops.gate_mul(y, self.activation).to(x.dtype)

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """Makes the tensors that a scheme has for the layer; its parts are named beside `path`, its own."""
        prefix = path.rpartition(".")[0]
        self.tensors = scheme.layer(
            [f"{prefix}.{part}" for part in self.parts],
            self.in_features,
            list(self.parts.values()),
            bias=self.bias,
            dtype=self.dtype,
        )

    def pack(self) -> None:
        """Brings the loaded tensors into the form that computes."""
        if self.parallel == "row" and self.ranks.rank:
            for tensor in self.tensors.stored():
                if tensor.name.endswith(".bias"):
                    tensor.memory.zero_()  # the first rank adds it
        self.set_packed(self.tensors.pack(self.activation))

    def set_packed(self, packed: PackedLinear) -> None:
        """Computes with what `pack` made of the same tensors before."""
        self.packed = packed
        del self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.packed.nbytes

    def packed_bytes(self, device_type: str) -> int:
        """Bytes that the weights will have on such a device once they are packed, about."""
        return self.tensors.packed_bytes(self.activation, device_type)

    def make_slots(self, num_slots: int, max_rank: int, device: torch.device) -> None:
        """Takes memory for adapters, once it is packed."""
        like = {"dtype": self.dtype, "device": device}
        self.slots = [
            PartSlots(num_slots, max_rank, self.in_features, size, like) for size in self.parts.values()
        ]
        if self.activation is not None:
            self._ungated = self.packed.ungated()

    def weights(self) -> Iterator[Weight]:
        """Weights to be filled, one for each of the parts' tensors."""
        ranks = self.ranks
        for name, memory, out_dim, in_dim in self.tensors.stored():
            dim = {"column": out_dim, "row": in_dim, None: None}[self.parallel]
            part = None
            if dim is not None and ranks.size > 1:
                count = next(count for own, count in self._num_parts.items() if f".{own}." in name)
                size = memory.shape[dim]
                part = Part(dim, ranks.rank * count // ranks.size * size, count * size)
            yield Weight(name, memory, part)
