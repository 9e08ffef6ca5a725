"""What the kernel tests share: every implementation on every device of this machine, and a forced choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import quire_kernels.ops  # noqa: F401  (registers the implementations)
from quire_kernels import registry
from quire_kernels.quantized_kv import KVLayer, QuantizedKV, piece_bytes
from quire_kernels.triton_lang import operators

POISON = 0xFF
"""A byte; memory full of it is NaN in every floating-point type."""


def devices() -> list[str]:
    """Devices of this machine that kernels are tested on."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def every_implementation(
    operator: str,
    dtypes: Sequence[torch.dtype] = (),
    kv_dtypes: Sequence[torch.dtype | None] = (),
    **others: Any,
) -> list[Any]:
    """Parameters of all implementations that run on this machine.

    Args:
        dtypes: of the operands; if given, the third parameter is one that the implementation computes.
        kv_dtypes: of the cache (None: that of the operands); if given, the last parameter is one that it
            knows.
        others: facts of the call, beside those of the types.

    Returns:
        (implementation name, device), then a dtype, then a KV dtype.
    """
    parameters = []
    for one, device, dtype, kv_dtype in itertools.product(
        registry.implementations(operator), devices(), dtypes or [None], kv_dtypes or [None]
    ):
        computed = dtype or torch.float32
        facts: dict[str, Any] = {"kv_dtype": kv_dtype or computed, "activation": None, **others}
        facts |= dict.fromkeys(("size", "head_dim", "rotary_dim", "in_features", "out_features"), 64)
        is_ours = not one.function.__module__.startswith("tests.")  # a fixture has one of its own
        if is_ours and one.can_do(device, computed, facts):
            values = [one.name, device, *[dtype][: len(dtypes)], *[kv_dtype][: len(kv_dtypes)]]
            words = [str(value).removeprefix("torch.") for value in values]
            parameters.append(pytest.param(*values, id="-".join(words)))
    return parameters


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What a gated layer's halves become, by the definitions."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    kind = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=kind) * up


def is_interpreted(name: str, device: str) -> bool:
    """Whether an implementation runs in Triton's interpreter: a thousandth as fast, so tests give it less."""
    return name == "triton" and device == "cpu" and operators.is_interpreted()


def with_cases(parameters: list[Any], cases: Sequence[Any], interpreted: int = 0) -> list[Any]:
    """Every implementation with every case behind its own values; the interpreter with the first ones."""
    return [
        pytest.param(*one.values, case, id=f"{one.id}-{str(case).strip('()').replace(', ', '-')}")
        for one in parameters
        for case in (cases[:interpreted] if is_interpreted(*one.values[:2]) else cases)
    ]


def quantized_pool(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[torch.Tensor, list[QuantizedKV]]:
    """Memory for quantised keys and values, all of it POISON: (uint8 [num_blocks, bytes], the layers)."""
    piece = piece_bytes(block_size, head_dim)
    shape = (num_blocks, num_layers, 2, num_kv_heads, piece)
    pool = torch.full(shape, POISON, dtype=torch.uint8, device=device)
    return pool.flatten(1), [QuantizedKV.from_pieces(layer, dtype, block_size) for layer in pool.unbind(1)]


def dequantized(kv_layer: KVLayer) -> torch.Tensor:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim]: float64 of a quantised layer, else the layer."""
    if not isinstance(kv_layer, QuantizedKV):
        return kv_layer
    return kv_layer.data.double() * kv_layer.scales.double().unsqueeze(-1)


@contextmanager
def forced(operator: str, name: str) -> Iterator[None]:
    """The operator is computed by this implementation inside the block."""
    with registry.forced({operator: name}):
        yield
