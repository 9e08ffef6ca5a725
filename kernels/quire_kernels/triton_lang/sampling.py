"""Sampling in the Triton language: no sort, and nothing is copied to the host.

Scores are at most 0, so the bits of -score, read as an integer, order the tokens: that is a token's key, and
the least key is the best token. Thresholds of top-k and top-p are keys, found by bisection over the keys that
occur (the idea of pivots instead of a sort is FlashInfer's and vLLM's), so that ties are kept whole. Masses
are integers, exp(score) * 2 ** 42: their sums are exact in any order, so no result depends on how a row is
divided among programs, and a row's token depends on that row alone.

Penalties, biases and bans are made in place by a kernel before the others, where any row has some.

What rows ask for lies behind each other in one piece of memory: where its parts begin must not make other
kernels, so those pointers are not specialised on alignment.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.sampling import LogitEdits, SamplingTensors
from quire_kernels.triton_lang import interpreter
from quire_kernels.triton_lang.compiler import CompileCase
from quire_kernels.triton_lang.elementwise import INT_MAX, argmax_parts, best_of_parts
from quire_kernels.triton_lang.operators import MAX_VOCABULARY

interpreter.install()

_EDIT_BLOCK = 1024
_EDIT_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
"""No load is moved ahead of a store. Products are rounded before they are subtracted: the edited logits are
the reference's, bit for bit."""
_KEY_BLOCK = 4096
_SEARCH_BLOCK = 8192
_SEARCH_WARPS = 32
_CHUNK = 2048
"""Tokens whose mass one program sums, and among which the draw then searches."""
_MIN_TEMPERATURE = tl.constexpr(1e-6)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LAST_KEY = tl.constexpr(0x7F800000)
"""The key of a score of minus infinity."""
_ONE = tl.constexpr(float(1 << 42))
"""The mass of the best token; MAX_VOCABULARY of them fit into int64."""
_FARTHEST = tl.constexpr(100.0)
"""Less probable tokens have no mass: exp(-100) * 2 ** 42 is below 1."""
_LOG2_E = tl.constexpr(1.4426950216293335)
_LOG2_E_REST = tl.constexpr(1.92596298909109e-08)
"""The float32 next to log2(e), and what is missing."""
_LN_2 = tl.constexpr(0.6931471805599453)
_TWO_TO_MINUS_53 = tl.constexpr(2.0**-53)


@triton.jit
def _range_of(starts_ptr, index, row, num_rows):  # type: ignore[no-untyped-def]
    """(begin, end) of a row's entries in list 0 (penalties), 1 (biases) or 2 (bans) of `LogitEdits`."""
    starts = starts_ptr + index * (num_rows + 1) + row
    return tl.load(starts), tl.load(starts + 1)


