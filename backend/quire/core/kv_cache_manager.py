"""KVCacheManager: which blocks hold the keys and values of which request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.core.block_hash import request_hashes
from quire.core.block_pool import BlockPool
from quire.request import Request


class KVCacheManager:
    """Block tables of the running requests over one pool.

    Token i of a request lies in block `block_ids(request)[i // block_size]` at offset `i % block_size`.
    Requests whose tokens (and images) begin alike share the blocks of what they have in common: a full block
    is found by the hash of its content and all that precedes it, and is never written again.
    Tables are append-only while they exist, so a runner only needs to be told what was appended. A table
    has no more blocks than its tokens need: at most `block_size - 1` slots of a sequence are unused.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = False) -> None:
        assert block_size >= 1, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cached_tokens = 0
        """Since start: tokens that requests did not compute because their blocks were there."""
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.pool.num_available

    @property
    def capacity(self) -> int:
        """Tokens the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return self.pool.num_in_use / self.pool.num_blocks

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens fits into the empty pool."""
        return num_tokens <= self.capacity

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to append so that `num_tokens` tokens of the request have slots."""
        return max(0, self.num_blocks_for(num_tokens) - len(self._tables.get(request.request_id, ())))

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Makes slots for the request's next `num_new_tokens` tokens after its computed ones.

        Returns:
            The block ids appended to its table, often none; None, and nothing changes, if the pool has
            too few blocks.
        """
        table = self._tables.get(request.request_id)
        num_held = 0 if table is None else len(table)
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_missing = -(-num_tokens // self.block_size) - num_held
        if num_missing <= 0:
            return []
        block_ids = self.pool.allocate(num_missing)
        if block_ids is None:
            return None
        if table is None:
            self._tables[request.request_id] = list(block_ids)
        else:
            table.extend(block_ids)
        return block_ids

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request's tokens, without its last token's: that one has to
        be computed, or there is nothing to sample from."""
        if not self.enable_prefix_caching:
            return []
        hashes = request_hashes(request, (request.num_tokens - 1) // self.block_size, self.block_size)
        found = []
        for content_hash in hashes:
            block_id = self.pool.cached(content_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_unreferenced(self, block_ids: list[int]) -> int:
        """How many of the blocks `share` would take off the free list."""
        return sum(self.pool.ref_count(block_id) == 0 for block_id in block_ids)

    def share(self, request: Request, block_ids: list[int]) -> None:
        """Begins the table of a request that has none with what `cached_prefix` found for it."""
        assert request.request_id not in self._tables and request.num_computed_tokens == 0, request
        if not block_ids:
            return
        for block_id in block_ids:
            self.pool.incref(block_id)
        self._tables[request.request_id] = list(block_ids)
        request.num_computed_tokens = len(block_ids) * self.block_size
        self.num_cached_tokens += request.num_computed_tokens

    def keep_computed(self, request: Request, num_computed_before: int) -> None:
        """Lets others find the blocks that the request's newly computed tokens have filled."""
        if not self.enable_prefix_caching:
            return
        first, end = num_computed_before // self.block_size, request.num_computed_tokens // self.block_size
        if first == end:
            return
        table = self._tables[request.request_id]
        hashes = request_hashes(request, end, self.block_size)
        for index in range(first, end):
            self.pool.keep(table[index], hashes[index])

    def free(self, request: Request) -> None:
        """Gives the request's blocks back, its last block first; no effect if it has none."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            # The beginning of a sequence is what others may share: it is to be reused last.
            self.pool.free(reversed(table))

    def block_ids(self, request: Request) -> list[int]:
        """A copy of the request's block table; empty if it has none."""
        return list(self._tables.get(request.request_id, ()))

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that only `requests` hold blocks, enough and not too many; O(blocks), for tests."""
        self.pool.check_integrity()
        by_id = {request.request_id: request for request in requests}
        assert self._tables.keys() <= by_id.keys(), f"leaked tables: {self._tables.keys() - by_id.keys()}"
        references: Counter[int] = Counter()
        for request_id, request in by_id.items():
            table = self._tables.get(request_id, [])
            low = self.num_blocks_for(request.num_computed_tokens)
            high = self.num_blocks_for(request.num_tokens)
            assert low <= len(table) <= high, f"{request} has {len(table)} blocks, not in [{low}, {high}]"
            assert len(set(table)) == len(table), f"{request} has a block twice: {table}"
            references.update(table)
            if self.enable_prefix_caching:
                hashes = request_hashes(request, len(table), self.block_size, extend=False)
                for block_id, content_hash in zip(table, hashes, strict=False):
                    found = self.pool.cached(content_hash)
                    assert found is None or found == block_id or found not in table, f"{request}: {found}"
        for block_id in range(self.num_blocks):
            count = self.pool.ref_count(block_id)
            assert count == references[block_id], f"block {block_id}: {count} != {references[block_id]}"
