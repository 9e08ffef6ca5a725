"""Step: a planned step, from its planning until its results are processed or it has failed."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import Request
from quire.outputs import ScheduledRequest, SchedulerOutput


class Step:
    """A planned step: the scheduler output for the runner, and what the scheduler needs until it has
    processed the results.

    `output.scheduled`, `requests` and `newly_cached` are parallel lists: running requests in the order of
    their ranks, then requests that were admitted after these got their rows.
    """

    __slots__ = ("begun", "budget", "newly_cached", "num_prefill_tokens", "output", "requests")

    def __init__(self, number: int, budget: int) -> None:
        self.output = SchedulerOutput(number)
        self.budget = budget
        """Number of tokens that may still be added to the step."""
        self.requests: list[Request] = []
        self.newly_cached: list[Sequence[tuple[bytes, int]]] = []
        """For each row, the (key, block id) of the blocks and snapshots that its planning offered to the
        prefix cache (`KVCacheManager.cache_blocks`)."""
        self.num_prefill_tokens = 0
        self.begun = 0.0
        """When the planning of the step ended, in seconds on the scheduler's clock."""

    def add(self, row: ScheduledRequest, request: Request, newly_cached: Sequence[tuple[bytes, int]]) -> None:
        self.output.scheduled.append(row)
        self.requests.append(request)
        self.newly_cached.append(newly_cached)
        self.budget -= row.num_scheduled_tokens
