"""Simulator: runs arrivals through the real scheduler on a virtual clock and reports latencies and
throughput."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.config import CacheConfig, EngineConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.errors import UnavailableError
from quire.models.kv_groups import KVGroup
from quire.outputs import EngineCoreOutput, ModelRunnerOutput, RowOutput, ScheduledRequest, SchedulerOutput
from quire.plan.arrival import END_TOKEN, Arrival
from quire.plan.cost import CostModel

END_TOKENS = frozenset({END_TOKEN})
PERCENTILES = (50, 90, 99)


class VirtualClock:
    """A clock in seconds that advances only when `now` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SampledTokens:
    """Stands in for a runner: returns the tokens that the requests of a workload generate."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}
        self._num_choices: dict[str, int] = {}  # of requests whose first tokens are still to be drawn

    def add(self, arrival: Arrival) -> None:
        """Adds a request, or another choice of one ("ID#1") if its content is known."""
        self._arrivals[arrival.request_id] = arrival

    def remove(self, request_id: str) -> None:
        del self._arrivals[request_id]
        self._num_choices.pop(request_id, None)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput([self._row(row) for row in plan.scheduled])

    def _row(self, row: ScheduledRequest) -> RowOutput:
        row_id = row.request_id
        if row.new is not None and row.new.num_choices > 1:
            self._num_choices[row_id] = row.new.num_choices
        if not row.samples:
            return RowOutput()
        position = row.num_computed_tokens + row.num_scheduled_tokens - row.num_drafts
        choices = range(1, self._num_choices.pop(row_id, 1))
        return RowOutput(
            [self._token(row_id, position)],
            choices=[RowOutput([self._token(f"{row_id}#{choice}", position)]) for choice in choices],
        )

    def _token(self, row_id: str, position: int) -> int:
        arrival = self._arrivals.get(row_id)
        if arrival is not None:
            return arrival.sampled_token(position)
        request_id, _, choice = row_id.rpartition("#")
        return self._arrivals[request_id].sampled_token(position, int(choice))


@dataclass(slots=True)
class Outcome:
    """Result of one request; `first_token_at` and `last_token_at` are seconds since the beginning."""

    arrival: Arrival
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    """Finish reasons of the choices that have ended; empty: none has, or the request was refused."""

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrival.at

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first, for the mean number of tokens per choice; None: that number
        is at most 1."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        per_choice = self.num_tokens / self.arrival.num_sequences
        return (self.last_token_at - self.first_token_at) / (per_choice - 1) if per_choice > 1 else None

    @property
    def e2e(self) -> float | None:
        return None if self.last_token_at is None else self.last_token_at - self.arrival.at


@dataclass(frozen=True)
class Report:
    """Measurements of a simulation; times in seconds."""

    outcomes: list[Outcome]
    duration_s: float
    """Simulated seconds."""
    num_steps: int
    gaps: array[float]
    """Seconds between two tokens of a sequence, one entry per token after the first."""
    plan_s: array[float]
    """CPU seconds of schedule(), per step; other processes on the machine do not count."""
    update_s: array[float]
    """CPU seconds of update(), per step."""
    wall_s: float
    num_preemptions: int
    num_computed_tokens: int
    num_cached_tokens: int
    usage: array[float]
    """Fraction of the blocks in use after each step."""
    num_running: array[float]
    num_refused: int

    def as_dict(self) -> dict[str, Any]:
        """Returns totals, means and percentiles over all requests, by name."""
        prompt_tokens = sum(outcome.arrival.num_prompt_tokens for outcome in self.outcomes if outcome.reasons)
        return {
            "requests": len(self.outcomes),
            "refused": self.num_refused,
            "reasons": dict(Counter(reason for outcome in self.outcomes for reason in outcome.reasons)),
            "duration_s": self.duration_s,
            "steps": self.num_steps,
            "output_tokens": sum(outcome.num_tokens for outcome in self.outcomes),
            "output_tokens_per_s": sum(outcome.num_tokens for outcome in self.outcomes) / self.duration_s,
            "requests_per_s": sum(bool(outcome.reasons) for outcome in self.outcomes) / self.duration_s,
            **_latencies(self.outcomes),
            "itl_s": _percentiles(self.gaps),
            "preemptions": self.num_preemptions,
            "computed_tokens": self.num_computed_tokens,
            "cached_tokens": self.num_cached_tokens,
            "hit_rate": self.num_cached_tokens / max(1, prompt_tokens),
            "kv_usage": {"mean": float(np.mean(self.usage)), "max": max(self.usage)},
            "running": {"mean": float(np.mean(self.num_running)), "max": max(self.num_running)},
            "plan_ms": {key: 1000 * value for key, value in _percentiles(self.plan_s).items()},
            "update_ms": {key: 1000 * value for key, value in _percentiles(self.update_s).items()},
            "steps_per_wall_s": self.num_steps / self.wall_s,
        }

    def by(self, key: str) -> dict[Any, dict[str, Any]]:
        """Returns latencies and counts by the values of `key`, a field of SchedulingParams such as tenant."""
        groups: defaultdict[Any, list[Outcome]] = defaultdict(list)
        for outcome in self.outcomes:
            groups[getattr(outcome.arrival.scheduling, key)].append(outcome)
        return {
            value: {
                "requests": len(groups[value]),
                "refused": sum(not outcome.reasons for outcome in groups[value]),
                "output_tokens": sum(outcome.num_tokens for outcome in groups[value]),
                **_latencies(groups[value]),
            }
            for value in sorted(groups)
        }

    def text(self) -> str:
        """Returns the figures as lines of text."""
        figures = self.as_dict()
        lines = [
            f"{figures['requests']} requests ({figures['refused']} refused), {figures['steps']} steps, "
            f"{self.duration_s:.2f} s simulated in {self.wall_s:.2f} s "
            f"({figures['steps_per_wall_s']:.0f} steps/s)",
            f"output {figures['output_tokens_per_s']:.1f} tokens/s, "
            f"{figures['requests_per_s']:.2f} requests/s; "
            + ", ".join(f"{count} {reason}" for reason, count in sorted(figures["reasons"].items())),
        ]
        for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
            values = "  ".join(f"{key} {1000 * value:10.2f}" for key, value in figures[name].items())
            lines.append(f"{name.removesuffix('_s'):5} ms  {values}")
        for name in ("plan_ms", "update_ms"):
            values = "  ".join(f"{key} {value:10.3f}" for key, value in figures[name].items())
            lines.append(f"{name.removesuffix('_ms'):6} ms {values}")
        lines.append(
            f"KV in use {figures['kv_usage']['mean']:.1%} mean, {figures['kv_usage']['max']:.1%} most; "
            f"{figures['preemptions']} preemptions; prefix hits {figures['hit_rate']:.1%} of prompt tokens; "
            f"running {figures['running']['mean']:.1f} mean, {figures['running']['max']:.0f} most"
        )
        for key in ("tenant", "priority"):
            groups = self.by(key)
            if len(groups) > 1:
                lines.append(f"{key:12} requests refused  ttft p50/p99 ms  e2e p50/p99 ms")
                for value, group in groups.items():
                    ttft, e2e = group["ttft_s"], group["e2e_s"]
                    lines.append(
                        f"{value!s:12} {group['requests']:8} {group['refused']:7}  "
                        f"{1000 * ttft['p50']:.1f}/{1000 * ttft['p99']:.1f}  "
                        f"{1000 * e2e['p50']:.1f}/{1000 * e2e['p99']:.1f}"
                    )
        return "\n".join(lines)


def _latencies(outcomes: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    kept = list(outcomes)
    return {
        f"{name}_s": _percentiles([value for o in kept if (value := getattr(o, name)) is not None])
        for name in ("ttft", "tpot", "e2e")
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {f"p{percent}": 0.0 for percent in PERCENTILES}
    found = np.percentile(np.asarray(values), PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


def make_kv(
    config: CacheConfig,
    *,
    max_step_tokens: int,
    groups: Sequence[KVGroup] = (KVGroup(None, (0,)),),
) -> KVCacheManager:
    """Returns a block manager like that of an engine with this configuration, without memory for blocks."""
    assert config.num_blocks is not None, "a simulated cache has a stated size"
    return KVCacheManager(
        config.num_blocks,
        config.tokens_per_block,
        groups=groups,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_ttl_s=config.cache_ttl_s,
        max_pinned_fraction=config.max_pinned_fraction,
        max_step_tokens=max_step_tokens,
    )


def make_request(arrival: Arrival) -> Request:
    """Returns the scheduler's request for an arrival."""
    return Request(
        arrival.request_id,
        arrival.prompt_token_ids(),
        arrival.sampling_params(),
        eos_token_ids=END_TOKENS,
        arrival_time=arrival.at,
        scheduling=arrival.scheduling,
    )


