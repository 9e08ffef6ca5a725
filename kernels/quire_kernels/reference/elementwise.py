"""Norms, rotary embedding, gated activations and argmax, for any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quire_kernels.registry import implementation

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Constants of clamped_swiglu: the factor of the gate within the sigmoid, and the limit of gate and up."""


@implementation("rms_norm", "reference")
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rms_norm` and `ops.add_rms_norm`; the sum, or x itself without a residual, comes second."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype), x


@implementation("gated_norm", "reference")
def gated_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor) -> torch.Tensor:
    """See `ops.gated_norm`."""
    normed = rms_norm(x.to(weight.dtype), weight, eps, None)[0].to(x.dtype)
    return (normed.flatten(1).float() * F.silu(gate.float())).to(x.dtype)


@implementation("rope", "reference")
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `ops.rope`."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # The products are float32 because cos and sin are; the assignment rounds once.
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    if rest.shape[-1]:
        out[..., 2 * half :] = rest
    return out


@implementation("argmax", "reference")
def argmax(x: torch.Tensor) -> torch.Tensor:
    """See `ops.argmax`."""
    indices = x.argmax(dim=-1)
    # argmax takes NaN for the largest, so this one value tells whether the row has any.
    finite = x.gather(1, indices[:, None]).squeeze(1).isfinite()
    return torch.where(finite, indices, -1)


@implementation("gate_mul", "reference")
def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `ops.gate_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
