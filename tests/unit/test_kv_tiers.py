"""One conformance suite for every store of KV blocks, then the tiers joined from them.

A store of a third party is added to `STORES` to be held to the same rules.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire.kv_tiers.disk as disk_module
import quire.kv_tiers.tiers as tiers_module
from quire.config import CacheConfig, KVConnectorConfig
from quire.errors import ConfigError
from quire.kv_tiers import (
    BlockArray,
    DiskTier,
    HostTier,
    KVConnector,
    KVTiers,
    make_tiers,
)
from quire.kv_tiers.block_file import HEADER_BYTES, allocated_bytes
from quire.kv_tiers.block_file import write_block as real_write_block
from quire.outputs import KVLoad, KVSave
from tests.fixtures.loopback import LoopbackConnector

FINGERPRINT = "0123456789abcdef" * 2
BLOCK_BYTES = 512
WAIT_S = 60.0
"""Far more than anything here takes: reached only by a test that fails."""

Build = Callable[..., KVConnector]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def block(number: int, block_bytes: int = BLOCK_BYTES) -> BlockArray:
    """uint8 [block_bytes] that no other number has, in any half of it."""
    return np.random.default_rng(number).integers(0, 256, block_bytes, dtype=np.uint8)


def blocks(numbers: list[int], block_bytes: int = BLOCK_BYTES) -> BlockArray:
    return np.stack([block(number, block_bytes) for number in numbers])


def empty(count: int, block_bytes: int = BLOCK_BYTES) -> BlockArray:
    return np.zeros((count, block_bytes), dtype=np.uint8)


def save(store: KVConnector, numbers: list[int], block_bytes: int = BLOCK_BYTES) -> None:
    store.save([key(number) for number in numbers], blocks(numbers, block_bytes))


def load(store: KVConnector, numbers: list[int]) -> int:
    """Loads and compares what the store calls valid."""
    out = empty(len(numbers))
    count = store.load([key(number) for number in numbers], out)
    assert np.array_equal(out[:count], blocks(numbers)[:count])
    return count


def _host(path: Path, capacity: int, block_bytes: int) -> KVConnector:
    return HostTier(capacity * block_bytes, block_bytes)


def _plug_in(spec: str, options: dict[str, Any], block_bytes: int) -> KVConnector:
    """Built as the engine builds it from its configuration."""
    config = KVConnectorConfig(connector=spec, options=options)
    return tiers_module.make_connector(config, block_bytes, FINGERPRINT)


def _disk(path: Path, capacity: int, block_bytes: int) -> KVConnector:
    size = capacity * allocated_bytes(HEADER_BYTES + block_bytes)
    options = {"directory": str(path / "disk"), "capacity_bytes": size}
    return _plug_in("quire.kv_tiers.disk:DiskTier", options, block_bytes)


def _loopback(path: Path, capacity: int, block_bytes: int) -> KVConnector:
    options = {"capacity_bytes": capacity * block_bytes}
    return _plug_in("tests.fixtures.loopback:LoopbackConnector", options, block_bytes)


STORES = {"host": _host, "disk": _disk, "loopback": _loopback}


@pytest.fixture(params=STORES)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """Makes a store of so many blocks; closed after the test."""
    made: list[KVConnector] = []

    def build(capacity: int = 64, block_bytes: int = BLOCK_BYTES) -> KVConnector:
        made.append(STORES[request.param](tmp_path, capacity, block_bytes))
        return made[-1]

    yield build
    for store in made:
        store.close()


@pytest.mark.row("C18", clauses=("conformance",))
class TestConformance:
    def test_round_trip(self, build: Build) -> None:
        store = build()
        data = blocks([1, 2, 3])
        store.save([key(1), key(2), key(3)], data)
        data.fill(0)  # the caller's buffer is its own again
        assert load(store, [1, 2, 3]) == 3
        assert load(store, [3]) == 1
        assert store.flush(WAIT_S)
        assert load(store, [2, 1, 3]) == 3
        assert all(store.contains(key(number)) for number in (1, 2, 3))
        stats = store.stats()
        assert stats["blocks"] == stats["saved_blocks"] == 3
        assert stats["bytes"] >= 3 * BLOCK_BYTES

    def test_missing_block(self, build: Build) -> None:
        store = build()
        assert not store.contains(key(1))
        assert load(store, [1]) == 0
        assert store.load([], empty(0)) == 0

    def test_load_ends_at_the_first_missing_block(self, build: Build) -> None:
        store = build()
        save(store, [1, 2, 4])
        assert load(store, [1, 2, 3, 4]) == 2
        assert load(store, [3, 4]) == 0

    def test_saving_again_keeps_one_copy(self, build: Build) -> None:
        store = build()
        for _ in range(3):
            save(store, [1, 2])
            assert store.flush(WAIT_S)
        assert store.stats()["blocks"] == 2
        assert load(store, [1, 2]) == 2

    def test_keys_of_every_length(self, build: Build) -> None:
        store = build()
        keys = [bytes(length) for length in range(16, 33)]
        store.save(keys, blocks(list(range(16, 33))))
        assert store.flush(WAIT_S)
        out = empty(len(keys))
        assert store.load(keys, out) == len(keys)
        assert np.array_equal(out, blocks(list(range(16, 33))))

    @pytest.mark.parametrize("flushed", [False, True])
    def test_drop(self, build: Build, flushed: bool) -> None:
        store = build()
        save(store, [1, 2, 3])
        if flushed:
            assert store.flush(WAIT_S)
        store.drop([key(2), key(9), key(2)])
        assert [store.contains(key(number)) for number in (1, 2, 3)] == [True, False, True]
        assert load(store, [1, 2, 3]) == 1
        # A dropped key may come back with other content.
        store.save([key(2)], blocks([22]))
        out = empty(1)
        assert store.load([key(2)], out) == 1
        assert np.array_equal(out[0], block(22))
        assert store.flush(WAIT_S)
        assert store.load([key(2)], out) == 1
        assert np.array_equal(out[0], block(22))

    def test_clear(self, build: Build) -> None:
        store = build()
        save(store, [1, 2, 3])
        assert store.clear() == 3
        assert not store.contains(key(1))
        assert load(store, [1]) == 0
        assert store.stats()["blocks"] == 0
        assert store.clear() == 0
        save(store, [1])
        assert store.flush(WAIT_S)
        assert load(store, [1]) == 1

    def test_bound_is_kept_and_the_least_recently_used_go_first(self, build: Build) -> None:
        store = build(4)
        save(store, [1, 2, 3, 4])
        assert store.flush(WAIT_S)
        assert load(store, [1]) == 1
        save(store, [5, 6])
        assert store.flush(WAIT_S)
        assert store.stats()["blocks"] == 4
        assert [number for number in range(1, 7) if store.contains(key(number))] == [1, 4, 5, 6]
        save(store, list(range(100, 120)))
        assert store.flush(WAIT_S)
        assert store.stats()["blocks"] == 4
        assert load(store, [116, 117, 118, 119]) == 4

    def test_saving_again_is_a_use(self, build: Build) -> None:
        store = build(3)
        save(store, [1, 2, 3])
        assert store.flush(WAIT_S)
        save(store, [1])
        save(store, [4])
        assert store.flush(WAIT_S)
        assert [store.contains(key(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]

    def test_hints_change_no_content(self, build: Build) -> None:
        store = build()
        save(store, [1])
        store.touch([key(1), key(2)])
        store.prefetch([key(1), key(2)])
        assert load(store, [1]) == 1
        assert not store.contains(key(2))

    def test_random_operations_agree_with_a_dictionary(self, build: Build) -> None:
        rng = random.Random(0)
        store = build(64)
        expected: dict[int, int] = {}
        for turn in range(3000):
            numbers = rng.sample(range(40), rng.randint(1, 6))
            action = rng.random()
            if action < 0.4:
                # Content may change with a drop only.
                for number in numbers:
                    expected.setdefault(number, 40 * turn + number)
                store.save(
                    [key(number) for number in numbers], blocks([expected[number] for number in numbers])
                )
            elif action < 0.8:
                hits = next((i for i, n in enumerate(numbers) if n not in expected), len(numbers))
                out = empty(len(numbers))
                assert store.load([key(number) for number in numbers], out) == hits
                for row, number in zip(out, numbers[:hits], strict=False):
                    assert np.array_equal(row, block(expected[number]))
            elif action < 0.98:
                store.drop([key(number) for number in numbers])
                for number in numbers:
                    expected.pop(number, None)
            elif action < 0.99:
                assert store.flush(WAIT_S)
            else:
                assert store.clear() == len(expected)
                expected.clear()
            assert [n for n in range(40) if store.contains(key(n))] == sorted(expected)
            assert store.stats()["blocks"] == len(expected)

    def test_two_threads(self, build: Build) -> None:
        """One thread loads what the other one saves, drops and, as there is little room, evicts."""
        size = 2**16
        store = build(4, size)
        data = blocks(list(range(12)), size)
        rng = random.Random(0)
        ended = threading.Event()
        seen: list[int] = []

        def read() -> None:
            choice = random.Random(1)
            out = empty(3, size)
            while not ended.is_set():
                numbers = choice.sample(range(12), 3)
                count = store.load([key(number) for number in numbers], out)
                seen.extend(n for i, n in enumerate(numbers[:count]) if not np.array_equal(out[i], data[n]))
                store.touch([key(number) for number in numbers])

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for _ in range(1500):
                numbers = rng.sample(range(12), 2)
                store.save([key(number) for number in numbers], data[numbers])
                if rng.random() < 0.2:
                    store.drop([key(number) for number in numbers])
        finally:
            ended.set()
            reader.join(WAIT_S)
        assert not reader.is_alive()
        assert seen == []
        assert store.flush(WAIT_S)
        assert store.stats()["blocks"] <= 4
        store.clear()
        assert store.stats()["blocks"] == 0


class TestHostTier:
    def test_pinned_blocks_are_never_evicted(self) -> None:
        tier = HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)
        save(tier, [10, 11, 12, 13])
        assert tier.can_pin(4) and not tier.can_pin(5)
        tier.save([key(1), key(2)], blocks([1, 2]), pinned=True)
        assert tier.can_pin(2) and not tier.can_pin(3)
        save(tier, list(range(100, 150)))
        assert load(tier, [1, 2]) == 2
        assert tier.clear() == 2
        assert load(tier, [1, 2]) == 2
        tier.drop([key(1)])
        assert tier.can_pin(3) and not tier.can_pin(4)
        assert tier.stats()["pinned_blocks"] == 1

    def test_when_all_slots_are_pinned_others_are_left_out(self) -> None:
        tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
        tier.save([key(1), key(2)], blocks([1, 2]), pinned=True)
        save(tier, [3])
        assert not tier.contains(key(3))
        tier.save([key(4)], blocks([4]), pinned=True)
        assert not tier.contains(key(4))
        assert tier.stats()["dropped_blocks"] == 2
        assert load(tier, [1, 2]) == 2

    def test_a_block_that_two_threads_save_at_once_takes_one_slot(self) -> None:
        tier = HostTier(3 * BLOCK_BYTES, BLOCK_BYTES)
        arena = tier._arena

        class Beaten:
            """The other thread is through while this one copies."""

            def __setitem__(self, slot: int, row: BlockArray) -> None:
                tier._arena = arena
                save(tier, [1])
                arena[slot] = row

        tier._arena = Beaten()  # type: ignore[assignment]
        save(tier, [1])
        save(tier, [2, 3])
        assert load(tier, [1, 2, 3]) == 3
        assert tier.stats()["evicted_blocks"] == tier.stats()["dropped_blocks"] == 0

    def test_a_cached_block_can_be_pinned(self) -> None:
        tier = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
        save(tier, [1, 2])
        tier.save([key(1)], blocks([1]), pinned=True)
        save(tier, [3, 4, 5])
        assert load(tier, [1]) == 1
        assert tier.stats()["blocks"] == 2

    def test_a_slot_that_changes_hands_during_a_load_is_a_miss(self) -> None:
        tier = HostTier(BLOCK_BYTES, BLOCK_BYTES)
        save(tier, [1])

        class Interrupted:
            """Where the copy goes; while it is under way another thread's save evicts the block."""

            def __setitem__(self, index: int, row: BlockArray) -> None:
                save(tier, [2])
                self.copied = row.copy()

        out: Any = Interrupted()
        assert tier.load([key(1)], out) == 0
        assert np.array_equal(out.copied, block(2)), "the test did not meet the case it is about"
        assert load(tier, [2]) == 1

    def test_pinning_waits_for_a_slot_that_is_being_filled(self) -> None:
        """A slot that another thread was just filling was neither free nor evictable: pinning what can_pin
        had allowed failed."""
        tier = HostTier(BLOCK_BYTES, BLOCK_BYTES)
        filling, waiting, go_on = threading.Event(), threading.Event(), threading.Event()
        wait = tier._lock.wait

        def noted_wait(timeout: float | None = None) -> bool:
            waiting.set()
            return wait(timeout)

        tier._lock.wait = noted_wait  # type: ignore[method-assign]

        arena = tier._arena

        class Arena:
            def __setitem__(self, slot: int, row: BlockArray) -> None:
                if not filling.is_set():
                    filling.set()
                    assert go_on.wait(WAIT_S)
                arena[slot] = row

            def __getitem__(self, slot: int) -> BlockArray:
                return arena[slot]

        tier._arena = Arena()  # type: ignore[assignment]
        filler = threading.Thread(target=save, args=(tier, [1]))
        filler.start()
        assert filling.wait(WAIT_S)
        assert tier.can_pin(1)
        pinner = threading.Thread(
            target=lambda: tier.save([key(2)], blocks([2]), pinned=True),
        )
        pinner.start()
        assert waiting.wait(WAIT_S)
        go_on.set()
        filler.join(WAIT_S)
        pinner.join(WAIT_S)
        assert load(tier, [2]) == 1
        assert not tier.contains(key(1))

    def test_size_must_fit(self) -> None:
        with pytest.raises(ConfigError, match="holds no block"):
            HostTier(BLOCK_BYTES - 1, BLOCK_BYTES)
        with pytest.raises(ConfigError, match="MiB of memory are available"):
            HostTier(2**60, BLOCK_BYTES)


