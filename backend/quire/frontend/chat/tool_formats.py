"""Parsers of answers with tool calls: one machine for each format in which models write calls.

A call of a tool that the request does not have counts as other text, which is mostly content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.frontend.chat.calls import MAX_HELD, ArgumentsReader, CallReader
from quire.frontend.chat.machine import MAX_HEADER, Markers, TextMachine
from quire.frontend.chat.sink import AnswerSink


class ObjectMachine(TextMachine):
    """Base of the parsers that read calls as JSON objects with the tool's name and its arguments.

    Subclasses implement `_behind`, the state after such a call.
    """

    _needs_arguments = False
    _call: CallReader

    def _begin_object(self) -> bool:
        self._call = CallReader(self.sink, needs_arguments=self._needs_arguments)
        return self._go(self._object)

    def _object(self) -> bool:
        self._at = self._call.feed(self._text, self._at)
        if self._call.is_done:
            return self._go(self._behind)
        if not (self._call.is_bad or self._is_last):
            return False
        if self._call.has_begun:
            self._opened = ""
            return self._go(self._content)
        return self._give_up(self._call.raw)

    def _behind(self) -> bool:
        raise NotImplementedError


class Hermes(ObjectMachine):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and others."""

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        super().__init__(sink, {"<tool_call>": self._begin_object})

    def _behind(self) -> bool:
        if self._skip() or self._is_last:
            closed = self._may_begin("</tool_call>")
            if closed is not None:
                return self._go(self._content)
        return False


class Llama(ObjectMachine):
    """Calls of Llama 3: `{"name": ..., "parameters": {...}}` at the beginning of an answer or directly after
    `<|python_tag|>`, further ones after that call, with or without `;` or `,` between them."""

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        super().__init__(sink, {"<|python_tag|>": self._tagged})
        self._state = self._first
        self._needs_arguments = True

    def _tagged(self) -> bool:
        self._needs_arguments = False
        return self._begin_object()

    def _first(self) -> bool:
        text, start = self._text, self._at
        is_there = self._skip()
        self.sink.text(text[start : self._at])
        return self._next() if is_there else False

    def _behind(self) -> bool:
        return self._next() if self._skip(" \t\r\n;,") else False

    def _next(self) -> bool:
        if self._text[self._at] == "{":
            self._opened, self._needs_arguments = "", True
            return self._begin_object()
        return self._go(self._content)


class Mistral(ObjectMachine):
    """Calls of Mistral's models: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`.

    Newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call, some with `[CALL_ID]id` before `[ARGS]`.
    """

    _HEAD = Markers("[ARGS]", "[CALL_ID]", "{")
    _ARGUMENTS = Markers("[ARGS]", "{")

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        super().__init__(sink, {"[TOOL_CALLS]": self._which}, ("[ARGS]", "[CALL_ID]"))
        self._named: ArgumentsReader

    def _which(self) -> bool:
        if not self._skip():
            return self._give_up() if self._is_last else False
        if self._text[self._at] == "[":
            self._at += 1
            self._opened += "["
            return self._go(self._item)
        return self._go(self._name)

    def _item(self) -> bool:
        if not self._skip():
            return self._give_up() if self._is_last else False
        if self._text[self._at] == "{":
            return self._begin_object()
        return self._give_up()

    def _behind(self) -> bool:
        if not self._skip():
            return False
        char = self._text[self._at]
        self._at += char in ",]"
        self._opened = ""
        return self._go(self._item if char == "," else self._content)

    def _name(self) -> bool:
        found = self._until(self._HEAD)
        if found is None:
            return self._give_up() if self._is_hopeless(self._HEAD) else False
        name = self._text[self._at : found.start()].strip()
        if name not in self.sink.names:
            return self._give_up()
        if found[0] == "[CALL_ID]":
            rest = self._until(self._ARGUMENTS, found.end())
            if rest is None:
                return self._give_up() if self._is_hopeless(self._ARGUMENTS, found.end()) else False
            found = rest
        self._at = found.end() - (found[0] == "{")
        self.sink.begin_call(name)
        self._named = ArgumentsReader(self.sink)
        return self._go(self._arguments)

    def _arguments(self) -> bool:
        self._at = self._named.feed(self._text, self._at)
        return self._go(self._content) if self._named.is_done or self._named.is_bad else False


