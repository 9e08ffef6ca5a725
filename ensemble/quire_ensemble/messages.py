"""The `messages` input: chat messages as JSON, checked before they reach a chat template.

Accepted is either a list of messages or an object
`{"messages": [...], "tools": [...], "add_generation_prompt": true, "chat_template_kwargs": {...}}`,
so that one STRING tensor carries all a chat template can use. The object may also have
`continue_final_message`. Its `tool_choice`, `parallel_tool_calls` and `response_format` say what the answer
may be, as in OpenAI's chat completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_common.client_json import parse_json
from quire_common.errors import InputError, kind, shown

FIELD = "messages"
MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 2**19
"""Most characters of the JSON of a request's tools together. In an ensemble, this JSON usually goes on to the
generator."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_BYTES = 16 * 2**20
"""Default limit of a prompt's length: of the JSON text of `messages`, of a plain text, and of the text that a
chat template makes."""

_OBJECT_KEYS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
)


@dataclass(frozen=True)
class Conversation:
    """Chat messages of a request, and options for the chat template and the answer."""

    messages: list[dict[str, Any]]
    """Each message has a `role`; its `content` is a string or a list of text parts (and image parts), or
    missing or None beside tool calls."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    """Whether the template is asked to end the prompt with the start of an answer."""
    continue_final_message: bool = False
    """Whether the answer is to continue the last message, which the prompt then leaves open."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_choice: str = "auto"
    """auto, none, required, or "function:NAME"."""
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None


def parse_conversation(
    raw: str | bytes, *, allow_images: bool = False, max_bytes: int = MAX_BYTES
) -> Conversation:
    """Parses and checks the JSON text of the `messages` input.

    Args:
        raw: the JSON text.
        allow_images: whether content may hold image parts (see `split_images`).
        max_bytes: most bytes of the JSON text; if `raw` is a `str`, most characters.

    Raises:
        InputError: the text is too long, not UTF-8, not JSON, or JSON that `parse_json` does not allow; or a
            key is unknown or a value wrong.
    """
    value = parse_json(FIELD, raw, max_bytes=max_bytes)
    if isinstance(value, list):
        return Conversation(messages=check_messages(value, allow_images=allow_images))
    if not isinstance(value, dict):
        raise InputError(FIELD, f"must be a list of messages or an object with 'messages', got {kind(value)}")
    unknown = sorted(set(value) - set(_OBJECT_KEYS))
    if unknown:
        raise InputError(FIELD, f"unknown key {shown(unknown[0])}; known are {', '.join(_OBJECT_KEYS)}")
    if "messages" not in value:
        raise InputError(FIELD, "the object must have the key 'messages'")
    prompt, continues = _flag(value, "add_generation_prompt"), _flag(value, "continue_final_message")
    if prompt and continues:
        raise InputError(FIELD, "continue_final_message must not be given beside add_generation_prompt true")
    template_kwargs = value.get("chat_template_kwargs")
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise InputError(FIELD, f"chat_template_kwargs must be an object, got {kind(template_kwargs)}")
    parallel = _flag(value, "parallel_tool_calls")
    messages = check_messages(value["messages"], allow_images=allow_images)
    tools = check_tools(value.get("tools"))
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=check_tool_choice(value.get("tool_choice"), tools or []),
        parallel_tool_calls=parallel is not False,
        response_format=check_response_format(value.get("response_format")),
        add_generation_prompt=not continues if prompt is None else prompt,
        continue_final_message=bool(continues),
        template_kwargs=template_kwargs or {},
    )


def _flag(value: Mapping[str, Any], name: str) -> bool | None:
    """Returns the boolean `name` of an object; None if it is absent or null. Raises InputError for another
    type."""
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise InputError(FIELD, f"{name} must be true or false, got {kind(flag)}")
    return flag


