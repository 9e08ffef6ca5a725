"""Paged attention in PyTorch: decode rows together, longer queries tile by tile.

Rows with one new token are grouped by context length, their blocks gathered into one padded tensor per group
and computed with two batched products. Longer queries, and contexts too long to gather at once, go through an
online softmax over tiles of keys, so scratch memory grows with the tile and not with the square of the
context. Tiles begin at fixed positions: how a prompt is cut into chunks does not move them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.registry import implementation

GATHER_BYTES = 64 * 2**20
"""Largest padded copy of keys and values that a group of decode rows makes."""
QUERY_TILE = 512
"""Query rows of one sequence that are computed together."""
KEY_TILE = 512
"""Positions in a tile of keys, rounded down to whole blocks."""


@dataclass(frozen=True)
class _DecodeGroup:
    """Rows with one new token each and contexts of similar length."""

    rows: torch.Tensor
    """int64 [n]: batch rows."""
    blocks: torch.Tensor
    """int64 [n, num_blocks]: block ids, padded with a valid id."""
    hidden: torch.Tensor | None
    """bool [n, 1, 1, num_blocks * block_size]: True where a position is not seen; None: all are seen."""
    unwritten: tuple[torch.Tensor, torch.Tensor] | None
    """int64 rows and columns of gathered slots behind their sequence's end; None: there are none."""


@dataclass(frozen=True)
class _Tile:
    """Positions [start, stop) of one sequence, and what a tile of its queries may not see of them."""

    blocks: torch.Tensor
    hidden: torch.Tensor | None
    """bool [num_queries, stop - start]"""
    written: int
    """Columns from here on may never have been written."""


@dataclass(frozen=True)
class _QueryTile:
    """Batch rows [start, stop), all of one sequence, with the tiles of keys they see."""

    start: int
    stop: int
    keys: list[_Tile]


@dataclass(frozen=True)
class _Plan:
    decode: list[_DecodeGroup]
    tiles: list[_QueryTile]


@implementation("paged_attention", "reference")
def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See `ops.paged_attention`."""
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    num_tokens, num_heads, _ = query.shape
    assert num_tokens == meta.num_tokens, "one query row per token of the batch"
    assert num_heads % num_kv_heads == 0, "query heads are a multiple of the KV heads"
    # Both halves of a block in float32, which is what the products work in.
    block_bytes = 2 * num_kv_heads * block_size * head_dim * 4
    plan = meta.plan(
        ("reference", block_size, block_bytes, sliding_window),
        lambda: _make_plan(meta, block_size, block_bytes, sliding_window),
    )
    # [num_tokens, num_kv_heads, groups, head_dim]: heads that share keys are neighbours.
    grouped = (query.float() * scale).view(num_tokens, num_kv_heads, -1, head_dim)
    if len(plan.decode) == 1 and not plan.tiles:
        out = _decode(grouped, kv_layer, plan.decode[0], softcap)
    else:
        out = torch.empty_like(grouped)
        for group in plan.decode:
            out[group.rows] = _decode(grouped[group.rows], kv_layer, group, softcap)
        for tile in plan.tiles:
            out[tile.start : tile.stop] = _tiled(grouped[tile.start : tile.stop], kv_layer, tile, softcap)
    return out.view(num_tokens, num_heads, head_dim).to(query.dtype)


def gather_blocks(kv_layer: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies the keys and values of blocks into [..., num_kv_heads, num_blocks * block_size, head_dim].

    Args:
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], whose last three dimensions are
            contiguous (a layer's view of the cache is).
        blocks: int64 [n, num_blocks] or [num_blocks].
    """
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    piece = block_size * head_dim
    assert kv_layer.stride()[2:] == (piece, head_dim, 1) and kv_layer.stride(0) % piece == 0
    # One row of this matrix is one head of one block: gathering rows in the order of the result copies
    # each byte once, where gathering blocks and transposing would copy it twice.
    per_block, per_half = kv_layer.stride(0) // piece, kv_layer.stride(1) // piece
    rows = (kv_layer.shape[0] - 1) * per_block + per_half + num_kv_heads
    pieces = kv_layer.as_strided((rows, piece), (piece, 1))
    heads = torch.arange(num_kv_heads, device=blocks.device).unsqueeze(1)
    index = blocks.unsqueeze(-2) * per_block + heads
    shape = (*blocks.shape[:-1], num_kv_heads, blocks.shape[-1] * block_size, head_dim)
    key = pieces.index_select(0, index.reshape(-1)).view(shape)
    value = pieces.index_select(0, (index + per_half).reshape(-1)).view(shape)
    return key.float(), value.float()


def _decode(
    query: torch.Tensor, kv_layer: torch.Tensor, group: _DecodeGroup, softcap: float | None
) -> torch.Tensor:
    """query [n, num_kv_heads, groups, head_dim], scaled already."""
    key, value = gather_blocks(kv_layer, group.blocks)
    scores = query @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if group.hidden is not None:
        scores.masked_fill_(group.hidden, float("-inf"))
    if group.unwritten is not None:
        # What lies behind a sequence's end may be anything, even NaN of another request, and 0 * NaN is NaN.
        rows, columns = group.unwritten
        value[rows, :, columns] = 0.0
    return torch.softmax(scores, dim=-1) @ value


