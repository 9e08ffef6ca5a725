"""SchedulerTrace: records executed steps, for replay, plots and debugging; in a file, one JSON line each."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.core.block_hash import hash_blocks
from quire.core.request import FinishReason, Request
from quire.outputs import SchedulerOutput, SchedulerStats
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams

logger = logging.getLogger("quire")

VERSION = 3
"""Version of the contents of records, and of the configuration's keys in the header."""

_SCHEDULING: msgspec.Struct = SchedulingParams()
_SCHEDULING_KEYS = dict(
    zip(SchedulingParams.__struct_fields__, SchedulingParams.__struct_encode_fields__, strict=True)
)
"""Key of each field of SchedulingParams in a record, by the field's name as an attribute."""
_SAMPLING: msgspec.Struct = SamplingParams()
_SAMPLING_KEYS = {name: name for name in ("n", "best_of", "beam_width")}


class SchedulerTrace:
    """Collects one record per step, in `records` or as lines appended to a file. Events are records of their
    own. A plan that was never executed joins the next record.

    A record holds
        step (its number), time (s on the scheduler's clock: when the step was planned), plan_s (seconds that
            planning took), overlapped (true: it was planned while the step before was computed),
        arrivals: the requests that came between the planning of the previous step and of this one, each as
            {"id", "prompt": number of tokens, "time", "taken_at": when the scheduler got it, "max_tokens",
            "hash_ids": for each full block of the prompt a number for its content and all before it}, with
            the fields of SchedulingParams and n, best_of, beam_width that are not at their defaults, and
            "in_flight": true if a step was being computed,
        ended: [[request_id, reason, in_flight, how many of `arrivals` came before]] for each request that was
            aborted or ended by a deadline in that time,
        scheduled: [[request_id, num_computed_tokens, num_scheduled_tokens]],
        preempted: [request_id] for each request that this step's planning preempted,
        finished: [{"id", "reason", "output": number of tokens, "hash_ids": for the full blocks after those of
            the prompt}] for each request that has ended since the previous record, without beams that a
            search dropped,
        end (s, when the step was done), num_free_blocks, num_running, num_waiting.
    benchmarks/simulator/replay.py makes the scheduler's calls again, but for refused requests and control
    commands. It refuses traces with drafts, beam search, KV tiers, adapters or async_scheduling, and replays
    a request that continues after an engine's death without its output so far. Choices that have forked have
    ids of their own, "id#index"; the first keeps the request's id, but in ended is "id#0".

    Args:
        path: the file to append to; None: records are kept in memory.
        block_size: tokens per block that one of `hash_ids` stands for.
        clock: the scheduler's clock.
        engine: what a replay needs to know of the engine: configuration, limits, KV groups. None: no header
            is written.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        block_size: int = 16,
        clock: Callable[[], float] = time.monotonic,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.records: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}
        """Event `engine`, which describes the engine. A file gets it before the trace's other records; it is
        not in `records`. Empty: no engine was described."""
        self.block_size = block_size
        self.clock = clock
        self._file: BinaryIO | None = None
        self._is_writing = True
        """Whether the file is still written; False after a failed write, as a trace with a gap cannot be
        replayed."""
        if path is not None:
            # Unbuffered: a reader sees every line that was written, also of an engine that was killed.
            self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (until close)
        self._records: deque[dict[str, Any]] = deque()
        """Records of steps under way, the oldest first."""
        self._arrivals: list[dict[str, Any]] = []
        self._ended: list[list[Any]] = []
        self._preempted: list[str] = []
        self._finished: list[dict[str, Any]] = []
        if engine is not None:
            self.header = {"event": "engine", "version": VERSION, "time": clock(), **engine}
            if self._file is not None:
                self._write(self.header)

    def on_arrival(self, request: Request) -> None:
        arrival: dict[str, Any] = {
            "id": request.request_id,
            "prompt": request.num_prompt_tokens,
            "time": request.arrival_time,
            "taken_at": self.clock(),
            "max_tokens": request.sampling_params.max_tokens,
            "hash_ids": self._content(request, 0, request.num_prompt_tokens),
        }
        for given, default, keys in (
            (request.scheduling, _SCHEDULING, _SCHEDULING_KEYS),
            (request.sampling_params, _SAMPLING, _SAMPLING_KEYS),
        ):
            if given != default:
                arrival |= {
                    key: getattr(given, name)
                    for name, key in keys.items()
                    if getattr(given, name) != getattr(default, name)
                }
        if self._records:
            arrival["in_flight"] = True
        self._arrivals.append(arrival)

    def on_preemption(self, request: Request) -> None:
        self._preempted.append(request.request_id)

    def on_finish(self, request: Request, reason: FinishReason, *, is_external: bool) -> None:
        """Records that a request has ended; `is_external`: it was aborted, or missed a deadline."""
        if is_external:
            in_flight, request_id, params = bool(self._records), request.request_id, request.sampling_params
            if request.num_sequences < params.num_sequences and params.beam_width == 1:
                request_id += "#0"  # this choice alone: the others have forked
            self._ended.append([request_id, str(reason), in_flight, len(self._arrivals)])
        self._finished.append(
            {
                "id": request.request_id,
                "reason": str(reason),
                "output": request.num_output_tokens,
                "hash_ids": self._content(request, request.num_prompt_tokens, request.num_tokens),
            }
        )

    def begin_step(self, output: SchedulerOutput, *, plan_s: float = 0.0, overlapped: bool = False) -> None:
        """Records a planned step; arrivals from now on belong to the next record."""
        if self._records and not self._records[-1]["scheduled"]:  # a plan that was never executed
            self._carry_over(self._records.pop())
        record = {
            "step": output.step,
            "time": self.clock(),
            "plan_s": plan_s,
            "overlapped": overlapped,
            "arrivals": self._arrivals,
            "ended": self._ended,
            "scheduled": [
                [row.request_id, row.num_computed_tokens, row.num_scheduled_tokens]
                for row in output.scheduled
            ],
            "preempted": self._preempted,
        }
        self._records.append(record)
        self._arrivals, self._ended, self._preempted = [], [], []

    def end_step(self, stats: SchedulerStats) -> None:
        """Completes and keeps the record of the oldest step, which is done or has failed; no effect if no
        step is under way."""
        if not self._records:
            return
        record = self._records.popleft()
        record["finished"], self._finished = self._finished, []
        record["end"] = self.clock()
        record["num_free_blocks"] = stats.num_free_blocks
        record["num_running"] = stats.num_running
        record["num_waiting"] = stats.num_waiting
        self._write(record)

    def event(self, kind: str, **values: Any) -> None:
        """Writes an event as a record of its own: {"event": kind, "time": ...} and `values`."""
        self._write({"event": kind, "time": self.clock(), **values})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _carry_over(self, record: dict[str, Any]) -> None:
        """Moves arrivals, ends and preemptions of a plan that was never executed to the next record. Arrivals
        and ends that came after it are no longer marked as in flight: without async_scheduling, nothing
        was."""
        for arrival in self._arrivals:
            arrival.pop("in_flight", None)
        for entry in self._ended:
            entry[2] = False
            entry[3] += len(record["arrivals"])
        self._arrivals[:0] = record["arrivals"]
        self._ended[:0] = record["ended"]
        self._preempted[:0] = record["preempted"]

    def _content(self, request: Request, begin: int, end: int) -> list[int]:
        """Returns a 52-bit number for each full block whose end lies in (begin, end]; it stands for the
        content of the block and of all before it."""
        first, count = begin // self.block_size, end // self.block_size
        hashes = hash_blocks(request, count, self.block_size)[first:count]
        return [int.from_bytes(content_hash[:8], "big") >> 12 for content_hash in hashes]

    def _write(self, record: dict[str, Any]) -> None:
        if not self._is_writing:
            return
        if self._file is None:
            self.records.append(record)
            return
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            self._is_writing = False
            logger.warning("trace: %s ends here, as it cannot be written: %s", self._file.name, error)
