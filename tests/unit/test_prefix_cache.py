"""Prefix caching in the scheduler: what is computed, what survives, who shares with whom."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.kv_events import BlockRemoved, BlockStored, KVEventCollector, external_hash
from quire.core.roster import session_name
from quire.models.kv_groups import KVGroup
from quire.request.scheduling_params import MAX_PIN_TTL_S, SchedulingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE

BLOCK_SIZE = 16


def engine_of(
    num_blocks: int, *, enable_prefix_caching: bool = True, cache: dict[str, Any] | None = None, **limits: Any
) -> FakeEngine:
    cache = {"enable_prefix_caching": enable_prefix_caching, **(cache or {})}
    return FakeEngine(num_blocks=num_blocks, block_size=BLOCK_SIZE, cache=cache, **limits)


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def computed(engine: FakeEngine, name: str) -> int:
    """Tokens of the request's prompt that went through the model."""
    times = engine.runner.times_computed[name][: engine.requests[name].num_prompt_tokens]
    return sum(times)


# What a hit saves.


@pytest.mark.row("C5")
@pytest.mark.parametrize("chunk", [50, 512, 2048])
@pytest.mark.parametrize("lookahead", [False, True])
def test_the_second_request_with_the_same_512_tokens_computes_its_tail(chunk: int, lookahead: bool) -> None:
    engine = engine_of(200, max_num_batched_tokens=chunk, lookahead=lookahead)
    prefix = tokens(512, 0)
    engine.add("first", 0, 8, prompt=prefix + tokens(40, 1))
    engine.run()
    second = engine.add("second", 0, 8, prompt=prefix + tokens(40, 2))
    engine.run()
    assert computed(engine, "first") == 552
    assert computed(engine, "second") == 40 and second.num_cached_tokens == 512
    assert engine.scheduler.stats().num_cached_tokens == 512
    engine.check_outputs()


@pytest.mark.row("C5", clauses=("partial",))
@pytest.mark.parametrize(
    ("common", "cached"), [(512, 512), (511, 496), (500, 496), (497, 496), (496, 496), (15, 0), (0, 0)]
)
def test_a_partial_hit_is_as_long_as_the_full_blocks_in_common(common: int, cached: int) -> None:
    engine = engine_of(200)
    engine.add("first", 0, 4, prompt=tokens(552, 0))
    engine.run()
    prompt = [*tokens(552, 0)[:common], VOCAB_SIZE, *tokens(60, 2)]
    engine.add("second", 0, 4, prompt=prompt)
    engine.run()
    assert computed(engine, "second") == len(prompt) - cached
    engine.check_outputs()


@pytest.mark.row("C5")
def test_incremental_prefill_each_turn_computes_what_is_new() -> None:
    engine = engine_of(300)
    prompt = tokens(100, 0)
    for turn in range(6):
        request = engine.add(f"turn{turn}", 0, 30, prompt=prompt)
        engine.run()
        if turn:
            # The answer of the turn before is cached too, but for its last token and part of a block.
            assert computed(engine, f"turn{turn}") <= 25 + 1 + BLOCK_SIZE
        prompt = [*request.token_ids, *tokens(25, turn + 1)]
    engine.check_outputs()


@pytest.mark.row("C5")
def test_the_same_prompt_again_computes_one_block_at_most() -> None:
    engine = engine_of(100)
    for index, length in enumerate((512, 513, 527)):
        engine.add(f"a{index}", 0, 2, prompt=tokens(length, index))
        engine.run()
        engine.add(f"b{index}", 0, 2, prompt=tokens(length, index))
        engine.run()
        assert computed(engine, f"b{index}") == (length - 1) % BLOCK_SIZE + 1
    engine.check_outputs()


# Sharing in flight: measurement 2 of issue 4.


@pytest.mark.row("C5")
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("chunk", [100, 512, 2048])
def test_sixteen_cold_requests_with_one_prefix_compute_it_once(chunk: int, lookahead: bool) -> None:
    engine = engine_of(400, max_num_batched_tokens=chunk, lookahead=lookahead)
    prefix = tokens(448, 0)
    for index in range(16):
        engine.add(f"r{index}", 0, 16, prompt=[*prefix, index, *tokens(63, index + 1)])
    engine.run()
    # Peers, which find a block once it is computed, compute the prefix 4 to 16 times here.
    assert sum(computed(engine, f"r{index}") for index in range(16)) == 448 + 16 * 64
    for index in range(16):
        engine.add(f"s{index}", 0, 16, prompt=[*prefix, 20 + index, *tokens(63, index + 50)])
    engine.run()
    assert [computed(engine, f"s{index}") for index in range(16)] == [64] * 16
    engine.check_outputs()


