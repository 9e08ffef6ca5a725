"""KV groups of states: one block per request, written in place, copied at forks, found again at borders of
blocks. The fake runner checks each state that a row begins with; behind the real engine are layers that sum.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.errors import ConfigError
from quire.layers.config import DecoderConfig
from quire.loader import load
from quire.models.kv_groups import STATE_WINDOW, KVGroup, blocks_per_sequence, kv_groups
from quire.models.kv_spec import AttentionKV
from quire.outputs import SchedulerOutput
from quire.request.sampling_params import choice_seed
from quire.request.scheduling_params import SchedulingParams
from quire.worker.kv_cache import KVCache, KVLayout
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.scheduler_world import LIMITS, SchedulerWorld
from tests.fixtures.states import SumModel, SumsAlone, WindowedSumModel
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import GREEDY, PROMPTS, engine, ids, small_pool


def states(*layers: int) -> KVGroup:
    return KVGroup(STATE_WINDOW, layers, state_bytes=8)


FULL, WINDOW = KVGroup(None, (0,)), KVGroup(9, (1,))
HYBRID = (FULL, states(1), states(2))
MIXED = (FULL, WINDOW, states(2))
PURE = (states(0),)
"""A model without attention."""
CACHING = {"enable_prefix_caching": True}


def fake(groups: tuple[KVGroup, ...] = HYBRID, **options: Any) -> FakeEngine:
    return FakeEngine(groups=groups, **{"cache": CACHING, **options})


def finish(engine: FakeEngine) -> list[SchedulerOutput]:
    plans = engine.run()
    engine.check_outputs()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    return plans


# Groups and their memory.


def test_states_are_groups_behind_the_others() -> None:
    assert kv_groups([None] * 8, dict.fromkeys((0, 1, 2, 4, 5, 6), 24)) == (
        KVGroup(None, (3, 7)),
        *(KVGroup(STATE_WINDOW, layers, 24) for layers in ((0, 1), (2, 4), (5, 6))),
    )
    assert kv_groups([None, None, 9], {0: 24}) == (
        KVGroup(None, (1,)),
        KVGroup(9, (2,)),
        KVGroup(2, (0,), 24),
    )
    assert kv_groups([None] * 3, dict.fromkeys(range(3), 24)) == (KVGroup(STATE_WINDOW, (0, 1, 2), 24),)


def test_a_state_needs_two_blocks_however_long_the_sequence_is() -> None:
    assert [blocks_per_sequence(PURE, count, 4, 512) for count in (1, 4, 5, 8, 4000)] == [1, 1, 2, 2, 2]
    assert blocks_per_sequence(HYBRID, 4000, 4, 512) == 1000 + 4
    assert fake(PURE, num_blocks=2).kv.capacity == 2**62


def test_a_block_has_room_for_the_larger_of_keys_and_states() -> None:
    spec = AttentionKV(2, 16, torch.float32)
    for state_bytes, layer_bytes in ((100, 4 * spec.layer_bytes(1)), (1101, 1104)):
        groups = (KVGroup(None, (1, 3)), KVGroup(STATE_WINDOW, (0, 2), state_bytes))
        layout = KVLayout(spec, 2, 4, 128, groups, 64)
        assert layout.layer_bytes == layer_bytes and layout.block_bytes == 2 * layer_bytes
        cache = KVCache(3, spec, 2, 4, torch.device("cpu"), layout.layer_bytes)
        assert cache.block_bytes == layout.block_bytes
        cache.states(1).fill_(255)
        assert not cache.layer(0).any() and cache.states(1).shape == (3, layer_bytes)
        assert cache.layer(1).isnan().all()


# What a request holds.


@pytest.mark.parametrize("groups", [HYBRID, MIXED, PURE])
@pytest.mark.parametrize("caching", [True, False])
def test_one_block_per_request_is_held(groups: tuple[KVGroup, ...], caching: bool) -> None:
    """A row of many blocks brings one, a row inside of a block none."""
    engine = fake(groups, num_blocks=64, max_num_batched_tokens=30, cache={"enable_prefix_caching": caching})
    request = engine.add("a", 50, 20)
    while engine.scheduler.has_unfinished():
        plan = engine.step()
        for number, group in enumerate(groups):
            if request.table is not None and group.is_state:
                assert sum(block_id >= 0 for block_id in request.table.blocks[number]) == 1
        for row in plan.scheduled:
            assert all(
                sum(b >= 0 for b in row.new_block_ids[n]) <= 1 for n, g in enumerate(groups) if g.is_state
            )
    finish(engine)


def test_rows_inside_of_a_block_change_nothing() -> None:
    engine = fake(block_size=8)
    engine.add("a", 3, 30)
    plans = finish(engine)
    assert [bool(plan.block_copies) for plan in plans] == [len(plans[:n]) in (6, 14, 22) for n in range(30)]
    assert all(plan.scheduled[0].new_block_ids is engine.kv.no_blocks for plan in plans[1:6])


# Prefix hits.


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("groups", [HYBRID, MIXED, PURE])
def test_a_prefix_is_found_where_there_is_a_snapshot(groups: tuple[KVGroup, ...], lookahead: bool) -> None:
    """At the last border before a prompt's end, ends of its chunks, and borders that the answer passed."""
    engine = fake(groups, lookahead=lookahead, max_num_batched_tokens=12)
    engine.add("a", 30, 10)
    finish(engine)
    token_ids = engine.requests["a"].token_ids
    found = {}
    for count in range(1, len(token_ids) + 1):
        request = engine.add(f"b{count}", 0, 2, prompt=[*token_ids[:count], 49])
        finish(engine)
        found[count] = request.num_cached_tokens
        engine.scheduler.reset_cache()
        engine.requests.clear()
        engine.outputs.clear()
        engine.reasons.clear()
        engine.add("a", 30, 10)
        finish(engine)
    borders = (0, 12, 24, 28, 32, 36)
    assert found == {count: max(border for border in borders if border <= count) for count in found}


