"""The simulator: determinism, conservation, cost models, workloads, plots and its command line."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.fit import fit
from benchmarks.simulator.plot import plot_timeline, timeline
from benchmarks.simulator.replay import replay
from benchmarks.simulator.workload import Lengths, Workload, arrivals_of_trace, read_mooncake
from quire.config import EngineConfig, choices
from quire.errors import InvalidArgumentError
from quire.plan.arrival import Arrival
from quire.plan.cost import PRESETS, CostModel
from quire.plan.simulate import Report, Simulator

COST = PRESETS["h100-8b"]
SMALL: dict[str, Any] = {"num_blocks": 120, "max_num_seqs": 16, "max_num_batched_tokens": 128}
MIX = Workload(
    num_requests=80,
    rate=30.0,
    variation=2.0,
    prompt=Lengths(40, 0.8, 2, 300),
    output=Lengths(20, 0.8, 1, 100),
    num_prefixes=3,
    prefix_tokens=64,
    turns=3,
    think_s=0.5,
    tenants={"a": 3, "b": 1},
    priorities={0: 1, 5: 1},
    seed=7,
)


def simulate(
    arrivals: list[Arrival], *, trace: bool = True, concurrency: int | None = None, **settings: Any
) -> tuple[Report, list[dict[str, Any]]]:
    config = EngineConfig.from_mapping({**SMALL, **settings})
    simulator = Simulator(config, arrivals, COST, concurrency=concurrency, trace=trace)
    report = simulator.run()
    simulator.scheduler.check_integrity()
    return report, [] if simulator.trace is None else [simulator.trace.header, *simulator.trace.records]


@pytest.mark.row("B22", clauses=("simulator",))
def test_two_runs_are_the_same() -> None:
    runs = []
    for _ in range(2):
        report, records = simulate(MIX.arrivals())
        assert all(record.pop("plan_s") > 0 for record in records[1:])
        figures = report.as_dict()
        for wall in ("plan_ms", "update_ms", "steps_per_wall_s"):
            del figures[wall]
        runs.append((records, figures))
    assert runs[0] == runs[1]
    other, _ = simulate(dataclasses.replace(MIX, seed=8).arrivals())
    assert other.duration_s != runs[0][1]["duration_s"]


@pytest.mark.parametrize("batch_policy", choices("batch_policy"))
@pytest.mark.parametrize("options", [{}, {"concurrency": 5}, {"queue_policy": "priority"}], ids=str)
def test_every_request_ends_with_its_tokens(batch_policy: str, options: dict[str, Any]) -> None:
    arrivals = MIX.arrivals()
    report, records = simulate(arrivals, batch_policy=batch_policy, **options)
    assert [outcome.arrival.request_id for outcome in report.outcomes] == [a.request_id for a in arrivals]
    for outcome in report.outcomes:
        arrival = outcome.arrival
        assert outcome.num_tokens == arrival.num_output_tokens and outcome.reasons == ["length"]
        assert outcome.first_token_at is not None and outcome.last_token_at is not None
        assert arrival.at < outcome.first_token_at <= outcome.last_token_at <= report.duration_s
    # What is computed: every token but the last of each, less the hits, plus what preemptions undid.
    needed = sum(a.num_prompt_tokens + a.num_output_tokens - 1 for a in arrivals)
    assert report.num_computed_tokens >= needed - report.num_cached_tokens
    if not report.num_preemptions:
        assert report.num_computed_tokens == needed - report.num_cached_tokens
    scheduled = sum(row[2] for record in records[1:] for row in record["scheduled"])
    assert scheduled == report.num_computed_tokens
    assert len(report.gaps) == sum(a.num_output_tokens - 1 for a in arrivals)
    assert report.num_cached_tokens > 3000, "prefixes and chats share nothing"
    if "concurrency" in options:
        assert max(record["num_running"] + record["num_waiting"] for record in records[1:]) <= 5
    assert replay(records).difference is None
    by_tenant = report.by("tenant")
    assert sum(group["requests"] for group in by_tenant.values()) == 80 and set(by_tenant) == {"a", "b"}
    assert "ttft" in report.text() and "80 length" in report.text()


def test_time_is_what_the_cost_model_says() -> None:
    """One request of 100 tokens, budget 64: two chunks, then decodes; by hand."""
    cost = CostModel(base_s=1.0, prefill_token_s=0.01, decode_row_s=0.1, kv_token_s=0.001, pair_s=0.0001)
    config = EngineConfig.from_mapping({**SMALL, "max_num_batched_tokens": 64})
    report = Simulator(config, [Arrival("a", 2.0, 100, 3, max_tokens=3)], cost).run()
    (outcome,) = report.outcomes
    first = 1 + 0.64 + 0.0001 * 64 * 65 / 2
    second = 1 + 0.36 + 0.001 * 64 + 0.0001 * (36 * 64 + 36 * 37 / 2)
    assert outcome.ttft == pytest.approx(first + second)
    decodes = [1 + 0.1 + 0.001 * 101, 1 + 0.1 + 0.001 * 102]
    assert list(report.gaps) == pytest.approx(decodes)
    assert outcome.e2e == pytest.approx(first + second + sum(decodes))
    assert outcome.tpot == pytest.approx(sum(decodes) / 2)
    assert CostModel(weights_s=5.0, decode_row_s=1.0).seconds([(3, 1)] * 4) == 5.0
    assert CostModel(weights_s=5.0, decode_row_s=1.0).seconds([(3, 1)] * 7) == 7.0
    assert COST.seconds([]) == 0.0


def test_a_fit_finds_the_costs_again() -> None:
    arrivals = MIX.arrivals()
    cost = CostModel(2e-3, 0.0, 30e-6, 200e-6, 1e-7, 2e-9)
    simulator = Simulator(EngineConfig.from_mapping(SMALL), arrivals, cost, trace=True)
    simulator.run()
    assert simulator.trace is not None
    records = simulator.trace.records
    fitted = fit(records)
    assert fitted.as_dict() == pytest.approx(cost.as_dict(), rel=1e-3, abs=1e-12)
    steps = [record for record in records if record.get("scheduled") and "end" in record]
    seconds = np.array([record["end"] - record["time"] for record in steps])
    modelled = np.array([fitted.seconds(row[1:3] for row in record["scheduled"]) for record in steps])
    assert np.abs(modelled - seconds).mean() / seconds.mean() < 1e-6
    # Costs are never negative, whatever the times are.
    rng = np.random.default_rng(0)
    for record in records:
        record["end"] = record["time"] + rng.uniform(0.001, 0.002)
    assert min(fit(records).as_dict().values()) >= 0
    with pytest.raises(InvalidArgumentError, match="ten steps"):
        fit(records[:3])


def test_workloads_have_the_shape_they_promise() -> None:
    workload = Workload(num_requests=4000, rate=50.0, tenants={"a": 3, "b": 1}, seed=1)
    arrivals = workload.arrivals()
    assert arrivals == workload.arrivals() and len({a.request_id for a in arrivals}) == 4000
    gaps = np.diff([0.0, *(a.at for a in arrivals)])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05) and gaps.std() == pytest.approx(1 / 50, rel=0.1)
    bursts = np.diff([a.at for a in Workload(num_requests=4000, rate=50.0, variation=3.0).arrivals()])
    assert bursts.mean() == pytest.approx(1 / 50, rel=0.2) and bursts.std() > 2 / 50
    # ShareGPT as vLLM's posts use it: 202 tokens in, 179 out.
    assert np.mean([a.num_prompt_tokens for a in arrivals]) == pytest.approx(202, rel=0.1)
    assert np.mean([a.num_output_tokens for a in arrivals]) == pytest.approx(179, rel=0.1)
    share = sum(a.scheduling.tenant == "a" for a in arrivals) / 4000
    assert share == pytest.approx(0.75, abs=0.03)


def test_a_turn_begins_with_the_turn_before_and_its_output() -> None:
    first, second = Workload(num_requests=2, turns=2, rate=1.0, num_prefixes=1, prefix_tokens=32).arrivals()
    stream = [first.token_at(p) for p in range(first.num_prompt_tokens + first.num_output_tokens)]
    assert second.prompt_token_ids()[: len(stream)] == stream
    assert first.prompt_token_ids() == stream[: first.num_prompt_tokens]
    other = Arrival("x", 0.0, 64, 1, stream=9, hash_ids=first.hash_ids)
    assert other.prompt_token_ids()[:32] == stream[:32] and other.prompt_token_ids()[32:64] != stream[32:64]


def test_choices_share_the_prompt_and_end_one_by_one() -> None:
    arrivals = [Arrival(f"r{i}", 0.0, 37, 10, stream=i, max_tokens=10, num_sequences=3) for i in range(4)]
    report, records = simulate(arrivals)
    assert all(outcome.num_tokens == 30 and len(outcome.reasons) == 3 for outcome in report.outcomes)
    assert report.num_computed_tokens == 4 * (37 + 3 * 9)
    assert report.outcomes[0].tpot is not None
    assert {bar.request_id for bar in timeline(records)} >= {"r0", "r0#1", "r0#2"}
    assert replay(records).difference is None


def test_overload_and_deadlines_are_counted() -> None:
    arrivals = Workload(num_requests=60, deadline_s=0.5, seed=2).arrivals()
    report, _ = simulate(arrivals, max_waiting_requests=20)
    figures = report.as_dict()
    assert report.num_refused == figures["refused"] == 40
    assert figures["reasons"]["timeout"] > 0 and sum(figures["reasons"].values()) == 20
    with pytest.raises(InvalidArgumentError, match="prompt"):
        simulate([Arrival("long", 0.0, 5000, 1)])


def test_mooncake_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 100 + i]}
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    arrivals = read_mooncake(path)
    assert [arrival.at for arrival in arrivals] == [0.0, 1.0, 2.0, 3.0]
    report, _ = simulate(arrivals, num_blocks=400)
    assert report.num_cached_tokens == 3 * 1024, "two blocks of 512 tokens are shared"
    path.write_text('{"timestamp": 0, "input_length": 1}\n')
    with pytest.raises(InvalidArgumentError, match="line 1: KeyError"):
        read_mooncake(path)


def test_a_recorded_trace_is_a_workload() -> None:
    """What-if: the same arrivals and contents with another budget."""
    report, records = simulate(MIX.arrivals())
    arrivals, _ = arrivals_of_trace(records, block_size=16)
    again, _ = simulate(arrivals)
    assert again.num_cached_tokens == report.num_cached_tokens
    assert again.duration_s == pytest.approx(report.duration_s - records[1]["arrivals"][0]["time"], abs=0.1)
    narrow, _ = simulate(arrivals, max_num_batched_tokens=32)
    assert narrow.num_steps > again.num_steps
    assert sum(o.num_tokens for o in narrow.outcomes) == sum(o.num_tokens for o in report.outcomes)


def test_plots(tmp_path: Path) -> None:
    report, records = simulate(MIX.arrivals(), num_blocks=60)
    assert report.num_preemptions > 0
    bars = timeline(records)
    assert len(bars) == 80 and all(bar.reason == "length" for bar in bars)
    for bar in bars:
        assert bar.spans[0][1] == bar.arrival
        assert all(a[2] == b[1] and a[0] != b[0] for a, b in zip(bar.spans, bar.spans[1:], strict=False))
    states = {state for bar in bars for state, _, _ in bar.spans}
    assert states == {"waiting", "prefill", "decode", "preempted"}
    assert sum(bar.num_preemptions for bar in bars) == report.num_preemptions

    assert plot_timeline(records, tmp_path / "a.png") == 0
    image = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    assert image.shape[0] > 400 and image.shape[1] > 1000
    for colour in ((0xD9,) * 3, (0x1F, 0x77, 0xB4), (0x2C, 0xA0, 0x2C), (0xD6, 0x27, 0x28)):
        assert (image == colour).all(axis=2).sum() > 20, f"nothing is drawn in {colour}"
    plot_timeline(records, tmp_path / "a.html", by_step=True)
    page = (tmp_path / "a.html").read_text()
    assert all(f">{bar.request_id}</text>" in page for bar in bars)
    assert page.count("<rect") > 160 and "http" not in page
    assert plot_timeline(records, tmp_path / "b.html", max_requests=10) == 70
    assert "70 later requests are left out" in (tmp_path / "b.html").read_text()
    with pytest.raises(InvalidArgumentError, match=r"\.png or \.html"):
        plot_timeline(records, tmp_path / "a.svg")
    with pytest.raises(InvalidArgumentError, match="no requests"):
        plot_timeline([], tmp_path / "a.png")


def test_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"

    def run(*arguments: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == exit_code, result.output
        return result.output

    mix = ["--tenants", "a=1,b=1", "--priorities", "0=1,5=1"]
    size = ["--requests", "30", "--rate", "20", "--option", "num_blocks=300"]
    output = run("simulate", *size, *mix, "--record", str(trace))
    assert "30 requests (0 refused)" in output and "tenant" in output
    assert "of 30 requests are the same" in run("replay", str(trace))
    figures = json.loads(run("simulate", "--trace", str(trace), "--cost", "fit", "--json"))
    assert figures["requests"] == 30 and figures["ttft_s"]["p50"] > 0
    for name in ("x.png", "x.html"):
        run("plot", str(trace), "--out", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 1000
    cost = json.dumps({"base_s": 0.01})
    assert "12 requests" in run("simulate", "--requests", "12", "--cost", cost, "--concurrency", "3")

    records = [msgspec.json.decode(line) for line in trace.read_bytes().splitlines()]
    wrong = copy.deepcopy(records)
    wrong[9]["scheduled"][0][1] += 1
    trace.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in wrong))
    assert f"step {wrong[9]['step']}: recorded" in run("replay", str(trace), exit_code=1)
    assert "max_num_sequences" in run("simulate", "--option", "max_num_sequences=3", exit_code=1)
    assert "KEY=VALUE" in run("simulate", "--option", "max_num_seqs", exit_code=2)
    assert "--cost" in run("simulate", "--cost", "free", exit_code=2)