@pytest.mark.row("C5")
@pytest.mark.parametrize("phase", ["planned", "aborted while planned", "failed"])
def test_what_was_to_be_shared_and_was_not_computed_is_computed_by_the_others(phase: str) -> None:
    engine = engine_of(100, max_num_batched_tokens=64)
    prefix = tokens(256, 0)
    for index in range(3):
        engine.add(f"r{index}", 0, 4, prompt=[*prefix, index, *tokens(10, index + 1)])
    plan = engine.scheduler.schedule()
    if phase == "aborted while planned":
        engine.abort("r0")
    result = engine.runner.execute(plan)
    if phase == "failed":
        engine.collect(engine.scheduler.fail("the step failed"))
    else:
        engine.collect(engine.scheduler.update(plan, result))
    while engine.scheduler.has_unfinished():
        engine.step()
    kept = [name for name, reason in engine.reasons.items() if reason == "length"]
    assert kept == (["r0", "r1", "r2"] if phase == "planned" else ["r1", "r2"])
    if phase == "failed":  # nobody knows how far it was computed
        assert [computed(engine, name) for name in kept] == [256 + 11, 11]
    else:  # the step of the aborted request was computed all the same
        assert sum(computed(engine, name) for name in engine.runner.times_computed) == 256 + 11 * len(kept)
    engine.requests = {name: engine.requests[name] for name in kept}
    engine.check_outputs()


# What survives.


def flood(engine: FakeEngine, count: int = 100, **scheduling: Any) -> None:
    """Random prompts, more than three times the pool in all."""
    for index in range(count):
        prompt = tokens(random.Random(index).randint(100, 200), 1000 + index)
        options = {"scheduling": SchedulingParams(**scheduling)} if scheduling else {}
        engine.add(f"flood{len(engine.requests)}", 0, 4, prompt=prompt, **options)
        if index % 4 == 3:
            engine.run()
    engine.run()


def cached_after_flood(
    cache: dict[str, Any] | None = None, flood_with: dict[str, Any] | None = None, **scheduling: Any
) -> int:
    """Tokens of a prompt of 330 that are still cached after a flood of others."""
    engine = engine_of(200, cache=cache)
    system = tokens(330, 0)
    engine.add("system", 0, 2, prompt=system, scheduling=SchedulingParams(**scheduling))
    engine.run()
    flood(engine, **(flood_with or {}))
    again = engine.add("again", 0, 2, prompt=system)
    engine.run()
    engine.check_outputs()
    return again.num_cached_tokens


@pytest.mark.row("C6", clauses=("pinned",))
def test_a_pinned_prompt_survives_a_flood_of_100_random_prompts() -> None:
    assert cached_after_flood() == 0, "the flood is no flood"
    assert cached_after_flood(pin=True) == 320


@pytest.mark.row("C6", clauses=("retention",))
def test_a_prompt_of_higher_retention_survives_one_of_lower_does_not() -> None:
    assert cached_after_flood(retention=80) == 320
    assert cached_after_flood(retention=10) == 0
    assert cached_after_flood(retention=80, flood_with={"retention": 90}) == 0


@pytest.mark.row("C6", clauses=("order",))
def test_what_was_used_longest_ago_goes_first_however_often_it_was_used() -> None:
    engine = engine_of(200)
    system = tokens(330, 0)
    for index in range(5):
        engine.add(f"system{index}", 0, 2, prompt=system)
        engine.run()
    flood(engine)
    again = engine.add("again", 0, 2, prompt=system)
    engine.run()
    assert again.num_cached_tokens == 0
    engine.check_outputs()


@pytest.mark.row("C6", clauses=("ttl",))
def test_time_to_live_of_blocks_and_pins() -> None:
    engine = engine_of(200, cache={"cache_ttl_s": 60.0})
    prompts = {
        "default": SchedulingParams(),
        "short": SchedulingParams(cache_ttl_s=10.0),
        "pinned": SchedulingParams(pin=True, cache_ttl_s=30.0),
    }
    for index, (name, scheduling) in enumerate(prompts.items()):
        engine.add(name, 0, 2, prompt=tokens(100, index), scheduling=scheduling)
    engine.run()

    def found() -> dict[str, int]:
        engine.kv.expire(engine.clock())
        return {name: engine.kv.find_prefix(engine.requests[name]).num_tokens for name in prompts}

    assert found() == {"default": 96, "short": 96, "pinned": 96}
    engine.clock.now = 9.9
    assert found()["short"] == 96
    engine.clock.now = 10.1
    assert found() == {"default": 96, "short": 0, "pinned": 96}
    assert engine.kv.pins.num_blocks == 6
    engine.clock.now = 30.1
    assert found()["default"] == 96 and engine.kv.pins.num_blocks == 0
    engine.clock.now = 61.0
    assert found() == {"default": 0, "short": 0, "pinned": 0}
    assert engine.kv.pool.num_free == 200


