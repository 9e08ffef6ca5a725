"""KVCacheManager: which blocks hold the keys and values of which request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.core.block_hash import extra_keys, group_key, hash_blocks
from quire.core.block_pool import BlockPool
from quire.kv_groups import KVGroup, blocks_per_sequence
from quire.request import Request

OUTSIDE = -1
"""In a block table: the block lies before the window and is not there any more, or never was."""
ELSEWHERE = -2
"""In a CachedPrefix: the block is not in the pool but in a KV tier."""


class KVEvents(Protocol):
    """Is told what the prefix cache holds; see `core.kv_events`."""

    def block_stored(
        self,
        content_hash: bytes,
        parent_hash: bytes | None,
        token_ids: list[int],
        block_size: int,
        *,
        extra_keys: tuple[str, ...] | None,
    ) -> None: ...

    def block_removed(self, content_hash: bytes) -> None: ...

    def all_cleared(self) -> None: ...


class CachedPrefix(NamedTuple):
    """The beginning of a request that need not be computed."""

    num_tokens: int
    block_ids: list[list[int]]
    """Per group, a block id, OUTSIDE or ELSEWHERE for each of its blocks."""


@dataclass(slots=True)
class BlockTable:
    """Blocks of one running request."""

    blocks: list[list[int]]
    """Per group; OUTSIDE where the block was given back."""
    released: list[int]
    """Per group: leading blocks that are OUTSIDE."""
    num_kept: int = 0
    """Leading blocks that were offered to the prefix cache."""


@dataclass(slots=True)
class _Pin:
    block_ids: list[int]
    deadline: float


class KVCacheManager:
    """Block tables of the running requests over one pool.

    Token i of a request lies, for the layers of group g, in block `block_ids(request)[g][i // block_size]` at
    offset `i % block_size`. Requests whose tokens (and images) begin alike share the blocks of what they have
    in common: a full block is found by the hash of its content and all that precedes it, and is never
    written again. Tables are append-only while they exist, so a runner only needs to be told what was
    appended. A table has no more blocks than its tokens need: at most `block_size - 1` slots of a sequence
    are unused. In a group with a window, blocks wholly before it are given back.

    A block may be found from the moment when the step that fills it is planned: in one step all keys and
    values of a layer are written before any are read, so a request that joins the very step that computes
    its prefix shares it.

    Args:
        groups: layers that need the same past; see `quire.kv_groups`.
        enable_prefix_caching: whether blocks can be found by their content.
        eviction_policy, cache_ttl_s, max_pinned_fraction: as in CacheConfig.
        max_step_tokens: most tokens of one request in a step; bounds what a group with a window needs.
        events: is told of cached blocks of group 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVGroup] = (KVGroup(None, (0,)),),
        enable_prefix_caching: bool = False,
        eviction_policy: str = "lru",
        cache_ttl_s: float = 0.0,
        max_pinned_fraction: float = 0.5,
        max_step_tokens: int = 512,
        events: KVEvents | None = None,
    ) -> None:
        assert block_size >= 1, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cached_tokens = 0
        """Since start: tokens that requests did not compute because their blocks were there."""
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_full_groups = sum(group.window is None for group in self.groups)
        self._is_uniform = len(self.groups) == self.num_full_groups == 1
        self.max_step_tokens = max_step_tokens
        self.cache_ttl_s = cache_ttl_s
        self.events = events
        self.num_broken_pins = 0
        """Since start: pins that gave way, as a request needed their blocks to run at all."""
        self.pool = BlockPool(
            num_blocks,
            policy=eviction_policy,
            on_evict=None if events is None else self._evicted,
        )
        self.no_blocks: list[list[int]] = [[] for _ in self.groups]
        """What allocate_slots returns where nothing is appended; not to be changed."""
        self._pins: dict[Hashable, _Pin] = {}  # least recently used first
        self._pinned: Counter[int] = Counter()  # blocks of all pins, with the number of these
        self._first_deadline = math.inf  # no pin's is earlier
        self._now = 0.0  # of the latest expire()
        self._max_pinned = int(max_pinned_fraction * num_blocks)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.pool.num_available

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._pinned)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the whole pool holds; 2**62 where windows bound every one."""
        if not self.num_full_groups and self.num_blocks_for(2**62) <= self.num_blocks:
            return 2**62
        low, high = 0, self.num_blocks // (self.num_full_groups or len(self.groups))
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_blocks_for(middle * self.block_size) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, in [0, 1]."""
        return self.pool.num_in_use / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most, over all groups."""
        return blocks_per_sequence(self.groups, num_tokens, self.block_size, self.max_step_tokens)

    def num_held_blocks(self, request: Request) -> int:
        table = request.table
        if table is None:
            return 0
        if self._is_uniform:
            return len(table.blocks[0])
        return sum(map(len, table.blocks)) - sum(table.released)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks to append so that `num_tokens` tokens of the request have slots.

        Of a group with a window, what the request needs at a time: it decodes once its tokens are computed.
        """
        if self._is_uniform:
            missing = -(-num_tokens // self.block_size)
            if request.table is not None:
                missing -= len(request.table.blocks[0])
            return missing if missing > 0 else 0
        uncomputed = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
        chunk = max(1, min(uncomputed, self.max_step_tokens))
        needed = blocks_per_sequence(self.groups, num_tokens, self.block_size, chunk)
        return max(0, needed - self.num_held_blocks(request))

    def steady_until(self, request: Request) -> int:
        """Up to how many computed tokens the request's rows of one token change nothing here.

        Each of these tokens has its slot, no block becomes full or leaves a window, and
        `num_missing_blocks(request, request.num_tokens + 1)` stays 0.
        """
        table = request.table
        assert table is not None, request
        size = self.block_size
        end = -(-request.num_computed_tokens // size) * size
        if not self._is_uniform and self.num_missing_blocks(request, end):
            return 0  # in a window it may hold a block less than it can come to need
        if self.enable_prefix_caching:
            end -= 1
        for group, released in zip(self.groups, table.released, strict=True):
            if group.window is not None:
                end = min(end, (released + 1) * size + group.window - 1)
        return end

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[list[int]] | None:
        """Makes slots for the request's next `num_new_tokens` tokens after its computed ones.

        Returns:
            Per group, the block ids appended to its table, often none, not to be changed; None, and nothing
            is taken, if the pool has too few blocks.
        """
        table = request.table
        if table is None:
            table = request.table = self._new_table()
        if self.num_full_groups < len(self.groups):
            self._release(request, table)
        end = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        missing = 0
        for blocks in table.blocks:
            if end > len(blocks):
                missing += end - len(blocks)
        if missing == 0:
            return self.no_blocks
        taken = self.pool.allocate(missing)
        if taken is None:
            if not any(table.blocks):
                request.table = None
            return None
        appended = []
        for blocks in table.blocks:
            count = max(0, end - len(blocks))
            appended.append(taken[:count])
            blocks += taken[:count]
            del taken[:count]
        return appended

    def find_prefix(self, request: Request, elsewhere: Callable[[bytes], bool] | None = None) -> CachedPrefix:
        """The longest beginning of the request whose blocks are cached.

        At least one token is left to compute: a token is sampled from its hidden state. Of a group with a
        window only the blocks count which the first token to compute still sees.

        Args:
            elsewhere: whether a KV tier has a block, by its key.
        """
        groups = self.groups
        if not self.enable_prefix_caching:
            return CachedPrefix(0, [[] for _ in groups])
        most = (request.num_tokens - 1) // self.block_size
        cached = self.pool.cached
        if self._is_uniform and elsewhere is None:
            found: list[int] = []
            hashes = request.block_hashes
            for index in range(most):
                if index == len(hashes):
                    hash_blocks(request, index + 1, self.block_size)
                block_id = cached(hashes[index])
                if block_id is None:
                    break
                found.append(block_id)
            return CachedPrefix(len(found) * self.block_size, [found])

        def locate(group: int, index: int) -> int | None:
            if index >= len(request.block_hashes):
                hash_blocks(request, index + 1, self.block_size)
            key = group_key(request.block_hashes[index], group)
            block_id = cached(key)
            if block_id is None and elsewhere is not None and elsewhere(key):
                return ELSEWHERE
            return block_id

        count = most
        full: list[list[int]] = []
        for number in range(self.num_full_groups):
            blocks: list[int] = []
            for index in range(count):
                block_id = locate(number, index)
                if block_id is None:
                    break
                blocks.append(block_id)
            full.append(blocks)
            count = len(blocks)
        tails: list[dict[int, int]] = [{} for _ in groups[self.num_full_groups :]]
        # Down to the longest length at which every window is whole.
        shortened = bool(tails)
        while shortened and count:
            shortened = False
            for number, tail in enumerate(tails, self.num_full_groups):
                window = groups[number].window
                assert window is not None
                first = max(0, count * self.block_size - window + 1) // self.block_size
                for index in range(count - 1, first - 1, -1):
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
        result = [blocks[:count] for blocks in full]
        for number, tail in enumerate(tails, self.num_full_groups):
            window = groups[number].window
            assert window is not None
            first = max(0, count * self.block_size - window + 1) // self.block_size
            result.append([OUTSIDE] * first + [tail[index] for index in range(first, count)])
        return CachedPrefix(count * self.block_size, result)

    def num_taken(self, prefix: CachedPrefix) -> int:
        """How many blocks fewer can be allocated once a request has begun with the prefix."""
        return sum(
            block_id == ELSEWHERE or (block_id >= 0 and self.pool.ref_count(block_id) == 0)
            for blocks in prefix.block_ids
            for block_id in blocks
        )

    @staticmethod
    def num_in(prefix: CachedPrefix) -> int:
        """Blocks of the request's table that the prefix fills, the pool's and others."""
        return sum(block_id != OUTSIDE for blocks in prefix.block_ids for block_id in blocks)

    def share(self, request: Request, prefix: CachedPrefix) -> list[tuple[int, int, int]]:
        """Begins the table of a request that has none with what was found for it.

        Returns:
            (position in the table, group, new block) of each ELSEWHERE, in the order of the sequence: these
            are still to be filled. The pool must have room for them.
        """
        assert request.table is None and request.num_computed_tokens == 0, request
        if not prefix.num_tokens:
            return []
        for blocks in prefix.block_ids:
            for block_id in blocks:
                if block_id >= 0:
                    self.pool.incref(block_id)
        table = request.table = BlockTable(
            [list(blocks) for blocks in prefix.block_ids],
            [blocks.count(OUTSIDE) for blocks in prefix.block_ids],
        )
        to_fill = [
            (index, group)
            for group, blocks in enumerate(table.blocks)
            for index, block_id in enumerate(blocks)
            if block_id == ELSEWHERE
        ]
        request.num_computed_tokens = prefix.num_tokens
        if not to_fill:
            table.num_kept = prefix.num_tokens // self.block_size
            return []
        table.num_kept = min(index for index, _ in to_fill)
        taken = self.pool.allocate(len(to_fill))
        assert taken is not None, f"no room for the blocks that {request} loads"
        filled = []
        for (index, group), block_id in zip(sorted(to_fill), taken, strict=True):
            table.blocks[group][index] = block_id
            filled.append((index, group, block_id))
        return filled

    def keep(self, request: Request) -> list[tuple[bytes, int]]:
        """Lets others find the request's blocks that are full of known tokens, computed or planned.

        Returns:
            (key, block id) of those not offered before.
        """
        if not self.enable_prefix_caching:
            return []
        table = request.table
        assert table is not None, request
        end = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        first = table.num_kept
        if first >= end:
            return []
        table.num_kept = end
        scheduling = request.scheduling
        ttl = scheduling.cache_ttl_s if scheduling.cache_ttl_s is not None else self.cache_ttl_s or None
        hash_blocks(request, end, self.block_size)
        hashes = request.block_hashes
        offered = []
        for group, blocks in enumerate(table.blocks):
            for index in range(first, end):
                block_id = blocks[index]
                if block_id == OUTSIDE:
                    continue
                key = group_key(hashes[index], group)
                is_new = self.pool.keep(block_id, key, scheduling.retention, ttl)
                offered.append((key, block_id))
                if is_new and group == 0 and self.events is not None:
                    begin = index * self.block_size
                    self.events.block_stored(
                        key,
                        hashes[index - 1] if index else None,
                        request.token_ids[begin : begin + self.block_size],
                        self.block_size,
                        extra_keys=extra_keys(request, begin, begin + self.block_size),
                    )
        return offered

    def forget(self, request: Request, num_tokens: int) -> set[int]:
        """Makes the blocks behind the first `num_tokens` tokens unfindable: they were not computed after all.

        Returns:
            Their ids; other requests may hold them already.
        """
        table = request.table
        if table is None or not self.enable_prefix_caching:
            return set()
        first = num_tokens // self.block_size
        block_ids = {
            block_id for blocks in table.blocks for block_id in blocks[first:] if block_id != OUTSIDE
        }
        self.pool.forget(block_ids)
        table.num_kept = min(table.num_kept, first)
        return block_ids

    def withdraw(self, offers: Iterable[tuple[bytes, int]]) -> set[int]:
        """Makes blocks that `keep` gave unfindable, whoever has them: they were not computed after all.

        Returns:
            Their ids, without those that hold something else by now.
        """
        block_ids = {block_id for key, block_id in offers if self.pool.cached(key) == block_id}
        self.pool.forget(block_ids)
        return block_ids

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Gives `child`, which has computed the same tokens, a table of its own.

        Full blocks are shared; one that is still written is copied.

        Returns:
            (from, to) of each block to copy; None, and nothing changes, if there is no room for them.
        """
        source = parent.table
        assert source is not None and child.table is None, (parent, child)
        count = child.num_computed_tokens // self.block_size
        partial = child.num_computed_tokens % self.block_size > 0
        taken = self.pool.allocate(len(source.blocks) if partial else 0)
        if taken is None:
            return None
        blocks = [group[:count] for group in source.blocks]
        copies = []
        for group, own in enumerate(blocks):
            for block_id in own:
                if block_id != OUTSIDE:
                    self.pool.incref(block_id)
            if partial:
                copies.append((source.blocks[group][count], taken[group]))
                own.append(taken[group])
        released = [min(number, count) for number in source.released]
        child.table = BlockTable(blocks, released, min(source.num_kept, count))
        return copies

    def free(self, request: Request, now: float = 0.0) -> None:
        """Gives the request's blocks back, its last block first; no effect if it has none."""
        table, request.table = request.table, None
        if table is None:
            return
        for blocks, released in zip(table.blocks, table.released, strict=True):
            # The beginning of a sequence is what others may share: it is to be reused last.
            self.pool.free(reversed(blocks[released:] if released else blocks), now)

    def block_ids(self, request: Request) -> list[list[int]]:
        """A copy of the request's block tables, one per group; empty ones if it has none."""
        table = request.table
        return [list(blocks) for blocks in table.blocks] if table else [[] for _ in self.groups]

    def pin(self, request: Request, num_tokens: int, name: Hashable, deadline: float) -> int:
        """Holds the full blocks of the request's first tokens beyond its end, instead of the name's old ones.

        The limit is kept by giving up other pins, least recently used first, and then by pinning less. It
        also bounds how many pins there are, as any number of them may share their blocks.

        Args:
            deadline: in seconds of `expire`; a later one that the name had stays.

        Returns:
            Tokens pinned.
        """
        before = self._pins.get(name)
        if before is not None:
            deadline = max(deadline, before.deadline)
        self.unpin(name)
        count = min(num_tokens, request.num_computed_tokens) // self.block_size
        if not self.enable_prefix_caching or not count:
            return 0
        table = request.table
        assert table is not None, request
        count = min(count, self._max_pinned // max(1, self.num_full_groups))
        block_ids = [b for blocks in table.blocks for b in blocks[:count] if b != OUTSIDE]
        if not block_ids:
            return 0
        while self._pins and max(len(self._pinned) + len(block_ids), len(self._pins) + 1) > self._max_pinned:
            self.unpin(next(iter(self._pins)))
        for block_id in block_ids:
            self.pool.incref(block_id)
        self._pinned.update(block_ids)
        self._pins[name] = _Pin(block_ids, deadline)
        self._first_deadline = min(self._first_deadline, deadline)
        return count * self.block_size

    def touch_pin(self, name: Hashable, deadline: float) -> None:
        """A pin is used: it becomes the last to give way, and lives until `deadline`."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            pin.deadline = deadline
            self._pins[name] = pin
            self._first_deadline = min(self._first_deadline, deadline)

    def unpin(self, name: Hashable) -> bool:
        """Releases what the name holds; False if that is nothing."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self.pool.free(reversed(pin.block_ids), self._now)
        for block_id in pin.block_ids:
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]
        return True

    def unpin_all(self) -> int:
        count = len(self._pins)
        for name in list(self._pins):
            self.unpin(name)
        return count

    def break_pin(self) -> bool:
        """Gives up the least recently used pin for a request that could not run otherwise."""
        if not self._pins:
            return False
        self.num_broken_pins += 1
        return self.unpin(next(iter(self._pins)))

    @property
    def pins(self) -> dict[Hashable, float]:
        """Names and deadlines of what is pinned, least recently used first."""
        return {name: pin.deadline for name, pin in self._pins.items()}

    def expire(self, now: float) -> None:
        """Lets go of pins and cached blocks whose time is over."""
        self._now = now
        if self._first_deadline <= now:
            for name, pin in list(self._pins.items()):
                if pin.deadline <= now:
                    self.unpin(name)
            self._first_deadline = min((pin.deadline for pin in self._pins.values()), default=math.inf)
        self.pool.expire(now)

    def reset(self) -> int:
        """Empties the prefix cache; running requests keep their blocks. Returns how many could be found."""
        self.unpin_all()
        count = self.pool.forget_all()
        if self.events is not None:
            self.events.all_cleared()
        return count

    def _new_table(self) -> BlockTable:
        return BlockTable([[] for _ in self.groups], [0] * len(self.groups))

    def _evicted(self, key: bytes) -> None:
        # Keys of other groups are longer by the group's number.
        if self.events is not None and len(key) == 16:
            self.events.block_removed(key)

    def _release(self, request: Request, table: BlockTable) -> None:
        """Gives back blocks that no token still to be computed sees."""
        for group, blocks in enumerate(table.blocks):
            window = self.groups[group].window
            if window is None:
                continue
            end = max(0, request.num_computed_tokens - window + 1) // self.block_size
            first = table.released[group]
            if end > first:
                self.pool.free(blocks[first:end])
                blocks[first:end] = [OUTSIDE] * (end - first)
                table.released[group] = end

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that only `requests` hold blocks, enough and not too many; O(blocks), for tests."""
        self.pool.check_integrity()
        references: Counter[int] = Counter()
        for request in requests:
            table = request.table or self._new_table()
            low = -(-request.num_computed_tokens // self.block_size)
            high = -(-(request.num_tokens + request.num_pending_tokens) // self.block_size)
            for blocks, released, group in zip(table.blocks, table.released, self.groups, strict=True):
                assert low <= len(blocks) <= high, f"{request} has {len(blocks)} blocks: [{low}, {high}]"
                assert released == blocks.count(OUTSIDE) and (group.window is not None or not released)
                assert all(block_id == OUTSIDE for block_id in blocks[:released]), blocks
                held = blocks[released:]
                assert len(set(held)) == len(held), f"{request} has a block twice: {held}"
                references.update(held)
        pinned = Counter(block_id for pin in self._pins.values() for block_id in pin.block_ids)
        assert pinned == self._pinned, "pinned blocks miscounted"
        assert all(pin.deadline >= self._first_deadline for pin in self._pins.values()), self._pins
        references.update(pinned)
        for block_id in range(self.num_blocks):
            count = self.pool.ref_count(block_id)
            assert count == references[block_id], f"block {block_id}: {count} != {references[block_id]}"
