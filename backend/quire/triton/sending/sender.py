"""Sender: sends the responses that are due."""

from __future__ import annotations

import time

from quire.core.request import FinishReason
from quire.engine.client import EngineClient
from quire.frontend.output_processor import OutputProcessor
from quire.outputs import RequestOutput
from quire.triton.observers import StreamMeter
from quire.triton.request_handle import RequestHandle, Response
from quire.triton.result_cache import ResultCache
from quire.triton.sending.ends import Ends
from quire.triton.sending.pacing import SENDS_PER_PASS
from quire.triton.sending.send_queue import SendQueue


class Sender:
    """Makes and sends responses for the choices that are due. Closes requests whose last response was sent.

    Args:
        queue: the choices that have something to send.
        ends: ends requests whose response cannot be made or sent.
        engine: the engine client; results are cached only if they fit its present `info`.
        meter: measures the responses of streams; None: nothing is measured.
        results: the result cache; None: results are not cached.
    """

    def __init__(
        self,
        queue: SendQueue,
        ends: Ends,
        engine: EngineClient,
        meter: StreamMeter | None,
        results: ResultCache | None,
    ) -> None:
        self._queue, self._ends, self._engine = queue, ends, engine
        self._meter, self._results = meter, results

    def send_due(self) -> None:
        """Sends up to SENDS_PER_PASS responses: first tokens and ends, then the choices longest due."""
        now = time.monotonic()
        if not self._queue.is_due(now):
            return
        cpu_start = time.thread_time()
        num_sent = 0
        made: dict[RequestHandle, tuple[OutputProcessor, RequestOutput, Response]] = {}
        for choice in self._queue.ready(now):
            if num_sent + len(made) == SENDS_PER_PASS:
                break
            if self._queue.handle_of(choice) in made:
                num_sent += self._send_made(made)  # an error there may end this choice, too
            handle = self._queue.pop(choice)
            if handle is None:
                continue  # an error of another choice has ended the request
            try:
                output = choice.pop_ready()
                if output is not None:
                    made[handle] = choice, output, handle.make(output)
            except Exception as error:  # a tokenizer is the checkpoint's: it may raise anything
                self._ends.fail_output(handle, error)
                num_sent += 1
        num_sent += self._send_made(made)
        self._queue.on_pass_done()
        if num_sent:
            self._queue.pace.charge(num_sent, time.monotonic() - now, time.thread_time() - cpu_start)

    def _send_made(self, made: dict[RequestHandle, tuple[OutputProcessor, RequestOutput, Response]]) -> int:
        """Sends the responses in `made` and empties it. Returns their number.

        All are made before any is sent: a send waits for the server, and meanwhile an engine on the same
        cores evicts this code from the CPU caches.
        """
        count = len(made)
        for handle, (choice, output, response) in made.items():
            self.send(handle, output, choice, response)
        made.clear()
        return count

    def send(
        self,
        handle: RequestHandle,
        output: RequestOutput,
        choice: OutputProcessor | None = None,
        response: Response | None = None,
    ) -> None:
        """Sends an output of a choice (`pop_ready`, `pop_output`), or the answer to a command. A failed
        send ends the request and is not raised. If the output's finish reason is SHUTDOWN, the request ends
        with the error UNAVAILABLE.

        Args:
            choice: the choice; the queue counts it as a stream until its last response. None: nothing is
                counted.
            response: the response, if it is made already; None: it is made here.

        A request cancelled by its id ends with a data response (finish_reason "cancelled"): it keeps what
        was generated, and an error after data is not delivered to a BLS caller by the 24.10 server.
        """
        if output.finish_reason == FinishReason.SHUTDOWN:
            self._ends.flush(handle, FinishReason.SHUTDOWN, output, response)
            message = "the engine is shutting down"
            self._ends.fail(handle, message, "UNAVAILABLE", reason=FinishReason.SHUTDOWN)
            return
        num_tokens = len(output.token_ids) if response is None else response.num_tokens
        try:
            pause_s = handle.send(output, response, careful=self._ends.is_careful)
        except Exception as error:
            self._ends.fail_send(handle, error)
        else:
            if self._meter is not None and num_tokens and handle.parsed.stream:
                if pause_s:
                    self._meter.interval(pause_s / num_tokens, num_tokens)
                elif len(handle.last_sent) == 1:
                    self._meter.first(handle.first_sent_at - handle.arrived_at)
        if not handle.is_open or handle.is_ending:
            self._keep_results(handle)
            self._ends.close(handle)
        elif choice is not None:
            self._queue.on_sent(choice, is_last=output.finished)

    def _keep_results(self, handle: RequestHandle) -> None:
        recording = handle.parsed.recording
        if self._results is not None and recording is not None and not handle.is_open:
            choices = [choice for processor in handle.processors for choice in processor.choices]
            self._results.keep(recording, choices, self._engine.info)