@triton.jit
def _has_any(logits_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a row holds anything above -inf, NaN included; it is read up to the first such number."""
    begin = 0
    found = 0
    while (begin < size) & (found == 0):
        column = begin + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + column, column < size, other=-float("inf"))
        found = tl.max((logits != -float("inf")).to(tl.int32), 0)
        begin += BLOCK
    return found > 0


@triton.jit
def _penalised(x, count, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    y = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
    y = y - frequency * count - tl.where(count > 0, presence, 0.0)
    y = tl.where(y > _LARGEST, _LARGEST, y)
    return tl.where(tl.abs(x) == float("inf"), x, y)


_EDIT_POINTERS = (
    "starts_ptr",
    "factors_ptr",
    "penalty_id_ptr",
    "count_ptr",
    "bias_id_ptr",
    "bias_ptr",
    "ban_id_ptr",
    "newest_ptr",
)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_EDIT_POINTERS)
def _edit_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    starts_ptr,
    factors_ptr,
    penalty_id_ptr,
    count_ptr,
    bias_id_ptr,
    bias_ptr,
    ban_id_ptr,
    newest_ptr,
    saved_ptr,
    logits_stride,
    size,
    num_rows,
    HAS_NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`LogitEdits`, a row per program; saved float32 [bans] is scratch.

    Lists may name a token that another one names, so that a barrier stands behind each.
    """
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * logits_stride
    offsets = tl.arange(0, BLOCK)

    begin, end = _range_of(starts_ptr, 0, row, num_rows)
    newest = tl.full((), -1, tl.int64)
    if HAS_NEWEST:
        newest = tl.load(newest_ptr + row)
    if (begin < end) | (newest >= 0):
        repetition = tl.load(factors_ptr + row)
        presence = tl.load(factors_ptr + num_rows + row)
        frequency = tl.load(factors_ptr + 2 * num_rows + row)
        is_listed = tl.zeros((BLOCK,), tl.int32)
        for first in tl.range(begin, end, BLOCK):
            entry = first + offsets
            token_id = tl.load(penalty_id_ptr + entry, entry < end, other=0)
            is_newest = (token_id == newest) & (entry < end)
            is_listed |= is_newest.to(tl.int32)
            count = tl.load(count_ptr + entry, entry < end, other=0.0) + is_newest.to(tl.float32)
            x = tl.load(logits + token_id, entry < end, other=0.0)
            tl.store(logits + token_id, _penalised(x, count, repetition, presence, frequency), entry < end)
        if (newest >= 0) & (tl.max(is_listed, 0) == 0):
            # Of all threads, which hold the same numbers, one stores.
            token_id = newest + tl.zeros((1,), tl.int64)
            x = tl.load(logits + token_id)
            once = tl.full((1,), 1.0, tl.float32)
            tl.store(logits + token_id, _penalised(x, once, repetition, presence, frequency))
        tl.debug_barrier()

    begin, end = _range_of(starts_ptr, 1, row, num_rows)
    if begin < end:
        for first in tl.range(begin, end, BLOCK):
            entry = first + offsets
            token_id = tl.load(bias_id_ptr + entry, entry < end, other=0)
            bias = tl.load(bias_ptr + entry, entry < end, other=0.0)
            x = tl.load(logits + token_id, entry < end, other=0.0)
            tl.store(logits + token_id, x + bias, entry < end)
        tl.debug_barrier()

    begin, end = _range_of(starts_ptr, 2, row, num_rows)
    if begin < end:
        for first in tl.range(begin, end, BLOCK):
            entry = first + offsets
            token_id = tl.load(ban_id_ptr + entry, entry < end, other=0)
            tl.store(saved_ptr + entry, tl.load(logits + token_id, entry < end, other=0.0), entry < end)
        # All are saved before any is lost: a token may be banned twice.
        tl.debug_barrier()
        for first in tl.range(begin, end, BLOCK):
            entry = first + offsets
            token_id = tl.load(ban_id_ptr + entry, entry < end, other=0)
            tl.store(logits + token_id, -float("inf"), entry < end)
        tl.debug_barrier()
        if not _has_any(logits, size, BLOCK):
            tl.debug_barrier()
            for first in tl.range(begin, end, BLOCK):
                entry = first + offsets
                token_id = tl.load(ban_id_ptr + entry, entry < end, other=0)
                tl.store(logits + token_id, tl.load(saved_ptr + entry, entry < end, other=0.0), entry < end)


@triton.jit
def _mass_of(key):  # type: ignore[no-untyped-def]
    """int64 exp(score) * 2 ** 42 of int32 keys, 0 of those that are none (INT_MAX)."""
    distance = key.to(tl.float32, bitcast=True)
    distance = tl.where(distance < _FARTHEST, distance, _FARTHEST)
    # The product's rounding error would be the result's relative one, times up to 144.
    whole = distance * _LOG2_E
    rest = tl.fma(distance, _LOG2_E, -whole) + distance * _LOG2_E_REST
    weight = tl.exp2(-whole) * (1.0 - rest * _LN_2)
    return (weight * _ONE).to(tl.int64)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr"])
def _keys_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    value_ptr,
    index_ptr,
    temperature_ptr,
    key_ptr,
    best_ptr,
    logits_stride,
    size,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys [rows, size] of rows that are drawn; best int64 [rows], of all, -1: no answer."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, best = best_of_parts(value_ptr, index_ptr, row, num_parts, PARTS)
    temperature = tl.load(temperature_ptr + row)
    if block == 0:
        tl.store(best_ptr + row, best.to(tl.int64))
    if (temperature > 0) & (best >= 0):
        column = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * logits_stride + column, column < size, other=-float("inf"))
        # Rounded as IEEE says, so that equal scores are the reference's equal scores.
        scores = tl.div_rn(logits - peak, tl.maximum(temperature, _MIN_TEMPERATURE))
        tl.store(key_ptr + row * size + column, scores.to(tl.int32, bitcast=True) & INT_MAX, column < size)


