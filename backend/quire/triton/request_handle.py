"""RequestHandle: one of Triton's requests from `execute` to its FINAL response."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from quire.core.request import FinishReason
from quire.frontend.detokenizer import REPLACEMENT, TokenDecoder
from quire.frontend.output_processor import RequestProcessor
from quire.outputs import RequestOutput, TokenLogprobs
from quire.triton.parsed_request import CHAT_OUTPUTS, UNPARSED, ParsedRequest
from quire_ensemble.generator_schema import outputs_of
from quire_ensemble.shared_memory import SMALL_BYTES, ask_for_room

_OBJECT = np.dtype(np.object_)
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


_PLACES = {spec.name: place for place, spec in enumerate(outputs_of(batched=True))}
"""Position of each output, by name, in the order of declaration."""
_MESSAGE_CHARACTERS = 2000
"""Number of characters to which an error's message is cut."""


class Response(NamedTuple):
    """A response that is ready to be sent."""

    message: Any
    """A `pb_utils.InferenceResponse`."""
    num_bytes: int
    """Bytes that its tensors hold at least."""
    num_tokens: int
    """Number of tokens of the delta from which it was made."""


@dataclass(slots=True, eq=False)
class RequestHandle:
    """Owns a request's response sender until FINAL is sent. Once the request is submitted or refused, only
    the responder uses the handle.

    Polling a sender after FINAL crashes tritonserver 2.51, so the sender is gone from here the moment FINAL
    is sent, and methods that use it assert that it is still there.

    A `send` of Triton raises where its shared memory is full, and then nothing was delivered. One that was
    to carry FINAL cannot be repeated: the stub marks a sender as closed before it asks for memory, and the
    client would wait for ever. So before a large response with FINAL, and before any FINAL while sends fail
    (`careful`), the shared memory is asked for room, which may be refused without harm. After a failure the
    caller owes the request an end: `send_error`, and then `retry_end` until `is_open` is false.
    """

    _sender: Any | None
    request_id: str
    external_id: str
    arrived_at: float = field(default_factory=time.monotonic)
    finish_reason: str = ""
    """Finish reason of the choice whose last response was sent last; empty: none was."""
    is_reported: bool = False
    """Whether the request's end was reported to the observers."""
    parsed: ParsedRequest = field(default_factory=lambda: UNPARSED)
    processors: list[RequestProcessor] = field(default_factory=list)
    """Output processors, one for each prompt; none for a command, or until the request is submitted."""
    num_open_choices: int = 1
    """Number of choices to answer with whose last response is not sent yet; a command counts as one."""
    last_sent: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time of the latest response of each (item, choice), CLOCK_MONOTONIC seconds; none before the first."""
    so_far: dict[tuple[int, int], RequestOutput] = field(default_factory=dict)
    """Whole output of each (item, choice) so far; kept where every response repeats it (`cumulative`)."""
    _first_sent: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time of the first response of each (item, choice), CLOCK_MONOTONIC seconds."""
    step_s: float = 0.0
    """Seconds between the latest response that was not its choice's first and that choice's response before
    it; 0: there was none."""
    decoder: TokenDecoder | None = None
    """Gives the texts of tokens in log-probabilities; None: there is no tokenizer, or no prompt yet."""
    traces: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))
    """W3C trace contexts: of the caller, and of Triton's own span; each is empty if none is known."""
    _error: Any | None = None
    """The error that ends the request, sent or not; None: `send_error` was not called."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Ids of the request, as extra fields of log records."""
        return {"request_id": self.request_id, "external_id": self.external_id}

    @property
    def is_replay(self) -> bool:
        """Whether the request's results are known without an engine (`ParsedRequest.results`)."""
        return self.parsed.results is not None

    @property
    def is_cached(self) -> bool:
        """Whether the results are from the result cache; false for an answer without tokens."""
        return self.is_replay and not self.parsed.is_prompt_alone

    @property
    def is_open(self) -> bool:
        return self._sender is not None

    @property
    def is_ending(self) -> bool:
        """Whether the error that ends the request is still to be sent: by `retry_end`, until it succeeds or
        `abandon` is called."""
        return self._sender is not None and self._error is not None

    @property
    def first_sent_at(self) -> float:
        """Time of the request's first response that is no error, CLOCK_MONOTONIC seconds; 0: none was sent
        yet."""
        return min(self._first_sent.values(), default=0.0)

    def is_cancelled(self) -> bool:
        """Whether Triton knows that the client has gone. One round trip to the server (35-150 us)."""
        assert self._sender is not None, f"{self.request_id}: polled after FINAL"
        return bool(self._sender.is_cancelled())

    def make(self, output: RequestOutput) -> Response:
        """Makes the response for a choice's delta. The responses of a choice must be sent in the order in
        which they were made."""
        num_tokens = len(output.token_ids)
        if self.parsed.cumulative:
            key = output.item, output.index
            output = self.so_far[key] = output.after(self.so_far.get(key))
        num_bytes, tensors = self._tensors(output)
        return Response(pb_utils.InferenceResponse(tensors), num_bytes, num_tokens)

    def send(
        self,
        output: RequestOutput,
        response: Response | None = None,
        *,
        careful: bool = False,
        before_error: bool = False,
    ) -> float:
        """Sends a choice's delta; the last one of the last choice carries FINAL.

        Args:
            response: what `make` returned for `output`; None: it is made here.
            before_error: whether an error follows, which carries FINAL.

        Returns:
            Seconds since the choice's previous response; 0: this is its first.

        Raises whatever Triton raises: then the delta is lost.
        """
        assert self._sender is not None and not self.is_ending, f"{self.request_id}: sent after FINAL"
        key = output.item, output.index
        last_sent = self.last_sent.get(key)
        message, num_bytes, _ = response or self.make(output)
        now = self.last_sent[key] = time.monotonic()
        pause_s = 0.0
        if last_sent is None:
            self._first_sent[key] = now
        else:
            pause_s = self.step_s = now - last_sent
        if output.finish_reason is not None:
            self.num_open_choices -= 1
            self.finish_reason = output.finish_reason
        if before_error or self.num_open_choices:
            self._sender.send(message)
            return pause_s
        if careful or num_bytes > SMALL_BYTES:
            ask_for_room(pb_utils, num_bytes)
        self._sender.send(message, flags=_FINAL)
        self._sender = None
        return pause_s

    def echo_of(self, output: RequestOutput) -> str:
        """Prompt text with which the response for an output must begin; empty: none.

        It begins the first response of each choice, or every response if they repeat the output so far.
        """
        echo = self.request_of(output).echo
        is_first = not echo or self.parsed.cumulative or (output.item, output.index) not in self.last_sent
        return echo if is_first else ""

    def request_of(self, output: RequestOutput) -> ParsedRequest:
        """Returns the parsed request of the prompt that an output belongs to."""
        return self.parsed.of_item(output.item)

    def _tensors(self, output: RequestOutput) -> tuple[int, list[Any]]:
        """Returns the least number of bytes that a response's tensors hold, and the tensors."""
        num_bytes = 0
        tensors = []
        parsed = self.request_of(output)
        if parsed.is_prompt_alone:
            output = _without_tokens(output)
        arrays = _ARRAYS[parsed.form]
        names = parsed.final_outputs if output.finished else parsed.outputs
        if output.prompt_logprobs is not None:
            names |= {"prompt_logprobs"}
        for name in _in_order(names):
            if name == "finish_reason":
                none = "None" if parsed.form == "vllm" else ""
                tensors.append(finish_reason_tensor(output.finish_reason or none))
                continue
            array = arrays[name](output, self)
            if parsed.skips_empty and name in CHAT_OUTPUTS and array[0] in (b"", b"[]"):
                continue
            num_bytes += len(array[0]) if array.dtype == _OBJECT else array.nbytes
            tensors.append(pb_utils.Tensor(name, array))
        return num_bytes, tensors

    def timing(self, output: RequestOutput) -> bytes:
        """JSON object that says where a choice's time went, in milliseconds, with some counts and whether the
        result was cached; `{}` for a command.

        queue, prefill (to the engine's first token) and decode add up to total, the time from the request's
        arrival to this response. paused is the part of it that was lost to deaths of engines. first_token is
        the time from arrival to the choice's first response.
        """
        if not self.processors:
            return b"{}"
        choice = self.processors[output.item].results[output.index]
        arrived, now = self.request_of(output).arrived_at, time.monotonic()
        admitted = choice.admitted_at or now
        first_token = choice.first_token_at or now
        seconds = {
            "queue": admitted - arrived,
            "prefill": first_token - admitted,
            "decode": now - first_token,
            "total": now - arrived,
            "paused": choice.paused_s,
            "first_token": self._first_sent.get((output.item, output.index), now) - arrived,
        }
        return json.dumps(
            {name: round(value * 1000, 3) for name, value in seconds.items()}
            | {
                "num_continuations": choice.num_continuations,
                "num_cached_tokens": output.num_cached_tokens,
                "num_preemptions": choice.num_preemptions,
                "num_draft_tokens": choice.num_draft_tokens,
                "num_accepted_drafts": choice.num_accepted_drafts,
                "result_cached": self.is_cached,
            }
        ).encode()

    def send_error(self, message: str, code: str, *, careful: bool = False) -> None:
        """Ends the request with an error. If this raises, call `retry_end` later.

        The message holds everything for the client: Triton drops parameters and tensors beside an error.
        """
        assert self._sender is not None and not self.is_ending, f"{self.request_id}: sent after FINAL"
        # A message may repeat what a client sent; it must have a UTF-8 form, and a length.
        message = message[:_MESSAGE_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        status = getattr(pb_utils.TritonError, code, pb_utils.TritonError.INTERNAL)
        self._error = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, status))
        if careful:
            self.retry_end()
        else:
            self._sender.send(self._error, flags=_FINAL)
            self._sender = None

    def retry_end(self) -> None:
        """Sends the error of `send_error` if the shared memory has room. Raises if it has not, or if the send
        fails."""
        assert self._sender is not None and self._error is not None, f"{self.request_id}: is not ending"
        ask_for_room(pb_utils, _MESSAGE_CHARACTERS)
        self._sender.send(self._error, flags=_FINAL)
        self._sender = None

    def abandon(self) -> None:
        """Drops the sender without sending FINAL, after all retries have failed."""
        self._sender = None


