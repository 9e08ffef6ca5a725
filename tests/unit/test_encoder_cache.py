"""The cache of encoder outputs: what it keeps, what goes first, and that its books are right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire_ensemble.encoder_cache import EncoderCache


def rows(number: int, count: int = 4) -> np.ndarray:
    """float32 [count, 2]: 8 bytes a row, all of one value."""
    return np.full((count, 2), number, np.float32)


def check_integrity(cache: EncoderCache) -> None:
    assert cache.bytes == sum(array.nbytes for array in cache._entries.values()), "bytes miscounted"
    assert cache.bytes <= cache.max_bytes, "over the bound"


@pytest.mark.row("H11")
def test_the_least_recently_used_goes_first() -> None:
    cache = EncoderCache(3 * 32)
    for number in range(3):
        cache.put(str(number), rows(number))
    assert cache.bytes == 96
    found = cache.get("0")
    assert found is not None and np.array_equal(found, rows(0))
    cache.put("3", rows(3))
    assert [key in cache for key in "0123"] == [True, False, True, True]
    assert cache.get("1") is None
    assert len(cache) == 3
    cache.put("4", rows(4, count=8))
    assert [key in cache for key in "01234"] == [False, False, False, True, True]
    check_integrity(cache)


def test_putting_again_replaces_and_counts_once() -> None:
    cache = EncoderCache(64)
    cache.put("a", rows(1))
    cache.put("b", rows(2))
    cache.put("a", rows(3, count=2))
    found = cache.get("a")
    assert found is not None and np.array_equal(found, rows(3, count=2))
    assert cache.bytes == 48 and len(cache) == 2
    cache.put("c", rows(4, count=3))
    assert "b" not in cache and "a" in cache, "the replaced entry is the newer one"
    check_integrity(cache)


def test_an_entry_over_the_bound_is_not_kept_and_evicts_nothing() -> None:
    cache = EncoderCache(64)
    cache.put("a", rows(1))
    cache.put("big", rows(2, count=9))
    assert "big" not in cache and "a" in cache
    cache.put("exact", rows(3, count=8))
    assert "exact" in cache and "a" not in cache
    cache.put("exact", rows(3, count=9))
    assert len(cache) == 0 and cache.bytes == 0, "the old array is not what the key stands for now"
    nothing = EncoderCache(0)
    nothing.put("a", rows(1))
    assert nothing.get("a") is None and nothing.bytes == 0
    with pytest.raises(ValueError, match="max_bytes must be at least 0, got -1"):
        EncoderCache(-1)


def test_what_is_stored_is_a_read_only_copy() -> None:
    """A view of a batch's output would keep the whole batch in memory, past the bound of bytes."""
    cache = EncoderCache(1000)
    batch = np.arange(40, dtype=np.float32).reshape(20, 2)
    cache.put("a", batch[4:8])
    batch[:] = 0
    found = cache.get("a")
    assert found is not None and found.base is None and found.nbytes == cache.bytes == 32
    assert found[0].tolist() == [8.0, 9.0]
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_random_use_never_breaks_the_books() -> None:
    draw = random.Random(0)
    cache = EncoderCache(400)
    sizes: dict[str, int] = {}
    hits = misses = 0
    for _ in range(3000):
        key = str(draw.randrange(12))
        if draw.random() < 0.5:
            sizes[key] = draw.randrange(0, 60)
            cache.put(key, rows(int(key), count=sizes[key]))
        else:
            found = cache.get(key)
            hits, misses = hits + (found is not None), misses + (found is None)
            assert found is None or np.array_equal(found, rows(int(key), count=sizes[key]))
        check_integrity(cache)
    assert hits > 100 and misses > 100
