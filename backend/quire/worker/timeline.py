"""Records when steps began and ended: on the device for benchmarks, phase by phase for profiles."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quire.outputs import StepTiming

MAX_STEPS = 10_000
"""Most steps whose marks are kept; the oldest are dropped."""
_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class StepTime:
    """Times of one step, in milliseconds of the device's clock."""

    num_rows: int
    busy_ms: float
    """Milliseconds from the step's first mark in the device's queue to its last."""
    idle_ms: float
    """Milliseconds from the previous step's last mark to this step's first."""


class Timeline:
    """Marks steps in a GPU's queue, with one event before and one after each step. Does nothing if it is not
    enabled, or the device is no GPU.

    Steps are also NVTX ranges, which profilers show.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._marks: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_STEPS)

    def step(self, num_rows: int) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the work of one step is queued."""
        return self._marked(num_rows) if self.enabled else _NOTHING

    @contextlib.contextmanager
    def _marked(self, num_rows: int) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.nvtx.range_push(f"step of {num_rows} rows")
        begin.record()
        try:
            yield
        finally:
            end.record()
            torch.cuda.nvtx.range_pop()
            self._marks.append((num_rows, begin, end))

    def pop_step_times(self) -> list[StepTime]:
        """Returns the times of the steps since the last call, of the latest MAX_STEPS at most, and without
        the first of them. Waits for the device."""
        marks = list(self._marks)
        self._marks.clear()
        if marks:
            marks[-1][2].synchronize()
        return [
            StepTime(rows, begin.elapsed_time(end), before[2].elapsed_time(begin))
            for before, (rows, begin, end) in itertools.pairwise(marks)
        ]


def idle_fraction(steps: list[StepTime]) -> float:
    """Returns the share of `idle_ms` in the steps' `busy_ms` and `idle_ms` together; 0 if there are no
    steps."""
    total = sum(step.busy_ms + step.idle_ms for step in steps)
    return sum(step.idle_ms for step in steps) / total if total else 0.0


class StepTimer:
    """Records when the phases of one step begin and end. At most one phase is under way."""

    def __init__(self, device: torch.device) -> None:
        self._phases: list[tuple[str, float, float]] = []
        self._name, self._began = "", 0.0
        self._marks = _Marks(device) if device.type == "cuda" else None

    def phase(self, name: str) -> None:
        """Ends the present phase and begins another; empty `name`: none begins. On cuda, the step's span on
        the device begins with the phase "model"."""
        now = time.monotonic()
        if self._name:
            self._phases.append((self._name, self._began, now))
        if self._marks is not None and name == "model":
            self._marks.begin()
        self._name, self._began = name, now

    def launched(self) -> None:
        """Records that all work of the step is queued; ends the present phase."""
        self.phase("")
        if self._marks is not None:
            self._marks.end()

    def timing(self) -> StepTiming:
        """Returns the phases so far and, on cuda, the step's span on the device, for which it waits."""
        self.phase("")
        return StepTiming(self._phases, None if self._marks is None else self._marks.span())


class _Marks:
    """Marks at the beginning and end of a step in the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._zero_s, self._zero = _zero_of(device)
        self._events: list[Any] = []

    def begin(self) -> None:
        self._mark()

    def end(self) -> None:
        if self._events:
            self._mark()

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def span(self) -> tuple[float, float] | None:
        if not self._events:
            return None
        self._events[-1].synchronize()
        begin, end = (self._zero_s + self._zero.elapsed_time(event) / 1000 for event in self._events)
        return begin, end


@functools.lru_cache
def _zero_of(device: torch.device) -> tuple[float, Any]:
    """Returns a host time and a device event of about the same moment."""
    event = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    event.record()
    event.synchronize()
    return time.monotonic(), event