def test_attention_without_a_snapshot_is_no_hit() -> None:
    engine = fake()
    engine.add("a", 30, 1)
    finish(engine)
    snapshots = [key for key in engine.kv.pool.cached_hashes() if len(key) > 16]
    assert len(snapshots) == 2  # of both groups, at token 28
    engine.kv.pool.forget([engine.kv.pool.cached(snapshots[0])])  # type: ignore[list-item]
    request = engine.add("b", 0, 4, prompt=engine.requests["a"].token_ids)
    finish(engine)
    assert request.num_cached_tokens == 0


def test_a_snapshot_is_not_found_in_the_step_that_computes_it() -> None:
    engine = fake()
    prompt = list(range(20))
    first, second, third = (engine.add(name, 0, 4, prompt=prompt) for name in "abc")
    plans = finish(engine)
    assert first.num_cached_tokens == second.num_cached_tokens == third.num_cached_tokens == 0
    assert [row.num_computed_tokens for row in plans[1].scheduled] == [16] * 3
    later = engine.add("d", 0, 4, prompt=prompt)
    finish(engine)
    assert later.num_cached_tokens == 16


def test_a_snapshot_is_shared_in_the_step_that_leaves_it() -> None:
    """Who computed it and who finds it go on in copies of their own."""
    engine = fake(PURE, max_num_seqs=2)
    prompt = list(range(18))
    engine.add("a", 0, 4, prompt=prompt)
    engine.step()
    engine.add("b", 0, 4, prompt=prompt)
    plan = engine.step()
    assert [(row.request_id, row.num_computed_tokens) for row in plan.scheduled] == [("a", 16), ("b", 16)]
    (source, one), (other, two) = plan.block_copies
    assert source == other and len({source, one, two}) == 3
    finish(engine)


def test_the_state_of_a_failed_row_is_forgotten_with_what_the_next_row_offered() -> None:
    engine = fake(PURE, lookahead=True)
    engine.add("a", 15, 10)
    scheduler, runner = engine.scheduler, engine.runner
    results = []
    for _ in range(3):
        plan = scheduler.schedule()
        results.append((plan, runner.execute(plan)))
        if len(results) == 2:
            scheduler.update(*results.pop(0))
    # In flight is the row that fills the block of tokens 12 to 15; the next one leaves it.
    (plan, result), *_ = results
    assert plan.scheduled[0].num_computed_tokens == 15
    follow = scheduler.schedule()
    runner.execute(follow)
    assert follow.block_copies and len(engine.kv.pool.cached_hashes()) == 2
    result.rows[0].error = "no finite logit"
    scheduler.update(plan, result)
    scheduler.check_integrity()
    assert len(engine.kv.pool.cached_hashes()) == 1  # at token 12, which is right


