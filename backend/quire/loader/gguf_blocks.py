"""What the blocks of GGUF's types mean, as GroupedWeight. The layouts are those of ggml's quantised blocks.

Bytes are taken apart eight at a time, in words of 64 bits: a shift moves what belongs to another byte into
bits that the mask takes away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.loader.quantized.unpacking import E2M1
from quire_kernels.grouped_weights import GroupedWeight

_EVERY_BYTE = 0x0101010101010101
_BYTES_AT_ONCE = 2**17
"""Of blocks that are taken apart."""
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""
_BITS_OF_BYTES = torch.tensor(
    [sum((byte >> bit & 1) << 8 * bit for bit in range(8)) for byte in range(256)], device="cpu"
)
"""int64 [256]: words whose bytes are the bits of a byte, the lowest first."""


def grouped(kind: GGMLQuantizationType, rows: torch.Tensor) -> GroupedWeight:
    """The matrix whose blocks are in `rows`, uint8 [out_features, bytes of a row], contiguous.

    `kind` is one of GROUPED.
    """
    blocks = rows.view(rows.shape[0], -1, GGML_QUANT_SIZES[kind][1])
    # In parts that stay in a cache of the processor, where there is something to compute.
    at_once = max(1, _BYTES_AT_ONCE // rows.shape[1])
    if rows.is_meta or kind in _HALVED or at_once >= len(rows):
        return GroupedWeight(**_flat(kind, blocks))
    whole: _Fields = {}
    for number, some in enumerate(blocks.split(at_once)):
        for name, part in _flat(kind, some).items():
            if not isinstance(part, torch.Tensor):
                whole[name] = part
                continue
            if number == 0:
                whole[name] = part.new_empty(len(rows), part.shape[1])
            whole[name][number * at_once : (number + 1) * at_once] = part
    return GroupedWeight(**whole)


def _flat(kind: GGMLQuantizationType, blocks: torch.Tensor) -> _Fields:
    fields = GROUPED[kind](blocks)
    for name, part in fields.items():
        if isinstance(part, torch.Tensor) and not (name == "codes" and kind in _HALVED):
            fields[name] = part.flatten(1)
    return fields


_Fields = dict[str, Any]
"""Of a GroupedWeight, tensors with a dimension for the blocks of a row behind that of rows."""


def _q4_0(blocks: torch.Tensor) -> _Fields:
    scale, codes = blocks.split((2, 16), 2)
    return {"bits": 4, "group": 32, "zero": 8, "codes": codes, "scales": _half(scale)}


def _q4_1(blocks: torch.Tensor) -> _Fields:
    scale, offset, codes = blocks.split((2, 2, 16), 2)
    return {
        "bits": 4,
        "group": 32,
        "codes": codes,
        "scales": _half(scale),
        "minimums": -_half(offset),
    }


def _q5_0(blocks: torch.Tensor) -> _Fields:
    scale, high, codes = blocks.split((2, 4, 16), 2)
    return {"bits": 5, "group": 32, "zero": 16, "codes": _fifth(codes, high), "scales": _half(scale)}


def _q5_1(blocks: torch.Tensor) -> _Fields:
    scale, offset, high, codes = blocks.split((2, 2, 4, 16), 2)
    return {
        "bits": 5,
        "group": 32,
        "codes": _fifth(codes, high),
        "scales": _half(scale),
        "minimums": -_half(offset),
    }


def _q8_0(blocks: torch.Tensor) -> _Fields:
    scale, codes = blocks.split((2, 32), 2)
    return {"bits": 8, "group": 32, "zero": 128, "codes": codes ^ 128, "scales": _half(scale)}


def _q2_k(blocks: torch.Tensor) -> _Fields:
    scales, codes, factor, minimum_factor = blocks.split((16, 64, 2, 2), 2)
    return {
        "bits": 2, "group": 16, "codes": _apart(codes, 2, 32),
        "scales": _signed(scales & 15), "factors": _half(factor),
        "minimums": _signed(scales >> 4), "minimum_factors": _half(minimum_factor),
    }  # fmt: skip


def _q3_k(blocks: torch.Tensor) -> _Fields:
    high, codes, scales, factor = blocks.split((32, 64, 12, 2), 2)
    low = torch.cat((scales[..., :8] & 15, scales[..., :8] >> 4), 2)
    tops = torch.cat([scales[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], 2)
    return {
        "bits": 3, "group": 16, "zero": 4, "codes": _joined(_apart(codes, 2, 32), _apart(high, 1, 32), 2),
        "scales": _signed(low | tops << 4) - 32, "factors": _half(factor),
    }  # fmt: skip


def _q4_k(blocks: torch.Tensor) -> _Fields:
    head, codes = blocks.split((16, 128), 2)
    return {"bits": 4, "group": 32, "codes": _apart(codes, 4, 32), **_six_bit_scales(head)}


def _q5_k(blocks: torch.Tensor) -> _Fields:
    head, high, codes = blocks.split((16, 32, 128), 2)
    return {
        "bits": 5, "group": 32, "codes": _joined(_apart(codes, 4, 32), _apart(high, 1, 32), 4),
        **_six_bit_scales(head),
    }  # fmt: skip


def _q6_k(blocks: torch.Tensor) -> _Fields:
    low, high, scales, factor = blocks.split((128, 64, 16, 2), 2)
    return {
        "bits": 6, "group": 16, "zero": 32, "codes": _joined(_apart(low, 4, 64), _apart(high, 2, 32), 4),
        "scales": _signed(scales), "factors": _half(factor),
    }  # fmt: skip


def _iq4_nl(blocks: torch.Tensor) -> _Fields:
    return {**_q4_0(blocks), "zero": 0, "table": _IQ4_VALUES}


def _iq4_xs(blocks: torch.Tensor) -> _Fields:
    factor, high, low, codes = blocks.split((2, 2, 4, 128), 2)
    tops = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], 3).flatten(2)
    return {
        "bits": 4, "group": 32, "table": _IQ4_VALUES, "codes": _apart(codes, 4, 16),
        "scales": _signed(torch.stack((low & 15, low >> 4), 3).flatten(2) | tops << 4) - 32,
        "factors": _half(factor),
    }  # fmt: skip


def _mxfp4(blocks: torch.Tensor) -> _Fields:
    exponent, codes = blocks.split((1, 16), 2)
    wide = exponent.int()
    # Half of 2 ** (exponent - 127), since the table has twice the numbers: a subnormal one below 2.
    bits = torch.where(wide < 2, 32 << wide, (wide - 1) << 7)
    scales = bits.to(torch.int16).view(torch.bfloat16)
    return {"bits": 4, "group": 32, "table": E2M1, "codes": codes, "scales": scales}


GROUPED: dict[GGMLQuantizationType, Callable[[torch.Tensor], _Fields]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
    GGMLQuantizationType.MXFP4: _mxfp4,
}
"""Types that are kept: what a GroupedWeight has, of uint8 [rows, blocks in a row, bytes in a block]."""
_HALVED = frozenset(
    (
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.MXFP4,
    )
)
"""Those whose codes are halves of bytes as a GroupedWeight may have them."""


def _apart(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Numbers of 1, 2 or 4 bits: the lowest of `run` bytes, the next ones of the same bytes, and so on."""
    per_byte = 8 // bits
    words = packed.contiguous().view(torch.int64).unflatten(2, (-1, run // 8))
    out = words.new_empty((*words.shape[:3], per_byte, run // 8))
    for place in range(per_byte):
        part = out[..., place, :]
        torch.bitwise_right_shift(words, place * bits, out=part)
        part &= ((1 << bits) - 1) * _EVERY_BYTE
    return out.flatten(2).view(torch.uint8)


def _joined(low: torch.Tensor, high: torch.Tensor, shift: int) -> torch.Tensor:
    """low | high << shift, in low's memory."""
    low.view(torch.int64).bitwise_or_(high.view(torch.int64) << shift)
    return low


def _fifth(packed: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Codes of Q5_0 and Q5_1: bit i of the four bytes `high` is code i's fifth."""
    return _joined(_apart(packed, 4, 16), _BITS_OF_BYTES.to(high.device)[high.int()].view(torch.uint8), 4)


def _six_bit_scales(head: torch.Tensor) -> _Fields:
    """Eight scales and minimums, and their factors, of Q4_K and Q5_K."""
    factor, minimum_factor, scales, minimums, high = head.split((2, 2, 4, 4, 4), 2)
    return {
        "scales": _signed(torch.cat((scales & 63, high & 15 | scales >> 2 & 48), 2)),
        "factors": _half(factor),
        "minimums": _signed(torch.cat((minimums & 63, high >> 4 | minimums >> 2 & 48), 2)),
        "minimum_factors": _half(minimum_factor),
    }


def _half(numbers: torch.Tensor) -> torch.Tensor:
    is_aligned = not numbers.storage_offset() % 2 and not any(stride % 2 for stride in numbers.stride()[:2])
    return (numbers if is_aligned else numbers.contiguous()).view(torch.float16)


def _signed(scales: torch.Tensor) -> torch.Tensor:
    return scales.contiguous().view(torch.int8)
