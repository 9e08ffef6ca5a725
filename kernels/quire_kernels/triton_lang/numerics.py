"""Number formats in Triton: roundings that are the same on every GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter

interpreter.install()


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
