"""Linear layers: plain, gated and quantised, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire_kernels import ops, registry
from quire_kernels.cuda.linear import Float8Linear
from quire_kernels.weights import (
    INT4_GROUP,
    QUANTIZATIONS,
    W8A8_GROUP,
    QuantizedRows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)
from tests.kernels.common import every_implementation, forced, gated

DTYPES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = every_implementation("linear", DTYPES)
HALVES = [one for one in IMPLEMENTATIONS if one.values[2] != torch.float32]
# torch's matrix product differs with the number of rows, and CUDA C++ uses it.
INVARIANT = [one for one in IMPLEMENTATIONS if one.values[0] not in ("reference", "cuda")]
ROWS = (1, 2, 3, 7, 12, 13, 16, 17, 31, 33, 64, 70, 257, 300)
"""Every kind of tile, and more rows than a task has."""


def with_quantizations(parameters: Sequence[Any], quantizations: Sequence[str | None]) -> list[Any]:
    """(name, device, dtype, quantization) for what each implementation can do."""
    known = {one.name: one for one in registry.implementations("linear")}
    return [
        pytest.param(*one.values, quantization, id=f"{one.id}-{quantization}")
        for one in parameters
        for quantization in quantizations
        if known[one.values[0]].can_do(
            one.values[1],
            one.values[2],
            {"in_features": 64, "out_features": 64, "activation": None, "quantization": quantization},
        )
    ]


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.row("D6")
@pytest.mark.row("D27")
@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 32), (100, 96), (1, 64), (40, 1120), (520, 64)]
)
def test_is_x_times_weight(
    name: str, device: str, dtype: torch.dtype, has_bias: bool, out_features: int, in_features: int
) -> None:
    weight = draw(out_features, in_features, dtype=dtype) / in_features**0.5
    bias = draw(out_features, dtype=dtype, seed=1) if has_bias else None
    with forced("linear", name):
        packed = ops.pack_linear(
            weight.to(device).clone(), None if bias is None else bias.to(device), activation=None
        )
    assert (packed.in_features, packed.out_features) == (in_features, out_features)
    for rows in ROWS:
        x = draw(rows, in_features, dtype=dtype, seed=rows)
        out = packed(x.to(device))
        assert out.dtype == dtype and out.shape == (rows, out_features)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            out.double().cpu(), expected_of(x, weight, bias), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_float32_results_are_not_rounded_to_the_weights_type(
    name: str, device: str, dtype: torch.dtype
) -> None:
    weight, x = draw(96, 256, dtype=dtype) / 16, draw(5, 256, dtype=dtype, seed=1)
    with forced("linear", name):
        out = ops.pack_linear(weight.to(device).clone())(x.to(device), torch.float32)
    assert out.dtype == torch.float32
    # The reference rounds before it widens.
    tolerance = 1e-5 if dtype == torch.float32 or name != "reference" else 2e-2
    torch.testing.assert_close(
        out.double().cpu(), expected_of(x, weight, None), atol=tolerance, rtol=tolerance
    )


@pytest.mark.row("D3", clauses=("activation",))
@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_is_its_composition(
    name: str, device: str, dtype: torch.dtype, activation: str, has_bias: bool
) -> None:
    weight = draw(2 * 80, 64, dtype=dtype) / 4
    bias = draw(160, dtype=dtype, seed=1) if has_bias else None
    with forced("linear", name):
        packed = ops.pack_linear(
            weight.to(device).clone(), None if bias is None else bias.to(device), activation=activation
        )
    assert packed.out_features == 80
    for rows in (1, 18, 70):
        x = draw(rows, 64, dtype=dtype, seed=rows)
        gate, up = expected_of(x, weight, bias).chunk(2, 1)
        # Of bfloat16, products of two rounded numbers of up to 12.
        atol, rtol = (2e-5, 2e-5) if dtype == torch.float32 else (0.15, 2e-2)
        torch.testing.assert_close(
            packed(x.to(device)).double().cpu(), gated(activation, gate, up), atol=atol, rtol=rtol
        )


@pytest.mark.row("E19")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"),
    with_quantizations(IMPLEMENTATIONS, [None, *QUANTIZATIONS, "w4a8"]),
)
def test_a_gate_apart_gives_the_same_numbers(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Steps with adapters compute it so, and rows without one must not notice."""
    weight, bias = draw(2 * 80, 128, dtype=dtype) / 4, draw(160, dtype=dtype, seed=1)
    with forced("linear", name):
        packed = ops.pack_linear(
            weight.to(device).clone(), bias.to(device), activation="silu", quantization=quantization
        )
    plain, gate = packed.ungated(), getattr(packed, "isa", name)
    for rows in (1, 18, 70):
        x = draw(rows, 128, dtype=dtype, seed=rows).to(device)
        wide = plain(x, torch.float32)
        with forced("gate_mul", gate):
            out = ops.gate_mul(wide, "silu").to(dtype)
        # torch's products are rounded before the gate where the result is.
        if dtype == torch.float32 or gate not in ("reference", "cuda"):
            assert torch.equal(out, packed(x))
        else:
            torch.testing.assert_close(out, packed(x), atol=0.15, rtol=2e-2)


