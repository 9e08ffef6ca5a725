"""PyTorch implementations of every operator, for any device. They define each operator's meaning."""

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
