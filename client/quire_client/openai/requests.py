"""Parses bodies of OpenAI requests: checks their shape and turns them into arguments of the client library.

The server checks most values of sampling parameters. A parameter that is absent (or null) is not sent. Then
the server's default counts, which may come from the checkpoint's generation_config: the default temperature
is not always OpenAI's 1. Without a default there, `max_tokens` is what the prompt leaves of the model's
length, for completions too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
EMBEDDING_SCHEDULING = (
    "priority",
    "ttft_deadline_ms",
    "deadline_ms",
    "cache_salt",
    "cache_retention",
    "cache_ttl_ms",
)
"""Scheduling and cache parameters of Quire that requests for embeddings and scores accept, too."""
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
    *EMBEDDING_SCHEDULING,
    "cache_pin",
    "cache_result",
    "session",
    "session_end",
    "num_draft",
    "thinking_budget",
    "logits_processors",
    "lora_name",
    "structured_output",
    "structured_outputs",
    "guided_decoding",
    "guided_json",
    "guided_json_object",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Parameters of Quire that OpenAI does not have; they are passed on to the server. Many have vLLM's names.
`tenant` is not among the parameters: it comes from the API key or a header."""
SERVICE_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "prediction",
    }
)
"""Fields that are accepted and ignored: they concern OpenAI's own service, or are hints."""
EMBEDDING_FIELDS = SERVICE_FIELDS | {"model", "input", "encoding_format", "dimensions", *EMBEDDING_SCHEDULING}
_COMMON = SERVICE_FIELDS | {
    *("model", "stream", "stream_options", "max_tokens", "logprobs", "response_format", "timing"),
    *("prompt_logprobs", "return_token_ids"),
    *OPENAI_SAMPLING,
    *QUIRE_SAMPLING,
}
MESSAGES_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields that are sent to the server in one object with the messages."""
CHAT_FIELDS = _COMMON | {
    *("messages", "max_completion_tokens", "top_logprobs", "reasoning_effort"),
    *MESSAGES_FIELDS,
}
COMPLETION_FIELDS = _COMMON | {"prompt", "best_of", "echo"}

_TOKENIZE_FIELDS = frozenset(
    {"model", "prompt", "messages", "tools", "chat_template_kwargs", "add_generation_prompt"}
    | {"continue_final_message"}
)

HEADERS = {
    "x-tenant-id": "tenant",
    "x-quire-tenant": "tenant",
    "x-quire-priority": "priority",
    "x-quire-cache-salt": "cache_salt",
}
"""Parameter by header. A header counts if the body does not state the parameter; of two headers for the same
parameter the later one in this table counts. With API keys, the key's tenant replaces that of a header."""