@cache
def finish_reason_tensor(reason: str) -> Any:
    """Tensor `finish_reason` with this text, one object for all responses with it.

    A tensor that was sent once is in shared memory and need not be copied there again.

    Where Triton's utilities end before the interpreter does, the cache must be cleared before them.
    """
    return pb_utils.Tensor("finish_reason", _bytes(reason.encode()))


@lru_cache(maxsize=1024)
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    """Names of outputs in the order of declaration, as some clients expect the text in the first output."""
    return tuple(sorted(names, key=_PLACES.__getitem__))


def _without_tokens(output: RequestOutput) -> RequestOutput:
    """Returns the output without its tokens and text, for a client that asked for max_tokens 0. If it is the
    last one, its finish reason becomes "length"."""
    return replace(
        output,
        text="",
        token_ids=[],
        num_output_tokens=0,
        finish_reason=output.finish_reason and FinishReason.LENGTH.value,
        stop_reason=None,
        logprobs=None if output.logprobs is None else [],
        cumulative_logprob=None,
        reasoning="",
        tool_calls=[],
        num_reasoning_tokens=0,
    )


def _bytes(value: bytes) -> Any:
    array = np.empty(1, dtype=_OBJECT)
    array[0] = value
    return array


def _logprobs(entries: Sequence[TokenLogprobs | None] | None, decoder: TokenDecoder | None) -> bytes:
    """JSON list with an object for each token; null for the first token of a prompt.

    An object has the token's id, log-probability and rank, and log-probabilities of the most likely tokens by
    id. With a tokenizer it has the texts of all these tokens, and the bytes, where known, of those that are
    parts of characters. The list is written fast, as all streams wait meanwhile and there may be millions of
    numbers.
    """
    told: list[dict[str, Any] | None] = []
    for entry in entries or ():
        if entry is None:
            told.append(None)
            continue
        (drawn, *top), (logprob, *logprobs) = entry.token_ids, entry.logprobs
        one: dict[str, Any] = {
            "token_id": drawn,
            "logprob": logprob,
            "rank": entry.rank,
            "top": dict(zip(top, logprobs, strict=True)),
        }
        if decoder is not None:
            text, texts = decoder.text_of(drawn), {token: decoder.text_of(token) for token in top}
            one |= {"token": text, "tokens": texts}
            parts = [token for token, it in {**texts, drawn: text}.items() if REPLACEMENT in it]
            known = {token: list(found) for token in parts if (found := decoder.bytes_of(token)) is not None}
            if known:
                one["bytes"] = known
        told.append(one)
    return msgspec.json.encode(told)


