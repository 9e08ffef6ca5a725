"""ChatParsing: which parsers a model's answers need; Answer: parses one choice's answer to chat messages.

Unless the configuration names them or says none, a model's formats are recognised by strings in its chat
template, which mostly writes the calls of earlier turns in the way the model does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import InvalidArgumentError
from quire.frontend.chat.machine import AnswerParser, TextMachine
from quire.frontend.chat.sink import AnswerSink
from quire.frontend.chat.thinking import ThinkSplitter
from quire.frontend.chat.tool_choice import (
    Format,
    call_form,
    format_of,
    maybe_thought,
    sequence,
    structural_tag,
    text,
)
from quire.frontend.chat.tool_formats import DeepSeek, Glm, Harmony, Hermes, Llama, Mistral, Plain
from quire.frontend.detokenizer import TokenDecoder
from quire.request.sampling_params import SamplingParams, Thinking
from quire.request.structured_output import MAX_GRAMMAR_LENGTH, StructuredOutput, parse_structured_output
from quire_ensemble.chat_format import ChatFormat

if TYPE_CHECKING:
    from quire.config import FrontendConfig
    from quire_ensemble.tokenizer import Tokenizer

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class ToolFormat:
    """A format in which models write tool calls: its parser, and its characteristic strings."""

    machine: type[TextMachine]
    signs: tuple[str, ...]
    """Strings by which a chat template is recognised. One is enough, unless the template has a sign of an
    earlier format in TOOL_FORMATS."""
    markers: tuple[str, ...]
    """Strings that the parser looks for in an answer. Those that are special tokens stay in the text when an
    answer is decoded for it."""


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes reasoning."""

    open_tag: str
    close_tag: str
    forced: str = ""
    """Text that ends reasoning when its budget is used up; empty: the closing tag."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "harmony": ToolFormat(
        Harmony,
        ("<|channel|>",),
        ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "deepseek": ToolFormat(
        DeepSeek,
        ("<｜tool▁call▁begin｜>",),
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
    "mistral": ToolFormat(Mistral, ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "glm": ToolFormat(
        Glm,
        ("<arg_key>",),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "hermes": ToolFormat(Hermes, ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    "llama": ToolFormat(
        Llama,
        ("<|python_tag|>", '"parameters": dictionary', "Environment: ipython"),
        ("<|python_tag|>",),
    ),
}
"""Tool formats by name; tool_parser "auto" means the first with a sign in the chat template, if any."""

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant<|channel|>final<|message|>"
    ),
    "think": ReasoningFormat("<think>", "</think>"),
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""Reasoning formats by name; reasoning_parser "auto" means harmony if the chat template has channels, else
the first of the others whose closing tag is in the template, if any."""