# Fields of OpenAI and vLLM for which there is one value only: that which changes nothing.
_FIXED: dict[str, Any] = {
    "spaces_between_special_tokens": True,
    "return_tokens_as_token_ids": False,
    "use_beam_search": False,
    "allowed_token_ids": [],
}
_CHAT_FIXED: dict[str, Any] = {
    **_FIXED,
    "echo": False,
    "include_reasoning": True,
    "add_special_tokens": False,
    "modalities": ["text"],
    "audio": None,
    "functions": [],
    "function_call": "none",
}
_COMPLETION_FIXED: dict[str, Any] = {**_FIXED, "suffix": "", "add_special_tokens": True}
_REASONS: dict[str, str] = {
    "truncate_prompt_tokens": "cut the prompt before; one that is too long is refused, with the limit",
    "chat_template": "it is the checkpoint's; chat_template_kwargs set its variables",
    "allowed_token_ids": "logit_bias and structured_outputs say which tokens may follow",
    "use_beam_search": "beam_width above 1 asks for beams",
}
"""Reason why a field is refused, or what to do instead, by the field's name."""
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""Known keys of `stream_options`. The last one (`include_obfuscation`) has no effect: answers are never
padded."""

_COMPLETION_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "exclude_input_in_output": "echo",
    "prompt_logprobs": "logprobs",
}
_OWN_PROMPT_LOGPROBS = {**_COMPLETION_NAMES, "prompt_logprobs": "prompt_logprobs"}
MAX_CHOICES = 1024
"""Bound for counting choices: an `n` that reaches it counts as 1. Quire's limit for `n` is lower."""
MAX_MESSAGES = 4096
"""Most messages of a conversation for chat completions or /tokenize, and most content parts of all its
messages together. The server has the same limit of messages."""
MAX_IMAGES = 16
"""Most images of a conversation for chat completions or /tokenize. The server has the same limit by
default."""
MAX_EFFORT = 32
"""Most characters of `reasoning_effort`."""
MAX_INPUTS = 2048
"""Most inputs of one request for embeddings or scores; OpenAI has the same limit for embeddings."""
MAX_MODEL_LENGTH = 256
"""Most characters of a model's name."""
_NOTHING: tuple[Any, ...] = (None, [], {"type": "text"})
"""Values with which `best_of`, `response_format` or a field beside the messages asks for nothing. The field
is not sent then, because not every model knows it."""
MAX_TOP_LOGPROBS = 20
"""Largest number of `logprobs`, `top_logprobs` or `prompt_logprobs`; OpenAI's chat completions have the same
limit for `top_logprobs`."""
_ANSWER_FIELDS = frozenset({"refusal", "audio", "annotations", "function_call"})
MAX_PROMPTS = 1024
"""Most texts in `prompt` of one request for completions. Quire's own limit is lower."""
MAX_TOKEN_LISTS = 256
"""Most prompts of token ids in one request for completions. Each becomes a request to the server."""


@dataclass(frozen=True)
class TextRequest:
    """One request for text, or for /tokenize or /detokenize. As parsed it has exactly one of `messages`,
    `prompt` and `input_ids`; the others are None."""

    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Whether the objects for a stream's chunks have the token counts so far."""
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: dict[str, Any] | None = None
    """Object with `messages` and the fields of MESSAGES_FIELDS that the request uses."""
    prompt: str | list[str] | None = None
    input_ids: list[list[int]] | None = None
    """Token ids of each prompt."""
    top_logprobs: int | None = None
    """Number of most likely tokens to return at each position. 0: log-probabilities of the text's own tokens
    alone. None: no log-probabilities."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return for each position of the prompt (vLLM's field); None if not
    asked for."""
    returns_token_ids: bool = False
    """Whether the answer has the token ids of prompt and text."""
    timing: bool = False
    """Whether the answer has `timing`: how long its parts took."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in the body, by names on the server, of fields that errors must call by the body's names."""

    @property
    def source(self) -> str:
        """Name of the model's input for this prompt: `messages`, `text_input` or `input_ids`."""
        if self.messages is not None:
            return "messages"
        return "text_input" if self.prompt is not None else "input_ids"

    @property
    def echoed(self) -> tuple[int, ...] | None:
        """Number of characters of each prompt's text if the answer repeats it (`echo`); empty for prompts of
        token ids. None without `echo`."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt or []
        return tuple(map(len, texts)) if self.echo else None

    @property
    def num_prompts(self) -> int:
        if self.input_ids is not None:
            return len(self.input_ids)
        return len(self.prompt) if isinstance(self.prompt, list) else 1

    @property
    def choices_per_prompt(self) -> int:
        """Number of choices to expect per prompt. It is 1 if `n` is out of range, which the server then
        refuses."""
        n: int = self.sampling.get("n", 1)
        return n if 0 < n < MAX_CHOICES else 1

    @property
    def has_tools(self) -> bool:
        return bool(self.messages and self.messages.get("tools"))


@dataclass(frozen=True)
class EmbeddingRequest:
    """One request for embeddings."""

    model: str
    input: str | list[int] | list[str] | list[list[int]]
    as_base64: bool
    """Whether embeddings are returned as little-endian float32 in base64, instead of lists of numbers."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Parameters for the server, such as `dimensions` and those of scheduling."""


