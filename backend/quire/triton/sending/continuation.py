"""Continuation: requests over the deaths of engines.

When an engine dies its requests pause, and go on in the next one. Meanwhile they can end here alone: by their
clients, by their deadlines, or as no engine comes.
"""

from __future__ import annotations

import math
import time

from quire.core.probation import InFlightSuspects
from quire.core.request import FinishReason
from quire.engine.client import EngineClient
from quire.triton.parsed_request import ParsedRequest
from quire.triton.request_handle import RequestHandle
from quire.triton.sending.ends import Ends
from quire.triton.sending.generation import Generation
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.send_queue import SendQueue


class Continuation:
    """Pauses requests whose engine died, and hands them to the next one.

    Args:
        requests: what is open.
        queue: is given what ends while there is no engine.
        ends: ends what does not go on.
        engine: the next one gets what goes on.
        max_pause_s: see `FrontendConfig`.
    """

    def __init__(
        self,
        requests: OpenRequests,
        queue: SendQueue,
        ends: Ends,
        engine: EngineClient,
        max_pause_s: float,
    ) -> None:
        self._requests, self._queue, self._ends, self._engine = requests, queue, ends, engine
        self._max_pause_s = max_pause_s
        self._paused_until = math.inf
        self.is_paused = False
        """Whether there is no engine for what is to be generated."""

    def pause(self, suspects: InFlightSuspects) -> None:
        """Pauses all that is generated, as the engine died. A request that it died of, as did one before it,
        ends."""
        now = time.monotonic()
        self.is_paused, self._paused_until = True, now + self._max_pause_s
        if not self._max_pause_s:
            return self.end_all("max_pause_s is 0")
        for generation in list(self._requests.generations.values()):
            if generation.is_over:
                continue
            if generation.record_crash(suspects):
                self._ends.flush(generation.handle, FinishReason.ERROR)
                message = "two engines died while they computed it alone"
                self._ends.fail(generation.handle, message, "INTERNAL")
                continue
            for choice in generation.processor.choices:
                choice.pause(now)

    def resume(self) -> None:
        """Gives the next engine what is not finished, oldest first."""
        self.is_paused = False
        for generation in list(self._requests.generations.values()):
            if generation.is_over:
                continue
            try:
                self._engine.send(generation.next_message())
            except Exception as error:
                self._ends.fail_output(generation.handle, error)

    def end_all(self, reason: str) -> None:
        """Ends what is not finished with UNAVAILABLE, as no engine comes."""
        message = f"the engine process died while it worked on the request: {reason}"
        for handle in list(self._requests.handles.values()):
            if not handle.is_replay and not all(processor.finished for processor in handle.processors):
                self._ends.flush(handle, FinishReason.ERROR)
                self._ends.fail(handle, message, "UNAVAILABLE")

    def cancel(self, command: ParsedRequest) -> bool:
        """Ends the requests that a cancellation names as the engine would; False where it names none."""
        named = [
            generation
            for generation in self._requests.generations.values()
            if generation.message.external_id == command.external_id
            and generation.message.scheduling.tenant == command.scheduling.tenant
        ]
        for generation in named:
            self._finish(generation, FinishReason.CANCELLED)
        return bool(named)

    def expire(self, handle: RequestHandle) -> None:
        """Ends paused prompts of a request whose deadlines are over."""
        if not self.is_paused or handle.request_id not in self._requests.handles:
            return
        now = time.monotonic()
        for processor in handle.processors:
            generation = self._requests.generations[processor.request_id]
            scheduling = generation.message.scheduling
            has_tokens = any(choice.num_output_tokens for choice in processor.choices)
            due = (scheduling.deadline, None if has_tokens else scheduling.ttft_deadline)
            if any(one is not None and one <= now for one in due):
                self._finish(generation, FinishReason.TIMEOUT)
        if now >= self._paused_until:
            self.end_all(f"there is no other after {self._max_pause_s:g} s (max_pause_s)")

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        """Ends a prompt that no engine has, as the engine would: its choices keep what was generated."""
        for choice in generation.processor.choices:
            if not choice.finished:
                choice.finish(reason)
                self._queue.mark(generation.handle, choice)
