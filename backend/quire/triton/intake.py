"""Intake: threads that parse requests between `execute` and the responder."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from quire.errors import QuireError, UnavailableError

if TYPE_CHECKING:
    from quire.triton.parsed_request import ParsedRequest
    from quire.triton.raw_request import RawRequest
    from quire.triton.request_handle import RequestHandle
    from quire.triton.request_parser import RequestParser
    from quire.triton.responder import Responder
    from quire.triton.result_cache import ResultCache

logger = logging.getLogger("quire")

SHORT_THREADS = 2
LONG_BYTES = 32 * 1024
"""Bytes of a request's texts (`RawRequest.num_bytes`) above which the request waits in the lane for long
texts, which has one thread. Cache commands and requests that may have a grammar have lanes of their own.

Tokenizing takes about a second for each MB, so short texts do not wait long for each other. Long texts cost
much memory while they are tokenized, so their lane tokenizes one request at a time."""


_GRAMMAR_NAMES = ("structured_output", "guided_", "response_format", '"tools"')
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|[67][0-9a-fA-F])")
"""Matches the JSON escape of an underscore, a lower-case letter or one of a few other characters. Such an
escape may hide one of `_GRAMMAR_NAMES`, and few clients write any."""
_GRAMMAR_INPUTS = ("sampling_parameters", "messages", "chat_format")


class Intake:
    """Threads that check and tokenize requests, which Triton's thread has copied. Most tokenizers release the
    GIL.

    A parsed cancellation waits until the requests with its id that are still in the intake have left, so that
    the engine gets them first. Requests that came through another instance of the model are not waited for.

    Args:
        parser: the model's request parser.
        responder: gets each request, parsed or refused.
        max_requests: number of waiting requests at which `check_room` refuses further ones. Cancellations
            that are held back count.
        max_bytes: most bytes of the texts of all requests in the intake. A single request may be larger.
        results: result cache in which requests are looked up; None: there is none.
    """

    def __init__(
        self,
        parser: RequestParser,
        responder: Responder,
        *,
        max_requests: int,
        max_bytes: int,
        results: ResultCache | None = None,
    ) -> None:
        self._parser, self._responder, self._results = parser, responder, results
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._unparsed: dict[str, set[int]] = {}
        """Python's `id`s of the RawRequests in the intake, by the id that the client gave. Requests without
        one are left out."""
        self._cancels: dict[str, list[tuple[set[int], RequestHandle, ParsedRequest]]] = {}
        """Cancellations by the id that they name, each with the requests (see `_unparsed`) it waits for."""
        self._short: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Lane for cache commands: a health probe must not wait behind the texts of other requests."""
        self._grammars: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Lane for requests that may have a grammar: compiling one may need seconds, so only they wait."""
        lanes = [*[self._short] * SHORT_THREADS, self._long, self._commands, self._grammars]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"quire-intake-{i}", daemon=True)
            for i, lane in enumerate(lanes)
        ]
        self._lanes = lanes

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def check_room(self) -> None:
        """Raises UnavailableError if the maximum number of requests is waiting already."""
        num_waiting = sum(lane.qsize() for lane in {*self._lanes})
        if num_waiting + sum(map(len, self._cancels.copy().values())) >= self._max_requests:
            raise UnavailableError(f"the queue is full: {self._max_requests} requests wait to be parsed")

    def put(self, handle: RequestHandle, raw: RawRequest) -> None:
        """Enqueues a request. Raises UnavailableError if there are texts in the intake already, and this
        request's would make them exceed `max_bytes`."""
        with self._lock:
            if self._num_bytes and self._num_bytes + raw.num_bytes > self._max_bytes:
                raise UnavailableError(
                    f"the queue is full: texts of {self._num_bytes} bytes wait to be tokenized, "
                    f"{raw.num_bytes} more exceed the limit of {self._max_bytes}"
                )
            self._num_bytes += raw.num_bytes
            if raw.external_id:
                self._unparsed.setdefault(raw.external_id, set()).add(id(raw))
        self._lane(raw).put((handle, raw))

    def _lane(self, raw: RawRequest) -> queue.SimpleQueue[Any]:
        if "cache_control" in raw.tensors:
            return self._commands
        if _may_have_grammar(raw):
            return self._grammars
        return self._long if raw.num_bytes > LONG_BYTES else self._short

    def stop(self, timeout_s: float) -> None:
        """Tells the threads to end after the requests that are already in their lanes. Waits until they have
        ended, up to `timeout_s` seconds for all threads together."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, lane: queue.SimpleQueue[Any]) -> None:
        while (item := lane.get()) is not None:
            handle, raw = item
            try:
                parsed = self._parser.parse(raw)
                if parsed.cancel:
                    self._hold(handle, parsed)
                else:
                    if self._results is not None and parsed.results is None:
                        self._results.look_up(parsed, self._parser.info())
                    self._responder.submit(handle, parsed)
                del parsed
            except QuireError as error:
                self._responder.refuse(handle, error)
            except BaseException as error:  # a panic in Rust is no Exception, and the lane goes on
                logger.exception("frontend: parsing failed", extra=handle.log_fields)
                self._responder.refuse(handle, QuireError(f"the request cannot be parsed: {error}"))
            finally:
                for cancel in self._parsed(raw):
                    self._responder.submit(*cancel)
                del item, handle, raw

    def _hold(self, handle: RequestHandle, parsed: ParsedRequest) -> None:
        """Keeps a cancellation until all requests with its id that are in the intake now have left.

        The cancellation's own request is one of them.
        """
        with self._lock:
            others = set(self._unparsed[parsed.external_id])
            self._cancels.setdefault(parsed.external_id, []).append((others, handle, parsed))

    def _parsed(self, raw: RawRequest) -> list[tuple[RequestHandle, ParsedRequest]]:
        """Removes a request from the intake; returns the cancellations that waited only for it."""
        with self._lock:
            self._num_bytes -= raw.num_bytes
            if not raw.external_id:
                return []
            same = self._unparsed[raw.external_id]
            same.discard(id(raw))
            if not same:
                del self._unparsed[raw.external_id]
            held = self._cancels.pop(raw.external_id, [])
            for others, _, _ in held:
                others.discard(id(raw))
            waiting = [entry for entry in held if entry[0]]
            if waiting:
                self._cancels[raw.external_id] = waiting
            return [(handle, parsed) for others, handle, parsed in held if not others]


def _may_have_grammar(raw: RawRequest) -> bool:
    """Whether a request may have a grammar.

    True if the name of one of its tensors begins with one of `_GRAMMAR_NAMES`. Also true if the text of the
    request's parameters or of a tensor in `_GRAMMAR_INPUTS` has such a name anywhere, or an escape that may
    hide one.
    """
    if any(name.startswith(_GRAMMAR_NAMES) for name in raw.tensors):
        return True
    texts = [value for name in _GRAMMAR_INPUTS for value in raw.tensors.get(name, ())]
    texts.append(raw.parameters.encode(errors="replace"))
    return any(
        _ESCAPED_LETTER.search(text) or any(name.encode() in text for name in _GRAMMAR_NAMES)
        for text in texts
    )