class Simulator:
    """Simulates one run of a workload.

    Args:
        config: the engine's configuration, with `num_blocks` set. Without `max_model_len` the pool alone
            limits the length of a sequence.
        arrivals: requests in the order of their times.
        cost: duration of steps.
        concurrency: for a closed loop: a request arrives whenever fewer than this many are unfinished,
            whatever its time. None: each arrives at its time.
        trace: whether to record the steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        arrivals: Sequence[Arrival],
        cost: CostModel,
        *,
        concurrency: int | None = None,
        trace: bool = False,
    ) -> None:
        self.clock = VirtualClock()
        self.cost = cost
        limits = config.scheduler
        self.kv = make_kv(
            config.cache,
            max_step_tokens=limits.max_row_tokens,
        )
        self.scheduler = Scheduler(
            limits,
            self.kv,
            config.model.max_model_len or self.kv.capacity + 1,
            clock=self.clock,
            session_ttl_s=config.cache.session_ttl_s,
        )
        self.trace = self.scheduler.start_trace(config.cache) if trace else None
        """Trace of the steps; None: they are not recorded. Runs of the same workload and configuration
        give the same trace, except for `plan_s`, which are wall times."""
        self._arrivals = deque(arrivals)
        self._concurrency = concurrency
        self._tokens = SampledTokens()
        self._running: dict[str, Outcome] = {}
        self._last_token_at: dict[tuple[str, int], float] = {}
        self._outcomes: list[Outcome] = []
        self._gaps = array("d")
        self._num_refused = 0

    def run(self) -> Report:
        """Runs until every request has ended.

        Raises:
            InvalidArgumentError: a request can never run, for example because its prompt does not fit into
                the cache or the model.
        """
        began = time.perf_counter()
        plan_s, update_s, usage, num_running = array("d"), array("d"), array("d"), array("d")
        scheduler, clock = self.scheduler, self.clock
        while self._arrivals or scheduler.has_unfinished():
            self._admit()
            if not scheduler.has_unfinished():
                if self._arrivals:
                    clock.now = max(clock.now, self._arrivals[0].at)
                continue
            self._account(scheduler.expire())
            planning = time.thread_time()
            plan = scheduler.schedule()
            planned = time.thread_time()
            clock.now += self.cost.seconds(
                (row.num_computed_tokens, row.num_scheduled_tokens) for row in plan.scheduled
            )
            result = self._tokens.execute(plan)
            updating = time.thread_time()
            outputs = scheduler.update(plan, result)
            update_s.append(time.thread_time() - updating)
            plan_s.append(planned - planning)
            usage.append(self.kv.usage)
            num_running.append(len(plan.scheduled))
            self._account(outputs)
            assert not plan.is_empty or not scheduler.has_unfinished(), f"stalled at {clock.now} s"
        stats = scheduler.stats()
        return Report(
            outcomes=self._outcomes,
            duration_s=clock.now,
            num_steps=len(plan_s),
            gaps=self._gaps,
            plan_s=plan_s,
            update_s=update_s,
            wall_s=time.perf_counter() - began,
            num_preemptions=stats.num_preemptions,
            num_computed_tokens=stats.num_scheduled_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            usage=usage,
            num_running=num_running,
            num_refused=self._num_refused,
        )

    def _admit(self) -> None:
        """Adds requests to the scheduler: those that have arrived by now, or in a closed loop the next ones
        until `concurrency` are unfinished."""
        arrivals, now = self._arrivals, self.clock.now
        while arrivals:
            if self._concurrency is None:
                if arrivals[0].at > now:
                    return
                arrival = arrivals.popleft()
            elif len(self._running) < self._concurrency:
                arrival = dataclasses.replace(arrivals.popleft(), at=now)
            else:
                return
            outcome = Outcome(arrival)
            self._outcomes.append(outcome)
            try:
                self.scheduler.add_request(make_request(arrival))
            except UnavailableError:
                self._num_refused += 1
                continue
            self._tokens.add(arrival)
            self._running[arrival.request_id] = outcome

    def _account(self, outputs: Iterable[EngineCoreOutput]) -> None:
        now, running, last = self.clock.now, self._running, self._last_token_at
        for output in outputs:
            outcome = running[output.request_id]
            sequence = (output.request_id, output.index)
            count = len(output.new_token_ids)
            if count:
                outcome.num_tokens += count
                before = last.get(sequence)
                if before is not None:
                    self._gaps.append(now - before)
                elif outcome.first_token_at is None:
                    outcome.first_token_at = now
                last[sequence] = outcome.last_token_at = now
            if output.finish_reason is not None:
                last.pop(sequence, None)
                outcome.reasons.append(output.finish_reason)
                if output.error is not None or len(outcome.reasons) == outcome.arrival.num_sequences:
                    del running[output.request_id]
                    self._tokens.remove(output.request_id)
