"""BlockPool: reference-counted blocks of KV cache. Those without references lie in lists with O(1) insertion
and removal."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

from quire.request.scheduling_params import DEFAULT_RETENTION, MAX_RETENTION


class BlockPool:
    """Tracks which of the `num_blocks` blocks are in use, and the order in which the others are allocated.

    A full block may carry the hash of its content, by which other requests find it. Blocks without references
    lie in doubly linked lists. The first list holds blocks without content; the others hold cached blocks,
    one list per retention priority. Blocks enter a list at its end and are allocated from its front. The
    links are two flat lists indexed by block id, followed by one sentinel per list. A block can therefore
    leave the middle of a list in O(1), as a hit on an unreferenced cached block requires. The bits of an
    integer say which lists are not empty.

    `num_free + num_cached + num_in_use == num_blocks` always.

    Args:
        on_evict: called with the hash of each block whose content is forgotten, except by `forget_all`.
    """

    def __init__(self, num_blocks: int, *, on_evict: Callable[[bytes], None] | None = None) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self.num_in_use = 0
        """Blocks with at least one reference."""
        self.num_cached = 0
        """Blocks without references whose content may still be reused."""
        num_lists = 1 + MAX_RETENTION + 1
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._lists = [0] * num_blocks  # the list an unreferenced block lies in
        self._retentions = [0] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._ttls: dict[int, float] = {}
        self._deadlines: dict[int, float] = {}
        self._expiries: list[tuple[float, int]] = []
        # Links of list i begin and end at the sentinel num_blocks + i.
        self._next = [*range(1, num_blocks + 1), *range(num_blocks, num_blocks + num_lists)]
        self._prev = [num_blocks, *range(num_blocks), *range(num_blocks + 1, num_blocks + num_lists)]
        self._next[num_blocks], self._prev[num_blocks] = 0, num_blocks - 1
        self._filled = 1  # bit i: list i has blocks

    @property
    def num_free(self) -> int:
        """Number of blocks without references and without cached content."""
        return self.num_blocks - self.num_in_use - self.num_cached

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return now: free ones, and cached ones, which it evicts."""
        return self.num_blocks - self.num_in_use

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks with one reference each: free blocks first, then cached blocks, which it
        evicts.

        Returns:
            The block ids, in the order of `free_list`; None: fewer are available, and nothing is allocated.
        """
        if count > self.num_available:
            return None
        following, previous, ref_counts = self._next, self._prev, self._ref_counts
        block_ids: list[int] = []
        while len(block_ids) < count:
            number = (self._filled & -self._filled).bit_length() - 1
            sentinel = self.num_blocks + number
            block_id = following[sentinel]
            first = len(block_ids)
            while block_id != sentinel and len(block_ids) < count:
                block_ids.append(block_id)
                ref_counts[block_id] = 1
                block_id = following[block_id]
            following[sentinel], previous[block_id] = block_id, sentinel
            if block_id == sentinel:
                self._filled ^= 1 << number
            if number:
                for evicted in block_ids[first:]:
                    self._forget(evicted)
                self.num_cached -= len(block_ids) - first
        self.num_in_use += count
        return block_ids

    def incref(self, block_id: int) -> None:
        """Adds one reference to a block. A block without references leaves its list first and keeps its
        content."""
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
            self.num_in_use += 1
            if self._hashes[block_id] is not None:
                self.num_cached -= 1
                self._deadlines.pop(block_id, None)
        self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int], now: float = 0.0) -> None:
        """Drops one reference of each block. Blocks left without references are appended, in this order, to
        the list of unused blocks without a hash, or to that of cached blocks of the same retention.

        Args:
            now: seconds; the time to live of the blocks that become unreferenced starts here.
        """
        ref_counts, hashes = self._ref_counts, self._hashes
        for block_id in block_ids:
            assert ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                self.num_in_use -= 1
                if hashes[block_id] is None:
                    self._append(0, block_id)
                    continue
                self.num_cached += 1
                self._append(1 + self._retentions[block_id], block_id)
                if block_id in self._ttls:
                    deadline = now + self._ttls[block_id]
                    self._deadlines[block_id] = deadline
                    heapq.heappush(self._expiries, (deadline, block_id))

    def cached(self, content_hash: bytes) -> int | None:
        """Returns the block with this content, referenced or not; None: there is none."""
        return self._by_hash.get(content_hash)

    def cached_hashes(self) -> set[bytes]:
        """Returns the hashes of all content that can be found, referenced or not; O(num_blocks)."""
        return set(self._by_hash)

    def keep(
        self,
        block_id: int,
        content_hash: bytes,
        retention: int = DEFAULT_RETENTION,
        ttl_s: float | None = None,
    ) -> bool:
        """Makes a referenced block findable by the hash of its content. No effect, except perhaps on the
        retention, if a block with that hash can be found already. No effect if this block has another hash.

        Args:
            retention: priority in [0, 100]; blocks with a higher one are evicted later. If content is kept
                again while its block has a reference, the higher priority applies.
            ttl_s: seconds without references after which the content is forgotten; None: no limit. Content
                that can be found already keeps its time.

        Returns:
            Whether the block became findable by this call.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        found = self._by_hash.get(content_hash)
        if found is not None:
            if retention > self._retentions[found] and self._ref_counts[found] > 0:
                self._retentions[found] = retention
            return False
        if self._hashes[block_id] is not None:
            return False
        self._hashes[block_id] = content_hash
        self._by_hash[content_hash] = block_id
        self._retentions[block_id] = retention
        if ttl_s is not None:
            self._ttls[block_id] = ttl_s
        return True

    def forget(self, block_ids: Iterable[int]) -> None:
        """Makes the blocks' content unfindable. Blocks without references become free, and free blocks are
        allocated before cached ones."""
        for block_id in block_ids:
            if self._hashes[block_id] is None:
                continue
            if self._ref_counts[block_id] == 0:
                self._unlink(block_id)
                self.num_cached -= 1
                self._forget(block_id)
                self._append(0, block_id)
            else:
                self._forget(block_id)

    def forget_all(self) -> int:
        """Forgets all content, including that of blocks in use, without calling `on_evict`. Returns how many
        blocks had content."""
        count = len(self._by_hash)
        on_evict, self.on_evict = self.on_evict, None
        self.forget(list(self._by_hash.values()))
        self.on_evict = on_evict
        return count

    @property
    def next_expiry(self) -> float:
        """Time before which no cached block expires; inf: none will."""
        return self._expiries[0][0] if self._expiries else math.inf

    def expire(self, now: float) -> None:
        """Forgets cached blocks whose time to live has ended; amortised O(log n) per freed block with a time
        to live."""
        while self._expiries and self._expiries[0][0] <= now:
            deadline, block_id = heapq.heappop(self._expiries)
            if self._deadlines.get(block_id) == deadline:
                self.forget((block_id,))
        if len(self._expiries) > 4 * self.num_blocks:
            self._expiries = [(deadline, block_id) for block_id, deadline in self._deadlines.items()]
            heapq.heapify(self._expiries)

    def _append(self, number: int, block_id: int) -> None:
        sentinel = self.num_blocks + number
        last = self._prev[sentinel]
        self._next[last], self._prev[block_id] = block_id, last
        self._next[block_id], self._prev[sentinel] = sentinel, block_id
        self._lists[block_id] = number
        self._filled |= 1 << number

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        if before == after:  # the sentinel on both sides
            self._filled ^= 1 << self._lists[block_id]

    def _forget(self, block_id: int) -> None:
        content_hash = self._hashes[block_id]
        assert content_hash is not None
        del self._by_hash[content_hash]
        self._hashes[block_id] = None
        self._ttls.pop(block_id, None)
        self._deadlines.pop(block_id, None)
        if self.on_evict is not None:
            self.on_evict(content_hash)

    def free_list(self) -> list[int]:
        """Returns the blocks without references, in the order in which `allocate` returns them;
        O(num_blocks)."""
        block_ids: list[int] = []
        for number in self._nonempty():
            sentinel = self.num_blocks + number
            block_id = self._next[sentinel]
            while block_id != sentinel:
                assert len(block_ids) < self.num_blocks, "a list has a cycle"
                block_ids.append(block_id)
                block_id = self._next[block_id]
        return block_ids

    def _nonempty(self) -> list[int]:
        ends = enumerate(self._next[self.num_blocks :], self.num_blocks)
        return [sentinel - self.num_blocks for sentinel, first in ends if first != sentinel]

    def check_integrity(self) -> None:
        """Asserts that links, reference counts and counters agree; O(num_blocks), for tests."""
        free = self.free_list()
        assert len(set(free)) == len(free), "a block is twice in the lists"
        assert all(self._ref_counts[block_id] == 0 for block_id in free), "a referenced block is free"
        assert min(self._ref_counts) >= 0, "a reference count is negative"
        unreferenced = self._ref_counts.count(0)
        assert len(free) == unreferenced, (
            f"{unreferenced - len(free)} unreferenced blocks are not in the lists"
        )
        assert self.num_in_use == self.num_blocks - unreferenced, (self.num_in_use, unreferenced)
        assert self.num_cached == sum(self._hashes[block_id] is not None for block_id in free)
        assert self._by_hash == {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        assert all(self._hashes[block_id] is not None for block_id in [*self._ttls, *self._deadlines])
        nonempty = self._nonempty()
        assert self._filled == sum(1 << number for number in nonempty)
        for number in nonempty:
            sentinel = self.num_blocks + number
            ring = [sentinel]
            while (following := self._next[ring[-1]]) != sentinel:
                ring.append(following)
                assert self._lists[following] == number, (following, self._lists[following], number)
                assert (self._hashes[following] is None) == (number == 0), following
            for before, after in itertools.pairwise([*ring, sentinel]):
                assert self._prev[after] == before, (
                    f"broken back link {after} -> {self._prev[after]}, not {before}"
                )
