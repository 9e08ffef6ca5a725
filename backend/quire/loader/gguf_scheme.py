"""The scheme of GGUF files whose weights stay in their blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.errors import CheckpointError
from quire.layers.scheme import SCHEMES, LayerTensors, StoredTensor
from quire.loader.gguf_blocks import grouped
from quire_kernels import ops
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.weights import JoinedLinear, PackedLinear


class _Part(NamedTuple):
    """A part of a layer, as the file has it."""

    name: str
    kind: GGMLQuantizationType | None
    """Of the blocks; None: plain numbers."""
    memory: torch.Tensor
    """uint8 [out_features, bytes of a row], or [out_features, in_features] of x's type."""


@dataclass(frozen=True)
class BlockTensors:
    """Matrices in blocks, each of a kind of its own. Those of one kind that are neighbours become one."""

    parts: list[_Part]
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Of x."""
    table: torch.Tensor | None = None

    def stored(self) -> Iterator[StoredTensor]:
        """See LayerTensors."""
        for name, _, memory in self.parts:
            yield StoredTensor(f"{name}.weight", memory, 0, 1)
        if self.bias is not None:
            for part, rows in zip(self.parts, self.bias.split(self._sizes()), strict=True):
                yield StoredTensor(f"{part.name}.bias", rows, 0, None)

    def pack(self, activation: str | None) -> PackedLinear:
        """See LayerTensors."""
        packed: list[PackedLinear] = []
        first = 0
        for weight in self._weights(activation):
            bias = None if self.bias is None else self.bias[first : first + weight.shape[0]]
            dtype = self.dtype if isinstance(weight, GroupedWeight) else None
            packed.append(ops.pack_linear(weight, bias, activation=activation, dtype=dtype))
            first += weight.shape[0]
        return packed[0] if len(packed) == 1 else JoinedLinear(packed)

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """See LayerTensors."""
        return sum(
            ops.packed_bytes(weight, device_type=device_type, activation=activation, dtype=self.dtype)
            for weight in self._weights(activation)
        )

    def _sizes(self) -> list[int]:
        return [part.memory.shape[0] for part in self.parts]

    def _weights(self, activation: str | None) -> Iterator[torch.Tensor | GroupedWeight]:
        """The parts, joined where they are of one kind."""
        runs = itertools.groupby(self.parts, lambda part: part.kind)
        weights = (self._weight(kind, [part.memory for part in parts]) for kind, parts in runs)
        if activation is None:
            yield from weights
            return
        # A gate and what it gates are computed together.
        first, *others = weights
        if not others:
            yield first
            return
        plain = (one.dequantize() if isinstance(one, GroupedWeight) else one for one in (first, *others))
        yield torch.cat([one.to(self.dtype) for one in plain])

    @staticmethod
    def _weight(
        kind: GGMLQuantizationType | None, memories: list[torch.Tensor]
    ) -> torch.Tensor | GroupedWeight:
        rows = memories[0] if len(memories) == 1 else torch.cat(memories)
        return rows if kind is None else grouped(kind, rows)


@dataclass(frozen=True)
class GGUFScheme:
    """Of each matrix its blocks, as far as there are operators for them; of others plain numbers."""

    file: Path
    kinds: Mapping[str, GGMLQuantizationType]
    """Of the matrices that stay in blocks, by Hugging Face's names; each is one of GROUPED."""
    input_multiple: int = 1

    @property
    def of_routers(self) -> GGUFScheme:
        """See LinearScheme."""
        return self

    def identity(self) -> Any:
        """See LinearScheme."""
        return {name: kind.name for name, kind in self.kinds.items()}

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """See LinearScheme."""
        kinds = [self.kinds.get(f"{name}.weight") for name in names]
        if all(kind is None for kind in kinds):
            return SCHEMES[None].layer(names, in_features, sizes, bias=bias, dtype=dtype)
        parts = [
            _Part(name, kind, self._memory(name, kind, size, in_features, dtype))
            for name, kind, size in zip(names, kinds, sizes, strict=True)
        ]
        return BlockTensors(parts, torch.empty(sum(sizes), dtype=dtype) if bias else None, dtype)

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """See LinearScheme."""
        return self.layer([name], size, [num_rows], bias=False, dtype=dtype)

    def _memory(
        self,
        name: str,
        kind: GGMLQuantizationType | None,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if kind is None:
            return torch.empty(num_rows, num_columns, dtype=dtype)
        block, num_bytes = GGML_QUANT_SIZES[kind]
        if num_columns % block:
            raise CheckpointError(
                f"{self.file}: {name} has blocks of {block} inputs ({kind.name}), its layer {num_columns}"
            )
        return torch.empty(num_rows, num_columns // block * num_bytes, dtype=torch.uint8)
