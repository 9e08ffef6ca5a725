"""Probation: which request kills engines, found without harm to those that only were beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from quire.core.request import Request

PROVEN_TOKENS = 16
"""Tokens that a request must get further after a death to be no suspect any more: an engine is some tokens
ahead of what has arrived when it dies, and what kills it may be there."""
STEPS_AHEAD = 2
"""Steps in flight, whose drafts come on top."""


class InFlightSuspects(NamedTuple):
    """Suspects with rows under way. The engine writes them down before it launches a step, and the frontend
    reads them if the engine dies."""

    request_ids: tuple[str, ...] = ()
    """Suspects with a row in a step under way."""
    is_alone: bool = False
    """Whether nothing else has one."""


NO_SUSPECTS = InFlightSuspects()


class _Suspect(NamedTuple):
    request: Request
    """The request, or the first of its choices."""
    sequences: Mapping[int, Request]
    """Unfinished choices of the request by index."""
    goal: float
    """Output tokens that prove it. Ranked choices begin anew, and how far they came is not known: only their
    end proves them."""


class Probation:
    """Requests that go on after an engine's death, until they are proven: they got further, or have ended.

    After one death they run as all others do. Those that were in the very steps under way at a second one
    run one by one, with nothing else beside them, until each is proven: if another engine dies, it is known
    with which. With two such deaths in a row the frontend ends it; the others have lost time.

    Args:
        num_draft_tokens: most that a step tries of a request: by so many more an engine may be ahead.
    """

    def __init__(self, num_draft_tokens: int = 0) -> None:
        self._num_proving = PROVEN_TOKENS + STEPS_AHEAD * num_draft_tokens
        self.in_flight_suspects = NO_SUSPECTS
        """Suspects in the steps under way; another object whenever they change."""
        self._suspects: dict[str, _Suspect] = {}
        self._alone: str | None = None

    def __bool__(self) -> bool:
        return bool(self._suspects) or self.in_flight_suspects is not NO_SUSPECTS

    def add(self, request: Request, sequences: Mapping[int, Request]) -> None:
        """A request that an engine had which died; `sequences`: the roster's unfinished ones of it."""
        begins_anew = request.sampling_params.beam_width > 1
        goal = math.inf if begins_anew else _num_tokens(sequences) + self._num_proving
        self._suspects[request.request_id] = _Suspect(request, sequences, goal)

    def review(self) -> str | None:
        """Forgets who is proven; the id of the only request that may have rows, or None: all may."""
        for request_id, (_, sequences, goal) in list(self._suspects.items()):
            if not sequences or _num_tokens(sequences) >= goal:
                del self._suspects[request_id]
        if self._alone not in self._suspects:
            waiting = [one.request for one in self._suspects.values() if one.request.num_deaths > 1]
            first = min(waiting, key=lambda request: request.rank, default=None)
            self._alone = None if first is None else first.request_id
        return self._alone

    def launch(self, requests: Iterable[Request]) -> None:
        """Rows of these requests are under way."""
        group_ids = {request.group_id for request in requests}
        at_risk = tuple(sorted(group_ids & self._suspects.keys()))
        suspects = InFlightSuspects(at_risk, len(group_ids) == 1) if at_risk else NO_SUSPECTS
        if suspects != self.in_flight_suspects:
            self.in_flight_suspects = suspects


def _num_tokens(sequences: Mapping[int, Request]) -> int:
    """Output tokens, of the choice that has most."""
    return max((one.num_output_tokens for one in sequences.values()), default=0)
