"""A profile of steps is a Chrome trace of what was done, with a roofline of each kind of step."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.scheduler import Scheduler
from quire.engine.cache_commands import Profile
from quire.errors import UnavailableError
from tests.fixtures.checkpoints import make_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EIGHT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("profile"))


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, max_model_len=64, num_blocks=32, num_threads=1, block_size=4, **options)


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The trace is one that Perfetto reads, no two phases of a thread overlap, and each step's phases lie in
    their order. Returns what is said of steps."""
    assert json.loads(json.dumps(trace)) == trace
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and isinstance(event["pid"], int) for event in spans)
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "C", "M"}
    named = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    steps = [event for event in spans if "kind" in event["args"]]
    for thread in named:
        phases = [event for event in spans if event["tid"] == thread and event not in steps]
        phases.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(phases):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2  # rounded, in microseconds
    for step in steps:
        number = step["args"]["step"]
        own = {event["name"]: event for event in spans if event["args"].get("step") == number}
        order = ["schedule", "prepare", "model", "sample", "collect", "update"]
        ends = [own[name]["ts"] + own[name]["dur"] for name in order if name in own]
        assert {"prepare", "model", "collect", "update"} <= own.keys()
        assert ends == sorted(ends)
    return [event["args"] for event in steps]


@pytest.mark.row("G26", clauses=("profile", "roofline"))
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_file_with_phases_and_rooflines(checkpoint: Path, tmp_path: Path, async_scheduling: bool) -> None:
    llm = make_llm(checkpoint, async_scheduling=async_scheduling)
    plain = llm.generate([PROMPT, PROMPT[1:]], EIGHT)
    begin = time.monotonic()
    with llm.profile(tmp_path / "trace.json"):
        profiled = llm.generate([PROMPT, PROMPT[1:]], EIGHT)
    passed_us = (time.monotonic() - begin) * 1e6
    assert [output.token_ids for output in profiled] == [output.token_ids for output in plain]
    assert llm.core.observer.profile is None
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    steps = check_trace(trace)
    assert all(0 <= event["ts"] <= passed_us for event in trace["traceEvents"] if "ts" in event)
    assert [step["kind"] for step in steps[:1]] == ["prefill"]
    assert {step["kind"] for step in steps[1:]} == {"decode"}
    assert sum(step["decode_rows"] for step in steps) == 2 * 7
    work = llm.core.info.work
    assert work is not None
    roofline = trace["otherData"]["roofline"]
    assert roofline["limits"]["gb_s"] > 0 and roofline["limits"]["gflop_s"] > 0
    assert 0 < roofline["computing"] <= 1
    for kind, phase in roofline["phases"].items():
        own = [step for step in steps if step["kind"] == kind]
        assert phase["steps"] == len(own) and phase["tokens"] == sum(step["tokens"] for step in own)
        seconds = phase["step_ms"] / 1e3 * len(own)
        shares = {
            "mbu": phase["gb_s"] / roofline["limits"]["gb_s"],
            "mfu": phase["gflop_s"] / roofline["limits"]["gflop_s"],
        }
        for name, share in shares.items():
            assert phase[name] == pytest.approx(share, rel=0.05, abs=2e-4)
        if abs(phase["mbu"] - phase["mfu"]) > 1e-3:  # they are rounded
            assert phase["bound"] == ("memory" if phase["mbu"] > phase["mfu"] else "compute")
        if kind == "decode":
            least = (work.layer_bytes + work.head_bytes) * len(own) / seconds / 1e9
            assert phase["gb_s"] > least * 0.98 - 1e-4  # rounded


def test_the_next_steps_are_recorded_and_no_more(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    profile = llm.core.observer.begin_profile(Profile(steps=3))
    with pytest.raises(UnavailableError, match="one at a time"):
        llm.core.observer.begin_profile(Profile())
    llm.generate([PROMPT], EIGHT)
    assert llm.core.observer.profile is None
    answer = profile.answer()
    assert [step["tokens"] for step in check_trace(answer)] == [8, 1, 1]
    counters = [event for event in answer["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"requests", "tokens per step", "KV blocks free"}
    llm.core.observer.begin_profile(Profile(seconds=1e-9))
    assert llm.core.observer.begin_profile(Profile()) is llm.core.observer.profile  # the one before is over


def test_one_step_that_was_launched_ahead_takes_no_more_time_than_passed(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, async_scheduling=True)
    profile = llm.core.observer.begin_profile(Profile(steps=1))
    llm.generate([PROMPT], EIGHT)
    assert 0 < profile.answer()["otherData"]["roofline"]["computing"] <= 1


def test_steps_of_both_kinds_are_mixed(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, max_num_batched_tokens=6)
    profile = llm.core.observer.begin_profile(Profile())
    llm.generate([PROMPT[:4], PROMPT], EIGHT)
    kinds = {step["kind"] for step in check_trace(profile.answer())}
    assert kinds == {"prefill", "mixed", "decode"}


def test_without_a_profile_no_step_is_timed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(checkpoint)
    timed = []
    schedule = Scheduler.schedule

    def note(self: Scheduler) -> Any:
        timed.append(planned := schedule(self))
        return planned

    monkeypatch.setattr(Scheduler, "schedule", note)
    llm.generate([PROMPT], EIGHT)
    assert timed and not any(planned.is_timed for planned in timed)
