"""Ends: how requests end, other than by a last response that Triton takes.

A send may fail. A request that lost a delta ends with an error, and an end that failed is tried again from
the responder's loop, beside everything else that is due, until Triton takes it.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Sequence

from quire.core.request import FinishReason
from quire.engine.client import EngineClient
from quire.outputs import RequestOutput
from quire.triton.observers import RequestEnded, RequestObserver
from quire.triton.parsed_request import UNPARSED
from quire.triton.request_handle import RequestHandle
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.pacing import SENDS_PER_PASS
from quire.triton.sending.send_queue import SendQueue
from quire_ensemble.shared_memory import END_PAUSES_S

logger = logging.getLogger("quire")

CAREFUL_S = 10.0
"""How long after a failed send every FINAL is asked room for (see `RequestHandle`)."""


class Ends:
    """Ends requests by errors, tries again what Triton did not take, and tells observers of each end once.

    Args:
        requests: what is open; a request leaves it here.
        queue: loses the choices of what ends.
        engine: told of requests that end here first.
        model: name of the Triton model, for observers.
        observers: told of the end of each request.
    """

    def __init__(
        self,
        requests: OpenRequests,
        queue: SendQueue,
        engine: EngineClient,
        model: str,
        observers: Sequence[RequestObserver],
    ) -> None:
        self._requests, self._queue, self._engine = requests, queue, engine
        self._model, self._observers = model, observers
        self._careful_until = 0.0
        self._failed: list[tuple[float, str, int, RequestHandle]] = []
        """A heap of the ends that failed: when to try again, the request's id, how often that has failed, and
        its handle."""

    @property
    def is_careful(self) -> bool:
        """Whether a send has failed of late."""
        return time.monotonic() < self._careful_until

    @property
    def next_event(self) -> float:
        """Time at which `retry` is to be called; inf: no end has failed."""
        return self._failed[0][0] if self._failed else math.inf

    def abort(self, handle: RequestHandle, reason: FinishReason) -> None:
        """Ends in its engines what the request has there. To be called before `fail`, which has its ids
        forgotten."""
        self._engine.abort([processor.request_id for processor in handle.processors], reason)

    def abort_others(self, handle: RequestHandle) -> None:
        """Ends the prompts beside one that has failed in the engine: the request fails with it."""
        if len(handle.processors) > 1:
            self.abort(handle, FinishReason.ERROR)

    def fail(
        self,
        handle: RequestHandle,
        message: str,
        code: str,
        *,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        """Ends the request, with all its choices, by an error; observers hear the reason."""
        self._remove(handle)
        try:
            handle.send_error(message, code, careful=self.is_careful)
        except Exception as error:
            self.fail_send(handle, error)
        self._report(handle, reason.value, code)

    def fail_output(self, handle: RequestHandle, error: Exception) -> None:
        """Ends a request of which an output cannot be made into text or a response."""
        logger.error("frontend: an output cannot be processed", exc_info=error, extra=handle.log_fields)
        self.abort(handle, FinishReason.ERROR)
        self.fail(handle, f"the output cannot be processed: {error}", "INTERNAL")

    def fail_send(self, handle: RequestHandle, error: Exception) -> None:
        """Ends a request of which a response was not delivered, here and in the engine; where the response
        was its end, that is tried again."""
        now = time.monotonic()
        self._careful_until = now + CAREFUL_S
        logger.error("frontend: a response could not be sent: %s", error, extra=handle.log_fields)
        if handle.is_ending:
            heapq.heappush(self._failed, (now + END_PAUSES_S[0], handle.request_id, 0, handle))
        elif handle.is_open:
            self.abort(handle, FinishReason.ERROR)
            self.fail(handle, f"output was lost on its way to the server: {error}", "INTERNAL")

    def flush(self, handle: RequestHandle, reason: FinishReason, popped: RequestOutput | None = None) -> None:
        """Ends each choice of a stream that has begun by a data response, as an error is about to end all.

        It has what was generated and the finish reason: an error of Triton has neither, and where data came
        before it, a BLS caller of the 24.10 server never sees it. What has not begun is told by the error.

        Args:
            popped: what `pop_output` gave of one choice.
        """
        if not (handle.parsed.stream and handle.last_sent):
            return
        try:
            outputs = [] if popped is None else [popped]
            for processor in handle.processors:
                for choice in processor.choices:
                    if not choice.finished or choice in self._queue.marked:
                        choice.finish(reason)
                        outputs.append(choice.pop_output())
            for output in outputs:
                handle.send(output, before_error=True)
        except Exception as error:  # a tokenizer's or a send's; the error that follows is the end
            logger.error("frontend: a request could not be told its end: %s", error, extra=handle.log_fields)

    def close(self, handle: RequestHandle) -> None:
        """Takes leave of a request whose last response was sent."""
        self._remove(handle)
        self._report(handle, handle.finish_reason)

    def retry(self, *, final: bool = False) -> None:
        """Tries again what is due, oldest first, and as little at a time as is sent in a pass.

        Args:
            final: the thread ends: all are tried, once and for the last time.
        """
        now = time.monotonic()
        tries = 0
        while self._failed and (final or (tries < SENDS_PER_PASS and self._failed[0][0] <= now)):
            _, request_id, failures, handle = heapq.heappop(self._failed)
            tries += 1
            left = 0 if final else len(END_PAUSES_S) - 1 - failures
            try:
                handle.retry_end()
            except Exception as error:
                self._careful_until = now + CAREFUL_S
                if left:
                    due = now + END_PAUSES_S[failures + 1]
                    heapq.heappush(self._failed, (due, request_id, failures + 1, handle))
                else:
                    logger.error("frontend: a request is given up: %s", error, extra=handle.log_fields)
                    handle.abandon()

    def _remove(self, handle: RequestHandle) -> None:
        """Nothing more is to be sent of the request but, maybe, an end that failed."""
        for processor in handle.processors:
            self._engine.forget(processor.request_id)
        self._requests.remove(handle)
        self._queue.remove(handle)

    def _report(self, handle: RequestHandle, reason: str, error_code: str = "") -> None:
        """Tells the observers of a request's end, once."""
        if handle.is_reported or not self._observers:
            return
        handle.is_reported = True
        record = _record(handle, self._model, reason, error_code)
        for observer in self._observers:
            try:
                observer.ended(record)
            except Exception:
                logger.exception("frontend: an end could not be reported", extra=handle.log_fields)


