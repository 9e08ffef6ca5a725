"""Corrects conversions and matrix products of Triton's interpreter.

Triton 3.7's interpreter truncates where a GPU rounds to nearest even, and multiplies bfloat16 matrices as if
their bits were integers. It multiplies with NumPy, whose BLAS, on some processors, sums a row differently
depending on its place in the tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire_kernels.triton_lang import operators


def install() -> None:
    """Replaces the interpreter's conversion and product, once. Does nothing if kernels are compiled."""
    if not operators.is_interpreted():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "rounds_to_nearest", False):
        return

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            wide = torch.from_numpy(np.array(data, dtype=np.float32))
            return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            narrow = np.asarray(data).view(np.uint16)
            return narrow.astype(np.uint32) << np.uint32(16)
        return original(data, source, target, rounding)

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if any(one.dtype.scalar.is_int() or one.dtype.primitive_bitwidth == 8 for one in (a, b)):
            return dot(self, a, b, d, *rest)
        wide = [
            convert(one.data, tl.bfloat16, tl.float32, None).view(np.float32)
            if one.dtype.scalar == tl.bfloat16
            else one.data.astype(d.data.dtype)
            for one in (a, b)
        ]
        return interpreter.TensorHandle(np.einsum("...mk,...kn->...mn", *wide) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    convert.rounds_to_nearest = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