def parse_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Parses a body of /v1/embeddings; raises as `parse_chat` does."""
    check_fields(body, EMBEDDING_FIELDS, {})
    model, given, form = model_name(body), body.get("input"), body.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise RequestError('encoding_format: must be "float" or "base64"', param="encoding_format")
    dimensions = body.get("dimensions")
    if dimensions is not None and (not _is_token(dimensions) or dimensions < 1):
        raise RequestError("dimensions: must be a positive integer", param="dimensions")
    if isinstance(given, list) and len(given) > MAX_INPUTS and not _is_token(given[0]):
        raise RequestError(f"input: at most {MAX_INPUTS} are allowed, got {len(given)}", param="input")
    several = given if isinstance(given, list) else []
    is_list = bool(several) and all(type(one) is type(several[0]) and is_input(one) for one in several)
    if given is None or not (is_list or is_input(given)):
        kinds = "a string, a list of token ids, or a list of either, none of them empty"
        raise RequestError(f"input: must be {kinds}", param="input")
    names = ("dimensions", *EMBEDDING_SCHEDULING)
    sampling = {name: body[name] for name in names if body.get(name) is not None}
    return EmbeddingRequest(model, given, form == "base64", sampling)


def is_input(value: Any) -> bool:
    """Whether the value is a text or a list of token ids, and not empty."""
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and bool(value) and all(map(_is_token, value))


def parse_chat(body: Mapping[str, Any]) -> TextRequest:
    """Parses a body of /v1/chat/completions.

    Raises:
        RequestError: an unknown or unsupported field, or a wrong value; the message names the field.
    """
    check_fields(body, CHAT_FIELDS, _CHAT_FIXED)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestError("messages: must be a list of messages", param="messages")
    check_messages(messages)
    sampling = _sampling(body)
    most = body.get("max_completion_tokens")
    if most is not None and sampling.setdefault("max_tokens", most) != most:
        name = "max_completion_tokens"
        raise RequestError(f"{name}: max_tokens is given too, with another value", param=name)
    wants, count = boolean("logprobs", body.get("logprobs")), body.get("top_logprobs")
    if count is not None and not wants and count != 0:
        raise RequestError("top_logprobs: only with logprobs true", param="top_logprobs")
    top = _top_logprobs("top_logprobs", count or 0, sampling) if wants else None
    beside = {name: body[name] for name in MESSAGES_FIELDS if body.get(name) not in _NOTHING}
    _add_effort(body.get("reasoning_effort"), beside)
    asked = {"messages": [_as_template(message) for message in messages], **beside}
    return TextRequest(
        **_common(body, sampling),
        sampling=sampling,
        messages=asked,
        top_logprobs=top,
        timing=_timing(body, sampling),
        names={"prompt": "messages", **({} if most is None else {"max_tokens": "max_completion_tokens"})},
    )


def parse_completion(body: Mapping[str, Any]) -> TextRequest:
    """Parses a body of /v1/completions; raises as `parse_chat` does. The prompt is a text, a list of token
    ids, or a list of either."""
    check_fields(body, COMPLETION_FIELDS, _COMPLETION_FIXED)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not _is_token(prompt[0]):
        prompt = prompt[0]
    sampling = _sampling(body)
    for name in ("best_of", "response_format"):
        if body.get(name) not in _NOTHING:
            sampling[name] = body[name]
    stated = body.get("logprobs")
    # False is not OpenAI's, but is what some clients send for none; 0 asks for those of the tokens alone.
    top = None if stated is None or stated is False else _top_logprobs("logprobs", stated, sampling)
    echo = boolean("echo", body.get("echo"))
    if echo:
        sampling["exclude_input_in_output"] = False
        if top is not None:
            sampling["prompt_logprobs"] = top
    request = TextRequest(
        **_common(body, sampling),
        sampling=sampling,
        top_logprobs=top,
        echo=echo,
        timing=_timing(body, sampling),
        names=_COMPLETION_NAMES if body.get("prompt_logprobs") is None else _OWN_PROMPT_LOGPROBS,
    )
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    if isinstance(prompt, list) and prompt and all(map(_is_token, prompt)):
        return replace(request, input_ids=[prompt])
    several: list[Any] = prompt if isinstance(prompt, list) else []
    is_text = bool(several) and all(isinstance(one, str) for one in several)
    if not is_text and not (several and all(isinstance(one, list) and is_input(one) for one in several)):
        kinds = "a string, a list of token ids, or a list of either, none of them empty"
        raise RequestError(f"prompt: must be {kinds}", param="prompt")
    most = MAX_PROMPTS if is_text else MAX_TOKEN_LISTS
    if len(several) > most:
        message = f"prompt: at most {most} prompts are allowed, got {len(several)}"
        raise RequestError(message, param="prompt")
    return replace(request, prompt=several) if is_text else replace(request, input_ids=several)


def parse_tokenize(body: Mapping[str, Any]) -> TextRequest:
    """Parses a body of /tokenize in vLLM's form; raises as `parse_chat` does."""
    messages, prompt = body.get("messages"), body.get("prompt")
    special = {"add_special_tokens": messages is None}
    check_fields(body, _TOKENIZE_FIELDS, {"return_token_strs": False, **special})
    if (messages is None) == (prompt is None):
        raise RequestError("prompt: exactly one of prompt and messages must be given", param="prompt")
    model = model_name(body)
    if messages is None:
        if not isinstance(prompt, str):
            raise RequestError("prompt: must be a string", param="prompt")
        return TextRequest(model, prompt=prompt)
    if not isinstance(messages, list):
        raise RequestError("messages: must be a list of messages", param="messages")
    check_messages(messages)
    beside = {name: body[name] for name in MESSAGES_FIELDS if body.get(name) not in _NOTHING}
    return TextRequest(model, messages={"messages": [_as_template(one) for one in messages], **beside})


