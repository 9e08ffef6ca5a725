"""Paged attention in PyTorch: decode rows together, longer queries tile by tile.

Sequences with one new token are grouped by context length. A group's blocks are gathered into padded tensors
and computed with two batched products. Longer queries, and contexts too long to gather at once, use an online
softmax over tiles of keys, so scratch memory grows with the tile and not with the square of the context.
Tiles of keys begin at multiples of their size, however a prompt is cut into chunks. Only the first tile of a
sliding window begins at the window's first block.

Quantised keys and values are gathered in eight bits. Each has one scale per position and head. Scales of keys
are applied to the scores, scales of values to the softmax's weights, because the data are head_dim times
larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, QuantizedKV, data_of
from quire_kernels.registry import implementation

_Ints = npt.NDArray[np.int64]

GATHER_BYTES = 64 * 2**20
"""Most bytes of keys and values, counted as float32, that a group of decode rows gathers. A longer context is
computed tile by tile."""
CPU_GROUP_BYTES = 4 * 2**20
"""Most bytes, counted as float32, that a group of several decode rows gathers on the CPU. The copy then
usually stays in the CPU cache, and in memory that the allocator keeps (mapping new memory costs more than the
copy)."""
QUERY_TILE = 512
"""Most query rows of one sequence that are computed together."""
KEY_TILE = 512
"""Positions in a full tile of keys, rounded down to whole blocks, but at least one block."""


@dataclass(frozen=True)
class _DecodeGroup:
    """Decode rows with contexts of similar length. Their lists of blocks are padded to the same length."""

    rows: torch.Tensor
    """int64 [n]: batch rows."""
    num_blocks: int
    mask: torch.Tensor | None
    """float32 [n, 1, 1, num_blocks * block_size]: -inf at positions that are not seen, else 0; None: all are
    seen."""
    unwritten: tuple[Any, ...] | None
    """Index into [n, num_kv_heads, num_blocks * block_size, any] of gathered slots that the row's sequence
    may not have written; None: there are none."""


@dataclass(frozen=True)
class _Tile:
    """Some blocks of one sequence, and the mask of a query tile over them."""

    blocks: slice
    """Columns of these blocks in the sequence's row of the block table."""
    mask: torch.Tensor | None
    """float32 [num_queries, num_blocks * block_size]: -inf at positions that are not seen, else 0; None: all
    are seen."""
    written: int
    """Number of positions, from the first of the blocks on, that are certain to have been written. Those of
    later blocks count too."""


@dataclass(frozen=True)
class _QueryTile:
    """Batch rows [start, stop) of one sequence, and the key tiles that they see."""

    sequence: int
    start: int
    stop: int
    keys: list[_Tile]


@dataclass(frozen=True)
class _Plan:
    """How a batch is computed, whichever blocks its tokens are in. KV groups with the same window and block
    shape usually share a plan."""

    decode: list[_DecodeGroup]
    places: torch.Tensor
    """int64 [sum of n * num_blocks over `decode`]: indices, in the flattened block table, of its blocks."""
    tiles: list[_QueryTile]


@dataclass(frozen=True)
class _PlacedPlan:
    """A plan with the block ids of one KV group."""

    decode: list[tuple[_DecodeGroup, torch.Tensor]]
    """Decode groups, each with block ids int64 [n, num_blocks], padded with valid ids."""
    tiles: list[_QueryTile]
    table: torch.Tensor
    """Block table, int64 [num_seqs, max_blocks]: block ids of each sequence."""


