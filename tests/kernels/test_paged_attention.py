"""paged_attention of every implementation against dense float64 attention that knows nothing of blocks."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels import ops, registry
from quire_kernels.metadata import AttentionMetadata, attention_facts
from quire_kernels.quantized_kv import KVLayer
from quire_kernels.reference import attention as reference
from tests.kernels.common import (
    POISON,
    dequantized,
    every_implementation,
    forced,
    is_interpreted,
    quantized_pool,
    with_cases,
)

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KV_DTYPES = [None, torch.int8, torch.float8_e4m3fn]
"""Of the cache; None: that of the query."""


@dataclass
class Case:
    """A ragged batch: dense keys and values per sequence, and the same in a paged cache."""

    query: torch.Tensor
    kv_layer: KVLayer
    pool: torch.Tensor
    """uint8 [num_blocks, bytes of a block]: the memory of `kv_layer` and its neighbours."""
    meta: AttentionMetadata
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scale: float
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of `dense`, by its options: implementations share a case, and it takes longer than they do."""

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
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A batch of (query_len, seq_len) sequences in the second layer of a three-layer cache.

    What no token owns is NaN: other layers, free blocks, and the rest of each sequence's last block. Of a
    quantised cache the dense keys and values are what it holds: attention over it must equal attention over
    them as exactly as without quantisation.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    kv_layer: KVLayer
    if kv_dtype is None:
        shape = (len(order), 3, 2, num_kv_heads, block_size, head_dim)
        cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        pool, kv_layer = cache.flatten(1).view(torch.uint8), cache[:, 1]
    else:
        pool, layers = quantized_pool(len(order), 3, num_kv_heads, block_size, head_dim, kv_dtype, device)
        kv_layer = layers[1]
    keys, values, tables = [], [], []
    for (_, seq_len), count in zip(lengths, counts, strict=True):
        blocks = [order.pop() for _ in range(count)]
        key, value = draw(seq_len, num_kv_heads, head_dim), draw(seq_len, num_kv_heads, head_dim)
        slots = [blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)]
        ops.write_kv(key, value, kv_layer, torch.tensor(slots, device=device))
        stored = dequantized(kv_layer)[blocks].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :seq_len]
        keys.append(stored[0])
        values.append(stored[1])
        tables.append(blocks)
    query_lens, seq_lens = zip(*lengths, strict=True)
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size, device)
    query = draw(sum(query_lens), num_kv_heads * groups, head_dim)
    return Case(query, kv_layer, pool, meta, keys, values, head_dim**-0.5)


def dense(
    case: Case,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    joint: tuple[tuple[int, int], ...] = (),
) -> torch.Tensor:
    """Attention of each sequence by itself, with the whole score matrix, in float64. `joint`: batch rows of
    tokens that see each other."""
    options = str((sliding_window, softcap, sinks, joint))
    if options in case.expected:
        return case.expected[options]
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
        offset = start - key.shape[0]  # of batch rows to positions
        for begin, end in joint:
            inside = [(one >= begin - offset) & (one < end - offset) for one in (rows, columns)]
            seen |= inside[0] & inside[1]
        if sliding_window is not None:
            seen &= columns > rows - sliding_window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., : key.shape[0]]
        results.append(torch.einsum("hqk,khd->qhd", weights, wide_value))
    case.expected[options] = torch.cat(results)
    return case.expected[options]


@functools.cache
def same_case(lengths: tuple[tuple[int, int], ...], **options: Any) -> Case:
    """`make_case` once for all implementations, for tests that change nothing of it."""
    return make_case(list(lengths), **options)


def check(case: Case, **options: Any) -> None:
    out = case.run(**options)
    assert out.shape == case.query.shape and out.dtype == case.query.dtype
    torch.testing.assert_close(
        out.double(), dense(case, **options), atol=TOLERANCE[out.dtype], rtol=TOLERANCE[out.dtype]
    )


