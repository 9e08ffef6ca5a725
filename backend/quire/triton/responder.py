"""Responder: the thread between the engine and Triton's response senders.

It alone sends responses, polls for cancellation and sends FINAL. One `send` is a round trip to the server
(about 150 us), so deltas are merged where there are many: the first token and the end go out at once,
anything else when its stream is due (`Pace`, or what the request or the model states as `stream_interval`).

A send may fail. A request that lost a delta ends with an error, and an end that failed is tried again from
the thread's loop, beside everything else that is due, until Triton takes it.

An engine may die: its requests pause, and go on in the next one. Meanwhile they can end here alone: by their
clients, by their deadlines, or as no engine comes.
"""

from __future__ import annotations

import heapq
import logging
import math
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from quire.core.probation import InFlightSuspects
from quire.core.request import FinishReason
from quire.engine.client import Answer, EngineClient, EngineGone, EngineLost, EngineReplaced
from quire.engine.messages import (
    CancelByExternalId,
    CommandResult,
    Control,
    FrontendMessage,
    Outputs,
)
from quire.errors import QuireError, UnavailableError
from quire.frontend.detokenizer import TokenDecoder
from quire.frontend.output_processor import OutputProcessor, RequestProcessor
from quire.outputs import EngineCoreOutput, RequestOutput
from quire.triton.drain import Drain
from quire.triton.generation import Generation
from quire.triton.observers import RequestEnded, RequestObserver, StreamMeter
from quire.triton.pacing import Pace
from quire.triton.parsed_request import UNPARSED, ParsedRequest
from quire.triton.request_handle import RequestHandle, Response
from quire.triton.result_cache import ResultCache, add_request, replayed
from quire_ensemble.shared_memory import END_PAUSES_S

logger = logging.getLogger("quire")

SENDS_PER_PASS = 16
"""Responses sent before the engine's socket is looked at again: about 2.5 ms."""
CANCEL_POLL_S = 0.1
"""Shortest time between two questions whether the client of a request has gone."""
MAX_POLL_S = 0.25
"""Longest time between two polls of a request whose steps are long."""
MAX_POLL_SHARE = 0.02
"""Share of the thread's time that cancellation polls may take; beyond it the period stretches."""
CAREFUL_S = 10.0
"""How long after a failed send every FINAL is asked room for (see `RequestHandle`)."""
UNLOADING = "the model is being unloaded"
URGENT = 0.0
"""When a first token or an end is due: before all else."""


