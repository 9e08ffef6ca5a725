"""BlockPool: exact order of the free list, and random operations against a naive model."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.block_pool import BlockPool
from tests.fixtures.properties import settings


def test_blocks_are_handed_out_in_order_and_reused_in_the_order_of_their_release() -> None:
    pool = BlockPool(6)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert (pool.num_free, pool.num_in_use, pool.num_cached) == (1, 5, 0)
    pool.free([3, 0])
    assert pool.free_list() == [5, 3, 0]
    assert pool.allocate(2) == [5, 3]
    pool.free([1])
    assert pool.free_list() == [0, 1]
    pool.check_integrity()


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.free_list()) == (1, [3])
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) is None
    assert pool.free_list() == []
    pool.check_integrity()
    pool.free([2, 1, 0, 3])
    assert pool.free_list() == [2, 1, 0, 3]
    pool.check_integrity()


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.incref(0)
    pool.free([0])
    assert (pool.ref_count(0), pool.num_in_use, pool.free_list()) == (1, 1, [1])
    pool.free([0])
    assert (pool.ref_count(0), pool.num_in_use, pool.free_list()) == (0, 0, [1, 0])
    pool.check_integrity()


@pytest.mark.parametrize("block_id", range(4))
def test_a_reference_to_a_free_block_takes_it_from_anywhere_in_the_list(block_id: int) -> None:
    pool = BlockPool(4)
    pool.incref(block_id)
    others = [other for other in range(4) if other != block_id]
    assert pool.free_list() == others
    assert (pool.num_in_use, pool.num_free) == (1, 3)
    pool.check_integrity()
    pool.free([block_id])
    assert pool.free_list() == [*others, block_id]
    pool.check_integrity()


def test_a_block_that_is_used_again_does_not_end_at_its_old_time() -> None:
    """Whoever used a cached block lost its content for others at the time that it had been freed with."""
    pool = BlockPool(2)
    assert pool.allocate(1) == [0]
    pool.keep(0, b"content", ttl_s=10.0)
    pool.free([0], now=0.0)
    pool.incref(0)
    pool.expire(20.0)
    assert pool.cached(b"content") == 0
    pool.free([0], now=20.0)
    pool.expire(29.9)
    assert pool.cached(b"content") == 0
    pool.expire(30.0)
    assert pool.cached(b"content") is None and pool.num_free == 2
    pool.check_integrity()


def test_of_several_retentions_of_one_content_the_highest_counts() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    for block_id, content, retention in ((0, b"x", 80), (1, b"y", 50), (2, b"x", 10)):
        pool.keep(block_id, content, retention)
    pool.free([0, 1, 2])
    assert pool.free_list() == [2, 1, 0]
    pool.incref(1)
    assert not pool.keep(3, b"y", 90)
    pool.free([1, 3])
    assert pool.free_list() == [2, 3, 0, 1]
    pool.check_integrity()


def test_a_double_free_is_an_assertion() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.free([1])
    with pytest.raises(AssertionError, match="block 1 is freed twice"):
        pool.free([1])
    with pytest.raises(AssertionError, match="block 2 is freed twice"):
        pool.free([2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 0),  # in use, but neither referenced nor in the list
        lambda pool: pool._ref_counts.__setitem__(3, 1),  # in the list, but referenced
        lambda pool: setattr(pool, "num_in_use", 1),
        lambda pool: pool._prev.__setitem__(4, 0),
        lambda pool: pool._next.__setitem__(4, 3),  # a cycle
        lambda pool: setattr(pool, "num_cached", -1),
    ],
)
def test_check_integrity_sees_damage(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(6)
    pool.allocate(2)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


class NaivePool:
    """The same contract with an ordinary list: O(n) and obvious."""

    def __init__(self, num_blocks: int) -> None:
        self.free_list = list(range(num_blocks))
        self.references = [0] * num_blocks

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free_list):
            return None
        taken, self.free_list = self.free_list[:count], self.free_list[count:]
        for block_id in taken:
            self.references[block_id] = 1
        return taken

    def incref(self, block_id: int) -> None:
        if block_id in self.free_list:
            self.free_list.remove(block_id)
        self.references[block_id] += 1

    def free(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                self.free_list.append(block_id)

    def referenced(self) -> list[int]:
        return [block_id for block_id, count in enumerate(self.references) if count]


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis finds the shortest sequence of operations at which pool and naive pool differ."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.naive = BlockPool(7), NaivePool(7)

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        assert self.pool.allocate(count) == self.naive.allocate(count)

    @rule(block_id=st.integers(0, 6))
    def incref(self, block_id: int) -> None:
        self.pool.incref(block_id)
        self.naive.incref(block_id)

    @precondition(lambda self: self.naive.referenced())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.lists(st.sampled_from(self.naive.referenced()), unique=True))
        self.pool.free(block_ids)
        self.naive.free(block_ids)

    @invariant()
    def same_state(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free_list() == self.naive.free_list
        assert [self.pool.ref_count(block_id) for block_id in range(7)] == self.naive.references
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_in_use == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.row("C2", clauses=("allocator",))
def test_no_leak_and_no_double_free_in_1e5_random_operations() -> None:
    rng = random.Random(2026)
    pool, naive = BlockPool(23), NaivePool(23)
    refused = shared = 0
    for _ in range(100_000):
        referenced = naive.referenced()
        choice = rng.random()
        if choice < 0.45:
            count = rng.choice((0, 1, 1, 2, 3, 8))
            block_ids = pool.allocate(count)
            assert block_ids == naive.allocate(count)
            refused += block_ids is None
        elif choice < 0.6:
            block_id = rng.randrange(23)
            pool.incref(block_id)
            naive.incref(block_id)
        elif referenced:
            block_ids = rng.sample(referenced, rng.randint(1, min(8, len(referenced))))
            pool.free(block_ids)
            naive.free(block_ids)
        pool.check_integrity()
        assert pool.num_in_use == 23 - len(naive.free_list)
        shared += max(naive.references) > 1
    assert refused > 1000 and shared > 10_000, "the test did not reach the interesting states"
    assert pool.free_list() == naive.free_list
    while naive.referenced():
        block_ids = naive.referenced()
        pool.free(block_ids)
        naive.free(block_ids)
    pool.check_integrity()
    assert pool.num_free == 23
