"""Fairness, priority, overload and static batches on a real engine in wall-clock time.

The engine runs in this process, without Triton: load arrives at its due times (an open loop), whatever the
engine does. Rates are multiples of what the same engine reaches with all requests there at once, so the
figures mean the same on any machine.

fairness   one tenant sends ten times as much as another: the light one's latency against being alone, under
           queue_policy fair and fcfs; and the gap in service while both have requests waiting
priority   time to first token of the high class on an idle machine and while the low class saturates it
overload   five times the load: TTFT of those accepted, time to refuse the others, memory
static     tokens per second and latency of static against continuous batches

    python -m benchmarks.policies                          # about five minutes
    python -m benchmarks.policies --only fairness --seconds 20
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report import ROOT
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import UnavailableError
from quire.sampling_params import SamplingParams
from quire.scheduling_params import SchedulingParams

DEMO = ROOT / "model_repository" / "generator" / "1" / "demo"
SEATS = 16
BUDGET = 64
CAP = 2
"""Requests of the heavy tenant that may run at a time, where it is capped."""
SLO_MS = 2000


@dataclass
class Load:
    """One request and what became of it; times in seconds since the beginning of its run."""

    due: float
    num_prompt: int
    max_tokens: int
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    first_token_at: float | None = None
    ended_at: float | None = None
    refused_after: float | None = None
    """Seconds from its due time to the refusal, the wait for a step to end included."""
    num_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.due

    @property
    def e2e(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.due


@dataclass(frozen=True)
class Mix:
    """Bounds of the lengths in tokens."""

    prompt: tuple[int, int] = (8, 64)
    output: tuple[int, int] = (16, 64)

    def load(self, due: float, rng: random.Random, scheduling: dict[str, Any]) -> Load:
        return Load(due, rng.randint(*self.prompt), rng.randint(*self.output), SchedulingParams(**scheduling))


@dataclass
class Run:
    loads: list[Load]
    seconds: float
    refusal_s: list[float] = field(default_factory=list)
    """Seconds of each add_request() that refused, alone."""
    rss: list[int] = field(default_factory=list)
    """Bytes of this process, sampled."""
    service: list[dict[str, float]] = field(default_factory=list)
    """Tokens of each tenant after each step: prompt tokens + 2 * output tokens so far."""


def loads(rate: float, seconds: float, mix: Mix, seed: int, **scheduling: Any) -> list[Load]:
    """Poisson arrivals; lengths are uniform."""
    rng = random.Random(seed)
    made, due = [], 0.0
    while (due := due + rng.expovariate(rate)) < seconds:
        made.append(mix.load(due, rng, scheduling))
    return made


def backlog(count: int, mix: Mix, seed: int, **scheduling: Any) -> list[Load]:
    """All there at the beginning."""
    rng = random.Random(seed)
    return [mix.load(0.0, rng, scheduling) for _ in range(count)]


def engine(model: Path, **settings: Any) -> EngineCore:
    values = {
        "model": str(model),
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": SEATS,
        "max_num_batched_tokens": BUDGET,
        "num_blocks": 2000,
        "enable_prefix_caching": False,
        "max_waiting_requests": 2**31,
        "max_waiting_tokens": 2**62,
        **settings,
    }
    core = EngineCore(EngineConfig.from_mapping(values))
    core.warm_up()
    return core


def drive(core: EngineCore, all_loads: Iterable[Load], *, until: Callable[[], bool] = lambda: False) -> Run:
    """Runs the loads to their ends, or until told to stop."""
    coming = sorted(all_loads, key=lambda load: load.due)
    by_id = {f"r{index}": load for index, load in enumerate(coming)}
    rng = random.Random(0)
    process = psutil.Process(os.getpid())
    result = Run(coming, 0.0)
    service: dict[str, float] = {}
    begin, index, sampled_at = time.monotonic(), 0, 0.0
    while (index < len(coming) or core.has_work) and not until():
        now = time.monotonic() - begin
        while index < len(coming) and coming[index].due <= now:
            load = coming[index]
            prompt = [rng.randrange(core.info.vocab_size) for _ in range(load.num_prompt)]
            params = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True)
            adding = time.perf_counter()
            try:
                core.add_request(
                    f"r{index}", prompt, params, arrival_time=begin + load.due, scheduling=load.scheduling
                )
            except UnavailableError:
                result.refusal_s.append(time.perf_counter() - adding)
                load.refused_after = time.monotonic() - begin - load.due
            index += 1
        if not core.has_work:
            if index < len(coming):
                time.sleep(max(0.0, begin + coming[index].due - time.monotonic()))
            continue
        outputs = core.step()
        now = time.monotonic() - begin
        for output in outputs:
            load = by_id[output.request_id]
            tenant = load.scheduling.tenant
            if load.first_token_at is None:
                load.first_token_at = now
                service[tenant] = service.get(tenant, 0.0) + load.num_prompt
            load.num_tokens += len(output.new_token_ids)
            service[tenant] = service.get(tenant, 0.0) + 2 * len(output.new_token_ids)
            if output.finish_reason is not None:
                load.ended_at = now
        result.service.append(dict(service))
        if now - sampled_at > 0.5:
            sampled_at = now
            result.rss.append(process.memory_info().rss)
    result.seconds = time.monotonic() - begin
    return result


def percentiles(values: Iterable[float | None]) -> dict[str, float]:
    kept = [value for value in values if value is not None]
    if not kept:
        return {}
    return {f"p{percent}": float(np.percentile(kept, percent)) for percent in (50, 90, 99)}


def capacity(model: Path, mix: Mix) -> float:
    """Requests per second with all of them there at once."""
    core = engine(model)
    drive(core, backlog(SEATS, mix, 98))
    run = drive(core, backlog(6 * SEATS, mix, 99))
    core.close()
    return len(run.loads) / run.seconds


def fairness(model: Path, seconds: float) -> dict[str, Any]:
    mix = Mix()
    rate = capacity(model, mix)
    result: dict[str, Any] = {"capacity_rps": rate}
    settings: dict[str, dict[str, Any]] = {
        "fair": {"queue_policy": "fair"},
        "fair, heavy capped": {"queue_policy": "fair", "tenants": f'{{"heavy": {{"max_running": {CAP}}}}}'},
        "fcfs": {"queue_policy": "fcfs"},
    }
    for policy, values in settings.items():
        light = loads(0.15 * rate, seconds, mix, 1, tenant="light")
        heavy = loads(1.5 * rate, seconds, mix, 2, tenant="heavy")
        figures: dict[str, Any] = {}
        for name, parts in (("alone", light), ("beside", light + heavy)):
            core = engine(model, **values)
            copies = [dataclasses.replace(load) for load in parts]
            watched = [load for load in copies if load.scheduling.tenant == "light"]
            run = drive(core, copies, until=lambda w=watched: all(load.ended_at is not None for load in w))
            core.close()
            own = [load for load in run.loads if load.scheduling.tenant == "light"]
            figures[name] = {
                "e2e_s": percentiles(load.e2e for load in own),
                "ttft_s": percentiles(load.ttft for load in own),
            }
        figures["e2e_ratio"] = {
            key: figures["beside"]["e2e_s"][key] / value for key, value in figures["alone"]["e2e_s"].items()
        }
        result[policy] = figures
    for policy in ("fair", "fcfs"):
        heavy = backlog(120, mix, 3, tenant="heavy")
        light = backlog(30, mix, 4, tenant="light")
        core = engine(model, queue_policy=policy)
        # All wait when the first step is planned, and while a light one waits both tenants do.
        run = drive(core, heavy + light, until=lambda light=light: all(load.first_token_at for load in light))
        core.close()
        gaps = [step.get("heavy", 0.0) - step.get("light", 0.0) for step in run.service]
        result[policy]["largest_gap"] = max(gaps) - min(gaps)
    result["bound"] = 2 * max(mix.prompt[1], 2 * SEATS * (mix.prompt[1] + mix.output[1]))
    return result


def priority(model: Path, seconds: float) -> dict[str, Any]:
    rate = capacity(model, Mix())
    urgent = Mix((400, 600), (8, 16))
    high = loads(0.03 * rate, 2 * seconds, urgent, 5, priority=-10)
    low = loads(2 * rate, 2 * seconds, Mix(), 6, priority=10, tenant="batch")
    result: dict[str, Any] = {"capacity_rps": rate, "urgent": len(high)}
    for policy in ("priority", "fcfs"):
        for name, parts in (("idle", high), ("loaded", high + low)):
            core = engine(model, queue_policy=policy, tenants='{"batch": {"max_waiting": 100}}')
            run = drive(core, [dataclasses.replace(load) for load in parts])
            core.close()
            own = [load for load in run.loads if load.scheduling.priority == -10]
            others = [load for load in run.loads if load.scheduling.priority == 10]
            result[f"{policy} {name}"] = {
                "ttft_s": percentiles(load.ttft for load in own),
                "low_ttft_s": percentiles(load.ttft for load in others),
                "low_refused": sum(load.refused_after is not None for load in others),
                "low_unserved": sum(load.refused_after is None and load.ended_at is None for load in others),
            }
        idle, loaded = (result[f"{policy} {name}"]["ttft_s"] for name in ("idle", "loaded"))
        result[f"{policy} ratio"] = {key: loaded[key] / idle[key] for key in idle}
    return result


def overload(model: Path, seconds: float) -> dict[str, Any]:
    mix = Mix()
    rate = capacity(model, mix)
    calm = loads(0.6 * rate, seconds / 2, mix, 7)
    storm = loads(5 * rate, 2 * seconds, mix, 8)
    storm = [dataclasses.replace(load, due=load.due + seconds / 2) for load in storm]
    core = engine(model, max_predicted_ttft_ms=SLO_MS)
    run = drive(core, calm + storm)
    core.close()
    accepted = [load for load in run.loads if load.refused_after is None]
    half = len(run.rss) // 2
    return {
        "capacity_rps": rate,
        "requests": len(run.loads),
        "accepted": len(accepted),
        "unfinished": sum(load.ended_at is None for load in accepted),
        "slo_s": SLO_MS / 1000,
        "ttft_s": percentiles(load.ttft for load in accepted),
        "late": sum((load.ttft or 0.0) > SLO_MS / 1000 for load in accepted) / len(accepted),
        "refusal_s": percentiles(load.refused_after for load in run.loads),
        "refusal_call_s": percentiles(run.refusal_s),
        "served_rps": len(accepted) / run.seconds,
        "rss_growth_mib": (run.rss[-1] - run.rss[half]) / 2**20,
        "rss_mib": run.rss[-1] / 2**20,
    }


def static(model: Path, seconds: float) -> dict[str, Any]:
    mix = Mix(output=(8, 128))
    rate = capacity(model, mix)
    result: dict[str, Any] = {"capacity_rps": rate}
    for scheduler in ("continuous", "static"):
        core = engine(model, scheduler=scheduler)
        run = drive(core, loads(0.7 * rate, seconds, mix, 9))
        core.close()
        result[scheduler] = {
            "tokens_per_s": sum(load.num_tokens for load in run.loads) / run.seconds,
            "ttft_s": percentiles(load.ttft for load in run.loads),
            "e2e_s": percentiles(load.e2e for load in run.loads),
        }
    return result


SCENARIOS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    "fairness": fairness,
    "priority": priority,
    "overload": overload,
    "static": static,
}


def flat(figures: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key} ")
        else:
            yield prefix + key, value


def table(rows: Sequence[tuple[str, float]]) -> str:
    """Markdown."""
    return "\n".join(["| figure | value |", "| --- | --- |", *(f"| {k} | {v:.4g} |" for k, v in rows)])


@click.command()
@click.option("--model", default=DEMO, type=click.Path(exists=True, path_type=Path))
@click.option("--seconds", default=15.0, show_default=True, help="Length of one load.")
@click.option("--only", default=",".join(SCENARIOS), show_default=True)
def main(model: Path, seconds: float, only: str) -> None:
    """Measure what the scheduling policies do on a real engine."""
    results = {}
    for name in only.split(","):
        results[name] = SCENARIOS[name](model, seconds)
        click.echo(f"\n{name}\n{table(list(flat(results[name])))}")
    click.echo(json.dumps(results))


if __name__ == "__main__":
    main()
