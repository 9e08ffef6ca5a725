"""What a step may hold: static batches, and the three policies of continuous ones."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import scheduler_sim
from benchmarks.simulator.workload import Lengths, Workload
from quire.config import EngineConfig
from quire.core.policies.batch import PROMPT_INTERVAL
from quire.core.trace import SchedulerTrace
from quire.plan.cost import PRESETS
from quire.plan.simulate import Simulator
from tests.fixtures.fake_engine import FakeEngine

BATCH_POLICIES = ("mixed", "prefill_first", "decode_first")
"""All but the static one."""

PROMPTS = {f"r{index}": 2 + 11 * index % 60 for index in range(40)}
LENGTHS = {f"r{index}": 3 + 7 * index % 25 for index in range(40)} | {"r0": 90}

Record = dict[str, Any]


def run(**limits: Any) -> tuple[FakeEngine, list[Record]]:
    """40 requests that arrive by twos and threes in each step, and the trace of all steps."""
    trace = SchedulerTrace()
    engine = FakeEngine(num_blocks=2000, trace=trace, **{"max_num_batched_tokens": 48, **limits})
    waiting = list(PROMPTS)
    while waiting or engine.scheduler.has_unfinished():
        for name in waiting[: 2 + engine.runner.num_steps % 2]:
            engine.add(name, PROMPTS[name], LENGTHS[name])
            waiting.remove(name)
        assert not engine.step().is_empty
    engine.check_outputs()
    return engine, trace.records


def parts(record: Record) -> tuple[set[str], set[str]]:
    """Requests of a step whose prompts are computed, and those that decode: also of a prompt's last token."""
    prompts = {name for name, computed, count in record["scheduled"] if count > 1 or computed == 0}
    return prompts, {name for name, _, _ in record["scheduled"]} - prompts


def joins(records: list[Record]) -> list[tuple[int, int]]:
    """Of each step in which requests join: how many, and how many ran when it was planned."""
    found = []
    num_running = 0
    for record in records:
        num_joined = sum(computed == 0 for _, computed, _ in record["scheduled"])
        if num_joined:
            found.append((num_joined, num_running))
        num_running = record["num_running"]
    return found


@pytest.mark.row("B3", clauses=("static",))
def test_static_batches_begin_when_the_last_request_has_ended() -> None:
    static, records = run(batch_policy="static", max_num_seqs=8)
    assert all(num_running == 0 for _, num_running in joins(records))
    assert sum(joined for joined, _ in joins(records)) == 40
    continuous, others = run(max_num_seqs=8)
    assert any(num_running > 0 for _, num_running in joins(others))
    assert static.outputs == continuous.outputs
    assert len(records) > 1.3 * len(others), "seats stand empty while the longest request runs"


@pytest.mark.row("B3", clauses=("gap",))
def test_the_gap_between_static_and_continuous_batches() -> None:
    arrivals = Workload(num_requests=150, rate=60.0, output=Lengths(60, 0.8, 4, 300)).arrivals()
    figures = {}
    for policy in ("static", "mixed"):
        settings = {"num_blocks": 4000, "max_num_seqs": 16, "batch_policy": policy}
        config = EngineConfig.from_mapping(settings)
        figures[policy] = Simulator(config, arrivals, PRESETS["h100-8b"]).run().as_dict()
    static, continuous = figures["static"], figures["mixed"]
    assert continuous["output_tokens_per_s"] > 1.5 * static["output_tokens_per_s"]
    assert continuous["ttft_s"]["p50"] < 0.5 * static["ttft_s"]["p50"]


@pytest.mark.row("B5", clauses=("policies", "composition"))
def test_three_policies_compose_their_steps_differently_and_give_the_same_outputs() -> None:
    outputs = {}
    for policy in BATCH_POLICIES:
        engine, records = run(batch_policy=policy, max_num_seqs=12)
        outputs[policy] = engine.outputs
        mixed = sum(all(parts(record)) for record in records)
        if policy == "mixed":
            assert mixed > 10
            assert_decodes_are_never_left_out(records)
        elif policy == "prefill_first":
            assert mixed == 0
            assert_no_decode_while_a_prompt_could_be_computed(records)
        else:
            assert mixed > 1
            assert_prompts_wait_for_a_decode_or_their_turn(records)
    assert outputs["mixed"] == outputs["prefill_first"] == outputs["decode_first"]
    assert {name: len(tokens) for name, tokens in outputs["mixed"].items()} == LENGTHS


