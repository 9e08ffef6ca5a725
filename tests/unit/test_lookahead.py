"""Planning of steps while others run: the same outputs, and planning out of the way."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.trace import SchedulerTrace
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.models.kv_groups import KVGroup
from quire.outputs import ModelRunnerOutput, SchedulerOutput
from quire.request.sampling_params import SamplingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import FakeRunner, generate_alone

HYBRID = (KVGroup(None, (0,)), KVGroup(12, (1,)))


def run(**options: Any) -> tuple[FakeEngine, SchedulerTrace]:
    """A busy time: arrivals, aborts, end tokens, shared prompts, choices."""
    trace = SchedulerTrace()
    engine = FakeEngine(trace=trace, **{"num_blocks": 300, **options})
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
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 40},
        {"max_num_batched_tokens": 13},
        {"cache": {"enable_prefix_caching": True}},
        {"num_blocks": 60, "groups": HYBRID, "cache": {"enable_prefix_caching": True}},
        {"queue_policy": "fair", "batch_policy": "prefill_first"},
        {"batch_policy": "decode_first", "kv_reservation": "predicted"},
    ],
    ids=["plain", "preemption", "chunks", "prefix cache", "windows", "fair", "decode first"],
)
@pytest.mark.parametrize("lookahead", [1, 2], ids=["one ahead", "two ahead"])
def test_outputs_are_the_same(options: dict[str, Any], lookahead: int) -> None:
    plain, _ = run(**options)
    ahead, trace = run(lookahead=lookahead, **options)
    kept = {name for name, reason in plain.reasons.items() if reason != "cancelled"}
    kept &= {name for name, reason in ahead.reasons.items() if reason != "cancelled"}
    assert len(kept) >= 50
    assert {name: plain.outputs[name] for name in kept} == {name: ahead.outputs[name] for name in kept}
    assert sum(record["overlapped"] for record in trace.records) > 0.8 * len(trace.records)


@pytest.mark.row("B17")
def test_a_decoding_batch_computes_the_same_steps() -> None:
    """To launch ahead costs no step: a token that is not known yet has its row all the same."""
    steps = []
    for lookahead in (0, 1, 2):
        trace = SchedulerTrace()
        engine = FakeEngine(num_blocks=300, lookahead=lookahead, trace=trace)
        for index in range(6):
            engine.add(f"r{index}", 5 + index, 30)
        engine.run()
        steps.append([record["scheduled"] for record in trace.records if record["scheduled"]])
        engine.check_outputs()
    assert steps[0] == steps[1] == steps[2]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_block_can_be_found_once_its_tokens_are_known(lookahead: int) -> None:
    """While its request runs, however many steps are under way."""
    engine = FakeEngine(block_size=4, lookahead=lookahead, cache={"enable_prefix_caching": True})
    request = engine.add("r", 6, 40)
    while not request.is_finished:
        engine.step()
        if request.num_output_tokens > 1:
            known_to_the_plan = request.num_tokens - 1
            assert len(engine.kv.pool.cached_hashes()) == known_to_the_plan // 4
    engine.check_outputs()


class Device(FakeRunner):
    """Notes of each step that is waited for whether the next one was launched by then."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.cache.num_blocks is not None
        super().__init__(config.cache.num_blocks, config.cache.tokens_per_block, max_model_len=4096)
        self.num_launched = self.num_collected = 0
        self.launched_ahead: list[bool] = []
        self.threads: set[str] = set()

    def launch(self, output: SchedulerOutput) -> None:
        self.num_launched += 1
        super().launch(output)

    def collect(self) -> ModelRunnerOutput:
        self.num_collected += 1
        self.threads.add(threading.current_thread().name)
        self.launched_ahead.append(self.num_launched > self.num_collected)
        return super().collect()


@pytest.mark.row("B17", clauses=("hidden",))
def test_the_engine_plans_while_the_device_works_and_the_trace_shows_it() -> None:
    config = EngineConfig.from_mapping({"num_blocks": 400, "block_size": 4, "max_num_seqs": 16})
    runner = Device(config)
    core = EngineCore(config, RunnerExecutor(runner, depth=2, threaded=True))
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
    assert all(runner.launched_ahead[:-1]) and len(runner.launched_ahead) > 19
    records = [record for record in trace.records if record["scheduled"]]
    assert [record["overlapped"] for record in records] == [False, *[True] * (len(records) - 1)]
    # The plan of a step lies within the time of the step before it.
    for before, record in itertools.pairwise(records):
        assert before["time"] <= record["time"] - record["plan_s"] and record["time"] <= before["end"]
