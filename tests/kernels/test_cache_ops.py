"""write_kv and copy_blocks against loops."""

from __future__ import annotations

import pytest
import torch

from quire_kernels import ops
from tests.kernels.common import every_implementation, forced


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


@pytest.mark.parametrize(("name", "device"), every_implementation("copy_blocks"))
def test_copy_blocks(name: str, device: str) -> None:
    cache = torch.randn(8, 2, 2, 1, 4, 16, device=device)
    expected = cache.clone()
    expected[5], expected[0] = cache[2], cache[7]
    with forced("copy_blocks", name):
        ops.copy_blocks(cache, torch.tensor([2, 7], device=device), torch.tensor([5, 0], device=device))
    assert torch.equal(cache, expected)