class Responder(threading.Thread):
    """Started by the frontend; ends with `stop`.

    Args:
        tokenizer: transformers tokenizer for detokenization, or None.
        engine: the responder's own from here on; closed with it.
        num_frontends: how many share the engine's cores.
        model: name of the Triton model, for observers.
        observers: told of the end of each request.
        max_pause_s: see `FrontendConfig`.
        drain: of the model.
        results: keeps what the engine answers; None: nothing does.
        meter: told of the responses of streams.
        on_output: told of each output of the engine that is no error, when its choice has taken it.
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
        self.tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TokenDecoder.for_tokenizer(tokenizer)
        self.engine = engine
        self.drain = Drain() if drain is None else drain
        self._model, self._observers, self._meter, self._on_output = model, observers, meter, on_output
        self._results = results
        self._replays: deque[tuple[RequestHandle, Iterator[EngineCoreOutput]]] = deque()
        """Requests that are answered from the result cache, and what is still to be said of them."""
        self._inbox: deque[tuple[Callable[[], None], RequestHandle | None]] = deque()
        self._stopped = threading.Event()
        self._open: dict[str, RequestHandle] = {}
        """Requests and commands whose end is not sent, by id."""
        self._generating: dict[str, Generation] = {}
        """Prompts of the requests among them, by the id that the engine knows, oldest first."""
        self._is_paused = False
        """Whether there is no engine for them."""
        self._max_pause_s = max_pause_s
        self._paused_until = math.inf
        self._pace = Pace(engine.info.num_threads, engine.info.num_cpus, num_frontends)
        self._streams: set[OutputProcessor] = set()
        """Choices that have been sent something and go on."""
        self._due: dict[OutputProcessor, tuple[float, RequestHandle]] = {}
        """Choices that may have something to send, and when that is to be."""
        self._next_due = math.inf
        """No choice is due before it."""
        self._last_look = 0.0
        """When it was last looked what is due."""
        self._poll_queue: list[tuple[float, str, RequestHandle]] = []
        """A heap by the time of the next poll."""
        self._poll_cost = 1e-4
        self._careful_until = 0.0
        self._ending: list[tuple[float, str, int, RequestHandle]] = []
        """A heap: when to try again to end a request, its id, how often that has failed, and its handle."""

    # Called from other threads: they only enqueue.

    def submit(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        """A parsed request; the handle belongs to the responder from here on."""
        self._post(lambda: self._submit(handle, parsed), handle)

    def refuse(self, handle: RequestHandle, error: QuireError) -> None:
        """A request that is wrong; ends it."""
        self._post(lambda: self._fail(handle, str(error), error.code), handle)

    def stop(self) -> None:
        """Ends the thread after what is in the inbox; open requests and commands end with UNAVAILABLE."""
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
            if self._replays:
                self._guard(self._replay)
            self._guard(self._send_due)
            self._guard(self._poll_cancellations)
            self._guard(self.engine.check)
            if self._ending:
                self._guard(self._retry_ends)
            if self._open or self.drain.is_on:
                self._guard(self._look_at_drain)
            if self._stopped.is_set() and not self._inbox:
                break
        self._end_open()
        self._retry_ends(final=True)
        self.engine.close()

    def _look_at_drain(self) -> None:
        if self.drain.is_over(time.monotonic()):
            self.engine.abort([*self._generating], FinishReason.SHUTDOWN)
            self._end_open()

    def _end_open(self) -> None:
        for handle in list(self._open.values()):
            self._tell_end(handle, FinishReason.SHUTDOWN)
            self._fail(handle, UNLOADING, "UNAVAILABLE", reason=FinishReason.SHUTDOWN)

    def _guard(self, action: Callable[[], None], handle: RequestHandle | None = None) -> None:
        """One request's failure must not end the thread that serves all of them."""
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
        next_event = self._next_due
        if next_event > self._last_look:  # what is due while no step ends may come with the next one's tokens
            next_event += self._pace.period_s
        if self._poll_queue:
            next_event = min(next_event, self._poll_queue[0][0])
        if self._ending:
            next_event = min(next_event, self._ending[0][0])
        if self._open or self.drain.is_on:
            next_event = min(next_event, self.drain.next_look)
        next_event = min(next_event, self.engine.next_check)
        if next_event == math.inf:
            return -1
        return math.ceil(max(0.0, next_event - time.monotonic()) * 1000)

    def _submit(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        handle.parsed = parsed
        self._open[handle.request_id] = handle
        try:
            for message in self._messages(handle, parsed):
                self.engine.send(message)
        except QuireError as error:
            self._fail(handle, str(error), error.code)
            self._abort_others(handle)
        except Exception as error:
            logger.exception("frontend: a request cannot be handed to the engine", extra=handle.log_fields)
            self._fail(handle, f"the request cannot be handed to the engine: {error}", "INTERNAL")
            self._abort_others(handle)

    def _messages(self, handle: RequestHandle, parsed: ParsedRequest) -> list[FrontendMessage]:
        """Returns the messages to the engine for a request or command, and schedules its first poll.

        A request that generates gets its processors. There is no message where no engine is needed: for a
        request with results to replay, and for the cancellation of paused requests.

        Raises:
            UnavailableError: the model is being unloaded.
        """
        now = time.monotonic()
        self._poll_later(handle, now + CANCEL_POLL_S)
        if parsed.cancel:
            tenant = parsed.scheduling.tenant
            if self._is_paused and self._cancel_here(handle, parsed):
                return []
            return [CancelByExternalId(parsed.external_id, handle.request_id, learned_at=now, tenant=tenant)]
        if parsed.cache_control is not None:
            return [Control(parsed.cache_control, handle.request_id)]
        if self.drain.is_on:
            raise UnavailableError(UNLOADING)
        handle.decoder = self._decoder
        messages: list[FrontendMessage] = []
        for item, prompt in enumerate([parsed, *parsed.others]):
            # The first has the id of the request, so that one prompt is as good as none beside it.
            request_id = f"{handle.request_id}.{item}" if item else handle.request_id
            processor = RequestProcessor(
                request_id,
                len(prompt.prompt_token_ids),
                prompt.params,
                self.tokenizer,
                prompt.stops,
                (parsed.stream and parsed.stream_interval) or sys.maxsize,
                item,
                prompt.new_answer,
                prompt.num_best,
            )
            handle.processors.append(processor)
            message = add_request(request_id, prompt, prompt.arrived_at or now)
            self._generating[request_id] = Generation(handle, processor, message, parsed.recording)
            messages.append(message)
        handle.num_open_choices = sum(processor.num_results for processor in handle.processors)
        if parsed.results is not None:
            request_ids = [processor.request_id for processor in handle.processors]
            self._replays.append((handle, replayed(parsed.results, request_ids, parsed)))
            return []
        return messages

    def _replay(self) -> None:
        """Goes on with each request from the result cache, by what is one response of it or less."""
        for _ in range(min(len(self._replays), SENDS_PER_PASS)):
            handle, outputs = self._replays.popleft()
            output = next(outputs, None)
            found = None if output is None else self._generating.get(output.request_id)
            if output is None or found is None:
                continue  # there is no more, or its client has gone
            output.admitted_at = output.first_token_at = time.monotonic()
            self._replays.append((handle, outputs))
            self._process(handle, found.processor, found.processor.choices[output.index], output)

    def _abort(self, handle: RequestHandle, reason: FinishReason) -> None:
        """Ends in the engine what the request has there; what has ended is not there and is passed over."""
        self.engine.abort([processor.request_id for processor in handle.processors], reason)

    def _abort_others(self, handle: RequestHandle) -> None:
        """One of the prompts has failed, and the request with it: the engine need not go on with the rest."""
        if len(handle.processors) > 1:
            self._abort(handle, FinishReason.ERROR)

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
                self._pause_all(answer.suspects)
            case EngineReplaced():
                self._continue_all()
            case EngineGone():
                self._end_all(answer.reason)

    def _take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._pace.step(time.monotonic())
        stopped: list[str] = []
        for output in outputs:
            found = self._generating.get(output.request_id)
            if found is None:
                continue
            choice = found.processor.choices[output.index]
            if found.recording is not None and output.error is None:
                found.recording.add_output(choice, output)
            if choice not in self._due or not choice.append(output):
                stopped += self._process(found.handle, found.processor, choice, output)
            elif self._on_output is not None:
                self._on_output(found.handle, choice, output)
        self.engine.abort(stopped, FinishReason.STOP)

    def _process(
        self,
        handle: RequestHandle,
        processor: RequestProcessor,
        choice: OutputProcessor,
        output: EngineCoreOutput,
    ) -> list[str]:
        """Takes an output; returns the ids of what has ended here and is still to be ended in the engine."""
        try:
            if output.error is not None:
                self._tell_end(handle, FinishReason.ERROR)
                self._fail(handle, output.error, output.error_code)
                self._abort_others(handle)
                return []
            if choice.finished:
                return []  # what was on its way when a stop string ended the choice here
            stopped = processor.process(output)
        except Exception as error:
            self._cannot_process(handle, error)
            return []
        self._mark(handle, choice)
        if self._on_output is not None:
            self._on_output(handle, choice, output)
        return [] if stopped is None else [stopped]

    def _mark(self, handle: RequestHandle, choice: OutputProcessor) -> None:
        """Says when a choice that has got tokens, or has ended, is to be sent."""
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
            due = last_sent + self._pace.interval_s(len(self._streams))
        self._due[choice] = due, handle
        self._next_due = min(self._next_due, due)

    def _send_due(self) -> None:
        """Sends up to SENDS_PER_PASS responses: first tokens and ends, then what has been due for longest."""
        now = self._last_look = time.monotonic()
        if now < self._next_due:
            return
        cpu_start = time.thread_time()
        num_sent = 0
        made: dict[RequestHandle, tuple[OutputProcessor, RequestOutput, Response]] = {}
        ready = [(due, choice) for choice, (due, _) in self._due.items() if due <= now]
        for _, choice in sorted(ready, key=operator.itemgetter(0)):
            if num_sent + len(made) == SENDS_PER_PASS:
                break
            if choice in self._due and self._due[choice][1] in made:
                num_sent += self._send_made(made)  # an error there may end this choice, too
            _, handle = self._due.pop(choice, (0.0, None))
            if handle is None:
                continue  # an error of another choice has ended the request
            try:
                output = choice.pop_ready()
                if output is not None:
                    made[handle] = choice, output, handle.make(output)
            except Exception as error:  # a tokenizer is the checkpoint's: it may raise anything
                self._cannot_process(handle, error)
                num_sent += 1
        num_sent += self._send_made(made)
        self._next_due = min((due for due, _ in self._due.values()), default=math.inf)
        if num_sent:
            self._pace.charge(num_sent, time.monotonic() - now, time.thread_time() - cpu_start)

    def _send_made(self, made: dict[RequestHandle, tuple[OutputProcessor, RequestOutput, Response]]) -> int:
        """Sends and forgets what was made of one choice of each request; returns how many these are.

        A send waits for the server, and an engine on the same cores takes the caches meanwhile: making all of
        them first runs the same code many times while it is there.
        """
        count = len(made)
        for handle, (choice, output, response) in made.items():
            self._send(handle, output, choice, response)
        made.clear()
        return count

    def _cannot_process(self, handle: RequestHandle, error: Exception) -> None:
        logger.error("frontend: an output cannot be processed", exc_info=error, extra=handle.log_fields)
        self._fail(handle, f"the output cannot be processed: {error}", "INTERNAL")
        self._abort(handle, FinishReason.ERROR)

    def _send(
        self,
        handle: RequestHandle,
        output: RequestOutput,
        choice: OutputProcessor | None = None,
        response: Response | None = None,
    ) -> None:
        """Sends what `pop_output` gave, or the answer to a command.

        A request cancelled by its id ends with a data response (finish_reason "cancelled"): it keeps what
        was generated, and an error after data is not delivered to a BLS caller by the 24.10 server.
        """
        if output.finish_reason == FinishReason.SHUTDOWN:
            self._tell_end(handle, FinishReason.SHUTDOWN, output)
            self._fail(handle, "the engine is shutting down", "UNAVAILABLE", reason=FinishReason.SHUTDOWN)
            return
        num_tokens = len(output.token_ids)
        try:
            pause_s = handle.send(output, response, careful=time.monotonic() < self._careful_until)
        except Exception as error:
            self._send_failed(handle, error)
        else:
            if self._meter is not None and num_tokens and handle.parsed.stream:
                if pause_s:
                    self._meter.interval(pause_s / num_tokens, num_tokens)
                elif len(handle.last_sent) == 1:
                    self._meter.first(handle.first_sent_at - handle.arrived_at)
        if choice is not None:
            if output.finished:
                self._streams.discard(choice)
            elif handle.request_id in self._open:
                self._streams.add(choice)
        if not handle.is_open or handle.is_ending:
            self._keep_results(handle)
            self._forget(handle)
            self._report(handle, handle.finish_reason)

    def _keep_results(self, handle: RequestHandle) -> None:
        recording = handle.parsed.recording
        if self._results is not None and recording is not None and not handle.is_open:
            choices = [choice for processor in handle.processors for choice in processor.choices]
            self._results.keep(recording, choices, self.engine.info)

    def _forget(self, handle: RequestHandle) -> None:
        """Nothing more is to be sent of the request but, maybe, an end that failed."""
        self._open.pop(handle.request_id, None)
        if handle.parsed.buffer is not None:
            handle.parsed.buffer.close()
        for processor in handle.processors:
            self._generating.pop(processor.request_id, None)
            for choice in processor.choices:
                self._due.pop(choice, None)
                self._streams.discard(choice)

    def _tell_end(
        self, handle: RequestHandle, reason: FinishReason, taken: RequestOutput | None = None
    ) -> None:
        """Ends each choice of a stream that has begun by a data response, as an error is about to end all.

        It has what was generated and the finish reason: an error of Triton has neither, and where data came
        before it, a BLS caller of the 24.10 server never sees it. What has not begun is told by the error.

        Args:
            taken: what `pop_output` gave of one choice.
        """
        if not (handle.parsed.stream and handle.last_sent):
            return
        try:
            outputs = [] if taken is None else [taken]
            for processor in handle.processors:
                for choice in processor.choices:
                    if not choice.finished or choice in self._due:
                        choice.finish(reason)
                        outputs.append(choice.pop_output())
            for output in outputs:
                handle.send(output, before_error=True)
        except Exception as error:  # a tokenizer's or a send's; the error that follows is the end
            logger.error("frontend: a request could not be told its end: %s", error, extra=handle.log_fields)

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

    def _fail(
        self,
        handle: RequestHandle,
        message: str,
        code: str,
        *,
        reason: FinishReason = FinishReason.ERROR,
    ) -> None:
        """Ends the request, with all its choices, by an error; observers hear the reason."""
        self._forget(handle)
        careful = time.monotonic() < self._careful_until
        try:
            handle.send_error(message, code, careful=careful)
        except Exception as error:
            self._send_failed(handle, error)
        self._report(handle, reason.value, code)

    def _send_failed(self, handle: RequestHandle, error: Exception) -> None:
        """A response was not delivered: its request ends with an error, here and in the engine."""
        now = time.monotonic()
        self._careful_until = now + CAREFUL_S
        logger.error("frontend: a response could not be sent: %s", error, extra=handle.log_fields)
        if handle.is_ending:
            heapq.heappush(self._ending, (now + END_PAUSES_S[0], handle.request_id, 0, handle))
        elif handle.is_open:
            self._abort(handle, FinishReason.ERROR)
            self._fail(handle, f"output was lost on its way to the server: {error}", "INTERNAL")

    def _retry_ends(self, *, final: bool = False) -> None:
        """Tries again what is due, oldest first, and as little at a time as `_send_due`.

        Args:
            final: the thread ends: all are tried, once and for the last time.
        """
        now = time.monotonic()
        tries = 0
        while self._ending and (final or (tries < SENDS_PER_PASS and self._ending[0][0] <= now)):
            _, request_id, failures, handle = heapq.heappop(self._ending)
            tries += 1
            left = 0 if final else len(END_PAUSES_S) - 1 - failures
            try:
                handle.retry_end()
            except Exception as error:
                self._careful_until = now + CAREFUL_S
                if left:
                    due = now + END_PAUSES_S[failures + 1]
                    heapq.heappush(self._ending, (due, request_id, failures + 1, handle))
                else:
                    logger.error("frontend: a request is given up: %s", error, extra=handle.log_fields)
                    handle.abandon()

    def _answer(self, result: CommandResult) -> None:
        """Ends a command: a cancellation with finish reason "cancelled", others with the answer as text."""
        handle = self._open.get(result.token)
        if handle is None:
            return
        if result.error:
            self._fail(handle, result.error, result.error_code)
            return
        is_cancel = handle.parsed.cancel
        try:
            text = "" if is_cancel else msgspec.json.encode(result.result).decode()
        except (TypeError, ValueError) as error:
            self._fail(handle, f"the answer cannot be written as JSON: {error}", "INTERNAL")
            return
        reason = FinishReason.CANCELLED if is_cancel else FinishReason.STOP
        self._send(handle, RequestOutput(handle.request_id, text, [], reason.value, None, 0, 0, 0))

    def _pause_all(self, suspects: InFlightSuspects) -> None:
        """The engine died: what it generated goes on in the next one; commands are not repeated, but for
        cancellations, which it may not have read: they are for what pauses now.

        A request that it died of, as did one before it, ends.
        """
        now = time.monotonic()
        self._is_paused, self._paused_until = True, now + self._max_pause_s
        for handle in [handle for handle in self._open.values() if not handle.processors]:
            if handle.parsed.cancel and self._cancel_here(handle, handle.parsed):
                continue
            self._fail(handle, "the engine process died while it worked on the request", "UNAVAILABLE")
        if not self._max_pause_s:
            return self._end_all("max_pause_s is 0")
        for generation in list(self._generating.values()):
            if generation.is_over:
                continue
            if generation.record_crash(suspects):
                self._tell_end(generation.handle, FinishReason.ERROR)
                self._fail(generation.handle, "two engines died while they computed it alone", "INTERNAL")
                continue
            for choice in generation.processor.choices:
                choice.pause(now)

    def _continue_all(self) -> None:
        """There is an engine again: it is given what is not finished, oldest first."""
        self._is_paused = False
        for generation in list(self._generating.values()):
            if generation.is_over:
                continue
            try:
                self.engine.send(generation.next_message())
            except Exception as error:
                self._cannot_process(generation.handle, error)

    def _end_all(self, reason: str) -> None:
        """No engine comes: what is not finished ends with UNAVAILABLE."""
        message = f"the engine process died while it worked on the request: {reason}"
        for handle in list(self._open.values()):
            if not handle.is_replay and not all(processor.finished for processor in handle.processors):
                self._tell_end(handle, FinishReason.ERROR)
                self._fail(handle, message, "UNAVAILABLE")

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        """Ends a prompt that no engine has, as the engine would: its choices keep what was generated."""
        for choice in generation.processor.choices:
            if not choice.finished:
                choice.finish(reason)
                self._mark(generation.handle, choice)

    def _cancel_here(self, command: RequestHandle, parsed: ParsedRequest) -> bool:
        """Ends paused requests that a command names; False where it names none."""
        found = [
            generation
            for generation in self._generating.values()
            if generation.message.external_id == parsed.external_id
            and generation.message.scheduling.tenant == parsed.scheduling.tenant
        ]
        for generation in found:
            self._finish(generation, FinishReason.CANCELLED)
        if found:
            self._answer(CommandResult(command.request_id, {}))
        return bool(found)

    def _expire(self, handle: RequestHandle, now: float) -> None:
        """Ends paused prompts of a request whose deadlines are over."""
        for processor in handle.processors:
            generation = self._generating[processor.request_id]
            scheduling = generation.message.scheduling
            has_tokens = any(choice.num_output_tokens for choice in processor.choices)
            due = (scheduling.deadline, None if has_tokens else scheduling.ttft_deadline)
            if any(one is not None and one <= now for one in due):
                self._finish(generation, FinishReason.TIMEOUT)
        if now >= self._paused_until:
            self._end_all(f"there is no other after {self._max_pause_s:g} s (max_pause_s)")

    def _poll_later(self, handle: RequestHandle, when: float) -> None:
        heapq.heappush(self._poll_queue, (when, handle.request_id, handle))

    def _poll_cancellations(self) -> None:
        """Asks Triton about each open request once per period, oldest question first.

        Where steps are longer than the period, once per step is enough: no block is freed within one.
        """
        if not self._poll_queue:
            return
        cancelled: list[str] = []
        told: list[RequestHandle] = []
        period = max(CANCEL_POLL_S, len(self._open) * self._poll_cost / MAX_POLL_SHARE)
        asked = 0
        now = start = time.monotonic()
        while self._poll_queue and asked < SENDS_PER_PASS and self._poll_queue[0][0] <= now:
            _, _, handle = heapq.heappop(self._poll_queue)
            if not handle.is_open or handle.is_ending:
                continue
            asked += 1
            try:
                is_cancelled = handle.is_cancelled()
            except Exception as error:
                logger.error("frontend: a request could not be polled: %s", error, extra=handle.log_fields)
                is_cancelled = False
            if is_cancelled:
                if handle.parsed.form == "vllm":
                    logger.info("[vllm] Cancelling the request", extra=handle.log_fields)
                    told.append(handle)
                cancelled += [processor.request_id for processor in handle.processors]
                self._fail(handle, "the request was cancelled", "CANCELLED", reason=FinishReason.CANCELLED)
            else:
                if self._is_paused:
                    self._expire(handle, now)
                self._poll_later(handle, now + max(period, min(handle.step_s, MAX_POLL_S)))
        if asked:
            self._poll_cost += 0.1 * ((time.monotonic() - start) / asked - self._poll_cost)
        self.engine.abort(cancelled, FinishReason.CANCELLED)
        for handle in told:  # what vllm_backend logs, and its users search for
            logger.info("[vllm] Successfully cancelled the request", extra=handle.log_fields)


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
