"""ChatFormat: what a generator must know to constrain and parse the answer to chat messages.

In an ensemble, the tensor `chat_format` carries it as JSON from the model that tokenizes to the generator.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from quire_common.client_json import parse_json
from quire_common.errors import InputError, kind, shown
from quire_ensemble.messages import Conversation, check_response_format, check_tool_choice, check_tools

FIELD = "chat_format"
PROMPT_END = 64
"""Most characters of the prompt's end that are passed on: they may begin the answer."""


@dataclass(frozen=True)
class ChatFormat:
    """Settings for constraining and parsing the answer to chat messages."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that may be called, in OpenAI's form; empty also if the client's tool_choice is none."""
    tool_choice: str = "auto"
    """"auto", "required", or "function:NAME" with the name of the one tool to call. A client's "none" becomes
    "auto" without tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold more than one call."""
    response_format: dict[str, Any] | None = None
    prompt_end: str = ""
    """Last characters of the rendered prompt, at most PROMPT_END."""

    @classmethod
    def from_conversation(cls, conversation: Conversation, prompt: str) -> ChatFormat:
        """Makes the ChatFormat of a conversation. `prompt`: the text rendered from the conversation."""
        calls_none = conversation.tool_choice == "none"
        return cls(
            tools=[] if calls_none else conversation.tools or [],
            tool_choice="auto" if calls_none else conversation.tool_choice,
            parallel_tool_calls=conversation.parallel_tool_calls,
            response_format=conversation.response_format,
            prompt_end=prompt[-PROMPT_END:],
        )

    @property
    def asks_for_grammar(self) -> bool:
        """Whether the client requires tool calls, or a response format other than text."""
        asked = self.response_format or {}
        return self.tool_choice != "auto" or asked.get("type", "text") != "text"

    def to_json(self) -> bytes:
        """Returns the JSON text for the tensor, without fields that have their defaults."""
        default = ChatFormat()
        values = dataclasses.asdict(self)
        stated = {key: value for key, value in values.items() if value != getattr(default, key)}
        return json.dumps(stated, ensure_ascii=False).encode("utf-8", "replace")


def parse_chat_format(raw: bytes | str) -> ChatFormat:
    """Parses the JSON text of a ChatFormat, which any client may have written.

    Raises:
        InputError: the text is not JSON, has an unknown key, or has a wrong value.
    """
    value = parse_json(FIELD, raw)
    if not isinstance(value, dict):
        raise InputError(FIELD, f"must be an object, got {kind(value)}")
    names = [one.name for one in dataclasses.fields(ChatFormat)]
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise InputError(FIELD, f"unknown key {shown(unknown[0])}; known are {', '.join(names)}")
    tools = check_tools(value.get("tools"), FIELD) or []
    parallel, end = value.get("parallel_tool_calls", True), value.get("prompt_end", "")
    if not isinstance(parallel, bool):
        raise InputError(FIELD, f"parallel_tool_calls must be true or false, got {kind(parallel)}")
    if not isinstance(end, str) or len(end) > PROMPT_END:
        raise InputError(FIELD, f"prompt_end must be a string of at most {PROMPT_END} characters")
    choice = value.get("tool_choice", "auto")
    if isinstance(choice, str) and choice.startswith("function:"):
        choice = {"type": "function", "function": {"name": choice.removeprefix("function:")}}
    choice = check_tool_choice(choice, tools, FIELD)
    calls_none = choice == "none"
    return ChatFormat(
        tools=[] if calls_none else tools,
        tool_choice="auto" if calls_none else choice,
        parallel_tool_calls=parallel,
        response_format=check_response_format(value.get("response_format"), FIELD),
        prompt_end=end,
    )
