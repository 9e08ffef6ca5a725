"""Grammars of answers to chat messages: calls that are required or have begun, and response formats.

They are structural tags (`StructuredOutput.structural_tag`). Calls have the model's own form. The
arguments of required calls are made from the tools' schemas; those of optional calls may be any JSON object
if the model writes them as JSON. A response format becomes a part of such a tag, so that reasoning can come
before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.request.structured_output import StructuredOutput

Format = dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call; NAME stands for the tool's name in `begin`."""

    begin: str
    end: str
    before: str = ""
    """Text before the first call."""
    between: str = ""
    behind: str = ""
    """Text after the last call."""
    trigger: str = ""
    """Text with which calls begin, even within free text, and by which the grammar of optional calls
    recognises them; empty: optional calls have no grammar."""
    is_single: bool = False
    """Whether an answer ends with its first call."""
    arguments: Callable[[Mapping[str, Any]], Format] | None = None
    """Makes the format of arguments from their schema; None: they are JSON."""

    def tag(self, name: str, schema: Mapping[str, Any]) -> Format:
        """Returns the format of one call to the tool `name`."""
        content = {"type": "json_schema", "json_schema": schema}
        if self.arguments is not None:
            content = self.arguments(schema)
        begin, end = self.begin.replace("NAME", name), self.end
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def forced(self, tools: Mapping[str, Mapping[str, Any]], *, is_parallel: bool) -> Format:
        """Returns the format of one call of these tools, or of several if allowed."""
        calls = {
            "type": "tags_with_separator",
            "tags": [self.tag(name, schema) for name, schema in tools.items()],
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": self.is_single or not is_parallel,
        }
        return sequence(text(self.before), calls, text(self.behind))

    def begun(self, tools: Mapping[str, Mapping[str, Any]]) -> Format:
        """Returns the format of free text in which the trigger always begins a valid call of these tools."""
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": [self.tag(name, schema) for name, schema in tools.items()],
        }


def text(value: str) -> Format:
    """Returns the format of exactly this text."""
    return {"type": "const_string", "value": value}


def sequence(*parts: Format) -> Format:
    """Returns the format of several parts in sequence."""
    kept = [part for part in parts if part != text("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def either(*parts: Format) -> Format:
    """Returns the format that matches any one of the parts."""
    return {"type": "or", "elements": list(parts)}


def maybe_thought(open_tag: str, close_tag: str, behind: str = "") -> Format:
    """Returns the format of either nothing, or reasoning between its tags and the text `behind` after it."""
    thought = {"type": "tag", "begin": open_tag, "content": {"type": "any_text"}, "end": close_tag}
    return either(text(""), sequence(thought, text(behind)))


def format_of(structured: StructuredOutput) -> Format | None:
    """Returns a JSON schema, JSON object, regular expression or choice as part of a structural tag; None for
    other grammars. A grammar's `after` is left out."""
    if structured.json:
        return {"type": "json_schema", "json_schema": json.loads(structured.json)}
    if structured.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if structured.regex:
        return {"type": "regex", "pattern": structured.regex}
    if structured.choice:
        return either(*map(text, structured.choice))
    return None


def structural_tag(form: Format, after: str = "") -> StructuredOutput:
    """Returns the grammar of a format. With `after` it begins once that text has been generated."""
    return StructuredOutput(structural_tag=json.dumps({"format": form}, separators=(",", ":")), after=after)


def glm_arguments(schema: Mapping[str, Any]) -> Format:
    """Returns the format of GLM's arguments: the schema's properties, in its order. Those not required may be
    left out."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        return text("")
    parts = []
    for key, kind in properties.items():
        argument = sequence(text(f"<arg_key>{key}</arg_key>\n"), _glm_value(kind), text("\n"))
        parts.append(
            argument if isinstance(required, list) and key in required else either(text(""), argument)
        )
    return sequence(*parts) if parts else text("")


def _glm_value(kind: Any) -> Format:
    begin, end = "<arg_value>", "</arg_value>"
    if isinstance(kind, Mapping) and kind.get("type") == "string":
        values = kind.get("enum")
        strings = [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
        if strings:
            return sequence(text(begin), either(*map(text, strings)), text(end))
        return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
    content = {"type": "json_schema", "json_schema": kind if isinstance(kind, Mapping) else {}}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def call_form(tool_format: str, template: str) -> CallForm:
    """Returns how a model writes calls.

    Args:
        tool_format: name of the model's tool format, of TOOL_FORMATS.
        template: the model's chat template.
    """
    match tool_format:
        case "hermes":
            return CallForm(
                '<tool_call>\n{"name": "NAME", "arguments": ',
                "}\n</tool_call>",
                between="\n",
                trigger="<tool_call>",
            )
        case "llama":
            return CallForm('{"name": "NAME", "parameters": ', "}", between="; ")
        case "mistral" if "[ARGS]" in template:
            return CallForm("[TOOL_CALLS]NAME[ARGS]", "", trigger="[TOOL_CALLS]")
        case "mistral":
            return CallForm(
                '{"name": "NAME", "arguments": ', "}", before="[TOOL_CALLS] [", between=", ", behind="]"
            )
        case "deepseek":
            begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
            head, tail = f"{begin}NAME{separator}", end
            if "```json" in template:
                head, tail = f"{begin}function{separator}NAME\n```json\n", f"\n```{end}"
            return CallForm(
                head,
                tail,
                before="<｜tool▁calls▁begin｜>",
                behind="<｜tool▁calls▁end｜>",
                trigger="<｜tool▁call▁begin｜>",
            )
        case "glm":
            return CallForm(
                "<tool_call>NAME\n",
                "</tool_call>",
                between="\n",
                trigger="<tool_call>",
                arguments=glm_arguments,
            )
        case _:
            return CallForm(
                "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", is_single=True
            )
