"""Block tables of the running requests, in one numpy array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTable:
    """`max_num_seqs` append-only rows of block ids for each KV group, int32.

    A row belongs to one request from `assign` to `release`. Its first `num_blocks[group, row]` entries are
    valid. Results of attention depend on no entry after them, and on none whose block has left the group's
    window: that block may belong to another request by now.
    """

    def __init__(self, num_groups: int, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.block_size = block_size
        shape = (num_groups, max_num_seqs, max_blocks_per_seq)
        self.table: npt.NDArray[np.int32] = np.zeros(shape, dtype=np.int32)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._changes: list[npt.NDArray[np.int64]] | None = None

    def assign(self) -> int:
        assert self._free_rows, "the scheduler runs more requests than max_num_seqs"
        row = self._free_rows.pop()
        self.num_blocks[:, row] = 0
        return row

    def release(self, row: int) -> None:
        self._free_rows.append(row)

    def append(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Appends block ids to each group's table of a row. An id of -1 (NULL_BLOCK) is an entry without a
        block, and is stored as 0."""
        assert len(block_ids) == len(self.table), "one list of blocks per KV group"
        for group, ids in enumerate(block_ids):
            if not ids:
                continue
            start = int(self.num_blocks[group, row])
            end = start + len(ids)
            assert end <= self.table.shape[2], "a block table outgrew max_model_len"
            # Any valid id does: it is not read, but a kernel may compute addresses from it.
            self.table[group, row, start:end] = np.maximum(ids, 0)
            self.num_blocks[group, row] = end
            if self._changes is not None:
                first = (group * self.table.shape[1] + row) * self.table.shape[2]
                places = np.arange(first + start, first + end)
                self._changes.append(np.stack([places, self.table[group, row, start:end]]))

    def record_changes(self) -> None:
        """Starts to record appended blocks for `take_changes`; nothing may have been appended before."""
        self._changes = []

    def take_changes(self) -> npt.NDArray[np.int64]:
        """Returns [2, n]: positions in the flat table, and the newest id appended at each since the last
        call."""
        if not self._changes:
            return np.empty((2, 0), dtype=np.int64)
        changes = np.concatenate(self._changes, axis=1)
        self._changes = []
        # A row may have had two owners since: the order of writes to one place is not defined on a device.
        _, last = np.unique(changes[0, ::-1], return_index=True)
        return np.ascontiguousarray(changes[:, ::-1][:, last])

    def rows(self, rows: Sequence[int], num_tokens: int) -> npt.NDArray[np.int32]:
        """Returns a copy of the tables of `rows` [n], as wide as `num_tokens` tokens need: [num_groups, n,
        width]."""
        return self.table[:, :, : -(-num_tokens // self.block_size)][:, rows]

    def slots(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns each token's slot in each KV group, [num_groups, num_tokens]: block id * block size +
        offset in the block.

        Args:
            rows: [num_tokens], row of each token's request.
            positions: [num_tokens], position of each token in its request.
        """
        columns = positions // self.block_size
        return (self.table[:, rows, columns] - columns) * self.block_size + positions