@pytest.mark.row("D1", clauses=("equal", "variants"))
@pytest.mark.row("D2")
@pytest.mark.parametrize(
    ("name", "device", "kv_dtype", "seed"),
    with_cases(every_implementation("paged_attention", kv_dtypes=KV_DTYPES), range(24), interpreted=6),
)
def test_random_batches_equal_dense_attention(
    name: str, device: str, kv_dtype: torch.dtype | None, seed: int
) -> None:
    draw = random.Random(seed)
    lengths = []
    longest = 130 if is_interpreted(name, device) else 500
    for _ in range(draw.randint(1, 6)):
        seq_len = draw.choice([1, 2, 7, 8, 9, 16, 17, draw.randint(1, 120), draw.randint(1, longest)])
        query_len = draw.choice([1, 1, seq_len, draw.randint(1, seq_len)])
        lengths.append((query_len, seq_len))
    window = draw.choice([None, None, 1, 5, 16, draw.randint(1, 300)])
    softcap = draw.choice([None, None, None, 20.0])
    case = make_case(
        lengths,
        num_kv_heads=draw.choice([1, 2]),
        groups=draw.choice([1, 4, 8]),
        head_dim=draw.choice([16, 64, 128]),
        block_size=draw.choice([1, 8, 16, 32]),
        kv_dtype=kv_dtype,
        device=device,
        seed=seed,
    )
    with forced("paged_attention", name):
        check(case, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("name", "device", "dtype", "kv_dtype"),
    every_implementation("paged_attention", [torch.bfloat16, torch.float16], KV_DTYPES),
)
def test_half_precision(name: str, device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    lengths = ((1, 65), (33, 40), (1, 3), (17, 17))
    case = same_case(lengths, groups=4, head_dim=64, dtype=dtype, kv_dtype=kv_dtype, device=device)
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=9)
        check(case, sliding_window=2**31 - 1)  # position + window overflowed, and the process died


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("paged_attention", kv_dtypes=KV_DTYPES)
)
def test_longer_than_one_tile_of_queries_and_keys(
    name: str, device: str, kv_dtype: torch.dtype | None
) -> None:
    lengths = ((1100, 1300), (1, 1290), (600, 600))
    if is_interpreted(name, device):  # whose tiles are of 64
        lengths = ((260, 330), (1, 1290), (130, 130))
    case = same_case(lengths, groups=1, num_kv_heads=1, kv_dtype=kv_dtype, device=device)
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=700)


@pytest.mark.row("D2", clauses=("equal",))
@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("paged_attention", kv_dtypes=KV_DTYPES)
)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_single_tokens_over_contexts_up_to_4k(
    name: str, device: str, kv_dtype: torch.dtype | None, groups: int
) -> None:
    """At, before and behind the ends of splits and of the quarters that they are read in."""
    lengths = [1, 3, 4, 5, 63, 255, 256, 257, 511, 769, 1023, 2048, 3001, 4095, 4096]
    if is_interpreted(name, device):
        lengths = [1, 63, 64, 65, 129, 769]
    case = same_case(
        tuple((1, length) for length in lengths),
        num_kv_heads=1,
        groups=groups,
        block_size=16,
        kv_dtype=kv_dtype,
        device=device,
    )
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=300)


def share(case: Case, of: int, to: list[int], num_blocks: int) -> None:
    """Sequences `to` begin with the first blocks of sequence `of`, instead of their own."""
    block_size = case.kv_layer.shape[3]
    for row in to:
        case.meta.block_table[row, :num_blocks] = case.meta.block_table[of, :num_blocks]
        for dense_rows in (case.keys, case.values):
            dense_rows[row] = torch.cat(
                (dense_rows[of][: num_blocks * block_size], dense_rows[row][num_blocks * block_size :])
            )


