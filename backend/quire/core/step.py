"""Step: a planned step, from its planning until it is accounted or has failed."""

from __future__ import annotations

from collections.abc import Sequence

from quire.outputs import ScheduledRequest
from quire.request import Request


class Step:
    """Rows in the order of their requests' ranks, and all that must be undone if they are not computed.

    `rows`, `requests` and `offers` run in parallel.
    """

    __slots__ = (
        "begun",
        "block_copies",
        "budget",
        "dropped_request_ids",
        "late_offers",
        "num_prefill_tokens",
        "number",
        "offers",
        "plan_s",
        "requests",
        "rows",
    )

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        """Tokens that may still be added."""
        self.rows: list[ScheduledRequest] = []
        self.requests: list[Request] = []
        self.offers: list[Sequence[tuple[bytes, int]]] = []
        """(key, block id) of the blocks that each row fills, which others may find from now on."""
        self.late_offers: list[tuple[bytes, int]] = []
        """Blocks of requests that ended while the step was computed, findable since then."""
        self.num_prefill_tokens = 0
        self.plan_s = 0.0
        """Seconds that planning took."""
        self.begun = 0.0
        """Seconds on the scheduler's clock, when the step was launched."""
        self.dropped_request_ids: list[str] = []
        self.block_copies: list[tuple[int, int]] = []

    def add(self, row: ScheduledRequest, request: Request, offers: Sequence[tuple[bytes, int]]) -> None:
        self.rows.append(row)
        self.requests.append(request)
        self.offers.append(offers)
        self.budget -= row.num_scheduled_tokens