def check_messages(value: Any, *, allow_images: bool = False) -> list[dict[str, Any]]:
    """Checks messages, and returns them unchanged.

    There must be 1 to MAX_MESSAGES of them. `role` must be a string that is not empty; `content` a string or
    a list of `{"type": "text", "text": ...}` parts (and image parts, where they are allowed). It may be null
    or absent if the message has `tool_calls`. Other keys (name, tool_call_id, ...) are not checked.

    Raises:
        InputError: something is wrong; for a value in a message, with its path, such as
            `[2].content[0].type`.
    """
    if not isinstance(value, list):
        raise InputError(FIELD, f"must be a list of messages, got {kind(value)}")
    if not value:
        raise InputError(FIELD, "must hold at least one message")
    if len(value) > MAX_MESSAGES:
        raise InputError(FIELD, f"at most {MAX_MESSAGES} messages are allowed, got {len(value)}")
    for index, message in enumerate(value):
        where = f"[{index}]"
        if not isinstance(message, dict):
            raise InputError(FIELD, f"{where} must be an object with role and content, got {kind(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InputError(FIELD, f"{where}.role must be a non-empty string, got {kind(role)}")
        content = message.get("content")
        if content is None:
            if not message.get("tool_calls"):
                raise InputError(FIELD, f"{where}.content must be a string or a list of text parts")
        elif isinstance(content, list):
            _check_parts(f"{where}.content", content, allow_images)
        elif not isinstance(content, str):
            raise InputError(
                FIELD, f"{where}.content must be a string or a list of text parts, got {kind(content)}"
            )
    return value


def check_tools(value: Any, field: str = FIELD) -> list[dict[str, Any]] | None:
    """Checks tools in OpenAI's form, and returns them unchanged; None for null.

    Raises:
        InputError: of `field`: the value is not a list of `{"type": "function", "function": {"name": ...}}`
            (where `type` may be missing), a name occurs twice or is not of 1 to 64 ASCII letters, digits and
            `_.-`, parameters are no object or a schema of another type than object, or there are more than
            MAX_TOOLS tools or MAX_TOOLS_BYTES characters of JSON.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise InputError(field, f"tools must be a list of objects, got {kind(value)}")
    if len(value) > MAX_TOOLS:
        raise InputError(field, f"at most {MAX_TOOLS} tools are allowed, got {len(value)}")
    names: set[str] = set()
    for index, tool in enumerate(value):
        place = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise InputError(field, f"{place} must be an object, got {kind(tool)}")
        if tool.get("type", "function") != "function":
            raise InputError(field, f"{place}.type {shown(tool['type'])} is not supported; known: 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InputError(field, f"{place}.function must be an object, got {kind(function)}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise InputError(
                field,
                f"{place}.function.name must be of 1 to 64 letters, digits, '_', '.' or '-', "
                f"got {shown(name) if isinstance(name, str) else kind(name)}",
            )
        if name in names:
            raise InputError(field, f"{place}.function.name {shown(name)} is there twice")
        if parameters is not None and not isinstance(parameters, dict):
            raise InputError(field, f"{place}.function.parameters must be an object, got {kind(parameters)}")
        if parameters and parameters.get("type", "object") != "object":
            raise InputError(field, f"{place}.function.parameters must be a schema of type 'object'")
        names.add(name)
    size = len(json.dumps(value, ensure_ascii=False)) if value else 0
    if size > MAX_TOOLS_BYTES:
        raise InputError(field, f"tools of at most {MAX_TOOLS_BYTES} characters of JSON, got {size}")
    return value


def check_tool_choice(value: Any, tools: Sequence[Mapping[str, Any]], field: str = FIELD) -> str:
    """Returns the tool choice, given in OpenAI's form, as auto, none, required or "function:NAME"; auto for
    null.

    Raises:
        InputError: of `field`: the value has another form, the named tool is not among `tools`, or a call is
            required and there are no tools.
    """
    if value is None or value in ("auto", "none"):
        return value or "auto"
    if value == "required":
        if not tools:
            raise InputError(field, "tool_choice 'required' needs tools")
        return "required"
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InputError(
            field,
            "tool_choice must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": ...}}',
        )
    if all(tool["function"]["name"] != name for tool in tools):
        raise InputError(field, f"tool_choice names {shown(name)}, which is not among the tools")
    return f"function:{name}"


def check_response_format(value: Any, field: str = FIELD) -> dict[str, Any] | None:
    """Checks that OpenAI's response_format is an object with a known `type`, and returns it unchanged; None
    for null. The generator checks the rest. Raises InputError."""
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in ("text", "json_object", "json_schema"):
        raise InputError(field, "response_format must have the type 'text', 'json_object' or 'json_schema'")
    return value


def join_text_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of checked messages with lists of text parts joined by line feeds, for templates that
    read strings only. Lists with image parts stay as they are."""

    def join(parts: list[Any]) -> Any:
        if any(part["type"] != "text" for part in parts):
            return parts
        return "\n".join(part["text"] for part in parts)

    return _with_contents(messages, list, join)


def wrap_strings(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of checked messages in which a content that is a string has become a list of one text
    part, for templates that read lists only."""
    return _with_contents(messages, str, lambda text: [{"type": "text", "text": text}])


def with_call_arguments(messages: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Returns copies of checked messages in which the arguments of earlier calls have the form that a
    template reads, as far as they can be converted.

    Clients of OpenAI's interface send arguments as JSON text, but most templates expect an object and write
    its JSON. For a template that reads objects, an empty text becomes an empty object, and a text that cannot
    be parsed as a JSON object stays a text.

    Args:
        as_text: whether the template reads JSON text; False: it reads an object.
    """

    def change(arguments: Any) -> Any:
        if as_text:
            return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
        if not isinstance(arguments, str):
            return arguments
        try:
            value = parse_json(FIELD, arguments.strip() or "{}", max_bytes=MAX_BYTES)
        except InputError:
            return arguments
        return value if isinstance(value, dict) else arguments

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    copies = [dict(message) for message in messages]
    for copy in copies:
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [changed(call) for call in copy["tool_calls"]]
    return copies


def without_empty_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of messages without `tool_calls` keys that are empty lists.

    Many chat templates test only whether the key exists, so an empty list would look like a call.
    """
    return [
        {key: value for key, value in message.items() if (key, value) != ("tool_calls", [])}
        for message in messages
    ]


def with_empty_contents(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns copies of messages with an empty text where there is no content, for templates that always read
    the content."""
    return [
        {**message, "content": ""} if message.get("content") is None else dict(message)
        for message in messages
    ]


def split_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Separates the images from checked messages.

    Known are `{"type": "image"}`, `{"type": "image", "image": DATA}`, `{"type": "image_url"}` and
    `{"type": "image_url", "image_url": DATA}` or `{..., "image_url": {"url": DATA}}`, where DATA is base64
    text or a `data:` URL (not looked at here). OpenAI's `detail` beside `url` is accepted and has no effect:
    the checkpoint's processor decides on the resolution.

    Returns:
        Copies of the messages in which every image part is `{"type": "image"}`, and the DATA of each image
        part in order. None: the part has no DATA, and stands for the next image of the request's tensor.
    """
    found: list[str | None] = []

    def split(parts: list[Any]) -> list[Any]:
        found.extend(_image_data(part) for part in parts if part["type"] != "text")
        return [part if part["type"] == "text" else {"type": "image"} for part in parts]

    return _with_contents(messages, list, split), found


def join_images(messages: Sequence[Mapping[str, Any]], placeholder: str) -> list[dict[str, Any]]:
    """Returns copies of the messages from `split_images` in which lists with image parts have become texts:
    first a line with `placeholder` for each image, then the text parts. For templates that do not know image
    parts."""

    def join(parts: list[Any]) -> Any:
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images = len(parts) - len(texts)
        return f"{placeholder}\n" * images + "\n".join(texts) if images else parts

    return _with_contents(messages, list, join)


def _with_contents(
    messages: Sequence[Mapping[str, Any]], of_type: type, change: Callable[[Any], Any]
) -> list[dict[str, Any]]:
    """Returns copies of messages in which `change` is applied to each content of type `of_type`."""
    copies = [dict(message) for message in messages]
    for copy in copies:
        if isinstance(copy.get("content"), of_type):
            copy["content"] = change(copy["content"])
    return copies


def _check_parts(where: str, parts: list[Any], allow_images: bool) -> None:
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise InputError(
                FIELD, f'{place} must be an object like {{"type": "text", "text": "..."}}, got {kind(part)}'
            )
        if allow_images and part.get("type") in ("image", "image_url"):
            _check_image_part(place, part)
            continue
        if part.get("type") != "text":
            known = "'text', 'image', 'image_url'" if allow_images else "'text'"
            raise InputError(
                FIELD, f"{place}.type {shown(part.get('type'))} is not supported; known: {known}"
            )
        if not isinstance(part.get("text"), str):
            raise InputError(FIELD, f"{place}.text must be a string, got {kind(part.get('text'))}")


def _check_image_part(place: str, part: dict[str, Any]) -> None:
    key = part["type"]
    unknown = sorted(set(part) - {"type", key})
    if unknown:
        raise InputError(FIELD, f"{place}: unknown key {shown(unknown[0])}; known are 'type' and {key!r}")
    value = part.get(key)
    if key == "image_url" and isinstance(value, dict):
        place, value = f"{place}.image_url", value.get("url")
        if value is None:
            raise InputError(FIELD, f"{place} must have the key 'url'")
        key = "url"
    if value is not None and not isinstance(value, str):
        raise InputError(FIELD, f"{place}.{key} must be a string, got {kind(value)}")


def _image_data(part: Mapping[str, Any]) -> str | None:
    value = part.get(part["type"])
    return value.get("url") if isinstance(value, dict) else value