def _record(handle: RequestHandle, model: str, reason: str, error_code: str) -> RequestEnded:
    """Makes the observers' record of a request that ends now."""
    parsed = handle.parsed
    choices = [choice for processor in handle.processors for choice in processor.choices]
    now = time.monotonic()
    return RequestEnded(
        request_id=handle.request_id,
        external_id=handle.external_id,
        model=model,
        tenant=parsed.scheduling.tenant,
        adapter=parsed.adapter,
        is_command=parsed.cancel or parsed.cache_control is not None,
        is_stream=parsed.stream,
        params=None if parsed is UNPARSED else parsed.params,
        n=len(choices),
        arrived_at=handle.arrived_at,
        admitted_at=min((choice.admitted_at for choice in choices if choice.admitted_at), default=0.0),
        first_token_at=min((c.first_token_at for c in choices if c.first_token_at), default=0.0),
        first_sent_at=handle.first_sent_at,
        ended_at=now,
        num_prompt_tokens=sum(processor.choices[0].num_prompt_tokens for processor in handle.processors),
        num_cached_tokens=sum(max(c.num_cached_tokens for c in p.choices) for p in handle.processors),
        num_output_tokens=sum(choice.num_output_tokens for choice in choices),
        num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
        num_preemptions=sum(choice.num_preemptions for choice in choices),
        num_draft_tokens=sum(choice.num_draft_tokens for choice in choices),
        num_accepted_drafts=sum(choice.num_accepted_drafts for choice in choices),
        num_continuations=max((choice.num_continuations for choice in choices), default=0),
        result_cached=True if handle.is_replay else (False if parsed.recording else None),
        paused_s=max(
            (c.paused_s + (now - c.paused_at if c.paused_at else 0.0) for c in choices), default=0.0
        ),
        finish_reason=reason,
        error_code=error_code,
        is_chat=parsed.is_chat,
        caller_trace=handle.traces[0],
        server_trace=handle.traces[1],
    )
