"""KVCacheManager: maps each request to the blocks that hold its keys and values, and its states."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from quire.core.block_hash import extra_keys, group_key, hash_blocks
from quire.core.block_pool import BlockPool
from quire.core.kv_events import KVEventCollector
from quire.core.pins import Pins
from quire.core.prefix import IN_TIER, NULL_BLOCK, CachedPrefix, PrefixLookup
from quire.core.request import Request, RequestBlocks
from quire.models.kv_groups import KVGroup, blocks_per_sequence


class KVCacheManager:
    """Keeps the block tables of the running requests, over one pool of blocks.

    Token i of a request lies, for the layers of group g, in block `block_ids(request)[g][i // block_size]` at
    offset `i % block_size`. With prefix caching, requests with the same first tokens, images, positions,
    cache salt and adapter can share the full blocks of that prefix. A full block is found by the hash of its
    content and of all that precedes it; while it can be found, only the step that fills it writes to it. A
    table only grows while it exists, and its older entries change only to NULL_BLOCK, so the runner only
    needs the appended entries. A table has no more blocks than its tokens need: at most `block_size - 1`
    slots of a sequence are unused. In a group with a window, blocks wholly before the window are freed.

    In a group of states a request holds one block, the last of its table, with the state after its computed
    tokens. The table's other blocks are NULL_BLOCK. Rows write the state in place, and its block moves to the
    end of the table when the table grows. A state at a block boundary is a snapshot: it can be shared and
    found like a full block. Its request continues in a copy, which the step makes before it computes
    anything. A request without computed tokens begins with a zero state, whatever its block contains.

    A block of keys and values can be found as soon as the step that fills it is planned. If some of its
    tokens are still pending then, it can be found once they are known and a later row of its request is
    planned, or its request has ended. Within one step all keys and values of a layer are written before any
    are read, so a request in the same step can share the block. A snapshot can be found once the next row of
    its request is planned, or its request has ended.

    Args:
        groups: layers that need the same past, groups of states last; see `quire.models.kv_groups`.
        enable_prefix_caching: whether blocks can be found by their content.
        cache_ttl_s, max_pinned_fraction: as in CacheConfig.
        max_step_tokens: most tokens of one request in a step, drafts aside; bounds what a group with a window
            needs.
        events: learns which blocks of group 0 can be found, and which no longer; None: no events.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[KVGroup] = (KVGroup(None, (0,)),),
        enable_prefix_caching: bool = False,
        cache_ttl_s: float = 0.0,
        max_pinned_fraction: float = 0.5,
        max_step_tokens: int = 512,
        events: KVEventCollector | None = None,
    ) -> None:
        assert block_size >= 1, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_cached_tokens = 0
        """Number of tokens since start that were found cached at the first admission of a request, in the
        pool or in a KV tier. If blocks of a request cannot be loaded, its tokens are subtracted again, unless
        it has ended."""
        self.num_queried_tokens = 0
        """Number of tokens since start that requests had at their first admission, without the engine's own
        requests."""
        self.block_size = block_size
        self.groups = tuple(groups)
        self.num_full_groups = sum(group.window is None for group in self.groups)
        self.num_state_groups = sum(group.is_state for group in self.groups)
        self._token_groups = self.groups[: len(self.groups) - self.num_state_groups]
        assert not any(group.is_state for group in self._token_groups), groups
        self._is_uniform = len(self.groups) == self.num_full_groups == 1
        self.max_step_tokens = max_step_tokens
        self.cache_ttl_s = cache_ttl_s
        self.events = events
        self.pool = BlockPool(
            num_blocks,
            on_evict=None if events is None else self._evicted,
        )
        self.no_blocks: list[list[int]] = [[] for _ in self.groups]
        """Result of allocate_slots if no block is appended: an empty list for each KV group. Callers must not
        change it."""
        self.pins = Pins(self.pool, int(max_pinned_fraction * num_blocks))
        self._lookup = PrefixLookup(self.groups, block_size, self.pool)
        self._copies: list[tuple[int, int]] = []
        self._snapshots: list[tuple[bytes, int]] = []
        """(key, block id) of each snapshot that the row being planned leaves behind."""
        self._now = 0.0  # of the latest expire()

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return self.pool.num_available

    @property
    def capacity(self) -> int:
        """Most tokens of one sequence that the whole pool can hold; 2**62 if windows bound the blocks of a
        sequence, however long, to the number in the pool."""
        if not self.num_full_groups and self.num_blocks_for(2**62) <= self.num_blocks:
            return 2**62
        low, high = 0, self.num_blocks // max(1, self.num_full_groups)
        while low < high:
            middle = (low + high + 1) // 2
            if self.num_blocks_for(middle * self.block_size) <= self.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    @property
    def usage(self) -> float:
        """Fraction of the blocks that are in use, in [0, 1]."""
        return self.pool.num_in_use / self.pool.num_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of this many tokens holds, over all groups."""
        return blocks_per_sequence(self.groups, num_tokens, self.block_size, self.max_step_tokens)

    def num_held_blocks(self, request: Request) -> int:
        table = request.table
        if table is None:
            return 0
        if self._is_uniform:
            return len(table.blocks[0])
        return sum(map(len, table.blocks)) - sum(table.released)

    def num_missing_blocks(self, request: Request, num_tokens: int) -> int:
        """Returns how many blocks must be appended so that `num_tokens` tokens of the request have slots.

        For a group with a window, and for states that will leave their blocks, the most blocks count that
        the request can hold at one time.
        """
        if self._is_uniform:
            missing = -(-num_tokens // self.block_size)
            if request.table is not None:
                missing -= len(request.table.blocks[0])
            return missing if missing > 0 else 0
        uncomputed = request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
        chunk = max(1, min(uncomputed, self.max_step_tokens))
        groups, num_held = self.groups, self.num_held_blocks(request)
        if self.num_state_groups and request.table is not None and num_tokens <= self.num_slots(request):
            # No state leaves its block.
            groups, num_held = self._token_groups, num_held - self.num_state_groups
        return max(0, blocks_per_sequence(groups, num_tokens, self.block_size, chunk) - num_held)

    def plain_decode_until(self, request: Request) -> int:
        """Returns the number of computed tokens up to which one-token rows leave this manager unchanged. If
        that is not above the present number (often 0), even the next row may change it.

        Up to that number each token has its slot, and no block leaves a window or, with prefix caching,
        becomes full. While `request.num_tokens` is below it,
        `num_missing_blocks(request, request.num_tokens + 1)` is 0.
        """
        table = request.table
        assert table is not None, request
        size = self.block_size
        end = -(-request.num_computed_tokens // size) * size
        if not self._is_uniform and self.num_missing_blocks(request, end):
            return 0  # in a window it may hold a block less than it can come to need
        if self.enable_prefix_caching:
            if table.num_cached < request.num_computed_tokens // size:
                return 0  # a block is full, of tokens of which some are pending
            end -= 1
        for group, released in zip(self.groups, table.released, strict=True):
            if group.window is not None:
                end = min(end, (released + 1) * size + group.window - 1)
        return end

    def num_slots(self, request: Request) -> int:
        """Returns how many tokens of a running request its block table has slots for."""
        assert request.table is not None, request
        return len(request.table.blocks[0]) * self.block_size

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[list[int]] | None:
        """Allocates slots for the request's next `num_new_tokens` tokens after its computed ones.

        Returns:
            For each group, the entries appended to its table, often none: block ids, or NULL_BLOCK in groups
            of states. Callers must not change the lists. None: the pool has too few blocks, and nothing is
            allocated. In either case blocks that have left their windows were freed.
        """
        table = request.table
        if table is None:
            table = request.table = self._new_table()
        if self.num_full_groups < len(self._token_groups):
            self._release(request, table)
        end = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size)
        count, num_token_groups = end - len(table.blocks[0]), len(self._token_groups)
        if count <= 0:
            return self.no_blocks
        missing = count * num_token_groups
        if request.num_computed_tokens % self.block_size == 0:
            missing += self.num_state_groups
        taken = self.pool.allocate(missing)
        if taken is None:
            if not table.blocks[0]:
                request.table = None
            return None
        appended = []
        for blocks in table.blocks[:num_token_groups]:
            appended.append(taken[:count])
            blocks += taken[:count]
            del taken[:count]
        for group in range(num_token_groups, len(self.groups)):
            target = taken.pop() if taken else None
            appended.append(self._advance_state(request, table, group, count, target))
        return appended

    def _advance_state(
        self, request: Request, table: RequestBlocks, group: int, count: int, target: int | None
    ) -> list[int]:
        """Appends `count` entries to the request's table in a group of states, and returns them. Only the
        last one is a block, all others are NULL_BLOCK.

        Args:
            target: a new block for the state, if the request has no state yet or its state is at a block
                boundary; None: the state keeps its block.
        """
        blocks = table.blocks[group]
        block_id = NULL_BLOCK if target is None else target
        if blocks:
            before, blocks[-1] = blocks[-1], NULL_BLOCK
            if target is None:
                block_id = before
            else:
                self._copies.append((before, target))
                if self.enable_prefix_caching and request.num_computed_tokens <= request.num_tokens:
                    index = len(blocks) - 1
                    self._snapshots += self._offer(request, group, [(index, before)])
                self.pool.free((before,), self._now)
        new = [NULL_BLOCK] * (count - 1) + [block_id]
        blocks += new
        table.released[group] = len(blocks) - 1
        return new

    def pop_copies(self) -> list[tuple[int, int]]:
        """Returns the (from, to) blocks of the states to copy before the planned step computes, and clears
        the list."""
        copies, self._copies = self._copies, []
        return copies

    def align_row(self, request: Request, num_new_tokens: int) -> int:
        """Returns `num_new_tokens`, or a smaller number if the row would pass a block boundary where a
        snapshot of the request's states is useful. The row then ends at the last boundary that is in it and
        before the request's last known token."""
        if not self.num_state_groups or not self.enable_prefix_caching:
            return num_new_tokens
        begin = request.num_computed_tokens
        last = min(begin + num_new_tokens, request.num_tokens - 1) // self.block_size * self.block_size
        return last - begin if last > begin else num_new_tokens

    def find_prefix(
        self, request: Request, is_in_tier: Callable[[bytes], bool] | None = None
    ) -> CachedPrefix:
        """Returns the longest cached prefix of the request, in the pool or in a KV tier
        (`PrefixLookup.find`); empty without prefix caching.

        Args:
            is_in_tier: returns whether a KV tier has the block with this key; None: there is no tier.
        """
        if not self.enable_prefix_caching:
            return CachedPrefix(0, [[] for _ in self.groups])
        return self._lookup.find(request, is_in_tier)

    def num_taken(self, prefix: CachedPrefix) -> int:
        """Returns by how many blocks `num_free_blocks` shrinks when a request begins with the prefix."""
        return sum(
            block_id == IN_TIER or (block_id >= 0 and self.pool.ref_count(block_id) == 0)
            for blocks in prefix.block_ids
            for block_id in blocks
        )

    def begin_with(self, request: Request, prefix: CachedPrefix) -> list[tuple[int, int, int]]:
        """Creates the block table of a request from its cached prefix and sets `num_computed_tokens`. The
        request must have no table; an empty prefix changes nothing.

        Returns:
            (position in the table, group, new block) of each IN_TIER entry, in the order of the sequence. The
            caller must fill these blocks. The pool must have room for them.
        """
        assert request.table is None and request.num_computed_tokens == 0, request
        if not prefix.num_tokens:
            return []
        for blocks in prefix.block_ids:
            for block_id in blocks:
                if block_id >= 0:
                    self.pool.incref(block_id)
        table = request.table = RequestBlocks(
            [list(blocks) for blocks in prefix.block_ids],
            [blocks.count(NULL_BLOCK) for blocks in prefix.block_ids],
        )
        to_fill = [
            (index, group)
            for group, blocks in enumerate(table.blocks)
            for index, block_id in enumerate(blocks)
            if block_id == IN_TIER
        ]
        request.num_computed_tokens = prefix.num_tokens
        if not to_fill:
            table.num_cached = prefix.num_tokens // self.block_size
            return []
        table.num_cached = min(index for index, _ in to_fill)
        taken = self.pool.allocate(len(to_fill))
        assert taken is not None, f"no room for the blocks that {request} loads"
        filled = []
        for (index, group), block_id in zip(sorted(to_fill), taken, strict=True):
            table.blocks[group][index] = block_id
            filled.append((index, group, block_id))
        return filled

    def cache_blocks(self, request: Request, *, is_over: bool = False) -> Sequence[tuple[bytes, int]]:
        """Makes the request's full blocks and snapshots findable by other requests, if all their tokens are
        known. Tokens planned for the current step count as computed.

        Args:
            is_over: whether the request computes nothing more, so that its states no longer change.

        Returns:
            (key, block id) of the blocks and snapshots that were not offered before.
        """
        if not self.enable_prefix_caching:
            return ()
        table, num_computed = request.table, request.num_computed_tokens
        assert table is not None, request
        end = min(num_computed, request.num_tokens) // self.block_size
        first = table.num_cached
        if first >= end and not self._snapshots and not is_over:
            return ()
        newly_cached, self._snapshots = self._snapshots, []
        if first < end:
            table.num_cached = end
            for group in range(len(self._token_groups)):
                newly_cached += self._offer(request, group, enumerate(table.blocks[group][first:end], first))
        if is_over and num_computed == end * self.block_size:
            for group in range(len(self._token_groups), len(self.groups)):
                newly_cached += self._offer(request, group, [(end - 1, table.blocks[group][end - 1])])
        return newly_cached

    def _offer(
        self, request: Request, group: int, blocks: Iterable[tuple[int, int]]
    ) -> list[tuple[bytes, int]]:
        """Makes blocks of the request findable, given as (position in the table of a group, block id), unless
        other blocks with their content can be found already.

        Returns:
            (key, block id) of each that is not NULL_BLOCK.
        """
        scheduling = request.scheduling
        ttl = scheduling.cache_ttl_s if scheduling.cache_ttl_s is not None else self.cache_ttl_s or None
        offered = []
        for index, block_id in blocks:
            if block_id == NULL_BLOCK:
                continue
            hashes = hash_blocks(request, index + 1, self.block_size)
            key = group_key(hashes[index], group)
            is_new = self.pool.keep(block_id, key, scheduling.retention, ttl)
            offered.append((key, block_id))
            if is_new and group == 0 and self.events is not None:
                begin = index * self.block_size
                self.events.block_stored(
                    key,
                    hashes[index - 1] if index else None,
                    request.token_ids[begin : begin + self.block_size],
                    extra_keys=extra_keys(request, begin, begin + self.block_size),
                    adapter=request.adapter,
                )
        return offered

    def uncache_from(self, request: Request, num_tokens: int) -> None:
        """Makes those blocks of the request unfindable that its first `num_tokens` tokens do not fill,
        because later tokens were not computed.

        Other requests may already hold these blocks.
        """
        table = request.table
        if table is None or not self.enable_prefix_caching:
            return
        first = num_tokens // self.block_size
        self.pool.forget(block_id for blocks in table.blocks for block_id in blocks[first:] if block_id >= 0)
        table.num_cached = min(table.num_cached, first)

    def uncache(self, newly_cached: Iterable[tuple[bytes, int]]) -> None:
        """Makes blocks that `cache_blocks` returned unfindable for all requests, because the step did not
        compute them."""
        self.pool.forget(block_id for key, block_id in newly_cached if self.pool.cached(key) == block_id)

    def fork(self, parent: Request, child: Request) -> list[tuple[int, int]] | None:
        """Creates the block table of `child`, whose computed tokens are the first ones of `parent`.

        Full blocks are shared; a partly filled one is copied. States of the parent must not be ahead of the
        child.

        Returns:
            (from, to) of each block to copy; None: the pool has no room for them, and nothing changes.
        """
        source = parent.table
        assert source is not None and child.table is None, (parent, child)
        is_ahead = parent.num_computed_tokens > child.num_computed_tokens
        assert not (is_ahead and self.num_state_groups), (parent, child)
        count = child.num_computed_tokens // self.block_size
        partial = child.num_computed_tokens % self.block_size > 0
        taken = self.pool.allocate(len(source.blocks) if partial else 0)
        if taken is None:
            return None
        blocks = [group[:count] for group in source.blocks]
        copies = []
        for group, own in enumerate(blocks):
            for block_id in own:
                if block_id != NULL_BLOCK:
                    self.pool.incref(block_id)
            if partial:
                copies.append((source.blocks[group][count], taken[group]))
                own.append(taken[group])
        released = [min(number, count) for number in source.released]
        child.table = RequestBlocks(blocks, released, min(source.num_cached, count))
        return copies

    def free(self, request: Request, now: float = 0.0) -> None:
        """Frees the request's blocks, in each group the last block first. No effect on a request without a
        block table."""
        table, request.table = request.table, None
        if table is None:
            return
        for blocks, released in zip(table.blocks, table.released, strict=True):
            # Other requests may share the beginning of a sequence, so its blocks are reused last.
            self.pool.free(reversed(blocks[released:] if released else blocks), now)

    def block_ids(self, request: Request) -> list[list[int]]:
        """Returns a copy of the request's block tables, one per group; empty lists if it has none."""
        table = request.table
        return [list(blocks) for blocks in table.blocks] if table else [[] for _ in self.groups]

    def pin(self, request: Request, num_tokens: int, name: Hashable, deadline: float) -> int:
        """Pins full blocks of the request's first `num_tokens` tokens under `name`, in place of the blocks
        that this pin had, until `deadline` or the pin's old deadline, whichever is later. If there is nothing
        to pin, the pin ends.

        `max_pinned_fraction` limits the number of blocks; the first ones are pinned. With groups of states,
        the prefix up to its newest snapshot that can be found is pinned, with that snapshot.

        Returns:
            Number of tokens pinned.
        """
        assert request.table is not None, request
        tables, most = request.table.blocks, self.pins.max_blocks
        count = min(num_tokens, request.num_computed_tokens) // self.block_size
        count = min(count, most // max(1, self.num_full_groups)) if self.enable_prefix_caching else 0

        def first(tables: Sequence[Sequence[int]], count: int) -> list[int]:
            return [b for blocks in tables for b in blocks[:count] if b != NULL_BLOCK]

        # Groups with a window add the blocks that they still have, groups of states their snapshots.
        if self.num_state_groups:
            prefix = self._lookup.find(request, most=count)
            while len(block_ids := first(prefix.block_ids, prefix.num_tokens // self.block_size)) > most:
                prefix = self._lookup.find(request, most=prefix.num_tokens // self.block_size - 1)
            count = prefix.num_tokens // self.block_size
        else:
            count = bisect_right(range(1, count + 1), most, key=lambda n: len(first(tables, n)))
            block_ids = first(tables, count)
        self.pins.hold(name, block_ids, deadline)
        return count * self.block_size if block_ids else 0

    def expire(self, now: float) -> None:
        """Releases the pins and forgets the cached blocks whose deadline has passed."""
        self._now = now
        self.pins.expire(now)
        self.pool.expire(now)

    @property
    def next_expiry(self) -> float:
        """Time before which no pin and no cached block expires; inf: none will."""
        return min(self.pins.next_expiry, self.pool.next_expiry)

    def reset(self) -> int:
        """Empties the prefix cache and releases all pins; running requests keep their blocks. Returns how
        many blocks could be found before."""
        self.pins.release_all()
        count = self.pool.forget_all()
        if self.events is not None:
            self.events.all_cleared()
        return count

    def _new_table(self) -> RequestBlocks:
        return RequestBlocks([[] for _ in self.groups], [0] * len(self.groups))

    def _evicted(self, key: bytes) -> None:
        # Keys of other groups are longer by the group's number.
        if self.events is not None and len(key) == 16:
            self.events.block_removed(key)

    def _release(self, request: Request, table: RequestBlocks) -> None:
        """Frees the blocks of keys and values that have left the windows of all tokens still to compute."""
        for group, blocks in enumerate(table.blocks[: len(self._token_groups)]):
            window = self.groups[group].window
            if window is None:
                continue
            end = max(0, request.num_computed_tokens - window + 1) // self.block_size
            first = table.released[group]
            if end > first:
                self.pool.free(blocks[first:end], self._now)
                blocks[first:end] = [NULL_BLOCK] * (end - first)
                table.released[group] = end

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Asserts that exactly `requests` and pins hold blocks, and the right number of them; O(blocks), for
        tests."""
        self.pool.check_integrity()
        references: Counter[int] = Counter()
        for request in requests:
            table = request.table or self._new_table()
            low = -(-request.num_computed_tokens // self.block_size)
            high = -(-(request.num_tokens + request.num_pending_tokens) // self.block_size)
            for blocks, released, group in zip(table.blocks, table.released, self.groups, strict=True):
                assert low <= len(blocks) <= high, f"{request} has {len(blocks)} blocks: [{low}, {high}]"
                assert released == blocks.count(NULL_BLOCK) and (group.window is not None or not released)
                assert all(block_id == NULL_BLOCK for block_id in blocks[:released]), blocks
                held = blocks[released:]
                assert len(held) <= 1 or not group.is_state, f"{request} holds states: {held}"
                assert len(set(held)) == len(held), f"{request} has a block twice: {held}"
                references.update(held)
        references.update(self.pins.check_integrity())
        for block_id in range(self.num_blocks):
            count = self.pool.ref_count(block_id)
            assert count == references[block_id], f"block {block_id}: {count} != {references[block_id]}"
