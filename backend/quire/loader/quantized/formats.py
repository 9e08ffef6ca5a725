"""Formats: the tensors that a checkpoint stores for one part of a quantised layer, and how to decode them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch

from quire.loader.quantized.decoded import Decoded, grouped, in_groups
from quire.loader.quantized.unpacking import powers_of_two, unpack_nibbles, unpack_words
from quire_kernels.grouped_weights import E2M1
from quire_kernels.weights import FP8, W8A8_GROUP, QuantizedRows

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Positions in an AWQ word of output features 0 to 7."""
BNB_BLOCK, BNB_NESTED_BLOCK = 64, 256
"""Number of weights that share a scale, and of scales that share a scale, as transformers configures
bitsandbytes."""
Tensors = Mapping[str, torch.Tensor]
"""Tensors of one part of a layer, by the suffixes of its slots."""


class Slot(NamedTuple):
    """Description of one stored tensor of a part."""

    suffix: str
    shape: tuple[int, ...]
    """Shape of the tensor. Stored tensors may have more or fewer dimensions of size 1."""
    dtype: torch.dtype
    """Type of the tensor. float32 also accepts float16, bfloat16 and float64."""
    out_dim: int | None = None
    """See `StoredTensor`."""
    in_dim: int | None = None
    """See `StoredTensor`."""


class Format(Protocol):
    """Storage format of a part's weights."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Types of the devices whose kernels usually read weights packed in about their stored size. On other
        devices, weights are dequantised."""

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """Yields a slot for each stored tensor of a part that is read. Raises ValueError for sizes that
        the format cannot store."""

    def decode(self, tensors: Tensors) -> Decoded:
        """Decodes a part's tensors into its weights. If they contradict each other, this may raise an error,
        such as ValueError."""


@dataclass(frozen=True)
class Plain:
    """Weights that are not quantised."""

    devices: ClassVar[tuple[str, ...]] = ()

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        yield Slot("weight", (out_features, in_features), torch.float32, 0, 1)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        return Decoded(tensors["weight"])


