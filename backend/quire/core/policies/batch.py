"""phases: decides which kinds of rows a step may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.request import Request


class Phases(NamedTuple):
    """Kinds of rows that a step may hold."""

    decodes: bool
    """Whether running requests that lack one token may have rows."""
    prefills: bool
    """Whether running requests that lack several tokens may have rows."""
    admits: bool
    """Whether waiting requests may be admitted."""


def phases(policy: str, running: Sequence[Request], num_waiting: int) -> Phases:
    """Returns the kinds of rows for the next step by a `batch_policy` of SchedulerConfig."""
    if policy == "static":
        return Phases(True, True, not running)
    if policy == "prefill_first":
        if num_waiting or any(request.num_missing > 1 for request in running):
            return Phases(False, True, True)
        return Phases(True, True, False)
    if policy == "decode_first" and any(request.num_missing == 1 for request in running):
        return Phases(True, False, False)
    return Phases(True, True, True)
