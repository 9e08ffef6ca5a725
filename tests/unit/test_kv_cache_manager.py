"""KVCacheManager: exact block tables, and the random test of row C2."""

from __future__ import annotations

import random

import pytest

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.prefix import NULL_BLOCK
from quire.core.request import Request
from quire.models.kv_groups import KVGroup
from quire.request.sampling_params import SamplingParams


def make_request(request_id: str, num_prompt_tokens: int) -> Request:
    return Request(request_id, [1] * num_prompt_tokens, SamplingParams())


def compute(kv: KVCacheManager, request: Request, count: int) -> list[int] | None:
    block_ids = kv.allocate_slots(request, count)
    if block_ids is not None:
        request.num_computed_tokens += count
    return None if block_ids is None else block_ids[0]


def test_blocks_are_appended_when_a_token_needs_one() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=4)
    request = make_request("a", 9)
    assert compute(kv, request, 3) == [0]
    assert compute(kv, request, 1) == []
    assert compute(kv, request, 1) == [1]
    assert compute(kv, request, 4) == [2]
    assert kv.block_ids(request)[0] == [0, 1, 2]
    assert (kv.num_free_blocks, kv.usage) == (5, 3 / 8)
    kv.check_integrity([request])


def test_asking_twice_for_the_same_slots_takes_them_once() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("a", 8)
    assert kv.allocate_slots(request, 8) == [[0, 1]]
    assert kv.allocate_slots(request, 8) == [[]]


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    first, second = make_request("a", 9), make_request("b", 8)
    assert compute(kv, first, 9) == [0, 1, 2]
    assert compute(kv, second, 8) is None
    assert kv.block_ids(second)[0] == []
    assert compute(kv, second, 4) == [3]
    assert compute(kv, second, 1) is None
    assert kv.block_ids(second)[0] == [3]
    kv.check_integrity([first, second])


def test_the_last_block_of_a_freed_request_is_the_first_to_be_reused() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("a", 12)
    assert compute(kv, request, 12) == [0, 1, 2]
    kv.free(request)
    assert kv.pool.free_list() == [3, 2, 1, 0]
    assert kv.block_ids(request)[0] == []
    kv.free(request)
    assert kv.pool.free_list() == [3, 2, 1, 0]
    kv.check_integrity([])


def test_a_returned_list_is_not_the_table() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("a", 8)
    block_ids = compute(kv, request, 4)
    assert block_ids is not None
    block_ids.append(99)
    kv.block_ids(request)[0].append(99)
    assert kv.block_ids(request)[0] == [0]


def test_capacity() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=8)
    assert kv.capacity == 24
    request = make_request("a", 9)
    assert [kv.num_missing_blocks(request, count) for count in (0, 1, 8, 9, 17)] == [0, 1, 1, 2, 3]
    compute(kv, request, 9)
    assert [kv.num_missing_blocks(request, count) for count in (1, 16, 17, 25)] == [0, 0, 1, 2]


def test_capacity_with_windows_alone() -> None:
    """A small window leaves most of the pool to a large one."""
    groups = KVGroup(16, (0,)), KVGroup(1600, (1,))
    kv = KVCacheManager(num_blocks=50, block_size=16, groups=groups, max_step_tokens=16)
    assert kv.num_blocks_for(752) <= 50 < kv.num_blocks_for(753) and kv.capacity == 752


def test_check_integrity_sees_a_leak_and_a_short_table() -> None:
    kv = KVCacheManager(num_blocks=4, block_size=4)
    request = make_request("a", 6)
    compute(kv, request, 6)
    with pytest.raises(AssertionError, match="block 0: 1 != 0"):
        kv.check_integrity([])
    request.token_ids += [1] * 3
    request.num_computed_tokens += 3
    with pytest.raises(AssertionError, match="has 2 blocks"):
        kv.check_integrity([request])


@pytest.mark.row("C2", clauses=("waste",))
@pytest.mark.parametrize(("num_blocks", "block_size"), [(5, 1), (24, 4), (40, 16)])
def test_no_leak_and_less_than_a_block_of_waste_in_1e5_random_operations(
    num_blocks: int, block_size: int
) -> None:
    rng = random.Random(num_blocks)
    kv = KVCacheManager(num_blocks, block_size)
    requests: dict[str, Request] = {}
    refused = 0
    for operation in range(34_000):
        choice = rng.random()
        if choice < 0.15 and len(requests) < 12:
            request = make_request(f"r{operation}", rng.randint(1, 3 * block_size))
            requests[request.request_id] = request
        elif requests and choice < 0.28:
            kv.free(requests.pop(rng.choice(list(requests))))
        elif requests:
            request = requests[rng.choice(list(requests))]
            count = rng.choice((1, 1, 2, block_size, 2 * block_size + 1))
            before = kv.block_ids(request)[0]
            num_free = kv.num_free_blocks
            block_ids = compute(kv, request, count)
            if block_ids is None:
                refused += 1
                assert (kv.block_ids(request)[0], kv.num_free_blocks) == (before, num_free)
                assert kv.num_blocks_for(request.num_computed_tokens + count) - len(before) > num_free
            else:
                assert kv.block_ids(request)[0] == before + block_ids
                missing = request.num_computed_tokens - request.num_tokens
                request.token_ids += [1] * max(0, missing)
        kv.check_integrity(requests.values())
        for request in requests.values():
            waste = len(kv.block_ids(request)[0]) * block_size - request.num_computed_tokens
            assert 0 <= waste < block_size, f"{request}: {waste} unused slots"
    assert refused > 1000
    for request in requests.values():
        kv.free(request)
    kv.check_integrity([])
    assert kv.num_free_blocks == num_blocks


def test_the_time_to_live_of_blocks_behind_a_window_begins_when_they_are_given_back() -> None:
    """It began at 0 on the clock, so they were forgotten at once."""
    groups = [KVGroup(4, (0,))]
    kv = KVCacheManager(8, 4, groups=groups, enable_prefix_caching=True, cache_ttl_s=10.0)
    request = make_request("a", 17)
    kv.expire(100.0)
    for _ in range(4):
        assert compute(kv, request, 4) is not None
        kv.cache_blocks(request)
    assert compute(kv, request, 1) is not None
    assert kv.block_ids(request)[0][:3] == [NULL_BLOCK] * 3
    num_found = kv.pool.num_cached
    kv.expire(109.0)
    assert kv.pool.num_cached == num_found == 3
    kv.expire(110.0)
    assert kv.pool.num_cached == 0
