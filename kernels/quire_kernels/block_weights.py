"""BlockWeight: a matrix in the quantised blocks of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from quire_kernels.grouped_weights import E2M1

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALE_BITS = {"FLOAT16": 16, "BFLOAT16": 16, "INT8": 8, "NIBBLES": 4}


@dataclass(frozen=True)
class BlockKind:
    """Quantisation of one GGUF block type: how its codes become weights, and how the C++ kernels store its
    scales. `bits`, `group`, `zero` and `table` mean the same as in GroupedWeight."""

    bits: int
    group: int
    zero: int = 0
    table: tuple[int, ...] | None = None
    scale_type: str = "FLOAT16"
    """Name of a `ScaleType` of cpu/native.py. Integer scales are multiplied by a float16 factor of their
    block, integer minimums by another one. float32 holds these products exactly."""
    has_minimums: bool = False


BLOCK_KINDS = {
    GGMLQuantizationType.Q4_0: BlockKind(4, 32, 8),
    GGMLQuantizationType.Q4_1: BlockKind(4, 32, has_minimums=True),
    GGMLQuantizationType.Q5_0: BlockKind(5, 32, 16),
    GGMLQuantizationType.Q5_1: BlockKind(5, 32, has_minimums=True),
    GGMLQuantizationType.Q8_0: BlockKind(8, 32, 128),
    GGMLQuantizationType.Q2_K: BlockKind(2, 16, scale_type="NIBBLES", has_minimums=True),
    GGMLQuantizationType.Q3_K: BlockKind(3, 16, 4, scale_type="INT8"),
    GGMLQuantizationType.Q4_K: BlockKind(4, 32, scale_type="INT8", has_minimums=True),
    GGMLQuantizationType.Q5_K: BlockKind(5, 32, scale_type="INT8", has_minimums=True),
    GGMLQuantizationType.Q6_K: BlockKind(6, 16, 32, scale_type="INT8"),
    GGMLQuantizationType.IQ4_NL: BlockKind(4, 32, table=_IQ4_VALUES),
    GGMLQuantizationType.IQ4_XS: BlockKind(4, 32, table=_IQ4_VALUES, scale_type="INT8"),
    GGMLQuantizationType.MXFP4: BlockKind(4, 32, table=E2M1, scale_type="BFLOAT16"),
}
"""GGUF block types for which a BlockWeight can be made. The C++ kernels can pack them without
dequantisation."""


@dataclass(frozen=True)
class BlockWeight:
    """A matrix in GGUF blocks of a type in BLOCK_KINDS."""

    kind: GGMLQuantizationType
    blocks: torch.Tensor
    """uint8 [out_features, bytes of a row]."""

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        num_rows, num_bytes = self.blocks.shape
        inputs, size = GGML_QUANT_SIZES[self.kind]
        return torch.Size((num_rows, num_bytes // size * inputs))

    @property
    def nbytes(self) -> int:
        """Bytes of the bit-packed codes, scales, minimums and factors, as the C++ kernels store them, without
        padding."""
        means, (inputs, size) = BLOCK_KINDS[self.kind], GGML_QUANT_SIZES[self.kind]
        sets = 1 + means.has_minimums
        factors = 16 * sets if means.scale_type in ("INT8", "NIBBLES") else 0
        bits = inputs * means.bits + inputs // means.group * sets * _SCALE_BITS[means.scale_type] + factors
        return self.blocks.numel() // size * bits // 8

    @property
    def device(self) -> torch.device:
        """Device of `blocks`."""
        return self.blocks.device

    def rows(self, which: slice | torch.Tensor) -> BlockWeight:
        """Returns a matrix of some of the rows, in the given order."""
        return BlockWeight(self.kind, self.blocks[which])

    def dequantize(self) -> torch.Tensor:
        """Returns the weights, float32 [out_features, in_features]."""
        if self.blocks.is_meta:
            return torch.empty(self.shape, device="meta")
        with np.errstate(all="ignore"):  # factors may be no numbers
            means = quants.dequantize(self.blocks.cpu().numpy(), self.kind)
        return torch.from_numpy(means).to(self.device)