@pytest.mark.row("D6")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(INVARIANT, [None, *QUANTIZATIONS])
)
def test_a_row_does_not_depend_on_the_batch(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    weight = draw(192, 640, dtype=dtype) / 24
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization=quantization)
    x = draw(300, 640, dtype=dtype, seed=1).to(device)
    together = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[300 - rows :]), together[300 - rows :]), f"{rows} rows"
    # A row of a wider matrix, as attention's output in the projections' memory is.
    wide = torch.cat((x, x), 1)
    assert torch.equal(packed(wide[:, 640:]), together)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(IMPLEMENTATIONS, ["int8", "w8a8"])
)
def test_numbers_are_rounded_alike_everywhere(
    name: str, device: str, dtype: torch.dtype, quantization: str
) -> None:
    """Kernels that quantise what they pack make of it what `quantize_weight` does on that device. (On a GPU
    torch multiplies by the inverse of 127 in place of a division: scales may differ from a CPU's.)"""
    weight = draw(100, 192, dtype=dtype)
    weight[5], weight[6, 7:], weight[7] = 0.0, 1e-3, 2.0**-130
    quantised = QuantizedRows(*quantize_weight(weight.to(device), quantization), quantization)
    x = draw(3, 192, dtype=dtype, seed=1).to(device)
    with forced("linear", name):
        found = ops.pack_linear(weight.to(device), quantization=quantization)
        expected = ops.pack_linear(quantised, dtype=dtype)
        assert torch.equal(found(x), expected(x))
        weight[9, 3], weight[11, 100] = torch.nan, torch.inf
        products = ops.pack_linear(weight.to(device), quantization=quantization)(x)
    assert products.isfinite().all(0).logical_not().nonzero().flatten().tolist() == [9, 11]


