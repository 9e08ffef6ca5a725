"""Low-rank adapters of a batch, each row its own, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quire_kernels import ops
from tests.kernels.common import every_implementation, forced, is_interpreted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = every_implementation("add_lora", DTYPES, rank=16)
# torch's matrix product differs with the number of rows.
INVARIANT = [one for one in IMPLEMENTATIONS if one.values[0] != "reference"]
UNUSED = 2
"""A slot that no row names; its weights are NaN."""


@dataclass
class Case:
    """Operands of `add_lora`."""

    y: torch.Tensor
    x: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    slots: torch.Tensor

    def run(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """What becomes of some rows of y, which themselves stay."""
        y = self.y[rows].clone()
        ops.add_lora(y, self.x[rows], self.a, self.b, self.slots[rows])
        return y

    def expected(self) -> torch.Tensor:
        """float64 on the CPU."""
        y, x, a, b = (each.double().cpu() for each in (self.y, self.x, self.a, self.b))
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                y[row] += b[slot] @ (a[slot] @ x[row])
        return y


def make_case(
    num_tokens: int,
    in_features: int,
    out_features: int,
    rank: int,
    dtype: torch.dtype,
    device: str,
    *,
    slots: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """Adapters of all ranks up to `rank`, one slot unused; rows of any slot, or none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    num_slots = 4
    a, b = draw(num_slots, rank, in_features) / in_features**0.5, draw(num_slots, out_features, rank)
    for slot, own in enumerate((rank, max(1, rank // 2), rank, 1)):
        a[slot, own:], b[slot, :, own:] = 0.0, 0.0
    a[UNUSED], b[UNUSED] = torch.nan, torch.nan
    if slots is None:
        slots = [-1, 0, 1, 3]
        slots = [slots[i] for i in torch.randint(4, (num_tokens,), generator=generator).tolist()]
    x, y = draw(num_tokens, in_features), draw(num_tokens, out_features)
    tensors = [each.to(device, dtype) for each in (y, x, a, b)]
    return Case(*tensors, torch.tensor(slots, dtype=torch.int32, device=device))


SHAPES = [
    # tokens, in_features, out_features, max_rank
    (1, 64, 96, 16),
    (5, 100, 70, 8),
    (33, 33, 31, 1),
    (16, 1088, 200, 64),
    (70, 257, 1030, 5),
    (40, 7, 3, 37),
    (300, 96, 160, 16),
]
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.row("E19")
@pytest.mark.row("D4", clauses=("linear",))
@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_each_row_gets_its_own_adapters_product(name: str, device: str, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(SHAPES[:-1] if is_interpreted(name, device) else SHAPES):
        case = make_case(*shape, dtype, device, seed=seed)
        with forced("add_lora", name):
            out = case.run()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            out.double().cpu(), case.expected(), atol=4 * tolerance, rtol=tolerance, msg=str(shape)
        )
        bare = case.slots < 0
        assert torch.equal(out[bare], case.y[bare])


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_rows_without_an_adapter_stay_bit_for_bit(name: str, device: str, dtype: torch.dtype) -> None:
    """NaN of any bits, and minus zero; also where no row has an adapter, and where there is no row."""
    case = make_case(6, 64, 96, 16, dtype, device, slots=[-1, 0, -1, 1, -1, -1])
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    case.y[0], case.y[2], case.y[4] = -0.0, torch.inf, torch.nan
    case.y.view(bits)[5] = -3
    with forced("add_lora", name):
        out, none = case.run(), case.run(case.slots < 0)
        assert case.run(slice(0, 0)).shape == (0, 96)
    bare = case.slots < 0
    assert torch.equal(out.view(bits)[bare], case.y.view(bits)[bare])
    assert torch.equal(none.view(bits), case.y.view(bits)[bare])
    assert not torch.equal(out[~bare], case.y[~bare])


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_columns_of_wider_matrices(name: str, device: str, dtype: torch.dtype) -> None:
    """y as a part of a fused layer's output; x and weights apart from each other. The rest stays."""
    case = make_case(9, 64, 96, 16, dtype, device)
    wide = torch.full((9, 300), 7.0, dtype=dtype, device=device)
    wide[:, 101:197] = case.y
    apart = torch.cat((case.x, case.x), 1)[:, 64:]
    a, b = torch.stack((case.a, case.a), 1)[:, 1], torch.stack((case.b, case.b), 1)[:, 1]
    with forced("add_lora", name):
        ops.add_lora(wide[:, 101:197], apart, a, b, case.slots)
        assert torch.equal(wide[:, 101:197], case.run())
    assert bool((wide[:, :101] == 7).all()) and bool((wide[:, 197:] == 7).all())


@pytest.mark.row("E19")
@pytest.mark.parametrize(("name", "device", "dtype"), INVARIANT)
def test_a_row_does_not_depend_on_the_batch(name: str, device: str, dtype: torch.dtype) -> None:
    """Alone, beside rows of the same and of other adapters, and in a prompt's chunk, to the last bit."""
    num_tokens = 48 if is_interpreted(name, device) else 333
    slots = [0, 3, -1, 1, 1] * 9 + [1] * (num_tokens - 45)
    case = make_case(num_tokens, 416, 200, 24, dtype, device, slots=slots)
    with forced("add_lora", name):
        together = case.run()
        for first, stop in ((0, 1), (1, 2), (3, 5), (0, 17), (5, 40), (num_tokens - 1, num_tokens), (13, 47)):
            assert torch.equal(case.run(slice(first, stop)), together[first:stop]), (first, stop)
        order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).to(device)
        assert torch.equal(case.run(order), together[order])
