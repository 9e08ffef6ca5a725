"""Stored formats of quantised weights, word by word."""

from __future__ import annotations

import pytest
import torch

from quire.loader.quantized.formats import GPTQ
from tests.fixtures.foreign_checkpoints import pack_bits


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_gptq_zero_of_all_ones_is_zero(bits: int) -> None:
    """Files hold zeros less 1, so that 0 is stored as all ones; read as 2**bits, each weight was wrong."""
    most, size = (1 << bits) - 1, 32
    codes = torch.randint(0, most + 1, (size, size), generator=torch.Generator().manual_seed(bits))
    zeros = torch.arange(size) % (most + 1)  # 0 among them
    tensors = {
        "qweight": pack_bits(codes, bits).T,
        "qzeros": pack_bits((zeros - 1)[None] & most, bits),
        "scales": torch.ones(1, size),
        "g_idx": torch.zeros(size, dtype=torch.int32),
    }
    decoded = GPTQ(bits, None, zero_offset=1).decode(tensors)
    assert torch.equal(decoded.dequantize(), (codes - zeros[:, None]).float())
