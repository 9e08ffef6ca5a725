"""BlockPool: reference-counted blocks of KV cache, handed out from a list that frees and takes in O(1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


class BlockPool:
    """Which of the `num_blocks` blocks are in use, and in which order the others are handed out.

    A block whose tokens are all computed may carry the hash of its content, under which others find it.
    Blocks without references form a doubly linked list, least recently freed first. Its links lie in two
    flat lists indexed by block id, with a sentinel at index `num_blocks`, so a block leaves the middle of the
    list in O(1): that is what a hit on an unreferenced cached block needs.

    `num_free + num_cached + num_in_use == num_blocks` always.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.num_in_use = 0
        """Blocks with at least one reference."""
        self.num_cached = 0
        """Blocks without references whose content may still be reused; they are in the free list too."""
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        sentinel = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [sentinel, *range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks without references and without content worth keeping."""
        return self.num_blocks - self.num_in_use - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free ones, and cached ones which it evicts."""
        return self.num_blocks - self.num_in_use

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Takes the `count` least recently freed blocks, each with one reference; cached ones are evicted.

        Returns:
            Their ids in that order; None, and nothing is taken, if fewer are available.
        """
        if count > self.num_available:
            return None
        sentinel, following, ref_counts = self.num_blocks, self._next, self._ref_counts
        hashes = self._hashes
        block_ids: list[int] = []
        block_id = following[sentinel]
        for _ in range(count):
            block_ids.append(block_id)
            ref_counts[block_id] = 1
            if hashes[block_id] is not None:
                self._forget(block_id)
                self.num_cached -= 1
            block_id = following[block_id]
        following[sentinel] = block_id
        self._prev[block_id] = sentinel
        self.num_in_use += count
        return block_ids

    def incref(self, block_id: int) -> None:
        """One more reference to a block; one without any leaves the free list and keeps its content."""
        if self._ref_counts[block_id] == 0:
            before, after = self._prev[block_id], self._next[block_id]
            self._next[before], self._prev[after] = after, before
            self.num_in_use += 1
            if self._hashes[block_id] is not None:
                self.num_cached -= 1
        self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each; blocks without any more go to the end of the list, in this order."""
        sentinel, following, previous, ref_counts = self.num_blocks, self._next, self._prev, self._ref_counts
        hashes = self._hashes
        last = previous[sentinel]
        for block_id in block_ids:
            assert ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                following[last], previous[block_id] = block_id, last
                last = block_id
                self.num_in_use -= 1
                if hashes[block_id] is not None:
                    self.num_cached += 1
        following[last], previous[sentinel] = sentinel, last

    def cached(self, content_hash: bytes) -> int | None:
        """The block with this content, referenced or not."""
        return self._by_hash.get(content_hash)

    def keep(self, block_id: int, content_hash: bytes) -> None:
        """Lets a referenced block be found by the hash of its content, unless another one is already."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        if self._hashes[block_id] is None and content_hash not in self._by_hash:
            self._hashes[block_id] = content_hash
            self._by_hash[content_hash] = block_id

    def _forget(self, block_id: int) -> None:
        content_hash = self._hashes[block_id]
        assert content_hash is not None
        del self._by_hash[content_hash]
        self._hashes[block_id] = None

    def free_list(self) -> list[int]:
        """Blocks without references in the order in which `allocate` hands them out; O(num_blocks)."""
        block_ids: list[int] = []
        block_id = self._next[self.num_blocks]
        while block_id != self.num_blocks:
            assert len(block_ids) < self.num_blocks, "the free list has a cycle"
            block_ids.append(block_id)
            block_id = self._next[block_id]
        return block_ids

    def check_integrity(self) -> None:
        """Asserts that links, reference counts and counters agree; O(num_blocks), for tests."""
        free = self.free_list()
        assert len(set(free)) == len(free), "a block is twice in the free list"
        assert all(self._ref_counts[block_id] == 0 for block_id in free), "a referenced block is free"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        unreferenced = self._ref_counts.count(0)
        assert len(free) == unreferenced, (
            f"{unreferenced - len(free)} unreferenced blocks are not in the list"
        )
        assert self.num_in_use == self.num_blocks - unreferenced, (self.num_in_use, unreferenced)
        assert self.num_cached == sum(self._hashes[block_id] is not None for block_id in free)
        assert self._by_hash == {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        ring = [self.num_blocks, *free, self.num_blocks]
        for before, after in itertools.pairwise(ring):
            assert self._prev[after] == before, (
                f"broken back link {after} -> {self._prev[after]}, not {before}"
            )