class DeepSeek(TextMachine):
    """Calls of DeepSeek between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

    V3 and R1 write `function<｜tool▁sep｜>name` and fenced arguments.
    V3.1 writes `name<｜tool▁sep｜>` and the arguments.
    """

    _SEPARATOR = Markers("<｜tool▁sep｜>")
    _BRACE = Markers("{")

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        closers = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
        super().__init__(sink, {"<｜tool▁call▁begin｜>": self._head}, closers)
        self._arguments: ArgumentsReader

    def _head(self) -> bool:
        found = self._until(self._SEPARATOR)
        if found is None:
            return self._give_up() if self._is_hopeless(self._SEPARATOR) else False
        kind = self._text[self._at : found.start()]
        brace = self._until(self._BRACE, found.end())
        if brace is None:
            return self._give_up() if self._is_hopeless(self._BRACE, found.end()) else False
        behind = self._text[found.end() : brace.start()]
        name = behind.replace("```json", "").strip() or kind.strip()
        if name not in self.sink.names:
            return self._give_up()
        self._at = brace.start()
        self.sink.begin_call(name)
        self._arguments = ArgumentsReader(self.sink)
        return self._go(self._body)

    def _body(self) -> bool:
        self._at = self._arguments.feed(self._text, self._at)
        if self._arguments.is_done:
            return self._go(self._behind)
        return self._go(self._content) if self._arguments.is_bad else False

    def _behind(self) -> bool:
        return self._go(self._content) if self._skip(" \t\r\n`") else False


class Glm(TextMachine):
    """`<tool_call>name`, then for each argument a line `<arg_key>k</arg_key>` and one
    `<arg_value>v</arg_value>`, and `</tool_call>`: GLM 4.5.

    Values are JSON, except strings, which are bare text. A value is a string if its type in the tool's schema
    is "string" alone, or if it is no valid JSON.
    """

    _NAME_END = Markers("\n", "<arg_key>", "</tool_call>")
    _KEY_END = Markers("</arg_key>")
    _VALUE_END = Markers("</arg_value>")

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        super().__init__(sink, {"<tool_call>": self._name})
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._is_string = False
        self._value: list[str] = []
        self._num_held = 0

    def _name(self) -> bool:
        found = self._until(self._NAME_END)
        if found is None:
            return self._give_up() if self._is_hopeless(self._NAME_END) else False
        name = self._text[self._at : found.start()].strip()
        if not name and found[0] == "\n" and found.start() - self._at < MAX_HEADER:
            self._at = found.end()
            self._opened += "\n"
            return len(self._opened) < MAX_HEADER or self._give_up()
        if name not in self.sink.names:
            return self._give_up()
        self._at = found.start()
        self.sink.begin_call(name)
        properties = (self._tools.get(name) or {}).get("properties")
        self._schema = properties if isinstance(properties, Mapping) else {}
        self._num_arguments = 0
        return self._go(self._next)

    def _next(self) -> bool:
        if not self._skip():
            return False
        is_key = self._may_begin("<arg_key>")
        if is_key:
            return self._go(self._key)
        is_end = self._may_begin("</tool_call>")
        if is_end:
            self.sink.arguments("}" if self._num_arguments else "{}")
            self.sink.end_call()
            return self._go(self._content)
        if is_key is None or is_end is None:
            return False
        return self._go(self._content)

    def _key(self) -> bool:
        found = self._until(self._KEY_END)
        if found is None:
            return self._go(self._content) if self._is_hopeless(self._KEY_END) else False
        key = self._text[self._at : found.start()].strip()
        at, self._at = self._at, found.end()
        is_there = self._skip()
        if self._at - found.end() > MAX_HEADER:
            self._at = found.end() + MAX_HEADER  # wherever the text was cut
            return self._go(self._content)
        begins = self._may_begin("<arg_value>") if is_there else (False if self._is_last else None)
        if begins is None:
            self._at = at
            return False
        if not begins:
            return self._go(self._content)
        kind = self._schema.get(key)
        self._is_string = isinstance(kind, Mapping) and kind.get("type") == "string"
        self.sink.arguments(("," if self._num_arguments else "{") + _json(key) + ":")
        self._num_arguments += 1
        self._value, self._num_held = [], 0
        if self._is_string:
            self.sink.arguments('"')
        return self._go(self._string if self._is_string else self._any)

    def _string(self) -> bool:
        piece, is_end = self._piece()
        self.sink.arguments(_json(piece)[1:-1] + ('"' if is_end else ""))
        return is_end and self._go(self._next)

    def _any(self) -> bool:
        piece, is_end = self._piece()
        self._value.append(piece)
        self._num_held += len(piece)
        if self._num_held > MAX_HELD:
            return self._go(self._content)
        if not is_end:
            return False
        value = "".join(self._value)
        self.sink.arguments(value.strip() if _is_json(value) else _json(value))
        return self._go(self._next)

    def _piece(self) -> tuple[str, bool]:
        """Returns the next text of a value, and whether the value ends with it."""
        piece, found = self._up_to(self._VALUE_END)
        if found is not None:
            self._at = found.end()
        return piece, found is not None


