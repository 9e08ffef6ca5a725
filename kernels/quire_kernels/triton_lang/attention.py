"""Paged attention in Triton: one kernel for sequences with one new token, one for longer queries.

Decode. The query heads that share a KV head are the rows of one tile, at least 16 for the tensor cores. A
context is cut into parts. Their number and borders do not depend on the other sequences in the batch, and so
neither does a result. A work item is a (sequence, part, KV head). A fixed number of programs divides the list
of items, each taking about an equal share of the key tiles. The sequence with which each program begins is
computed on the device, once per step for layers of the same shape (`_assign_kernel`). The grid of the decode
kernel depends on no length, so a CUDA graph can capture its launch. A second kernel merges the parts by their
log-sum-exp, as in flash-decoding (Dao et al., 2023).

Longer queries. Tiles of packed rows (query, head of the group) use an online softmax over tiles of keys
(FlashAttention-2, Dao, 2023). The grid is an upper bound from shapes; a program finds its sequence by
bisection in `query_start_loc`. Key tiles have fixed borders, which do not depend on how a prompt is cut into
chunks. Tile sizes are tuned at warm-up, except for float32 and heads wider than 128.

A mixed batch takes both kernels, each of which skips the other's sequences. In the tiles for long queries, a
single program would read the whole context of a decode token, and most of its tile would be padding.

Places in the cache that no token has written are not loaded in a step: 0 * NaN and -inf + NaN are NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, data_of
from quire_kernels.triton_lang import operators, tuning
from quire_kernels.triton_lang.compiler import SHARED_LIMIT, CompileCase
from quire_kernels.triton_lang.kv_memory import kind_of, kv_memory
from quire_kernels.triton_lang.numerics import from_e4m3_bits

MIN_SPLIT_TILES = 2
"""Least number of key tiles in a part of a context, except the last part. Merging shorter parts would cost
more than it saves."""
MOST_SPLITS = 64
"""Most parts of one context. It bounds the scratch memory, float32 [num_seqs, splits, num_heads,
head_dim]."""
PROGRAMS_PER_SM = 2
INTERPRETED_PROGRAMS = 5
MERGE_ROWS = 32
TUNED_TOKENS = 4096
"""Number of tokens in the prompt with which tiles of `_ragged_kernel` are timed."""
ASSIGN_ROWS = 1024

_LOG2_E = tl.constexpr(math.log2(math.e))


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles and its launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first position that the token at `position` sees."""
    if WINDOW:
        return tl.maximum(position - (WINDOW - 1), 0)
    else:
        return position * 0


