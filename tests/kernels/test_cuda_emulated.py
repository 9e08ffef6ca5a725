"""The CUDA kernels' results, from their own sources on a CPU: see cuda_emulator."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_kernels import ops, registry
from quire_kernels.cuda import linear
from quire_kernels.cuda.compiler import SOURCES
from quire_kernels.cuda.kernels import Kernels, aligned_rows
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import QuantizedKV
from quire_kernels.sampling import SamplingTensors
from quire_kernels.weights import QuantizedRows, dequantize_weight, quantize_weight
from tests.kernels import cuda_emulator, test_cache_ops, test_elementwise, test_linear, test_sampling
from tests.kernels.common import dequantized, forced, gated, quantized_pool
from tests.kernels.cuda_emulator import EmulatedLauncher
from tests.kernels.test_paged_attention import Case, check, make_case

NAME = "cuda-emulated"
PRIORITY = -20
"""Behind every other implementation: it runs only where it is forced."""
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
WEIGHTS = ("int8", "fp8", "int4")
"""Quantisations of weights that kernels of ours multiply."""

pytestmark = pytest.mark.skipif(not cuda_emulator.is_available(), reason="needs x86-64 and g++")


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedLauncher]:
    """Registers the emulated kernels; forgotten after the test, so that other tests do not list them."""
    names = {operator: dict(found) for operator, found in registry._implementations.items()}
    monkeypatch.setattr(registry, "_implementations", names)
    found = EmulatedLauncher()
    register(found)
    yield found
    registry._picked.clear()


def register(launcher: EmulatedLauncher) -> None:
    """Puts kernels on this launcher in the place of those before."""
    kernels = Kernels(launcher)
    functions: dict[str, Any] = {
        name: getattr(kernels, name)
        for name in (
            "paged_attention",
            "norm_rope_write",
            "write_kv",
            "rope",
            "rms_norm",
            "gate_mul",
            "copy_blocks",
            "argmax",
            "sample",
        )
    }
    functions["linear"] = partial(linear.pack, kernels)
    for operator, function in functions.items():
        registry._implementations[operator].pop(NAME, None)
        registry.implementation(operator, NAME, devices=("cpu",), priority=PRIORITY)(function)


def attend(case: Case, **options: Any) -> None:
    with forced("paged_attention", NAME):
        check(case, **options)


ATTENTION = [
    (BF16, 64, None, 1, 16),
    (BF16, 64, torch.int8, 8, 8),
    (BF16, 80, None, 4, 16),
    (BF16, 96, None, 3, 16),
    (BF16, 128, None, 4, 32),
    (BF16, 128, torch.int8, 5, 64),
    (BF16, 128, FP8, 8, 16),
    (BF16, 256, None, 2, 16),
    (BF16, 256, FP8, 32, 128),
    (FP16, 64, FP8, 2, 16),
    (FP16, 128, None, 8, 16),
    (FP16, 128, torch.int8, 4, 32),
]
"""Type, head size, cache, query heads per KV head, block size."""


@pytest.mark.parametrize(("dtype", "head_dim", "kv_dtype", "groups", "block_size"), ATTENTION)
def test_attention_equals_dense_attention(
    dtype: torch.dtype,
    head_dim: int,
    kv_dtype: torch.dtype | None,
    groups: int,
    block_size: int,
) -> None:
    """Lengths around tiles, several new tokens, windows that begin anywhere; unowned memory is NaN."""
    lengths = [(1, 130), (3, 65), (1, 1), (1, 64), (2, 257), (1, 63), (20, 33)]
    case = make_case(
        lengths,
        num_kv_heads=2,
        groups=groups,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    attend(case)
    attend(case, sliding_window=70)
    attend(case, sliding_window=9, softcap=15.0)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_random_batches(seed: int, launcher: EmulatedLauncher) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    dtype, head_dim, kv_dtype, groups, _ = ATTENTION[seed]
    launcher.count, launcher.seed = draw(1, 20), seed
    lengths = []
    for _ in range(draw(1, 5)):
        seq_len = draw(1, 1000) if draw(0, 2) == 0 else draw(1, 140)
        lengths.append((min(seq_len, draw(1, 3)), seq_len))
    case = make_case(
        lengths,
        num_kv_heads=draw(1, 2),
        groups=groups,
        head_dim=head_dim,
        block_size=2 ** draw(3, 7),
        dtype=dtype,
        kv_dtype=kv_dtype,
        seed=seed,
    )
    attend(case, sliding_window=draw(1, 300) if seed % 2 else None)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_attention_does_not_depend_on_how_the_work_is_cut(
    kv_dtype: torch.dtype | None, launcher: EmulatedLauncher
) -> None:
    """Bit by bit: on 2 to 60 blocks, in any order of blocks and warps, alone and in a batch; the longest
    context has chunks of four tiles."""
    lengths = [(1, 4500), (1, 100), (2, 700), (1, 1), (1, 64)]
    case = make_case(
        lengths, num_kv_heads=1, groups=2, head_dim=64, block_size=16, dtype=BF16, kv_dtype=kv_dtype
    )
    with forced("paged_attention", NAME):
        check(case)
        expected = case.run(sliding_window=600), case.run()
        for count, seed in ((1, 0), (2, 5), (7, 6), (30, 7)):
            launcher.count, launcher.seed = count, seed
            case.meta.shared_plans.clear()
            assert torch.equal(case.run(sliding_window=600), expected[0])
            # Twice with one plan, as layers do: the counters are as they were.
            assert torch.equal(case.run(), expected[1])
            assert torch.equal(case.run(), expected[1])
        starts = case.meta.query_start_loc.tolist()
        for row, (query_len, seq_len) in enumerate(lengths):
            meta = AttentionMetadata.build([query_len], [seq_len], [case.meta.block_table[row].tolist()], 16)
            rows = slice(starts[row], starts[row + 1])
            alone = ops.paged_attention(case.query[rows], case.kv_layer, meta, scale=case.scale)
            assert torch.equal(alone, expected[1][rows])


def test_attention_of_padding_is_zero_and_reads_nothing() -> None:
    """Rows that only fill a captured graph have no context; their block is all NaN."""
    case = make_case([(1, 40), (1, 8), (1, 200)], head_dim=64, block_size=8, dtype=BF16)
    expected = case.run()
    case.meta.seq_lens[1] = 0
    with forced("paged_attention", NAME):
        out = case.run()
    assert not out[1].any()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=2e-2, rtol=2e-2)


FAULTS = {
    "a copy that is not waited for": ("copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
    "a window one position too long": ("position > last - p.window", "position >= last - p.window"),
    "a chunk that is folded before all warps have laid theirs down": (
        "        lay_down(0);\n        block_barrier();\n",
        "        lay_down(0);\n",
    ),
    "a tile whose stage is refilled too early": (
        "start_copies(stage == 0 ? STAGES - 1 : stage - 1);",
        "start_copies(stage + 1 == STAGES ? 0 : stage + 1);",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_these_tests_see_a_planted_fault(fault: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "src")
    source = tmp_path / "src" / "attention.cu"
    before, after = FAULTS[fault]
    text = source.read_text()
    assert text.count(before) == 1, "the sources have changed: plant the fault elsewhere"
    source.write_text(text.replace(before, after))
    case = make_case([(1, 300), (1, 257)], groups=4, head_dim=64, block_size=16, dtype=BF16)
    # Every position has the same weight, so that each one too many shows.
    case.query.zero_()
    attend(case, sliding_window=5)
    attend(case)
    register(EmulatedLauncher(sources=tmp_path / "src"))
    with pytest.raises(AssertionError):
        attend(case, sliding_window=5)
        attend(case)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_elementwise_kernels(dtype: torch.dtype) -> None:
    for shape in ((1, 64), (7, 4096), (5, 3, 16)):
        test_elementwise.test_rms_norm(NAME, "cpu", dtype, shape)
    for sizes in ((16, 16), (64, 16), (128, 128), (128, 64), (80, 80), (256, 96)):
        test_elementwise.test_rope_rotates_pairs_and_keeps_the_rest(NAME, "cpu", dtype, *sizes)
    test_elementwise.test_silu_with_the_product(NAME, "cpu", dtype)
    test_elementwise.test_gelu_with_the_product(NAME, "cpu", dtype)


def test_a_single_row_that_lies_anywhere_is_aligned() -> None:
    x = torch.randn(2 * 64 + 2).to(BF16)[2:66].view(1, 64)
    assert x.data_ptr() % 16 and x.is_contiguous()
    rows = aligned_rows(x)
    assert rows.data_ptr() % 16 == 0 and torch.equal(rows, x)


@pytest.mark.parametrize("size", [1, 15, 1000, 151_936])
def test_argmax(size: int, launcher: EmulatedLauncher) -> None:
    """With blocks of both sizes."""
    for launcher.count in (1, 100):
        test_elementwise.test_argmax(NAME, "cpu", size)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
def test_write_kv(dtype: torch.dtype) -> None:
    for block_size in (1, 16):
        if dtype != FP16:
            test_cache_ops.test_write_kv_fills_the_slots_and_nothing_else(NAME, "cpu", block_size, dtype)
        for kv_dtype in (torch.int8, FP8):
            test_cache_ops.test_write_kv_quantizes_within_half_a_step(
                NAME, "cpu", block_size, dtype, kv_dtype
            )


def test_write_kv_of_extreme_numbers() -> None:
    test_cache_ops.test_rounding_is_to_nearest_even(NAME, "cpu")
    for kv_dtype in (torch.int8, FP8):
        test_cache_ops.test_extreme_numbers_survive_quantization(NAME, "cpu", kv_dtype)
        test_cache_ops.test_what_is_stored_does_not_depend_on_the_tokens_beside_it(NAME, "cpu", kv_dtype)


def test_every_float_becomes_the_nearest_e4m3() -> None:
    """Scales of 1 by a number of 448: the codes are torch's, for all bfloat16 numbers up to there."""
    numbers = torch.arange(0, 0x10000, dtype=torch.int32).to(torch.int16).view(BF16)
    numbers = numbers[numbers.abs() <= 448]
    rows = numbers[: len(numbers) // 63 * 63].view(-1, 1, 63)
    rows = torch.cat((rows, torch.full_like(rows[..., :1], 448)), dim=-1)
    _, (layer,) = quantized_pool(-(-len(rows) // 16), 1, 1, 16, 64, FP8, "cpu")
    with forced("write_kv", NAME):
        ops.write_kv(rows, -rows, layer, torch.arange(len(rows)))
    stored = layer.data.movedim(3, 1).flatten(0, 1)[: len(rows)].view(torch.uint8)
    assert bool((layer.scales.movedim(3, 1).flatten(0, 1)[: len(rows)] == 1).all())
    assert torch.equal(stored[:, 0], rows.to(FP8).view(torch.uint8))
    assert torch.equal(stored[:, 1], (-rows).to(FP8).view(torch.uint8))


@pytest.mark.row("D3", clauses=("rope",))
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, FP8])
@pytest.mark.parametrize("norm", [None, BF16, torch.float32])
def test_norm_rope_write_equals_its_parts(kv_dtype: torch.dtype | None, norm: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for head_dim, rotary_dim in ((64, 64), (128, 64), (256, 256)):
        qkv = torch.randn((5, 8, head_dim), generator=generator).to(BF16)
        angles = 10 * torch.rand((5, rotary_dim // 2), generator=generator)
        norms = None
        if norm is not None:
            weights = 1 + torch.randn((2, head_dim), generator=generator) / 4
            norms = (weights[0].to(norm), weights[1].to(norm))
        slots = torch.tensor([3, 17, 40, 0, 31])
        results = []
        for name in ("reference", NAME):
            if kv_dtype is None:
                layer: Any = torch.zeros((3, 2, 2, 16, head_dim), dtype=BF16)
            else:
                _, (layer,) = quantized_pool(3, 1, 2, 16, head_dim, kv_dtype, "cpu")
                layer.data.view(torch.uint8).zero_()
                layer.scales.zero_()
            with forced("norm_rope_write", name):
                query = ops.norm_rope_write(qkv, 4, norms, 1e-6, angles.cos(), angles.sin(), layer, slots)
            results.append((query, dequantized(layer)))
            assert isinstance(layer, QuantizedKV) == (kv_dtype is not None)
        # A number at the border of two codes or of two bfloat16 numbers may become either.
        tolerance = 1e-2 if kv_dtype is None else 8e-2 if kv_dtype == torch.int8 else 0.14
        torch.testing.assert_close(results[1][0], results[0][0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(results[1][1], results[0][1], atol=tolerance, rtol=tolerance)
        differ = (results[1][1] != results[0][1]).double().mean()
        assert float(differ) < 0.01, "borders are rare"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_copy_blocks(dtype: torch.dtype, launcher: EmulatedLauncher) -> None:
    test_cache_ops.test_copy_blocks_reads_all_sources_first(NAME, "cpu", dtype)
    assert launcher.launches == ["copy_rows"] * 2
    pool = torch.randint(0, 256, (5, 20_016), dtype=torch.uint8)
    expected = pool.clone()
    expected[[1, 4]] = pool[[4, 0]]
    with forced("copy_blocks", NAME):
        ops.copy_blocks(pool, torch.tensor([4, 0]), torch.tensor([1, 4]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("vocab_size", [13, 3000])
def test_sample_draws_what_the_reference_draws(vocab_size: int) -> None:
    count = 40
    generator = torch.Generator().manual_seed(vocab_size)

    def choose(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (count,), generator=generator)]

    rows = SamplingTensors(
        temperature=choose([0.0, 0.3, 1.0, 3.0, 1e-7], torch.float32),
        top_k=choose([0, 0, 1, 5, 50, 10**6], torch.int32),
        top_p=choose([1.0, 1.0, 0.9, 0.5, 1e-3], torch.float32),
        min_p=choose([0.0, 0.0, 0.05, 1.0], torch.float32),
        seeds=torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator),
        positions=torch.randint(0, 2**40, (count,), generator=generator),
    )
    logits = 3 * torch.randn((count, vocab_size + 5), generator=generator)[:, :vocab_size]
    logits[5] = logits[5].round()
    logits[6, 1::2] = -torch.inf
    logits[7, vocab_size // 2] = torch.nan
    logits[8] = -torch.inf
    with forced("sample", "reference"):
        expected = ops.sample(logits, rows)
    with forced("sample", NAME):
        assert torch.equal(ops.sample(logits, rows), expected)
        assert expected[7] == expected[8] == -1


HARD: list[dict[str, Any]] = [
    {},
    {"min_p": 0.2},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9, "min_p": 0.3},
    {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
    {"top_k": 1000, "top_p": 0.99, "min_p": 0.01},
    {"top_k": 1500},
    {"top_k": 15_000, "top_p": 0.6},
    {"top_k": 40, "temperature": 2.0**21},
]
"""With and without a guess, which may be wrong; lists that overflow; more than half a list of the best."""


@pytest.mark.parametrize("vocab_size", [515, 20_011])
def test_sample_of_hard_rows(vocab_size: int, launcher: EmulatedLauncher) -> None:
    """Those defined, but where rounding of a sum decides, with blocks of both sizes, wherever rows begin."""
    each = test_sampling.hard_logits(vocab_size)
    logits = each.repeat_interleave(len(HARD), 0)
    rows = test_sampling.settings(len(logits), HARD)
    expected = test_sampling.defined(logits, rows)
    found = []
    for offset, launcher.count in ((0, 1), (1, len(logits)), (3, 1)):
        # Beside the row are numbers that would be the best.
        wide = torch.full((len(logits), vocab_size + 5), 3e38)
        wide[:, offset : offset + vocab_size] = logits
        with forced("sample", NAME):
            found.append(ops.sample(wide[:, offset : offset + vocab_size], rows))
        assert torch.equal(found[-1], found[0])
    assert int((found[0] != expected).sum()) <= (0 if vocab_size < 1000 else 2)


def test_sample_of_rows_with_more_pieces_than_are_kept(launcher: EmulatedLauncher) -> None:
    """Random, so that a guess for top-p may be wrong; all equal; equal but for a few, with ties at
    thresholds; best tokens at the end; a vocabulary of more batches than there are chunks.
    """
    vocab_size = 100_003
    logits = torch.randn((5, vocab_size), generator=torch.Generator().manual_seed(0))
    logits[1] = 2.5
    logits[2] = 0.0
    logits[2, [7, 70_000, 100_002]] = torch.tensor([9.0, 8.0, 7.0])
    logits[3] = logits[3].sort().values * 4
    logits[4] = logits[4].round()
    filters = [*HARD, {"top_p": 0.2}, {"top_p": 0.4}, {"top_p": 0.5}, {"top_k": 4}, {"top_k": 3}]
    logits = logits.repeat_interleave(len(filters), 0)
    cases = [(logits, filters)]
    large = torch.randn((1, 600_001), generator=torch.Generator().manual_seed(1))
    cases.append((large.expand(3, -1), [{}, {"top_p": 0.9}, {"top_k": 9}]))
    for many, chosen in cases:
        rows = test_sampling.settings(len(many), chosen)
        with forced("sample", NAME):
            found = ops.sample(many, rows)
        assert int((found != test_sampling.defined(many, rows)).sum()) <= 2


def test_quotients_by_an_inverse_are_the_quotients() -> None:
    """What sampling.cu does in place of a division, where it does so: to the last bit."""
    draw, count = np.random.default_rng(0), 300_000
    divisors = np.ldexp(draw.uniform(1, 2, count), draw.integers(-19, 20, count)).astype(np.float32)
    distances = np.ldexp(draw.uniform(1, 2, count), draw.integers(-85, 24, count)).astype(np.float32)
    inverse = np.float32(1) / divisors

    def fused(a: Any, b: Any, c: Any) -> Any:
        return (a.astype(np.longdouble) * b + c).astype(np.float32)

    quotients = distances * inverse
    for _ in range(2):
        quotients = fused(fused(-quotients, divisors, distances), inverse, quotients)
    assert (quotients == distances / divisors).all()


@pytest.mark.row("D10")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sample_edits_logits(seed: int, launcher: EmulatedLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one kernel, with blocks and warps in several orders."""
    launcher.seed = seed
    for count, vocab_size in ((40, 40), (20, 2500)):
        test_sampling.test_edits_are_those_of_the_sampler(NAME, "cpu", count, vocab_size)
        test_sampling.test_a_token_counts_that_only_the_device_knows(NAME, "cpu", count, vocab_size)
    test_sampling.test_the_sampler_gives_what_it_gives_by_the_reference(NAME, "cpu")
    assert set(launcher.launches) <= {"sample", "argmax"}


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("can_widen", [False, True])
def test_plain_linear(
    dtype: torch.dtype,
    activation: str | None,
    can_widen: bool,
    launcher: EmulatedLauncher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's product with our gate and argmax; float32 sums are kept where torch gives them."""
    monkeypatch.setattr(linear, "can_widen", lambda device_type: can_widen)
    monkeypatch.setattr(linear, "float32_product", lambda x, weight: x.float() @ weight.float().T)
    generator = torch.Generator().manual_seed(1)
    columns, size = 40, 264
    rows = columns if activation is None else 2 * columns
    weight = (torch.randn((rows, size), generator=generator) / 16).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    x = torch.randn((17, 1, size), generator=generator).to(dtype)
    for one in (None, bias):
        with forced("linear", NAME):
            layer = ops.pack_linear(weight, one, activation=activation)
        expected = x.double() @ weight.double().T + (0 if one is None else bias.double())
        if activation is not None:
            expected = gated(activation, *expected.chunk(2, -1))
        out = layer(x, torch.float32)
        assert out.dtype == torch.float32
        tolerance = 1e-4 if can_widen or dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        rounded = layer(x)
        assert rounded.dtype == dtype and rounded.shape == (17, 1, columns)
        torch.testing.assert_close(rounded.double(), expected, atol=3e-2, rtol=3e-2)
        if activation is None:
            assert layer.argmax(x[:, 0]).tolist() == out[:, 0].argmax(-1).tolist()
            assert torch.equal(layer.rows(torch.tensor([3, 0])), weight[[3, 0]])
    assert set(launcher.launches) == {"argmax" if activation is None else "gate"}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("quantization", WEIGHTS)
@pytest.mark.parametrize("activation", [None, "silu", "clamped_swiglu"])
def test_quantised_linear(
    dtype: torch.dtype, quantization: str, activation: str | None, launcher: EmulatedLauncher
) -> None:
    """Slices of the inputs in several blocks, tiles that are not full, bits that no neighbour changes."""
    generator = torch.Generator().manual_seed(1)
    columns, size = (44, 1056) if activation is None else (48, 1120)
    if quantization == "int4":
        size = 2080
    rows = columns if activation is None else 2 * columns
    weight = (torch.randn((rows, size), generator=generator) / 16).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    x = torch.randn((70, size + 8), generator=generator).to(dtype)[:, :size]
    x[65] = torch.nan
    launcher.count = 1
    with forced("linear", NAME):
        packed, plain = (
            ops.pack_linear(weight, one, activation=activation, quantization=quantization)
            for one in (bias, None)
        )
    assert isinstance(packed, linear.QuantizedLinear) and packed._slices > 1
    product = x.double() @ dequantize_weight(*quantize_weight(weight, quantization)).double().T
    for layer, expected in ((packed, product + bias.double()), (plain, product)):
        if activation is not None:
            expected = gated(activation, *expected.chunk(2, -1))
        outs = {count: layer(x[:count], torch.float32) for count in (64, 1, 8, 9, 17)}
        for seed, (count, out) in enumerate(outs.items()):
            launcher.seed = seed
            torch.testing.assert_close(out.double(), expected[:count], atol=1e-4, rtol=1e-4)
            assert torch.equal(out, outs[64][:count])
        rounded = layer(x[:3].unsqueeze(1))
        assert rounded.dtype == dtype and torch.equal(rounded[:, 0], outs[64][:3].to(dtype))
        wide = layer(x)
        assert wide.shape == (70, columns) and bool(wide[65].isnan().all())
        torch.testing.assert_close(wide[:65].double(), expected[:65], atol=0.1, rtol=3e-2)
    assert not bool(packed._tickets.any())
    apart = packed.ungated()(x[:5], torch.float32)
    if activation is None:
        assert packed.argmax(x[:4]).tolist() == (product + bias)[:4].argmax(-1).tolist()
    else:
        with forced("gate_mul", NAME):
            assert torch.equal(ops.gate_mul(apart, activation).to(dtype), packed(x[:5]))
    assert {"linear_8", "linear_16", "linear_32", "widen"} <= set(launcher.launches)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("quantization", WEIGHTS)
def test_quantised_linear_as_the_others(dtype: torch.dtype, quantization: str) -> None:
    for activation in (None, "silu"):
        test_linear.test_quantised_weights_are_what_the_definition_says(
            NAME, "cpu", dtype, quantization, activation
        )
    test_linear.test_no_rows_at_all(NAME, "cpu", dtype, quantization)
    if dtype != torch.float32:
        test_linear.test_a_row_does_not_depend_on_the_rows_of_its_tile(NAME, "cpu", dtype, quantization)
    test_linear.test_argmax_is_that_of_the_product(NAME, "cpu", dtype, quantization)
    if quantization != "int4":
        test_linear.test_rows_that_are_quantised_already(NAME, "cpu", dtype, quantization)
    if quantization == "int8":
        test_linear.test_numbers_are_rounded_alike_everywhere(NAME, "cpu", dtype, quantization)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("quantization", WEIGHTS)
def test_every_code_is_widened_exactly(dtype: torch.dtype, quantization: str) -> None:
    """All of a type, by products with one input and in memory; one that is NaN spoils its row."""
    if quantization == "int4":
        weight = (torch.arange(16 * 64).view(16, 64) % 17 - 8).clamp(max=7).float()
        weight[:, ::32], expected = -8, weight
        quantised: Any = weight.to(dtype)
    else:
        codes = (torch.arange(32 * 256).view(32, 256) * 33 % 256).to(torch.uint8)
        codes = codes.view(torch.int8 if quantization == "int8" else FP8)
        if quantization == "fp8":
            is_nan = codes.float().isnan()
            codes = codes.view(torch.uint8).where(~is_nan, 0x7E).view(FP8)
            codes.view(torch.uint8)[3, 100] = 0xFF
        quantised = QuantizedRows(codes, torch.ones(32, 1), quantization)
        expected = codes.float().where(~codes.float().isnan().any(1, keepdim=True), torch.nan)
    with forced("linear", NAME):
        packed = ops.pack_linear(
            quantised, dtype=dtype, quantization="int4" if quantization == "int4" else None
        )
    x = torch.eye(expected.shape[1], dtype=dtype)
    outs = torch.cat([packed(part, torch.float32) for part in x.split(64)])
    torch.testing.assert_close(outs.T, expected, atol=0, rtol=0, equal_nan=True)
    assert isinstance(packed, linear.QuantizedLinear)
    torch.testing.assert_close(packed._widened().float(), expected, atol=0, rtol=0, equal_nan=True)


@pytest.fixture
def float8(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """A device that multiplies fp8 by fp8, in float32; and the types of results that it gives."""
    results = [BF16]

    def product(
        x: torch.Tensor,
        x_scales: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if dtype not in results:
            raise RuntimeError("only some types, as on a GPU")
        assert x.dtype == weight.dtype == FP8 and x_scales.dtype == scales.dtype == torch.float32
        assert len(x) and x_scales.shape == (len(x), 1) and scales.shape == (1, len(weight))
        assert all(one.is_contiguous() for one in (x, x_scales, weight, scales))
        assert not any(size % 16 for size in weight.shape)
        return (x.float() @ weight.float().T * x_scales * scales).to(dtype)

    monkeypatch.setattr(linear, "has_float8", lambda device: True)
    monkeypatch.setattr(linear, "float8_product", product)
    linear.float8_result.cache_clear()
    yield results
    linear.float8_result.cache_clear()


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("size", [16, 48, 4096, 14_336, 40_000])
def test_quantize_rows(dtype: torch.dtype, size: int) -> None:
    """To the last bit: nothing, no numbers, the smallest and the largest ones, and ties of all codes; rows of
    more than the threads keep, and rows of a wider matrix."""
    x = (torch.randn((14, size + 8), generator=torch.Generator().manual_seed(size)) * 3).to(dtype)[:, :size]
    every = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = torch.cat((every[:-1] + every[1:], torch.tensor([896.0])))[-size:] / 2
    x[1], x[2], x[2, 1:] = 0.0, -0.0, 0.0
    x[3, size - 1], x[4, 0], x[5, size // 2] = torch.nan, torch.inf, -torch.inf
    x[6], x[7] = torch.finfo(dtype).tiny * x[6].clamp(-1, 1), torch.finfo(dtype).smallest_normal
    x[8], x[8, 0] = 0.0, -torch.finfo(dtype).max
    x[9], x[9, : len(ties)] = 448.0, ties.to(dtype)
    x[10] = -x[9]
    x[11, 1:] *= 2.0**-12
    x[12], x[12, -1] = 0.0, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    codes, scales = Kernels(EmulatedLauncher()).quantize_rows(x)
    expected, expected_scales = test_linear.float8_rows(x)
    assert codes.dtype == FP8 and torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=0, equal_nan=True)
    assert scales.isnan().flatten().nonzero().flatten().tolist() == [3, 4, 5]
    assert float(scales[9]) == 1.0 and float(scales[1]) == 2.0**-126
    kept = scales.isfinite().flatten()
    missed = (codes.double() * scales.double() - x.double()).abs()[kept]
    # Half a step of three bits of mantissa, or of the smallest numbers.
    limit = (x.double().abs()[kept] / 16).maximum(scales.double()[kept] * 2.0**-10)
    assert bool((missed <= limit * 1.0001).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("given", [[BF16], [BF16, FP16]])
@pytest.mark.parametrize("activation", [None, "silu", "clamped_swiglu"])
def test_float8_linear(
    dtype: torch.dtype,
    given: list[torch.dtype],
    activation: str | None,
    float8: list[torch.dtype],
    launcher: EmulatedLauncher,
) -> None:
    """The product of what codes mean, and as near to that of x as eight bits are."""
    float8[:] = given
    generator = torch.Generator().manual_seed(1)
    columns, size = 48, 1056
    rows = columns if activation is None else 2 * columns
    weight = (torch.randn((rows, size), generator=generator) / 32).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    x = torch.randn((70, size + 8), generator=generator).to(dtype)[:, :size]
    x[3] = 0
    restored = dequantize_weight(*quantize_weight(weight, "fp8")).double()
    for one in (None, bias):
        with forced("linear", NAME):
            layer = ops.pack_linear(weight, one, activation=activation, quantization="fp8")
        assert isinstance(layer, linear.Float8Linear)
        assert layer.result == (dtype if dtype in given else BF16)
        assert (layer.in_features, layer.out_features) == (size, columns)
        assert layer.nbytes == ops.packed_bytes(weight, device_type="cuda", quantization="fp8")
        products = []
        for taken in (test_linear.taken_rows(layer, x), x):
            expected = test_linear.expected_of(taken, restored, one)
            products.append(expected if activation is None else gated(activation, *expected.chunk(2, -1)))
        out = layer(x)
        assert out.dtype == dtype and out.shape == (70, columns)
        torch.testing.assert_close(out.double(), products[0], atol=4e-2, rtol=2e-2)
        error = float((out.double() - products[1]).norm() / products[1].norm())
        assert 0.005 < error < 0.06, "of eight bits"
        assert torch.equal(layer(x[:6].unsqueeze(1)), out[:6].unsqueeze(1))
        wide = layer(x, torch.float32)
        assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out)
        apart = layer.ungated()
        assert apart.out_features == rows
        if activation is not None:
            with forced("gate_mul", NAME):
                assert torch.equal(ops.gate_mul(apart(x, torch.float32), activation).to(dtype), out)
        spoilt = x.clone()
        spoilt[5, 7] = torch.inf
        found = layer(spoilt)
        assert bool(found[5].isnan().all()) and torch.equal(found[6:], out[6:])
        assert layer(x[:0]).shape == (0, columns)
    assert set(launcher.launches) == {"quantize_rows"} | ({"gate"} if activation is not None else set())


def test_float8_rows_of_a_file(float8: list[torch.dtype]) -> None:
    """Their codes are taken as they are; one that is NaN spoils its column."""
    codes = (torch.arange(48 * 256).view(48, 256) * 37 % 256).to(torch.uint8).view(FP8)
    codes.view(torch.uint8)[codes.float().isnan()] = 0x7E
    codes.view(torch.uint8)[5, 9] = 0xFF
    quantised = QuantizedRows(codes, torch.rand((48, 1)) + 0.5, "fp8")
    x = torch.eye(256, dtype=BF16)
    with forced("linear", NAME):
        layer = ops.pack_linear(quantised, dtype=BF16)
    assert isinstance(layer, linear.Float8Linear) and torch.equal(
        layer.codes.view(torch.uint8), codes.view(torch.uint8)
    )
    out = layer(x).T.float()
    assert bool(out[5].isnan().all())
    others = [row for row in range(48) if row != 5]
    torch.testing.assert_close(out[others], quantised.dequantize()[others], atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("name", ["fp8_weights", "float32", "inputs", "outputs", "no product", "capability"])
def test_where_weights_are_quantised_alone(
    name: str,
    float8: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dtype = torch.float32 if name == "float32" else BF16
    weight = torch.ones((72 if name == "outputs" else 64, 72 if name == "inputs" else 64), dtype=dtype)
    quantization = name if name == "fp8_weights" else "fp8"
    if name == "no product":
        float8.clear()
    elif name == "capability":
        monkeypatch.setattr(linear, "has_float8", lambda device: False)
    with forced("linear", NAME), caplog.at_level(logging.WARNING, logger="quire_kernels"):
        layers = [ops.pack_linear(weight, quantization=quantization) for _ in range(2)]
    assert all(isinstance(layer, linear.QuantizedLinear) for layer in layers)
    assert caplog.text.count("multiplies no fp8") == (name == "no product")


def test_fp8_is_multiplied_from_capability_9_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert linear.has_float8(torch.device("cuda", 0)) == expected
    assert not linear.has_float8(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_float8_linear_as_the_others(dtype: torch.dtype, float8: list[torch.dtype]) -> None:
    for activation in (None, "silu"):
        test_linear.test_quantised_weights_are_what_the_definition_says(NAME, "cpu", dtype, "fp8", activation)
    test_linear.test_no_rows_at_all(NAME, "cpu", dtype, "fp8")
    test_linear.test_rows_that_are_quantised_already(NAME, "cpu", dtype, "fp8")
    test_linear.test_argmax_is_that_of_the_product(NAME, "cpu", dtype, "fp8")
    if dtype != torch.float32:
        test_linear.test_a_row_does_not_depend_on_the_rows_of_its_tile(NAME, "cpu", dtype, "fp8")
        test_linear.test_a_gate_apart_gives_the_same_numbers(NAME, "cpu", dtype, "fp8")
