"""AdmissionControl: decides whether to accept a request, and sets its default deadlines. DeadlineHeap: finds
the requests whose deadlines have passed."""

from __future__ import annotations

import heapq
import itertools
import math

import msgspec

from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.errors import UnavailableError

MEMORY_S = 30.0
"""Busy seconds after which a step's weight in the estimates has faded to 1/e."""
MIN_DEPARTURES = 8.0
"""Fewest remembered departures needed before a request is refused by the predicted wait for a seat."""
MIN_HINT_DEPARTURES = 1.0
"""Fewest remembered departures needed before the refusal of a full queue states when to retry; a rough time
is enough there."""
SIGMAS = 2.33
"""Standard deviations above the mean that the predicted wait for a seat allows for. Requests end at random
times, so the mean alone would be too short for about half of the waits."""


class AdmissionControl:
    """Bounds the queue and predicts a new request's time to first token (TTFT).

    The model of a step's duration is a + b * prefill tokens. a and b are fitted to past steps, whose weights
    fade with MEMORY_S. All methods are O(1). Without history nothing is predicted, and requests are refused
    only because the queue is full.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_departures = 0  # since the last step
        # Sums over steps, faded: of 1, tokens, seconds, tokens^2, tokens * seconds; and departures.
        self._steps = self._tokens = self._seconds = self._tokens2 = self._token_seconds = 0.0
        self._departures = 0.0

    def set_default_deadlines(self, request: Request) -> None:
        """Sets each configured deadline, counted from arrival, that the request does not state. The engine's
        own requests get none."""
        config, given = self._config, request.scheduling
        if given.is_internal:
            return
        ttft_deadline, deadline = given.ttft_deadline, given.deadline
        if ttft_deadline is None and config.default_ttft_deadline_ms:
            ttft_deadline = request.arrival_time + config.default_ttft_deadline_ms / 1000
        if deadline is None and config.default_deadline_ms:
            deadline = request.arrival_time + config.default_deadline_ms / 1000
        if (ttft_deadline, deadline) != (given.ttft_deadline, given.deadline):
            request.scheduling = msgspec.structs.replace(
                given, ttft_deadline=ttft_deadline, deadline=deadline
            )

    def on_departure(self) -> None:
        """Records that a running request has ended and freed its seat."""
        self._num_departures += 1

    def on_step(self, duration_s: float, num_prefill_tokens: int, num_rows: int) -> None:
        """Records a finished step; a step without rows or duration does not count."""
        if not num_rows or duration_s <= 0:
            return
        fade = math.exp(-duration_s / MEMORY_S)
        tokens = num_prefill_tokens
        self._steps = self._steps * fade + 1
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + duration_s
        self._tokens2 = self._tokens2 * fade + tokens * tokens
        self._token_seconds = self._token_seconds * fade + tokens * duration_s
        self._departures = self._departures * fade + self._num_departures
        self._num_departures = 0

    def predicted_ttft_s(self, num_tokens: int, num_waiting: int, num_free_seats: int) -> float | None:
        """Returns the predicted seconds until a new request would have its first token; None: unknown as yet.

        The result is the larger of two times: computing the prompts and, by Little's law, waiting until
        enough running requests have ended at the recent rate. The second has a margin (SIGMAS), and is 0
        while fewer than MIN_DEPARTURES departures are remembered.

        Args:
            num_tokens: prompt tokens to compute before that, including the request's own.
            num_waiting: requests that begin before it.
            num_free_seats: free places in the batch; 0 also if the pool has no room for the request.
        """
        if not self._tokens:
            return None
        base, per_token = self._fit()
        num_steps = math.ceil(num_tokens / self._config.max_num_batched_tokens)
        drain = num_steps * base + num_tokens * per_token
        seats = 0.0
        num_departures = num_waiting + 1 - max(0, num_free_seats)
        if num_departures > 0 and self._departures >= MIN_DEPARTURES:
            late = SIGMAS * math.sqrt(num_departures)
            seats = (num_departures + late) * self._seconds / self._departures
        return max(drain, seats)

    def predicts(self, request: Request) -> bool:
        """Returns whether the request or the configuration limits the predicted time to first token. `check`
        ignores such limits for the engine's own requests."""
        given = request.scheduling
        limits = (given.ttft_deadline, given.deadline, self._config.max_predicted_ttft_ms or None)
        return any(limit is not None for limit in limits)

    def check(
        self,
        request: Request,
        now: float,
        *,
        num_waiting: int,
        num_waiting_tokens: int,
        num_free_seats: int,
        num_running_tokens: int = 0,
        ahead: tuple[int, int] | None = None,
    ) -> None:
        """Raises if a new request must be refused; changes nothing. It refuses none of the engine's own
        requests.

        Args:
            num_running_tokens: tokens that running requests have still to compute
                (`Roster.num_prompt_tokens_left`).
            ahead: (requests, tokens) that begin before it (`QueuePolicy.ahead`); None: all that wait.

        Raises:
            UnavailableError: the queue is full (requests or tokens), or the predicted time to first token
                exceeds `max_predicted_ttft_ms` or what is left until one of the request's deadlines. The
                message names the limit; `retry_after_s` is set if it is known.
        """
        config = self._config
        if request.scheduling.is_internal:
            return
        if num_waiting >= config.max_waiting_requests:
            raise UnavailableError(
                f"queue full: {num_waiting} requests wait (max_waiting_requests "
                f"{config.max_waiting_requests})",
                self._departure_s(),
            )
        if num_waiting_tokens + request.num_tokens > config.max_waiting_tokens:
            raise UnavailableError(
                f"queue full: {num_waiting_tokens} tokens wait, {request.num_tokens} more exceed "
                f"the limit (max_waiting_tokens {config.max_waiting_tokens})",
                self._departure_s(),
            )
        limits = [
            (deadline - now, name)
            for deadline, name in (
                (request.scheduling.ttft_deadline, "ttft_deadline of the request"),
                (request.scheduling.deadline, "deadline of the request"),
            )
            if deadline is not None
        ]
        if config.max_predicted_ttft_ms:
            limits.append((config.max_predicted_ttft_ms / 1000, "max_predicted_ttft_ms"))
        if not limits:
            return
        num_ahead, tokens_ahead = (num_waiting, num_waiting_tokens) if ahead is None else ahead
        num_tokens = tokens_ahead + num_running_tokens + request.num_tokens
        predicted = self.predicted_ttft_s(num_tokens, num_ahead, num_free_seats)
        limit, name = min(limits)
        if predicted is not None and predicted > limit:
            raise UnavailableError(
                f"overloaded: {predicted:.2f} s to the first token predicted, {max(0.0, limit):.2f} s "
                f"allowed ({name})",
                predicted - max(0.0, limit),
            )

    def _departure_s(self) -> float | None:
        """Returns the mean busy seconds per departure, for the retry hint of a refusal; None: too few are
        remembered."""
        return self._seconds / self._departures if self._departures >= MIN_HINT_DEPARTURES else None

    def _fit(self) -> tuple[float, float]:
        """Returns a and b of the class's model of a step's duration, by least squares, both at least 0.
        If the steps cannot separate them, a is 0."""
        mean = self._tokens / self._steps
        variance = self._tokens2 / self._steps - mean * mean
        ratio = self._seconds / self._tokens
        if variance <= (0.05 * mean) ** 2:
            return 0.0, ratio
        mean_s = self._seconds / self._steps
        slope = (self._token_seconds / self._steps - mean * mean_s) / variance
        if slope <= 0:
            return mean_s, 0.0
        return (mean_s - slope * mean, slope) if slope < ratio else (0.0, ratio)


class DeadlineHeap:
    """A heap of deadlines of requests. Deadlines without effect are dropped when they are due, and all at
    once when they may be the majority. push is O(log n) amortised, and so is each request that expires."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Request]] = []
        self._numbers = itertools.count()
        self._sweep_at = 64

    def __len__(self) -> int:
        """Returns the number of deadlines held, including those without effect that were not dropped yet."""
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Adds the deadlines of a request; no effect if it has none."""
        for which in ("ttft_deadline", "deadline"):
            time = getattr(request.scheduling, which)
            if time is not None:
                heapq.heappush(self._heap, (time, next(self._numbers), which, request))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64

    def expired(self, now: float) -> list[tuple[Request, str]]:
        """Returns unfinished requests whose deadline has passed, each once, with "ttft_deadline" or
        "deadline".

        The caller ends them. A deadline for the first token has no effect once there is a token.
        """
        late: dict[str, tuple[Request, str]] = {}
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                late.setdefault(entry[3].request_id, (entry[3], entry[2]))
        return list(late.values())

    @staticmethod
    def _is_live(entry: tuple[float, int, str, Request]) -> bool:
        _, _, which, request = entry
        return not request.is_finished and not (which == "ttft_deadline" and request.num_output_tokens)
