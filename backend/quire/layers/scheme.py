"""Schemes: which tensors a checkpoint stores for a linear layer, and how they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from quire_kernels import ops
from quire_kernels.weights import INT4_GROUP, W8A8_GROUP, PackedLinear


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint stores for a part of a linear layer, or for a table."""

    name: str
    memory: torch.Tensor
    """Memory for the stored tensor, or for this rank's part of it."""
    out_dim: int | None
    """Dimension of the part's output features, along which ranks divide a column-parallel layer; None: it has
    none."""
    in_dim: int | None
    """Dimension of the input features, along which ranks divide a row-parallel layer; None: it has none, like
    a bias, which only one rank adds."""


class LayerTensors(Protocol):
    """The tensors of one linear layer or table, until they are packed."""

    @property
    def table(self) -> torch.Tensor | None:
        """Matrix in which rows of a table for look-up are found; None: `PackedLinear.rows` of the packed
        table gives the same numbers."""

    def stored(self) -> Iterator[StoredTensor]:
        """Yields the tensors that the loader must fill."""

    def pack(self, activation: str | None) -> PackedLinear:
        """Packs the filled tensors. For `activation` see `ops.pack_linear`."""

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """Estimates the bytes of the weights that `pack` will keep on this type of device."""


class LinearScheme(Protocol):
    """Scheme by which a checkpoint's linear layers, embedding and output head are stored and computed."""

    @property
    def input_multiple(self) -> int:
        """Number of which the sizes in `DecoderConfig.input_sizes` must be multiples."""

    @property
    def of_routers(self) -> LinearScheme:
        """Scheme of routers and other AsStoredLinear, which are quantised only if the checkpoint's are."""

    def identity(self) -> Any:
        """Returns a JSON value. It differs between schemes that read the same stored bits as different
        numbers."""

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """Makes the uninitialised tensors of a layer.

        Args:
            names: names of the parts, without the tensors' suffixes: "model.layers.0.mlp.gate_proj".
            in_features: input features of every part.
            sizes: output features of each part.
            bias: whether every part has a bias.
            dtype: type of the layer's input x.
        """

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """Makes the uninitialised tensors of a table that is used for look-up, as output head, or both.

        Args:
            name: name of the table, without the tensors' suffixes: "model.embed_tokens" or "lm_head".
            num_rows: number of tokens that have a row.
            size: numbers in a row.
            is_head: whether the table computes logits.
            dtype: type of looked-up rows, and of the input x.
        """


@dataclass(frozen=True)
class DenseTensors:
    """A matrix, with or without a bias, that holds the rows of all parts in order."""

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
"""Quantisation of the output head by that of the other layers, if they differ. Four bits are too few for
logits, and eight bits in the head cost a fraction of what four bits save elsewhere. Products of fp8 by fp8
would round the logits to 16 bits."""


@dataclass(frozen=True)
class DenseScheme:
    """Scheme of checkpoints with plain matrices. They are quantised, if at all, when they are packed."""

    quantization: str | None = None
    """Quantisation when packing, see `ops.pack_linear`; None: none."""
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
"""Schemes for checkpoints of plain matrices, by `quantization` (see ModelConfig)."""