@dataclass(frozen=True)
class AWQ:
    """AutoAWQ's four-bit weights with zeros. Version "gemm" packs words along the outputs, "gemv" along the
    inputs."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    group: int | None
    """Number of inputs that share a scale; None: all inputs."""
    is_gemv: bool = False

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        group = self.group or in_features
        groups = _whole(in_features, group, "in_features")
        if not self.is_gemv:
            words = _whole(out_features, 8, "out_features")
            yield Slot("qweight", (in_features, words), torch.int32, 1, 0)
            in_dim = None if self.group is None else 0
            yield Slot("qzeros", (groups, words), torch.int32, 1, in_dim)
            yield Slot("scales", (groups, out_features), torch.float32, 1, in_dim)
            return
        # Zeros fill whole words, and more of them where groups are small.
        step = max(1, 128 // group)
        words = -(-groups // (8 * step)) * step
        yield Slot("qweight", (out_features, _whole(in_features, 8, "in_features")), torch.int32, 0, 1)
        yield Slot("qzeros", (out_features, words), torch.int32, 0)
        yield Slot("scales", (out_features, 8 * words), torch.float32, 0)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        qweight, qzeros, scales = (tensors[suffix] for suffix in ("qweight", "qzeros", "scales"))
        if self.is_gemv:
            codes = unpack_words(qweight, 4, 8 * qweight.shape[1])
            groups = codes.shape[1] // (self.group or codes.shape[1])
            zeros = unpack_words(qzeros, 4, groups)
            scales = scales[:, :groups]
        else:
            codes, zeros = (
                unpack_words(words, 4, scales.shape[1]).unflatten(1, (-1, 8))[:, :, _AWQ_PLACES].flatten(1).T
                for words in (qweight, qzeros)
            )
            scales = scales.T
        return Decoded(grouped(codes.contiguous(), scales.contiguous(), zeros.int(), 4, self.group))


@dataclass(frozen=True)
class GPTQ:
    """GPTQ's format: words packed along the inputs. With `desc_act`, any inputs may share a group."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    bits: int
    group: int | None
    """Number of inputs that share a scale; None: all inputs."""
    zero_offset: int
    """Number added to stored zeros: 1, or 0 in gptq_v2."""

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        groups = -(-in_features // (self.group or in_features))
        words = _whole(in_features * self.bits, 32, "in_features * bits")
        out_words = _whole(out_features * self.bits, 32, "out_features * bits")
        in_dim = None if self.group is None else 0
        yield Slot("qweight", (words, out_features), torch.int32, 1, 0)
        yield Slot("qzeros", (groups, out_words), torch.int32, 1, in_dim)
        yield Slot("scales", (groups, out_features), torch.float32, 1, in_dim)
        yield Slot("g_idx", (in_features,), torch.int32, None, 0)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        scales, g_idx = tensors["scales"].T.contiguous(), tensors["g_idx"]
        codes = unpack_words(tensors["qweight"].T, self.bits, len(g_idx))
        zeros = unpack_words(tensors["qzeros"], self.bits, len(scales)).T.int()
        # A zero beyond the code's bits wraps round, as it did when the tool subtracted 1.
        zeros = zeros + self.zero_offset & (1 << self.bits) - 1
        return in_groups(codes, scales, zeros, self.bits, self.group, g_idx)


@dataclass(frozen=True)
class PackedIntegers:
    """compressed-tensors' `pack-quantized`: words packed along the inputs."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    bits: int
    group: int | None
    """Number of inputs that share a scale; None: all inputs."""
    is_symmetric: bool
    has_order: bool
    """Whether any inputs may share a group."""

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        groups = _whole(in_features, self.group or in_features, "in_features")
        in_dim = None if self.group is None else 1
        yield Slot("weight_packed", (out_features, -(-in_features * self.bits // 32)), torch.int32, 0, 1)
        yield Slot("weight_scale", (out_features, groups), torch.float32, 0, in_dim)
        yield Slot("weight_shape", (2,), torch.int64)
        if not self.is_symmetric:
            words = -(-out_features * self.bits // 32)
            yield Slot("weight_zero_point", (words, groups), torch.int32, 0, in_dim)
        if self.has_order:
            yield Slot("weight_g_idx", (in_features,), torch.int32, None, 0)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        packed, scales = tensors["weight_packed"], tensors["weight_scale"]
        num_rows, num_columns = (int(size) for size in tensors["weight_shape"])
        if num_rows != packed.shape[0] or -(-num_columns * self.bits // 32) != packed.shape[1]:
            raise ValueError(f"weight_shape [{num_rows}, {num_columns}] is not that of weight_packed")
        codes = unpack_words(packed, self.bits, num_columns)
        zeros: torch.Tensor | int = 1 << self.bits - 1
        if not self.is_symmetric:
            zeros = unpack_words(tensors["weight_zero_point"].T, self.bits, num_rows).T.int()
        if not self.has_order:
            return Decoded(grouped(codes, scales, zeros, self.bits, self.group))
        return in_groups(codes, scales, zeros, self.bits, self.group, tensors["weight_g_idx"])


@dataclass(frozen=True)
class ScaledRows:
    """int8 or FP8 weights with a scale per output feature, or one scale for all."""

    dtype: torch.dtype
    is_per_row: bool
    scale: str = "weight_scale"
    """Suffix of the scale tensor's name."""
    divisor: float = 1.0
    """Divisor of the stored scales."""
    quantized_inputs: bool = False
    """Whether int8 weights should be multiplied with inputs quantised to int8 (w8a8). That needs a CPU, and
    in_features that are a multiple of W8A8_GROUP."""

    @property
    def devices(self) -> tuple[str, ...]:
        """See Format."""
        return ("cuda",) if self.dtype == FP8 else ("cpu", "cuda")

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        shape, out_dim = ((out_features, 1), 0) if self.is_per_row else ((1, 1), None)
        yield Slot("weight", (out_features, in_features), self.dtype, 0, 1)
        yield Slot(self.scale, shape, torch.float32, out_dim)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        weight = tensors["weight"]
        num_rows, num_columns = weight.shape
        scales = (tensors[self.scale] / self.divisor).expand(num_rows, 1).contiguous()
        quantization = "int8"
        if self.dtype == FP8:
            quantization = "fp8"
        elif self.quantized_inputs and num_columns % W8A8_GROUP == 0:
            quantization = "w8a8"
        return Decoded(QuantizedRows(weight, scales, quantization))


@dataclass(frozen=True)
class WholeIntegers:
    """compressed-tensors' integers of four or eight bits, one byte each.

    There is a scale per group of inputs or per output feature, or one for all weights. There may be zero
    points.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    bits: int
    scales: tuple[bool, int | None]
    """(whether each output feature has its own scale, number of inputs that share a scale; None: all
    inputs)."""
    is_symmetric: bool

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        is_per_row, group = self.scales
        groups = _whole(in_features, group or in_features, "in_features")
        shape = out_features if is_per_row else 1, groups
        dims = 0 if is_per_row else None, None if group is None else 1
        yield Slot("weight", (out_features, in_features), torch.int8, 0, 1)
        yield Slot("weight_scale", shape, torch.float32, *dims)
        if not self.is_symmetric:
            yield Slot("weight_zero_point", shape, torch.int8, *dims)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        weight, half = tensors["weight"], 1 << self.bits - 1
        if self.bits < 8 and (weight < -half).logical_or(weight >= half).any():
            raise ValueError(f"weight has numbers of more than {self.bits} bits")
        scales = tensors["weight_scale"].expand(len(weight), -1).contiguous()
        zeros: torch.Tensor | int = half
        if not self.is_symmetric:
            zeros = tensors["weight_zero_point"].expand(len(weight), -1).int() + half
        return Decoded(
            grouped((weight.short() + half).to(torch.uint8), scales, zeros, self.bits, self.scales[1])
        )


@dataclass(frozen=True)
class ScaledBlocks:
    """FP8 weights with a scale per block of outputs and inputs, such as 128 x 128 (DeepSeek) or 1 x 32
    (MXFP8)."""

    devices: ClassVar[tuple[str, ...]] = ()
    block: tuple[int, int]
    """Size of a block in output and input features."""
    scale: str = "weight_scale"
    """Suffix of the scale tensor's name."""
    has_exponents: bool = False
    """Whether scales are stored as E8M0 exponents."""

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        shape = -(-out_features // self.block[0]), -(-in_features // self.block[1])
        yield Slot("weight", (out_features, in_features), FP8, 0, 1)
        yield Slot(self.scale, shape, torch.uint8 if self.has_exponents else torch.float32, 0, 1)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        wide, scales = tensors["weight"].float(), tensors[self.scale]
        if self.has_exponents:
            scales = powers_of_two(scales)
        by_column = scales.repeat_interleave(min(self.block[1], wide.shape[1]), 1)[:, : wide.shape[1]]
        for rows, row_scales in zip(wide.split(self.block[0]), by_column, strict=True):
            rows *= row_scales
        return Decoded(wide)


@dataclass(frozen=True)
class FP4:
    """Four-bit floating point, two numbers per byte. MXFP4 has exponents as scales. NVFP4 has FP8 scales, and
    one more scale for all weights."""

    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    group: int
    weight: str = "weight_packed"
    """Suffix of the name of the packed weights."""
    tensor_scale: str | None = None
    """Suffix of the name of the scale for all weights; None: MXFP4, which has none."""
    is_divisor: bool = False
    """Whether the weights are divided by the scale for all weights instead of multiplied by it."""

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        groups = _whole(in_features, self.group, "in_features")
        yield Slot(self.weight, (out_features, in_features // 2), torch.uint8, 0, 1)
        yield Slot("weight_scale", (out_features, groups), FP8 if self.tensor_scale else torch.uint8, 0, 1)
        if self.tensor_scale is not None:
            yield Slot(self.tensor_scale, (1,), torch.float32)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        codes, scales = unpack_nibbles(tensors[self.weight]), tensors["weight_scale"]
        wide = powers_of_two(scales) if self.tensor_scale is None else scales.float()
        row_scales = None
        if self.tensor_scale is not None:
            whole = tensors[self.tensor_scale]
            row_scales = (1 / whole if self.is_divisor else whole).expand(len(codes))
        return Decoded(grouped(codes, wide / 2, 0, 4, self.group, table=E2M1, row_scales=row_scales))


@dataclass(frozen=True)
class BNB4:
    """bitsandbytes' NF4 and FP4: indices into a table of 16 numbers, and a scale per BNB_BLOCK weights.
    Blocks run through the rows in order, so one may span several rows; the last may be shorter."""

    devices: ClassVar[tuple[str, ...]] = ()
    kind: str
    """"nf4" or "fp4"."""
    is_nested: bool
    """Whether the scales are quantised too."""

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def slots(self, out_features: int, in_features: int) -> Iterator[Slot]:
        """See Format."""
        size = out_features * in_features
        blocks = -(-size // BNB_BLOCK)
        yield Slot("weight", (-(-size // 2),), torch.uint8, 0)
        yield Slot("weight.absmax", (blocks,), torch.uint8 if self.is_nested else torch.float32, 0)
        yield Slot("weight.quant_map", (16,), torch.float32)
        yield Slot(self._state, (4,), torch.float64)
        if self.is_nested:
            yield Slot("weight.nested_absmax", (-(-blocks // BNB_NESTED_BLOCK),), torch.float32)
            yield Slot("weight.nested_quant_map", (256,), torch.float32)

    def decode(self, tensors: Tensors) -> Decoded:
        """See Format."""
        num_rows, num_columns, block, offset = tensors[self._state].tolist()
        codes, scales = tensors["weight"], tensors["weight.absmax"]
        size = int(num_rows * num_columns)
        if block != BNB_BLOCK or -(-size // 2) != len(codes):
            raise ValueError(f"blocks of {block:.0f} in {num_rows:.0f} x {num_columns:.0f} weights")
        if self.is_nested:
            outer = tensors["weight.nested_absmax"].repeat_interleave(BNB_NESTED_BLOCK)[: len(scales)]
            scales = tensors["weight.nested_quant_map"][scales.long()] * outer + torch.tensor(offset).float()
        places = torch.stack((codes >> 4, codes & 15), 1).flatten()[:size]
        wide = tensors["weight.quant_map"][places.long()] * scales.repeat_interleave(BNB_BLOCK)[:size]
        return Decoded(wide.view(int(num_rows), int(num_columns)))


def bnb_state(octets: torch.Tensor) -> torch.Tensor:
    """Reads the values that decoding needs from bitsandbytes' quant_state.

    Args:
        octets: uint8 [n], JSON text.

    Returns:
        float64 [4]: out_features, in_features, the block's size, and the offset to add to nested scales.

    Raises:
        ValueError, TypeError, LookupError: the bytes are no quant_state.
    """
    state = json.loads(bytes(octets.tolist()))
    values = [*state["shape"], state["blocksize"], state.get("nested_offset", 0.0)]
    return torch.tensor(values, dtype=torch.float64)


def _whole(size: int, unit: int, name: str) -> int:
    """Returns size / unit; raises ValueError if that is not a whole number."""
    if size % unit:
        raise ValueError(f"{name} {size} is no multiple of {unit}")
    return size // unit