def test_a_conversation_is_pinned_up_to_its_last_snapshot() -> None:
    engine = fake(num_blocks=40)
    request = engine.add("a", 13, 6, scheduling=SchedulingParams(session="s"))
    finish_all = engine.run()
    assert finish_all and request.num_tokens == 19  # the state behind 18 tokens is no snapshot
    pins = engine.kv.pins
    assert pins.num_blocks == 4 + 2  # keys of 16 tokens, and both states there
    engine.add("b", 100, 1)  # evicts all else
    engine.run()
    later = engine.add("c", 0, 2, prompt=[*request.token_ids, 1, 2])
    engine.run()
    engine.check_outputs()
    assert later.num_cached_tokens == 16


def test_a_pin_that_would_be_too_large_ends_at_an_earlier_snapshot() -> None:
    """Without its snapshot, what is pinned would not be found."""
    limit = 10  # keys of 8 blocks, and both states
    engine = fake(num_blocks=40, cache={**CACHING, "max_pinned_fraction": limit / 40})
    session = SchedulingParams(session="s")
    first = engine.add("a", 17, 3, scheduling=session)
    engine.run()
    second = engine.add("b", 0, 3, prompt=[*first.token_ids, *range(21)], scheduling=session)
    engine.run()
    assert engine.kv.pins.num_blocks == 4 + 2  # the second turn's end would be 10 + 2
    engine.add("c", 100, 1)  # evicts all else
    engine.run()
    later = engine.add("d", 0, 2, prompt=[*second.token_ids, 1, 2])
    engine.run()
    engine.check_outputs()
    assert later.num_cached_tokens == 16


# Forks and preemption.


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("groups", [HYBRID, PURE])
def test_choices_begin_with_copies_of_the_state(
    groups: tuple[KVGroup, ...], length: int, lookahead: bool
) -> None:
    engine = fake(groups, lookahead=lookahead)
    engine.add("a", length, 9, n=3, temperature=1.0, seed=4)
    engine.add("b", length, 9, n=2, beam_width=3)
    finish(engine)


@pytest.mark.parametrize("num_steps", range(2, 12))
def test_a_preempted_request_goes_on_from_its_newest_snapshot(num_steps: int) -> None:
    engine = fake()
    request = engine.add("a", 10, 20)
    for _ in range(num_steps):
        engine.step()
    num_computed = request.num_computed_tokens
    engine.scheduler.roster.preempt(request)
    engine.scheduler.check_integrity()
    finish(engine)
    # Nobody has taken one of a border that it stands at.
    assert engine.scheduler.stats().num_recomputed_tokens == (num_computed - 1) % 4 + 1


def test_a_beam_that_waits_for_another_is_swapped_with_the_state_it_has() -> None:
    engine = fake(host_blocks=64, preemption_mode="swap", max_num_batched_tokens=2)
    engine.add("a", 6, 8, n=2, beam_width=3)
    roster, num_swaps = engine.scheduler.roster, 0
    while engine.scheduler.has_unfinished():
        engine.step()
        for request in [one for one in roster.running if one.is_paused]:
            roster.preempt(request)
            num_swaps += 1
    engine.check_outputs()
    assert num_swaps > 3 and engine.scheduler.stats().num_swaps == num_swaps
    assert engine.runner.tiers is not None
    engine.runner.tiers.close()


class Turns(SchedulerWorld):
    """Requests that often begin as others, answers included, have begun."""

    def add(self) -> None:
        if self.engine.requests:
            request = self.rng.choice(list(self.engine.requests.values()))
            self.beginnings[self.rng.randrange(3)] = list(request.token_ids)
        super().add()


