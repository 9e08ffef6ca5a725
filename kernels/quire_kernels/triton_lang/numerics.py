"""Number formats in Triton: a conversion of e4m3 bits that gives the same on every GPU and in the
interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter

interpreter.install()


@triton.jit
def from_e4m3_bits(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts int8 bits of float8_e4m3fn numbers to 1/256 of their values, exactly. NaN becomes finite.

    The bits, moved to float16's places, are a float16 number whose exponent is 8 less; see
    `reference.attention._to_float`. This needs no instruction that sm_80 lacks.
    """
    half = ((bits.to(tl.int16) << 7) & -0x4001).to(tl.float16, bitcast=True)
    if dtype == tl.float16:
        return half
    else:
        return half.to(tl.float32).to(dtype)
