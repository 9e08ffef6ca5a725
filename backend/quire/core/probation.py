"""Probation: identifies the request that kills engines, without ending the requests that ran beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire.core.request import Request

PROVEN_TOKENS = 16
"""Output tokens after an engine's death with which a request is cleared; more are needed with drafts. A dying
engine may be some tokens ahead of the outputs that arrived, so the fatal token may be among them."""
STEPS_AHEAD = 2
"""Most steps in flight at an engine's death. For each, the configured number of drafts is added to
PROVEN_TOKENS."""


class InFlightSuspects(NamedTuple):
    """Suspect requests with rows in the steps in flight. The engine records them before it launches a step;
    the frontend reads the record if the engine dies."""

    request_ids: tuple[str, ...] = ()
    """Ids of the suspects with a row in a step in flight."""
    is_alone: bool = False
    """Whether all rows in flight belong to one request, a suspect."""


NO_SUSPECTS = InFlightSuspects()


class _Suspect(NamedTuple):
    request: Request
    """The request, or the first of its choices, even after its end."""
    sequences: Mapping[int, Request]
    """Unfinished choices of the request by index."""
    goal: float
    """Number of output tokens of one choice that clears the request; inf for a beam search, which begins anew
    and whose progress is not known: only its end clears it."""


class Probation:
    """Suspects: the requests that survived an engine's death. A suspect is cleared when it has made enough
    progress (PROVEN_TOKENS) or has ended.

    After one death, suspects run like all other requests. Suspects that were in flight at a later death then
    run one at a time, with nothing beside them, until each is cleared. If another engine dies, the one that
    ran alone is known. After two deaths in a row at which a request ran alone, the frontend ends it, and the
    others go on.

    Args:
        num_draft_tokens: most drafts per step and request: with each step in flight, an engine may be ahead
            by that many tokens more.
    """

    def __init__(self, num_draft_tokens: int = 0) -> None:
        self._num_proving = PROVEN_TOKENS + STEPS_AHEAD * num_draft_tokens
        self.in_flight_suspects = NO_SUSPECTS
        """Suspects with rows in the steps in flight, as of the latest `launch`; replaced by another object
        whenever they change."""
        self._suspects: dict[str, _Suspect] = {}
        self._alone: str | None = None

    def __bool__(self) -> bool:
        return bool(self._suspects) or self.in_flight_suspects is not NO_SUSPECTS

    def add(self, request: Request, sequences: Mapping[int, Request]) -> None:
        """Adds a request of an engine that died. `sequences`: the roster's unfinished sequences of the
        request, by index."""
        begins_anew = request.sampling_params.beam_width > 1
        goal = math.inf if begins_anew else _num_tokens(sequences) + self._num_proving
        self._suspects[request.request_id] = _Suspect(request, sequences, goal)

    def review(self) -> str | None:
        """Drops cleared suspects. Returns the id of the only request that may have rows; None: there is no
        such limit."""
        for request_id, (_, sequences, goal) in list(self._suspects.items()):
            if not sequences or _num_tokens(sequences) >= goal:
                del self._suspects[request_id]
        if self._alone not in self._suspects:
            waiting = [one.request for one in self._suspects.values() if one.request.num_deaths > 1]
            first = min(waiting, key=lambda request: request.rank, default=None)
            self._alone = None if first is None else first.request_id
        return self._alone

    def launch(self, requests: Iterable[Request]) -> None:
        """Updates `in_flight_suspects`. `requests`: the requests of all rows in flight."""
        group_ids = {request.group_id for request in requests}
        at_risk = tuple(sorted(group_ids & self._suspects.keys()))
        suspects = InFlightSuspects(at_risk, len(group_ids) == 1) if at_risk else NO_SUSPECTS
        if suspects != self.in_flight_suspects:
            self.in_flight_suspects = suspects


def _num_tokens(sequences: Mapping[int, Request]) -> int:
    """Returns the number of output tokens of the choice that has most; 0: there is none."""
    return max((one.num_output_tokens for one in sequences.values()), default=0)
