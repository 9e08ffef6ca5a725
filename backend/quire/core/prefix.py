"""PrefixLookup: finds how much of a request the prefix cache holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.core.block_hash import group_key, hash_blocks
from quire.core.block_pool import BlockPool
from quire.core.request import Request
from quire.models.kv_groups import KVGroup

NULL_BLOCK = -1
"""Entry of a block table that holds no block, for example because the block has left the window."""
IN_TIER = -2
"""Entry of a CachedPrefix for a block that is to be loaded from a KV tier."""


class CachedPrefix(NamedTuple):
    """The cached prefix of a request, which need not be computed."""

    num_tokens: int
    block_ids: list[list[int]]
    """Lists of one length, one for each KV group; an entry is a block id, NULL_BLOCK or IN_TIER."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the prefix, of all KV groups and in the pool or not; NULL_BLOCK does not
        count."""
        return sum(block_id != NULL_BLOCK for blocks in self.block_ids for block_id in blocks)


class PrefixLookup:
    """Finds the longest cached prefix of a request over all KV groups."""

    def __init__(self, groups: Sequence[KVGroup], block_size: int, pool: BlockPool) -> None:
        self._groups = groups
        self._num_full_groups = sum(group.window is None for group in groups)
        self._is_uniform = len(groups) == self._num_full_groups == 1
        self._block_size = block_size
        self._pool = pool

    def find(
        self,
        request: Request,
        is_in_tier: Callable[[bytes], bool] | None = None,
        most: int | None = None,
    ) -> CachedPrefix:
        """Returns the longest prefix of the request whose blocks are cached.

        Unless `most` is given, at least one token is left to compute, because sampling needs its hidden
        state. Prompt tokens whose log-probabilities are wanted and not yet known are left, too. In a group
        with a window, only the blocks that the next token sees must be cached. In a group of states, only the
        snapshot at the end of the prefix must be cached.

        Args:
            is_in_tier: returns whether a KV tier has the block with this key; None: there is no tier.
            most: most blocks per group to look for; None: as many as the request may use. Ignored if the only
                group has no window and there is no tier.
        """
        if self._is_uniform and is_in_tier is None:
            return self._find_uniform(request)
        size = self._block_size

        def locate(group: int, index: int) -> int | None:
            if index >= len(request.block_hashes):
                hash_blocks(request, index + 1, size)
            key = group_key(request.block_hashes[index], group)
            block_id = self._pool.cached(key)
            if block_id is None and is_in_tier is not None and is_in_tier(key):
                return IN_TIER
            return block_id

        count = request.num_reusable_tokens // size if most is None else most
        full: list[list[int]] = []
        for number in range(self._num_full_groups):
            blocks: list[int] = []
            while len(blocks) < count and (block_id := locate(number, len(blocks))) is not None:
                blocks.append(block_id)
            full.append(blocks)
            count = len(blocks)
        count, tails = self._find_tails(count, locate)
        firsts = [self._first_seen(number, count) for number in tails]
        result = [blocks[:count] for blocks in full]
        for first, tail in zip(firsts, tails.values(), strict=True):
            result.append([NULL_BLOCK] * first + [tail[index] for index in range(first, count)])
        return CachedPrefix(count * size, result)

    def _find_uniform(self, request: Request) -> CachedPrefix:
        cached, hashes, found = self._pool.cached, request.block_hashes, list[int]()
        for index in range(request.num_reusable_tokens // self._block_size):
            if index == len(hashes):
                hash_blocks(request, index + 1, self._block_size)
            block_id = cached(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return CachedPrefix(len(found) * self._block_size, [found])

    def _find_tails(
        self, count: int, locate: Callable[[int, int], int | None]
    ) -> tuple[int, dict[int, dict[int, int]]]:
        """Returns the largest number of blocks, at most `count`, after which the windows of all groups are
        complete. Also returns found blocks by group and position; all in these windows are among them."""
        numbers = range(self._num_full_groups, len(self._groups))
        tails: dict[int, dict[int, int]] = {number: {} for number in numbers}
        shortened = bool(tails)
        while shortened and count:
            shortened = False
            for number, tail in tails.items():
                for index in range(count - 1, self._first_seen(number, count) - 1, -1):
                    if index in tail:
                        continue
                    block_id = locate(number, index)
                    if block_id is None:
                        # Whatever ends behind this block sees it until the window has passed it.
                        count, shortened = index, True
                        break
                    tail[index] = block_id
                if shortened:
                    break
        return count, tails

    def _first_seen(self, group: int, count: int) -> int:
        """Returns the index of the first block that the token after `count` blocks sees in a group with a
        window."""
        window = self._groups[group].window
        assert window is not None
        return max(0, count * self._block_size - window + 1) // self._block_size
