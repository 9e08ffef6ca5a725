"""Answers in the shapes of OpenAI: whole ones, and the objects of a stream."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from quire_client.types import Choice, Result


def finish_reason(reason: str | None) -> str:
    """OpenAI's word for a reason of the server.

    There is none for an answer that was cancelled or broken off; `length` says that it is not complete,
    which `stop` would deny. A model that gives no reason has stopped.
    """
    return "stop" if reason in (None, "", "stop") else "length"


def usage(
    prompt_tokens: int | None, completion_tokens: int, cached_tokens: int | None = None
) -> dict[str, Any] | None:
    """Token counts, those of all choices together; None where the server does not count the prompt."""
    if prompt_tokens is None:
        return None
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return counts


@dataclass(frozen=True)
class ReplyFormat:
    """Shapes of one request's answer: those of chat completions, or of completions."""

    request_id: str
    model: str
    is_chat: bool
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time, seconds."""

    def _head(self, *, streams: bool) -> dict[str, Any]:
        if self.is_chat:
            kind = "chat.completion.chunk" if streams else "chat.completion"
        else:
            kind = "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def whole(self, result: Result) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        counts = usage(result.num_input_tokens, result.num_output_tokens, result.num_cached_tokens)
        choices = [self._choice(choice) for choice in result.choices]
        return {**self._head(streams=False), "choices": choices, "usage": counts}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole: dict[str, Any] = {"index": choice.index, "logprobs": None}
        if self.is_chat:
            whole["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            whole["text"] = choice.text
        whole["finish_reason"] = finish_reason(choice.finish_reason)
        return whole

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first object of a choice in a stream: the role of a chat answer."""
        return self._part(index, {"role": "assistant", "content": ""}, None) if self.is_chat else None

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return self._part(index, {"content": text} if self.is_chat else text, None)

    def closing(self, index: int, reason: str | None) -> dict[str, Any]:
        """The object with the choice's finish reason; no text."""
        return self._part(index, {} if self.is_chat else "", finish_reason(reason))

    def counts(
        self, prompt_tokens: int | None, completion_tokens: int, cached_tokens: int | None
    ) -> dict[str, Any]:
        """The object after the last choice, for `stream_options.include_usage`."""
        counts = usage(prompt_tokens, completion_tokens, cached_tokens)
        return {**self._head(streams=True), "choices": [], "usage": counts}

    def _part(self, index: int, content: Any, reason: str | None) -> dict[str, Any]:
        key = "delta" if self.is_chat else "text"
        choice = {"index": index, key: content, "logprobs": None, "finish_reason": reason}
        part: dict[str, Any] = {**self._head(streams=True), "choices": [choice]}
        if self.include_usage:
            part["usage"] = None
        return part