class Plain(TextMachine):
    """Parser of answers without calls: all text is content, but for the markers that the sink hides."""

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any]) -> None:
        super().__init__(sink, {})


class Harmony(TextMachine):
    """Messages of gpt-oss: `<|channel|>name to=recipient<|message|>text` and an end marker.

    A message to `functions.name` is a call if the request has this tool. Of the other messages, those of
    channel analysis are reasoning, and the rest are content. The beginning of the first message,
    `<|start|>assistant`, is usually the end of the prompt.

    Args:
        keeps_reasoning: whether reasoning is kept apart; if not, it is content.
    """

    _ENDS = ("<|end|>", "<|call|>", "<|return|>")
    _HEAD = Markers("<|message|>")
    _BODY = Markers(*_ENDS, "<|start|>")
    _CHANNEL = re.compile(r"<\|channel\|>\s*([a-z_]*)")
    _RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")

    def __init__(self, sink: AnswerSink, tools: Mapping[str, Any], *, keeps_reasoning: bool = True) -> None:
        super().__init__(
            sink,
            {"<|channel|>": self._head, "<|start|>": self._head},
            (*self._ENDS, "<|message|>", "<|constrain|>"),
        )
        self._keeps_reasoning = keeps_reasoning
        self._arguments: ArgumentsReader | None = None
        self._state = self._first
        self.is_reasoning = False
        """Whether the text of the present message is passed on as reasoning."""

    def _first(self) -> bool:
        """State at the answer's beginning, where a recipient may come before the channel."""
        if not self._skip():
            return False
        begins = self._may_begin("to=")
        if begins is None:
            return False
        if begins:
            self._opened = "to="
            return self._go(self._head)
        return self._go(self._content)

    def _head(self) -> bool:
        found = self._until(self._HEAD)
        if found is None:
            return self._give_up() if self._is_hopeless(self._HEAD) else False
        head = self._opened + self._text[self._at : found.start()]
        self._at, self._opened = found.end(), ""
        channel, recipient = self._CHANNEL.search(head), self._RECIPIENT.search(head)
        self.is_reasoning = channel is not None and channel[1] == "analysis" and self._keeps_reasoning
        self._arguments = None
        if recipient is not None and recipient[1] in self.sink.names:
            self.is_reasoning = False
            self.sink.begin_call(recipient[1])
            self._arguments = ArgumentsReader(self.sink)
        elif not self.is_reasoning:
            self.sink.edge()
        return self._go(self._body)

    def _body(self) -> bool:
        if self._arguments is not None:
            self._at = self._arguments.feed(self._text, self._at)
            if not (self._arguments.is_done or self._arguments.is_bad):
                return False
            self._arguments = None
            self.sink.edge()
        piece, found = self._up_to(self._BODY)
        (self.sink.reason if self.is_reasoning else self.sink.text)(piece)
        if found is None:
            return False
        self.is_reasoning = False
        if found[0] != "<|start|>":
            self._at = found.end()
            self.sink.edge()
        return self._go(self._content)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: json.loads(name.lower() + "!"))
    except (ValueError, RecursionError):
        return False
    return True
