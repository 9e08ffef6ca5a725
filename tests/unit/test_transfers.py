"""BlockTransfers beside a pool: where a preempted request's blocks come back from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.core.block_hash import hash_blocks
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.core.transfers import BlockTransfers
from quire.request.sampling_params import SamplingParams
from tests.fixtures.fake_engine import FakeEngine


class StubTiers:
    """Holds the keys it is told to."""

    save_bytes_per_s: float | None = None
    load_bytes_per_s: float | None = None
    num_clears = 0

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.room = 100

    def contains(self, key: bytes) -> bool:
        return key in self.keys

    def can_pin(self, count: int) -> bool:
        return count <= self.room

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def prefetch(self, keys: Sequence[bytes]) -> None: ...

    def drop(self, keys: Sequence[bytes]) -> None:
        self.keys.difference_update(keys)

    def clear(self) -> int:
        return 0

    def stats(self) -> dict[str, float]:
        return {}


def swapping(num_requests: int) -> tuple[KVCacheManager, StubTiers, BlockTransfers, list[Request]]:
    """Requests of two blocks each, all computed, beside a tier that preempted ones are moved to."""
    kv, tiers = KVCacheManager(8, 4), StubTiers()
    transfers = BlockTransfers(kv, tiers, should_swap=lambda num_blocks, num_tokens: True)
    requests = [Request(f"r{index}", list(range(8)), SamplingParams()) for index in range(num_requests)]
    for request in requests:
        assert kv.allocate_slots(request, 7) is not None
        request.num_computed_tokens = 7
    return kv, tiers, transfers, requests


def test_requests_that_give_way_in_one_step_share_the_tiers_room() -> None:
    """Each one was told that its blocks have room, before those of the others were there."""
    _, tiers, transfers, requests = swapping(3)
    tiers.room = 5
    assert [transfers.swap_out(request) for request in requests] == [True, True, False]


def test_what_is_given_up_before_it_was_saved_is_not_saved() -> None:
    """Its blocks belong to others by then."""
    _, _, transfers, (first, second) = swapping(2)
    assert transfers.swap_out(first) and transfers.swap_out(second)
    assert second.swapped is not None
    transfers.drop(first)
    saves, _ = transfers.pop_planned()
    assert {save.key for save in saves} == set(second.swapped.keys[0].values())


@pytest.mark.parametrize("moment", ["before the step", "before it is computed", "before it is taken in"])
def test_nothing_computed_before_a_reset_is_in_the_tiers_after_it(moment: str) -> None:
    """Neither what waited to be saved was cancelled nor the saves of the step under way: what was to be
    forgotten was in the host tier, and on disk, a moment later."""
    engine = FakeEngine(host_blocks=32, cache={"enable_prefix_caching": True})
    tiers = engine.runner.tiers
    assert tiers is not None
    request = engine.add("a", 23, 40)
    engine.step()  # fills five blocks
    if moment == "before the step":
        engine.scheduler.reset_cache()
    plan = engine.scheduler.schedule()  # saves them, and fills the sixth
    assert len(plan.kv_saves) == 5
    if moment == "before it is computed":
        engine.scheduler.reset_cache()
    result = engine.runner.execute(plan)
    if moment == "before it is taken in":
        engine.scheduler.reset_cache()
    engine.collect(engine.scheduler.update(plan, result))
    count = 5 if moment == "before the step" else 6
    before = hash_blocks(request, count, 4)[:count]
    engine.run()
    engine.check_outputs()
    assert not any(map(tiers.contains, before))
    assert tiers.stats()["host_blocks"] > 0, "what is computed later is kept again"
    tiers.close()


def test_a_block_that_was_swapped_out_half_full_is_not_taken_for_a_full_one() -> None:
    """Meanwhile another request has computed more of the same prompt, and the tier has all of it."""
    kv, tiers = KVCacheManager(8, 4, enable_prefix_caching=True), StubTiers()
    transfers = BlockTransfers(kv, tiers, should_swap=lambda num_blocks, num_tokens: True)
    request = Request("a", list(range(20)), SamplingParams())
    assert kv.allocate_slots(request, 7) is not None
    request.num_computed_tokens = 7
    assert transfers.swap_out(request)
    saves, _ = transfers.pop_planned()
    tiers.keys.update(save.key for save in saves)
    kv.free(request)
    request.num_computed_tokens = 0
    hashes = hash_blocks(request, 3, 4)[:3]
    tiers.keys.update(hashes)

    prefix = transfers.find_prefix(request)
    assert prefix is not None and prefix.num_tokens == 12
    transfers.begin(request, prefix)
    _, (load,) = transfers.pop_planned()
    assert [key for key, _ in load.blocks] == hashes
    assert transfers.finish_load(load.load_id, 3) == (request, True)
    assert tiers.keys == set(hashes), "what was swapped out is given up"
