"""Continuation: keeps requests alive when their engine dies.

When an engine dies, its requests usually pause until its successor resumes them. Requests of other engines
go on. A paused request ends, for example, if its client cancels it, its deadline passes or no successor
starts in time.
"""

from __future__ import annotations

import time

from quire.core.request import FinishReason
from quire.engine.client import DIED, EngineClient
from quire.engine.link import EngineLink, EngineLost
from quire.triton.parsed_request import ParsedRequest
from quire.triton.request_handle import RequestHandle
from quire.triton.sending.ends import Ends
from quire.triton.sending.generation import Generation
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.send_queue import SendQueue


class Continuation:
    """Pauses requests whose engine died, and hands them to the next engine.

    Args:
        requests: the open requests.
        queue: gets the choices of paused requests that are cancelled or pass their deadlines.
        ends: ends requests that cannot be resumed.
        engine: sends resumed requests to the next engine.
        max_pause_s: longest wait for the next engine, in seconds; 0 ends requests at once.
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
        self._paused_until: dict[EngineLink, float] = {}
        """Time until which requests may wait for a successor, by link whose engine died."""

    def pause(self, lost: EngineLost) -> None:
        """Pauses the requests of an engine that died.

        Ends a request instead if `Generation.record_crash` finds that it kills engines. If `max_pause_s` is
        0, ends all of them.
        """
        now = time.monotonic()
        self._paused_until[lost.link] = now + self._max_pause_s
        if not self._max_pause_s:
            return self.end(lost.link, "max_pause_s is 0")
        for generation in self._generations(lost.link):
            if generation.is_over:
                continue
            if generation.record_crash(lost.suspects):
                self._ends.flush(generation.handle, FinishReason.ERROR)
                self._ends.abort_others(generation.handle)
                message = "two engines died while they computed it alone"
                self._ends.fail(generation.handle, message, "INTERNAL")
                continue
            for choice in generation.processor.choices:
                choice.pause(now)

    def resume(self, link: EngineLink) -> None:
        """Sends the unfinished requests of an engine that died to its successor, oldest first."""
        self._paused_until.pop(link, None)
        for generation in self._generations(link):
            if generation.is_over:
                continue
            try:
                self._engine.send(generation.next_message())
            except Exception as error:
                self._ends.fail_output(generation.handle, error)

    def end(self, link: EngineLink, reason: str) -> None:
        """Ends the unfinished requests of a dead engine with UNAVAILABLE: they wait no longer for its
        successor. The error tells the client `reason`."""
        handles = dict.fromkeys(one.handle for one in self._generations(link) if not one.is_over)
        for handle in handles:
            self._ends.flush(handle, FinishReason.ERROR)
            self._ends.abort_others(handle)
            self._ends.fail(handle, f"{DIED}: {reason}", "UNAVAILABLE")

    def cancel(self, command: ParsedRequest) -> bool:
        """Cancels the paused requests that a cancellation names. Returns whether there was one."""
        named = [
            generation
            for link in self._engine.links
            if not link.is_up
            for generation in self._generations(link)
            if generation.message.external_id == command.external_id
            and generation.message.scheduling.tenant == command.scheduling.tenant
        ]
        for generation in named:
            self._finish(generation, FinishReason.CANCELLED)
        return bool(named)

    def expire(self, handle: RequestHandle) -> None:
        """Ends a request's paused prompts whose deadlines passed, and all requests paused for too long."""
        if not self._paused_until:
            return
        now = time.monotonic()
        for processor in handle.processors:
            generation = self._requests.generations.get(processor.request_id)
            if generation is None or self._engine.link_of(processor.request_id) not in self._paused_until:
                continue
            scheduling = generation.message.scheduling
            has_tokens = any(choice.num_output_tokens for choice in processor.choices)
            due = (scheduling.deadline, None if has_tokens else scheduling.ttft_deadline)
            if any(one is not None and one <= now for one in due):
                self._finish(generation, FinishReason.TIMEOUT)
        for link, until in self._paused_until.items():
            if now >= until:
                self.end(link, f"there is no other after {self._max_pause_s:g} s (max_pause_s)")

    def _generations(self, link: EngineLink) -> list[Generation]:
        """Returns a link's prompts of open requests, oldest first."""
        request_ids = self._engine.requests_of(link)
        return [one for request_id, one in self._requests.generations.items() if request_id in request_ids]

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        """Ends a paused prompt. The client still gets an answer, from the tokens so far."""
        for choice in generation.processor.choices:
            if not choice.finished:
                choice.finish(reason)
                self._queue.mark(generation.handle, choice)