@pytest.mark.row("C6")
@pytest.mark.parametrize("deadline", [None, 1000.0])
def test_no_pin_blocks_a_request_for_ever(deadline: float | None) -> None:
    engine = engine_of(20, cache={"max_pinned_fraction": 1.0})
    for index in range(3):
        engine.add(
            f"pin{index}",
            0,
            2,
            prompt=tokens(90, index),
            scheduling=SchedulingParams(pin=True, cache_ttl_s=deadline),
        )
        engine.run()
    assert engine.kv.pins.num_blocks == 15
    # It needs all of the pool at its end: first it grows beside the pins, then they go, the oldest first.
    engine.add("large", 0, 250, prompt=tokens(70, 9))
    engine.run()
    assert engine.reasons["large"] == "length" and len(engine.outputs["large"]) == 250
    assert engine.kv.pins.num_blocks == 0
    engine.check_outputs()


@pytest.mark.row("C6")
def test_pins_take_no_more_than_their_share_of_the_pool() -> None:
    engine = engine_of(40, cache={"max_pinned_fraction": 0.5})
    for index in range(6):
        scheduling = SchedulingParams(pin=True)
        engine.add(f"pin{index}", 0, 2, prompt=tokens(100, index), scheduling=scheduling)
        engine.run()
        assert engine.kv.pins.num_blocks <= 20
    assert len(engine.kv.pins.deadlines) == 3, "the least recently used gave way"
    engine.check_outputs()


@pytest.mark.row("C6")
def test_pins_of_groups_with_a_window_count_too() -> None:
    groups = (KVGroup(None, (0,)), KVGroup(65, (1,)))
    engine = engine_of(40, cache={"max_pinned_fraction": 0.25}, groups=groups)
    engine.add("pin", 0, 2, prompt=tokens(161, 0), scheduling=SchedulingParams(pin=True))
    engine.run()
    assert 0 < engine.kv.pins.num_blocks <= 10
    engine.check_outputs()


@pytest.mark.row("C6")
def test_sessions_that_share_all_their_blocks_are_bounded_too() -> None:
    """Else each of them takes time from every request that ends, and none ever gives way."""
    engine = engine_of(40, cache={"max_pinned_fraction": 0.5})
    for index in range(30):
        scheduling = SchedulingParams(session=f"s{index}")
        engine.add(f"r{index}", 0, 2, prompt=tokens(100, 0), scheduling=scheduling)
        engine.run()
        engine.scheduler.check_integrity()
    assert list(engine.kv.pins.deadlines) == [session_name("", f"s{index}") for index in range(10, 30)]
    assert engine.kv.pins.num_blocks == 6
    assert engine.kv.pins.release_all() == 20
    assert engine.kv.pins.num_blocks == 0
    engine.check_outputs()


def test_a_pin_that_is_used_is_the_last_to_give_way() -> None:
    """A session whose next turn was being computed gave way before one that nobody had used since."""
    engine = engine_of(40, cache={"max_pinned_fraction": 1.0})
    for index in range(2):
        scheduling = SchedulingParams(session=f"s{index}")
        engine.add(f"r{index}", 0, 2, prompt=tokens(100, index), scheduling=scheduling)
        engine.run()
    first, second = engine.kv.pins.deadlines
    turn = SchedulingParams(session="s0")
    engine.add("turn", 0, 20, prompt=[*engine.requests["r0"].token_ids, 7], scheduling=turn)
    engine.step()
    assert list(engine.kv.pins.deadlines) == [second, first]
    engine.kv.pins.release_oldest()
    assert list(engine.kv.pins.deadlines) == [first]
    engine.run()
    engine.check_outputs()


