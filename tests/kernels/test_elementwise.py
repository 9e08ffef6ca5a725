"""Norms, rotary embedding and gated activations against plain formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from quire_kernels import ops
from tests.kernels.common import every_implementation, forced, gated

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.row("D3", clauses=("norm",))
@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("rms_norm", DTYPES))
@pytest.mark.parametrize("shape", [(1, 64), (7, 4096), (5, 3, 16)])
def test_rms_norm(name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 3 * draw(*shape, dtype=dtype, device=device)
    weight = draw(shape[-1], dtype=dtype, device=device, seed=1)

    def formula(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    residual = draw(*shape, dtype=dtype, device=device, seed=2)
    with forced("rms_norm", name):
        close(ops.rms_norm(x, weight, 1e-5), formula(x), dtype)
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, formula(total), dtype)


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("gated_norm", DTYPES))
@pytest.mark.parametrize("shape", [(1, 2, 64), (7, 3, 128)])
def test_gated_norm(name: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = 3 * draw(*shape, dtype=dtype, device=device)
    # Rows of a wider matrix, as a projection's output has them.
    gate = 2 * draw(shape[0], shape[1] * shape[2] + 5, dtype=dtype, device=device, seed=2)[:, :-5]
    for weight_type in {dtype, torch.float32}:
        weight = draw(shape[-1], dtype=weight_type, device=device, seed=1)
        wide, by = x.double(), gate.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        with forced("gated_norm", name):
            close(ops.gated_norm(x, weight, 1e-5, gate), normed.flatten(1) * by / (1 + (-by).exp()), dtype)


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("rope", DTYPES))
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 16), (128, 128), (128, 64)])
def test_rope_rotates_pairs_and_keeps_the_rest(
    name: str, device: str, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    # A slice of a projection's output, as in the model: rows are not contiguous.
    x = draw(6, 5, head_dim, dtype=dtype, device=device)[:, 1:4]
    angles = 10 * torch.rand(6, rotary_dim // 2, device=device)
    expected = x.double().clone()
    for i in range(rotary_dim // 2):
        j = i + rotary_dim // 2
        cos, sin = angles[:, i, None].double().cos(), angles[:, i, None].double().sin()
        expected[..., i] = x[..., i].double() * cos - x[..., j].double() * sin
        expected[..., j] = x[..., j].double() * cos + x[..., i].double() * sin
    before = x.clone()
    with forced("rope", name):
        out = ops.rope(x, angles.cos(), angles.sin())
    close(out, expected, dtype)
    assert torch.equal(x, before), "the input is left alone"


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("gate_mul", DTYPES))
def test_silu_with_the_product(name: str, device: str, dtype: torch.dtype) -> None:
    x = 3 * draw(7, 96, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, -1)
    with forced("gate_mul", name):
        close(ops.gate_mul(x, "silu"), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("gate_mul", DTYPES))
def test_gelu_with_the_product(name: str, device: str, dtype: torch.dtype) -> None:
    x = 3 * draw(7, 96, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, -1)
    exact = 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2)))
    tanh = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    with forced("gate_mul", name):
        close(ops.gate_mul(x, "gelu"), exact * up, dtype)
        close(ops.gate_mul(x, "gelu_tanh"), tanh * up, dtype)


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("gate_mul", DTYPES))
def test_clamped_swiglu(name: str, device: str, dtype: torch.dtype) -> None:
    """Limits of both halves are reached, and what is no number stays so."""
    x = 6 * draw(7, 96, dtype=dtype, device=device)
    assert (x.abs() > 7).any(0).sum() > 48
    expected = gated("clamped_swiglu", *x.double().chunk(2, -1))
    with forced("gate_mul", name):
        close(ops.gate_mul(x, "clamped_swiglu"), expected, dtype)
        x[3, 5] = x[4, 50] = math.nan
        assert ops.gate_mul(x, "clamped_swiglu").isnan().nonzero().tolist() == [[3, 5], [4, 2]]


@pytest.mark.parametrize(("name", "device"), every_implementation("argmax"))
@pytest.mark.parametrize("size", [1, 15, 16, 1000, 151_936])
def test_argmax(name: str, device: str, size: int) -> None:
    x = draw(5, size + 3, dtype=torch.float32, device=device)[:, :size]
    x[1, size // 2] = x[1, size - 1] = 100.0
    x[2] = -math.inf
    x[2, size // 3] = -5.0
    x[4, : size - 1] = -1e30
    with forced("argmax", name):
        found = ops.argmax(x)
        assert found.dtype == torch.int64
        assert found.tolist() == [x[0].argmax(), size // 2, size // 3, x[3].argmax(), x[4].argmax()]
        # Nothing finite to choose, or a number that is none: the row has no answer, its neighbours have.
        x[0, size - 1], x[1], x[3, 0], x[4, size // 2] = math.nan, -math.inf, math.inf, math.nan
        assert ops.argmax(x).tolist() == [-1, -1, size // 3, -1, -1]
