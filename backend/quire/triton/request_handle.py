"""RequestHandle: one request of Triton from `execute` to its FINAL."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from quire.output_processor import RequestProcessor
from quire.outputs import RequestOutput, TokenLogprobs
from quire.triton.request_parser import ParsedRequest

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def _takes_parameters() -> bool:
    """Whether this server's responses carry parameters (25.02 and later)."""
    try:
        pb_utils.InferenceResponse([], parameters={})
    except TypeError:
        return False
    return True


_HAS_PARAMETERS = _takes_parameters()


_SMALL_BYTES = 16 * 1024
"""Largest response that carries FINAL itself; see `RequestHandle.send`."""


_MESSAGE_CHARACTERS = 2000
"""Of an error, at most."""


class RequestHandle:
    """Owns a response sender, open until `_sender` is dropped with FINAL. Only the responder uses it.

    Polling a sender after FINAL crashes tritonserver 2.51 (triton.md 2.2), so the sender is gone from here
    the moment FINAL is sent, and every method asserts that it is still there.

    A `send` of Triton raises where its shared memory is full, and then nothing was delivered. One that was
    to carry FINAL cannot be repeated: the stub marks a sender as closed before it asks for memory, and the
    client would wait for ever. So a large response, and any while sends fail (`careful`), goes out first and
    FINAL follows by itself, which takes some hundred bytes. After a failure the caller owes the request an
    end: `send_error`, and then `retry_end` until `is_open` is false.

    Args:
        decoupled: whether the model may send more than one response.
    """

    __slots__ = (
        "_decoupled",
        "_error",
        "_sender",
        "cancel_token",
        "external_id",
        "is_ending",
        "last_sent",
        "num_open_choices",
        "parsed",
        "processor",
        "request_id",
        "step_s",
    )

    def __init__(self, sender: Any, request_id: str, external_id: str, *, decoupled: bool = True) -> None:
        self._sender: Any | None = sender
        self._decoupled = decoupled
        self.request_id = request_id
        self.external_id = external_id
        self.parsed: ParsedRequest | None = None
        self.processor: RequestProcessor | None = None
        self.num_open_choices = 1
        """Choices whose last response is not sent."""
        self.last_sent: dict[int, float] = {}
        """By choice, when it last sent a response, CLOCK_MONOTONIC seconds; none before the first."""
        self.step_s = 0.0
        """Between the last two responses of a choice; 0 before there were two."""
        self.is_ending = False
        """Whether nothing is missing but FINAL and an error before it: `retry_end` is the only call left."""
        self._error: Any | None = None
        """The response that is still to come before FINAL."""

    @property
    def is_open(self) -> bool:
        return self._sender is not None

    def is_cancelled(self) -> bool:
        """Whether Triton knows that the client has gone. One round trip to the server (35-150 us)."""
        assert self._sender is not None, f"{self.request_id}: polled after FINAL"
        return bool(self._sender.is_cancelled())

    def send(self, output: RequestOutput, *, careful: bool = False) -> None:
        """Sends a choice's delta; the last one of the last choice carries FINAL, or FINAL follows it.

        Raises whatever Triton raises: unless `is_ending` then, the delta is lost.
        """
        assert self._sender is not None and not self.is_ending, f"{self.request_id}: sent after FINAL"
        assert self.parsed is not None
        last_sent = self.last_sent.get(output.index)
        arrays = _arrays(output, self.parsed, first=last_sent is None)
        response = pb_utils.InferenceResponse([pb_utils.Tensor(*named) for named in arrays.items()])
        now = self.last_sent[output.index] = time.monotonic()
        if last_sent is not None:
            self.step_s = now - last_sent
        self.num_open_choices -= output.finished
        if self.num_open_choices:
            self._sender.send(response)
        elif careful or sum(map(_num_bytes, arrays.values())) > _SMALL_BYTES:
            self._sender.send(response)
            self.is_ending = True
            self._close()
        else:
            self._sender.send(response, flags=_FINAL)
            self._sender = None

    def send_error(
        self, message: str, code: str, retry_after_s: float | None = None, *, careful: bool = False
    ) -> None:
        """Ends the request with an error; where this raises, `retry_end` goes on.

        Args:
            retry_after_s: also sent as the response parameter `retry_after` (whole seconds), where the
                server has these; the message says it in any case.
        """
        assert self._sender is not None and not self.is_ending, f"{self.request_id}: sent after FINAL"
        # A message may repeat what a client sent; it must have a UTF-8 form, and a length.
        message = message[:_MESSAGE_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        status = getattr(pb_utils.TritonError, code, pb_utils.TritonError.INTERNAL)
        options: dict[str, Any] = {"error": pb_utils.TritonError(message, status)}
        if retry_after_s is not None and _HAS_PARAMETERS:
            options["parameters"] = {"retry_after": math.ceil(retry_after_s)}
        self._error = pb_utils.InferenceResponse(**options)
        self.is_ending = True
        if careful and self._decoupled:
            self.retry_end()
        else:
            self._sender.send(self._error, flags=_FINAL)
            self._sender = None

    def retry_end(self, *, final_only: bool = False) -> None:
        """Sends what an end that failed still lacks: its error, then FINAL. Raises where that fails.

        Args:
            final_only: gives the error up. A model that answers once cannot repeat it: the server then says
                in its own words that there was no response.
        """
        assert self._sender is not None and self.is_ending, f"{self.request_id}: is not ending"
        if self._error is not None and self._decoupled and not final_only:
            self._sender.send(self._error)
        self._error = None
        self._close()

    def abandon(self) -> None:
        """Gives the sender back without FINAL, which it does not take."""
        self._sender = None

    def _close(self) -> None:
        assert self._sender is not None
        self._sender.send(flags=_FINAL)
        self._sender = None


def _arrays(output: RequestOutput, parsed: ParsedRequest, *, first: bool) -> dict[str, Any]:
    """What the tensors of one response hold, by name."""
    wanted = parsed.final_outputs if output.finished else parsed.outputs
    text = parsed.echo + output.text if first and parsed.echo else output.text
    return {name: _bytes(text) if name == "text_output" else _ARRAYS[name](output) for name in wanted}


def _num_bytes(array: Any) -> int:
    return len(array[0]) if array.dtype == np.object_ else array.nbytes


def _bytes(text: str) -> Any:
    return np.array([text.encode("utf-8")], dtype=np.object_)


def _logprobs(entries: list[TokenLogprobs]) -> str:
    """JSON: per token its id, its log-probability and those of the most likely ones."""
    return json.dumps(
        [
            {
                "token_id": entry.token_ids[0],
                "logprob": entry.logprobs[0],
                "top": {str(i): p for i, p in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)},
            }
            for entry in entries
        ]
    )


_ARRAYS: dict[str, Callable[[RequestOutput], Any]] = {
    "output_ids": lambda output: np.array(output.token_ids, dtype=np.int32),
    "finish_reason": lambda output: _bytes(output.finish_reason or ""),
    "index": lambda output: np.array([output.index], dtype=np.int32),
    "num_input_tokens": lambda output: np.array([output.num_prompt_tokens], dtype=np.uint32),
    "num_output_tokens": lambda output: np.array([len(output.token_ids)], dtype=np.uint32),
    "num_cached_tokens": lambda output: np.array([output.num_cached_tokens], dtype=np.uint32),
    "logprobs": lambda output: _bytes(_logprobs(output.logprobs or [])),
    "cumulative_logprob": lambda output: np.array([output.cumulative_logprob or 0.0], dtype=np.float32),
}
"""What an output's tensor holds, but for `text_output`."""
