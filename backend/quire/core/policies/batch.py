"""phases: decides which kinds of rows a step may hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.request import Request

PROMPT_INTERVAL = 16
"""With `decode_first`, one in this many steps may compute prompts although requests decode, so that prompts
do not wait for the end of all answers."""


class Phases(NamedTuple):
    """Kinds of rows that a step may hold. They may be ignored if the step would have no rows otherwise."""

    decodes: bool
    """Whether running requests that lack one token may have rows."""
    prefills: bool
    """Whether running requests that lack several tokens may have rows."""
    admits: bool
    """Whether waiting requests may be admitted, apart from urgent ones under a queue policy that preempts."""


def phases(policy: str, running: Sequence[Request], num_waiting: int, number: int) -> Phases:
    """Returns the kinds of rows for step `number` by a `batch_policy` of SchedulerConfig."""
    if policy == "static":
        return Phases(True, True, not running)
    if policy == "prefill_first":
        if num_waiting or any(request.num_missing > 1 for request in running):
            return Phases(False, True, True)
        return Phases(True, True, False)
    is_held = policy == "decode_first" and number % PROMPT_INTERVAL != 0
    if is_held and any(request.decodes for request in running):
        return Phases(True, False, False)
    return Phases(True, True, True)