@triton.jit
def _parts(  # type: ignore[no-untyped-def]
    seq_len, WINDOW: tl.constexpr, KEYS: tl.constexpr, MIN_TILES: tl.constexpr, SPLITS: tl.constexpr
):
    """Returns how the context of a sequence's last token is cut: (position of the first tile, tiles per part,
    number of parts)."""
    begin = _first_seen(seq_len - 1, WINDOW) // KEYS * KEYS
    tiles = (seq_len - begin + KEYS - 1) // KEYS
    per_part = tl.maximum((tiles + SPLITS - 1) // SPLITS, MIN_TILES)
    return begin, per_part, (tiles + per_part - 1) // per_part


@triton.jit
def _values(data, KIND: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Converts loaded keys or values to `dtype`, the type in which they are multiplied. Bits of e4m3 become
    1/256 of their values. The caller applies the factor 256 and the scales."""
    if KIND == 2:
        return from_e4m3_bits(data, dtype)
    elif data.dtype == dtype:
        return data
    else:
        return data.to(tl.float32).to(dtype)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    acc,
    peak,
    total,
    query,
    row_positions,
    kv,
    scales,
    table,
    begin,
    end,
    seen_from,
    seen_to,
    scale,
    softcap,
    kv_block_stride,
    kv_half_stride,
    kv_token_stride,
    scale_block_stride,
    scale_half_stride,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Runs the online softmax over the keys in [begin, end), tile by tile. Returns the new acc, peak and
    total.

    Args:
        acc: float32 [rows, WIDTH], the weighted sum of values so far.
        peak: float32 [rows], the largest score so far, in units of log2.
        total: float32 [rows], the sum of the weights so far.
        query: [rows, WIDTH].
        row_positions: int32 [rows], the position of each row's token.
        kv: pointer to the layer's keys of this KV head; values are kv_half_stride further.
        scales: pointer to their scales, if they are quantised.
        table: pointer to the sequence's row of the block table.
        seen_from: no row sees a position before this one. Earlier blocks may belong to another sequence.
        seen_to: no row sees this position or a later one. Such positions may never have been written.
        MASKED: False promises that [begin, end) consists of whole tiles, and that every row sees all of it.
    """
    dims = tl.arange(0, WIDTH)
    for start in tl.range(begin, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        if MASKED:
            written = (positions >= seen_from) & (positions < seen_to)
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=written, other=0)
            loaded = written[:, None] & (dims < HEAD_DIM)[None, :]
        else:
            written = positions >= 0
            blocks = tl.load(table + positions // BLOCK_SIZE)
            loaded = (positions >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = blocks.to(tl.int64) * kv_block_stride + (positions % BLOCK_SIZE) * kv_token_stride
        places = kv + offsets[:, None] + dims[None, :]
        if MASKED or WIDTH != HEAD_DIM:
            key_data = tl.load(places, mask=loaded, other=0)
            value_data = tl.load(places + kv_half_stride, mask=loaded, other=0)
        else:
            key_data = tl.load(places)
            value_data = tl.load(places + kv_half_stride)
        key = _values(key_data, KIND, query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if KIND:
            scale_places = scales + blocks.to(tl.int64) * scale_block_stride + positions % BLOCK_SIZE
            # The factor 256 that `from_e4m3_bits` leaves out.
            unit: tl.constexpr = 256.0 if KIND == 2 else 1.0
            if MASKED:
                key_scale = tl.load(scale_places, mask=written, other=0.0)
                value_scale = tl.load(scale_places + scale_half_stride, mask=written, other=0.0)
            else:
                key_scale = tl.load(scale_places)
                value_scale = tl.load(scale_places + scale_half_stride)
            scores *= (key_scale.to(tl.float32) * unit)[None, :]
        if SOFTCAP:
            # softcap * tanh(x) = softcap * (1 - 2 / (1 + exp(2 x))), which saturates instead of overflowing.
            grown = tl.exp2(scores * (scale * 2 / softcap) * _LOG2_E)
            scores = softcap * _LOG2_E * (1.0 - 2.0 / (1.0 + grown))
        else:
            scores *= scale * _LOG2_E
        if MASKED:
            seen = written[None, :] & (positions[None, :] <= row_positions[:, None])
            if WINDOW:
                seen &= positions[None, :] > row_positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has the peak -inf, and -inf - -inf is NaN.
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - finite[:, None])
        keep = tl.exp2(peak - finite)
        total = total * keep + tl.sum(weights, 1)
        if KIND:
            weights *= (value_scale.to(tl.float32) * unit)[None, :]
        value = _values(value_data, KIND, query.dtype)
        acc = tl.dot(weights.to(query.dtype), value, acc * keep[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit(
    do_not_specialize=["num_seqs", "num_programs", "steps"],
    do_not_specialize_on_alignment=["seq_lens", "query_start_loc"],
)
def _assign_kernel(  # type: ignore[no-untyped-def]
    work,
    first,
    seq_lens,
    query_start_loc,
    num_seqs,
    num_programs,
    steps,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Sums up the sequences' work, and finds the sequence with which each decode program begins.

    Args:
        work: int32 [num_seqs + 1], output: number of tiles in the work items of all earlier sequences.
            Only sequences with one new token have any. A context's last part counts as a whole one.
        first: int32 [num_programs], output: index of each program's first sequence.
        steps: steps of the bisection, at least log2(num_seqs) + 1.
        PROGRAMS: num_programs, rounded up to a power of two.
    """
    tl.store(work, 0)
    total = tl.load(seq_lens) * 0
    for base in range(0, num_seqs, ROWS):
        rows = base + tl.arange(0, ROWS)
        inside = rows < num_seqs
        seq_len = tl.load(seq_lens + rows, mask=inside, other=0)
        start = tl.load(query_start_loc + rows, mask=inside, other=0)
        stop = tl.load(query_start_loc + rows + 1, mask=inside, other=0)
        _, per_part, count = _parts(seq_len, WINDOW, KEYS, MIN_TILES, SPLITS)
        weights = tl.where((stop - start == 1) & (seq_len > 0), count * per_part * NUM_KV_HEADS, 0)
        tl.store(work + rows + 1, total + tl.cumsum(weights, 0), mask=inside)
        total += tl.sum(weights, 0)
    # The bisection reads what other threads stored.
    tl.debug_barrier()
    programs = tl.arange(0, PROGRAMS)
    begin = (programs.to(tl.int64) * total + num_programs - 1) // num_programs
    low = programs * 0
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(work + middle) <= begin
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    tl.store(first + programs, low, mask=programs < num_programs)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "partial_splits"],
    do_not_specialize_on_alignment=["seq_lens", "query_start_loc", "block_table"],
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    partial_lse,
    query,
    kv,
    scales,
    work,
    first,
    seq_lens,
    query_start_loc,
    block_table,
    num_seqs,
    table_stride,
    partial_splits,
    scale,
    softcap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    kv_block_stride,
    kv_half_stride,
    kv_head_stride,
    kv_token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Computes attention of sequences with one new token. It writes the result if the context is one part,
    otherwise the results of its parts.

    Args:
        partial: float32 [num_seqs, partial_splits, num_heads, HEAD_DIM], output: results of parts.
        partial_lse: float32 [num_seqs, partial_splits, num_heads], output: log2 of the parts' sums of
            weights.
        work: see `_assign_kernel`.
        first: see `_assign_kernel`.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    total = tl.load(work + num_seqs).to(tl.int64)
    # Items whose first tile lies in [position, stop) are this program's.
    position = (program * total + num_programs - 1) // num_programs
    stop = ((program + 1) * total + num_programs - 1) // num_programs
    sequence = tl.load(first + program)
    base = tl.load(work + sequence)
    _, per_part, _ = _parts(tl.load(seq_lens + sequence), WINDOW, KEYS, MIN_TILES, SPLITS)
    position = base + (position - base + per_part - 1) // per_part * per_part

    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    inside = (heads < GROUPS)[:, None] & (dims < HEAD_DIM)[None, :]
    while position < stop:
        # Sequences of other kernels, and padding, weigh nothing.
        while tl.load(work + sequence + 1) <= position:
            sequence += 1
        base = tl.load(work + sequence)
        seq_len = tl.load(seq_lens + sequence)
        begin, per_part, count = _parts(seq_len, WINDOW, KEYS, MIN_TILES, SPLITS)
        item = ((position - base) // per_part).to(tl.int32)
        part = item // NUM_KV_HEADS
        kv_head = item % NUM_KV_HEADS
        row = tl.load(query_start_loc + sequence).to(tl.int64)
        head_rows = kv_head * GROUPS + heads
        queries = tl.load(
            query + row * query_token_stride + head_rows[:, None] * query_head_stride + dims[None, :],
            mask=inside,
            other=0.0,
        )
        begin += part * per_part * KEYS
        acc, peak, weight = _walk(
            tl.zeros([ROWS, WIDTH], tl.float32),
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            queries,
            tl.zeros([ROWS], tl.int32) + (seq_len - 1),
            kv + kv_head.to(tl.int64) * kv_head_stride,
            scales + kv_head.to(tl.int64) * scale_head_stride,
            block_table + sequence.to(tl.int64) * table_stride,
            begin,
            tl.minimum(begin + per_part * KEYS, seq_len),
            _first_seen(seq_len - 1, WINDOW),
            seq_len,
            scale,
            softcap,
            kv_block_stride,
            kv_half_stride,
            kv_token_stride,
            scale_block_stride,
            scale_half_stride,
            True,
            WINDOW,
            SOFTCAP,
            KIND,
            KEYS,
            BLOCK_SIZE,
            HEAD_DIM,
            WIDTH,
        )
        acc /= weight[:, None]
        if count == 1:
            places = out + row * out_token_stride + head_rows[:, None] * HEAD_DIM + dims[None, :]
            tl.store(places, acc.to(out.dtype.element_ty), mask=inside)
        else:
            at = (sequence.to(tl.int64) * partial_splits + part) * (NUM_KV_HEADS * GROUPS) + head_rows
            tl.store(partial + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
            tl.store(partial_lse + at, peak + tl.log2(weight), mask=heads < GROUPS)
        position += per_part


@triton.jit(
    do_not_specialize=["partial_splits"],
    do_not_specialize_on_alignment=["seq_lens", "query_start_loc"],
)
def _merge_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    partial_lse,
    seq_lens,
    query_start_loc,
    partial_splits,
    out_token_stride,
    NUM_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges the results that `_decode_kernel` wrote for the parts of a context, weighted by the parts' sums
    of weights. Padding rows, without a context, become 0."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - row != 1:
        return
    _, _, count = _parts(tl.load(seq_lens + sequence), WINDOW, KEYS, MIN_TILES, SPLITS)
    if count == 1:
        return
    dims = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    weight = tl.zeros([1], tl.float32)
    for base in range(0, count, ROWS):
        parts = base + tl.arange(0, ROWS)
        at = (sequence.to(tl.int64) * partial_splits + parts) * NUM_HEADS + head
        lse = tl.load(partial_lse + at, mask=parts < count, other=float("-inf"))
        inside = (parts < count)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - finite)
        keep = tl.exp2(peak - finite)
        acc = acc * keep + tl.sum(values * weights[:, None], 0)
        weight = weight * keep + tl.sum(weights, 0)
        peak = new_peak
    result = tl.where(count == 0, 0.0, acc / weight)
    places = out + row.to(tl.int64) * out_token_stride + head * HEAD_DIM + dims
    tl.store(places, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["seq_lens", "query_start_loc", "block_table"],
)
def _ragged_kernel(  # type: ignore[no-untyped-def]
    out,
    query,
    kv,
    scales,
    seq_lens,
    query_start_loc,
    block_table,
    num_seqs,
    table_stride,
    scale,
    softcap,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    kv_block_stride,
    kv_half_stride,
    kv_head_stride,
    kv_token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes attention of sequences with several new tokens. A program computes at most ROWS // GROUPS
    queries of one sequence, for one KV head."""
    QUERIES: tl.constexpr = ROWS // GROUPS
    # The last tiles of a prompt see the most: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # Sequence i gets the tiles from query_start_loc[i] // QUERIES + i on: never too few, and increasing in i.
    sequence = num_seqs * 0
    high = num_seqs
    while high - sequence > 1:
        middle = (sequence + high) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= tile:
            sequence = middle
        else:
            high = middle
    start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    first_query = (tile - start // QUERIES - sequence) * QUERIES
    if (query_len <= 1) | (first_query >= query_len):
        return
    seq_len = tl.load(seq_lens + sequence)

    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUPS
    live = (rows < QUERIES * GROUPS) & (queries < query_len)
    heads = kv_head * GROUPS + rows % GROUPS
    dims = tl.arange(0, WIDTH)
    inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    batch_rows = (start + queries).to(tl.int64)
    tile_query = tl.load(
        query + (batch_rows * query_token_stride + heads * query_head_stride)[:, None] + dims[None, :],
        mask=inside,
        other=0.0,
    )
    context = seq_len - query_len
    row_positions = context + queries
    low = context + first_query
    last = context + tl.minimum(first_query + QUERIES, query_len) - 1
    seen_from = _first_seen(low, WINDOW)
    end = last + 1
    # Key tiles [begin, inner), masked, are seen in part because of the window; [inner, outer) are seen by all
    # rows; [outer, end) are seen in part because of causality.
    begin = seen_from // KEYS * KEYS
    inner = begin
    if WINDOW:
        inner = tl.minimum((_first_seen(last, WINDOW) + KEYS - 1) // KEYS * KEYS, end)
    outer = tl.maximum((low + 1) // KEYS * KEYS, inner)

    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    kv += kv_head.to(tl.int64) * kv_head_stride
    scales += kv_head.to(tl.int64) * scale_head_stride
    block_table += sequence.to(tl.int64) * table_stride
    for phase in tl.static_range(3):
        if phase != 0 or WINDOW:
            acc, peak, weight = _walk(
                acc,
                peak,
                weight,
                tile_query,
                row_positions,
                kv,
                scales,
                block_table,
                begin if phase == 0 else (inner if phase == 1 else outer),
                inner if phase == 0 else (outer if phase == 1 else end),
                seen_from,
                end,
                scale,
                softcap,
                kv_block_stride,
                kv_half_stride,
                kv_token_stride,
                scale_block_stride,
                scale_half_stride,
                phase != 1,
                WINDOW,
                SOFTCAP,
                KIND,
                KEYS,
                BLOCK_SIZE,
                HEAD_DIM,
                WIDTH,
            )
    acc /= weight[:, None]
    places = out + (batch_rows * out_token_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See `ops.paged_attention`.

    While a CUDA graph is captured, the first call computes the plan of `_assigned`, so that each replay
    computes the plan again. Each capture needs a metadata object of its own, because one that an earlier
    capture used already has a plan.
    """
    data = data_of(kv_layer)
    assert query.shape[0] == meta.num_tokens, "one query row per token of the batch"
    assert query.shape[1] % data.shape[2] == 0, "query heads are a multiple of the KV heads"
    assert data.stride(4) == 1, "the numbers of a head are neighbours"
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # A captured step decodes only, so max_query_len is the one number of the host that it depends on.
    if meta.max_query_len == 1 or 1 in meta.query_lens:
        _decode(out, query, kv_layer, meta, scale, sliding_window or 0, softcap)
    if meta.max_query_len > 1:
        _ragged(out, query, kv_layer, meta, scale, sliding_window or 0, softcap)
    return out


def _decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float | None,
) -> None:
    data = data_of(kv_layer)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = data.shape[2:4]
    num_seqs, table_width = meta.block_table.shape
    groups, width = num_heads // num_kv_heads, _width(head_dim)
    tiles = decode_tiles(width, groups, query.dtype, data.dtype, _capability(query.device))
    num_programs = _num_programs(query.device)
    splits = most_splits(num_programs, num_kv_heads)
    # No context is longer than the table.
    most_tiles = triton.cdiv(table_width * block_size, tiles.keys)
    partial_splits = min(splits, triton.cdiv(most_tiles, MIN_SPLIT_TILES))
    work, first = _assigned(meta, num_kv_heads, window, tiles.keys, num_programs, splits)
    partial = query.new_empty((num_seqs, partial_splits, num_heads, head_dim), dtype=torch.float32)
    partial_lse = query.new_empty((num_seqs, partial_splits, num_heads), dtype=torch.float32)
    kv, scales, strides = kv_memory(kv_layer)
    _decode_kernel[(num_programs,)](
        out,
        partial,
        partial_lse,
        query,
        kv,
        scales,
        work,
        first,
        meta.seq_lens,
        meta.query_start_loc,
        meta.block_table,
        num_seqs,
        meta.block_table.stride(0),
        partial_splits,
        scale,
        1.0 if softcap is None else softcap,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        *strides,
        NUM_KV_HEADS=num_kv_heads,
        **_options(query, kv_layer, window, softcap, tiles),
        MIN_TILES=MIN_SPLIT_TILES,
        SPLITS=splits,
    )
    _merge_kernel[(num_seqs, num_heads)](
        out,
        partial,
        partial_lse,
        meta.seq_lens,
        meta.query_start_loc,
        partial_splits,
        out.stride(0),
        NUM_HEADS=num_heads,
        WINDOW=window,
        KEYS=tiles.keys,
        HEAD_DIM=head_dim,
        WIDTH=width,
        MIN_TILES=MIN_SPLIT_TILES,
        SPLITS=splits,
        ROWS=MERGE_ROWS,
        num_warps=4,
    )


def _ragged(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float | None,
) -> None:
    data = data_of(kv_layer)
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = data.shape[2]
    kinds = _width(head_dim), num_heads // num_kv_heads, query.dtype, data.dtype, _capability(query.device)
    # Made once: what is timed is the kernel.
    long_prompt = functools.cache(lambda: _long_prompt(query, kv_layer))

    def run(config: tuning.Config) -> None:
        _launch_ragged(*long_prompt(), scale, window, softcap, _as_tiles(config))

    config = tuning.tuner_of(query.device).choose(
        _ragged_key(*kinds, data.shape[3], bool(window), softcap is not None),
        _as_config(ragged_tiles(*kinds)),
        lambda: [_as_config(tiles) for tiles in ragged_candidates(*kinds)],
        run,
    )
    _launch_ragged(out, query, kv_layer, meta, scale, window, softcap, _as_tiles(config))


@functools.cache
def _ragged_key(
    width: int,
    groups: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: int,
    block_size: int,
    has_window: bool,
    has_softcap: bool,
) -> str:
    shape: dict[str, int | str] = {
        "width": width,
        "groups": groups,
        "dtype": str(dtype),
        "kv_dtype": str(kv_dtype),
        "block_size": block_size,
        "window": has_window,
        "softcap": has_softcap,
    }
    return tuning.kernel_key("attention", tuning.source_hash(__file__), shape)


def _as_config(tiles: Tiles) -> tuning.Config:
    return tuning.Config.build(tiles.num_warps, tiles.num_stages, ROWS=tiles.rows, KEYS=tiles.keys)


def _as_tiles(config: tuning.Config) -> Tiles:
    return Tiles(config["ROWS"], config["KEYS"], config.num_warps, config.num_stages)


def _long_prompt(
    query: torch.Tensor, kv_layer: KVLayer
) -> tuple[torch.Tensor, torch.Tensor, KVLayer, AttentionMetadata]:
    """Returns (result, query, layer, batch) of a prompt of TUNED_TOKENS. All its blocks are the layer's first
    block, so that timing measures the products."""
    block_size = data_of(kv_layer).shape[3]
    blocks = [0] * -(-TUNED_TOKENS // block_size)
    meta = AttentionMetadata.build([TUNED_TOKENS], [TUNED_TOKENS], [blocks], block_size, query.device)
    rows = torch.randn(TUNED_TOKENS, *query.shape[1:], dtype=query.dtype, device=query.device)
    return torch.empty_like(rows), rows, kv_layer, meta


def _launch_ragged(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    window: int,
    softcap: float | None,
    tiles: Tiles,
) -> None:
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = data_of(kv_layer).shape[2]
    num_seqs = meta.block_table.shape[0]
    kv, scales, strides = kv_memory(kv_layer)
    programs = num_tokens // (tiles.rows // (num_heads // num_kv_heads)) + num_seqs
    _ragged_kernel[(programs, num_kv_heads)](
        out,
        query,
        kv,
        scales,
        meta.seq_lens,
        meta.query_start_loc,
        meta.block_table,
        num_seqs,
        meta.block_table.stride(0),
        scale,
        1.0 if softcap is None else softcap,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        *strides,
        **_options(query, kv_layer, window, softcap, tiles),
    )


def _options(
    query: torch.Tensor, kv_layer: KVLayer, window: int, softcap: float | None, tiles: Tiles
) -> dict[str, Any]:
    """Returns the constants and launch options that `_decode_kernel` and `_ragged_kernel` have in common."""
    data = data_of(kv_layer)
    num_kv_heads, block_size, head_dim = data.shape[2:]
    return {
        "GROUPS": query.shape[1] // num_kv_heads,
        "WINDOW": window,
        "SOFTCAP": softcap is not None,
        "KIND": kind_of(data.dtype),
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "WIDTH": _width(head_dim),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _assigned(
    meta: AttentionMetadata, num_kv_heads: int, window: int, keys: int, num_programs: int, splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `work` and `first` of `_assign_kernel`, computed once per step for all layers with the same
    arguments."""
    device = meta.seq_lens.device
    # What was computed outside a graph is not computed by its replay.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        num_seqs = meta.block_table.shape[0]
        work = torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
        first = torch.empty(num_programs, dtype=torch.int32, device=device)
        _assign_kernel[(1,)](
            work,
            first,
            meta.seq_lens,
            meta.query_start_loc,
            num_seqs,
            num_programs,
            num_seqs.bit_length() + 1,
            NUM_KV_HEADS=num_kv_heads,
            WINDOW=window,
            KEYS=keys,
            MIN_TILES=MIN_SPLIT_TILES,
            SPLITS=splits,
            ROWS=ASSIGN_ROWS,
            PROGRAMS=triton.next_power_of_2(num_programs),
            num_warps=8,
        )
        return work, first

    return meta.shared_plan(("triton", num_kv_heads, window, keys, num_programs, splits, capturing), make)


def most_splits(num_programs: int, num_kv_heads: int) -> int:
    """Returns the number of parts with which a single sequence occupies every program, at most MOST_SPLITS.
    It depends on the model and the GPU, not on the batch."""
    return min(triton.cdiv(num_programs, num_kv_heads), MOST_SPLITS)


def decode_tiles(
    width: int, groups: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: int
) -> Tiles:
    """Returns the tiles of `_decode_kernel`. The key tiles that two programs have in flight fit together in
    the bytes of SHARED_LIMIT.

    The compiler gives half of the stages to the loads of block ids, for which the loads of keys and values
    wait. With 3 stages one tile of each is in flight, with 5 stages two, with 2 none.
    """
    rows = max(16, triton.next_power_of_2(groups))
    if capability == 0:
        return Tiles(rows, 64, 4, 3)
    num_stages = 3 if capability == 89 else 5
    tiles_in_flight = (num_stages - 1) // 2
    keys = 64
    itemsize = max(dtype.itemsize, kv_dtype.itemsize)
    while keys > 16 and 2 * tiles_in_flight * keys * width * itemsize > SHARED_LIMIT[capability] * 9 // 20:
        keys //= 2
    return Tiles(rows, keys, 4, num_stages)


def ragged_tiles(
    width: int, groups: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: int
) -> Tiles:
    """Returns the default tiles of `_ragged_kernel`. For the stages see `decode_tiles`."""
    least = triton.next_power_of_2(groups)
    if capability == 0:
        return Tiles(max(64, least), 64, 4, 3)
    if dtype == torch.float32:
        # Without tensor cores: for tests and small models.
        return Tiles(max(32, least), 32 if width <= 128 else 16, 4, 2)
    # What eight bits become is in registers, and before wgmma so are all operands: wider tiles spill.
    keys = 64
    if capability < 90 and (kind_of(kv_dtype) or width > 128):
        keys = 32
    if width <= 128:
        # 421 TFLOP/s of a prompt of 8192 on an H200, though some registers spill; 128 rows have 323.
        return Tiles(256 if capability == 90 and not kind_of(kv_dtype) else 128, keys, 8, 3)
    return Tiles(64, keys, 8, 2 if capability >= 90 else 3)


def ragged_candidates(
    width: int, groups: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: int
) -> list[Tiles]:
    """Returns tiles that may be faster than those of `ragged_tiles`. Some may not fit the device: the tuner
    passes over these."""
    if dtype == torch.float32 or width > 128:
        return []
    candidates = [Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 3), Tiles(256, 64, 8, 3)]
    return [tiles for tiles in candidates if tiles.rows >= groups]


def _width(head_dim: int) -> int:
    width: int = triton.next_power_of_2(head_dim)
    return width


@functools.cache
def _capability(device: torch.device) -> int:
    """Returns the highest compute capability in SHARED_LIMIT that the device has, or 80 if it has less; 0:
    kernels are interpreted."""
    if operators.is_interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in SHARED_LIMIT if known <= 10 * major + minor), default=80)


@functools.cache
def _num_programs(device: torch.device) -> int:
    if operators.is_interpreted():
        return INTERPRETED_PROGRAMS
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


class _Shape(NamedTuple):
    """Shape of a model's attention, for which `compile_cases` returns cases."""

    name: str
    num_kv_heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    window: int = 0
    softcap: bool = False


_SHAPES = (
    _Shape("llama-8b", 8, 4, 128),
    _Shape("llama-1b", 8, 4, 64, block_size=32),
    _Shape("qwen2-0.5b", 2, 7, 64),
    _Shape("mha-fp16", 32, 1, 128, torch.float16, torch.float16),
    _Shape("mistral-window", 8, 4, 128, window=4096),
    _Shape("gemma2-9b", 8, 2, 256, window=4096, softcap=True),
    _Shape("phi3-head96", 32, 1, 96),
    _Shape("llama-8b-int8", 8, 4, 128, kv_dtype=torch.int8),
    _Shape("llama-8b-fp8", 8, 4, 128, kv_dtype=torch.float8_e4m3fn),
    _Shape("tiny-fp32", 2, 2, 64, torch.float32, torch.float32),
)
_COMPILED_PROGRAMS = 2 * 132
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compile_cases(capability: int) -> list[CompileCase]:
    """Returns cases for decode and longer queries of models with common shapes, and one case each for
    planning a step and for merging parts."""
    cases: list[CompileCase] = []
    for shape in _SHAPES:
        dtype, width, kind = _TYPES[shape.dtype], _width(shape.head_dim), kind_of(shape.kv_dtype)
        kv_type = _TYPES.get(shape.kv_dtype, "i8")
        # Whether the pointers and strides that a launch passes are multiples of 16.
        types = (
            (f"*{dtype}:16", "out query"),
            (f"*{kv_type}:16", "kv"),
            ("*bf16:16" if kind else f"*{kv_type}:16", "scales"),
            ("*i32", "seq_lens query_start_loc block_table"),
            ("*i32:16", "work first"),
            ("*fp32:16", "partial partial_lse"),
            ("i32", "num_seqs table_stride partial_splits num_programs steps scale_head_stride"),
            ("fp32", "scale softcap"),
        )
        arguments: dict[str, Any] = {name: type_ for type_, names in types for name in names.split()}
        strides = "query_token query_head out_token kv_block kv_half kv_head kv_token scale_block scale_half"
        arguments |= {f"{name}_stride": "i32:16" for name in strides.split()}
        arguments |= {
            "NUM_HEADS": shape.num_kv_heads * shape.groups,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "GROUPS": shape.groups,
            "WINDOW": shape.window,
            "SOFTCAP": shape.softcap,
            "KIND": kind,
            "BLOCK_SIZE": shape.block_size,
            "HEAD_DIM": shape.head_dim,
            "WIDTH": width,
            "MIN_TILES": MIN_SPLIT_TILES,
            "SPLITS": most_splits(_COMPILED_PROGRAMS, shape.num_kv_heads),
            "PROGRAMS": triton.next_power_of_2(_COMPILED_PROGRAMS),
        }
        sizes = width, shape.groups, shape.dtype, shape.kv_dtype, capability
        decode = decode_tiles(*sizes)
        for name, kernel, tiles in (
            ("decode", _decode_kernel, decode),
            ("ragged", _ragged_kernel, ragged_tiles(*sizes)),
        ):
            cases.append(
                CompileCase(
                    f"attention.{name}.{shape.name}",
                    kernel,
                    arguments | {"ROWS": tiles.rows, "KEYS": tiles.keys},
                    {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
                    # float32 is not shortened to a type that they take.
                    tensor_cores=shape.dtype != torch.float32,
                )
            )
        if shape is _SHAPES[0]:
            arguments["KEYS"] = decode.keys
            merge, assign = arguments | {"ROWS": MERGE_ROWS}, arguments | {"ROWS": ASSIGN_ROWS}
            cases.append(CompileCase("attention.merge", _merge_kernel, merge, {"num_warps": 4}))
            cases.append(CompileCase("attention.assign", _assign_kernel, assign, {"num_warps": 8}))
    return cases
