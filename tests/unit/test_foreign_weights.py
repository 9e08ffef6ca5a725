"""Weights as others quantised them mean what the format's own library says, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from quire.loader.quantized.formats import AWQ, GPTQ, PackedIntegers, WholeIntegers, bnb_state
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.weights import QuantizedRows
from tests.fixtures.foreign_weights import COLUMNS, DIGESTS, ROWS, Case, Draw, cases, digest, pack_bits

CASES, SAID = cases(), json.loads(DIGESTS.read_text())


def placed(case: Case) -> dict[str, torch.Tensor]:
    """The stored tensors in their slots, as the loader puts them there."""
    num_rows = len(case.tensors["weight"]) if case.tensors.get("weight_scale_inv") is not None else ROWS
    found = {}
    for slot in case.format.slots(num_rows, COLUMNS):
        name = "weight_scale_inv" if slot.suffix not in case.tensors else slot.suffix
        tensor = case.tensors[name]
        if slot.dtype == torch.float64:
            tensor = bnb_state(tensor)
        assert tensor.dtype == slot.dtype or (slot.dtype == torch.float32 and tensor.is_floating_point())
        found[slot.suffix] = tensor.reshape(slot.shape).to(slot.dtype)
    return found


@pytest.mark.row("D13", clauses=("exact",))
@pytest.mark.row("D16", clauses=("parity",))
@pytest.mark.row("D17", clauses=("parity",))
@pytest.mark.parametrize("name", SAID)
def test_weights_equal_those_of_the_formats_library(name: str) -> None:
    decoded = CASES[name].format.decode(placed(CASES[name]))
    dtype, _ = SAID[name].split()
    assert digest(decoded.dequantize().to(getattr(torch, dtype))) == SAID[name]


def test_every_case_has_been_asked() -> None:
    assert CASES.keys() == SAID.keys()


@pytest.mark.row("D13")
def test_inputs_of_a_group_are_put_beside_each_other() -> None:
    """So that the product has groups as it wants them; what is computed with is still the file's codes."""
    case = CASES["gptq 4 bits, groups of 32, act-order"]
    decoded = case.format.decode(placed(case))
    assert isinstance(decoded.matrix, GroupedWeight) and decoded.matrix.group == 32
    assert decoded.order is not None
    g_idx = case.tensors["g_idx"][decoded.order]
    assert torch.equal(g_idx, torch.arange(COLUMNS).int() // 32)


def test_scales_are_kept_in_sixteen_bits_where_no_bit_is_lost() -> None:
    for name, dtype in (
        ("gptq symmetric", torch.float16),
        ("mxfp4", torch.bfloat16),
        ("awq gemm, groups of 32", torch.float32),
    ):
        matrix = CASES[name].format.decode(placed(CASES[name])).matrix
        assert isinstance(matrix, GroupedWeight) and matrix.scales.dtype == dtype
        assert (matrix.minimums is None) == (dtype != torch.float32)


def test_compressed_tensors_order_of_inputs() -> None:
    """Which the library has read until 2026, and reads no more."""
    draw = Draw("order")
    codes, scales, g_idx = draw.bytes(ROWS, COLUMNS) & 15, draw.scales(ROWS, 8), draw.order(32)
    tensors = {
        "weight_packed": pack_bits(codes, 4),
        "weight_scale": scales.float(),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
        "weight_g_idx": g_idx,
    }
    decoded = PackedIntegers(4, 32, True, True).decode(tensors)
    assert torch.equal(decoded.dequantize(), (codes.int() - 8) * scales.float()[:, g_idx.long()])


@pytest.mark.parametrize("columns", [40, 48, 96])
def test_sizes_that_no_group_divides(columns: int) -> None:
    """They become numbers, and the last group may be smaller: GPTQ's is."""
    draw = Draw(f"odd {columns}")
    codes, g_idx = draw.bytes(ROWS, columns) & 15, torch.arange(columns).int() // 64
    groups = -(-columns // 64)
    scales, zeros = draw.scales(groups, ROWS).float(), torch.full((groups, ROWS), 7)
    tensors = {
        "qweight": pack_bits(codes, 4).T,
        "qzeros": pack_bits(zeros, 4),
        "scales": scales,
        "g_idx": g_idx,
    }
    decoded = GPTQ(4, 64, 1).decode(tensors)
    assert torch.equal(decoded.dequantize(), (codes.int() - 8) * scales.T[:, g_idx.long()])


@pytest.mark.parametrize(
    ("form", "size", "says"),
    [
        (AWQ(128), (64, 192), "in_features 192 is no multiple of 128"),
        (AWQ(None), (60, 64), "out_features 60 is no multiple of 8"),
        (GPTQ(3, None, 1), (32, 40), "in_features * bits 120 is no multiple of 32"),
    ],
)
def test_sizes_that_a_format_does_not_have(form: AWQ | GPTQ, size: tuple[int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("*", r"\*")):
        list(form.slots(*size))


def test_numbers_that_contradict_each_other() -> None:
    tensors = {"weight": torch.full((8, 64), 9, dtype=torch.int8), "weight_scale": torch.ones(8, 2)}
    with pytest.raises(ValueError, match="numbers of more than 4 bits"):
        WholeIntegers(4, (True, 32), True).decode(tensors)
    packed = torch.zeros(8, 8, dtype=torch.int32)
    tensors = {
        "weight_packed": packed,
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 96]),
    }
    with pytest.raises(ValueError, match=r"weight_shape \[8, 96\] is not that of weight_packed"):
        PackedIntegers(4, 32, True, False).decode(tensors)


def test_eight_bits_stay_what_they_were() -> None:
    case = CASES["int8 per channel"]
    matrix = case.format.decode(placed(case)).matrix
    assert isinstance(matrix, QuantizedRows) and matrix.quantization == "w8a8"
    assert torch.equal(matrix.codes, case.tensors["weight"])
