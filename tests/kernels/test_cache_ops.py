"""write_kv and copy_blocks against loops."""

from __future__ import annotations

import pytest
import torch

from quire_kernels import ops
from tests.kernels.common import POISON, dequantized, every_implementation, forced, quantized_pool


@pytest.mark.parametrize(("name", "device"), every_implementation("write_kv"))
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_fills_the_slots_and_nothing_else(
    name: str, device: str, block_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(block_size)
    cache = torch.randn(9, 2, 2, 3, block_size, 16, generator=generator).to(device, dtype)
    expected = cache.clone()
    count = min(7 * block_size, 31)
    slots = torch.randperm(9 * block_size, generator=generator)[:count].to(device)
    # Keys and values come as slices of one projection's output: not contiguous.
    heads = torch.randn(count, 8, 16, generator=generator).to(device, dtype)
    key, value = heads[:, 2:5], heads[:, 5:]
    with forced("write_kv", name):
        ops.write_kv(key, value, cache[:, 1], slots)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, 1, 0, :, slot % block_size] = key[token]
        expected[slot // block_size, 1, 1, :, slot % block_size] = value[token]
    assert torch.equal(cache, expected)


QUANTIZED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of each type."""


def bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest error of each number of x [..., size] once it is stored: half a step at its magnitude.

    A step of int8 is the scale, max|x| / 127 up to its rounding to 8 bits. e4m3 has 3 bits of mantissa, and
    steps of 2 ** -9 times the scale near zero.
    """
    scale = x.abs().amax(-1, keepdim=True) / QUANTIZED[dtype] * (1 + 2**-8)
    if dtype == torch.int8:
        return scale.expand_as(x) / 2
    return torch.maximum(x.abs() * 2**-4, scale * 2**-10)


@pytest.mark.row("C13")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "kv_dtype"),
    every_implementation("write_kv", [torch.float32, torch.bfloat16, torch.float16], list(QUANTIZED)),
)
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_write_kv_quantizes_within_half_a_step(
    name: str, device: str, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(block_size)
    _, layers = quantized_pool(9, 2, 3, block_size, 16, kv_dtype, device)
    count = min(7 * block_size, 31)
    slots = torch.randperm(9 * block_size, generator=generator)[:count].to(device)
    # Token and head decide the magnitude: 1e-4 to 1e4 in one batch, which only a scale for each can follow.
    sizes = 10.0 ** torch.linspace(-4, 4, count * 6)[torch.randperm(count * 6, generator=generator)]
    heads = torch.randn(count, 6, 16, generator=generator) * sizes.view(count, 6, 1)
    heads = heads.clamp(-6e4, 6e4).to(device, dtype)
    key, value = heads[:, :3], heads[:, 3:]
    with forced("write_kv", name):
        ops.write_kv(key, value, layers[1], slots)
    by_slot = dequantized(layers[1]).movedim(3, 1).flatten(0, 1)
    new = torch.stack((key, value), dim=1).double()
    assert bool(((by_slot[slots] - new).abs() <= bound(new, kv_dtype)).all())
    # All else is as it was: the other layer, and every slot that was not written.
    others = torch.ones(9 * block_size, dtype=torch.bool, device=device)
    others[slots] = False
    assert bool((layers[0].data.view(torch.uint8) == POISON).all())
    assert bool((layers[1].data.view(torch.uint8).movedim(3, 1).flatten(0, 1)[others] == POISON).all())
    assert bool(layers[1].scales.movedim(3, 1).flatten(0, 1)[others].isnan().all())


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("write_kv", kv_dtypes=list(QUANTIZED))
)
def test_extreme_numbers_survive_quantization(name: str, device: str, kv_dtype: torch.dtype) -> None:
    """Zeros stay zeros, the range is float32's, and what is not finite is NaN when read: never hidden."""
    rows = torch.tensor([0.0, 1e-44, 1e-30, 1e30, 3e38, float("inf"), float("nan")], device=device)
    key = rows.view(-1, 1, 1) * torch.linspace(-1, 1, 16, device=device)
    _, (layer,) = quantized_pool(1, 1, 1, 8, 16, kv_dtype, device)
    with forced("write_kv", name):
        ops.write_kv(key, key, layer, torch.arange(7, device=device))
    stored = dequantized(layer)[0, 0, 0, :7]
    assert bool((stored[0] == 0.0).all())
    assert float(stored[1].abs().max()) < 1e-36
    for row in (2, 3, 4):
        peak = float(stored[row].max())
        assert abs(peak / float(rows[row]) - 1) < 2**-8, (
            "the largest number saturates at most by its scale's rounding"
        )
    assert bool(stored[5:].isnan().any(-1).all())
    # By the scale: attention reads the NaN of e4m3 as a number.
    assert not bool(layer.data[0, 0, 0, :7].float().isnan().any())


@pytest.mark.parametrize(("name", "device"), every_implementation("write_kv"))
def test_rounding_is_to_nearest_even(name: str, device: str) -> None:
    """With a scale of exactly 1 the numbers are integers and halves themselves."""
    key = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] * 2, device=device).view(1, 1, 16)
    _, (layer,) = quantized_pool(1, 1, 1, 1, 16, torch.int8, device)
    with forced("write_kv", name):
        ops.write_kv(key, -key, layer, torch.zeros(1, dtype=torch.int64, device=device))
    assert layer.data[0, 0, 0, 0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126] * 2
    assert layer.data[0, 1, 0, 0].tolist() == [-127, 0, -2, -2, 0, 2, 2, -126] * 2


@pytest.mark.parametrize(("name", "device"), every_implementation("copy_blocks"))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_copy_blocks_reads_all_sources_first(name: str, device: str, dtype: torch.dtype) -> None:
    """A chain 2 -> 5 -> 0 moves both, and 3 and 4 change places."""
    cache = torch.randint(0, 256, (8, 48), device=device).to(dtype)
    expected = cache.clone()
    expected[5], expected[0], expected[3], expected[4] = cache[2], cache[5], cache[4], cache[3]
    with forced("copy_blocks", name):
        source, target = torch.tensor([[2, 5, 4, 3], [5, 0, 3, 4]], device=device)
        ops.copy_blocks(cache, source, target)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("write_kv", kv_dtypes=list(QUANTIZED))
)
def test_what_is_stored_does_not_depend_on_the_tokens_beside_it(
    name: str, device: str, kv_dtype: torch.dtype
) -> None:
    heads = torch.randn(20, 6, 64, generator=torch.Generator().manual_seed(0)).to(device)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:20].to(device)
    together, (layer,) = quantized_pool(4, 1, 3, 8, 64, kv_dtype, device)
    alone, (other,) = quantized_pool(4, 1, 3, 8, 64, kv_dtype, device)
    with forced("write_kv", name):
        ops.write_kv(heads[:, :3], heads[:, 3:], layer, slots)
        for token in reversed(range(20)):
            one = heads[token : token + 1]
            ops.write_kv(one[:, :3], one[:, 3:], other, slots[token : token + 1])
    assert torch.equal(together, alone)
