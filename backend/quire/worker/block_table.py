"""Block tables of the running requests, as one numpy array the runner copies rows from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockTable:
    """`max_num_seqs` append-only rows of block ids, int32.

    A row belongs to one request from `assign` to `release`. Entries behind `num_blocks[row]` are stale and
    never read: attention stops at the sequence's length.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        self.table: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def assign(self) -> int:
        assert self._free_rows, "the scheduler runs more requests than max_num_seqs"
        row = self._free_rows.pop()
        self.num_blocks[row] = 0
        return row

    def release(self, row: int) -> None:
        self._free_rows.append(row)

    def append(self, row: int, block_ids: list[int]) -> None:
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        assert end <= self.table.shape[1], "a block table outgrew max_model_len"
        self.table[row, start:end] = block_ids
        self.num_blocks[row] = end

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slot (block id * block size + offset) of each (row, position); both [num_tokens]."""
        blocks = self.table[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size