def _vllm_logprobs(output: RequestOutput, text_of: Callable[[int], str] | None) -> bytes:
    """JSON list as vllm_backend writes it: for each token an object whose keys are the ids of this token and
    of the most likely ones.

    The rank of a most likely token is its place among them. If the rank of the generated token is unknown
    (beam search), it is written as the one after them.
    """
    entries = []
    for entry in output.logprobs or ():
        ranks = (entry.rank or len(entry.token_ids), *range(1, len(entry.token_ids)))
        entries.append(
            {
                token: {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": text_of(token) if text_of else "",
                }
                for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True)
            }
        )
    return msgspec.json.encode(entries)


def _label(output: RequestOutput, labels: tuple[str, ...]) -> bytes:
    """Label of the largest score; empty: there is not one label for each score."""
    scores = np.frombuffer(output.embedding, np.float32)
    return labels[int(scores.argmax())].encode() if scores.size == len(labels) > 0 else b""


_Array: TypeAlias = Callable[[RequestOutput, RequestHandle], Any]
"""Function that makes the array of an output tensor from a choice's output and its request."""

_QUIRE_ARRAYS: dict[str, _Array] = {
    "text_output": lambda output, handle: _bytes((handle.echo_of(output) + output.text).encode()),
    "output_ids": lambda output, _: np.array(output.token_ids, dtype=np.int32),
    "embedding": lambda output, _: np.frombuffer(output.embedding, np.float32),
    "scores": lambda output, _: np.frombuffer(output.embedding, np.float32),
    "label": lambda output, handle: _bytes(_label(output, handle.request_of(output).labels)),
    "stop_reason": lambda output, _: _bytes(
        b"" if output.stop_reason is None else str(output.stop_reason).encode()
    ),
    "index": lambda output, _: np.array([output.index], dtype=np.int32),
    "batch_index": lambda output, _: np.array([output.item], dtype=np.int32),
    "num_input_tokens": lambda output, _: np.array([output.num_prompt_tokens], dtype=np.uint32),
    "num_output_tokens": lambda output, _: np.array([len(output.token_ids)], dtype=np.uint32),
    "num_cached_tokens": lambda output, _: np.array([output.num_cached_tokens], dtype=np.uint32),
    "num_reasoning_tokens": lambda output, _: np.array([output.num_reasoning_tokens], dtype=np.uint32),
    "reasoning_output": lambda output, _: _bytes(output.reasoning.encode()),
    "tool_calls": lambda output, _: _bytes(msgspec.json.encode(output.tool_calls)),
    "logprobs": lambda output, handle: _bytes(_logprobs(output.logprobs, handle.decoder)),
    "prompt_logprobs": lambda output, handle: _bytes(_logprobs(output.prompt_logprobs, handle.decoder)),
    "cumulative_logprob": lambda output, _: np.array([output.cumulative_logprob or 0.0], np.float32),
    "timing": lambda output, handle: _bytes(handle.timing(output)),
}

