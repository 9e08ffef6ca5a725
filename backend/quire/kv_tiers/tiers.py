"""KVTiers: combines the tiers beside the pool, fastest first.

The scheduler asks which blocks exist and plans moves; the runner saves and loads. A save copies the blocks
before it returns, because they may be overwritten right after. Loads run on a separate thread while steps go
on.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np

from quire.config import CacheConfig, KVConnectorConfig
from quire.errors import ConfigError, describe
from quire.kv_tiers.connector import BlockAccess, BlockArray, KVConnector
from quire.kv_tiers.disk import DiskTier
from quire.kv_tiers.host import HostTier
from quire.kv_tiers.throttled_warnings import ThrottledWarnings
from quire.outputs import KVLoad, KVSave

logger = logging.getLogger("quire")

P = ParamSpec("P")
T = TypeVar("T")

CHUNK_BYTES = 4 * 2**20
"""Most bytes of a buffer through which blocks move, unless one block is larger."""
MAX_DROPPED_EARLY = 65536
"""Most keys of dropped blocks that KVTiers remembers because their pinned saves may still come."""
MAX_PREFETCHES = 4096
"""Most blocks that may wait for prefetching; further ones are skipped."""
REST_S = 5.0
"""Seconds for which a store that raised usually gets neither loads nor saves."""
CLOSE_TIMEOUT_S = 10.0
RATE_MEMORY = 0.9
"""Factor by which the weight of earlier transfers in a measured rate shrinks with each new transfer."""


class _Tier:
    """A store whose failures count as misses. After an exception, except in `stats`, the tier rests for
    REST_S: `is_resting` is true, and `contains` returns False."""

    def __init__(self, store: KVConnector, clock: Callable[[], float]) -> None:
        self.store = store
        self.num_failures = 0
        self._clock = clock
        self._rests_until = 0.0
        self._warnings = ThrottledWarnings(clock)

    @property
    def is_resting(self) -> bool:
        return self._rests_until > 0.0 and self._clock() < self._rests_until

    def attempt(self, otherwise: T, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store; returns `otherwise` if it raises an Exception."""
        try:
            return method(*args, **kwargs)
        except Exception as error:
            self._fail(error)
            return otherwise

    def contains(self, key: bytes) -> bool:
        """Returns whether the store says that it has the block; False while the tier rests or if the store
        fails."""
        if self.is_resting:
            return False
        try:
            return self.store.contains(key)
        except Exception as error:
            self._fail(error)
            return False

    def stats(self) -> dict[str, float]:
        """Returns the store's statistics; empty if the store raises, or if they are not finite numbers by
        name."""
        try:
            found = {str(name): float(value) for name, value in self.store.stats().items()}
            if all(map(math.isfinite, found.values())):
                return found
            raise ValueError("not all are finite")
        except Exception as error:
            what = f"KV tier {self.store.name} has no usable stats(): {describe(error)}"
            self._warnings.warn("stats", what)
        return {}

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        self._rests_until = self._clock() + REST_S
        what = f"KV tier {self.store.name} failed and rests for {REST_S:.0f} s: {describe(error)}"
        self._warnings.warn(type(error).__name__, what)


class _Rate:
    """Average bytes per second of transfers, in which later transfers count more."""

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> float:
        """Adds a transfer; returns the new rate."""
        self._num_bytes = self._num_bytes * RATE_MEMORY + num_bytes
        self._seconds = self._seconds * RATE_MEMORY + max(seconds, 1e-9)
        return self._num_bytes / self._seconds