WORLDS: dict[str, dict[str, Any]] = {
    "in turns": {"num_blocks": 44},
    "ahead": {"groups": MIXED, "num_blocks": 54, "lookahead": True},
    "two ahead": {"groups": MIXED, "num_blocks": 54, "lookahead": 2},
    "swap, two ahead": {
        "num_blocks": 44,
        "host_blocks": 60,
        "preemption_mode": "swap",
        "lookahead": 2,
    },
    "no attention": {"groups": PURE, "num_blocks": 14, "lookahead": True},
    "no caching": {"num_blocks": 44, "cache": {"enable_prefix_caching": False}, "lookahead": True},
    "swap": {
        "num_blocks": 44,
        "host_blocks": 60,
        "preemption_mode": "swap",
        "queue_policy": "priority",
        "max_prefill_tokens_per_request": 7,
    },
    "swap, ahead": {
        "groups": MIXED,
        "num_blocks": 54,
        "host_blocks": 100,
        "preemption_mode": "swap",
        "lookahead": True,
    },
    "swap, no attention": {
        "groups": PURE,
        "num_blocks": 12,
        "host_blocks": 20,
        "preemption_mode": "swap",
        "lookahead": True,
    },
    "no evict": {"num_blocks": 54, "kv_reservation": "no_evict", "lookahead": True},
    "time to live": {"num_blocks": 44, "cache": {"cache_ttl_s": 2.0}},
}


def run(name: str, num_operations: int, seed: int) -> Turns:
    world = Turns(seed, **{**LIMITS, "groups": HYBRID, **WORLDS[name]})
    world.run(num_operations)
    return world


@pytest.mark.parametrize("name", WORLDS)
def test_whatever_happens_each_row_begins_with_its_state(name: str) -> None:
    """Aborts, failed steps and rows, deadlines, resets, priorities, choices, beams; see SchedulerWorld."""
    world = run(name, 3000, seed=5)
    seen, stats = world.seen, world.scheduler.stats()
    assert seen["copies"] and seen["beam search"] and seen["cancelled"] and seen["failed steps"], seen
    assert (stats.num_cached_tokens > 0) == (name != "no caching")
    assert name != "no evict" or not seen["preempted for others"]
    assert not name.startswith("swap") or (seen["loads"] and stats.num_loaded_tokens)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WORLDS)
def test_whatever_happens_for_long(name: str) -> None:
    run(name, 50_000, seed=6)


# A model with states, through the real engine.