@pytest.mark.row("D11")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"),
    with_quantizations(IMPLEMENTATIONS, [one for one in QUANTIZATIONS if one != "int4"]),
)
def test_rows_that_are_quantised_already(
    name: str, device: str, dtype: torch.dtype, quantization: str
) -> None:
    """Their codes are taken as they are, -128 too, which nobody's quantiser here makes."""
    codes, scales = quantize_weight(draw(96, 128, dtype=torch.float32), quantization)
    if codes.dtype == torch.int8:
        codes[::7, ::5] = -128
    rows = QuantizedRows(codes.to(device), scales.to(device), quantization)
    with forced("linear", name):
        packed = ops.pack_linear(rows, activation="silu", dtype=dtype)
    x = draw(18, 128, dtype=dtype, seed=1)
    restored = dequantize_weight(codes, scales).to(dtype)
    gate, up = expected_of(taken_rows(packed, x), restored, None).chunk(2, 1)
    # Inputs of eight bits are off by half a percent of the largest one each.
    error = packed(x.to(device)).double().cpu() - torch.nn.functional.silu(gate) * up
    limit = 0.02 if quantization == "w8a8" or dtype != torch.float32 else 1e-5
    assert error.norm() < limit * (torch.nn.functional.silu(gate) * up).norm()
    assert ops.packed_bytes(rows, device_type=device, dtype=dtype) == ops.packed_bytes(
        draw(96, 128, dtype=dtype), device_type=device, quantization=quantization
    )


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(INVARIANT, [None, *QUANTIZATIONS])
)
def test_wide_matrices_whose_tasks_have_several_blocks(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Blocks are read side by side then, and the last task has fewer; 600 rows are more than a task has."""
    weight = draw(2100, 320, dtype=dtype) / 18
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization=quantization)
        narrow = [
            ops.pack_linear(rows.to(device).clone(), quantization=quantization) for rows in weight.split(64)
        ]
    x = draw(600, 320, dtype=dtype, seed=1).to(device)
    together = packed(x)
    assert torch.equal(together, torch.cat([part(x) for part in narrow], 1)), "600 rows"
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 65, 95, 130, 191, 192, 211):
        assert torch.equal(packed(x[600 - rows :]), together[600 - rows :]), f"{rows} rows"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(INVARIANT, [None, *QUANTIZATIONS])
)
def test_nor_does_a_row_of_tiny_numbers(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Tile instructions take subnormal numbers, and products that small, for zeros."""
    exponents = torch.linspace(-24, -16, 64)
    weight = (draw(96, 64, dtype=torch.float32) * 10.0**exponents).to(dtype)
    x = (draw(40, 64, dtype=torch.float32, seed=1) * 10.0 ** exponents.flip(0)).to(dtype).to(device)
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization=quantization)
    together = packed(x, torch.float32)
    for row in range(40):
        assert torch.equal(packed(x[row : row + 1], torch.float32), together[row : row + 1]), row


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(IMPLEMENTATIONS, [None, *QUANTIZATIONS])
)
def test_no_rows_at_all(name: str, device: str, dtype: torch.dtype, quantization: str | None) -> None:
    with forced("linear", name):
        packed = ops.pack_linear(draw(96, 64, dtype=dtype).to(device), quantization=quantization)
    assert packed(draw(0, 64, dtype=dtype).to(device)).shape == (0, 96)


@pytest.mark.row("D18")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(IMPLEMENTATIONS, QUANTIZATIONS)
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_quantised_weights_are_what_the_definition_says(
    name: str, device: str, dtype: torch.dtype, quantization: str, activation: str | None
) -> None:
    size = 1056 if quantization != "w8a8" else 1088
    weight = draw(160, size, dtype=dtype) / 32
    weight[3] = 0
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), activation=activation, quantization=quantization)
    # On the layer's device: where rounding decides, devices make different codes of four bits.
    restored = dequantize_weight(*quantize_weight(weight.to(device), quantization)).double().cpu()
    for rows in (1, 16, 40, 70):
        x = draw(rows, size, dtype=dtype, seed=rows)
        x[0, :64] = 0
        taken = restored_rows(x) if quantization == "w8a8" else taken_rows(packed, x)
        expected = expected_of(taken, restored, None)
        if activation is not None:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            packed(x.to(device)).double().cpu(), expected, atol=tolerance, rtol=tolerance
        )
    if name != "reference":
        bits = 4 + 32 / INT4_GROUP if quantization == "int4" else 8 + 32 / size
        # Groups may be kept in pairs, of which the last is half empty here.
        room = INT4_GROUP if quantization == "int4" else 0
        assert 0.99 <= packed.nbytes * 8 / (160 * size * bits) <= 1.01 * (size + room) / size


