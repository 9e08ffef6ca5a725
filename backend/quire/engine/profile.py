"""StepProfile: a timeline of steps, and how close each kind of step comes to the device's limits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from quire.engine.cache_commands import Profile
from quire.outputs import ModelRunnerOutput, RunnerInfo, SchedulerOutput, SchedulerStats
from quire.roofline import DeviceLimits, Work

ENGINE, RUNNER, DEVICE = 1, 2, 3
"""Threads in the trace; DEVICE is the device's queue, if it has one."""


@dataclass(slots=True)
class _Kind:
    """Sums over steps of one kind whose computing was timed."""

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)


class StepProfile:
    """Records steps on the engine's thread; `answer` is a Chrome trace (Perfetto opens it).

    Args:
        command: how long to record.
        info: the runner's `RunnerInfo`.
    """

    def __init__(self, command: Profile, info: RunnerInfo) -> None:
        self._info = info
        self.began = time.monotonic()
        self.ends_at = self.began + command.seconds
        self._steps_left = command.steps
        self._events: list[dict[str, Any]] = []
        self._phase = ("", 0.0, 0)
        self._limits: DeviceLimits | None = None
        self._kinds: dict[str, _Kind] = {}
        self._span = math.inf, 0.0
        """When the first recorded step began, as far as is known, and when the last one was recorded; (inf,
        0): none was."""

    @property
    def is_over(self) -> bool:
        return self._steps_left <= 0 or time.monotonic() >= self.ends_at

    def phase(self, name: str, step: int = 0) -> None:
        """Ends the engine's present phase and begins the phase `name`; empty: none begins."""
        now = time.monotonic()
        last, began, of_step = self._phase
        if last:
            self._event(ENGINE, last, began, now, {"step": of_step} if of_step else {})
        self._phase = name, now, step

    def done(self, planned: SchedulerOutput, result: ModelRunnerOutput, stats: SchedulerStats) -> None:
        """Records a finished step. Skips steps without rows, steps that are not timed (`is_timed`), and those
        after the last one asked for."""
        if not planned.is_timed or planned.is_empty or self._steps_left <= 0:
            return
        self._steps_left -= 1
        rows = [(row.num_computed_tokens, row.num_scheduled_tokens, row.samples) for row in planned.scheduled]
        num_decodes = sum(count == 1 for _, count, _ in rows)
        num_tokens = sum(count for _, count, _ in rows)
        kind = "mixed" if 0 < num_decodes < len(rows) else "decode" if num_decodes else "prefill"
        facts: dict[str, Any] = {
            "step": planned.step,
            "kind": kind,
            "rows": len(rows),
            "tokens": num_tokens,
            "decode_rows": num_decodes,
            "prefill_tokens": num_tokens - num_decodes,
        }
        timing = result.timing
        if timing is not None:
            for name, begin, end in timing.phases:
                self._event(RUNNER, name, begin, end, {"step": planned.step})
            self._limits = timing.limits or self._limits
            if timing.computing is not None:
                facts |= self._compute(kind, rows, *timing.computing)
        if timing is not None and timing.device is not None:
            self._event(DEVICE, f"{kind} step", *timing.device, facts)
        elif timing is not None and timing.computing is not None:
            self._event(RUNNER, f"{kind} step", *timing.computing, facts)
        now = time.monotonic()
        began = timing.phases[0][1] if timing is not None and timing.phases else self._phase[1]
        self._span = min(self._span[0], began), now
        gauges = {"running": stats.num_running, "waiting": stats.num_waiting}
        self._counter("requests", now, gauges)
        self._counter("tokens per step", now, {"tokens": num_tokens})
        self._counter("KV blocks free", now, {"blocks": stats.num_free_blocks})

    def _compute(
        self, kind: str, rows: list[tuple[int, int, bool]], begin: float, end: float
    ) -> dict[str, Any]:
        if self._info.work is None or end <= begin:
            return {}
        total = self._kinds.setdefault(kind, _Kind())
        work = self._info.work.of_step(rows)
        total.num_steps += 1
        total.num_rows += len(rows)
        total.num_tokens += sum(count for _, count, _ in rows)
        total.seconds += end - begin
        total.work += work
        return self._rates(work, end - begin)

    def _rates(self, work: Work, seconds: float) -> dict[str, Any]:
        rates: dict[str, Any] = {
            "gb_s": work.num_bytes / seconds / 1e9,
            "gflop_s": work.flops / seconds / 1e9,
        }
        if self._limits is not None:
            rates |= self._limits.compare(work, seconds)
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in rates.items()}

    def _event(self, thread: int, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        self._events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": thread,
                "name": name,
                "ts": self._us(begin),
                "dur": round((end - begin) * 1e6, 1),
                "args": args,
            }
        )

    def _counter(self, name: str, when: float, values: dict[str, int]) -> None:
        self._events.append({"ph": "C", "pid": 1, "name": name, "ts": self._us(when), "args": values})

    def _us(self, when: float) -> float:
        return round((when - self.began) * 1e6, 1)

    def answer(self) -> dict[str, Any]:
        """Returns the trace in Chrome's JSON, with a `roofline` in its `otherData`."""
        names = {ENGINE: "engine", RUNNER: "runner", DEVICE: f"device ({self._info.device})"}
        used = {event.get("tid") for event in self._events}
        meta = [
            {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}
            for thread, name in names.items()
            if thread in used
        ]
        return {
            "traceEvents": [*meta, *self._events],
            "displayTimeUnit": "ms",
            "otherData": {"device": self._info.device, "roofline": self._roofline()},
        }

    def _roofline(self) -> dict[str, Any]:
        """Returns `limits` (None: not known), `phases` and `computing`.

        `phases` holds for each kind of step whose computing was timed: steps, rows, tokens, mean milliseconds
        of computing and rates, compared with the device's limits if these are known. `computing` is the time
        in which these steps were computed, as a share of the time from the first recorded step to the last;
        None: no step was recorded. If the work of the model's steps is not known, `phases` is empty, and
        `computing` is 0 or None.
        """
        limits = self._limits
        seconds = sum(kind.seconds for kind in self._kinds.values())
        span = self._span[1] - self._span[0]
        return {
            "limits": None
            if limits is None
            else {
                "gb_s": round(limits.bytes_s / 1e9, 2),
                "gflop_s": round(limits.flops_s / 1e9, 2),
                "method": limits.method,
            },
            "computing": round(seconds / span, 4) if span > 0 else None,
            "phases": {
                name: {
                    "steps": kind.num_steps,
                    "rows": kind.num_rows,
                    "tokens": kind.num_tokens,
                    "step_ms": round(kind.seconds / kind.num_steps * 1e3, 4),
                    **self._rates(kind.work, kind.seconds),
                }
                for name, kind in self._kinds.items()
            },
        }
