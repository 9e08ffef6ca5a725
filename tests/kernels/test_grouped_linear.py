"""Linear layers of group-quantised weights, on every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from quire_kernels import ops
from quire_kernels.block_weights import BLOCK_KINDS, BlockWeight
from quire_kernels.cpu.compiler import supported_isas
from quire_kernels.grouped_weights import E2M1, GroupedWeight
from quire_kernels.weights import JoinedLinear, dequantize_weight, group_weight, quantize_weight
from tests.kernels.common import every_implementation, forced

DTYPES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = every_implementation("grouped_linear", DTYPES)
NATIVE = [one for one in IMPLEMENTATIONS if one.values[0] != "reference"]
FACTORS = {
    "Q4_0": (0, None, slice(2, 18), 15),
    "Q4_1": (0, 2, slice(4, 20), 15),
    "Q5_0": (0, None, slice(2, 22), 31),
    "Q5_1": (0, 2, slice(4, 24), 31),
    "Q8_0": (0, None, slice(2, 34), -1),
    "Q2_K": (80, 82, slice(16, 80), 3),
    "Q3_K": (108, None, slice(0, 96), 7),
    "Q4_K": (0, 2, slice(16, 144), 15),
    "Q5_K": (0, 2, slice(16, 176), 31),
    "Q6_K": (208, None, slice(0, 192), 63),
    "IQ4_NL": (0, None, slice(2, 18), 240),
    "IQ4_XS": (0, None, slice(8, 136), 240),
}
"""Of a block: where the float16 of its scales is, and that of its minimums; the bytes of its codes; and how
far codes of ones only are from zeros only."""
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in FACTORS},
    "NVFP4": {"bits": 4, "group": 16, "table": E2M1, "scales": torch.float32, "row_scales": True},
    "AWQ": {"bits": 4, "group": 128, "zero": 8, "minimums": True},
    "GPTQ8": {"bits": 8, "group": 64, "zero": 128, "scales": torch.bfloat16, "row_scales": True},
}
"""What files have: blocks of GGUF, or a scale for each group, `scales` being a type."""
FILE_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q2_K": 2.625,
    "Q3_K": 3.4375,
    "Q4_K": 4.5,
    "Q5_K": 5.5,
    "Q6_K": 6.5625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.25,
}
"""Bits of a weight in a GGUF file, its share of the scales included."""


def make_weight(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> GroupedWeight | BlockWeight:
    """A weight of a kind whose numbers are about 1 / sqrt(num_columns)."""
    if kind in FACTORS:
        return make_blocks(kind, num_rows, num_columns, seed)
    generator = torch.Generator().manual_seed(seed)
    facts = {"zero": 0, "table": None, "scales": torch.float16, "minimums": False, "row_scales": False}
    facts |= KINDS[kind]
    bits, group = facts["bits"], facts["group"]
    size = 1.7 / (12 if facts["table"] else 2 ** (bits - 1)) / num_columns**0.5

    def draw(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    groups = (num_rows, num_columns // group)
    minimums = draw(groups, -0.5, 1.0) * size * 2 ** (bits - 1)
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (num_rows, num_columns), generator=generator).to(torch.uint8),
        scales=(draw(groups, 0.5, 1.5) * size).to(facts["scales"]),
        bits=bits,
        group=group,
        zero=facts["zero"],
        table=facts["table"],
        minimums=minimums.to(facts["scales"]) if facts["minimums"] else None,
        row_scales=draw((num_rows,), 0.5, 1.5) if facts["row_scales"] else None,
    )


def make_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> BlockWeight:
    """Random bytes, but for the float16 numbers."""
    of_file, generator = GGMLQuantizationType[kind], np.random.default_rng(seed)
    means, (inputs, num_bytes) = BLOCK_KINDS[of_file], GGML_QUANT_SIZES[of_file]
    blocks = generator.integers(0, 256, (num_rows, num_columns // inputs, num_bytes), dtype=np.uint8)
    largest = 128 if means.table else 2 ** (means.bits - 1)
    integers = {32: 1, 256: 8 if kind == "Q2_K" else 32}[inputs]
    size = 1.7 / num_columns**0.5 / integers
    if kind == "Q6_K":  # whose scales have eight bits
        size /= 2
    scale_at, minimum_at, _, _ = FACTORS[kind]
    for at, most in ((scale_at, size / largest), (minimum_at, size / 2)):
        if at is not None:
            drawn = generator.uniform(0.5, 1.5, blocks.shape[:2]) * most
            if at == minimum_at and inputs == 32:
                drawn -= most  # what is added may have either sign
            blocks[..., at : at + 2] = drawn.astype("<f2")[..., None].view(np.uint8)
    return BlockWeight(of_file, torch.from_numpy(blocks.reshape(num_rows, -1)))


def parts_of(weight: GroupedWeight | BlockWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values less their zeros, float64 [out_features, in_features], and the scales and minimums of each,
    float32 of that shape. Of blocks by what the public package takes them for with other factors or codes."""
    if isinstance(weight, GroupedWeight):
        codes = weight.codes.long()
        values = codes if weight.table is None else torch.tensor(weight.table)[codes]
        scales, minimums = (
            None if one is None else one.float().repeat_interleave(weight.group, 1)
            for one in (weight.scales, weight.minimums)
        )
        assert scales is not None
        return values.double() - weight.zero, scales, minimums
    scale_at, minimum_at, codes_at, reach = FACTORS[weight.kind.name]
    inputs, num_bytes = GGML_QUANT_SIZES[weight.kind]
    blocks = weight.blocks.numpy().reshape(weight.shape[0], -1, num_bytes)
    zero, one = [0, 0], [0, 60]

    def factor(at: int) -> torch.Tensor:
        numbers = blocks[..., at : at + 2].copy().view("<f2")[..., 0].astype(np.float32)
        return torch.from_numpy(numbers).repeat_interleave(inputs, 1)

    def means(scale: list[int], minimum: list[int], codes: int | None) -> torch.Tensor:
        changed = blocks.copy()
        changed[..., scale_at : scale_at + 2] = scale
        if minimum_at is not None:
            changed[..., minimum_at : minimum_at + 2] = minimum
        if codes is not None:
            changed[..., codes_at] = codes
        out = quants.dequantize(changed.reshape(weight.shape[0], -1), weight.kind)
        return torch.from_numpy(out)

    scales = (means(one, zero, 255) - means(one, zero, 0)) / reach
    values = (means(one, zero, None).double() / scales).nan_to_num(0.0)
    minimums = None if minimum_at is None else -means(zero, one, None) * factor(minimum_at)
    return values, scales * factor(scale_at), minimums


