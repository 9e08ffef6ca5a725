"""Linear layers. One layer may join several parts that a checkpoint stores separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """Position of this rank's part in a tensor that the ranks divide."""

    dim: int
    """Dimension along which the tensor is divided."""
    begin: int
    """First index of the part along `dim`."""
    whole: int
    """Size of the whole tensor along `dim`."""


class Weight(NamedTuple):
    """Memory to be filled by one tensor of a checkpoint."""

    name: str
    memory: torch.Tensor
    part: Part | None = None
    """Position of this rank's part in the tensor; None: this rank has the whole tensor."""


class PartSlots:
    """Memory for the adapters of one part of a layer. Each slot has A [max_rank, in_features] and B
    [out_features, max_rank], padded with zeros if the adapter's rank is smaller."""

    def __init__(
        self, num_slots: int, max_rank: int, in_features: int, out_features: int, like: dict[str, Any]
    ) -> None:
        self.a = torch.zeros((num_slots, max_rank, in_features), **like)
        self.b = torch.zeros((num_slots, out_features, max_rank), **like)
        self.filled = bytearray(num_slots)
        """One byte per slot; 1: the slot's adapter changes this part."""

    def clear(self, slot: int) -> None:
        """Removes the slot's adapter from this part."""
        if self.filled[slot]:
            self.a[slot].zero_()
            self.b[slot].zero_()
            self.filled[slot] = 0

    def fill(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copies A [rank, in_features] and B [out_features, rank], scaling included, into a slot that is
        clear."""
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
    """Linear layer y = x W^T + b. W may join several named parts with the same input.

    Joining (q, k, v; gate and up) makes one large product of several small ones. Without an activation, the
    output holds the parts' outputs in the given order.

    Args:
        config: the model's configuration.
        in_features: input features.
        parts: output features of each part, by its name in the checkpoint.
        parallel: how tensor-parallel ranks divide the layer. "column": the output features of each part are
            divided, see `num_parts`. "row": the input features are divided, and the result is the sum over
            the ranks. None: each rank has the whole layer.
        bias: whether every part has a bias.
        activation: for two parts of equal size, gate and up, or one part that holds both: the result is that
            of `ops.gate_mul`, which for most activations is activation(gate) * up. None: no gate.
        num_parts: number of pieces into which the ranks divide a part, by its name; by default, one per rank.

    `in_features` and the sizes in `parts` are this rank's.
    """

    tensors: LayerTensors
    """Tensors that the loader fills, between `allocate` and `pack`."""
    packed: PackedLinear
    """Packed weights, or what `keep` put in their place. They do not exist before `pack` or `set_packed`."""

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
        """Adapter slots of each part; empty: there are none. See `worker/adapter_memory.py`."""
        self.keep: Callable[[PackedLinear], PackedLinear] | None = None
        """Function that puts packed weights elsewhere and returns what takes their place; None: they stay."""

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """Maps x [num_tokens, in_features] to [num_tokens, size]. The size is the sum of the parts' sizes, or
        half of that with an activation."""
        y = self._compute(x, adapters)
        return self.ranks.sum(y) if self.parallel == "row" else y

    def _compute(self, x: torch.Tensor, adapters: AdapterStep | None) -> torch.Tensor:
        """Computes this rank's part of `forward`."""
        if adapters is None or not any(part.is_used(adapters) for part in self.slots):
            return self.packed(x)
        # Float32 in between, as in the gated product, so that rows without an adapter keep their bits.
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
        """Makes the tensors that a scheme stores for the layer. `path` is the layer's name. The names of its
        parts differ from it in the last component."""
        prefix = path.rpartition(".")[0]
        self.tensors = scheme.layer(
            [f"{prefix}.{part}" for part in self.parts],
            self.in_features,
            list(self.parts.values()),
            bias=self.bias,
            dtype=self.dtype,
        )

    def pack(self) -> None:
        """Packs the loaded tensors."""
        if self.parallel == "row" and self.ranks.rank:
            for tensor in self.tensors.stored():
                if tensor.name.endswith(".bias"):
                    tensor.memory.zero_()  # the first rank adds it
        self.set_packed(self.tensors.pack(self.activation))

    def set_packed(self, packed: PackedLinear) -> None:
        """Uses packed weights, or with `keep` what that returns for them, and drops `tensors`."""
        self.packed = packed if self.keep is None else self.keep(packed)
        del self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.packed.nbytes

    def packed_bytes(self, device_type: str) -> int:
        """Estimates what `nbytes` will be on this type of device. Works only before `pack`."""
        return self.tensors.packed_bytes(self.activation, device_type)

    def make_slots(self, num_slots: int, max_rank: int, device: torch.device) -> None:
        """Allocates adapter slots for a packed layer."""
        like = {"dtype": self.dtype, "device": device}
        self.slots = [
            PartSlots(num_slots, max_rank, self.in_features, size, like) for size in self.parts.values()
        ]
        if self.activation is not None:
            self._ungated = self.packed.ungated()

    def weights(self) -> Iterator[Weight]:
        """Yields the weights to be filled, one for each tensor of each part."""
        ranks = self.ranks
        for name, memory, out_dim, in_dim in self.tensors.stored():
            dim = {"column": out_dim, "row": in_dim, None: None}[self.parallel]
            part = None
            if dim is not None and ranks.size > 1:
                count = next(count for own, count in self._num_parts.items() if f".{own}." in name)
                size = memory.shape[dim]
                part = Part(dim, ranks.rank * count // ranks.size * size, count * size)
            yield Weight(name, memory, part)


class AsStoredLinear(Linear):
    """Linear layer that is quantised only if the checkpoint's is. Adapters do not change it."""

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """See Linear."""
        super().allocate(scheme.of_routers, path)
