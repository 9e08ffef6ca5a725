"""Replay: makes the calls of a recorded trace again, on its clock, and compares the batches.

What is needed of the recorded engine is in the trace: its configuration, every arrival with the content of
its blocks, every end from outside, and the times. Tokens are made up so that equal blocks are equal again.
Refusals left no record and are not repeated, nor are control requests (reset of the cache, unpin). What the
scheduler decides by measured speeds (preemption_mode auto) rests on times that a replay has only to within
microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.simulator.workload import arrivals_of_trace
from quire.config import EngineConfig
from quire.core.request import FinishReason
from quire.core.scheduler import Scheduler
from quire.core.trace import VERSION
from quire.errors import InvalidArgumentError
from quire.models.kv_groups import KVGroup
from quire.outputs import SchedulerOutput
from quire.plan.arrival import Arrival
from quire.plan.simulate import SampledTokens, VirtualClock, make_kv, make_request

UNLIMITED = 2**62


@dataclass(frozen=True)
class Difference:
    """A step that came out otherwise."""

    step: int
    """Number of the step in the recorded engine."""
    recorded: list[list[Any]]
    """Rows: [request_id, num_computed_tokens, num_scheduled_tokens]."""
    replayed: list[list[Any]]

    def __str__(self) -> str:
        return f"step {self.step}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass
class ReplayReport:
    """Result of a replay. It ends with the first step that differs, since that may change all later ones."""

    num_steps: int = 0
    """Compared, the one that differs included."""
    num_requests: int = 0
    num_preemptions: int = 0
    difference: Difference | None = None


def replay(records: Iterable[dict[str, Any]]) -> ReplayReport:
    """Replays a trace from its header on.

    Args:
        records: header first, as `read_records` gives them.

    Raises:
        InvalidArgumentError: there is no header, or what it says cannot be replayed.
    """
    records = list(records)
    header = next((record for record in records if record.get("event") == "engine"), None)
    if header is None:
        raise InvalidArgumentError("trace", "no record of the engine: the trace was not begun by attach()")
    has_adapters = header.get("adapters", False)
    if header["version"] != VERSION or header["tiers"] or has_adapters:
        raise InvalidArgumentError(
            "trace",
            f"version {header['version']}, KV tiers: {header['tiers']}, adapters: {has_adapters}; "
            f"only version {VERSION} without KV tiers and adapters can be replayed",
        )
    for record in records:
        for arrival in record.get("arrivals", ()):
            if arrival.get("beam_width", 1) > 1:
                raise InvalidArgumentError(
                    "trace", f"{arrival['id']} is a beam search, whose log-probabilities are not recorded"
                )
    return _Replay(header, [record for record in records if "scheduled" in record]).run()


class _Replay:
    def __init__(self, header: dict[str, Any], records: list[dict[str, Any]]) -> None:
        self.clock = VirtualClock()
        self.clock.now = header["time"]
        # With states, the block size may be one that a configuration file cannot have.
        stated = {key: value for key, value in header["cache"].items() if key != "block_size"}
        recorded = EngineConfig.from_mapping({**header["scheduler"], **stated})
        config = dataclasses.replace(
            recorded.scheduler,
            max_waiting_requests=UNLIMITED,
            max_waiting_tokens=UNLIMITED,
            max_predicted_ttft_ms=0,
        )
        cache = dataclasses.replace(recorded.cache, block_size=header["cache"]["block_size"])
        kv = make_kv(
            cache,
            max_step_tokens=header["max_step_tokens"],
            groups=[
                KVGroup(window, tuple(layers), state_bytes)
                for window, layers, state_bytes in header["windows"]
            ],
        )
        self.scheduler = Scheduler(
            config, kv, header["max_model_len"], clock=self.clock, session_ttl_s=cache.session_ttl_s
        )
        if config.async_scheduling:
            raise InvalidArgumentError(
                "trace", "made with async_scheduling, where a step begins before the one before is accounted"
            )
        if config.num_draft_tokens:
            raise InvalidArgumentError(
                "trace", "made with num_draft_tokens, where rows depend on tokens, which are not recorded"
            )
        self.records = records
        self.tokens = SampledTokens()
        self.arrivals: dict[str, Arrival] = {}
        finished = [end for record in records for end in record["finished"]]
        from_outside = {entry[0].removesuffix("#0") for record in records for entry in record["ended"]}
        by_themselves = {end["id"] for end in finished if end["reason"] in ("stop", "length")} - from_outside
        arrivals, choices = arrivals_of_trace(records, block_size=cache.tokens_per_block, begin=0.0)
        for arrival in arrivals + choices:
            if arrival.request_id not in by_themselves:
                arrival = dataclasses.replace(arrival, num_output_tokens=UNLIMITED)
            self.arrivals[arrival.request_id] = arrival
            self.tokens.add(arrival)
        self.report = ReplayReport()

    def run(self) -> ReplayReport:
        plan: SchedulerOutput | None = None
        before: dict[str, Any] | None = None
        for record in self.records:
            if plan is not None and before is not None:
                self._calls(record, in_flight=True)
                self._update(plan, before)
            self._calls(record, in_flight=False)
            self.clock.now = record["time"]
            plan, before = self.scheduler.schedule(), record
            self.report.num_steps += 1
            self.report.difference = self._compare(record, plan)
            if self.report.difference is not None:
                break
        self.report.num_preemptions = self.scheduler.roster.num_preemptions
        return self.report

    def _calls(self, record: dict[str, Any], *, in_flight: bool) -> None:
        """Arrivals and ends from outside between planning of the step before and of this one."""
        arrivals, ended = record["arrivals"], record["ended"]
        for index in range(len(arrivals) + 1):
            for request_id, reason, was_in_flight, num_before in ended:
                if num_before == index and was_in_flight == in_flight:
                    self.scheduler.abort([request_id], FinishReason(reason))
            if index < len(arrivals) and arrivals[index].get("in_flight", False) == in_flight:
                self.clock.now = arrivals[index]["taken_at"]
                self.scheduler.add_request(make_request(self.arrivals[arrivals[index]["id"]]))
                self.report.num_requests += 1

    def _update(self, plan: SchedulerOutput, record: dict[str, Any]) -> None:
        self.clock.now = record["end"]
        failed = {end["id"]: end["output"] for end in record["finished"] if end["reason"] == "error"}
        if failed and {row.request_id for row in plan.scheduled} <= failed.keys():
            self.scheduler.fail("as recorded")
            return
        result = self.tokens.execute(plan)
        for row, output in zip(plan.scheduled, result.rows, strict=True):
            if row.request_id in failed:
                num_output = row.num_computed_tokens + row.num_scheduled_tokens
                num_output -= self.arrivals[row.request_id].num_prompt_tokens
                # One that got its token before it ended was ended by the failure of another choice.
                if not row.samples or num_output == failed[row.request_id]:
                    output.error = "as recorded"
        self.scheduler.update(plan, result)

    @staticmethod
    def _compare(record: dict[str, Any], plan: SchedulerOutput) -> Difference | None:
        rows = [[row.request_id, row.num_computed_tokens, row.num_scheduled_tokens] for row in plan.scheduled]
        if rows != record["scheduled"]:
            return Difference(record["step"], record["scheduled"], rows)
        return None