def _tiled(
    query: torch.Tensor, kv_layer: torch.Tensor, tile: _QueryTile, softcap: float | None
) -> torch.Tensor:
    """query [n, num_kv_heads, groups, head_dim] of one sequence, scaled already."""
    count, num_kv_heads, groups, head_dim = query.shape
    # [num_kv_heads, groups * n, head_dim]
    flat = query.permute(1, 2, 0, 3).reshape(num_kv_heads, groups * count, head_dim)
    top = flat.new_full((num_kv_heads, groups * count, 1), float("-inf"))
    total = torch.zeros_like(top)
    out = torch.zeros_like(flat)
    for keys in tile.keys:
        key, value = gather_blocks(kv_layer, keys.blocks)
        scores = flat @ key.transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if keys.hidden is not None:
            scores.view(num_kv_heads, groups, count, -1).masked_fill_(keys.hidden, float("-inf"))
            value[:, keys.written :] = 0.0
        peak = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is NaN.
        finite = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = torch.exp(scores - finite)
        keep = torch.exp(top - finite)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = out * keep + weights @ value
        top = peak
    return (out / total).view(num_kv_heads, groups, count, head_dim).permute(2, 0, 1, 3)


def _make_plan(
    meta: AttentionMetadata, block_size: int, block_bytes: int, sliding_window: int | None
) -> _Plan:
    device = meta.block_table.device
    table = meta.block_table.long()
    single: list[tuple[int, int, int, int]] = []
    """(number of blocks, sequence, batch row, first block)"""
    tiles: list[_QueryTile] = []
    start = 0
    for index, (query_len, seq_len) in enumerate(zip(meta.query_lens, meta.seq_lens_list, strict=True)):
        first = 0 if sliding_window is None else max(0, seq_len - sliding_window) // block_size
        num_blocks = -(-seq_len // block_size) - first
        if query_len == 1 and num_blocks * block_bytes <= GATHER_BYTES:
            single.append((num_blocks, index, start, first))
        else:
            tiles += _query_tiles(table[index], start, query_len, seq_len, block_size, sliding_window, device)
        start += query_len
    # Ascending, so that a group's padding is bounded by its last and longest row.
    single.sort()
    groups: list[list[tuple[int, int, int, int]]] = []
    for row in single:
        group = groups[-1] if groups else None
        wasteful = group is not None and row[0] > 2 * group[0][0] + 8
        if group is None or wasteful or (len(group) + 1) * row[0] * block_bytes > GATHER_BYTES:
            groups.append([row])
        else:
            group.append(row)
    if len(groups) == 1 and not tiles:
        # The whole batch, in its own order: no rows need to be picked out or put back.
        groups[0].sort(key=lambda row: row[2])
    decode = [_decode_group(group, meta, table, block_size, sliding_window) for group in groups]
    return _Plan(decode, tiles)


def _decode_group(
    group: list[tuple[int, int, int, int]],
    meta: AttentionMetadata,
    table: torch.Tensor,
    block_size: int,
    sliding_window: int | None,
) -> _DecodeGroup:
    device = table.device
    width = max(num_blocks for num_blocks, *_ in group)
    numbers = torch.tensor(group, device=device)
    sequences, rows, first = numbers[:, 1], numbers[:, 2], numbers[:, 3:]
    columns = first + torch.arange(width, device=device)
    # Padding repeats the row's first block here: memory that is warm, and written unless it is the last too.
    columns = torch.where(columns < first + numbers[:, :1], columns, first)
    blocks = table[sequences].gather(1, columns)
    offsets = torch.arange(block_size, device=device)
    ends = torch.tensor([meta.seq_lens_list[sequence] for _, sequence, *_ in group], device=device)
    unwritten = ((columns.unsqueeze(-1) * block_size + offsets) >= ends[:, None, None]).flatten(1)
    positions = first * block_size + torch.arange(width * block_size, device=device)
    hidden = positions >= ends.unsqueeze(1)
    if sliding_window is not None:
        hidden |= positions < ends.unsqueeze(1) - sliding_window
    rows_and_columns = unwritten.nonzero(as_tuple=True)
    return _DecodeGroup(
        rows,
        blocks,
        hidden[:, None, None, :] if bool(hidden.any()) else None,
        (rows_and_columns[0], rows_and_columns[1]) if len(rows_and_columns[0]) else None,
    )


def _query_tiles(
    blocks: torch.Tensor,
    start: int,
    query_len: int,
    seq_len: int,
    block_size: int,
    sliding_window: int | None,
    device: torch.device,
) -> list[_QueryTile]:
    """Splits one sequence's new tokens, batch rows [start, start + query_len), into tiles."""
    step = max(KEY_TILE // block_size, 1) * block_size
    tiles = []
    for offset in range(0, query_len, QUERY_TILE):
        # Positions of the tile's queries: [low, high).
        low = seq_len - query_len + offset
        high = min(low + QUERY_TILE, seq_len)
        seen_from = 0 if sliding_window is None else max(0, low - sliding_window + 1)
        rows = torch.arange(low, high, device=device).unsqueeze(1)
        keys = []
        for border in range(seen_from // step * step, high, step):
            # Blocks wholly before the window are not read: they may be another sequence's by now.
            begin = max(border, seen_from // block_size * block_size)
            end = min(border + step, -(-high // block_size) * block_size)
            hidden = None
            if end > low + 1 or (sliding_window is not None and begin <= high - 1 - sliding_window):
                columns = torch.arange(begin, end, device=device)
                hidden = columns > rows
                if sliding_window is not None:
                    hidden |= columns <= rows - sliding_window
            keys.append(_Tile(blocks[begin // block_size : end // block_size], hidden, high - begin))
        tiles.append(_QueryTile(start + offset, start + offset + high - low, keys))
    return tiles
