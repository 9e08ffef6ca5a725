"""The `tokenizer` model of an ensemble: text or chat messages in, token ids out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.errors import InputError
from quire_ensemble.shared_memory import ask_for_room, wait_for_room
from quire_ensemble.text_limits import TextLimits, text_limits
from quire_ensemble.triton_model import EnsembleModel, client_id, element, given_inputs

if TYPE_CHECKING:
    from quire_ensemble.tokenizer import Tokenizer

LONG_BYTES = 4096
"""Most bytes of a prompt that Triton's thread tokenizes itself, usually in about a millisecond. A longer one
goes to a thread of ours."""
LONG_THREADS = 4
"""Number of threads for long prompts. They share the cores with each other and with short prompts."""

_log = logging.getLogger(__name__)


class TokenizerModel(EnsembleModel):
    """The tokenizer of an ensemble.

    Inputs, exactly one: `text_input` STRING [1, 1], `messages` STRING [1, 1]. Outputs: `input_ids` INT32
    [1, n], `chat_format` STRING [1, 1] (empty for a text). Parameters named like the fields of `TextLimits`
    set these.

    Short prompts are answered in the list that `execute` returns. A long prompt must not delay others: a
    thread tokenizes it, and answers through the request's response sender.
    """

    tokenizer: Tokenizer
    limits: TextLimits
    _long: ThreadPoolExecutor

    def _load(self, checkpoint: Path, parameters: Mapping[str, str], args: Mapping[str, str]) -> None:
        from quire_ensemble.tokenizer import Tokenizer

        self.limits = text_limits(parameters, checkpoint)
        self.tokenizer = Tokenizer(checkpoint)
        self.tokenizer.warm_up()
        self._long = ThreadPoolExecutor(LONG_THREADS, thread_name_prefix="long prompts")

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._begin(request) for request in requests]

    def finalize(self) -> None:
        """Ends the threads."""
        self._long.shutdown(wait=True)

    def _begin(self, request: Any) -> Any:
        """Returns the response to a request, or None if a thread will send it."""
        given, request_id = given_inputs(request), client_id(request)
        try:
            prompt = element(given, "text_input"), element(given, "messages")
        except InputError as error:
            return self._refusal(error, request_id)
        if max(len(part or b"") for part in prompt) <= LONG_BYTES:
            return self._respond(request_id, *prompt)
        self._long.submit(self._send, request.get_response_sender(), request_id, *prompt)
        return None

    def _respond(
        self, request_id: str, text: bytes | None, messages: bytes | None, *, ask: bool = False
    ) -> Any:
        """Returns the response to a request with this prompt: its token ids, or an error.

        Args:
            request_id: the client's id for the request.
            text: the input `text_input`; None: the request does not have it.
            messages: the input `messages`; None: the request does not have it.
            ask: True: check that there is shared memory for the response, and return an error if there is
                not.
        """
        pb = self.pb_utils
        try:
            encoded, chat = self.limits.encode_chat(self.tokenizer, text, messages)
            token_ids = np.array([encoded], dtype=np.int32)
            chat_format = np.array([[chat.to_json() if chat is not None else b""]], dtype=np.object_)
            if ask:
                ask_for_room(pb, token_ids.nbytes + len(chat_format[0, 0]))
        except Exception as error:  # a tokenizer is the checkpoint's: it may raise anything
            return self._refusal(error, request_id)
        return pb.InferenceResponse(
            [pb.Tensor("input_ids", token_ids), pb.Tensor("chat_format", chat_format)]
        )

    def _send(self, sender: Any, request_id: str, text: bytes | None, messages: bytes | None) -> None:
        try:
            response = self._respond(request_id, text, messages, ask=True)
            wait_for_room(self.pb_utils)  # an error needs some, too
            sender.send(response, flags=self.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception:  # nobody waits for this thread
            _log.exception("a response could not be sent", extra={"external_id": request_id})