@triton.jit
def _survey(key_ptr, size, middle, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(number or mass of a row's keys up to `middle`, largest of them or -1, least above it or INT_MAX)."""
    amounts = tl.zeros((BLOCK,), tl.int64 if IS_MASS else tl.int32)
    below = tl.full((BLOCK,), -1, tl.int32)
    above = tl.full((BLOCK,), INT_MAX, tl.int32)
    for begin in tl.range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        key = tl.load(key_ptr + column, column < size, other=INT_MAX)
        is_inside = key <= middle
        if IS_MASS:
            amounts += tl.where(is_inside, _mass_of(key), 0)
        else:
            amounts += is_inside.to(tl.int32)
        below = tl.maximum(below, tl.where(is_inside, key, -1))
        above = tl.minimum(above, tl.where(is_inside, INT_MAX, key))
    return tl.sum(amounts, 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _least_key(key_ptr, size, high, target, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least key up to which number or mass reach `target` >= 1; up to int32 `high` they must."""
    low = tl.full((), -1, tl.int32)
    # In (low, high] lies the answer; both ends move to keys that occur, which ends most searches early.
    while high - low > 1:
        middle = low + (high - low) // 2
        amount, below, above = _survey(key_ptr, size, middle, IS_MASS, BLOCK)
        if amount >= target:
            high = below
            if amount == target:
                low = below - 1
        else:
            low = above - 1
    return high


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "log_min_p_ptr"])
def _cut_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    cut_ptr,
    size,
    BLOCK: tl.constexpr,
):
    """cut int32 [rows]: tokens with larger keys are dropped."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature_ptr + row) > 0) & (tl.load(best_ptr + row) >= 0):
        keys = key_ptr + row * size
        cut = tl.full((), _LAST_KEY, tl.int32)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < size):
            cut = _least_key(keys, size, cut, top_k, False, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            total, last, _ = _survey(keys, size, cut, True, BLOCK)
            target = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            cut = _least_key(keys, size, last, target, True, BLOCK)
        floor = tl.load(log_min_p_ptr + row).to(tl.int32, bitcast=True) & INT_MAX
        tl.store(cut_ptr + row, tl.minimum(cut, floor))


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr"])
def _masses_kernel(  # type: ignore[no-untyped-def]
    key_ptr, best_ptr, temperature_ptr, cut_ptr, mass_ptr, size, num_chunks, CHUNK: tl.constexpr
):
    """mass int64 [rows, num_chunks] of the tokens that are kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(temperature_ptr + row) > 0) & (tl.load(best_ptr + row) >= 0):
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        key = tl.load(key_ptr + row * size + column, column < size, other=INT_MAX)
        mass = tl.where(key <= tl.load(cut_ptr + row), _mass_of(key), 0)
        tl.store(mass_ptr + row * num_chunks + chunk, tl.sum(mass, 0))


@triton.jit
def philox_uniform(seed, position):  # type: ignore[no-untyped-def]
    """float64 in [0, 1) of int64 seed and position: see `reference.sampling.philox_uniform`."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    c2, c3 = c0 ^ c0, c0 ^ c0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    bits = (c0.to(tl.int64) << 21) | (c1 >> 11).to(tl.int64)
    return bits.to(tl.float64) * _TWO_TO_MINUS_53


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "seed_ptr", "position_ptr"])
def _draw_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    temperature_ptr,
    cut_ptr,
    mass_ptr,
    seed_ptr,
    position_ptr,
    token_ptr,
    size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """token int64 [rows]: the best token, replaced by the drawn one in rows that are drawn."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature_ptr + row) > 0) & (tl.load(token_ptr + row) >= 0):
        chunk = tl.arange(0, CHUNKS)
        masses = tl.load(mass_ptr + row * num_chunks + chunk, chunk < num_chunks, other=0)
        total = tl.sum(masses, 0)
        uniform = philox_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        # An integer sum exceeds a number if it exceeds its whole part. Below the total, so that the token
        # found has a mass.
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        found = tl.sum((tl.cumsum(masses, 0) <= target).to(tl.int32), 0)
        target -= tl.sum(tl.where(chunk < found, masses, 0), 0)
        column = found * CHUNK + tl.arange(0, CHUNK)
        key = tl.load(key_ptr + row * size + column, column < size, other=INT_MAX)
        mass = tl.where(key <= tl.load(cut_ptr + row), _mass_of(key), 0)
        # Should two kernels ever round a mass differently, the token is still one that is kept.
        target = tl.minimum(target, tl.sum(mass, 0) - 1)
        inside = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        tl.store(token_ptr + row, (found * CHUNK + inside).to(tl.int64))


def _edit(logits: torch.Tensor, edits: LogitEdits) -> None:
    num_rows, size = logits.shape
    _edit_kernel[(num_rows,)](
        logits,
        *edits.arguments,
        logits.stride(0),
        size,
        num_rows,
        HAS_NEWEST=edits.newest is not None,
        BLOCK=_EDIT_BLOCK,
        **_EDIT_OPTIONS,
    )


def sample(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """See `ops.sample`.

    Tokens equal the reference's except where float32 rounding of a probability decides: a cumulative sum
    within about 1e-7 of the drawn number, or of top_p.
    """
    if logits.stride(1) != 1:
        assert rows.edits is None, "edits are made in place, and not in a copy"
        logits = logits.contiguous()
    num_rows, size = logits.shape
    assert size <= MAX_VOCABULARY, f"{size} tokens: sums of masses may overflow beyond {MAX_VOCABULARY}"
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    if rows.edits is not None:
        _edit(logits, rows.edits)
    values, indices = argmax_parts(logits)
    num_parts, num_chunks = values.shape[1], triton.cdiv(size, _CHUNK)
    keys = torch.empty((num_rows, size), dtype=torch.int32, device=device)
    cuts = torch.empty(num_rows, dtype=torch.int32, device=device)
    masses = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    _keys_kernel[(num_rows, triton.cdiv(size, _KEY_BLOCK))](
        logits,
        values,
        indices,
        rows.temperature,
        keys,
        tokens,
        logits.stride(0),
        size,
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        BLOCK=_KEY_BLOCK,
        num_warps=8,
    )
    # torch's logarithm, so that a token at the limit is kept where the reference keeps it.
    _cut_kernel[(num_rows,)](
        keys,
        tokens,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p.log(),
        cuts,
        size,
        BLOCK=min(_SEARCH_BLOCK, triton.next_power_of_2(size)),
        num_warps=_SEARCH_WARPS,
    )
    _masses_kernel[(num_rows, num_chunks)](
        keys, tokens, rows.temperature, cuts, masses, size, num_chunks, CHUNK=_CHUNK, num_warps=4
    )
    _draw_kernel[(num_rows,)](
        keys,
        rows.temperature,
        cuts,
        masses,
        rows.seeds,
        rows.positions,
        tokens,
        size,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return tokens


def compile_cases(capability: int) -> list[CompileCase]:
    """Each kernel for a vocabulary of 151936."""
    types = {
        "i32": "num_parts num_chunks num_rows",
        "i32:16": "size logits_stride",
        "*fp32:16": "logits_ptr value_ptr temperature_ptr top_p_ptr log_min_p_ptr factors_ptr count_ptr "
        "bias_ptr saved_ptr",
        "*i32:16": "index_ptr key_ptr top_k_ptr cut_ptr starts_ptr penalty_id_ptr bias_id_ptr ban_id_ptr",
        "*i64:16": "best_ptr mass_ptr seed_ptr position_ptr token_ptr newest_ptr",
    }
    known: dict[str, Any] = {name: kind for kind, names in types.items() for name in names.split()}
    return [
        CompileCase(f"sampling-{name}", kernel, known | constants, dict(options))
        for name, kernel, constants, options in (
            ("edit", _edit_kernel, {"HAS_NEWEST": True, "BLOCK": _EDIT_BLOCK}, _EDIT_OPTIONS),
            ("keys", _keys_kernel, {"PARTS": 64, "BLOCK": _KEY_BLOCK}, {"num_warps": 8}),
            ("cut", _cut_kernel, {"BLOCK": _SEARCH_BLOCK}, {"num_warps": _SEARCH_WARPS}),
            ("masses", _masses_kernel, {"CHUNK": _CHUNK}, {"num_warps": 4}),
            ("draw", _draw_kernel, {"CHUNKS": 128, "CHUNK": _CHUNK}, {"num_warps": 4}),
        )
    ]
