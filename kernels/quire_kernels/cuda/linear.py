"""Linear layers of plain weights: cuBLAS, through torch, with our gate and argmax behind it."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from quire_kernels.cuda.kernels import Kernels
from quire_kernels.reference.linear import TorchLinear


class Linear(TorchLinear):
    """See `ops.pack_linear`. Nothing reads plain weights faster than cuBLAS, at whatever number of rows."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        quantization: str | None,
    ) -> None:
        assert quantization is None, quantization
        super().__init__(weight, bias, activation, None)
        self.kernels = kernels
        # Found out now, as it may not be while a graph is recorded.
        can_widen(weight.device.type)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return self.kernels.argmax(self(x, torch.float32))

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        dtype = dtype or x.dtype
        out = product(x, self.weight, self.bias, dtype)
        if self.activation is not None:
            out = self.kernels.gate_mul(out, self.activation)
        return out.to(dtype)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], of x's type.
        bias: [out_features], of x's type.
        dtype: what the result is for.

    Returns:
        [..., out_features]: float32 for float32, where torch can do that, not rounded on the way; else x's
        type.
    """
    if dtype != torch.float32 or x.dtype == torch.float32 or not can_widen(x.device.type):
        return F.linear(x, weight, bias)
    out = float32_product(x.reshape(-1, x.shape[-1]), weight)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [n, out_features] of matrices of 16-bit numbers; tests put the CPU's in its place."""
    return torch.mm(x, weight.T, out_dtype=torch.float32)


@functools.cache
def can_widen(device_type: str) -> bool:
    """Whether there is a `float32_product`: on CUDA, from torch 2.8 on."""
    one = torch.ones((16, 16), dtype=torch.bfloat16, device=device_type)
    try:
        float32_product(one, one)
    except (TypeError, RuntimeError):
        return False
    return True


def can_pack(**facts: Any) -> bool:
    """Whether `Linear` takes a matrix: a gate's rows have to be whole vectors."""
    return facts.get("quantization") is None and (
        facts["activation"] is None or facts["out_features"] % 16 == 0
    )
