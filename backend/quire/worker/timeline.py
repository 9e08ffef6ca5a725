"""Timeline: when each step began and ended on the device, and how long the device waited in between."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MAX_STEPS = 10_000
"""Older ones are forgotten."""


@dataclass(frozen=True)
class StepTime:
    """One step, in milliseconds of the device's clock."""

    num_rows: int
    busy_ms: float
    """Time from its first to its last kernel."""
    idle_ms: float
    """Time from the end of the step before."""


class Timeline:
    """Marks steps in the device's queue; costs two events per step when enabled, nothing otherwise.

    The marks are ranges for NVTX too, which profilers show.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._marks: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_STEPS)

    @contextlib.contextmanager
    def step(self, num_rows: int) -> Iterator[None]:
        """Context in which everything queued belongs to one step."""
        if not self.enabled:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.nvtx.range_push(f"step of {num_rows} rows")
        begin.record()
        try:
            yield
        finally:
            end.record()
            torch.cuda.nvtx.range_pop()
            self._marks.append((num_rows, begin, end))

    def take(self) -> list[StepTime]:
        """All steps since the last call but the first of them; waits for the device."""
        marks = list(self._marks)
        self._marks.clear()
        if marks:
            marks[-1][2].synchronize()
        return [
            StepTime(rows, begin.elapsed_time(end), before[2].elapsed_time(begin))
            for before, (rows, begin, end) in itertools.pairwise(marks)
        ]


def idle_fraction(steps: list[StepTime]) -> float:
    """Share of the time between the first and the last step in which the device had nothing to do."""
    total = sum(step.busy_ms + step.idle_ms for step in steps)
    return sum(step.idle_ms for step in steps) / total if total else 0.0
