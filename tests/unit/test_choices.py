"""Several sequences of one request: choices that share the prompt's blocks, and the best of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.core.request import FinishReason, Request
from quire.errors import InvalidArgumentError
from quire.frontend.output_processor import RequestProcessor, split_ranking
from quire.models.kv_groups import KVGroup
from quire.outputs import EngineCoreOutput, RequestOutput, SchedulerOutput
from quire.request.sampling_params import SamplingParams, choice_seed
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import generate_alone, generate_ranked_alone

PROMPT = list(range(10, 24))  # three and a half blocks of four


def add(engine: FakeEngine, request_id: str, max_tokens: int = 12, **options: Any) -> Request:
    return engine.add(
        request_id, 0, max_tokens, **{"prompt": PROMPT, "temperature": 1.0, "seed": 5, **options}
    )


def copies(plans: list[SchedulerOutput]) -> list[tuple[int, int]]:
    return [pair for plan in plans for pair in plan.block_copies]


@pytest.mark.row("A16", clauses=("one-prefill",))
@pytest.mark.row("C4", clauses=("once", "last"))
def test_four_choices_use_the_blocks_of_the_prompt_once() -> None:
    engine = FakeEngine(block_size=4)
    request = add(engine, "a", n=4)
    first = engine.step()
    assert [row.num_scheduled_tokens for row in first.scheduled] == [14], "one prefill"
    tables = [engine.kv.block_ids(one)[0] for one in engine.scheduler.roster.running]
    assert len(tables) == 4
    prompt_blocks = tables[0][:3]
    assert all(table[:3] == prompt_blocks for table in tables)
    assert [engine.kv.pool.ref_count(block_id) for block_id in prompt_blocks] == [4, 4, 4]
    assert len({table[3] for table in tables}) == 4
    assert engine.kv.num_blocks - engine.kv.num_free_blocks == 3 + 4

    plans = [first, *engine.run()]
    # Only the last block, which is not full, is copied: once for each choice but the first.
    assert copies(plans) == [(tables[0][3], table[3]) for table in tables[1:]]
    assert engine.runner.num_computed_tokens == 14 + 4 * 11
    engine.check_outputs()
    assert len({tuple(engine.outputs[name]) for name in ("a", "a#1", "a#2", "a#3")}) == 4
    assert request.num_preemptions == 0 and engine.kv.num_free_blocks == engine.kv.num_blocks


def test_each_group_of_layers_has_a_copy_of_its_own() -> None:
    """Of a model with windows, whose groups have a table each."""
    groups = (KVGroup(None, (0,)), KVGroup(8, (1,)))
    engine = FakeEngine(block_size=4, groups=groups)
    add(engine, "a", n=3)
    first = engine.step()
    parent, *children = (engine.kv.block_ids(one) for one in engine.scheduler.roster.running)
    pairs = [(parent[group][3], child[group][3]) for child in children for group in (0, 1)]
    assert copies([first, *engine.run()]) == pairs and len({*sum(pairs, ())}) == 6
    engine.check_outputs()


@pytest.mark.row("A16")
def test_each_choice_is_what_a_request_of_its_own_seed_gets() -> None:
    together, alone = FakeEngine(), FakeEngine()
    add(together, "a", n=4, ignore_eos=False)
    for index in range(4):
        add(alone, f"b{index}", seed=choice_seed(5, index), ignore_eos=False)
    together.run()
    alone.run()
    for index in range(4):
        name = f"a#{index}" if index else "a"
        assert together.outputs[name] == alone.outputs[f"b{index}"]
        assert together.reasons[name] == alone.reasons[f"b{index}"]


@pytest.mark.row("A16")
def test_choices_end_one_by_one() -> None:
    """A choice that ends gives its seat and its own blocks back while the others go on."""
    engine = FakeEngine(max_num_seqs=4)
    lengths = {}
    for seed in range(100):
        alone = SamplingParams(max_tokens=60, seed=seed, temperature=1.0)
        ends = [len(generate_alone(PROMPT, alone, 4096, index)[0]) for index in range(4)]
        if len(set(ends)) == 4:
            lengths = dict(enumerate(ends))
            break
    request = add(engine, "a", 60, n=4, seed=seed, ignore_eos=False)
    ended_at: dict[int, int] = {}
    step = 0
    while engine.scheduler.has_unfinished():
        engine.step()
        step += 1
        for index in range(4):
            if (f"a#{index}" if index else "a") in engine.reasons:
                ended_at.setdefault(index, step)
        assert len(engine.scheduler.roster.running) == 4 - len(ended_at)
    assert ended_at == lengths
    engine.check_outputs()
    assert request.is_finished


@pytest.mark.row("C4")
def test_a_prompt_of_full_blocks_is_shared_without_a_copy() -> None:
    engine = FakeEngine(block_size=7)
    add(engine, "a", n=4)
    assert copies(engine.run()) == []
    engine.check_outputs()


def test_choices_that_end_with_their_first_token_copy_nothing() -> None:
    engine = FakeEngine(num_blocks=6)
    add(engine, "a", 1, n=4)
    assert copies([*engine.run(), engine.step()]) == []
    engine.check_outputs()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


@pytest.mark.parametrize("lookahead", [False, True])
def test_a_choice_that_is_stopped_ends_alone(lookahead: bool) -> None:
    engine = FakeEngine(lookahead=lookahead)
    add(engine, "a", n=3)
    for _ in range(3):
        engine.step()
    (output,) = engine.scheduler.abort(["a#1"], FinishReason.STOP)
    assert (output.request_id, output.index, output.finish_reason) == ("a", 1, "stop")
    (output,) = engine.scheduler.abort(["a#0"], FinishReason.STOP)
    assert (output.request_id, output.index) == ("a", 0)
    engine.reasons |= {"a": "stop", "a#1": "stop"}
    engine.run()
    assert engine.outputs["a#2"] == generate_alone(PROMPT, engine.requests["a"].sampling_params, 4096, 2)[0]
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def best(engine: FakeEngine, asked: dict[str, SamplingParams]) -> dict[str, list[RequestOutput]]:
    """What callers are told of requests, by id, once none of their choices is open."""
    processors: dict[str, RequestProcessor] = {}
    for request_id, params in asked.items():
        given, num_best = split_ranking(params)
        add(engine, request_id, **msgspec.structs.asdict(given))
        processors[request_id] = RequestProcessor(request_id, len(PROMPT), given, None, num_best=num_best)
    collect = engine.collect

    def process(outputs: list[EngineCoreOutput]) -> None:
        collect(outputs)
        for output in outputs:
            processor = processors[output.request_id]
            assert processor.num_results == asked[output.request_id].n and not processor.results
            assert processor.process(output) is None

    engine.collect = process  # type: ignore[method-assign]
    engine.run()
    engine.check_outputs()
    return {name: [one.pop_output() for one in processor.results] for name, processor in processors.items()}


@pytest.mark.row("A16", clauses=("best-of",))
@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_best_choices_come_at_the_end_and_in_order(lookahead: bool, ignore_eos: bool) -> None:
    asked = {
        f"r{seed}": SamplingParams(
            max_tokens=30, temperature=1.0, n=2, best_of=5, seed=seed, ignore_eos=ignore_eos
        )
        for seed in range(8)
    }
    for name, found in best(FakeEngine(lookahead=lookahead), asked).items():
        assert [output.index for output in found] == [0, 1], "nothing but whole results, best first"
        expected = generate_ranked_alone(PROMPT, asked[name], 4096)
        assert [(one.token_ids, one.finish_reason) for one in found] == [one[:2] for one in expected]
        sums = [output.cumulative_logprob for output in found]
        assert sums == pytest.approx([total for _, _, total in expected])
        means = [total / len(tokens) for tokens, _, total in expected]
        assert means[0] >= means[1]
        for one in found:
            assert one.logprobs is not None and [e.token_ids[0] for e in one.logprobs] == one.token_ids


def test_the_highest_mean_wins_over_the_highest_sum() -> None:
    for seed in range(200):
        params = SamplingParams(max_tokens=40, seed=seed, temperature=1.0, n=3, best_of=4)
        ranked = generate_ranked_alone(PROMPT, params, 4096)
        if max(ranked, key=lambda one: one[2]) is not ranked[0]:
            break
    found = best(FakeEngine(), {"a": params})["a"]
    assert [one.token_ids for one in found] == [tokens for tokens, _, _ in ranked]
    sums = [one.cumulative_logprob or 0.0 for one in found]
    assert sums[0] < max(sums)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_choices_survive_preemption_chunks_and_a_tiny_pool(lookahead: bool, caching: bool) -> None:
    engine = FakeEngine(
        num_blocks=11,
        max_num_seqs=6,
        max_num_batched_tokens=8,
        lookahead=lookahead,
        cache={"enable_prefix_caching": caching},
    )
    for seed in range(6):
        add(engine, f"r{seed}", 20, n=4, seed=seed, ignore_eos=False, min_tokens=5)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.roster.num_preemptions > 0
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_abort_ends_each_choice_once(num_steps: int) -> None:
    engine = FakeEngine(max_num_seqs=8)
    add(engine, "a", n=4, external_id="x")
    for _ in range(num_steps):
        engine.step()
    if num_steps:
        assert engine.scheduler.roster.find("x") == ["a"]
    outputs = engine.abort("a")
    assert [(o.index, o.finish_reason, o.new_token_ids) for o in outputs] == [
        (index, "cancelled", []) for index in range(4)
    ]
    assert not engine.scheduler.has_unfinished() and engine.scheduler.roster.find("x") == []
    engine.step()
    assert not engine.runner.rows and engine.kv.num_free_blocks == engine.kv.num_blocks


def test_a_failed_row_ends_all_choices() -> None:
    engine = FakeEngine()
    add(engine, "a", n=3)
    engine.step()
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    (row,) = (i for i, row in enumerate(plan.scheduled) if row.request_id == "a#2")
    result.rows[row].error = "no finite logit"
    *_, output = engine.scheduler.update(plan, result)
    assert output.error == "no finite logit" and output.request_id == "a"
    assert not engine.scheduler.has_unfinished()


def test_more_sequences_than_seats_are_refused_by_name() -> None:
    engine = FakeEngine(max_num_seqs=4)
    for name, options in {"n": {"n": 5}, "best_of": {"n": 5, "best_of": 5}}.items():
        with pytest.raises(InvalidArgumentError, match=name):
            add(engine, name, **options)


@pytest.mark.parametrize("kind", ["deadline", "ttft_deadline"])
def test_choices_that_outlive_the_first_keep_the_deadline(kind: str) -> None:
    """Only the first choice had one: without it the others went on to their last token."""
    engine = FakeEngine(step_s=1.0)
    engine.add("r", 6, 60, n=3, temperature=1.0, seed=1, scheduling=SchedulingParams(**{kind: 20.0}))
    for _ in range(4):
        engine.step()
    engine.abort("r#0")
    assert engine.reasons == {"r": "cancelled"}
    engine.run()
    reason = "timeout" if kind == "deadline" else "length"
    assert engine.reasons == {"r": "cancelled", "r#1": reason, "r#2": reason}
    if kind == "deadline":
        assert all(20.0 <= engine.finished_at[name] <= 21.0 for name in ("r#1", "r#2"))
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