def decoding(records: list[Record]) -> list[set[str]]:
    """Before each step, the requests that decode."""
    found, now = [], set[str]()
    for record in records:
        found.append(set(now))
        now |= {
            name for name, computed, count in record["scheduled"] if computed + count >= PROMPTS[name] - 1
        }
        now -= {end["id"] for end in record["finished"]}
    return found


def assert_decodes_are_never_left_out(records: list[Record]) -> None:
    for record, expected in zip(records, decoding(records), strict=True):
        assert parts(record)[1] == expected


def assert_no_decode_while_a_prompt_could_be_computed(records: list[Record]) -> None:
    begun: set[str] = set()
    num_running = num_waiting = num_held_back = 0
    for record, decodes in zip(records, decoding(records), strict=True):
        num_waiting += len(record["arrivals"])
        could_join = num_waiting > 0 and num_running < 12
        if parts(record)[1]:
            assert parts(record)[1] == decodes and not could_join and begun <= decodes
        else:
            num_held_back += bool(decodes)
        begun |= {name for name, _, _ in record["scheduled"]}
        begun -= {end["id"] for end in record["finished"]}
        num_running, num_waiting = record["num_running"], record["num_waiting"]
    assert num_held_back > 5, "no decode ever waited for a prompt"


def assert_prompts_wait_for_a_decode_or_their_turn(records: list[Record]) -> None:
    num_held_back = num_waiting = 0
    for record, decodes in zip(records, decoding(records), strict=True):
        num_waiting += len(record["arrivals"])
        prompts, decoded = parts(record)
        assert decoded == decodes
        assert not (prompts and decodes) or record["step"] % PROMPT_INTERVAL == 0
        num_held_back += bool(decodes and num_waiting)
        num_waiting = record["num_waiting"]
    assert num_held_back > 10, "no prompt ever waited for a decode"


@pytest.mark.row("B5")
def test_what_the_policies_trade() -> None:
    # At one load; benchmarks/scheduler_sim.py has the table over all.
    arrivals = Workload(
        num_requests=120, rate=12.0, prompt=Lengths(800, 0.5, 100, 2000), output=Lengths(100, 0.5, 10, 300)
    ).arrivals()
    figures = {}
    for policy in BATCH_POLICIES:
        settings = {"num_blocks": 8000, "max_num_seqs": 64, "batch_policy": policy}
        config = EngineConfig.from_mapping(settings)
        figures[policy] = Simulator(config, arrivals, PRESETS["h100-8b"]).run().as_dict()
    ttft = {policy: figures[policy]["ttft_s"]["p50"] for policy in BATCH_POLICIES}
    tpot = {policy: figures[policy]["tpot_s"]["p50"] for policy in BATCH_POLICIES}
    stall = {policy: figures[policy]["itl_s"]["p99"] for policy in BATCH_POLICIES}
    assert ttft["prefill_first"] <= ttft["mixed"] < ttft["decode_first"]
    assert tpot["decode_first"] < tpot["mixed"] < tpot["prefill_first"]
    assert stall["mixed"] < 0.5 * stall["prefill_first"]


@pytest.mark.row("B5", clauses=("table",))
def test_the_benchmark_has_a_line_of_each_policy_at_each_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_sim, "LOADS", (0.5, 0.7))
    listed = scheduler_sim.trade_off(60, PRESETS["h100-8b"])
    lines = scheduler_sim.table(listed).splitlines()[2:]
    assert [line.split()[1] for line in lines] == [
        policy for policy in scheduler_sim.BATCH_POLICIES for _ in range(2)
    ]
    for point, line in zip(listed, lines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        latencies = [point[name] for name in ("tpot_p50_s", "itl_p99_s", "ttft_p50_s", "ttft_p99_s")]
        assert cells[1:2] + cells[3:] == [f"{point['load']}", *(f"{1000 * one:.2f}" for one in latencies)]
    points = {point["policy"]: point for point in listed[1::2]}
    assert points["mixed"]["ttft_p50_s"] < points["decode_first"]["ttft_p50_s"]
    assert points["mixed"]["tpot_p50_s"] < points["prefill_first"]["tpot_p50_s"]
