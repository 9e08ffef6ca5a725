"""paged_attention of every implementation against dense float64 attention that knows nothing of blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.reference import attention as reference
from tests.kernels.common import every_implementation, forced

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
IMPLEMENTATIONS = every_implementation("paged_attention")


@dataclass
class Case:
    """A ragged batch: dense keys and values per sequence, and the same in a paged cache."""

    query: torch.Tensor
    kv_layer: torch.Tensor
    meta: AttentionMetadata
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scale: float

    def run(self, **options: Any) -> torch.Tensor:
        return ops.paged_attention(self.query, self.kv_layer, self.meta, scale=self.scale, **options)


def make_case(
    lengths: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    groups: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A batch of (query_len, seq_len) sequences in the second layer of a three-layer cache.

    What no token owns is NaN: other layers, free blocks, and the rest of each sequence's last block.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    cache = torch.full(
        (len(order), 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device
    )
    kv_layer = cache[:, 1]
    keys, values, tables = [], [], []
    for (_, seq_len), count in zip(lengths, counts, strict=True):
        blocks = [order.pop() for _ in range(count)]
        key, value = draw(seq_len, num_kv_heads, head_dim), draw(seq_len, num_kv_heads, head_dim)
        for position in range(seq_len):
            block, offset = blocks[position // block_size], position % block_size
            kv_layer[block, 0, :, offset] = key[position]
            kv_layer[block, 1, :, offset] = value[position]
        keys.append(key)
        values.append(value)
        tables.append(blocks)
    query_lens, seq_lens = zip(*lengths, strict=True)
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size, device)
    query = draw(sum(query_lens), num_kv_heads * groups, head_dim)
    return Case(query, kv_layer, meta, keys, values, head_dim**-0.5)


def dense(case: Case, sliding_window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    """Attention of each sequence by itself, with the whole score matrix, in float64."""
    results, start = [], 0
    for key, value, query_len in zip(case.keys, case.values, case.meta.query_lens, strict=True):
        query = case.query[start : start + query_len].double()
        start += query_len
        groups = query.shape[1] // key.shape[1]
        wide_key = key.double().repeat_interleave(groups, dim=1)
        wide_value = value.double().repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, wide_key) * case.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows = torch.arange(key.shape[0] - query_len, key.shape[0], device=key.device)[:, None]
        columns = torch.arange(key.shape[0], device=key.device)[None, :]
        seen = columns <= rows
        if sliding_window is not None:
            seen &= columns > rows - sliding_window
        scores = scores.masked_fill(~seen, float("-inf"))
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_value))
    return torch.cat(results)


def check(case: Case, **options: Any) -> None:
    out = case.run(**options)
    assert out.shape == case.query.shape and out.dtype == case.query.dtype
    torch.testing.assert_close(
        out.double(), dense(case, **options), atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype]
    )


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(24))
def test_random_batches_equal_dense_attention(name: str, device: str, seed: int) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 6)):
        seq_len = draw.choice([1, 2, 7, 8, 9, 16, 17, draw.randint(1, 120), draw.randint(1, 500)])
        query_len = draw.choice([1, 1, seq_len, draw.randint(1, seq_len)])
        lengths.append((query_len, seq_len))
    window = draw.choice([None, None, 1, 5, 16, draw.randint(1, 300)])
    softcap = draw.choice([None, None, None, 20.0])
    case = make_case(
        lengths,
        num_kv_heads=draw.choice([1, 2]),
        groups=draw.choice([1, 4, 8]),
        head_dim=draw.choice([16, 64, 128]),
        block_size=draw.choice([8, 16]),
        device=device,
        seed=seed,
    )
    with forced("paged_attention", name):
        check(case, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, device: str, dtype: torch.dtype) -> None:
    case = make_case([(1, 65), (33, 40), (1, 3), (17, 17)], groups=4, head_dim=64, dtype=dtype, device=device)
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=9)


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_longer_than_one_tile_of_queries_and_keys(name: str, device: str) -> None:
    case = make_case([(1100, 1300), (1, 1290), (600, 600)], groups=1, num_kv_heads=1, device=device)
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=700)


@pytest.mark.parametrize("window", [None, 3, 21])
def test_small_tiles_and_small_decode_groups(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Every border between tiles, and between groups of decode rows, within short sequences."""
    monkeypatch.setattr(reference, "KEY_TILE", 16)
    monkeypatch.setattr(reference, "QUERY_TILE", 8)
    # Four blocks of 8 tokens, 2 KV heads and 16 dimensions: longer rows are computed in tiles.
    monkeypatch.setattr(reference, "GATHER_BYTES", 4 * 2 * 2 * 8 * 16 * 4)
    lengths = [(1, n) for n in (1, 8, 9, 30, 32, 33, 70)] + [(5, 40), (40, 40), (9, 17), (16, 33)]
    with forced("paged_attention", "reference"):
        check(make_case(lengths), sliding_window=window)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    whole = make_case([(90, 90)], seed=5)
    expected = dense(whole)
    for chunk in (1, 7, 32):
        for start in range(0, 90, chunk):
            stop = min(start + chunk, 90)
            meta = AttentionMetadata.build(
                [stop - start], [stop], [whole.meta.block_table[0].tolist()], block_size=8
            )
            out = ops.paged_attention(whole.query[start:stop], whole.kv_layer, meta, scale=whole.scale)
            torch.testing.assert_close(out.double(), expected[start:stop], atol=2e-5, rtol=2e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation inside returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_scratch_memory_grows_with_the_tile_and_not_with_the_square() -> None:
    case = make_case([(2000, 2000)], num_kv_heads=1, groups=2)
    cache_numel = case.kv_layer.untyped_storage().nbytes() // 4
    with forced("paged_attention", "reference"), LargestTensor() as largest:
        case.run()
    assert largest.numel <= max(2 * reference.QUERY_TILE * reference.KEY_TILE, cache_numel)
    assert largest.numel < 2000 * 2000 / 4


def test_block_size_must_hold_the_context() -> None:
    with pytest.raises(AssertionError):
        AttentionMetadata.build([1], [17], [[0, 1]], block_size=8)


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_blocks_before_the_window_are_not_read(name: str, device: str) -> None:
    """They may have been given to another sequence, whose values may be NaN."""
    case = make_case([(1, 100), (9, 90), (1, 3)], device=device)
    expected = dense(case, sliding_window=20)
    # Positions below 80 and 62 are hidden from all queries; blocks of 8 that end there hold nothing else.
    for row, first_seen in ((0, 80), (1, 62)):
        for index in range(first_seen // 8):
            case.kv_layer[case.meta.block_table[row, index]] = float("nan")
    with forced("paged_attention", name):
        torch.testing.assert_close(case.run(sliding_window=20).double(), expected, atol=2e-5, rtol=2e-5)
