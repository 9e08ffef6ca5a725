"""BlockTransfers: schedules saves to and loads from the KV tiers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.core.block_hash import group_key, hash_blocks
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.prefix import IN_TIER, NULL_BLOCK, CachedPrefix
from quire.core.request import Request, SwappedBlocks
from quire.outputs import KVLoad, KVSave

if TYPE_CHECKING:
    from quire.kv_tiers import KVTiers


class BlockTransfers:
    """Connects the pool to the KV tiers; without tiers, prefixes are found in the pool alone.

    Cached blocks are written through to the tiers, so eviction needs no copy, and a restarted engine finds
    the blocks in tiers that outlive it. A request whose blocks are being loaded takes part in no step until
    the load ends. Blocks that a load fills stay allocated until it ends, even if their request ends before.

    Args:
        should_swap: returns whether to swap n blocks out and back rather than compute m tokens.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        tiers: KVTiers | None = None,
        should_swap: Callable[[int, int], bool] = lambda num_blocks, num_tokens: False,
    ) -> None:
        self.kv = kv
        self.tiers = tiers
        self.num_loaded_tokens = 0
        """Number of tokens since start that need not be computed, thanks to complete loads from the KV tiers;
        an upper bound for models with windows or states."""
        self.num_swaps = 0
        self._should_swap = should_swap
        self._saves: list[KVSave] = []
        self._loads: list[KVLoad] = []
        self._ids = itertools.count(1)
        self._under_way: dict[int, tuple[Request, list[bytes], int]] = {}
        self._loading_keys: set[bytes] = set()
        self._invalid_loads: set[int] = set()
        """Ids of loads whose requests also hold blocks of the pool that may be invalid."""
        self._private_keys = itertools.count()

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """Returns the bytes per second to the tiers and back; None: not measured, or there are no
        tiers."""
        if self.tiers is None:
            return None, None
        return self.tiers.save_bytes_per_s, self.tiers.load_bytes_per_s

    @property
    def num_loading(self) -> int:
        return len(self._under_way)

    @property
    def loading(self) -> list[Request]:
        """Requests with a load under way, including ended ones."""
        return [request for request, _, _ in self._under_way.values()]

    @property
    def lost_loads(self) -> list[int]:
        """Returns the ids of the loads that the runner will never report after a failed step: they had not
        begun, or their report was lost with the step."""
        if self.tiers is None:
            return []
        planned = {load.load_id for load in self._loads}
        handed_over = self._under_way.keys() - planned
        return [load_id for load_id in sorted(handed_over) if not self.tiers.is_loading(load_id)]

    def prefetch(self, request: Request) -> None:
        """Asks the tiers to begin to fetch the blocks that a waiting request needs and the pool lacks. No
        effect without tiers or without prefix caching."""
        if self.tiers is None or not self.kv.enable_prefix_caching:
            return
        size = self.kv.block_size
        count = request.num_reusable_tokens // size
        hashes = hash_blocks(request, count, size)[:count]
        keys = [
            key
            for number, group in enumerate(self.kv.groups)
            for content in hashes[0 if group.window is None else max(0, count - group.window // size - 1) :]
            if self.kv.pool.cached(key := group_key(content, number)) is None
        ]
        if keys:
            self.tiers.prefetch(keys)

    def find_prefix(self, request: Request) -> CachedPrefix | None:
        """Returns the longest cached prefix that the request may use; None: a load under way brings blocks of
        it."""
        if self.tiers is None:
            return self.kv.find_prefix(request)
        prefix = self.kv.find_prefix(request, self.tiers.contains if request.uses_tiers else None)
        if request.swapped is not None and request.swapped.num_tokens > prefix.num_tokens:
            prefix = self._with_swapped(prefix, request.swapped)
        if self._loading_keys:
            for group, blocks in enumerate(prefix.block_ids):
                places = (index for index, block_id in enumerate(blocks) if block_id == IN_TIER)
                if any(self._key(request, prefix, group, index) in self._loading_keys for index in places):
                    return None
        return prefix

    def begin(self, request: Request, prefix: CachedPrefix) -> None:
        """Gives the request its cached prefix, and plans to load the blocks that are not in the pool."""
        to_fill = self.kv.begin_with(request, prefix)
        if not to_fill:
            return
        load_id = next(self._ids)
        keys = [self._key(request, prefix, group, index) for index, group, _ in to_fill]
        assert self.tiers is not None
        self.tiers.touch(keys)  # what this very step saves must not push them out
        first = to_fill[0][0]
        if any(NULL_BLOCK in blocks[:first] for blocks in prefix.block_ids):
            first = 0
        gain = prefix.num_tokens - first * self.kv.block_size
        blocks = [(key, block_id) for key, (_, _, block_id) in zip(keys, to_fill, strict=True)]
        self._loads.append(KVLoad(load_id, blocks))
        self._under_way[load_id] = request, keys, gain
        self._loading_keys.update(keys)
        request.load_id = load_id

    def finish_load(self, load_id: int, num_valid: int) -> tuple[Request, bool]:
        """Processes the end of a load.

        Returns:
            The request, and whether all its blocks are valid. If they are not, or if the request has ended
            meanwhile, the caller must free its block table. After invalid blocks the request is computed
            without the tiers.
        """
        request, keys, gain = self._under_way.pop(load_id)
        self._loading_keys.difference_update(keys)
        request.load_id = None
        complete = num_valid == len(keys) and load_id not in self._invalid_loads
        self._invalid_loads.discard(load_id)
        if complete:
            self.num_loaded_tokens += gain
        else:
            request.uses_tiers = False
        self.drop(request)
        return request, complete

    def invalidate_load(self, request: Request) -> None:
        """Marks the request's load as incomplete if the request also found blocks in the pool, which may be
        invalid."""
        assert request.load_id is not None, request
        _, keys, _ = self._under_way[request.load_id]
        if self.kv.num_held_blocks(request) > len(keys):
            self._invalid_loads.add(request.load_id)

    def save(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """Plans to write these blocks through to the tiers, with the next step; they are computed before it.
        No effect without tiers.

        Blocks that can no longer be found are left out. Their content may be overwritten, because a step
        launched ahead reuses them or the cache was emptied meanwhile.
        """
        if self.tiers is None:
            return
        num_clears = self.tiers.num_clears
        cached = self.kv.pool.cached
        self._saves += [
            KVSave(key, block, False, num_clears) for key, block in blocks if cached(key) == block
        ]

    def forget_saves(self) -> None:
        """Drops the planned writes to the tiers, because their blocks may not have been computed. Writes of
        swapped blocks stay."""
        self._saves = [save for save in self._saves if save.pinned]

    def swap_out(self, request: Request) -> bool:
        """Plans to swap the request's blocks out to the host tier if the request may use tiers, `should_swap`
        says so and the tier has room; returns whether it did.

        It saves all blocks with computed tokens, even those that others may keep in the pool.
        """
        if self.tiers is None or not request.uses_tiers or not request.num_computed_tokens:
            return False
        count = self.kv.num_held_blocks(request)
        num_pinned = sum(save.pinned for save in self._saves)
        if not self._should_swap(count, request.num_computed_tokens):
            return False
        if not self.tiers.can_pin(num_pinned + count):
            return False
        end = -(-request.num_computed_tokens // self.kv.block_size)
        keys: list[dict[int, bytes]] = []
        for blocks in self.kv.block_ids(request):
            own = {
                index: b"swap" + next(self._private_keys).to_bytes(12, "big")
                for index, block_id in enumerate(blocks[:end])
                if block_id != NULL_BLOCK
            }
            self._saves += [KVSave(key, blocks[index], pinned=True) for index, key in own.items()]
            keys.append(own)
        request.swapped = SwappedBlocks(request.num_computed_tokens, keys)
        self.num_swaps += 1
        return True

    def drop(self, request: Request) -> None:
        """Drops a request's swapped blocks in the host tier and the planned writes of them."""
        if request.swapped is not None:
            assert self.tiers is not None
            keys = [key for group in request.swapped.keys for key in group.values()]
            saves = {save.key for save in self._saves}
            if not saves.isdisjoint(keys):
                gone = set(keys)
                self._saves = [save for save in self._saves if save.key not in gone]
            self.tiers.drop(keys)
            request.swapped = None

    def pop_planned(self) -> tuple[list[KVSave], list[KVLoad]]:
        """Returns the saves and loads for the next step, and clears both lists."""
        saves, self._saves = self._saves, []
        loads, self._loads = self._loads, []
        return saves, loads

    @property
    def has_work(self) -> bool:
        """Returns whether blocks are to be moved or are being loaded."""
        return bool(self._saves or self._loads or self._under_way)

    def _with_swapped(self, prefix: CachedPrefix, swapped: SwappedBlocks) -> CachedPrefix:
        """Returns the prefix of a swapped request: blocks still in the pool, and the others in the host
        tier."""
        count = -(-swapped.num_tokens // self.kv.block_size)
        block_ids = []
        for found, keys in zip(prefix.block_ids, swapped.keys, strict=True):
            row = [IN_TIER if index in keys else NULL_BLOCK for index in range(count)]
            for index in range(min(len(found), count)):
                if index in keys and found[index] >= 0:
                    row[index] = found[index]
            block_ids.append(row)
        return CachedPrefix(swapped.num_tokens, block_ids)

    def _key(self, request: Request, prefix: CachedPrefix, group: int, index: int) -> bytes:
        # Beyond what was swapped out the tiers have whole blocks by content; the last swapped one may not be.
        if request.swapped is not None and prefix.num_tokens <= request.swapped.num_tokens:
            key = request.swapped.keys[group].get(index)
            if key is not None:
                return key
        return group_key(request.block_hashes[index], group)