class ChatParsing:
    """Parsers and grammars for a model's answers to chat messages.

    Args:
        tokenizer: the model's tokenizer, of transformers.
        tool_parser: a name of TOOL_FORMATS, "auto" or "none".
        reasoning_parser: a name of REASONING_FORMATS, "auto" or "none".
    """

    def __init__(self, tokenizer: Any, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._tokenizer, self._template = tokenizer, (template := _template(tokenizer))
        self.tools = {"auto": _tools_of(template), "none": ""}.get(tool_parser, tool_parser)
        """Name of the tool format; empty: none."""
        self._is_unknown = tool_parser == "auto" and not self.tools
        self.reasoning = {"auto": _reasoning_of(template), "none": ""}.get(reasoning_parser, reasoning_parser)
        markers = set(TOOL_FORMATS[self.tools].markers) if self.tools else set()
        if self.reasoning == "harmony":
            markers |= set(TOOL_FORMATS["harmony"].markers)
        elif self.reasoning:
            found = REASONING_FORMATS[self.reasoning]
            markers |= {found.open_tag, found.close_tag}
        decoder = TokenDecoder.for_tokenizer(tokenizer)
        self.decoder, self._hidden = decoder.showing(markers)
        """Decoder that does not skip the formats' markers. Markers that are special tokens are in `_hidden`.
        They are removed from content, unless a request shows special tokens."""

    @classmethod
    def from_config(cls, tokenizer: Tokenizer | None, config: FrontendConfig) -> ChatParsing | None:
        """Makes the parsers that a model's configuration asks for; None: there is no tokenizer."""
        if tokenizer is None:
            return None
        found = cls(tokenizer.hf, config.tool_parser, config.reasoning_parser)
        logger.info("tool_parser: %s, reasoning_parser: %s", found.tools or "none", found.reasoning or "none")
        return found

    def wants(self, chat: ChatFormat) -> bool:
        """Whether the answer to these chat messages must be parsed."""
        return bool(self.reasoning or (self.tools and chat.tools))

    def answer(self, chat: ChatFormat, *, skip_special_tokens: bool = True) -> Answer:
        """Makes the parser of one choice's answer to these chat messages."""
        hidden = self._hidden if skip_special_tokens else ()
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in chat.tools}
        has_tools = bool(self.tools and schemas)
        sink = AnswerSink(
            schemas if has_tools else (),
            hidden,
            None if chat.parallel_tool_calls else 1,
            short_ids=self.tools == "mistral",
        )
        if "harmony" in (self.tools if has_tools else "", self.reasoning):
            harmony = Harmony(sink, schemas, keeps_reasoning=self.reasoning == "harmony")
            return Answer(sink, harmony, self.decoder)
        machine = TOOL_FORMATS[self.tools].machine(sink, schemas) if has_tools else Plain(sink, {})
        if not self.reasoning:
            return Answer(sink, machine, self.decoder)
        tags = REASONING_FORMATS[self.reasoning]
        both = tags.open_tag, tags.close_tag
        return Answer(sink, ThinkSplitter(sink, machine, both, is_open=self.is_open(chat)), self.decoder)

    def with_thinking(self, params: SamplingParams, chat: ChatFormat | None) -> SamplingParams:
        """Returns `params` with `thinking` set to the tokens of the reasoning tags, for `thinking_budget`.

        Raises:
            InvalidArgumentError: there are no chat messages, or the model has no reasoning format.
        """
        if chat is None or not self.reasoning:
            raise InvalidArgumentError(
                "thinking_budget",
                "needs chat messages, and a model whose reasoning_parser is not none",
            )
        tags = REASONING_FORMATS[self.reasoning]
        texts = tags.open_tag, tags.close_tag, tags.forced or tags.close_tag
        ids = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return msgspec.structs.replace(params, thinking=Thinking(self.is_open(chat), *ids))

    def with_grammar(self, params: SamplingParams, chat: ChatFormat) -> SamplingParams:
        """Returns `params` with the grammar of the answer, where it has one.

        The grammar is that of a response format, of calls, or the one that `params` state. If the model
        reasons, the grammar begins after the reasoning. Exceptions: a stated grammar or response format stays
        unchanged if it has an `after` of its own or if `format_of` cannot convert it, and the grammar of
        optional calls holds from the beginning unless the prompt ends with the opening tag.

        Raises:
            InvalidArgumentError: several grammars at once, a wrong response format, a grammar that is too
                long, or calls that the model cannot write or whose form is not known.
        """
        if chat.tools and self._is_unknown:
            raise InvalidArgumentError(
                "messages",
                "tools: the chat template does not show how the model writes calls; set tool_parser to one "
                f"of {', '.join(TOOL_FORMATS)}, or to none, which leaves calls in the text",
            )
        stated = params.structured_output
        if chat.response_format is not None and (
            found := parse_structured_output("response_format", chat.response_format)
        ):
            if stated is not None:
                raise InvalidArgumentError("messages", "response_format must not be given beside a grammar")
            stated = found
        is_forced = chat.tool_choice != "auto"
        if is_forced and stated is not None:
            raise InvalidArgumentError("messages", "tool_choice must not force calls beside a grammar")
        if is_forced and not self.tools:
            raise InvalidArgumentError("messages", "tool_choice needs a model whose tool_parser is not none")
        if stated is not None:
            grammar: StructuredOutput | None = self._behind_reasoning(stated, chat)
        elif chat.tools and self.tools:
            grammar = self._of_calls(chat, is_search=params.beam_width > 1)
        else:
            return params
        if grammar is not None and len(grammar.structural_tag) > MAX_GRAMMAR_LENGTH:
            raise InvalidArgumentError(
                "messages", f"the grammar of the answer is limited to {MAX_GRAMMAR_LENGTH} characters"
            )
        return msgspec.structs.replace(params, structured_output=grammar)

    def _of_calls(self, chat: ChatFormat, *, is_search: bool) -> StructuredOutput | None:
        """Returns the grammar for required calls or, if calls are optional, for any call that begins.

        None for optional calls if the format has no trigger, in a beam search, or if the grammar is too long.
        """
        form = call_form(self.tools, self._template)
        named = chat.tool_choice.removeprefix("function:") if chat.tool_choice.startswith("function:") else ""
        tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in chat.tools}
        if chat.tool_choice != "auto":
            wanted = {
                name: {"type": "object", **one} for name, one in tools.items() if not named or name == named
            }
            several = chat.parallel_tool_calls and not named
            return self._in_place(form.forced(wanted, is_parallel=several), chat)
        if not form.trigger or is_search:
            return None
        any_object: dict[str, Any] = {"type": "object"}
        begun = form.begun({name: one if form.arguments else any_object for name, one in tools.items()})
        grammar = structural_tag(begun, self._after(chat))
        return grammar if len(grammar.structural_tag) <= MAX_GRAMMAR_LENGTH else None

    def _behind_reasoning(self, stated: StructuredOutput, chat: ChatFormat) -> StructuredOutput:
        form = format_of(stated)
        if stated.after or form is None:
            return stated
        if self.reasoning == "harmony":
            return self._in_place(sequence(text("<|channel|>final<|message|>"), form), chat)
        return self._in_place(form, chat) if self.reasoning else stated

    def _in_place(self, form: Format, chat: ChatFormat) -> StructuredOutput:
        """Returns the structural tag of `form`. If the model reasons, `form` stands after the reasoning."""
        tags = REASONING_FORMATS.get(self.reasoning)
        if tags is None or chat.prompt_end.rstrip().endswith(tags.close_tag):
            return structural_tag(form)
        if self.is_open(chat):
            return structural_tag(form, tags.close_tag)
        behind = "<|start|>assistant" if self.reasoning == "harmony" else ""
        return structural_tag(sequence(maybe_thought(tags.open_tag, tags.close_tag, behind), form))

    def _after(self, chat: ChatFormat) -> str:
        return REASONING_FORMATS[self.reasoning].close_tag if self.is_open(chat) else ""

    def is_open(self, chat: ChatFormat) -> bool:
        """Whether the prompt ends, white space aside, with the tag that opens reasoning."""
        tag = REASONING_FORMATS[self.reasoning].open_tag if self.reasoning else ""
        return bool(tag) and chat.prompt_end.rstrip().endswith(tag)


