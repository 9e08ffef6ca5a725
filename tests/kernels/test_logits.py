"""Log-probabilities of a few tokens and grammars' masks, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels import ops
from tests.fixtures.properties import settings
from tests.kernels.common import every_implementation, forced

TOP = every_implementation("top_logprobs", [torch.float32])
FORBID = every_implementation("forbid_others", [torch.float32])
SIZES = (1, 7, 16, 33, 1023, 1024, 1025, 3000, 5003)
"""Vocabularies of parts of a vector, of a word of a mask and of a piece."""


def rows_of(seed: int, n: int, size: int, kind: str) -> torch.Tensor:
    """Logits [n, size]: of a model, with many ties, or with many at -inf; no row has nothing else."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, generator=generator) * 10
    if kind == "ties":
        x = (x / 5).round()
    if kind == "infinite":
        x[torch.rand(n, size, generator=generator) < 0.9] = -torch.inf
        # Also in the last piece alone, and far from zero.
        x[:, -1] = -3000.0
    return x


@pytest.mark.parametrize(("name", "device", "dtype"), TOP)
@pytest.mark.parametrize("kind", ["model", "ties", "infinite"])
@settings(max_examples=20)
@given(size=st.sampled_from(SIZES), n=st.integers(1, 5), count=st.integers(0, 20), seed=st.integers(0, 2**31))
def test_top_logprobs_are_those_of_a_log_softmax(
    name: str, device: str, dtype: torch.dtype, kind: str, size: int, n: int, count: int, seed: int
) -> None:
    x = rows_of(seed, n, size, kind)
    asked = torch.randint(-1, size, (n,), generator=torch.Generator().manual_seed(seed))
    before = x.clone()
    with forced("top_logprobs", name):
        ids, logprobs, ranks = (
            found.cpu() for found in ops.top_logprobs(x.to(device), asked.to(device), count)
        )
    assert torch.equal(x, before)
    most = min(count, size)
    assert ids.shape == logprobs.shape == (n, most + 1) and ids.dtype == ranks.dtype == torch.int64
    assert ids[:, 0].tolist() == asked.clamp(min=0).tolist()
    chosen = x.gather(1, ids[:, :1])
    assert ranks.tolist() == ((x > chosen).sum(1) + 1).tolist()
    exact = torch.log_softmax(x.double(), dim=1)
    # float32 of logits up to some 50, and of -3000.
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), atol=1e-5, rtol=3e-7)
    # By value descending, then by index.
    order = np.lexsort((np.tile(np.arange(size), (n, 1)), -x.numpy()))[:, :most]
    assert torch.equal(x.gather(1, ids[:, 1:]), x.gather(1, torch.from_numpy(order)))
    if name == "reference":
        assert all(len(set(row)) == most for row in ids[:, 1:].tolist())
    else:
        assert ids[:, 1:].tolist() == order.tolist()


@pytest.mark.parametrize(("name", "device", "dtype"), [one for one in TOP if one.values[0] != "reference"])
def test_a_row_does_not_depend_on_the_batch_nor_on_how_much_is_asked(
    name: str, device: str, dtype: torch.dtype
) -> None:
    x = rows_of(0, 16, 5003, "model").to(device)
    asked = torch.arange(16, device=device)
    with forced("top_logprobs", name):
        together = ops.top_logprobs(x, asked, 20)
        for row in range(16):
            for count in (0, 5, 20):
                alone = ops.top_logprobs(x[row : row + 1], asked[row : row + 1], count)
                for found, expected in zip(alone[:2], together[:2], strict=True):
                    assert torch.equal(found, expected[row : row + 1, : count + 1])
                assert alone[2].tolist() == [int(together[2][row])]
        # Columns of a wider matrix.
        wide = torch.cat([x, x], dim=1)[:, 5003:]
        assert all(map(torch.equal, ops.top_logprobs(wide, asked, 20), together))


@pytest.mark.parametrize(("name", "device", "dtype"), TOP)
def test_what_is_not_finite_gives_nan_and_ids_that_exist(name: str, device: str, dtype: torch.dtype) -> None:
    x = rows_of(0, 4, 2050, "model")
    x[0, 2049], x[1, 3], x[2, 1500] = torch.nan, torch.nan, torch.inf
    x[3] = -torch.inf
    with forced("top_logprobs", name):
        ids, logprobs, _ = ops.top_logprobs(x.to(device), torch.tensor([5, -1, 5, 5], device=device), 4)
    assert bool(logprobs[:, 0].isnan()[[0, 1, 3]].all()) and not bool(logprobs[2, 0].isfinite())
    assert int(ids.min()) >= 0 and int(ids.max()) < 2050


@pytest.mark.parametrize(("name", "device", "dtype"), FORBID)
@settings(max_examples=20)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**31), share=st.sampled_from([0, 0.01, 0.5, 1]))
def test_what_a_mask_does_not_allow_is_at_minus_infinity(
    name: str, device: str, dtype: torch.dtype, size: int, seed: int, share: float
) -> None:
    x = rows_of(seed, 3, size, "model")
    allowed = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) < share
    allowed[1, : size // 2] = True  # whole words, too
    # Bits behind the vocabulary mean nothing.
    padded = np.ones((3, -(-size // 32) * 32), dtype=np.bool_)
    padded[:, :size] = allowed.numpy()
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    wide = torch.full((3, size + 5), 7.0)
    wide[:, :size] = x
    wide = wide.to(device)
    with forced("forbid_others", name):
        ops.forbid_others(wide[:, :size], words.to(device))
    assert torch.equal(wide[:, :size].cpu(), x.masked_fill(~allowed, -torch.inf))
    assert bool((wide[:, size:] == 7).all())
