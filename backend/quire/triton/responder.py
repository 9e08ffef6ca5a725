"""Responder: the thread between the engine and Triton's response senders.

It alone sends a frontend's responses and polls for cancellation. This module has the thread's loop. Its parts
are in `triton/sending/`, among them the table of open requests, the queue of choices with something to send,
the sender, the ends of requests, the polls, the replays of known results, and the continuation of requests
whose engine died.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.core.request import FinishReason
from quire.engine.client import EngineClient
from quire.engine.link import Answer, EngineGone, EngineLost, EngineReplaced
from quire.engine.messages import CancelByExternalId, CommandResult, Control, Outputs
from quire.errors import QuireError, UnavailableError
from quire.frontend.output_processor import OutputProcessor
from quire.outputs import EngineCoreOutput, RequestOutput
from quire.triton.drain import Drain
from quire.triton.observers import RequestObserver, StreamMeter
from quire.triton.parsed_request import ParsedRequest
from quire.triton.request_handle import RequestHandle
from quire.triton.result_cache import ResultCache
from quire.triton.sending.cancellation import CancellationPolls
from quire.triton.sending.continuation import Continuation
from quire.triton.sending.ends import Ends
from quire.triton.sending.generation import Generation
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.pacing import Pace
from quire.triton.sending.replays import Replays
from quire.triton.sending.send_queue import SendQueue
from quire.triton.sending.sender import Sender

logger = logging.getLogger("quire")

UNLOADING = "the model is being unloaded"


class Responder(threading.Thread):
    """Thread that hands requests to the engine and sends responses. The frontend starts it, `stop` ends it.

    Args:
        tokenizer: transformers tokenizer for detokenization, or None.
        engine: the engine client; the responder owns it and closes it.
        num_frontends: number of frontends of the model, which share the engine's cores.
        model: name of the Triton model, for observers.
        observers: get a RequestEnded for each request.
        max_pause_s: longest time that requests wait for another engine when theirs has died, in seconds; 0:
            they end at once.
        drain: notices that the model is being unloaded.
        results: the result cache; None: results are not cached.
        meter: measures the responses of streams; None: nothing is measured.
        on_output: called when a choice has processed an output of an engine or a replay; not for errors and
            for outputs after the choice's end.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        engine: EngineClient,
        num_frontends: int = 1,
        *,
        model: str = "",
        observers: Sequence[RequestObserver] = (),
        max_pause_s: float = math.inf,
        drain: Drain | None = None,
        results: ResultCache | None = None,
        meter: StreamMeter | None = None,
        on_output: Callable[[RequestHandle, OutputProcessor, EngineCoreOutput], None] | None = None,
    ) -> None:
        super().__init__(name="quire-responder", daemon=True)
        self.engine = engine
        self.drain = Drain() if drain is None else drain
        self._on_output = on_output
        self._inbox: deque[tuple[Callable[[], None], RequestHandle | None]] = deque()
        self._stopped = threading.Event()
        self._requests = OpenRequests(tokenizer)
        self._queue = SendQueue(Pace(engine.info.num_threads, engine.info.num_cpus, num_frontends))
        self._ends = Ends(self._requests, self._queue, engine, model, observers)
        self._sender = Sender(self._queue, self._ends, engine, meter, results)
        self._polls = CancellationPolls(self._requests, self._ends, engine)
        self._continuation = Continuation(self._requests, self._queue, self._ends, engine, max_pause_s)
        self._replays = Replays(self._requests)

    # Called from other threads: they only enqueue.

    def submit(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        """Takes over a parsed request. From then on only the responder uses the handle."""
        self._post(lambda: self._submit(handle, parsed), handle)

    def refuse(self, handle: RequestHandle, error: QuireError) -> None:
        """Ends a request that is not accepted with the error that says why."""
        self._post(lambda: self._ends.fail(handle, str(error), error.code), handle)

    def stop(self) -> None:
        """Tells the thread to end once the inbox is empty. Open requests and commands then end with
        UNAVAILABLE."""
        self._stopped.set()
        self.engine.wake()

    def _post(self, action: Callable[[], None], handle: RequestHandle | None = None) -> None:
        self._inbox.append((action, handle))
        self.engine.wake()

    # The thread.

    def run(self) -> None:
        while True:
            self.engine.wait(self._timeout_ms())
            while self._inbox:
                self._guard(*self._inbox.popleft())
            self._guard(self._receive)
            self._guard(self._replay)
            self._guard(self._sender.send_due)
            self._guard(self._poll)
            self._guard(self.engine.check)
            self._guard(self._ends.retry)
            if self._requests.handles or self.drain.is_on:
                self._guard(self._look_at_drain)
            if self._stopped.is_set() and not self._inbox:
                break
        self._end_open()
        self._ends.retry(final=True)
        self.engine.close()

    def _guard(self, action: Callable[[], None], handle: RequestHandle | None = None) -> None:
        """Runs an action and logs its exceptions: one request's failure must not end the thread."""
        try:
            action()
        except Exception:
            logger.exception(
                "frontend: a request could not be handled",
                extra=None if handle is None else handle.log_fields,
            )

    def _timeout_ms(self) -> int:
        if self._inbox or self._replays or self._stopped.is_set():
            return 0
        next_event = min(
            self._queue.next_event, self._polls.next_event, self._ends.next_event, self.engine.next_check
        )
        if self._requests.handles or self.drain.is_on:
            next_event = min(next_event, self.drain.next_look)
        if next_event == math.inf:
            return -1
        return math.ceil(max(0.0, next_event - time.monotonic()) * 1000)

    def _poll(self) -> None:
        for handle in self._polls.run():
            self._continuation.expire(handle)

    def _look_at_drain(self) -> None:
        if self.drain.is_over(time.monotonic()):
            self.engine.abort([*self._requests.generations], FinishReason.SHUTDOWN)
            self._end_open()

    def _end_open(self) -> None:
        for handle in list(self._requests.handles.values()):
            self._ends.flush(handle, FinishReason.SHUTDOWN)
            self._ends.fail(handle, UNLOADING, "UNAVAILABLE", reason=FinishReason.SHUTDOWN)

    # What comes in.

    def _submit(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        handle.parsed = parsed
        self._requests.add(handle)
        try:
            self._begin(handle, parsed)
        except QuireError as error:
            self._ends.abort_others(handle)
            self._ends.fail(handle, str(error), error.code)
        except Exception as error:
            logger.exception("frontend: a request cannot be handed to the engine", extra=handle.log_fields)
            self._ends.abort_others(handle)
            self._ends.fail(handle, f"the request cannot be handed to the engine: {error}", "INTERNAL")

    def _begin(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        """Hands a request or command to the engine client, or has it answered without an engine, and begins
        to poll its client.

        Raises:
            UnavailableError: an engine that it needs is not running, or the model is being unloaded.
        """
        now = time.monotonic()
        self._polls.add(handle, now)
        if parsed.cancel:
            tenant, is_found = parsed.scheduling.tenant, self._cancel_paused(handle)
            if self.engine.is_up or not is_found:
                self.engine.command(CancelByExternalId(parsed.external_id, handle.request_id, now, tenant))
        elif parsed.cache_control is not None:
            self.engine.command(Control(parsed.cache_control, handle.request_id))
        elif self.drain.is_on:
            raise UnavailableError(UNLOADING)
        else:
            messages = self._requests.add_prompts(handle, now)
            if parsed.results is not None:
                self._replays.add(handle, parsed.results)
                return
            for message in messages:
                self.engine.send(message)

    def _cancel_paused(self, command: RequestHandle) -> bool:
        """Ends the paused requests that a cancellation names, and answers the cancellation.

        Returns False, without an answer, if it names no paused request.
        """
        is_found = self._continuation.cancel(command.parsed)
        if is_found:
            self._answer(CommandResult(command.request_id, {}))
        return is_found

    # What comes out.

    def _receive(self) -> None:
        for answer in self.engine.receive():
            # Each by itself: the death of an engine must be learned of, whatever its last words do.
            self._guard(partial(self._handle_answer, answer))

    def _handle_answer(self, answer: Answer) -> None:
        match answer:
            case Outputs():
                self._take_outputs(answer.outputs)
            case CommandResult():
                self._answer(answer)
            case EngineLost():
                # It may not have read these cancellations, which are for what pauses now.
                for command in [handle for handle in self._requests.handles.values() if handle.parsed.cancel]:
                    self._cancel_paused(command)
                self._continuation.pause(answer)
            case EngineReplaced():
                self._continuation.resume(answer.link)
            case EngineGone():
                self._continuation.end(answer.link, answer.reason)

    def _take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._queue.pace.step(time.monotonic())
        stopped: list[str] = []
        generations, marked = self._requests.generations, self._queue.marked
        for output in outputs:
            generation = generations.get(output.request_id)
            if generation is None:
                continue
            choice = generation.processor.choices[output.index]
            if generation.recording is not None and output.error is None:
                generation.recording.add_output(choice, output)
            if choice not in marked or not choice.append(output):
                stopped += self._process(generation, output)
            elif self._on_output is not None:
                self._on_output(generation.handle, choice, output)
        self.engine.abort(stopped, FinishReason.STOP)

    def _replay(self) -> None:
        for generation, output in self._replays.outputs():
            self._process(generation, output)

    def _process(self, generation: Generation, output: EngineCoreOutput) -> list[str]:
        """Processes an engine output or ends the request if it is an error.

        Returns:
            Ids of a request or choice that a stop string ended here, for the engine to abort; empty: none.
        """
        handle, choice = generation.handle, generation.processor.choices[output.index]
        try:
            if output.error is not None:
                self._ends.flush(handle, FinishReason.ERROR)
                self._ends.abort_others(handle)
                self._ends.fail(handle, output.error, output.error_code)
                return []
            if choice.finished:
                return []  # what was on its way when a stop string ended the choice here
            stopped = generation.processor.process(output)
        except Exception as error:
            self._ends.fail_output(handle, error)
            return []
        self._queue.mark(handle, choice)
        if self._on_output is not None:
            self._on_output(handle, choice, output)
        return [] if stopped is None else [stopped]

    def _answer(self, result: CommandResult) -> None:
        """Ends a command that is still open. If it failed, it ends with an error. Else a cancellation ends
        with finish reason "cancelled", and any other command with its result as JSON text."""
        handle = self._requests.handles.get(result.token)
        if handle is None:
            return
        if result.error:
            self._ends.fail(handle, result.error, result.error_code)
            return
        is_cancel = handle.parsed.cancel
        try:
            text = "" if is_cancel else msgspec.json.encode(result.result).decode()
        except (TypeError, ValueError) as error:
            self._ends.fail(handle, f"the answer cannot be written as JSON: {error}", "INTERNAL")
            return
        reason = FinishReason.CANCELLED if is_cancel else FinishReason.STOP
        output = RequestOutput(handle.request_id, text, [], reason.value, None, 0, 0, 0)
        self._sender.send(handle, output)
