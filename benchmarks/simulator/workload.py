"""Workloads: arrivals made from a seed, or read from a trace of ours or of Mooncake.

A later turn of a conversation is the same stream of content, cut further back: its prompt holds the outputs
of the turns before it, as in a chat.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.errors import InvalidArgumentError
from quire.plan.arrival import Arrival
from quire.request.scheduling_params import SchedulingParams

MOONCAKE_BLOCK_SIZE = 512
_MOONCAKE_PARTS = 32
"""Blocks of 16 tokens that one of its blocks becomes, or engines with smaller blocks would share too much."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths in tokens, cut to [low, high]."""

    median: float
    sigma: float
    low: int = 1
    high: int = 4096

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        lengths: list[int] = np.clip(np.rint(drawn), self.low, self.high).astype(int).tolist()
        return lengths


SHAREGPT_PROMPT = Lengths(100, 1.18, 4, 2048)
"""Mean near 200 tokens in, as in the ShareGPT runs of vLLM's posts (202 in, 179 out)."""
SHAREGPT_OUTPUT = Lengths(130, 0.8, 4, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A seeded mix of requests; the same values give the same arrivals.

    Each of `tenants` and `priorities` maps a value to its share of the requests.
    """

    num_requests: int = 1000
    rate: float | None = None
    """Requests per second; None: all arrive at the beginning."""
    variation: float = 1.0
    """Coefficient of variation of the gaps: 1 is a Poisson process, more comes in bursts (Gamma gaps)."""
    prompt: Lengths = SHAREGPT_PROMPT
    output: Lengths = SHAREGPT_OUTPUT
    num_prefixes: int = 0
    """System prompts; each request begins with one of them, the first the most often (Zipf)."""
    prefix_tokens: int = 512
    turns: int = 1
    """Requests of one conversation, each with the turns before it in its prompt."""
    think_s: float = 5.0
    """Mean pause (exponential) between a turn's arrival and the next one's; outputs are taken as read."""
    tenants: dict[str, float] = field(default_factory=dict)
    priorities: dict[int, float] = field(default_factory=dict)
    ttft_deadline_s: float | None = None
    deadline_s: float | None = None
    """Deadline of the last token, in seconds after arrival."""
    block_size: int = 16
    """Granularity of shared prefixes."""
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        """Requests in the order of their arrival."""
        rng = np.random.default_rng(self.seed)
        count = self.num_requests
        prompts, outputs = self.prompt.draw(rng, count), self.output.draw(rng, count)
        tenants, priorities = _mix(rng, self.tenants, count), _mix(rng, self.priorities, count)
        num_conversations = -(-count // self.turns)
        times = np.zeros(num_conversations)
        if self.rate is not None:
            shape = 1 / self.variation**2
            mean_gap = self.turns / self.rate
            times = np.cumsum(rng.gamma(shape, mean_gap / shape, num_conversations))
        pauses = rng.exponential(self.think_s, count)
        prefixes: list[tuple[int, ...]] = [()]
        chosen = [0] * num_conversations
        if self.num_prefixes:
            blocks = self.prefix_tokens // self.block_size
            prefixes = [
                tuple((prefix + 1) << 24 | block for block in range(blocks))
                for prefix in range(self.num_prefixes)
            ]
            weights = 1 / np.arange(1, self.num_prefixes + 1)
            chosen = rng.choice(self.num_prefixes, num_conversations, p=weights / weights.sum()).tolist()
        made = []
        for conversation in range(num_conversations):
            hash_ids = prefixes[chosen[conversation]]
            length, at = len(hash_ids) * self.block_size, float(times[conversation])
            for index in range(conversation * self.turns, min(count, (conversation + 1) * self.turns)):
                length += prompts[index]
                scheduling = SchedulingParams(
                    tenant=tenants[index] or "",
                    priority=priorities[index] or 0,
                    ttft_deadline=None if self.ttft_deadline_s is None else at + self.ttft_deadline_s,
                    deadline=None if self.deadline_s is None else at + self.deadline_s,
                )
                made.append(
                    Arrival(
                        f"r{index}",
                        at,
                        length,
                        outputs[index],
                        stream=conversation,
                        hash_ids=hash_ids,
                        block_size=self.block_size,
                        scheduling=scheduling,
                        max_tokens=outputs[index],
                    )
                )
                length += outputs[index]
                at += float(pauses[index])
        return sorted(made, key=lambda arrival: arrival.at)


def _mix(rng: np.random.Generator, shares: dict[Any, float], count: int) -> list[Any]:
    if not shares:
        return [None] * count
    bounds = list(itertools.accumulate(shares.values()))
    values = list(shares)
    return [values[bisect.bisect(bounds, draw)] for draw in rng.random(count) * bounds[-1]]


def read_mooncake(path: Path) -> list[Arrival]:
    """Arrivals of a Mooncake trace: lines {"timestamp": ms, "input_length", "output_length", "hash_ids"}.

    Raises:
        InvalidArgumentError: names the line that is wrong.
    """
    arrivals: list[Arrival] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            num_output = max(1, int(entry["output_length"]))
            arrivals.append(
                Arrival(
                    f"r{number}",
                    float(entry["timestamp"]) / 1000,
                    int(entry["input_length"]),
                    num_output,
                    stream=number,
                    hash_ids=[
                        int(number) * _MOONCAKE_PARTS + part
                        for number in entry["hash_ids"]
                        for part in range(_MOONCAKE_PARTS)
                    ],
                    block_size=MOONCAKE_BLOCK_SIZE // _MOONCAKE_PARTS,
                    max_tokens=num_output,
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(str(path), f"line {number}: {type(error).__name__} {error}") from None
    return sorted(arrivals, key=lambda arrival: arrival.at)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a trace file, the header included.

    Raises:
        InvalidArgumentError: a line is not a JSON object; a last line cut short by a crash is left out.
    """
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            if number == len(lines):  # no line feed behind it
                break
            raise InvalidArgumentError(str(path), f"line {number}: {error}") from None
    return records


def arrivals_of_trace(
    records: Iterable[dict[str, Any]], *, block_size: int, begin: float | None = None
) -> tuple[list[Arrival], list[Arrival]]:
    """The arrivals of a recorded trace, in their order, with what they generated until they ended.

    A request that had not ended generates up to its limit.

    Args:
        block_size: the recorded engine's.
        begin: what times are relative to; None: the first arrival.

    Returns:
        The requests, and what is known of their choices ("ID#1") beside the first.
    """
    records = [record for record in records if "scheduled" in record]
    ends = {end["id"]: end for record in records for end in record["finished"]}
    entries = [entry for record in records for entry in record["arrivals"]]
    if begin is None:
        begin = min((entry["time"] for entry in entries), default=0.0)
    keys = list(
        zip(SchedulingParams.__struct_fields__, SchedulingParams.__struct_encode_fields__, strict=True)
    )
    made, choices = [], []
    for number, entry in enumerate(entries, 1):
        own = {name: entry[key] for name, key in keys if key in entry}
        for key in ("ttft_deadline", "deadline"):
            if key in own:
                own[key] -= begin
        arrival = Arrival(
            entry["id"],
            entry["time"] - begin,
            entry["prompt"],
            entry["max_tokens"] or 1,
            stream=number,
            hash_ids=entry["hash_ids"],
            block_size=block_size,
            scheduling=SchedulingParams(**own),
            max_tokens=entry["max_tokens"],
            num_sequences=max(entry.get("n", 1), entry.get("best_of") or 1),
        )
        made.append(_with_end(arrival, ends.get(arrival.request_id)))
        for choice in range(1, arrival.num_sequences):
            request_id = f"{arrival.request_id}#{choice}"
            if request_id in ends:
                choices.append(_with_end(arrival, ends[request_id]))
    return made, choices


def _with_end(arrival: Arrival, end: dict[str, Any] | None) -> Arrival:
    if end is None:
        return arrival
    return dataclasses.replace(
        arrival,
        request_id=end["id"],
        num_output_tokens=max(1, end["output"]),
        hash_ids=[*arrival.hash_ids, *end["hash_ids"]],
    )