def parse_detokenize(body: Mapping[str, Any]) -> TextRequest:
    """Parses a body of /detokenize in vLLM's form; raises as `parse_chat` does."""
    check_fields(body, frozenset({"model", "tokens"}), {})
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not is_input(tokens):
        raise RequestError("tokens: must be a list of token ids that is not empty", param="tokens")
    return TextRequest(model_name(body), input_ids=[tokens])


def _add_effort(effort: Any, beside: dict[str, Any]) -> None:
    """Adds `reasoning_effort` to the `chat_template_kwargs` in `beside`, unless these state it: only the chat
    template can use it. Raises RequestError for a wrong value."""
    if effort is None:
        return
    if not isinstance(effort, str) or not 0 < len(effort) <= MAX_EFFORT:
        raise RequestError(
            "reasoning_effort: must be a word, as low, medium or high", param="reasoning_effort"
        )
    kwargs = beside.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise RequestError("chat_template_kwargs: must be an object", param="chat_template_kwargs")
    beside["chat_template_kwargs"] = {"reasoning_effort": effort, **kwargs}


def _timing(body: Mapping[str, Any], sampling: dict[str, Any]) -> bool:
    wants = boolean("timing", body.get("timing"))
    if wants:
        sampling["return_timing"] = True
    return wants


def _top_logprobs(name: str, count: Any, sampling: dict[str, Any]) -> int:
    """Checks the number of most likely tokens, stores it as `logprobs` in `sampling`, and returns it. Raises
    RequestError for a wrong number."""
    if not _is_token(count) or not 0 <= count <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name}: must be an integer in [0, {MAX_TOP_LOGPROBS}]", param=name)
    sampling["logprobs"] = count
    number: int = count
    return number