_ARRAYS: dict[str, dict[str, _Array]] = {
    "quire": _QUIRE_ARRAYS,
    "tensorrt_llm": _QUIRE_ARRAYS,
    "vllm": {
        **_QUIRE_ARRAYS,
        "logprobs": lambda output, handle: _bytes(
            b"null"
            if handle.request_of(output).hides_logprobs
            else _vllm_logprobs(output, None if handle.decoder is None else handle.decoder.text_of)
        ),
    },
    "batched": {
        **_QUIRE_ARRAYS,
        "output_ids": lambda output, _: np.array([[output.token_ids]], dtype=np.int32),
        "batch_index": lambda output, _: np.array([[output.item]], dtype=np.int32),
        "sequence_index": lambda output, _: np.array([[output.index]], dtype=np.int32),
        "sequence_length": lambda output, _: np.array([[len(output.token_ids)]], dtype=np.int32),
        "embedding": lambda output, _: np.frombuffer(output.embedding, np.float32)[None],
        "scores": lambda output, _: np.frombuffer(output.embedding, np.float32)[None],
        "cum_log_probs": lambda output, _: np.array([[output.cumulative_logprob or 0.0]], np.float32),
        "output_log_probs": lambda output, _: np.array(
            [[[entry.logprobs[0] for entry in output.logprobs or ()]]], dtype=np.float32
        ),
    },
}
"""Functions that make an output's array, by `ParsedRequest.form` and output name, without `finish_reason`.
The entries that "batched" has of its own have a batch dimension, and a beam dimension where TensorRT-LLM's
outputs of this name have one."""