def restored_rows(x: torch.Tensor) -> torch.Tensor:
    """What w8a8 makes of activations, in float64."""
    codes, scales = quantize_rows(x)
    return (codes.double() * scales.double()).flatten(1)


def float8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of activations where products are of fp8 by fp8: see `Kernels.quantize_rows`."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    is_finite, most = largest.isfinite(), torch.full_like(largest, 448)
    largest = largest.clamp(min=448 * 2.0**-126)
    codes = torch.where(is_finite, wide * (most / largest), 0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.where(is_finite, largest / most, torch.nan)


def taken_rows(packed: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer makes of activations: float64 where that is not x."""
    if not isinstance(packed, Float8Linear):
        return x
    codes, scales = float8_rows(x)
    return codes.double() * scales.double()


@pytest.mark.row("D18")
@pytest.mark.parametrize(("name", "device", "dtype"), INVARIANT)
def test_integer_products_are_the_same_on_every_instruction_set(
    name: str, device: str, dtype: torch.dtype
) -> None:
    """Not nearly so, but to the last bit: a request may move between machines."""
    weight, x = draw(96, 512, dtype=dtype) / 16, draw(21, 512, dtype=dtype, seed=1)
    results = []
    for one in INVARIANT:
        with forced("linear", one.values[0]):
            packed = ops.pack_linear(weight.clone(), quantization="w8a8")
        results.append(packed(x, torch.float32))
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization="w8a8")
    out = packed(x.to(device), torch.float32).cpu()
    assert all(torch.equal(out, other) for other in results)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(IMPLEMENTATIONS, ["w8a8"])
)
def test_activations_that_are_not_finite_give_nan(
    name: str, device: str, dtype: torch.dtype, quantization: str
) -> None:
    x = draw(20, 256, dtype=dtype)
    x[3, 100], x[7, 0] = torch.nan, torch.inf
    with forced("linear", name):
        packed = ops.pack_linear(draw(64, 256, dtype=dtype).to(device), quantization=quantization)
    out = packed(x.to(device)).cpu()
    is_bad = torch.zeros(20, dtype=torch.bool)
    is_bad[[3, 7]] = True
    assert bool(out[is_bad].isnan().all()) and bool(out[~is_bad].isfinite().all())


def test_quantised_rows_are_near_the_rows() -> None:
    x = draw(5, 256, dtype=torch.float32)
    x[2] = 0
    codes, scales = quantize_rows(x)
    assert codes.shape == (5, 256 // W8A8_GROUP, W8A8_GROUP) and scales.shape == (5, 256 // W8A8_GROUP, 1)
    missed = (restored_rows(x) - x).abs().unflatten(1, (-1, W8A8_GROUP))
    assert bool((missed <= scales / 2 * 1.0001).all()) and int(codes.abs().max()) == 127


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_rows_are_those_of_the_weight(name: str, device: str, dtype: torch.dtype) -> None:
    weight = draw(100, 96, dtype=dtype).to(device)
    with forced("linear", name):
        packed = ops.pack_linear(weight.clone())
    indices = torch.tensor([0, 99, 31, 32, 33, 5, 5], device=device)
    assert torch.equal(packed.rows(indices), weight[indices])


@pytest.mark.row("D18")
@pytest.mark.row("D6")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"), with_quantizations(IMPLEMENTATIONS, [None, *QUANTIZATIONS])
)
def test_argmax_is_that_of_the_product(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    size, first = 1000, 700
    weight = draw(size, 128, dtype=dtype)
    # All results are negative, less than what padding would give; and there are equal columns.
    weight[:, 0] = -100
    weight[first:] = weight[: size - first].clone()
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization=quantization)
    for rows in ROWS:
        x = draw(rows, 128, dtype=dtype, seed=rows).to(device)
        x[:, 0] = 5
        best = packed.argmax(x)
        assert torch.equal(best, ops.argmax(packed(x, torch.float32)))
        assert best.dtype == torch.int64 and int(best.min()) >= 0
        assert int(best.max()) < first


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_argmax_of_what_is_not_finite(name: str, device: str, dtype: torch.dtype) -> None:
    weight = draw(200, 64, dtype=dtype)
    weight[150] = 3e38
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone())
    x = draw(5, 64, dtype=dtype)
    x[:, :] = x.abs()
    x[1, 3], x[3, 5] = torch.nan, -torch.inf
    best = packed.argmax(x.to(device))
    assert torch.equal(best, ops.argmax(packed(x.to(device), torch.float32)))
    assert best.tolist() == [-1] * 5, "infinite sums, and NaN"
    weight[150] = 0
    weight[70, 3] = torch.nan
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone())
    assert packed.argmax(x[::2].to(device)).tolist() == [-1] * 3, "one column is NaN, the others are finite"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "quantization"),
    with_quantizations([one for one in HALVES if one.values[0] == "cuda"], QUANTIZATIONS),
)
def test_a_row_does_not_depend_on_the_rows_of_its_tile(
    name: str, device: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """Nor on garbage: the other rows are NaN, or not there."""
    weight, x = draw(96, 320, dtype=dtype) / 18, draw(64, 320, dtype=dtype, seed=1).to(device)
    with forced("linear", name):
        packed = ops.pack_linear(weight.to(device).clone(), quantization=quantization)
    together = packed(x)
    for rows in (1, 7, 16, 33):
        if isinstance(packed, Float8Linear):
            # torch takes another product for other numbers of rows.
            torch.testing.assert_close(packed(x[:rows]), together[:rows], atol=2e-2, rtol=2e-2)
        else:
            assert torch.equal(packed(x[:rows]), together[:rows]), rows
    x[1:] = torch.nan
    assert torch.equal(packed(x)[:1], together[:1])


@pytest.mark.row("D12")
def test_fp8_is_the_nearest_number_of_its_type() -> None:
    weight = draw(64, 512, dtype=torch.float32)
    weight[5] = 0
    codes, scales = quantize_weight(weight, "fp8")
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (64, 1)
    assert float(codes.float().abs().amax(1).min()) == 0 and float(codes.float().max()) == 448
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    nearest = (
        (weight[:8, :, None] / scales[:8, :, None].clamp(min=1e-30) - every[every.isfinite()]).abs().amin(2)
    )
    found = (weight / scales.clamp(min=1e-30) - codes.float()).abs()[:8]
    torch.testing.assert_close(found, nearest, atol=1e-4, rtol=0)
    # Half a step of 3 bits of mantissa.
    assert bool(
        ((dequantize_weight(codes, scales) - weight).abs() <= weight.abs() / 16 + scales / 1000).all()
    )


def test_quantisation_errors_are_bounded() -> None:
    weight = draw(64, 512, dtype=torch.float32)
    codes, scales = quantize_weight(weight, "int8")
    assert codes.dtype == torch.int8 and scales.shape == (64, 1)
    assert bool(((dequantize_weight(codes, scales) - weight).abs() <= scales / 2 * 1.0001).all())
    codes, scales = quantize_weight(weight, "int4")
    assert scales.shape == (64, 512 // INT4_GROUP)
    assert int(codes.min()) == -8 and int(codes.max()) == 7
    missed = dequantize_weight(codes, scales) - weight
    plain = weight.unflatten(1, (-1, INT4_GROUP)).abs().amax(2).repeat_interleave(INT4_GROUP, 1) / 7
    rounded = (weight / plain).round() * plain - weight
    assert float(missed.square().mean()) < 0.95 * float(rounded.square().mean()), "no better than absmax / 7"


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.ones(4, 64)
    weight[1, 5], weight[2, 40] = torch.nan, torch.inf
    for quantization in QUANTIZATIONS:
        restored = dequantize_weight(*quantize_weight(weight, quantization))
        assert bool(restored[1, 5].isnan()) and not bool(restored[2, 40].isfinite())
        assert bool(restored[0].isfinite().all())
