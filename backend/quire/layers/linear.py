"""Linear layers, whose tensors may be those of several parts of a checkpoint, joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

from quire.layers.scheme import LayerTensors, LinearScheme
from quire.models.config import DecoderConfig
from quire_kernels.weights import PackedLinear


class Weight(NamedTuple):
    """Memory that one tensor of a checkpoint fills."""

    name: str
    memory: torch.Tensor
    split_dim: int | None = None
    """Dimension that tensor-parallel ranks divide among them; None: each has the whole."""


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
    """

    tensors: LayerTensors
    """What the loader fills, between `allocate` and `pack`."""
    packed: PackedLinear
    """What computes; there is none before `pack`."""

    def __init__(
        self,
        config: DecoderConfig,
        in_features: int,
        parts: Mapping[str, int],
        *,
        parallel: Literal["column", "row"] | None,
        bias: bool,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.bias, self.dtype = in_features, dict(parts), bias, config.dtype
        self.parallel, self.activation = parallel, activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] to [num_tokens, sum of the parts], or half of it with an activation."""
        return self.packed(x)

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
        self.take(self.tensors.pack(self.activation))

    def take(self, packed: PackedLinear) -> None:
        """Computes with what `pack` made of the same tensors before."""
        self.packed = packed
        del self.tensors

    @property
    def nbytes(self) -> int:
        """Of the packed weights."""
        return self.packed.nbytes

    def packed_bytes(self, device_type: str) -> int:
        """What `pack` will return on such a device, about."""
        return self.tensors.packed_bytes(self.activation, device_type)

    def weights(self) -> Iterator[Weight]:
        """What the parts' tensors fill."""
        for name, memory, out_dim, in_dim in self.tensors.stored():
            dims = {"column": out_dim, "row": in_dim, None: None}
            yield Weight(name, memory, dims[self.parallel])
