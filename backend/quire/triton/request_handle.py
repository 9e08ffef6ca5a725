"""RequestHandle: one request of Triton from `execute` to its FINAL."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from quire.output_processor import OutputProcessor
from quire.outputs import RequestOutput, TokenLogprobs
from quire.triton.request_parser import ParsedRequest

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class RequestHandle:
    """Owns a response sender, open until `_sender` is dropped with FINAL. Only the responder uses it.

    Polling a sender after FINAL crashes tritonserver 2.51 (triton.md 2.2), so the sender is gone from here
    the moment FINAL is sent, and every method asserts that it is still there.
    """

    __slots__ = (
        "_sender",
        "cancel_token",
        "external_id",
        "first_sent",
        "last_sent",
        "parsed",
        "processor",
        "request_id",
    )

    def __init__(self, sender: Any, request_id: str, external_id: str) -> None:
        self._sender: Any | None = sender
        self.request_id = request_id
        self.external_id = external_id
        self.parsed: ParsedRequest | None = None
        self.processor: OutputProcessor | None = None
        self.first_sent = False
        self.last_sent = 0.0

    @property
    def is_open(self) -> bool:
        return self._sender is not None

    def is_cancelled(self) -> bool:
        """Whether Triton knows that the client has gone. One round trip to the server (35-150 us)."""
        assert self._sender is not None, f"{self.request_id}: polled after FINAL"
        return bool(self._sender.is_cancelled())

    def send(self, output: RequestOutput) -> None:
        """Sends a delta; the one with a finish reason carries FINAL."""
        assert self._sender is not None, f"{self.request_id}: sent after FINAL"
        assert self.parsed is not None
        if output.error is not None:
            self.send_error(output.error, output.error_code)
            return
        response = pb_utils.InferenceResponse(_tensors(output, self.parsed, first=not self.first_sent))
        self.first_sent = True
        self.last_sent = time.monotonic()
        if output.finished:
            sender, self._sender = self._sender, None
            sender.send(response, flags=_FINAL)
        else:
            self._sender.send(response)

    def send_error(self, message: str, code: str) -> None:
        """Ends the request with an error."""
        assert self._sender is not None, f"{self.request_id}: sent after FINAL"
        sender, self._sender = self._sender, None
        status = getattr(pb_utils.TritonError, code, pb_utils.TritonError.INTERNAL)
        error = pb_utils.TritonError(message, status)
        sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)


def _tensors(output: RequestOutput, parsed: ParsedRequest, *, first: bool) -> list[Any]:
    """The tensors of one response."""
    wanted = parsed.final_outputs if output.finished else parsed.outputs
    text = parsed.echo + output.text if first and parsed.echo else output.text
    make: dict[str, Callable[[], Any]] = {
        "text_output": lambda: _bytes(text),
        "output_ids": lambda: np.array(output.token_ids, dtype=np.int32),
        "finish_reason": lambda: _bytes(output.finish_reason or ""),
        "index": lambda: np.zeros(1, dtype=np.int32),
        "num_input_tokens": lambda: np.array([output.num_prompt_tokens], dtype=np.uint32),
        "num_output_tokens": lambda: np.array([len(output.token_ids)], dtype=np.uint32),
        "logprobs": lambda: _bytes(_logprobs(output.logprobs or [])),
    }
    return [pb_utils.Tensor(name, make[name]()) for name in wanted]


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
