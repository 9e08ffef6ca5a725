"""Bodies of OpenAI requests, checked for shape and turned into what the client library takes.

Values of sampling parameters are not judged here but by the server. A parameter that is absent (or null) is
not sent: the checkpoint's generation_config then decides, so that the default temperature is the model's and
not OpenAI's 1, and the default of `max_tokens` is what the model length leaves, for completions too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_client.openai.errors import RequestError

OPENAI_SAMPLING = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
)
QUIRE_SAMPLING = (
    "min_tokens",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "priority",
    "ttft_deadline_ms",
    "deadline_ms",
    "cache_salt",
    "cache_retention",
    "cache_ttl_ms",
    "cache_pin",
    "session",
    "session_end",
)
"""Parameters of Quire that OpenAI does not have; they pass through (`priority`, `cache_salt`: as in vLLM).
The tenant is none of them: it comes in a header, which a proxy in front can set."""
_COMMON = frozenset(
    {"model", "stream", "stream_options", "user", "max_tokens", *OPENAI_SAMPLING, *QUIRE_SAMPLING}
)
CHAT_FIELDS = _COMMON | {"messages", "max_completion_tokens"}
COMPLETION_FIELDS = _COMMON | {"prompt", "best_of"}

HEADERS = {
    "x-tenant-id": "tenant",
    "x-quire-tenant": "tenant",
    "x-quire-priority": "priority",
    "x-quire-cache-salt": "cache_salt",
}
"""Headers that state a parameter where the body does not; of two for one parameter the later counts."""

# Fields of OpenAI for which there is one value only: that which changes nothing.
_CHAT_FIXED: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "store": False,
}
# Log-probabilities need each token's text, and the server gives ids. For completions even 0 asks for them.
_COMPLETION_FIXED: dict[str, Any] = {"echo": False, "suffix": "", "logprobs": False}


MAX_CHOICES = 1024
"""More than any server takes."""
MAX_MESSAGES = 4096
"""Messages of one conversation, and parts of all their contents; the server's own limit of messages."""
MAX_IMAGES = 16
"""Images of one conversation; the server's own limit."""
MAX_MODEL_LENGTH = 256
"""Characters of a model's name."""


@dataclass(frozen=True)
class TextRequest:
    """One request for text; exactly one of `messages`, `prompt`, `input_ids` is not None."""

    model: str
    stream: bool
    include_usage: bool
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[Any] | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None

    @property
    def source(self) -> str:
        """The input of the model that takes the prompt."""
        if self.messages is not None:
            return "messages"
        return "text_input" if self.prompt is not None else "input_ids"

    @property
    def num_choices(self) -> int:
        """Choices to expect; what is no number is left to the server to refuse."""
        n = self.sampling.get("n")
        return n if isinstance(n, int) and 0 < n < MAX_CHOICES else 1


def parse_chat(body: Mapping[str, Any]) -> TextRequest:
    """A body of /v1/chat/completions.

    Raises:
        RequestError: an unknown or unsupported field, or a wrong type; names the field.
    """
    _check_fields(body, CHAT_FIELDS, _CHAT_FIXED)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestError("messages: must be a list of messages", param="messages")
    _check_messages(messages)
    sampling = _sampling(body)
    most = body.get("max_completion_tokens")
    if most is not None and sampling.setdefault("max_tokens", most) != most:
        name = "max_completion_tokens"
        raise RequestError(f"{name}: max_tokens is given too, with another value", param=name)
    return TextRequest(*_common(body), sampling=sampling, messages=messages)


def parse_completion(body: Mapping[str, Any]) -> TextRequest:
    """A body of /v1/completions; raises as `parse_chat`. The prompt is one text or one list of token ids,
    possibly in a list."""
    _check_fields(body, COMPLETION_FIELDS, _COMPLETION_FIXED)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not _is_token(prompt[0]):
        if len(prompt) > 1:
            raise RequestError("prompt: one prompt per request is supported", param="prompt")
        prompt = prompt[0]
    common, sampling = _common(body), _sampling(body)
    if body.get("best_of") is not None:
        sampling["best_of"] = body["best_of"]
    if isinstance(prompt, str):
        return TextRequest(*common, sampling=sampling, prompt=prompt)
    if isinstance(prompt, list) and prompt and all(map(_is_token, prompt)):
        return TextRequest(*common, sampling=sampling, input_ids=prompt)
    raise RequestError("prompt: must be a string or a list of token ids", param="prompt")


def _check_messages(messages: list[Any]) -> None:
    """How many of each kind there are; shapes are the server's to judge."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = sum(isinstance(part, dict) and part.get("type") in ("image", "image_url") for part in parts)
    limits = (
        (len(messages), MAX_MESSAGES, "messages"),
        (len(parts), MAX_MESSAGES, "parts of content"),
        (images, MAX_IMAGES, "images"),
    )
    for count, most, noun in limits:
        if count > most:
            raise RequestError(f"messages: at most {most} {noun} are allowed, got {count}", param="messages")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fields(body: Mapping[str, Any], known: frozenset[str], fixed: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in known:
            continue
        if name not in fixed:
            raise RequestError(f"{name[:80]}: unknown field", param=name[:80])
        if value is not None and not _same(value, fixed[name]):
            only = json.dumps(fixed[name])
            raise RequestError(f"{name}: not supported, other than {only} or null", param=name)


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: 0 is not false."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _common(body: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Model, stream, include_usage."""
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_LENGTH or not model.isprintable():
        raise RequestError("model: must be the name of a model, see /v1/models", param="model")
    stream = _boolean("stream", body.get("stream"))
    options = body.get("stream_options")
    if options is None:
        return model, stream, False
    if not isinstance(options, dict):
        raise RequestError("stream_options: must be an object", param="stream_options")
    if not stream:
        raise RequestError("stream_options: only with stream true", param="stream_options")
    for name in options:
        if name != "include_usage":
            path = f"stream_options.{name[:80]}"
            raise RequestError(f"{path}: unknown field", param=path)
    return model, stream, _boolean("stream_options.include_usage", options.get("include_usage"))


def _boolean(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false", param=name)
    return bool(value)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {n: body.get(n) for n in ("max_tokens", *OPENAI_SAMPLING, *QUIRE_SAMPLING)}
    # An empty list states nothing, and has no tensor in Triton.
    return {name: value for name, value in given.items() if value is not None and value != []}
