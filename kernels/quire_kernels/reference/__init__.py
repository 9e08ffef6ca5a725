"""PyTorch implementations of the operators, for any device. They define each operator's meaning. The one of
`norm_rope_write` is in `ops`."""

from quire_kernels.reference import (
    attention,
    cache,
    elementwise,
    gated_delta,
    heads,
    linear,
    logits,
    lora,
    mamba,
    moe,
    sampling,
)

__all__ = [
    "attention",
    "cache",
    "elementwise",
    "gated_delta",
    "heads",
    "linear",
    "logits",
    "lora",
    "mamba",
    "moe",
    "sampling",
]