def prepare_answer(
    parsing: ChatParsing | None,
    params: SamplingParams,
    chat: ChatFormat | None,
    check: Callable[[StructuredOutput], object],
) -> tuple[SamplingParams, Callable[[], Answer] | None]:
    """Prepares the generation and parsing of a request's answer.

    Args:
        parsing: the model's parsers; None: the model has no tokenizer.
        chat: format of the answer to chat messages; None: there is none.
        check: raises InvalidArgumentError for a grammar that cannot be followed, and UnavailableError if
            grammars cannot be checked.

    Returns:
        `params` with the answer's grammar and the tags of a thinking budget; and a function that makes the
        parser of a choice's answer, None if the text is not parsed. A grammar that the client did not ask for
        is left out if `check` refuses it.

    Raises:
        InvalidArgumentError: what the request asks for is wrong, or the model cannot do it, or `check`
            refuses the client's grammar; names the field.
        UnavailableError: of `check`.
    """
    if parsing is None and params.thinking_budget is not None:
        raise InvalidArgumentError("thinking_budget", "needs a tokenizer, and this checkpoint has none")
    is_own = params.structured_output is None and chat is not None and not chat.asks_for_grammar
    if parsing is not None and chat is not None:
        params = parsing.with_grammar(params, chat)
    if parsing is not None and params.thinking_budget is not None:
        params = parsing.with_thinking(params, chat)
    if params.structured_output is not None:
        try:
            check(params.structured_output)
        except InvalidArgumentError:
            if not is_own:
                raise
            params = msgspec.structs.replace(params, structured_output=None)  # nobody asked for it
    if parsing is None or chat is None or not parsing.wants(chat):
        return params, None
    return params, partial(parsing.answer, chat, skip_special_tokens=params.skip_special_tokens)


class Answer:
    """Parses one choice's answer into content, reasoning and calls.

    Args:
        sink: collects what `parser` finds.
        parser: parser of the answer's whole text.
        decoder: decodes the answer's tokens.
    """

    __slots__ = ("_parser", "_sink", "decoder", "num_reasoning_tokens")

    def __init__(self, sink: AnswerSink, parser: AnswerParser, decoder: TokenDecoder) -> None:
        self._sink, self._parser, self.decoder = sink, parser, decoder
        self.num_reasoning_tokens = 0
        """Number of reasoning tokens so far, with those of the closing tag and without those of the opening
        tag. `OutputProcessor` counts them."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the answer must be fed token by token, so that its reasoning tokens can be counted."""
        parser = self._parser
        return isinstance(parser, Harmony) or (isinstance(parser, ThinkSplitter) and not parser.is_over)

    @property
    def is_reasoning(self) -> bool:
        """Whether the parser, after the text so far, is within reasoning."""
        parser = self._parser
        return isinstance(parser, Harmony | ThinkSplitter) and parser.is_reasoning

    @property
    def is_empty(self) -> bool:
        """Whether no content, reasoning or calls are waiting to be popped."""
        return self._sink.is_empty

    @property
    def has_all_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self._sink.has_all_calls

    def feed(self, text: str) -> None:
        """Parses the next piece of the answer's text, which `decoder` has decoded."""
        if text:
            self._parser.feed(text)

    def finish(self) -> None:
        """Ends the text, and parses what was held back."""
        self._parser.finish()
        self._sink.finish()

    def pop_deltas(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns content, reasoning and calls (OpenAI's deltas) found since the last call of this method."""
        return self._sink.pop_deltas()


def _template(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else str(template)


def _tools_of(template: str) -> str:
    found = (name for name, one in TOOL_FORMATS.items() if any(sign in template for sign in one.signs))
    return next(found, "")


def _reasoning_of(template: str) -> str:
    if "<|channel|>" in template:
        return "harmony"
    found = (name for name, one in REASONING_FORMATS.items() if one.close_tag in template)
    return next((name for name in found if name != "harmony"), "")