class FakePool:
    """BlockAccess over a numpy pool; block i holds `block(i)` at first."""

    def __init__(self, num_blocks: int = 64, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.pool = blocks(list(range(num_blocks)), block_bytes)
        self.is_broken = False

    def read(self, block_ids: list[int], out: BlockArray) -> None:
        out[:] = self.pool[block_ids]

    def write(self, block_ids: list[int], data: BlockArray) -> None:
        if self.is_broken:
            raise RuntimeError("the device is gone")
        self.pool[block_ids] = data


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def disk_tier(path: Path, capacity: int = 64, **options: Any) -> DiskTier:
    size = capacity * allocated_bytes(HEADER_BYTES + BLOCK_BYTES)
    return DiskTier(path, size, block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT, **options)


class FaultyLoopback(LoopbackConnector):
    """A store with failures and delays on demand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.failing = False
        """True makes `contains`, `save` and `load` raise ConnectionError."""
        self.answering = threading.Event()
        """Event that `load` waits for; clear: the network is slow."""
        self.answering.set()
        self.load_began = threading.Event()
        """Event that is set when a `load` was asked for."""

    def contains(self, key: bytes) -> bool:
        self._check()
        return super().contains(key)

    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        self._check()
        super().save(keys, data)

    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        self.load_began.set()
        self.answering.wait()
        self._check()
        return super().load(keys, out)

    def close(self) -> None:
        self.answering.set()

    def _check(self) -> None:
        if self.failing:
            raise ConnectionError("the store does not answer")


def loopback(capacity: int = 64, **options: Any) -> FaultyLoopback:
    return FaultyLoopback(
        block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT, capacity_bytes=capacity * BLOCK_BYTES, **options
    )


def restore(tiers: KVTiers, pool: FakePool, numbers: list[int], begin: int = 40) -> int:
    """Loads into blocks from `begin` on, which are empty before; compares what is reported valid."""
    target = list(range(begin, begin + len(numbers)))
    pool.pool[target] = 0
    tiers.start_load(KVLoad(7, [(key(n), b) for n, b in zip(numbers, target, strict=True)]))
    [(load_id, count)] = tiers.poll(WAIT_S)
    assert load_id == 7
    assert np.array_equal(pool.pool[target[:count]], blocks(numbers)[:count])
    assert not pool.pool[target[count:]].any(), "a block behind the valid ones was written"
    return count


@pytest.fixture
def closing() -> Iterator[Callable[[KVTiers], KVTiers]]:
    """Closes the tiers it is given after the test."""
    made: list[KVTiers] = []

    def register(tiers: KVTiers) -> KVTiers:
        made.append(tiers)
        return tiers

    yield register
    for tiers in made:
        tiers.close()


Closing = Callable[[KVTiers], KVTiers]


def num_hits(tiers: KVTiers, keys: Sequence[bytes]) -> int:
    """How many leading keys some tier probably has."""
    return len(list(itertools.takewhile(tiers.contains, keys)))


class TestKVTiers:
    def test_a_save_is_a_copy_and_a_load_brings_it_back(self, closing: Closing) -> None:
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(8 * BLOCK_BYTES, BLOCK_BYTES)], pool))
        assert tiers.save_bytes_per_s is None and tiers.load_bytes_per_s is None
        tiers.save([KVSave(key(n), n) for n in (1, 2, 3)])
        pool.pool[[1, 2, 3]] = 0
        assert num_hits(tiers, [key(n) for n in (1, 2, 3, 4)]) == 3
        assert num_hits(tiers, [key(n) for n in (4, 1)]) == 0
        assert restore(tiers, pool, [1, 2, 3]) == 3
        assert tiers.stats()["loads_under_way"] == 0
        assert tiers.save_bytes_per_s and tiers.load_bytes_per_s
        assert tiers.poll() == []

    @pytest.mark.row("C9")
    def test_what_the_host_tier_evicted_comes_from_disk(self, closing: Closing, tmp_path: Path) -> None:
        pool = FakePool()
        host = HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)
        tiers = closing(KVTiers([host, disk_tier(tmp_path)], pool))
        for number in range(6):
            tiers.save([KVSave(key(number), number)])
        assert [host.contains(key(n)) for n in range(6)] == [False] * 4 + [True] * 2
        assert num_hits(tiers, [key(n) for n in range(6)]) == 6
        assert restore(tiers, pool, list(range(6))) == 6
        assert tiers.stats()["disk_loaded_blocks"] >= 4
        assert restore(tiers, pool, [0, 1]) == 2
        assert host.contains(key(0)) and host.contains(key(1)), "what came from disk is in host memory now"
        loaded = tiers.stats()["disk_loaded_blocks"]
        assert restore(tiers, pool, [0, 1]) == 2
        assert tiers.stats()["disk_loaded_blocks"] == loaded

    @pytest.mark.row("C9", clauses=("prefetch",))
    def test_prefetch_brings_blocks_from_slower_tiers_into_host_memory(
        self, closing: Closing, tmp_path: Path
    ) -> None:
        """Each from the tier that has it; one that none has is passed over."""
        pool, remote = FakePool(), loopback()
        host, disk = HostTier(8 * BLOCK_BYTES, BLOCK_BYTES), disk_tier(tmp_path)
        save(disk, [1, 2, 4, 6])
        save(remote, [5])
        tiers = closing(KVTiers([host, disk, remote], pool))
        tiers.prefetch([key(n) for n in range(1, 7)])
        assert tiers.flush(WAIT_S)
        assert [n for n in range(1, 7) if host.contains(key(n))] == [1, 2, 4, 5, 6]
        assert tiers.stats()["prefetched_blocks"] == 5
        assert restore(tiers, pool, [1, 2]) == 2
        assert tiers.stats()["disk_loaded_blocks"] == 4

    def test_prefetches_are_bounded(self, closing: Closing, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers_module, "MAX_PREFETCHES", 2)
        remote = loopback()
        save(remote, list(range(5)))
        remote.answering.clear()
        host = HostTier(8 * BLOCK_BYTES, BLOCK_BYTES)
        tiers = closing(KVTiers([host, remote], FakePool()))
        tiers.prefetch([key(0)])
        assert remote.load_began.wait(WAIT_S)
        tiers.prefetch([key(n) for n in (1, 2, 3, 4)])
        remote.answering.set()
        assert tiers.flush(WAIT_S)
        assert [host.contains(key(n)) for n in range(5)] == [True, True, True, False, False]

    def test_without_a_host_tier_the_stores_get_the_hint(self, closing: Closing) -> None:
        hints: list[bytes] = []

        class Hinted(LoopbackConnector):
            def prefetch(self, keys: Any) -> None:
                hints.extend(keys)

        remote = Hinted(block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
        tiers = closing(KVTiers([remote], FakePool()))
        tiers.prefetch([key(1)])
        assert hints == [key(1)]

    def test_a_failed_load_reports_its_valid_prefix(self, closing: Closing, tmp_path: Path) -> None:
        pool = FakePool()
        disk = disk_tier(tmp_path)
        save(disk, [1, 2, 3, 4])
        assert disk.flush(WAIT_S)
        tiers = closing(KVTiers([disk], pool))
        [damaged] = tmp_path.rglob(f"{key(3).hex()}.kv")
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        assert num_hits(tiers, [key(n) for n in (1, 2, 3, 4)]) == 4
        assert restore(tiers, pool, [1, 2, 3, 4]) == 2
        assert tiers.stats()["failed_loads"] == 1
        assert num_hits(tiers, [key(n) for n in (1, 2, 3, 4)]) == 2

    def test_a_damaged_block_is_taken_from_the_next_tier(self, closing: Closing, tmp_path: Path) -> None:
        disk, remote = disk_tier(tmp_path), loopback()
        pool = FakePool()
        tiers = closing(KVTiers([disk, remote], pool))
        tiers.save([KVSave(key(n), n) for n in (1, 2, 3)])
        assert tiers.flush(WAIT_S)
        next(tmp_path.rglob(f"{key(2).hex()}.kv")).unlink()
        assert restore(tiers, pool, [1, 2, 3]) == 3
        assert tiers.stats()["disk_lost_blocks"] == 1

    @pytest.mark.row("C9", clauses=("asynchronous",))
    def test_loads_do_not_hold_up_the_engine(self, closing: Closing) -> None:
        pool = FakePool()
        remote = loopback()
        save(remote, [1, 2])
        remote.answering.clear()
        tiers = closing(KVTiers([HostTier(8 * BLOCK_BYTES, BLOCK_BYTES), remote], pool))
        tiers.start_load(KVLoad(1, [(key(1), 50)]))
        tiers.start_load(KVLoad(2, [(key(2), 51), (key(3), 52)]))
        tiers.start_load(KVLoad(3, []))
        assert remote.load_began.wait(WAIT_S)
        assert tiers.poll() == []
        assert tiers.poll(0.001) == []
        assert tiers.stats()["loads_under_way"] == 3
        tiers.save([KVSave(key(9), 9)])
        assert tiers.contains(key(9))
        remote.answering.set()
        done: list[tuple[int, int]] = []
        while tiers.stats()["loads_under_way"]:
            done += tiers.poll(WAIT_S)
        assert done == [(1, 1), (2, 1), (3, 0)]
        assert np.array_equal(pool.pool[[50, 51]], blocks([1, 2]))

    def test_pinned_blocks_stay_in_host_memory_alone(self, closing: Closing, tmp_path: Path) -> None:
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES), disk_tier(tmp_path)], pool))
        assert tiers.can_pin(4) and not tiers.can_pin(5)
        tiers.save(
            [KVSave(key(n), n, pinned=n < 3) for n in (1, 10, 2, 11)],
        )
        for number in range(20, 40):
            tiers.save([KVSave(key(number), number)])
        assert tiers.can_pin(2) and not tiers.can_pin(3)
        assert tiers.clear() > 0
        assert restore(tiers, pool, [1, 2]) == 2
        assert tiers.flush(WAIT_S)
        names = [path.stem for path in tmp_path.rglob("*.kv")]
        assert key(1).hex() not in names and key(2).hex() not in names
        tiers.drop([key(1), key(2)])
        assert tiers.can_pin(4)
        assert not tiers.contains(key(1))

    def test_a_drop_before_its_pinned_save_is_not_forgotten(self, closing: Closing) -> None:
        """With overlapping steps a swapped request could end while its save was under way: the blocks were
        pinned for good."""
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)], pool))
        tiers.drop([key(1), key(3)])
        tiers.save([KVSave(key(n), n, pinned=True) for n in (1, 2)])
        assert not tiers.contains(key(1))
        assert restore(tiers, pool, [2]) == 1
        tiers.drop([key(2)])
        assert tiers.can_pin(4)

    def test_pins_without_room_shorten_the_load(self, closing: Closing) -> None:
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(2 * BLOCK_BYTES, BLOCK_BYTES)], pool))
        tiers.save([KVSave(key(n), n, pinned=True) for n in (1, 2, 3)])
        assert restore(tiers, pool, [1, 2, 3]) == 2
        tiers.drop([key(n) for n in (1, 2, 3)])
        assert tiers.can_pin(2)

    def test_nothing_can_be_pinned_without_a_host_tier(self, closing: Closing) -> None:
        tiers = closing(KVTiers([loopback()], FakePool()))
        assert not tiers.can_pin(1)
        with pytest.raises(AssertionError, match="without a host tier"):
            tiers.save([KVSave(key(1), 1, pinned=True)])

    def test_saves_that_a_slow_disk_cannot_take_are_counted(
        self, closing: Closing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = threading.Event()

        def slow_write_block(*args: Any) -> None:
            assert go_on.wait(WAIT_S)
            real_write_block(*args)

        monkeypatch.setattr(disk_module, "write_block", slow_write_block)
        pool = FakePool()
        disk = disk_tier(tmp_path, max_queued_bytes=3 * BLOCK_BYTES)
        tiers = closing(KVTiers([disk], pool))
        tiers.save([KVSave(key(n), n) for n in range(8)])
        assert tiers.stats()["disk_dropped_blocks"] == 5
        assert tiers.stats()["disk_queued_blocks"] == 3
        assert restore(tiers, pool, [0, 1, 2, 3]) == 3, "what waits to be written can be loaded"
        go_on.set()
        assert tiers.flush(WAIT_S)
        assert tiers.stats()["disk_saved_blocks"] == 3
        tiers.save([KVSave(key(n), n) for n in range(8)])
        assert tiers.flush(WAIT_S)
        assert num_hits(tiers, [key(n) for n in range(8)]) >= 6

    def test_a_lost_store_costs_recomputation_and_comes_back(self, closing: Closing) -> None:
        pool, clock, remote = FakePool(), Clock(), loopback()
        tiers = closing(KVTiers([HostTier(2 * BLOCK_BYTES, BLOCK_BYTES), remote], pool, clock=clock))
        tiers.save([KVSave(key(n), n) for n in range(5)])
        assert num_hits(tiers, [key(n) for n in range(5)]) == 5
        remote.failing = True
        assert restore(tiers, pool, list(range(5))) == 0
        assert num_hits(tiers, [key(n) for n in range(5)]) == 0
        assert restore(tiers, pool, [3, 4]) == 2, "the host tier goes on"
        failures = tiers.stats()["loopback_failures"]
        tiers.save([KVSave(key(9), 9)])
        assert tiers.stats()["loopback_failures"] == failures == 1, "a store that rests is left alone"
        remote.failing = False
        clock.now += tiers_module.REST_S
        assert num_hits(tiers, [key(n) for n in range(5)]) == 5
        assert restore(tiers, pool, list(range(5))) == 5

    def test_a_store_that_fails_within_a_load(self, closing: Closing) -> None:
        pool = FakePool()
        remote = loopback()
        save(remote, [1])
        remote.answering.clear()
        tiers = closing(KVTiers([remote], pool))
        tiers.start_load(KVLoad(1, [(key(1), 50)]))
        assert remote.load_began.wait(WAIT_S)
        remote.failing = True
        remote.answering.set()
        assert tiers.poll(WAIT_S) == [(1, 0)]

    def test_a_store_that_claims_more_than_it_was_asked_for(self, closing: Closing) -> None:
        class Lying(LoopbackConnector):
            def load(self, keys: Any, out: BlockArray) -> int:
                return len(keys) + 1

        remote = Lying(block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES), remote], pool))
        save(remote, [1])
        assert restore(tiers, pool, [1]) == 0
        tiers.save([KVSave(key(2), 2)])
        assert restore(tiers, pool, [2]) == 1, "the transfer thread goes on"

    def test_what_was_read_before_a_clear_does_not_come_back(self, closing: Closing) -> None:
        has_read, go_on = threading.Event(), threading.Event()

        class Late(LoopbackConnector):
            def load(self, keys: Any, out: BlockArray) -> int:
                count = super().load(keys, out)
                has_read.set()
                assert go_on.wait(WAIT_S)
                return count

        remote = Late(block_bytes=BLOCK_BYTES, fingerprint=FINGERPRINT)
        save(remote, [1])
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES), remote], FakePool()))
        tiers.prefetch([key(1)])
        assert has_read.wait(WAIT_S)
        assert tiers.clear() == 1
        go_on.set()
        assert tiers.flush(WAIT_S)
        assert not tiers.contains(key(1))

    def test_a_pool_that_cannot_be_written_ends_the_load_and_not_the_thread(self, closing: Closing) -> None:
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)], pool))
        tiers.save([KVSave(key(1), 1)])
        pool.is_broken = True
        tiers.start_load(KVLoad(1, [(key(1), 50)]))
        assert tiers.poll(WAIT_S) == [(1, 0)]
        pool.is_broken = False
        assert restore(tiers, pool, [1]) == 1

    @pytest.mark.parametrize("question", ["prefetch", "touch"])
    def test_hits_are_not_evicted_by_the_saves_before_the_load(self, closing: Closing, question: str) -> None:
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(4 * BLOCK_BYTES, BLOCK_BYTES)], pool))
        tiers.save([KVSave(key(n), n) for n in range(4)])
        getattr(tiers, question)([key(0), key(1)])
        tiers.save([KVSave(key(n), n) for n in (8, 9)])
        assert restore(tiers, pool, [0, 1]) == 2

    @pytest.mark.parametrize("chunk_bytes", [3 * BLOCK_BYTES, BLOCK_BYTES // 2])
    def test_more_blocks_than_a_buffer_holds(
        self, chunk_bytes: int, closing: Closing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """And a block that is larger than it was to be."""
        monkeypatch.setattr(tiers_module, "CHUNK_BYTES", chunk_bytes)
        pool = FakePool()
        tiers = closing(KVTiers([HostTier(8 * BLOCK_BYTES, BLOCK_BYTES), disk_tier(tmp_path)], pool))
        tiers.save([KVSave(key(n), n, pinned=n % 5 == 0) for n in range(20)])
        assert restore(tiers, pool, list(range(20))) == 20
        tiers.prefetch([key(n) for n in range(1, 4)])
        assert tiers.flush(WAIT_S)
        assert restore(tiers, pool, list(range(20))) == 20

    def test_closing_ends_the_load_under_way(self) -> None:
        remote = loopback()
        save(remote, [1])
        remote.answering.clear()
        tiers = KVTiers([remote], FakePool())
        tiers.start_load(KVLoad(1, [(key(1), 50)]))
        assert remote.load_began.wait(WAIT_S)
        closer = threading.Thread(target=tiers.close)
        closer.start()
        remote.answering.set()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        assert not tiers._thread.is_alive()

    def test_a_save_under_way_is_not_there_after_a_clear(self, closing: Closing) -> None:
        """Half of its blocks came after the tiers were emptied."""
        saving, clears_or_waits = threading.Event(), threading.Event()

        class Slow(HostTier):
            def save(self, keys: Sequence[bytes], data: BlockArray, *, pinned: bool = False) -> None:
                saving.set()
                assert clears_or_waits.wait(WAIT_S)
                super().save(keys, data, pinned=pinned)

            def clear(self) -> int:
                count = super().clear()
                clears_or_waits.set()
                return count

        class Lock:
            def __init__(self) -> None:
                self._lock = threading.Lock()

            def __enter__(self) -> None:
                if not self._lock.acquire(blocking=False):
                    clears_or_waits.set()
                    self._lock.acquire()

            def __exit__(self, *_: object) -> None:
                self._lock.release()

        tiers = closing(KVTiers([Slow(8 * BLOCK_BYTES, BLOCK_BYTES)], FakePool()))
        tiers._saving = Lock()  # type: ignore[assignment]
        early = KVSave(key(2), 2, num_clears=tiers.num_clears)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(tiers.save, [KVSave(key(1), 1)])
            assert saving.wait(WAIT_S)
            tiers.clear()
            done.result(WAIT_S)
        clears_or_waits.set()
        tiers.save([early, KVSave(key(3), 3, pinned=True), KVSave(key(4), 4, num_clears=tiers.num_clears)])
        assert [tiers.contains(key(number)) for number in (1, 2, 3, 4)] == [False, False, True, True]

    def test_closing_does_not_wait_for_a_store_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiers_module, "CLOSE_TIMEOUT_S", 0.01)
        remote = loopback()
        save(remote, [1])
        remote.answering.clear()
        tiers = KVTiers([remote], FakePool())
        tiers.start_load(KVLoad(1, [(key(1), 50)]))
        assert remote.load_began.wait(WAIT_S)
        tiers.close()  # returns though nobody lets the load go on before it; the store's own close does
        tiers._thread.join(WAIT_S)
        assert not tiers._thread.is_alive()

    def test_random_plans_agree_with_what_was_computed(self, closing: Closing, tmp_path: Path) -> None:
        """Saves, loads, drops, prefetches and clears over three tiers with little room: whatever is reported
        valid is what was saved, and pinned blocks are always there."""
        rng = random.Random(3)
        pool = FakePool()
        host, disk, remote = HostTier(6 * BLOCK_BYTES, BLOCK_BYTES), disk_tier(tmp_path, 12), loopback(20)
        tiers = closing(KVTiers([host, disk, remote], pool))
        pinned: set[int] = set()
        generation = 1
        for _ in range(1500):
            action = rng.random()
            numbers = rng.sample(range(32), rng.randint(1, 5))
            if action < 0.3:
                tiers.save([KVSave(key(n), n, num_clears=tiers.num_clears) for n in numbers])
            elif action < 0.4:
                fresh = [n + 1000 * generation for n in numbers if n + 1000 * generation not in pinned]
                if tiers.can_pin(len(fresh)):
                    for n in fresh:
                        pool.pool[60] = block(n)
                        tiers.save([KVSave(key(n), 60, pinned=True)])
                    pinned.update(fresh)
            elif action < 0.7:
                restore(tiers, pool, numbers)
            elif action < 0.8 and pinned:
                wanted = rng.sample(sorted(pinned), min(len(pinned), 3))
                assert restore(tiers, pool, wanted) == len(wanted)
            elif action < 0.9:
                tiers.prefetch([key(n) for n in numbers])
            elif action < 0.99:
                gone = [n for n in pinned if rng.random() < 0.5]
                tiers.drop([key(n) for n in numbers + gone])
                pinned -= set(gone)
                generation += 1  # a private key is used once
            else:
                tiers.clear()
        assert tiers.flush(WAIT_S)
        stats = tiers.stats()
        assert stats["host_pinned_blocks"] == len(pinned)
        assert stats["disk_blocks"] <= 12 and stats["loopback_blocks"] <= 20 and stats["host_blocks"] <= 6
        assert stats["disk_damaged_blocks"] == 0


def test_a_rate_follows_the_latest_transfers_and_large_ones_most() -> None:
    rate = tiers_module._Rate()
    assert rate.add(1000, 1.0) == 1000.0
    assert rate.add(10**6, 1.0) > 0.5e6
    for _ in range(100):
        latest = rate.add(4000, 2.0)
    assert latest == pytest.approx(2000, rel=0.05)


def _connector(spec: str, **options: Any) -> dict[str, Any]:
    return {"kv_connector": KVConnectorConfig(connector=spec, options=options)}


class TestMakeTiers:
    def test_nothing_configured(self) -> None:
        assert make_tiers(CacheConfig(), FakePool(), FINGERPRINT) is None

    def test_all(self, closing: Closing, tmp_path: Path) -> None:
        pool = FakePool()
        cache = CacheConfig(
            host_cache_memory=4 * BLOCK_BYTES,
            disk_cache_directory=str(tmp_path / "kv"),
            disk_cache_size=2**20,
            kv_connector=KVConnectorConfig(
                connector="tests.fixtures.loopback:LoopbackConnector", options={"capacity_bytes": 65536}
            ),
        )
        tiers = make_tiers(cache, pool, FINGERPRINT)
        assert tiers is not None
        closing(tiers)
        tiers.save([KVSave(key(1), 1)])
        stats = tiers.stats()
        assert stats["host_blocks"] == stats["disk_blocks"] == stats["loopback_blocks"] == 1
        assert tiers.clear() == 3
        assert not tiers.contains(key(1))

    @pytest.mark.parametrize(
        ("values", "complaint"),
        [
            ({"host_cache_memory": 1}, "host_cache_memory=1 holds no block"),
            ({"disk_cache_directory": "/dev/null/kv"}, "disk_cache_directory=/dev/null/kv: "),
            (_connector("no_such_module:Store"), "kv_connector: no_such_module:Store: ModuleNotFound"),
            (_connector("quire.kv_tiers:Missing"), "AttributeError"),
            (_connector("quire.kv_tiers:KVTiers"), r"KVTiers is no quire.kv_tiers.KVConnector"),
            (_connector("tests.fixtures.loopback:LoopbackConnector", a=1), "unexpected keyword"),
        ],
    )
    def test_what_cannot_be_had_is_named(self, values: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ConfigError, match=complaint):
            make_tiers(CacheConfig(**values), FakePool(), FINGERPRINT)

    def test_a_later_failure_closes_the_tiers_before_it(self, tmp_path: Path) -> None:
        cache = CacheConfig(disk_cache_directory=str(tmp_path), **_connector("quire.kv_tiers:Missing"))
        with pytest.raises(ConfigError):
            make_tiers(cache, FakePool(), FINGERPRINT)
        again = disk_tier(tmp_path)
        assert again.stats()["read_only"] == 0
        again.close()

    @pytest.mark.row("C18")
    def test_two_engines_share_a_remote_store(self, closing: Closing) -> None:
        first, second = FakePool(), FakePool()
        one = closing(KVTiers([loopback(store="shared")], first))
        two = closing(KVTiers([loopback(store="shared")], second))
        one.save([KVSave(key(n), n) for n in (1, 2)])
        assert restore(two, second, [1, 2, 3]) == 2
        other = LoopbackConnector(block_bytes=BLOCK_BYTES, fingerprint="f" * 32, store="shared")
        assert not other.contains(key(1)), "another model's blocks are never seen"
        assert one.clear() == 2
