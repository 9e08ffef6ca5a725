"""Planning of step k + 1 while step k runs: the same outputs, and planning out of the way."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.trace import SchedulerTrace
from quire.engine.core import EngineCore
from quire.kv_groups import KVGroup
from quire.outputs import ModelRunnerOutput, SchedulerOutput
from quire.sampling_params import SamplingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE, FakeRunner, generate_alone

HYBRID = (KVGroup(None, (0,)), KVGroup(12, (1,)))


def run(mode: str, **options: Any) -> tuple[FakeEngine, SchedulerTrace]:
    """A busy time: arrivals, aborts, end tokens, shared prompts, choices."""
    trace = SchedulerTrace()
    modes = {mode: True} if mode else {}
    engine = FakeEngine(trace=trace, **{"num_blocks": 300, **modes, **options})
    number = 0
    while number < 40 or engine.scheduler.has_unfinished():
        if number < 40:
            prompt = [(3 * position) % 50 for position in range(number % 30)] + [number]
            n = 3 if number % 5 == 0 else 1
            engine.add(
                f"r{number}",
                0,
                5 + number % 40,
                prompt=prompt,
                n=n,
                seed=number,
                temperature=1.0,
                ignore_eos=number % 2 == 0,
            )
            if number == 20:
                engine.abort("r19", "r10")
            number += 1
        engine.step()
    engine.check_outputs()
    return engine, trace


@pytest.mark.row("B17", clauses=("equal",))
@pytest.mark.parametrize("mode", ["overlap", "lookahead"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 40},
        {"max_num_batched_tokens": 13},
        {"cache": {"enable_prefix_caching": True}},
        {"num_blocks": 60, "groups": HYBRID, "cache": {"enable_prefix_caching": True}},
        {"queue_policy": "fair", "batch_policy": "prefill_first"},
        {"batch_policy": "decode_first", "schedule_interval": 8, "kv_reservation": "predicted"},
    ],
    ids=["plain", "preemption", "chunks", "prefix cache", "windows", "fair", "decode first"],
)
def test_outputs_are_the_same(options: dict[str, Any], mode: str) -> None:
    plain, _ = run("", **options)
    overlapped, trace = run(mode, **options)
    kept = {name for name, reason in plain.reasons.items() if reason != "cancelled"}
    kept &= {name for name, reason in overlapped.reasons.items() if reason != "cancelled"}
    assert len(kept) >= 50
    assert {name: plain.outputs[name] for name in kept} == {name: overlapped.outputs[name] for name in kept}
    assert sum(record["overlapped"] for record in trace.records) > 0.8 * len(trace.records)


@pytest.mark.row("B17")
def test_a_decoding_batch_computes_the_same_steps() -> None:
    """Overlap costs no step: a token that is not known yet has its row all the same."""
    steps = []
    for overlap in (False, True):
        trace = SchedulerTrace()
        engine = FakeEngine(num_blocks=300, overlap=overlap, trace=trace)
        for index in range(6):
            engine.add(f"r{index}", 5 + index, 30)
        engine.run()
        steps.append([record["scheduled"] for record in trace.records if record["scheduled"]])
        engine.check_outputs()
    assert steps[0] == steps[1]


class SlowRunner(FakeRunner):
    """A step ends only once the plan of the next one is there, so a core that plans later hangs."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.cache.num_blocks is not None
        super().__init__(config.cache.num_blocks, config.cache.block_size)
        self.max_model_len = 4096
        self.planned = threading.Event()
        self.threads: set[str] = set()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.threads.add(threading.current_thread().name)
        result = super().execute(output)
        assert self.planned.wait(20.0), "nobody planned while the step ran"
        self.planned.clear()
        return result


@pytest.mark.row("B17", clauses=("hidden",))
def test_the_engine_plans_while_the_runner_works_and_the_trace_shows_it() -> None:
    config = EngineConfig.from_mapping(
        {"num_blocks": 400, "block_size": 4, "max_num_seqs": 16, "overlap_scheduling": True}
    )
    runner = SlowRunner(config)
    core = EngineCore(config, runner, vocab_size=VOCAB_SIZE)
    plan_ahead = core.scheduler.plan_ahead
    plans = []

    def planned() -> None:
        begin = time.monotonic()
        plan_ahead()
        plans.append((begin, time.monotonic()))
        runner.planned.set()

    core.scheduler.plan_ahead = planned  # type: ignore[method-assign]
    trace = core.enable_trace()
    prompts = {f"r{index}": [1 + index] * (3 + index) for index in range(12)}
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name, prompt in prompts.items():
        core.add_request(name, prompt, params)
    outputs: dict[str, list[int]] = {name: [] for name in prompts}
    while core.has_work:
        for output in core.step():
            outputs[output.request_id] += output.new_token_ids
    core.close()
    for name, prompt in prompts.items():
        assert outputs[name] == generate_alone(prompt, params, 4096)[0]
    assert runner.threads == {"quire-runner_0"}
    records = trace.records
    assert [record["overlapped"] for record in records] == [False, *[True] * (len(records) - 1)]
    # The plan of a step lies within the time of the step before it.
    for record, (begin, end) in zip(records, plans, strict=False):
        assert record["time"] <= begin <= end <= record["end"]


def test_a_plan_made_ahead_does_not_share_what_an_aborted_request_was_to_compute() -> None:
    """Two requests join the plan made ahead; the second shares the blocks that the first is to fill in the
    same step. If the first is aborted before, nobody fills them."""
    engine = FakeEngine(cache={"enable_prefix_caching": True}, overlap=True)
    engine.add("running", 3, 10)
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    prompt = list(range(17))
    engine.add("first", 0, 4, prompt=[*prompt, 1])
    engine.add("second", 0, 4, prompt=[*prompt, 2])
    engine.scheduler.plan_ahead()
    assert engine.requests["second"].num_computed_tokens == 18
    engine.abort("first")
    engine.collect(engine.scheduler.update(plan, result))
    engine.run()
    assert engine.reasons == {"running": "length", "first": "cancelled", "second": "length"}
    del engine.requests["first"]
    engine.check_outputs()
