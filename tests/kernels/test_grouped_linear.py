"""Linear layers of group-quantised weights, on every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire_kernels import ops
from quire_kernels.grouped_weights import FACTOR_GROUP, GroupedWeight
from quire_kernels.weights import JoinedLinear
from tests.kernels.common import every_implementation, forced

DTYPES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = every_implementation("grouped_linear", DTYPES)
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SIXES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
KINDS: dict[str, dict[str, Any]] = {
    "Q4_0": {"bits": 4, "group": 32, "zero": 8},
    "Q4_1": {"bits": 4, "group": 32, "minimums": True},
    "Q5_0": {"bits": 5, "group": 32, "zero": 16},
    "Q5_1": {"bits": 5, "group": 32, "minimums": True},
    "Q8_0": {"bits": 8, "group": 32, "zero": 128},
    "Q2_K": {"bits": 2, "group": 16, "scales": torch.int8, "minimums": True},
    "Q3_K": {"bits": 3, "group": 16, "scales": torch.int8, "zero": 4},
    "Q4_K": {"bits": 4, "group": 32, "scales": torch.int8, "minimums": True},
    "Q5_K": {"bits": 5, "group": 32, "scales": torch.int8, "minimums": True},
    "Q6_K": {"bits": 6, "group": 16, "scales": torch.int8, "zero": 32},
    "IQ4_NL": {"bits": 4, "group": 32, "table": TABLE},
    "NVFP4": {"bits": 4, "group": 16, "table": SIXES, "scales": torch.float32, "row_scales": True},
    "AWQ": {"bits": 4, "group": 128, "zero": 8, "minimums": True},
    "GPTQ8": {"bits": 8, "group": 64, "zero": 128, "scales": torch.bfloat16, "row_scales": True},
}
"""What files have; `scales` is a type."""


def make_weight(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> GroupedWeight:
    """A weight of a kind whose numbers are about 1 / sqrt(num_columns)."""
    generator = torch.Generator().manual_seed(seed)
    facts = {"zero": 0, "table": None, "scales": torch.float16, "minimums": False, "row_scales": False}
    facts |= KINDS[kind]
    bits, group, scale_type = facts["bits"], facts["group"], facts["scales"]
    largest = 128 if facts["table"] is TABLE else 12 if facts["table"] else 2 ** (bits - 1)
    size = 1.7 / largest / num_columns**0.5

    def draw(shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * (high - low) + low

    groups = (num_rows, num_columns // group)
    factors = (num_rows, num_columns // FACTOR_GROUP)
    is_integer = scale_type == torch.int8
    lowest = 0 if facts["minimums"] and is_integer else -60
    scales = draw(groups, lowest, 64) if is_integer else draw(groups, 0.5, 1.5) * size
    minimums = draw(groups, 0, 64) if is_integer else draw(groups, -0.5, 1.0) * size * 2 ** (bits - 1)
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (num_rows, num_columns), generator=generator).to(torch.uint8),
        scales=scales.to(scale_type),
        bits=bits,
        group=group,
        zero=facts["zero"],
        table=facts["table"],
        minimums=minimums.to(scale_type) if facts["minimums"] else None,
        factors=(draw(factors, 0.5, 1.5) * size / 32).half() if is_integer else None,
        minimum_factors=(draw(factors, 0.5, 1.5) * size * 2 ** (bits - 1) / 32).half()
        if is_integer and facts["minimums"]
        else None,
        row_scales=draw((num_rows,), 0.5, 1.5) if facts["row_scales"] else None,
    )


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_the_weights_mean(name: str, device: str, dtype: torch.dtype, kind: str) -> None:
    weight = make_weight(kind, 100, 512)
    with forced("grouped_linear", name):
        packed = ops.pack_linear(weight, dtype=dtype)
    indices = torch.tensor([0, 99, 31, 32, 33, 5, 5])
    assert torch.equal(packed.rows(indices), weight.dequantize().to(dtype)[indices])


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_is_x_times_what_the_weights_mean(
    name: str, device: str, dtype: torch.dtype, kind: str, activation: str | None
) -> None:
    """But for the rounding of x to eight bits."""
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


def test_parts_of_different_kinds_are_one_layer() -> None:
    weights = [make_weight(kind, rows, 512) for kind, rows in (("Q4_K", 64), ("Q4_K", 32), ("Q6_K", 32))]
    parts = [ops.pack_linear(weight, dtype=torch.float32) for weight in weights]
    joined, x = JoinedLinear(parts), torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    assert joined.out_features == 128 and joined.nbytes == sum(part.nbytes for part in parts)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], 1))