@pytest.mark.row("D2")
@pytest.mark.parametrize(
    ("name", "device", "dtype", "shape"),
    with_cases(
        every_implementation("paged_attention", [torch.bfloat16]),
        # (groups, num_kv_heads, head_dim, block_size)
        [
            (3, 1, 64, 16),
            (3, 2, 64, 32),
            (1, 2, 128, 8),
            (2, 2, 128, 16),
            (3, 4, 96, 16),
            (4, 3, 64, 16),
            (5, 2, 256, 64),
            (16, 2, 128, 16),
            (32, 1, 64, 16),
        ],
        interpreted=1,
    ),
)
def test_contexts_that_begin_with_the_same_blocks(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    """They may be read once for all of them, and no result shows it."""
    if name == "flashinfer":
        pytest.skip("has no heads of 96, and splits contexts by the batch around them")
    groups, num_kv_heads, head_dim, block_size = shape
    lengths = [640, 321, 17, 700, 130, 512, 1, 129, 448, 333, 290, 384, 260, 257, 256, 77, 300]
    new = [1] * 16 + [3]
    case = make_case(
        list(zip(new, lengths, strict=True)),
        num_kv_heads=num_kv_heads,
        groups=groups,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    share(case, 0, [1, 9, 10, 11, 12, 16], 256 // block_size)
    share(case, 3, [5], 448 // block_size)
    share(case, 4, [7], 128 // block_size)
    # Of the same length, and to the last full block.
    share(case, 13, [14], 192 // block_size)
    with forced("paged_attention", name):
        check(case)
        check(case, sliding_window=150)
        check(case, softcap=15.0)
        if name == "reference":
            return
        together = case.run()
        starts = case.meta.query_start_loc.tolist()
        for row, length in enumerate(lengths):
            if is_interpreted(name, device) and row % 4:
                continue  # slow, and the same for each
            meta = AttentionMetadata.build(
                [new[row]], [length], [case.meta.block_table[row].tolist()], block_size, device
            )
            query = case.query[starts[row] : starts[row + 1]]
            alone = ops.paged_attention(query, case.kv_layer, meta, scale=case.scale)
            assert torch.equal(alone, together[starts[row] : starts[row + 1]]), length


@pytest.mark.parametrize(
    ("name", "device", "dtype", "kv_dtype", "head_dim"),
    with_cases(
        every_implementation("paged_attention", [torch.bfloat16, torch.float16], KV_DTYPES),
        [64, 128],
        interpreted=1,
    ),
)
def test_half_precision_in_whole_tiles(
    name: str, device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int
) -> None:
    """Blocks and heads of sizes that matrix units take, several new tokens, windows that begin anywhere."""
    lengths = ((1, 300), (3, 270), (1, 16), (2, 2), (1, 33), (40, 300), (7, 519))
    case = same_case(
        lengths, groups=2, head_dim=head_dim, block_size=16, dtype=dtype, kv_dtype=kv_dtype, device=device
    )
    with forced("paged_attention", name):
        check(case)
        for window in (256,) if is_interpreted(name, device) else (1, 9, 31, 256, 261):
            check(case, sliding_window=window)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 3, 21])
def test_small_tiles_and_small_decode_groups(
    monkeypatch: pytest.MonkeyPatch, window: int | None, kv_dtype: torch.dtype | None
) -> None:
    """Every border between tiles, and between groups of decode rows, within short sequences."""
    monkeypatch.setattr(reference, "KEY_TILE", 16)
    monkeypatch.setattr(reference, "QUERY_TILE", 8)
    # Four blocks of 8 tokens, 2 KV heads and 16 dimensions: longer rows are computed in tiles.
    monkeypatch.setattr(reference, "GATHER_BYTES", 4 * 2 * 2 * 8 * 16 * 4)
    monkeypatch.setattr(reference, "CPU_GROUP_BYTES", 4 * 2 * 2 * 8 * 16 * 4)
    lengths = [(1, n) for n in (1, 8, 9, 30, 32, 33, 70)] + [(5, 40), (40, 40), (9, 17), (16, 33)]
    with forced("paged_attention", "reference"):
        check(make_case(lengths, kv_dtype=kv_dtype), sliding_window=window)


def with_sinks() -> list[Any]:
    """Every implementation that has attention sinks."""
    known = every_implementation(
        "paged_attention", [torch.float32, torch.bfloat16], [None, torch.int8], sinks=True
    )
    assert {one.values[0] for one in known} >= {"reference"}
    return known


@pytest.mark.parametrize(("name", "device", "dtype", "kv_dtype"), with_sinks())
@pytest.mark.parametrize("groups", [1, 8])
def test_sinks_take_their_share_of_the_weights(
    name: str, device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, groups: int
) -> None:
    """Decoding in one split and several, chunks of prompts; sinks below, among and far above the scores."""
    lengths = ((1, 1), (1, 33), (1, 900), (3, 270), (40, 300), (600, 600))
    if is_interpreted(name, device):
        lengths = ((1, 1), (1, 300), (3, 70), (70, 140))
    case = same_case(
        lengths,
        groups=groups,
        head_dim=64,
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
    )
    sinks = torch.linspace(-4.0, 8.0, 2 * groups).to(device)
    with forced("paged_attention", name):
        check(case, sinks=sinks)
        check(case, sinks=sinks, sliding_window=9)
        check(case, sinks=sinks, sliding_window=300, softcap=15.0)
        none = torch.full_like(sinks, -torch.inf)
        torch.testing.assert_close(case.run(sinks=none), case.run())
        # A head whose sink is no number has no result; its neighbours have theirs.
        sinks[1], rest = torch.nan, [0, *range(2, 2 * groups)]
        expected, found = dense(case, sinks=sinks)[:, rest], case.run(sinks=sinks)
        assert found[:, 1].isnan().all()
        torch.testing.assert_close(
            found[:, rest].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


def test_a_kernel_without_sinks_is_refused_by_name() -> None:
    facts = attention_facts(8, 64, 2, 16, torch.bfloat16, None, None, sinks=True)
    able = registry.capabilities("paged_attention", "cuda", torch.bfloat16, **facts)
    assert able["reference"] is None
    assert registry.pick("paged_attention", "cuda", torch.bfloat16, **facts).name == "reference"
    assert able["flashinfer"] == "no attention sinks"
    assert all(able[name] is not None for name in ("cuda", "triton"))


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


@pytest.mark.parametrize(
    "lengths", [[(1, 20), (1, 16), (1, 17), (1, 3)], [(40, 40), (1, 33), (9, 24), (3, 17), (5, 5)]]
)
def test_chunks_are_sequences_of_their_own(lengths: list[tuple[int, int]]) -> None:
    """Of 16 positions, in blocks of 8: tokens one by one, as may be recorded, and many; whether attention
    is computed at once or between recorded pieces."""
    case, kept = make_case(lengths, seed=6), []

    def interrupt(query: torch.Tensor, attend: Any) -> torch.Tensor:
        kept.append(attend)
        return query

    chunked = case.meta.chunked(16, 8)
    out = ops.paged_attention(case.query, case.kv_layer, chunked, scale=case.scale)
    assert case.meta.chunked(16, 8) is chunked and case.meta.chunked(48, 8) is case.meta
    later = replace(case.meta, interrupt=interrupt, plans={}).chunked(16, 8)
    ops.paged_attention(case.query, case.kv_layer, later, scale=case.scale)
    assert torch.equal(kept[0](case.query, case.meta), out)
    row = 0
    for sequence, (query_len, seq_len) in enumerate(lengths):
        for position in range(seq_len - query_len, seq_len):
            begin = position // 16 * 16
            keys, values = (one[sequence][begin : position + 1] for one in (case.keys, case.values))
            query = case.query[row].double()
            scores = torch.einsum("gkd,skd->gks", query.view(2, 2, -1).transpose(0, 1), keys.double())
            weights = (scores * case.scale).softmax(-1)
            expected = torch.einsum("gks,skd->gkd", weights, values.double()).transpose(0, 1).flatten(0, 1)
            torch.testing.assert_close(out[row].double(), expected, atol=2e-5, rtol=2e-5)
            row += 1


@pytest.mark.parametrize(
    ("name", "device", "dtype", "kv_dtype"),
    every_implementation(
        "paged_attention", (torch.float32, torch.bfloat16), kv_dtypes=(None, torch.int8), joint=True
    ),
)
@pytest.mark.parametrize("window", [None, 5, 40])
def test_tokens_of_a_span_see_each_other(
    name: str, device: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None
) -> None:
    """Spans at the beginning, in the middle and at the end of new tokens, one short, one longer than a tile;
    beside sequences without. What is in no span has the bits of a batch without spans."""
    lengths, spans = ((30, 90), (1, 7), (70, 70), (600, 640)), ((0, 10), (12, 15), (60, 101), (103, 690))
    case = same_case(lengths, dtype=dtype, kv_dtype=kv_dtype, device=device)
    with forced("paged_attention", name):
        causal = case.run(sliding_window=window)
        meta = case.meta.with_joint(spans)
        out = ops.paged_attention(case.query, case.kv_layer, meta, scale=case.scale, sliding_window=window)
        plain = ops.paged_attention(
            case.query, case.kv_layer, meta.causal(), scale=case.scale, sliding_window=window
        )
    expected = dense(case, window, joint=spans)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    inside = torch.zeros(len(out), dtype=torch.bool)
    for begin, end in spans:
        inside[begin:end] = True
    if name == "reference":
        torch.testing.assert_close(plain, causal, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    else:
        assert torch.equal(out[~inside], causal[~inside]) and torch.equal(plain, causal)


def test_kv_groups_share_plans_and_not_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four groups of one batch, each with its own blocks, two of them with a window: two plans are made."""
    made = []
    make_plan = reference._make_plan

    def counted(*args: Any) -> Any:
        made.append(args[-1])
        return make_plan(*args)

    monkeypatch.setattr(reference, "_make_plan", counted)
    lengths = [(1, 40), (5, 23), (1, 3), (30, 30), (1, 90)]
    cases = [make_case(lengths, seed=seed) for seed in range(4)]
    metas = [cases[0].meta]
    metas += [metas[0].with_blocks(case.meta.block_table, case.meta.slot_mapping) for case in cases[1:]]
    with forced("paged_attention", "reference"):
        for window in (None, 12):
            for case, meta in zip(cases, metas, strict=True):
                check(Case(**{**vars(case), "meta": meta}), sliding_window=window)
    assert made == [None, 12]


def test_a_shared_plan_fits_tables_of_any_width() -> None:
    """Also one whose rows lie apart in memory."""
    lengths = [(1, 40), (1, 9), (6, 17)]
    first, second = make_case(lengths, seed=1), make_case(lengths, seed=2)
    wide = torch.nn.functional.pad(second.meta.block_table, (0, 3))[:, :-1]
    second.meta = first.meta.with_blocks(wide, second.meta.slot_mapping)
    with forced("paged_attention", "reference"):
        check(first)
        check(second)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation inside makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            memory = result.untyped_storage().data_ptr()
            given = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if all(arg.untyped_storage().data_ptr() != memory for arg in given):  # not a view
                self.numel = max(self.numel, result.numel())
        return result


_PEAKS = """
import os, sys

import torch

from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from tests.kernels.common import forced

LENGTH = 8192


def peak():
    words = open("/proc/self/status").read().split()
    return int(words[words.index("VmHWM:") + 1]) * 1024


def scratch(name, dtype):
    blocks = -(-LENGTH // 16)
    cache = torch.zeros(blocks, 2, 1, 16, 64, dtype=dtype)
    query = torch.ones(LENGTH, 2, 64, dtype=dtype)
    result = torch.ones_like(query)  # as much as the result will take
    small = AttentionMetadata.build([64], [64], [list(range(4))], 16)
    meta = AttentionMetadata.build([LENGTH], [LENGTH], [list(range(blocks))], 16)
    with forced("paged_attention", name):
        ops.paged_attention(query[:64], cache, small, scale=0.125)
        before = peak()
        ops.paged_attention(query, cache, meta, scale=0.125)
    return peak() - before - result.nbytes


for name, dtype in (one.split("/") for one in sys.argv[1:]):
    if not (child := os.fork()):  # a peak is that of a process, and an import takes seconds
        print(name, dtype, scratch(name, getattr(torch, dtype)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.row("D1", clauses=("memory",))
def test_scratch_memory_is_that_of_tiles_up_to_8k() -> None:
    """A score matrix of 8192 tokens and two heads would take 512 MiB."""
    # The reference's is covered below, and a GPU's memory is not the process's: Triton's tiles are in its
    # registers, whatever the interpreter makes of them (see test_triton_lang.py).
    names = [
        f"{name}/{str(dtype).removeprefix('torch.')}"
        for name, device, dtype in (
            one.values for one in every_implementation("paged_attention", [torch.float32, torch.bfloat16])
        )
        if name not in ("reference", "triton") and device == "cpu"
    ]
    command = [sys.executable, "-c", _PEAKS, *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    peaks = [line.split() for line in run.stdout.splitlines()]
    assert [f"{name}/{dtype}" for name, dtype, _ in peaks] == names, run.stderr
    for name, dtype, scratch in peaks:
        print(f"{name} {dtype}: {int(scratch) / 2**20:.1f} MiB")
        assert int(scratch) < 8 * 2**20, (name, dtype)


@pytest.mark.row("D1")
def test_scratch_memory_grows_with_the_tile_and_not_with_the_square() -> None:
    case = make_case([(2000, 2000)], num_kv_heads=1, groups=2)
    with forced("paged_attention", "reference"), LargestTensor() as largest:
        case.run()
    assert largest.numel <= 2 * reference.QUERY_TILE * reference.KEY_TILE < 2000 * 2000 / 4


@pytest.mark.row("C13", clauses=("direct",))
@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("paged_attention", kv_dtypes=KV_DTYPES[1:])
)
def test_a_quantized_cache_is_read_directly(name: str, device: str, kv_dtype: torch.dtype) -> None:
    """The keys or values of the blocks that a token sees are the most that any operation makes."""
    case = make_case([(1, 40), (1, 1500)], kv_dtype=kv_dtype, device=device)
    blocks = case.meta.block_table[0, :5].tolist()
    meta = AttentionMetadata.build([1], [40], [blocks], 8, device)
    with forced("paged_attention", name), LargestTensor() as largest:
        ops.paged_attention(case.query[:1], case.kv_layer, meta, scale=case.scale)
    num_kv_heads, head_dim = 2, 16
    assert largest.numel <= 40 * num_kv_heads * head_dim


def test_block_size_must_hold_the_context() -> None:
    with pytest.raises(AssertionError):
        AttentionMetadata.build([1], [17], [[0, 1]], block_size=8)


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype"), every_implementation("paged_attention", kv_dtypes=KV_DTYPES)
)
def test_blocks_before_the_window_are_not_read(name: str, device: str, kv_dtype: torch.dtype | None) -> None:
    """They may have been given to another sequence, whose values may be NaN."""
    case = make_case([(1, 100), (9, 90), (1, 3)], kv_dtype=kv_dtype, device=device)
    expected = dense(case, sliding_window=20)
    # Positions below 80 and 62 are hidden from all queries; blocks of 8 that end there hold nothing else.
    for row, first_seen in ((0, 80), (1, 62)):
        for index in range(first_seen // 8):
            case.pool[case.meta.block_table[row, index]] = POISON
    with forced("paged_attention", name):
        torch.testing.assert_close(case.run(sliding_window=20).double(), expected, atol=2e-5, rtol=2e-5)