def test_no_pins_where_their_share_is_none() -> None:
    engine = engine_of(40, cache={"max_pinned_fraction": 0.0})
    for index in range(3):
        scheduling = SchedulingParams(pin=True, session=f"s{index}")
        engine.add(f"pin{index}", 0, 2, prompt=tokens(100, index), scheduling=scheduling)
        engine.run()
        assert engine.kv.pins.deadlines == {} and engine.kv.pins.num_blocks == 0
    assert engine.kv.pool.num_cached == 18, "they are cached as all others"
    engine.check_outputs()


@pytest.mark.parametrize("ttl_s", [None, 1e9])
def test_a_pin_ends_however_it_was_asked_for(ttl_s: float | None) -> None:
    """The frontend refuses these; a pin that got here without an end held its blocks for ever."""
    engine = engine_of(40)
    engine.add("a", 0, 2, prompt=tokens(100, 0), scheduling=SchedulingParams(pin=True, cache_ttl_s=ttl_s))
    engine.run()
    engine.kv.expire(MAX_PIN_TTL_S - 1)
    assert engine.kv.pins.num_blocks == 6
    engine.kv.expire(MAX_PIN_TTL_S)
    assert engine.kv.pins.num_blocks == 0


def test_the_later_end_of_a_shared_pin_counts() -> None:
    """A request that pinned another one's prompt for a moment let go of it."""
    engine = engine_of(40)
    for name, ttl_s in (("a", 100.0), ("b", 1.0)):
        scheduling = SchedulingParams(pin=True, cache_ttl_s=ttl_s)
        engine.add(name, 0, 2, prompt=tokens(100, 0), scheduling=scheduling)
        engine.run()
    engine.kv.expire(99.0)
    assert engine.kv.pins.num_blocks == 6
    engine.kv.expire(100.0)
    assert engine.kv.pins.num_blocks == 0


NAMES = ("", "a", "b", "a/b", "b/a", "/", "a/", "/b", "%", "%2F", "a%2Fb", "a b", "session a")


def test_no_two_tenants_and_sessions_have_one_pin() -> None:
    """`session_name("a", "b")` was `session_name("", "a/b")`: a client without a tenant released, or had
    released, what another one's tenant had pinned."""
    pairs = [(tenant, session) for tenant in NAMES for session in NAMES if session]
    assert len({session_name(*pair) for pair in pairs}) == len(pairs)
    assert session_name("", "78") == "session 78" and session_name("blue", "talk-1") == "session blue/talk-1"
    engine = engine_of(60)
    for index, (tenant, session) in enumerate((("a", "b"), ("", "a/b"), ("b", "b"))):
        scheduling = SchedulingParams(tenant=tenant, session=session)
        engine.add(f"r{index}", 0, 2, prompt=tokens(100, index), scheduling=scheduling)
        engine.run()
    assert engine.kv.pins.num_blocks == 18 and len(engine.scheduler.inspect()["pins"]) == 3
    scheduling = SchedulingParams(session="a/b", session_end=True)
    engine.add("end", 0, 2, prompt=tokens(100, 9), scheduling=scheduling)
    engine.run()
    assert list(engine.kv.pins.deadlines) == [session_name("a", "b"), session_name("b", "b")]


def test_a_request_that_ends_while_its_blocks_load_ends_its_session() -> None:
    """The session's pin stayed until its time to live, as for a request that had computed tokens."""
    engine = FakeEngine(num_blocks=16, host_blocks=64, cache={"enable_prefix_caching": True})
    scheduling = SchedulingParams(session="a")
    prompt = tokens(33, 0)
    engine.add("first", 0, 3, prompt=prompt)
    engine.run()
    engine.kv.reset()
    engine.add("turn", 0, 3, prompt=tokens(9, 1), scheduling=scheduling)
    engine.run()
    assert engine.kv.pins.num_blocks > 0
    last = SchedulingParams(session="a", session_end=True)
    request = engine.add("last", 0, 3, prompt=prompt, scheduling=last)
    assert engine.scheduler.schedule().kv_loads and request.load_id is not None
    engine.abort("last")
    assert engine.kv.pins.num_blocks == 0


# Who shares.


@pytest.mark.row("C7", whole=True)
def test_another_salt_is_a_cold_run_in_every_respect() -> None:
    def play(*salts: str) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """Tokens computed per request, and the rows of each one's steps."""
        engine = engine_of(200, max_num_batched_tokens=128)
        totals, spans = [], []
        for index, salt in enumerate(salts):
            name = f"r{index}"
            scheduling = SchedulingParams(cache_salt=salt)
            engine.add(name, 0, 6, prompt=tokens(400, 0), scheduling=scheduling)
            plans = engine.run()
            totals.append(computed(engine, name))
            rows = [row for plan in plans for row in plan.scheduled]
            spans.append([(row.num_computed_tokens, row.num_scheduled_tokens) for row in rows])
        engine.check_outputs()
        return totals, spans

    totals, spans = play("alice", "alice", "bob", "", "bob")
    assert totals == [400, 16, 400, 400, 16]
    # No timing side channel: what bob sees is, step by step, what he sees where nobody was before.
    _, cold = play("bob")
    assert spans[2] == cold[0] == spans[3] and spans[1] == spans[4] != cold[0]


