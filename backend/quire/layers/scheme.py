"""Schemes: which tensors a checkpoint has for a linear layer, and what they become to compute with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from quire_kernels import ops
from quire_kernels.weights import INT4_GROUP, W8A8_GROUP, PackedLinear


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint has for a part of a linear layer."""

    name: str
    memory: torch.Tensor
    """Memory that the tensor fills."""
    out_dim: int | None
    """Dimension of the part's output features, which ranks divide in a column-parallel layer, if any."""
    in_dim: int | None
    """Dimension of the input features, which ranks divide in a row-parallel layer, if any: a bias is
    added by one of them."""


class LayerTensors(Protocol):
    """The tensors of one linear layer or table, from its construction until they are packed."""

    @property
    def table(self) -> torch.Tensor | None:
        """The matrix in which a looked-up table's rows are found, where `PackedLinear.rows` of what `pack`
        makes has other numbers; else None."""

    def stored(self) -> Iterator[StoredTensor]:
        """Tensors that the loader must fill."""

    def pack(self, activation: str | None) -> PackedLinear:
        """Packs the filled tensors into the form that computes; for `activation` see `ops.pack_linear`."""

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """Bytes of the weights that `pack` will keep on such a device, about."""


class LinearScheme(Protocol):
    """How a checkpoint's linear layers and tables are stored, and how they are computed."""

    @property
    def input_multiple(self) -> int:
        """Divisor that the number of input features of every layer must have."""

    @property
    def of_routers(self) -> LinearScheme:
        """That of what chooses experts: small matrices, quantised only where the checkpoint has them so."""

    def identity(self) -> Any:
        """Identity of the scheme, as JSON has it: differs from that of schemes that take the same stored bits
        for other numbers."""

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """Uninitialised tensors of a layer.

        Args:
            names: of the parts, without the ends of their tensors' names: "model.layers.0.mlp.gate_proj".
            in_features: of every part.
            sizes: output features of each part.
            bias: whether every part has a bias.
            dtype: of x.
        """

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """Uninitialised tensors of a table whose rows are looked up, used as output head, or both.

        Args:
            name: without the end of its tensors' names: "model.embed_tokens" or "lm_head".
            num_rows: tokens of the vocabulary.
            size: of a row.
            is_head: whether logits are computed with it.
            dtype: of looked-up rows, and of x.
        """


@dataclass(frozen=True)
class DenseTensors:
    """A matrix, and maybe a bias, in which the parts' rows lie behind each other."""

    names: Sequence[str]
    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: list[int]
    quantization: str | None

    @property
    def table(self) -> torch.Tensor | None:
        """See LayerTensors."""
        return None if self.quantization is None else self.weight

    def stored(self) -> Iterator[StoredTensor]:
        """See LayerTensors."""
        for name, rows in zip(self.names, self.weight.split(self.sizes), strict=True):
            yield StoredTensor(f"{name}.weight", rows, 0, 1)
        if self.bias is not None:
            for name, rows in zip(self.names, self.bias.split(self.sizes), strict=True):
                yield StoredTensor(f"{name}.bias", rows, 0, None)

    def pack(self, activation: str | None) -> PackedLinear:
        """See LayerTensors."""
        return ops.pack_linear(self.weight, self.bias, activation=activation, quantization=self.quantization)

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """See LayerTensors."""
        return ops.packed_bytes(
            self.weight, device_type=device_type, activation=activation, quantization=self.quantization
        )


OF_HEADS: dict[str | None, str] = {"int4": "int8", "w4a8": "w8a8", "fp8": "fp8_weights"}
"""Quantisation of output heads, by that of the other layers, where the two differ. Four bits are too few for
the logits, and eight in the head cost a fraction of what four save elsewhere. Products of fp8 with fp8 would
round the logits to 16 bits."""


@dataclass(frozen=True)
class DenseScheme:
    """A plain matrix, quantised, if at all, when it is packed."""

    quantization: str | None = None
    """See `ops.pack_linear`."""
    input_multiple: int = 1

    @property
    def of_routers(self) -> DenseScheme:
        """See LinearScheme."""
        return SCHEMES[None]

    def identity(self) -> Any:
        """See LinearScheme."""
        return self.quantization

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> DenseTensors:
        """See LinearScheme."""
        weight = torch.empty(sum(sizes), in_features, dtype=dtype)
        return DenseTensors(
            names, weight, weight.new_empty(sum(sizes)) if bias else None, list(sizes), self.quantization
        )

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> DenseTensors:
        """See LinearScheme."""
        weight = torch.empty(num_rows, size, dtype=dtype)
        quantization = OF_HEADS.get(self.quantization, self.quantization)
        return DenseTensors([name], weight, None, [num_rows], quantization if is_head else None)


SCHEMES: dict[str | None, DenseScheme] = {
    None: DenseScheme(),
    "dequantized": DenseScheme(),
    "int8": DenseScheme("int8"),
    "int4": DenseScheme("int4", INT4_GROUP),
    "w8a8": DenseScheme("w8a8", W8A8_GROUP),
    "w4a8": DenseScheme("w4a8", W8A8_GROUP),
    "fp8": DenseScheme("fp8"),
}
"""Schemes of checkpoints of plain matrices, by `quantization` (see ModelConfig)."""
