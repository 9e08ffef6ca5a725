"""Moves blocks between a pool and the tiers, and copies blocks of a pool in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kv_tiers.connector import BlockAccess, BlockArray
from quire.kv_tiers.tiers import KVTiers
from quire.outputs import SchedulerOutput


def move_blocks(output: SchedulerOutput, pool: BlockAccess, tiers: KVTiers | None) -> None:
    """Carries out a step's block moves in this order: saves, copies, starts of loads."""
    if tiers is None:
        assert not output.kv_saves and not output.kv_loads, "there is no KV tier to save to or load from"
    elif output.kv_saves:
        tiers.save(output.kv_saves)
    if output.block_copies:
        pool.copy_blocks(output.block_copies)
    if tiers is not None:
        for load in output.kv_loads:
            tiers.start_load(load)


def read_rows(pool: BlockArray, block_ids: Sequence[int], out: BlockArray) -> None:
    """Copies blocks out of a pool in host memory.

    Args:
        pool: uint8 [num_blocks, size]: the pool, or the same part of each of its blocks.
        out: uint8 [len(block_ids), size].
    """
    for row, block_id in enumerate(block_ids):
        out[row] = pool[block_id]


def write_rows(pool: BlockArray, block_ids: Sequence[int], data: BlockArray) -> None:
    """Copies the rows of `data`, uint8 [len(block_ids), size], to blocks of a pool in host memory; for `pool`
    see `read_rows`."""
    for row, block_id in enumerate(block_ids):
        pool[block_id] = data[row]
