"""Answers in OpenAI's form: whole answers, and the objects of a stream."""

from __future__ import annotations

import base64
import json
import struct
import time
from dataclasses import dataclass, field
from typing import Any

from quire_client.openai.logprobs import LogprobsFormat, prompt_entries
from quire_client.types import Choice, Chunk, Embeddings, Result


def finish_reason(reason: str | None) -> str:
    """Returns OpenAI's finish reason for the server's.

    Reasons other than `stop` and `tool_calls`, such as `cancelled`, become `length`, which says that the
    answer is incomplete. No reason becomes `stop`.
    """
    if reason == "tool_calls":
        return reason
    return "stop" if reason in (None, "", "stop") else "length"


def usage(
    prompt_tokens: int | None,
    completion_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
) -> dict[str, Any] | None:
    """Returns the token counts of all choices together; None if the server does not count the prompt's
    tokens."""
    if prompt_tokens is None:
        return None
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def embeddings_reply(model: str, found: Embeddings, *, as_base64: bool) -> bytes:
    """Returns the JSON body of an answer with embeddings."""

    def written(vector: tuple[float, ...]) -> Any:
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector

    data = [
        {"object": "embedding", "index": index, "embedding": written(vector)}
        for index, vector in enumerate(found.vectors)
    ]
    count = found.num_input_tokens
    counts = {"prompt_tokens": count, "total_tokens": count}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": counts}).encode()


@dataclass(frozen=True)
class ReplyFormat:
    """Builds one request's answer in the form of chat completions or of completions."""

    request_id: str
    model: str
    is_chat: bool
    include_usage: bool = False
    choices_per_prompt: int = 1
    logprobs: LogprobsFormat | None = None
    """Form of the log-probabilities; None if not asked for."""
    echoed: tuple[int, ...] | None = None
    """Number of characters of each prompt, if the answers begin with the prompts; empty if it is not known.
    None: the answers do not begin with the prompts."""
    continuous_usage: bool = False
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return for each position of the prompt; None if not asked for."""
    returns_token_ids: bool = False
    prompt_token_ids: tuple[list[int], ...] = ()
    """Token ids of each prompt; empty if not asked for."""
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

    def index_of(self, item: Choice | Chunk) -> int:
        """Returns the index of a choice, counted over all prompts."""
        return item.batch_index * self.choices_per_prompt + item.index

    def whole(self, result: Result) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        counts = usage(
            result.num_input_tokens,
            result.num_output_tokens,
            result.num_cached_tokens,
            result.num_reasoning_tokens,
        )
        choices = [self._choice(choice, result) for choice in result.choices]
        whole = {**self._head(streams=False), "choices": choices, "usage": counts}
        if self.is_chat:
            whole |= self._of_prompt(0, result)
        return whole

    def _of_prompt(self, number: int, result: Result) -> dict[str, Any]:
        """Returns vLLM's fields about a prompt that were asked for. In a chat they stand beside the choices,
        in a completion inside each choice."""
        told: dict[str, Any] = {}
        if self.prompt_logprobs is not None:
            found = result.prompt_logprobs[number] if number < len(result.prompt_logprobs) else None
            told["prompt_logprobs"] = prompt_entries(found, self.prompt_logprobs)
        if number < len(self.prompt_token_ids):
            told["prompt_token_ids"] = self.prompt_token_ids[number]
        return told

    def _choice(self, choice: Choice, result: Result) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None:
            prompts = () if self.echoed is None else result.prompt_logprobs
            lengths = self.echoed or ()
            prompt = prompts[choice.batch_index] if choice.batch_index < len(prompts) else None
            echoed = lengths[choice.batch_index] if choice.batch_index < len(lengths) else None
            logprobs = self.logprobs.format(choice.logprobs, prompt, choice.text, 0, echoed)
        whole: dict[str, Any] = {"index": self.index_of(choice), "logprobs": logprobs}
        if self.is_chat:
            content = choice.text if choice.text or not choice.tool_calls else None
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = choice.reasoning
            if choice.tool_calls:
                message["tool_calls"] = list(choice.tool_calls)
            whole["message"] = message
        else:
            whole["text"] = choice.text
            whole |= self._of_prompt(choice.batch_index, result)
        if self.returns_token_ids:
            whole["token_ids"] = list(choice.token_ids)
        whole["finish_reason"] = finish_reason(choice.finish_reason)
        if choice.stop_reason:
            whole["stop_reason"] = choice.stop_reason
        if choice.server_timing is not None:
            whole["timing"] = choice.server_timing
        return whole

    def opening(self, index: int) -> dict[str, Any] | None:
        """Returns the first object of a chat choice in a stream, which states the role; None for completions,
        which have no such object."""
        if not self.is_chat:
            return None
        part = self._part(index, {"role": "assistant", "content": ""}, None)
        if self.prompt_token_ids and index == 0:
            part["prompt_token_ids"] = self.prompt_token_ids[0]
        return part

    def delta(self, chunk: Chunk, num_characters: int, *, is_first: bool = False) -> dict[str, Any] | None:
        """Returns the object of a stream for a chunk; None if the chunk adds nothing to its choice.

        Args:
            num_characters: number of characters of the choice's text before this chunk.
            is_first: whether the chunk is the first of its choice.
        """
        content: Any = chunk.text
        if self.is_chat:
            content = {"content": chunk.text} if chunk.text else {}
            if chunk.reasoning:
                content["reasoning_content"] = chunk.reasoning
            if chunk.tool_calls:
                content["tool_calls"] = list(chunk.tool_calls)
        logprobs = None
        if self.logprobs is not None and (chunk.logprobs or chunk.prompt_logprobs):
            logprobs = self.logprobs.format(
                (chunk.logprobs or [],), chunk.prompt_logprobs, chunk.text, num_characters
            )
        tells_ids = self.returns_token_ids and bool(chunk.token_ids)
        if not content and logprobs is None and not tells_ids:
            return None
        part = self._part(self.index_of(chunk), content, None, logprobs)
        if tells_ids:
            part["choices"][0]["token_ids"] = list(chunk.token_ids)
        if self.prompt_token_ids and not self.is_chat and is_first:
            part["choices"][0]["prompt_token_ids"] = self.prompt_token_ids[chunk.batch_index]
        return part

    def closing(self, index: int, chunk: Chunk | None) -> dict[str, Any]:
        """Returns the object that ends a choice in a stream: the finish reason of its last chunk, without
        text. `chunk`: this last chunk; None if no chunk of the choice stated a reason."""
        reason = finish_reason(None if chunk is None else chunk.finish_reason)
        part = self._part(index, {} if self.is_chat else "", reason)
        if chunk is not None and chunk.server_timing is not None:
            part["choices"][0]["timing"] = chunk.server_timing
        return part

    def counts(self, counts: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the object with token counts that ends a stream with `stream_options.include_usage`."""
        return {**self._head(streams=True), "choices": [], "usage": counts}

    def _part(self, index: int, content: Any, reason: str | None, logprobs: Any = None) -> dict[str, Any]:
        key = "delta" if self.is_chat else "text"
        choice = {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}
        part: dict[str, Any] = {**self._head(streams=True), "choices": [choice]}
        if self.include_usage:
            part["usage"] = None
        return part
