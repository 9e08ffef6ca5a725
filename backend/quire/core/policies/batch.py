"""BatchPolicy: decides which kinds of rows a step may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.config import SchedulerConfig
from quire.core.request import Request


class Phases(NamedTuple):
    """Kinds of rows that a step may hold."""

    decodes: bool
    """Whether running requests that lack one token may have rows."""
    prefills: bool
    """Whether running requests that lack several tokens may have rows."""
    admits: bool
    """Whether waiting requests may be admitted."""


class BatchPolicy:
    """Chooses between prefill and decode rows by `batch_policy`, `schedule_interval`, `waiting_running_ratio`
    and `scheduler` (static batches) of SchedulerConfig."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._policy = config.batch_policy
        self._is_static = config.scheduler == "static"
        self._interval = config.schedule_interval
        self._ratio = config.waiting_running_ratio
        self._latest_admission = 0

    def on_admitted(self, step: int) -> None:
        """Records that a request was admitted in the step after `step` steps."""
        self._latest_admission = step

    def phases(self, step: int, running: Sequence[Request], num_waiting: int) -> Phases:
        """Returns the kinds of rows for the step after `step` steps."""
        is_due = self._is_due(step, len(running), num_waiting)
        admits = self._admits(len(running), is_due)
        if self._policy == "mixed":
            return Phases(True, True, admits)
        if self._policy == "prefill_first":
            if (admits and num_waiting) or any(request.num_missing > 1 for request in running):
                return Phases(False, True, admits)
            return Phases(True, True, False)
        if not is_due and any(request.num_missing == 1 for request in running):
            return Phases(True, False, False)
        return Phases(True, True, admits)

    def _admits(self, num_running: int, is_due: bool) -> bool:
        if not num_running:
            return True
        if self._is_static:
            return False
        return is_due or (self._interval <= 1 and self._ratio <= 0)

    def _is_due(self, step: int, num_running: int, num_waiting: int) -> bool:
        """Returns whether the schedule interval or the length of the queue calls for prefill now."""
        if self._interval > 1 and step - self._latest_admission >= self._interval:
            return True
        return self._ratio > 0 and num_waiting > self._ratio * num_running
