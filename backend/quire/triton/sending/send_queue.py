"""SendQueue: the choices with tokens or an end to send, and the time at which each is due.

One `send` is a round trip to the server (about 150 us), so deltas are merged where there are many. A stream's
first token and a choice's end are due at once. (With `best_of`, ends are due when all choices have ended.)
Other tokens of a stream wait until the stream is due, by `Pace` or by the `stream_interval` or
`stream_interval_ms` of the request or the model.
"""

from __future__ import annotations

import math
import operator

from quire.frontend.output_processor import OutputProcessor
from quire.triton.request_handle import RequestHandle
from quire.triton.sending.pacing import Pace

URGENT = 0.0
"""Due time of a stream's first token and of an end: before all others."""


class SendQueue:
    """Choices with tokens or an end to send, with the time at which each is due.

    Args:
        pace: sets the interval between a stream's responses if neither the request nor the model does.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._streams: set[OutputProcessor] = set()
        """Choices that have sent a response and have not sent their last."""
        self._due: dict[OutputProcessor, tuple[float, RequestHandle]] = {}
        self.marked = self._due.keys()
        """Live view of the choices that `mark` has added and that were not removed since."""
        self._next_due = math.inf
        """Time before which no choice is due."""
        self._last_look = 0.0
        """The time `now` of the last call of `is_due`."""

    @property
    def next_event(self) -> float:
        """Time at which `is_due` must be called next; infinity if no choice is due by time."""
        # What is due while no step ends may come with the next one's tokens.
        return self._next_due + (self.pace.period_s if self._next_due > self._last_look else 0.0)

    def is_due(self, now: float) -> bool:
        """Whether a choice may be due at `now`, in CLOCK_MONOTONIC seconds."""
        self._last_look = now
        return now >= self._next_due

    def mark(self, handle: RequestHandle, choice: OutputProcessor) -> None:
        """Adds a choice that got tokens or has ended. With `best_of`, adds the best choices once all have
        ended."""
        parsed = handle.parsed
        processor = handle.processors[choice.item]
        if processor.num_best:
            self._due |= dict.fromkeys(processor.results, (URGENT, handle))
            self._next_due = URGENT
            return
        last_sent = handle.last_sent.get((choice.item, choice.index))
        if choice.finished or (parsed.stream and last_sent is None):
            due = URGENT
        elif last_sent is None:
            due = math.inf
        elif choice.has_wanted:
            due = last_sent
        elif parsed.stream_interval_ms:
            due = last_sent + parsed.stream_interval_ms / 1000
        elif parsed.stream_interval:
            due = math.inf
        else:
            due = last_sent + self.pace.interval_s(len(self._streams))
        self._due[choice] = due, handle
        self._next_due = min(self._next_due, due)

    def ready(self, now: float) -> list[OutputProcessor]:
        """Returns the choices that are due: first tokens and ends come first, then those that have been due
        for longest."""
        found = [(due, choice) for choice, (due, _) in self._due.items() if due <= now]
        return [choice for _, choice in sorted(found, key=operator.itemgetter(0))]

    def handle_of(self, choice: OutputProcessor) -> RequestHandle | None:
        """Returns the request of a choice; None: the choice is not marked."""
        return self._due[choice][1] if choice in self._due else None

    def pop(self, choice: OutputProcessor) -> RequestHandle | None:
        """Removes a choice and returns its request; None if the choice was not marked."""
        return self._due.pop(choice, (0.0, None))[1]

    def on_pass_done(self) -> None:
        """Finds the next time at which a choice is due."""
        self._next_due = min((due for due, _ in self._due.values()), default=math.inf)

    def on_sent(self, choice: OutputProcessor, *, is_last: bool) -> None:
        """Counts a choice as a stream after each response but its last."""
        if is_last:
            self._streams.discard(choice)
        else:
            self._streams.add(choice)

    def remove(self, handle: RequestHandle) -> None:
        """Forgets all choices of a request."""
        for processor in handle.processors:
            for choice in processor.choices:
                self._due.pop(choice, None)
                self._streams.discard(choice)
