"""Number formats in Triton: roundings that are the same on every GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter

interpreter.install()


@triton.jit
def round_even(x):  # type: ignore[no-untyped-def]
    """float32 x, of magnitude below 2 ** 22, to the nearest integer, halves to the even one.

    In [2 ** 23, 2 ** 24) the numbers of float32 are the integers, so the addition rounds.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3_bits(x):  # type: ignore[no-untyped-def]
    """The bits, int8, of float32 x as float8_e4m3fn, rounded to nearest even; it saturates, and NaN stays.

    By hand because GPUs before sm_89 have no instruction for it.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 3 of 23 bits of mantissa stay, and the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2 ** -6 the steps are 2 ** -9, and their number is the bits.
    small = round_even(tl.minimum(tl.abs(x), 1.0) * 512.0).to(tl.int32)
    out = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    out = tl.where(magnitude > 0x7F800000, 0x7F, out)
    return (out | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def from_e4m3_bits(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """1/256 of the numbers that int8 bits mean as float8_e4m3fn, exactly; NaN becomes finite.

    Moved to float16's places they are float16 numbers whose exponents are 8 less; see
    `reference.attention._to_float`. It needs no instruction that sm_80 lacks.
    """
    half = ((bits.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    if dtype == tl.float16:
        return half
    else:
        return half.to(tl.float32).to(dtype)