@implementation("paged_attention", "reference", is_recordable=False)
def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.paged_attention`."""
    _, _, num_kv_heads, block_size, head_dim = data_of(kv_layer).shape
    num_tokens, num_heads, _ = query.shape
    assert num_tokens == meta.num_tokens, "one query row per token of the batch"
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of the KV heads"
    # Both halves of a block in float32, which is what the products work in.
    block_bytes = 2 * num_kv_heads * block_size * head_dim * 4
    plan = _plan(meta, block_size, block_bytes, sliding_window)
    # [num_tokens, num_kv_heads, groups, head_dim]: heads that share keys are neighbours.
    grouped = (query.float() * scale).view(num_tokens, num_kv_heads, -1, head_dim)
    # [num_kv_heads, groups, 1]
    columns = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
    if len(plan.decode) == 1 and not plan.tiles:
        out = _decode(grouped, kv_layer, *plan.decode[0], softcap, columns)
    else:
        out = torch.empty_like(grouped)
        for group, blocks in plan.decode:
            out[group.rows] = _decode(grouped[group.rows], kv_layer, group, blocks, softcap, columns)
        for tile in plan.tiles:
            rows = slice(tile.start, tile.stop)
            out[rows] = _tiled(grouped[rows], kv_layer, tile, plan.table[tile.sequence], softcap, columns)
    return out.view(num_tokens, num_heads, head_dim).to(query.dtype)


class _Context(NamedTuple):
    """Keys and values of gathered blocks, in float32."""

    key: torch.Tensor
    """[..., num_kv_heads, num_blocks * block_size, head_dim]; not yet multiplied by the scale if
    quantised."""
    value: torch.Tensor
    """Values, as `key`."""
    key_scale: torch.Tensor | None
    """[..., num_kv_heads, 1, num_blocks * block_size]; None: not quantised."""
    value_scale: torch.Tensor | None
    """Scales of the values, as `key_scale`."""

    def scores(self, query: torch.Tensor, softcap: float | None) -> torch.Tensor:
        """Returns scores [..., num_kv_heads, n, num_blocks * block_size] of query [..., num_kv_heads, n,
        head_dim]."""
        scores = query @ self.key.transpose(-1, -2)
        if self.key_scale is not None:
            scores *= self.key_scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return scores

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the values, [..., num_kv_heads, n, head_dim]. `weights` have the
        scores' shape and may be overwritten."""
        if self.value_scale is not None:
            weights *= self.value_scale
        return weights @ self.value

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns memory [..., num_kv_heads, num_blocks * block_size, any] of keys and values. Where a caller
        writes 0, the key or value counts as 0.

        Quantised data is finite in float32, whatever its bits (see `_to_float`), so it is enough to set its
        scale to 0.
        """
        if self.key_scale is None or self.value_scale is None:
            return self.key, self.value
        return self.key_scale.transpose(-1, -2), self.value_scale.transpose(-1, -2)


def gather_context(kv_layer: KVLayer, blocks: torch.Tensor) -> _Context:
    """Gathers the contents of blocks, int64 [n, num_blocks] or [num_blocks]."""
    if not isinstance(kv_layer, QuantizedKV):
        key, value = gather_blocks(kv_layer, blocks)
        return _Context(key.float(), value.float(), None, None)
    key, value = gather_blocks(kv_layer.data, blocks)
    scales = gather_blocks(kv_layer.scales, blocks)
    # `_to_float` gives 1/256 of float8 values; the scale has the factor 256.
    factor = 256.0 if kv_layer.data.dtype == torch.float8_e4m3fn else 1.0
    key_scale, value_scale = (scale.float().mul_(factor).unsqueeze(-2) for scale in scales)
    return _Context(_to_float(key), _to_float(value), key_scale, value_scale)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the two halves of blocks into [..., num_kv_heads, num_blocks * block_size, *inner] each. If
    values are the keys, it returns one copy twice.

    Args:
        cache: [num_blocks, 2, num_kv_heads, block_size, *inner] (a layer's keys and values, or their scales);
            each head of a block is contiguous.
        blocks: int64 [n, num_blocks] or [num_blocks].
    """
    _, _, num_kv_heads, block_size, *inner = cache.shape
    per_block, per_half, pitch = cache.stride()[:3]
    size = block_size * math.prod(inner)
    assert cache[0, 0, 0].is_contiguous()
    # Heads lie a multiple of this apart, but not always of their size: a block may be larger than its keys.
    unit = math.gcd(per_block, per_half, pitch)
    per_block, per_half, per_head = per_block // unit, per_half // unit, pitch // unit
    # Some rows of this matrix are the heads of the blocks: gathering rows in the order of the result copies
    # each byte once, where gathering blocks and transposing would copy it twice.
    rows = (cache.shape[0] - 1) * per_block + per_half + (num_kv_heads - 1) * per_head + 1
    pieces = cache.as_strided((rows, size), (unit, 1))
    if cache.dtype == torch.float8_e4m3fn:
        # As bytes: not every device can index float8.
        pieces = pieces.view(torch.int8)
    heads = torch.arange(num_kv_heads, device=blocks.device).unsqueeze(1) * per_head
    index = blocks.unsqueeze(-2) * per_block + heads
    shape = (*blocks.shape[:-1], num_kv_heads, blocks.shape[-1] * block_size, *inner)
    first = pieces.index_select(0, index.reshape(-1)).view(cache.dtype).view(shape)
    if per_half == 0:  # values are keys
        return first, first
    second = pieces.index_select(0, (index + per_half).reshape(-1)).view(cache.dtype).view(shape)
    return first, second


def _to_float(data: torch.Tensor) -> torch.Tensor:
    """Converts int8 to its value, and float8_e4m3fn to 1/256 of its value, in float32. No result is NaN or
    infinite.

    The bits of an e4m3 number are moved to float16's places: 4 bits of exponent to the lower ones of 5, 3 of
    mantissa to the upper ones of 10. That is a float16 number whose exponent is 8 less, also if subnormal.
    NaN becomes 480 / 256, with its sign. On the CPU this is faster than PyTorch's own conversion.
    """
    if data.dtype == torch.int8:
        return data.float()
    # The sign is extended over the upper byte; it belongs into the highest bit only.
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).float()


def _decode(
    query: torch.Tensor,
    kv_layer: KVLayer,
    group: _DecodeGroup,
    blocks: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention of decode rows, in the query's shape.

    Args:
        query: float32 [n, num_kv_heads, groups, head_dim], already scaled.
        blocks: int64 [n, num_blocks]: block ids of the rows' contexts.
        sinks: [num_kv_heads, groups, 1].
    """
    context = gather_context(kv_layer, blocks)
    if group.unwritten is not None:
        # What lies behind a sequence's end may be anything, even NaN of another request, which neither adding
        # -inf nor multiplying with 0 removes.
        for factor in context.factors:
            factor[group.unwritten] = 0.0
    scores = context.scores(query, softcap)
    if group.mask is not None:
        scores += group.mask
    if sinks is None:
        return context.weighted(torch.softmax(scores, dim=-1))
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return context.weighted(torch.softmax(scores, dim=-1)[..., :-1])


def _tiled(
    query: torch.Tensor,
    kv_layer: KVLayer,
    tile: _QueryTile,
    blocks: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention of a query tile of one sequence, one key tile after the other, in the query's shape.

    Args:
        query: float32 [n, num_kv_heads, groups, head_dim], already scaled: the tile's rows.
        blocks: int64 [max_blocks]: the sequence's row of the block table.
        sinks: [num_kv_heads, groups, 1].
    """
    count, num_kv_heads, groups, head_dim = query.shape
    # [num_kv_heads, groups * n, head_dim]
    flat = query.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * count, head_dim)
    if sinks is None:
        top = flat.new_full((num_kv_heads, groups * count, 1), float("-inf"))
        total = torch.zeros_like(top)
    else:
        top = sinks.repeat_interleave(count, dim=1)
        total = torch.ones_like(top)
    out = torch.zeros_like(flat)
    for keys in tile.keys:
        context = gather_context(kv_layer, blocks[keys.blocks])
        for factor in context.factors:
            factor[:, keys.written :] = 0.0
        scores = context.scores(flat, softcap)
        if keys.mask is not None:
            scores.view(num_kv_heads, groups, count, -1).add_(keys.mask)
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is NaN.
        finite = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = torch.exp(scores - finite)
        keep = torch.exp(top - finite)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + context.weighted(weights)
        top = peak
    return (out / total).view(num_kv_heads, groups, count, head_dim).permute(2, 0, 1, 3)


def _plan(
    meta: AttentionMetadata, block_size: int, block_bytes: int, sliding_window: int | None
) -> _PlacedPlan:
    """Returns the batch's plan with the blocks of this KV group. The first call makes it."""
    key = ("reference", block_size, block_bytes, sliding_window)

    def place() -> _PlacedPlan:
        plan = meta.shared_plan(
            (*key, meta.block_table.shape[1]),
            lambda: _make_plan(meta, block_size, block_bytes, sliding_window),
        )
        return _place(plan, meta.block_table)

    return meta.plan(key, place)


def _place(plan: _Plan, block_table: torch.Tensor) -> _PlacedPlan:
    """Looks up the block ids of a plan in the block table."""
    table = block_table.long()
    shapes = [(len(group.rows), group.num_blocks) for group in plan.decode]
    blocks = table.take(plan.places).split_with_sizes([math.prod(shape) for shape in shapes])
    decode = [
        (group, part.view(shape)) for group, part, shape in zip(plan.decode, blocks, shapes, strict=True)
    ]
    return _PlacedPlan(decode, plan.tiles, table)


def _make_plan(
    meta: AttentionMetadata, block_size: int, block_bytes: int, sliding_window: int | None
) -> _Plan:
    """Makes a plan from a batch's lengths, `joint`, and the block table's width and device; it does not read
    the table's content."""
    device = meta.block_table.device
    query_lens, seq_lens = np.array(meta.query_lens), np.array(meta.seq_lens_list)
    starts = query_lens.cumsum() - query_lens
    # What a sequence's last token sees begins here.
    seen_from = np.zeros_like(seq_lens) if sliding_window is None else (seq_lens - sliding_window).clip(0)
    first = seen_from // block_size
    num_blocks = -(-seq_lens // block_size) - first
    alone = (query_lens > 1) | (num_blocks * block_bytes > GATHER_BYTES)
    tiles = [
        tile
        for sequence in alone.nonzero()[0].tolist()
        for tile in _query_tiles(meta, sequence, int(starts[sequence]), block_size, sliding_window)
    ]
    sequences = (~alone).nonzero()[0]
    if not len(sequences):
        return _Plan([], torch.empty(0, dtype=torch.int64, device=device), tiles)

    # Ascending, so that a group's padding is bounded by its last and longest row.
    ascending = sequences[num_blocks[sequences].argsort(kind="stable")]
    group_bytes = CPU_GROUP_BYTES if device.type == "cpu" else GATHER_BYTES
    sizes, widths = _split(num_blocks[ascending].tolist(), group_bytes // block_bytes)
    if len(sizes) > 1 or tiles:
        sequences = ascending
    # Else it is the whole batch, in its own order: no rows need to be picked out or put back.

    # Arrays over the rows of all groups: there may be as many groups as rows.
    first, num_blocks = first[sequences], num_blocks[sequences]
    seen_from = seen_from[sequences] - first * block_size
    seen_to = seq_lens[sequences] - first * block_size
    padded = np.array(widths).repeat(sizes)
    # Padding repeats the row's first block: memory that is warm, and written unless it is the last too.
    columns = _ranges(padded)
    columns[columns >= num_blocks.repeat(padded)] = 0
    places = columns + (sequences * meta.block_table.shape[1] + first).repeat(padded)
    decode = []
    slots = np.arange(max(widths) * block_size)
    stop = 0
    for rows, width in zip(_on(device, starts[sequences]).split_with_sizes(sizes), widths, strict=True):
        start, stop = stop, stop + len(rows)
        here = slots[: width * block_size]
        mask = _mask(here, seen_from[start:stop], seen_to[start:stop], device)
        unwritten = _unwritten(seen_to[start:stop], num_blocks[start:stop], width, block_size, device)
        decode.append(_DecodeGroup(rows, width, None if mask is None else mask[:, None, None], unwritten))
    return _Plan(decode, _on(device, places), tiles)


def _split(num_blocks: list[int], most_blocks: int) -> tuple[list[int], list[int]]:
    """Splits rows, ascending by their number of blocks, into groups. Returns the numbers of rows of the
    groups, and the most blocks of a row in each.

    A group of several rows has at most `most_blocks`, padding included.
    """
    sizes: list[int] = []
    widths: list[int] = []
    longest = 0
    for count in num_blocks:
        if count > longest or (sizes[-1] + 1) * count > most_blocks:
            longest = 2 * count + 8
            sizes.append(1)
            widths.append(count)
        else:
            sizes[-1] += 1
            widths[-1] = count
    return sizes, widths


def _ranges(counts: _Ints) -> _Ints:
    """Returns 0 to count - 1 for each count, one range after the other."""
    behind = counts.cumsum()
    return np.arange(behind[-1]) - (behind - counts).repeat(counts)


def _mask(columns: _Ints, seen_from: _Ints, seen_to: _Ints, device: torch.device) -> torch.Tensor | None:
    """Makes the mask of the columns that each row does not see. Columns are consecutive.

    Returns:
        float32 [len(seen_to), len(columns)]: 0 in the columns [seen_from, seen_to) of a row, else -inf; None:
        every row sees all columns.
    """
    after, before = columns[-1] >= seen_to.min(), columns[0] < seen_from.max()
    if not after and not before:
        return None
    hidden = columns >= seen_to[:, None]
    if before:
        hidden |= columns < seen_from[:, None]
    return _on(device, np.where(hidden, np.float32(-np.inf), np.float32(0.0)))


def _unwritten(
    seen_to: _Ints, num_blocks: _Ints, width: int, block_size: int, device: torch.device
) -> tuple[Any, ...] | None:
    """Returns `_DecodeGroup.unwritten`. Rows have `num_blocks` blocks, padded to `width`. Columns of a row
    before `seen_to` are written."""
    if seen_to.min() == seen_to.max():
        end = int(seen_to[0])
        return (..., slice(end, None), slice(None)) if end < width * block_size else None
    # Padding is as unwritten as the block it repeats, a row's first, which may be its last too.
    counts = np.where(num_blocks == 1, width, num_blocks) * block_size - seen_to
    columns = _ranges(counts) + seen_to.repeat(counts)
    if not len(columns):
        return None
    return _on(device, np.arange(len(counts)).repeat(counts)), slice(None), _on(device, columns)


def _on(device: torch.device, array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _query_tiles(
    meta: AttentionMetadata, sequence: int, start: int, block_size: int, sliding_window: int | None
) -> list[_QueryTile]:
    """Splits a sequence's new tokens into tiles. Its first new token is batch row `start`."""
    query_len, seq_len = meta.query_lens[sequence], meta.seq_lens_list[sequence]
    step = max(KEY_TILE // block_size, 1) * block_size
    tiles = []
    for offset in range(0, query_len, QUERY_TILE):
        # Positions of the tile's queries: [low, high).
        low = seq_len - query_len + offset
        high = min(low + QUERY_TILE, seq_len)
        seen_to = np.arange(low, high) + 1
        seen_from = np.zeros_like(seen_to) if sliding_window is None else (seen_to - sliding_window).clip(0)
        last = high
        if meta.joint is not None and meta.joint[sequence]:
            last = seq_len
            seen_to[:] = last
        keys = []
        for border in range(int(seen_from[0]) // step * step, last, step):
            # Blocks wholly before the window are not read: they may be another sequence's by now.
            begin = max(border, int(seen_from[0]) // block_size * block_size)
            end = min(border + step, -(-last // block_size) * block_size)
            mask = _mask(np.arange(begin, end), seen_from, seen_to, meta.block_table.device)
            keys.append(_Tile(slice(begin // block_size, end // block_size), mask, last - begin))
        tiles.append(_QueryTile(sequence, start + offset, start + offset + high - low, keys))
    return tiles