def _as_template(message: Any) -> Any:
    """Converts a message for chat templates. Null fields other than `content` are dropped, and so are fields
    of OpenAI's answers such as `refusal`, so that clients may send answers back unchanged. The role
    `developer` becomes `system`, and parts of type `refusal` become text."""
    if not isinstance(message, dict):
        return message
    kept = {
        name: value
        for name, value in message.items()
        if name == "content" or (value is not None and name not in _ANSWER_FIELDS)
    }
    if kept.get("role") == "developer":
        kept["role"] = "system"
    if isinstance(kept.get("content"), list):
        kept["content"] = [_as_text(part) for part in kept["content"]]
    return kept


def _as_text(part: Any) -> Any:
    """Converts a content part of type `refusal` into a text part, which chat templates know."""
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return part


def check_messages(messages: list[Any]) -> None:
    """Checks the numbers of messages, content parts and images; raises RequestError for too many. The server
    checks their shapes."""
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


def check_fields(body: Mapping[str, Any], known: frozenset[str], fixed: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in known or value is None:
            continue
        reason = f": {_REASONS[name]}" if name in _REASONS else ""
        if name not in fixed:
            told = f"not supported{reason}" if reason else "unknown field"
            raise RequestError(f"{name[:80]}: {told}", param=name[:80])
        if not _same(value, fixed[name]):
            only = json.dumps(fixed[name])
            raise RequestError(f"{name}: not supported, other than {only} or null{reason}", param=name)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are equal, and both or neither of them are booleans."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _common(body: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `TextRequest` that are parsed alike for chat and completions. If the body states
    `prompt_logprobs`, it is also put into `sampling`. Raises RequestError."""
    stream = boolean("stream", body.get("stream"))
    usage, continuous = _stream_options(body.get("stream_options"), stream)
    count = body.get("prompt_logprobs")
    if count is not None:
        if not _is_token(count) or not 0 <= count <= MAX_TOP_LOGPROBS:
            message = f"prompt_logprobs: must be an integer in [0, {MAX_TOP_LOGPROBS}]"
            raise RequestError(message, param="prompt_logprobs")
        if stream:
            raise RequestError("prompt_logprobs: only without stream", param="prompt_logprobs")
        sampling["prompt_logprobs"] = max(count, sampling.get("prompt_logprobs", 0))
    return {
        "model": model_name(body),
        "stream": stream,
        "include_usage": usage,
        "continuous_usage": continuous,
        "prompt_logprobs": count,
        "returns_token_ids": boolean("return_token_ids", body.get("return_token_ids")),
    }


def _stream_options(options: Any, stream: bool) -> tuple[bool, bool]:
    """Returns whether token counts are wanted at the end of the stream, and whether also in the objects for
    chunks. Raises RequestError."""
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise RequestError("stream_options: must be an object", param="stream_options")
    if not stream:
        raise RequestError("stream_options: only with stream true", param="stream_options")
    for name, value in options.items():
        path = f"stream_options.{name[:80]}"
        if value is None:
            continue
        if name not in _STREAM_OPTIONS:
            raise RequestError(f"{path}: unknown field", param=path)
        boolean(path, value)
    usage = bool(options.get("include_usage"))
    return usage, usage and bool(options.get("continuous_usage_stats"))


def model_name(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_LENGTH or not model.isprintable():
        raise RequestError("model: must be the name of a model, see /v1/models", param="model")
    return model


def boolean(name: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false", param=name)
    return bool(value)


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {n: body.get(n) for n in ("max_tokens", *OPENAI_SAMPLING, *QUIRE_SAMPLING)}
    n = given["n"]
    if n is not None and not _is_token(n):  # which a server may take, and choices are counted here
        raise RequestError("n: must be an integer", param="n")
    # An empty list states nothing, and has no tensor in Triton.
    return {name: value for name, value in given.items() if value is not None and value != []}