@pytest.mark.row("C7")
def test_salts_do_not_share_in_flight_either() -> None:
    engine = engine_of(200)
    for index, salt in enumerate(("a", "a", "b", "b", "", "")):
        scheduling = SchedulingParams(cache_salt=salt)
        engine.add(f"r{index}", 0, 4, prompt=[*tokens(160, 0), index], scheduling=scheduling)
    engine.run()
    assert [computed(engine, f"r{index}") for index in range(6)] == [161, 1, 161, 1, 161, 1]
    engine.check_outputs()


@pytest.mark.row("C7")
def test_what_a_salt_begins_with_cannot_be_written_as_tokens() -> None:
    """A prompt without a salt whose tokens spell one must not meet it: the salt's hash is of another kind."""
    engine = engine_of(200)
    salt = "x" * BLOCK_SIZE
    engine.add("salted", 0, 2, prompt=tokens(64, 0), scheduling=SchedulingParams(cache_salt=salt))
    engine.add("spelt", 0, 2, prompt=[*map(ord, salt), *tokens(64, 0)])
    engine.add("plain", 0, 2, prompt=tokens(64, 0))
    engine.run()
    assert [computed(engine, name) for name in ("salted", "spelt", "plain")] == [64, 80, 64]


# Reset and inspect.


@pytest.mark.row("C8")
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_reset_empties_the_cache_and_running_requests_go_on(lookahead: bool) -> None:
    engine = engine_of(200, max_num_batched_tokens=128, lookahead=lookahead)
    prefix = tokens(128, 0)
    pinned = SchedulingParams(pin=True)
    engine.add("pinned", 0, 2, prompt=tokens(100, 7), scheduling=pinned)
    engine.run()
    for index in range(4):
        engine.add(f"running{index}", 0, 40, prompt=prefix + tokens(30, index + 1))
    for _ in range(6):
        engine.step()
    before = engine.scheduler.inspect()
    assert before["num_findable_blocks"] > 10 and before["num_pinned_blocks"] == 6
    assert before["num_blocks_in_use"] > 10 and len(before["pins"]) == 1
    assert engine.scheduler.reset_cache() == before["num_findable_blocks"]
    engine.scheduler.check_integrity()
    after = engine.scheduler.inspect()
    assert (after["num_findable_blocks"], after["num_cached_blocks"], after["pins"]) == (0, 0, {})
    assert after["num_pinned_blocks"] == 0
    assert engine.scheduler.stats().num_cached_blocks == 0
    # A newcomer finds nothing of what was computed before.
    engine.add("new", 0, 4, prompt=prefix + tokens(30, 9))
    engine.step()
    engine.run()
    assert computed(engine, "new") == 158
    assert all(computed(engine, f"running{index}") == (158 if not index else 30) for index in range(4))
    engine.check_outputs()
    # And the cache works again from here on.
    engine.add("newer", 0, 4, prompt=prefix + tokens(30, 10))
    engine.run()
    assert computed(engine, "newer") == 30


def test_blocks_whose_time_is_over_are_told_as_removed() -> None:
    """A router that was not told sent requests to where nothing was cached any more."""
    events = KVEventCollector()
    engine = engine_of(60, cache={"events": events})
    engine.add("a", 0, 2, prompt=tokens(100, 0), scheduling=SchedulingParams(cache_ttl_s=10.0))
    engine.add("b", 0, 2, prompt=tokens(50, 1))
    engine.run()
    known: set[int] = set()

    def follow() -> set[int]:
        batch = events.pop_batch()
        for event in batch.events if batch is not None else ():
            if isinstance(event, BlockStored):
                known.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known.difference_update(event.block_hashes)
        return known

    assert len(follow()) == 6 + 3
    engine.kv.expire(engine.clock() + 9.9)
    assert len(follow()) == 6 + 3
    engine.kv.expire(engine.clock() + 10.1)
    assert follow() == {external_hash(key) for key in engine.kv.pool.cached_hashes()} and len(known) == 3