class KVTiers:
    """Combines the stores.

    The engine's thread calls the scheduler's half: `contains`, `touch`, `can_pin`, `is_loading`, `prefetch`,
    `drop`, `clear`, `stats`. The runner's thread, which may be another one, calls `save`, `start_load` and
    `poll`; the engine's thread calls `poll` as well while nothing is computed. A separate thread carries out
    loads and prefetches.

    Pinned blocks (of swapped requests) are only in the host tier. Each has its own key, which is saved at
    most once and dropped once. KVTiers remembers a drop that comes first (MAX_DROPPED_EARLY) and skips the
    save, so a plan carried out after its request has gone leaves nothing behind. `can_pin` does not know of
    planned saves that have not happened yet, so callers must add those to the count. A pinned block that
    still finds no room is skipped, and a later load does not find it.
    """

    def __init__(
        self,
        stores: Sequence[KVConnector],
        access: BlockAccess,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes ownership of the stores, fastest first; `close` closes them. Only the first may be a
        HostTier."""
        assert stores, "nothing to join"
        self._tiers = [_Tier(store, clock) for store in stores]
        self._host = stores[0] if isinstance(stores[0], HostTier) else None
        self._access = access
        num_rows = max(1, CHUNK_BYTES // access.block_bytes)
        self._save_buffer: BlockArray = np.empty((num_rows, access.block_bytes), dtype=np.uint8)
        self._load_buffer: BlockArray = np.empty((num_rows, access.block_bytes), dtype=np.uint8)
        self._save_rate, self._load_rate = _Rate(), _Rate()
        self.save_bytes_per_s: float | None = None
        """Bytes per second of saves, in which later saves count more; None: nothing was saved yet. Waiting
        for the device is included."""
        self.load_bytes_per_s: float | None = None
        """Bytes per second of loads from the fastest tier, in which later loads count more; None: nothing was
        loaded from it yet. The time in the queue is not included."""
        self.num_clears = 0
        """Number of `clear` calls. The plan of a save that is not pinned contains the number at that time
        (`KVSave.num_clears`)."""
        self._saving = threading.Lock()
        """Lock held during `drop` and `clear`, and while `save` calls the stores."""
        self._dropped_early: dict[bytes, None] = {}
        """Keys that were dropped while the host tier did not have them, oldest first. Their saves may still
        come."""
        self._changed = threading.Condition()
        self._loads: deque[KVLoad] = deque()
        self._prefetches: dict[bytes, None] = {}
        """Keys to prefetch, in order of arrival."""
        self._done: list[tuple[int, int]] = []
        self._loading: set[int] = set()
        """Ids of loads that were started and that `poll` has not reported."""
        self._is_working = False
        self._is_closing = False
        self._num_prefetched = self._num_failed_loads = 0
        self._thread = threading.Thread(target=self._run, name="quire-kv-transfer", daemon=True)
        self._thread.start()

    # The scheduler's half.

    def contains(self, key: bytes) -> bool:
        """Returns whether some tier probably has the block."""
        for tier in self._tiers:  # noqa: SIM110 - asked for every block of every candidate; any() is slower
            if tier.contains(key):
                return True
        return False

    def touch(self, keys: Sequence[bytes]) -> None:
        """Hints to each tier that these blocks will probably be loaded. It is called before a planned load,
        among others, so that saves made before the load evict other blocks first."""
        for tier in self._tiers:
            tier.attempt(None, tier.store.touch, keys)

    def is_loading(self, load_id: int) -> bool:
        """Returns whether the load was started and `poll` has not reported it."""
        with self._changed:
            return load_id in self._loading

    def can_pin(self, count: int) -> bool:
        """Returns whether the host tier could pin `count` more blocks now; False without a host tier."""
        return self._host is not None and self._host.can_pin(count)

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Touches these blocks in all tiers. The transfer thread then copies those that the host tier lacks
        into it from slower tiers, when no load waits. At most MAX_PREFETCHES may wait for that. Without a
        host tier, passes on the hint to each store for the blocks that the first store lacks."""
        self.touch(keys)
        wanted = [key for key in keys if not self._tiers[0].contains(key)]
        if self._host is None:
            for tier in self._tiers:
                tier.attempt(None, tier.store.prefetch, wanted)
            return
        with self._changed:
            for key in wanted:
                if len(self._prefetches) < MAX_PREFETCHES:
                    self._prefetches[key] = None
            self._changed.notify_all()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks, pinned or not, in all tiers."""
        with self._saving:
            if self._host is not None:
                for key in itertools.filterfalse(self._host.contains, keys):
                    self._dropped_early[key] = None
                while len(self._dropped_early) > MAX_DROPPED_EARLY:
                    del self._dropped_early[next(iter(self._dropped_early))]
            for tier in self._tiers:
                tier.attempt(None, tier.store.drop, keys)

    def clear(self) -> int:
        """Forgets all blocks except pinned ones; returns how many, summed over the tiers.

        Waits if blocks are being written to the stores. Saves that were planned before are not carried out,
        except those of pinned blocks.
        """
        with self._saving, self._changed:
            self.num_clears += 1
            self._prefetches.clear()
            return sum(tier.attempt(0, tier.store.clear) for tier in self._tiers)

    def stats(self) -> dict[str, float]:
        """Returns the statistics of all stores, each prefixed by its store's name, and those of KVTiers
        itself."""
        values: dict[str, float] = {
            "loads_under_way": len(self._loading),
            "failed_loads": self._num_failed_loads,
            "prefetched_blocks": self._num_prefetched,
            "save_bytes_per_s": self.save_bytes_per_s or 0.0,
            "load_bytes_per_s": self.load_bytes_per_s or 0.0,
        }
        for tier in self._tiers:
            name = tier.store.name
            values[f"{name}_failures"] = tier.num_failures
            for key, value in tier.stats().items():
                values[f"{name}_{key}"] = value
        return values

    # The runner's half.

    def save(self, saves: Sequence[KVSave]) -> None:
        """Copies blocks out of the pool, where they may be overwritten as soon as this returns.

        Pinned blocks go to the host tier only. They are there on return, unless it has no room or they were
        dropped before. Other blocks go to all tiers if a tier lacks them, unless the tiers were cleared since
        the save was planned. A tier that rests is left out, and a store may skip blocks.
        """
        wanted = [save for save in saves if save.pinned or not all(t.contains(save.key) for t in self._tiers)]
        rows = len(self._save_buffer)
        for begin in range(0, len(wanted), rows):
            self._save_chunk(wanted[begin : begin + rows])

    def _save_chunk(self, saves: Sequence[KVSave]) -> None:
        began = time.perf_counter()
        data = self._save_buffer[: len(saves)]
        self._access.read([save.block_id for save in saves], data)
        pinned = [index for index, save in enumerate(saves) if save.pinned]
        with self._saving:
            if pinned:
                assert self._host is not None, "blocks are pinned without a host tier"
                still = [index for index in pinned if saves[index].key not in self._dropped_early]
                self._host.save([saves[index].key for index in still], data[still], pinned=True)
                for index in pinned:
                    self._dropped_early.pop(saves[index].key, None)
            cached = [
                index
                for index, save in enumerate(saves)
                if not save.pinned and save.num_clears == self.num_clears
            ]
            if cached:
                keys = [saves[index].key for index in cached]
                rows = data if len(cached) == len(saves) else data[cached]
                for tier in self._tiers:
                    if not tier.is_resting:
                        tier.attempt(None, tier.store.save, keys, rows)
        self.save_bytes_per_s = self._save_rate.add(data.nbytes, time.perf_counter() - began)

    def start_load(self, load: KVLoad) -> None:
        """Queues a load of blocks into the pool, behind earlier loads; `poll` reports its end."""
        with self._changed:
            self._loading.add(load.load_id)
            self._loads.append(load)
            self._changed.notify_all()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, int]]:
        """Returns the loads that ended since the last call, as (load id, number of leading blocks that are
        valid).

        Args:
            timeout_s: most seconds to wait for the first one, if any is under way.
        """
        with self._changed:
            if self._loading and timeout_s > 0:
                self._changed.wait_for(lambda: self._done, timeout_s)
            done, self._done = self._done, []
            self._loading.difference_update(load_id for load_id, _ in done)
        return done

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for all loads and prefetches, then for each store's background work. Returns False if one of
        these takes longer than `timeout_s` seconds (None: no limit), or if a store fails."""
        with self._changed:
            is_idle = self._changed.wait_for(
                lambda: not (self._loads or self._prefetches or self._is_working), timeout_s
            )
        return is_idle and all(tier.attempt(False, tier.store.flush, timeout_s) for tier in self._tiers)

    def close(self) -> None:
        """Ends the load under way after its current chunk, for which it waits CLOSE_TIMEOUT_S at most. Then
        closes the stores. Loads that have not begun are dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("KV tiers: a load did not end within %.0f s", CLOSE_TIMEOUT_S)
        for tier in self._tiers:
            tier.attempt(None, tier.store.close)

    # The transfer thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._prefetches or self._is_closing)
                if self._is_closing:
                    return
                load = self._loads.popleft() if self._loads else None
                if load is None:
                    keys = list(itertools.islice(self._prefetches, len(self._load_buffer)))
                    for key in keys:
                        del self._prefetches[key]
                self._is_working = True
            try:
                if load is None:
                    self._fetch_ahead(keys)
                else:
                    self._load(load)
            except Exception:
                logger.exception("KV tiers: a transfer failed")

    def _load(self, load: KVLoad) -> None:
        num_valid = 0
        try:
            while num_valid < len(load.blocks) and not self._is_closing:
                chunk = load.blocks[num_valid : num_valid + len(self._load_buffer)]
                began = time.perf_counter()
                count, tier = self._fetch([key for key, _ in chunk])
                if count == 0:
                    self._num_failed_loads += 1
                    return
                self._access.write([block_id for _, block_id in chunk[:count]], self._load_buffer[:count])
                num_valid += count
                if tier is self._tiers[0]:
                    num_bytes = count * self._access.block_bytes
                    self.load_bytes_per_s = self._load_rate.add(num_bytes, time.perf_counter() - began)
        finally:
            with self._changed:
                self._done.append((load.load_id, num_valid))
                self._changed.notify_all()

    def _fetch_ahead(self, keys: list[bytes]) -> None:
        assert self._host is not None
        missing = [key for key in keys if not self._host.contains(key)]
        while missing and not self._is_closing:
            count, _ = self._fetch(missing)
            self._num_prefetched += count
            missing = missing[max(count, 1) :]

    def _fetch(self, keys: Sequence[bytes]) -> tuple[int, _Tier | None]:
        """Reads leading blocks into the buffer's first rows, from the fastest tier that gives the first one.

        Returns:
            The number of blocks and their tier; (0, None): none could be read. Blocks from a slower tier are
            also saved to the host tier, if there is one, unless the tiers were cleared meanwhile.
        """
        num_clears = self.num_clears
        for tier in self._tiers:
            wanted = list(itertools.takewhile(tier.contains, keys))
            if not wanted:
                continue
            count = tier.attempt(0, tier.store.load, wanted, self._load_buffer[: len(wanted)])
            assert 0 <= count <= len(wanted), f"{tier.store.name}: load returned {count}"
            if count == 0:
                continue
            if self._host is not None and tier.store is not self._host:
                self._host.save(wanted[:count], self._load_buffer[:count])
                if self.num_clears != num_clears:
                    self._host.drop(wanted[:count])
            return count, tier
        return 0, None


def make_tiers(cache: CacheConfig, access: BlockAccess, fingerprint: str) -> KVTiers | None:
    """Returns the tiers that a configuration asks for: host, disk, connector, in this order; None: there are
    none.

    Args:
        fingerprint: `quire.kv_tiers.fingerprint`, if the configuration `needs_fingerprint`.

    Raises:
        ConfigError: a tier cannot be created; the message names the configuration key.
    """
    stores: list[KVConnector] = []
    try:
        if cache.host_cache_memory:
            stores.append(HostTier(cache.host_cache_memory, access.block_bytes))
        if cache.disk_cache_directory:
            stores.append(
                DiskTier(
                    cache.disk_cache_directory,
                    cache.disk_cache_size,
                    block_bytes=access.block_bytes,
                    fingerprint=fingerprint,
                )
            )
        if cache.kv_connector.connector:
            stores.append(make_connector(cache.kv_connector, access.block_bytes, fingerprint))
    except ConfigError:
        for store in stores:
            store.close()
        raise
    return KVTiers(stores, access) if stores else None


def make_connector(config: KVConnectorConfig, block_bytes: int, fingerprint: str) -> KVConnector:
    module, _, name = config.connector.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
        if not issubclass(kind, KVConnector):
            raise TypeError(f"{name} is no quire.kv_tiers.KVConnector")
        return kind(block_bytes=block_bytes, fingerprint=fingerprint, **config.options)
    except Exception as error:
        raise ConfigError(f"kv_connector: {config.connector}: {type(error).__name__}: {error}") from None
