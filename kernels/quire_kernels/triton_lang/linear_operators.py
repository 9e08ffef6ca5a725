"""Registers the Triton-language linear, elementwise and sampling kernels."""

from __future__ import annotations

import torch

from quire_kernels.sampling import is_not_typical
from quire_kernels.triton_lang import lazy
from quire_kernels.weights import INT4_GROUP

FORMATS = (None, "int8", "int4", "fp8")
"""Quantisations that `linear.TritonLinear` keeps in their own size."""
MAX_VOCABULARY = 1 << 20
"""More tokens of the same weight would overflow the integer sums of `sampling.sample`."""


def can_pack(in_features: int, quantization: str | None = None, **_: object) -> bool:
    """Whether the kernels take a matrix of this shape and quantisation."""
    return quantization in FORMATS and (quantization != "int4" or in_features % INT4_GROUP == 0)


lazy.register("linear", "linear", "TritonLinear", predicate=can_pack)
for _name in ("rms_norm", "silu_mul", "gelu_mul", "rope"):
    lazy.register(_name, "elementwise", _name)
lazy.register("argmax", "elementwise", "argmax", dtypes=(torch.float32,))
lazy.register("sample", "sampling", "sample", dtypes=(torch.float32,), predicate=is_not_typical)
