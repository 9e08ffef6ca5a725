"""SchedulerTrace: what it records, and that a replay of it makes the same batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.replay import ReplayReport, replay
from benchmarks.simulator.workload import read_records
from quire.config import CacheConfig
from quire.core.request import FinishReason
from quire.core.trace import SchedulerTrace
from quire.errors import InvalidArgumentError, UnavailableError
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE

BLOCK_SIZE = 4


def traced_engine(path: Path | None = None, *, num_blocks: int = 64, **options: Any) -> FakeEngine:
    cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    engine = FakeEngine(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, cache={"enable_prefix_caching": True}, **options
    )
    engine.scheduler.start_trace(cache, path)
    return engine


def trace_of(engine: FakeEngine) -> SchedulerTrace:
    trace = engine.scheduler.roster.trace
    assert trace is not None
    return trace


def replayed(engine: FakeEngine) -> ReplayReport:
    trace = trace_of(engine)
    # As a file would give them: nothing of the engine's own objects is left.
    return replay(json.loads(json.dumps([trace.header, *trace.records])))


def test_arrivals_tell_what_scheduling_depends_on() -> None:
    engine = traced_engine()
    engine.clock.now = 3.0
    shared = list(range(1, 9))
    scheduling = SchedulingParams(priority=5, tenant="t", deadline=90.0)
    engine.add("a", 9, 2, prompt=[*shared, 1])
    engine.add("b", 9, 2, prompt=[*shared, 2], scheduling=scheduling)
    engine.add("c", 9, 2, prompt=[*shared, 2], scheduling=SchedulingParams(cache_salt="s"))
    engine.step()
    engine.run()
    a, b, c = trace_of(engine).records[0]["arrivals"]
    assert {key: a[key] for key in ("id", "prompt", "time", "taken_at", "max_tokens")} == {
        "id": "a", "prompt": 9, "time": 3.0, "taken_at": 3.0, "max_tokens": 2
    }  # fmt: skip
    assert a["hash_ids"] == b["hash_ids"] and len(a["hash_ids"]) == 2, "two full blocks are the same"
    assert not set(a["hash_ids"]) & set(c["hash_ids"]), "another salt is other content"
    assert (b["priority"], b["tenant"], b["deadline"]) == (5, "t", 90.0)
    assert c["cache_salt"] == "s" and not {"priority", "tenant", "n", "in_flight"} & c.keys()


def test_a_finished_request_tells_the_content_of_its_output() -> None:
    """The next turn of a conversation has the blocks of the turn before."""
    engine = traced_engine()
    first = engine.add("first", 6, 7)
    engine.run()
    second = engine.add("second", 0, 2, prompt=[*first.token_ids, 1])
    engine.run()
    records = trace_of(engine).records
    ends = {end["id"]: end for record in records for end in record["finished"]}
    arrivals = {entry["id"]: entry for record in records for entry in record["arrivals"]}
    assert (ends["first"]["reason"], ends["first"]["output"]) == ("length", 7)
    content = arrivals["first"]["hash_ids"] + ends["first"]["hash_ids"]
    assert content == arrivals["second"]["hash_ids"] and len(content) == 3
    assert second.num_cached_tokens == 12
    assert replayed(engine).difference is None


def test_a_plan_of_nothing_is_no_step_of_the_trace() -> None:
    """What came before it belongs to the next step, as one that nothing was under way before."""
    engine = traced_engine()
    assert not engine.scheduler.schedule().scheduled
    engine.add("a", 4, 1)
    engine.run()
    records = trace_of(engine).records
    assert [[row[0] for row in record["scheduled"]] for record in records] == [["a"]]
    (arrival,) = records[0]["arrivals"]
    assert arrival["id"] == "a" and "in_flight" not in arrival
    assert replayed(engine).difference is None


def test_a_step_tells_how_many_run_and_how_many_wait() -> None:
    engine = traced_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, 4, 3)
    engine.step()
    record = trace_of(engine).records[0]
    assert (record["num_running"], record["num_waiting"]) == (2, 1)


def test_ends_from_outside_are_told_apart() -> None:
    engine = traced_engine(step_s=1.0)
    engine.add("late", 4, 50, scheduling=SchedulingParams(deadline=3.0))
    engine.add("cancelled", 4, 50)
    engine.add("itself", 4, 2)
    engine.add("stopped", 4, 50)
    engine.step()
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    engine.collect(engine.scheduler.abort(["stopped"], FinishReason.STOP))  # a stop string
    engine.collect(engine.scheduler.update(plan, result))
    engine.abort("cancelled")
    engine.clock.now = 5.0
    engine.step()
    engine.add("last", 4, 1)
    engine.run()
    records = trace_of(engine).records
    ended = [entry for record in records for entry in record["ended"]]
    assert ended == [
        ["stopped", "stop", True, 0], ["cancelled", "cancelled", False, 0], ["late", "timeout", False, 0]
    ]  # fmt: skip
    finished = {end["id"]: end["reason"] for record in records for end in record["finished"]}
    assert finished["itself"] == "length" and len(finished) == 5
    assert replayed(engine).difference is None


def random_load(engine: FakeEngine, *, seed: int, count: int, choices: bool = True) -> None:
    """Bursts of requests with shared beginnings, chats, cancellations, deadlines, tenants, priorities."""
    rng = random.Random(seed)
    scheduler = engine.scheduler
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 24))] for _ in range(4)]
    open_ids: list[str] = []
    for number in range(count):
        name = f"r{number}"
        prompt = [*rng.choice(prefixes), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30)))]
        if engine.reasons and rng.random() < 0.2:
            before = engine.requests[rng.choice(sorted(engine.reasons.keys() & engine.requests.keys()))]
            prompt = [*before.token_ids, *prompt][:120]
        scheduling = SchedulingParams(
            priority=rng.choice([0, 0, 1]),
            tenant=rng.choice(["", "x", "y"]),
            cache_salt=rng.choice(["", "", "", "salt"]),
            deadline=engine.clock() + rng.uniform(5, 60) if rng.random() < 0.1 else None,
        )
        options: dict[str, Any] = {"ignore_eos": rng.random() < 0.7, "temperature": 1.0, "seed": number}
        if choices and rng.random() < 0.1:
            options["n"] = rng.randint(2, 3)
        try:
            engine.add(name, 0, rng.randint(1, 40), prompt=prompt, scheduling=scheduling, **options)
        except UnavailableError:
            continue
        open_ids.append(name)
        if rng.random() < 0.15:
            engine.abort(rng.choice(open_ids))
        if rng.random() < 0.3:
            plan = scheduler.schedule()
            result = engine.runner.execute(plan)
            if rng.random() < 0.5:
                try:
                    engine.add(f"{name}-in-flight", rng.randint(1, 20), 9)
                except UnavailableError:
                    pass
            if rng.random() < 0.5:
                engine.collect(scheduler.abort([rng.choice(open_ids)], FinishReason.CANCELLED))
            if rng.random() < 0.1:
                engine.runner.was_told_of_failure = True
                outputs = scheduler.fail("made to fail")
            else:
                if plan.scheduled and rng.random() < 0.3:
                    rng.choice(result.rows).error = "one row failed"
                outputs = scheduler.update(plan, result)
            # An error ends all choices, also where the first has ended before.
            engine.collect([output for output in outputs if output.request_id not in engine.reasons])
            engine.clock.now += rng.random()
        for _ in range(rng.choice([0, 0, 1, 3])):
            engine.step()
    for _ in range(2000):
        if not scheduler.has_unfinished():
            return
        engine.step()
    raise AssertionError("stalled")


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "prefill first": {"batch_policy": "prefill_first"},
    "decode first": {"batch_policy": "decode_first"},
    "priority": {"queue_policy": "priority", "ageing_s": 2.0},
    "shortest": {"queue_policy": "shortest_first"},
    "longest prefix": {"queue_policy": "longest_prefix"},
    "fair": {"queue_policy": "fair", "tenants": '{"x": {"weight": 3}, "y": {"max_running": 4}}'},
    "no evict": {"kv_reservation": "no_evict"},
    "predicted": {"kv_reservation": "predicted"},
    "short queue": {"max_waiting_requests": 3},
}


@pytest.mark.row("B22", clauses=("replay",))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_gives_the_same_batches(policy: str) -> None:
    num_steps = num_requests = num_preemptions = num_cached_tokens = 0
    for seed in range(3):
        engine = traced_engine(
            num_blocks=48, max_num_seqs=8, max_num_batched_tokens=40, step_s=0.25, **POLICIES[policy]
        )
        random_load(engine, seed=seed, count=60)
        report = replayed(engine)
        assert report.difference is None, f"seed {seed}: {report.difference}"
        records = trace_of(engine).records
        assert report.num_steps == len(records)
        assert report.num_requests == sum(len(record["arrivals"]) for record in records)
        assert report.num_preemptions == engine.scheduler.roster.num_preemptions
        num_steps += report.num_steps
        num_requests += report.num_requests
        num_preemptions += report.num_preemptions
        num_cached_tokens += engine.kv.num_cached_tokens
    assert num_steps > 100 and num_requests > 20 and num_cached_tokens > 100
    assert num_preemptions > 3 or policy in ("no evict", "predicted", "short queue")


def test_a_replay_names_the_step_that_differs() -> None:
    engine = traced_engine(num_blocks=24, max_num_batched_tokens=16)
    random_load(engine, seed=1, count=20)
    trace = trace_of(engine)
    records = json.loads(json.dumps([trace.header, *trace.records]))
    wrong = next(record for record in records[20:] if record["scheduled"])
    wrong["scheduled"][0][2] += 1
    report = replay(records)
    assert report.difference is not None and report.difference.step == wrong["step"]
    assert f"step {wrong['step']}: recorded" in str(report.difference)

    # With another budget the very first full step is another one.
    trace.header["scheduler"]["max_num_batched_tokens"] = 15
    assert replayed(engine).difference is not None


def test_a_trace_file_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = traced_engine(path, num_blocks=48)
    random_load(engine, seed=4, count=30)
    trace_of(engine).event("abort", request_ids=[])
    trace_of(engine).close()
    records = read_records(path)
    assert replay(records).num_steps == len(records) - 2  # the header and the event
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])  # the engine was killed while it wrote
    report = replay(read_records(path))
    assert report.difference is None and report.num_steps > 10
    path.write_bytes(b"{}\nnot json\n{}\n")
    with pytest.raises(InvalidArgumentError, match="line 2"):
        read_records(path)
    with pytest.raises(InvalidArgumentError, match="no record of the engine"):
        replay([{}])


def test_a_trace_with_tiers_is_not_replayed() -> None:
    engine = traced_engine(host_blocks=8)
    engine.add("a", 4, 2)
    engine.run()
    with pytest.raises(InvalidArgumentError, match="KV tiers"):
        replayed(engine)


@pytest.mark.parametrize(("key", "value"), [("async_scheduling", True), ("num_draft_tokens", 4)])
def test_a_trace_of_steps_that_go_ahead_of_tokens_is_not_replayed(key: str, value: int) -> None:
    engine = traced_engine()
    engine.add("a", 4, 2)
    engine.run()
    assert replayed(engine).difference is None
    trace_of(engine).header["scheduler"][key] = value
    with pytest.raises(InvalidArgumentError, match=f"trace: made with {key}"):
        replayed(engine)


def test_a_trace_with_tiers_tells_what_was_computed_and_what_came_back(tmp_path: Path) -> None:
    """A request that loads has no row before its blocks are there, and then computes the rest alone."""
    path = tmp_path / "trace.jsonl"
    engine = traced_engine(path, host_blocks=64)
    prompt = list(range(1, 34))
    engine.add("first", 0, 3, prompt=prompt)
    engine.run()
    engine.kv.reset()
    engine.add("again", 0, 3, prompt=prompt)
    engine.add("beside", 7, 6)
    engine.run()
    trace_of(engine).close()
    header, *records = read_records(path)
    assert header["tiers"] is True
    assert {entry["id"]: len(entry["hash_ids"]) for r in records for entry in r["arrivals"]} == {
        "first": 8, "again": 8, "beside": 1
    }  # fmt: skip
    rows = {name: [row[1:] for r in records for row in r["scheduled"] if row[0] == name] for name in ENDS}
    assert rows["first"] == [[0, 33], [33, 1], [34, 1]]
    assert rows["again"] == [[32, 1], [33, 1], [34, 1]], "32 tokens came from the host tier"
    assert rows["beside"] == [[0, 7], *([position, 1] for position in range(7, 12))]
    ends = {end["id"]: (end["reason"], end["output"]) for r in records for end in r["finished"]}
    assert ends == ENDS
    engine.check_outputs()


ENDS = {"first": ("length", 3), "again": ("length", 3), "beside": ("length", 6)}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_trace_with_tiers_loses_nothing(mode: str) -> None:
    """Under any load each request arrives and ends once in it, and each row begins where its request is."""
    engine = traced_engine(
        num_blocks=48,
        host_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        step_s=0.25,
        preemption_mode=mode,
    )
    random_load(engine, seed=6, count=60)
    records = trace_of(engine).records
    arrived = [entry["id"] for record in records for entry in record["arrivals"]]
    ended = [end["id"] for record in records for end in record["finished"]]
    assert len(set(arrived)) == len(arrived) > 40
    assert sorted({name.partition("#")[0] for name in ended}) == sorted(arrived)
    assert len(set(ended)) == len(ended)
    computed: dict[str, int] = {}
    num_found = 0
    for record in records:
        for name in record["preempted"]:
            computed.pop(name, None)
        for name, begin, count in record["scheduled"]:
            if name in computed:
                assert begin == computed[name], name
            elif "#" not in name:
                num_found += begin
            computed[name] = begin + count
    assert num_found > 100, "nothing was found in pool or tier"
    assert engine.scheduler.transfers.num_loaded_tokens > 0


def test_a_trace_with_the_keys_of_an_earlier_version_is_refused_for_its_version() -> None:
    """It was taken for one of today's, and "long_prefill_threshold is unknown" said nothing of traces."""
    scheduler = {"long_prefill_threshold": 1024, "fairness_input_weight": 1.0, "tenants": ""}
    header = {"event": "engine", "version": 1, "tiers": False, "time": 0.0, "scheduler": scheduler}
    with pytest.raises(InvalidArgumentError, match=r"version 1.* only version 3"):
        replay([{**header, "cache": {"kv_events_buffer": 10_000}}])
