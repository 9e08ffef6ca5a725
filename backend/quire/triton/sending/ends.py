"""Ends: closes requests, sends their errors and retries errors that could not be sent.

A request with a data response that could not be sent ends with an error instead. The responder's loop retries
an error that could not be sent; END_PAUSES_S limits the number of tries.
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
from quire.triton.request_handle import RequestHandle, Response
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.pacing import SENDS_PER_PASS
from quire.triton.sending.send_queue import SendQueue
from quire_ensemble.shared_memory import END_PAUSES_S

logger = logging.getLogger("quire")

CAREFUL_S = 10.0
"""Seconds after a failed send in which Triton's shared memory is asked for room before every FINAL (see
`RequestHandle`)."""


class Ends:
    """Ends requests with errors and retries errors that could not be sent. Reports each request's end once.

    Args:
        requests: the open requests; a request that ends is removed.
        queue: the send queue; the choices of a request that ends are removed.
        engine: the engine client, by which requests that go on in an engine are aborted.
        model: name of the Triton model, for observers.
        observers: get a RequestEnded for each request.
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
        """Heap of errors to send again: time of the next try, request id, failed retries, handle."""

    @property
    def is_careful(self) -> bool:
        """Whether a send has failed in the last CAREFUL_S seconds."""
        return time.monotonic() < self._careful_until

    @property
    def next_event(self) -> float:
        """Time at which `retry` must be called next; infinity if there is nothing to retry."""
        return self._failed[0][0] if self._failed else math.inf

    def abort(self, handle: RequestHandle, reason: FinishReason) -> None:
        """Aborts the request's prompts in its engines. Call it before `fail`, which makes the engine client
        forget their ids."""
        self._engine.abort([processor.request_id for processor in handle.processors], reason)

    def abort_others(self, handle: RequestHandle) -> None:
        """Aborts all prompts of a request that has several, because one of them cannot go on."""
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
        """Ends the request and all its choices with an error. Reports the reason to the observers."""
        self._remove(handle)
        try:
            handle.send_error(message, code, careful=self.is_careful)
        except Exception as error:
            self.fail_send(handle, error)
        self._report(handle, reason.value, code)

    def fail_output(self, handle: RequestHandle, error: Exception) -> None:
        """Aborts a request whose output could not be converted to text or to a response, or which could not
        be resumed, and ends it with INTERNAL."""
        logger.error("frontend: an output cannot be processed", exc_info=error, extra=handle.log_fields)
        self.abort(handle, FinishReason.ERROR)
        self.fail(handle, f"the output cannot be processed: {error}", "INTERNAL")

    def fail_send(self, handle: RequestHandle, error: Exception) -> None:
        """Handles a response that could not be sent. Schedules a retry if it was an error. If it was data,
        aborts the request in its engines and ends it with an error."""
        now = time.monotonic()
        self._careful_until = now + CAREFUL_S
        logger.error("frontend: a response could not be sent: %s", error, extra=handle.log_fields)
        if handle.is_ending:
            heapq.heappush(self._failed, (now + END_PAUSES_S[0], handle.request_id, 0, handle))
        elif handle.is_open:
            self.abort(handle, FinishReason.ERROR)
            self.fail(handle, f"output was lost on its way to the server: {error}", "INTERNAL")

    def flush(
        self,
        handle: RequestHandle,
        reason: FinishReason,
        popped: RequestOutput | None = None,
        response: Response | None = None,
    ) -> None:
        """Sends the last data response of each choice of a stream that still lacks it, before an error ends
        the request.

        The response has the generated tokens and the finish reason, which a Triton error cannot carry. A BLS
        caller of the 24.10 server does not see an error that follows data. Does nothing if the request is no
        stream or has had no response.

        Args:
            popped: an output that was already popped from one choice and not sent; None: there is none.
            response: the response that was made of `popped`; None: it is made here.
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
                handle.send(output, response if output is popped else None, before_error=True)
        except Exception as error:  # a tokenizer's or a send's; the error that follows is the end
            self._careful_until = time.monotonic() + CAREFUL_S
            logger.error("frontend: a request could not be told its end: %s", error, extra=handle.log_fields)

    def close(self, handle: RequestHandle) -> None:
        """Removes a request that has ended, and reports its end."""
        self._remove(handle)
        self._report(handle, handle.finish_reason)

    def retry(self, *, final: bool = False) -> None:
        """Retries up to SENDS_PER_PASS of the errors that could not be sent and are due, the longest due
        first. When the last retry fails, the request is given up, and an error is logged.

        Args:
            final: retries all of them a last time, whether due or not, because the thread ends.
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
        """Removes the request from the engine client, the open requests and the send queue. Only an error may
        still be sent for it."""
        for processor in handle.processors:
            self._engine.forget(processor.request_id)
        self._requests.remove(handle)
        self._queue.remove(handle)

    def _report(self, handle: RequestHandle, reason: str, error_code: str = "") -> None:
        """Reports a request's end to the observers, unless it was reported before."""
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
    """Returns the record of a request that ends now, with its times and token counts, for the observers."""
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
        num_cached_tokens=sum(processor.choices[0].num_cached_tokens for processor in handle.processors),
        num_output_tokens=sum(choice.num_output_tokens for choice in choices),
        num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in choices),
        num_preemptions=sum(choice.num_preemptions for choice in choices),
        num_draft_tokens=sum(choice.num_draft_tokens for choice in choices),
        num_accepted_drafts=sum(choice.num_accepted_drafts for choice in choices),
        num_continuations=max((choice.num_continuations for choice in choices), default=0),
        result_cached=True if handle.is_cached else (False if parsed.recording else None),
        paused_s=max(
            (c.paused_s + (now - c.paused_at if c.paused_at else 0.0) for c in choices), default=0.0
        ),
        finish_reason=reason,
        error_code=error_code,
        is_chat=parsed.is_chat,
        caller_trace=handle.traces[0],
        server_trace=handle.traces[1],
    )