@pytest.fixture(scope="module", params=[SumModel, WindowedSumModel, SumsAlone])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint, which is loaded as the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "model_class", lambda *_: request.param)
        yield make_checkpoint("smollm3", tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Outputs of each prompt alone, computed at once and with no cache."""
    llm = alone(path)
    return [ids(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


def alone(path: Path) -> Any:
    return engine(path, enable_prefix_caching=False, max_num_batched_tokens=512)


@pytest.mark.parametrize("budget", [1, 3, 7, 8, 16, 64, 4096])
@pytest.mark.parametrize("ahead", [False, True])
def test_cold_cached_chunked(path: Path, expected: list[list[int]], budget: int, ahead: bool) -> None:
    llm = engine(path, max_num_batched_tokens=budget, async_scheduling=ahead)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected, "cold"
    before = llm.core.stats().num_cached_tokens
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected, "cached"
    # All but the last, unfinished block of each prompt was there.
    assert llm.core.stats().num_cached_tokens - before >= sum((len(p) - 1) // 8 * 8 for p in PROMPTS)
    llm.core.scheduler.check_integrity()
    llm.core.close()


def test_a_prefix_of_every_length(path: Path) -> None:
    reference, llm = alone(path), engine(path, max_num_batched_tokens=16)
    beginning, tail = random_prompts(2, longest=1, seed=11)
    beginning = [(token * 7 + place) % 500 + 4 for place in range(40) for token in beginning]
    llm.generate([beginning], GREEDY)
    for count in range(1, len(beginning) + 1):
        prompt = [*beginning[:count], *tail]
        (output,) = llm.generate([prompt], GREEDY)
        assert output.token_ids == reference.generate([prompt], GREEDY)[0].token_ids, count
        assert count < 16 or output.num_cached_tokens >= 16
        llm.core.scheduler.check_integrity()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(path: Path, expected: list[list[int]], mode: str, ahead: bool) -> None:
    host = {} if mode == "recompute" else {"host_cache_memory": "64MiB", "enable_prefix_caching": False}
    pool = small_pool(path)
    llm = engine(path, preemption_mode=mode, async_scheduling=ahead, **pool, **host)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    stats = llm.core.stats()
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
    if mode == "swap":
        assert stats.num_swaps == stats.num_preemptions and stats.num_recomputed_tokens == 0
    llm.core.close()


def test_evicted_snapshots_return_from_the_host(path: Path, expected: list[list[int]]) -> None:
    llm = engine(path, host_cache_memory="64MiB", **small_pool(path))
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    before = llm.core.stats().num_loaded_tokens
    assert [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS] == expected
    assert llm.core.stats().num_loaded_tokens > before
    llm.core.close()


def test_another_engine_finds_snapshots_on_disk(
    path: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    for is_second in (False, True):
        llm = engine(path, disk_cache_directory=str(tmp_path))
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
        assert not is_second or llm.core.stats().num_loaded_tokens > 0.5 * sum(map(len, PROMPTS))
        llm.core.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_choices_are_those_of_requests_alone(path: Path, ahead: bool) -> None:
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
    reference = alone(path)
    llm = engine(path, max_num_batched_tokens=16, async_scheduling=ahead)
    for prompt in PROMPTS[:6]:
        (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, **options))
        for index, choice in enumerate([output, *output.others]):
            params = SamplingParams(seed=choice_seed(5, index), **options)
            assert choice.token_ids == reference.generate([prompt], params)[0].token_ids
    params = SamplingParams(n=2, beam_width=3, max_tokens=12, ignore_eos=True)
    for prompt in PROMPTS[:6]:
        beams, wanted = (one.generate([prompt], params)[0] for one in (llm, reference))
        assert [beams.token_ids, beams.others[0].token_ids] == [wanted.token_ids, wanted.others[0].token_ids]
    llm.core.scheduler.check_integrity()


def test_a_request_goes_on_from_forced_tokens(path: Path, expected: list[list[int]]) -> None:
    llm = engine(path, max_num_batched_tokens=16)
    for prompt, output in zip(PROMPTS, expected, strict=True):
        for count in (1, 5, 15):
            known = {0: output[:count]}
            llm.core.add_request(f"{count}", prompt, GREEDY, num_deaths=1, outputs=known)
        got: dict[str, list[int]] = {}
        while llm.core.has_work:
            for one in llm.core.step():
                got.setdefault(one.request_id, []).extend(one.new_token_ids)
        assert got == {f"{count}": output[count:] for count in (1, 5, 15)}


@pytest.mark.parametrize("ahead", [False, True])
def test_aborts_at_any_time_disturb_nobody(path: Path, expected: list[list[int]], ahead: bool) -> None:
    pool = small_pool(path)
    llm = engine(path, async_scheduling=ahead, **pool)
    core, rng = llm.core, random.Random(2)
    got: dict[str, list[int]] = {}
    for turn in range(3):
        for number, prompt in enumerate(PROMPTS):
            core.add_request(f"{turn}-{number}", prompt, GREEDY)
        aborted: set[str] = set()
        while core.has_work:
            for one in core.step():
                got.setdefault(one.request_id, []).extend(one.new_token_ids)
            core.scheduler.check_integrity()
            if core.scheduler.roster.requests and rng.random() < 0.1:
                name = rng.choice(list(core.scheduler.roster.requests))
                aborted.add(name)
                core.abort([name])
        for number, output in enumerate(expected):
            name = f"{turn}-{number}"
            tokens = got.get(name, [])
            assert tokens == output[: len(tokens)] and (name in aborted or len(tokens) == len(output))
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_drafts_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens=2: layers of this model keep a state"):
        engine(path, num_draft_tokens=2)


def test_keys_of_a_block_are_as_large_as_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `block_size` is unset; what is stated holds."""

    class LargeStates(SumModel):
        def state_bytes(self, config: DecoderConfig) -> dict[int, int]:
            return dict.fromkeys(self.layer_class.sums, 100_000)

    monkeypatch.setattr(load, "model_class", lambda *_: LargeStates)
    path = make_checkpoint("smollm3", tmp_path)
    for stated, size, layer_bytes in ((None, 448, 448 * 256), (16, 16, 100_000), (32, 32, 100_000)):
        core = engine(path, block_size=stated, num_blocks=16).core
        assert core.kv.block_size == core.config.cache.block_size == core.info.block_size == size
        assert core.executor.kv_cache.block_bytes == 2 * layer_bytes
    # Whose states are as large as a token's keys.
    monkeypatch.setattr(load, "model_class", lambda *_: SumModel)
    assert engine(path, block_size=None).core.kv.block_size == 16
