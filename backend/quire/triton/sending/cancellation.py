"""CancellationPolls: asks Triton whether the clients of open requests have gone; there is no event for it."""

from __future__ import annotations

import heapq
import logging
import math
import time

from quire.core.request import FinishReason
from quire.engine.client import EngineClient
from quire.triton.request_handle import RequestHandle
from quire.triton.sending.ends import Ends
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.pacing import SENDS_PER_PASS

logger = logging.getLogger("quire")

CANCEL_POLL_S = 0.1
"""Shortest time between two polls of a request, in seconds."""
MAX_POLL_S = 0.25
"""Limit in seconds up to which the time between a request's responses extends the time between its polls."""
MAX_POLL_SHARE = 0.02
"""Share of the responder thread's time that cancellation polls should use at most. With many requests each is
polled less often."""


class CancellationPolls:
    """Polls open requests at intervals, and ends those whose clients have gone.

    Args:
        requests: the open requests; where there are many, each is polled less often.
        ends: ends the cancelled requests.
        engine: aborts the cancelled requests.
    """

    def __init__(self, requests: OpenRequests, ends: Ends, engine: EngineClient) -> None:
        self._requests, self._ends, self._engine = requests, ends, engine
        self._queue: list[tuple[float, str, RequestHandle]] = []
        """Heap of requests by the time of the next poll. An ended one stays until that time."""
        self._poll_cost = 1e-4

    @property
    def next_event(self) -> float:
        """Time at which `run` must be called next; infinity if no request is polled."""
        return self._queue[0][0] if self._queue else math.inf

    def add(self, handle: RequestHandle, now: float) -> None:
        """Starts polling a request. Polling stops when the request ends."""
        self._push(handle, now + CANCEL_POLL_S)

    def run(self) -> list[RequestHandle]:
        """Polls up to SENDS_PER_PASS of the requests that are due, the longest due first, and ends those that
        their clients have cancelled.

        Two polls of a request are at least as far apart as the latest two responses of one of its choices,
        up to MAX_POLL_S: blocks are freed only between steps.

        Returns:
            The polled requests that were not ended here.
        """
        if not self._queue:
            return []
        gone: list[RequestHandle] = []
        alive: list[RequestHandle] = []
        period = max(CANCEL_POLL_S, len(self._requests.handles) * self._poll_cost / MAX_POLL_SHARE)
        now = start = time.monotonic()
        while self._queue and len(gone) + len(alive) < SENDS_PER_PASS and self._queue[0][0] <= now:
            _, _, handle = heapq.heappop(self._queue)
            if not handle.is_open or handle.is_ending:
                continue
            try:
                is_cancelled = handle.is_cancelled()
            except Exception as error:
                logger.error("frontend: a request could not be polled: %s", error, extra=handle.log_fields)
                is_cancelled = False
            if is_cancelled:
                gone.append(handle)
            else:
                alive.append(handle)
                self._push(handle, now + max(period, min(handle.step_s, MAX_POLL_S)))
        self._cancel(gone)
        if asked := len(gone) + len(alive):
            self._poll_cost += 0.1 * ((time.monotonic() - start) / asked - self._poll_cost)
        return alive

    def _cancel(self, handles: list[RequestHandle]) -> None:
        """Ends requests whose clients have gone. For those with vllm_backend's form of outputs, logs its
        messages."""
        told = [handle for handle in handles if handle.parsed.form == "vllm"]
        for handle in told:
            logger.info("[vllm] Cancelling the request", extra=handle.log_fields)
        request_ids = [processor.request_id for handle in handles for processor in handle.processors]
        self._engine.abort(request_ids, FinishReason.CANCELLED)
        for handle in handles:
            reason = FinishReason.CANCELLED
            self._ends.fail(handle, "the request was cancelled", "CANCELLED", reason=reason)
        for handle in told:
            logger.info("[vllm] Successfully cancelled the request", extra=handle.log_fields)

    def _push(self, handle: RequestHandle, when: float) -> None:
        heapq.heappush(self._queue, (when, handle.request_id, handle))
