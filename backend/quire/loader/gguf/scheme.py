"""GGUFScheme: linear layers and embedding tables whose weights stay in a GGUF file's blocks, where operators
support the blocks' type."""

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
from quire_kernels import ops
from quire_kernels.block_weights import BlockWeight
from quire_kernels.weights import JoinedLinear, PackedLinear


class _Run(NamedTuple):
    """Neighbouring parts of a layer that have blocks of the same type, or all plain numbers."""

    names: list[str]
    sizes: list[int]
    """Output features of each part."""
    kind: GGMLQuantizationType | None
    """Type of the blocks; None: plain numbers."""
    memory: torch.Tensor
    """uint8 [out_features, bytes of a row] for blocks; [out_features, in_features] of the layer's type for
    plain numbers. The rows of one part follow those of the part before."""


@dataclass(frozen=True)
class BlockTensors:
    """Weights of a layer of which at least one part is stored in blocks; other parts may be plain tensors.

    Neighbouring parts with blocks of the same type become one matrix, and so do those of plain numbers.
    """

    runs: list[_Run]
    bias: torch.Tensor | None
    dtype: torch.dtype
    """Type of the layer's input x."""
    table: torch.Tensor | None = None

    def stored(self) -> Iterator[StoredTensor]:
        """See LayerTensors."""
        for run in self.runs:
            for name, memory in zip(run.names, run.memory.split(run.sizes), strict=True):
                yield StoredTensor(f"{name}.weight", memory, 0, 1)
        if self.bias is not None:
            names = [name for run in self.runs for name in run.names]
            sizes = [size for run in self.runs for size in run.sizes]
            for name, rows in zip(names, self.bias.split(sizes), strict=True):
                yield StoredTensor(f"{name}.bias", rows, 0, None)

    def pack(self, activation: str | None) -> PackedLinear:
        """See LayerTensors."""
        packed: list[PackedLinear] = []
        first = 0
        for weight in self._weights(activation):
            bias = None if self.bias is None else self.bias[first : first + weight.shape[0]]
            dtype = self.dtype if isinstance(weight, BlockWeight) else None
            packed.append(ops.pack_linear(weight, bias, activation=activation, dtype=dtype))
            first += weight.shape[0]
        return packed[0] if len(packed) == 1 else JoinedLinear(packed)

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """See LayerTensors."""
        return sum(
            ops.packed_bytes(weight, device_type=device_type, activation=activation, dtype=self.dtype)
            for weight in self._weights(activation)
        )

    def _weights(self, activation: str | None) -> Iterator[torch.Tensor | BlockWeight]:
        """Yields the matrices to pack: one per run. With an activation (a gated layer) there must be only one
        matrix, so several runs are dequantised into one plain matrix."""
        weights = (run.memory if run.kind is None else BlockWeight(run.kind, run.memory) for run in self.runs)
        if activation is None:
            yield from weights
            return
        # A gate and what it gates are computed together.
        first, *others = weights
        if not others:
            yield first
            return
        plain = (one.dequantize() if isinstance(one, BlockWeight) else one for one in (first, *others))
        yield torch.cat([one.to(self.dtype) for one in plain])


@dataclass(frozen=True)
class GGUFScheme:
    """Scheme for GGUF files. A matrix that `kinds` names usually stays in the file's blocks; any other matrix
    becomes plain numbers."""

    file: Path
    kinds: Mapping[str, GGMLQuantizationType]
    """Block type, one of BLOCK_KINDS, of each matrix that can stay in blocks, by its Hugging Face name."""
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
        runs = []
        for kind, run in itertools.groupby(zip(kinds, names, sizes, strict=True), lambda one: one[0]):
            _, own, rows = map(list, zip(*run, strict=True))
            memory = self._memory(own[0], kind, sum(rows), in_features, dtype)
            runs.append(_Run(own, rows, kind, memory))
        return BlockTensors(runs, torch.empty(sum(sizes), dtype=dtype) if bias else None, dtype)

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