@pytest.mark.row("D14", clauses=("layout",))
@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_weights_mean(name: str, device: str, dtype: torch.dtype, kind: str) -> None:
    weight = make_weight(kind, 100, 512)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(weight, dtype=dtype)
    indices = torch.tensor([0, 99, 31, 32, 33, 5, 5])
    assert torch.equal(packed.rows(indices), weight.dequantize().to(dtype)[indices])


def product_of(x: torch.Tensor, weight: GroupedWeight | BlockWeight) -> torch.Tensor:
    """float32 [n, out_features] by the arithmetic of the C++ kernels (gemm_grouped.h), step by step."""
    units = x.float().unflatten(1, (-1, 32))
    extreme = units.abs().amax(2)
    numbers = units * (torch.tensor(127.0) / extreme).unsqueeze(2)
    numbers = numbers.round().nan_to_num(0.0).double()
    x_scales = extreme / 127
    values, scales, minimums = parts_of(weight)
    part = min(weight.group if isinstance(weight, GroupedWeight) else BLOCK_KINDS[weight.kind].group, 32)

    def fused(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return (left.double() * right.double() + total.double()).float()

    total = torch.zeros(x.shape[0], weight.shape[0])
    for index in range(x.shape[1] // part):
        x_scale = x_scales[:, index * part // 32].unsqueeze(1)
        own = numbers.flatten(1)[:, index * part : (index + 1) * part]
        products = own @ values[:, index * part : (index + 1) * part].T
        total = fused(products.float(), scales[:, index * part] * x_scale, total)
        if minimums is not None:
            sums = x_scale * own.sum(1, keepdim=True).float()
            total = fused(-minimums[:, index * part].unsqueeze(0), sums, total)
    row_scales = weight.row_scales if isinstance(weight, GroupedWeight) else None
    return total if row_scales is None else total * row_scales


@pytest.mark.row("A12", clauses=("batch",))
@pytest.mark.parametrize(("name", "device", "dtype"), NATIVE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(100, 512), (32 * 9, 256), (1, 1280)])
def test_arithmetic_is_that_of_the_definition(
    name: str, device: str, dtype: torch.dtype, kind: str, num_rows: int, num_columns: int
) -> None:
    """To the last bit, on every instruction set, and for any number of rows."""
    weight = make_weight(kind, num_rows, num_columns)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(weight, dtype=dtype)
    x = torch.randn((300, num_columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3], x[5, :40] = 0, 0
    expected = product_of(x, weight)
    assert torch.equal(packed(x, torch.float32), expected)
    for count in (1, 2, 3, 5, 15, 16, 17, 40, 65):
        first = (17 * count) % (300 - count)
        rows = slice(first, first + count)
        assert torch.equal(packed(x[rows], torch.float32), expected[rows]), count


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "NVFP4"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_is_x_times_what_the_weights_mean(
    name: str, device: str, dtype: torch.dtype, kind: str, activation: str | None
) -> None:
    """But for the rounding of x to eight bits; with a bias, row scales and a gate."""
    weight, bias = make_weight(kind, 96, 512), torch.linspace(-1, 1, 96).to(dtype)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(weight, bias, activation=activation, dtype=dtype)
    assert (packed.in_features, packed.out_features) == (512, 48 if activation else 96)
    for count in (1, 2, 5, 18):
        x = torch.randn((count, 512), generator=torch.Generator().manual_seed(count)).to(dtype)
        expected = x.double() @ weight.dequantize().double().T + bias.double()
        if activation:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(packed(x).double(), expected, atol=0.06, rtol=0.03)


@pytest.mark.parametrize(("name", "device", "dtype"), NATIVE)
def test_argmax_is_that_of_the_product(name: str, device: str, dtype: torch.dtype) -> None:
    weight = make_weight("Q6_K", 1000, 256)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(weight, dtype=dtype)
    x = torch.randn((70, 256), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[4, 7] = torch.nan
    for count in (1, 9, 70):
        best = packed.argmax(x[:count])
        assert torch.equal(best, ops.argmax(packed(x[:count], torch.float32)))
    assert int(best[4]) == -1 and bool((best[5:] >= 0).all())


@pytest.mark.parametrize(("name", "device", "dtype"), NATIVE)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_plain_weights_in_four_bits(
    name: str, device: str, dtype: torch.dtype, activation: str | None
) -> None:
    """w4a8: the product of `group_weight`, in half a byte and a share of a scale per weight."""
    plain = (torch.randn((2080, 544), generator=torch.Generator().manual_seed(0)) / 24).to(dtype)
    plain[::2] *= 1e-8  # whose scales float16 would not have
    weight = group_weight(plain)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(plain, activation=activation, quantization="w4a8")
        expected = ops.pack_linear(weight, activation=activation, dtype=dtype)
        num_bytes = ops.packed_bytes(plain, device_type=device, activation=activation, quantization="w4a8")
    assert packed.nbytes == num_bytes == 2080 * 544 * 4.5 / 8
    x = torch.randn((18, 544), generator=torch.Generator().manual_seed(1)).to(dtype)
    for count in (1, 18):
        assert torch.equal(packed(x[:count], torch.float32), expected(x[:count], torch.float32))
    if activation is None:
        assert torch.equal(packed(x, torch.float32), product_of(x, weight))
        exact = x.double() @ plain.double().T
        error = packed(x, torch.float32) - exact
        for rows in (slice(0, None, 2), slice(1, None, 2)):
            assert error[:, rows].norm() < 0.1 * exact[:, rows].norm()


def test_four_bits_are_those_of_int4_but_for_the_scales_rounding() -> None:
    plain = torch.randn((64, 512), generator=torch.Generator().manual_seed(0))
    plain[0], plain[1] = 0, 1e-12
    plain[2, 40], plain[3, 50] = torch.nan, torch.inf
    weight = group_weight(plain)
    assert weight.scales.dtype == torch.bfloat16 and weight.dequantize()[4:].isfinite().all()
    means, int4 = (
        one[4:] - plain[4:]
        for one in (weight.dequantize(), dequantize_weight(*quantize_weight(plain, "int4")))
    )
    assert means.norm() < 1.005 * int4.norm()
    assert not weight.dequantize()[0].any()
    torch.testing.assert_close(weight.dequantize()[1], plain[1], rtol=0.01, atol=0)
    assert weight.dequantize()[2, 40].isnan() and not weight.dequantize()[3, 50].isfinite()
    assert weight.dequantize()[2:4, :32].isfinite().all()


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("kind", FILE_BITS)
def test_memory_is_that_of_the_file(isa: str, kind: str) -> None:
    weight = make_weight(kind, 64, 512)
    with forced("grouped_linear", isa):
        packed = ops.pack_linear(weight, dtype=torch.float32)
        expected = ops.packed_bytes(weight, device_type="cpu", dtype=torch.float32)
    assert packed.nbytes <= 1.04 * FILE_BITS[kind] / 8 * 64 * 512
    assert packed.nbytes == expected


def test_parts_of_different_kinds_are_one_layer() -> None:
    weights = [make_weight(kind, rows, 512) for kind, rows in (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 32))]
    parts = [ops.pack_linear(weight, dtype=torch.float32) for weight in weights]
    joined, x = JoinedLinear(parts), torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    assert joined.out_features == 128 and joined.nbytes == sum(part.nbytes for part in parts)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], 1))
