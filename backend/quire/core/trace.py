"""SchedulerTrace: what every step did, one JSON line each, for tests, replay and looking closely."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any

from quire.outputs import SchedulerOutput, SchedulerStats
from quire.request import FinishReason, Request


class SchedulerTrace:
    """Collects one record per step, in `records` or as lines appended to a file.

    A record holds
        step, time (s, monotonic, when the step was planned),
        arrivals: [[request_id, num_prompt_tokens]] between planning of the previous step and of this one,
        scheduled: [[request_id, num_computed_tokens, num_scheduled_tokens]],
        preempted: [request_id] by this step's planning,
        finished: [[request_id, reason]] since the previous record,
        and, at the end of the step: num_free_blocks, num_running, num_waiting.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """`path`: the file to append to; None: records are kept in memory."""
        self.records: list[dict[str, Any]] = []
        self._file: IO[str] | None = None
        if path is not None:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 (until close)
        self._record: dict[str, Any] | None = None
        self._arrivals: list[list[Any]] = []
        self._preempted: list[str] = []
        self._finished: list[list[str]] = []

    def on_arrival(self, request: Request) -> None:
        self._arrivals.append([request.request_id, request.num_prompt_tokens])

    def on_preemption(self, request: Request) -> None:
        self._preempted.append(request.request_id)

    def on_finish(self, request: Request, reason: FinishReason) -> None:
        self._finished.append([request.request_id, str(reason)])

    def begin_step(self, output: SchedulerOutput) -> None:
        """The step is planned: arrivals from now on belong to the next one."""
        if self._record is not None:  # an empty plan that was never executed: its arrivals are not lost
            self._arrivals = self._record["arrivals"] + self._arrivals
        self._record = {
            "step": output.step,
            "time": time.monotonic(),
            "arrivals": self._arrivals,
            "scheduled": [
                [row.request_id, row.num_computed_tokens, row.num_scheduled_tokens]
                for row in output.scheduled
            ],
            "preempted": self._preempted,
        }
        self._arrivals, self._preempted = [], []

    def end_step(self, stats: SchedulerStats) -> None:
        """The step is done or has failed; no effect without one begun."""
        if self._record is None:
            return
        record, self._record = self._record, None
        record["finished"], self._finished = self._finished, []
        record["num_free_blocks"] = stats.num_free_blocks
        record["num_running"] = stats.num_running
        record["num_waiting"] = stats.num_waiting
        self._write(record)

    def event(self, kind: str, **values: Any) -> None:
        """Writes what happened between steps as a record of its own: {"event": kind, "time": ...}."""
        self._write({"event": kind, "time": time.monotonic(), **values})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            self.records.append(record)
        else:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
