"""OpenRequests: the requests and commands that one frontend's responder has begun and not ended."""

from __future__ import annotations

import sys
from typing import Any

from quire.engine.messages import AddRequest
from quire.frontend.detokenizer import TokenDecoder
from quire.frontend.output_processor import RequestProcessor
from quire.triton.request_handle import RequestHandle
from quire.triton.result_cache import add_request
from quire.triton.sending.generation import Generation


class OpenRequests:
    """Table of the open requests and commands, by id. Only `Ends` removes entries.

    Args:
        tokenizer: transformers tokenizer for detokenization, or None.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = None if tokenizer is None else TokenDecoder.for_tokenizer(tokenizer)
        self.handles: dict[str, RequestHandle] = {}
        """Requests and commands by id, in the order in which they were added."""
        self.generations: dict[str, Generation] = {}
        """Prompts of the open requests, by their id in messages to engines, in the order in which they were
        added."""

    def add(self, handle: RequestHandle) -> None:
        self.handles[handle.request_id] = handle

    def add_prompts(self, handle: RequestHandle, now: float) -> list[AddRequest]:
        """Creates a processor for each prompt of a request. Returns one message per prompt for the engine."""
        parsed = handle.parsed
        handle.decoder = self._decoder
        messages = []
        for item, prompt in enumerate([parsed, *parsed.others]):
            # The first prompt has the request's id; further prompts have a suffix.
            request_id = f"{handle.request_id}.{item}" if item else handle.request_id
            processor = RequestProcessor(
                request_id,
                len(prompt.prompt_token_ids),
                prompt.params,
                self._tokenizer,
                prompt.stops,
                (parsed.stream and parsed.stream_interval) or sys.maxsize,
                item,
                prompt.new_answer,
                prompt.num_best,
            )
            handle.processors.append(processor)
            message = add_request(request_id, prompt, prompt.arrived_at or now)
            self.generations[request_id] = Generation(handle, processor, message, parsed.recording)
            messages.append(message)
        handle.num_open_choices = sum(processor.num_results for processor in handle.processors)
        return messages

    def remove(self, handle: RequestHandle) -> None:
        self.handles.pop(handle.request_id, None)
        if handle.parsed.buffer is not None:
            handle.parsed.buffer.close()
        for processor in handle.processors:
            self.generations.pop(processor.request_id, None)
