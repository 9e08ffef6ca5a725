"""Vocabulary: compiles a StructuredOutput with llguidance, for a model's tokens.

llguidance is imported with the first vocabulary, so processes without one need not load it. Compilation is
lazy (a parser and automata that grow with the tokens) and bounded by LIMITS, with a known exception: an
intersection of k regular expressions takes 2**k time and memory. So the Triton frontend first has a client's
grammar compiled in a process that may be killed (`frontend/grammar_checker.py`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import InvalidArgumentError
from quire.json_schema import for_llguidance
from quire.request.structured_output import StructuredOutput
from quire_common.errors import kind, one_line
from quire_ensemble.tokenizer import tokenizer_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
"""Limits of a grammar, in llguidance's units (its LLParserLimits). The lexer fuel of a step is spent in
some 7 ms. All lexer states together take some 100 MB at most."""
SLICES = ("[a-z]{1,10}", "[a-z ]{1,10}")
"""Regular expressions of tokens that llguidance judges together if a lexeme may continue with any of them.
They supplement its default, which suits JSON strings: a bounded repetition of letters has a new state, and so
a new mask, with each token."""
MAX_TAG_DEPTH = 16
"""Most levels of formats inside the outermost format of a structural tag. A list of tags and its tags are
one level."""
_WHITESPACE = r"[ \n\t]{0,64}"
"""Whitespace between the tokens of JSON; without a bound a model may generate it for ever."""
_HEADER = "%llguidance {}\n"
_TEXT = "TEXT: /(.|\\n)*/\n"


def _refuse(reason: str) -> InvalidArgumentError:
    return InvalidArgumentError("structured_output", reason)


class Vocabulary:
    """The tokens of a model for grammars.

    Args:
        directory: the tokenizer's directory, whose tokenizer.json is read, or a .gguf file.
        vocab_size: number of the model's logits.
        eos_token_ids: ids of the tokens that end the model's sequences; empty: the tokenizer's own is used.

    Raises:
        InvalidArgumentError: the tokenizer cannot be read, or llguidance cannot use it.
    """

    def __init__(self, directory: str | Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        from llguidance import LLTokenizer

        try:
            text = tokenizer_json(Path(directory))
            self.tokenizer: LLTokenizer = LLTokenizer(
                text, eos_token=sorted(eos_token_ids) or None, slices=[*SLICES, *LLTokenizer.general_slices()]
            )
        except OSError:
            raise _refuse("needs a tokenizer.json, and this checkpoint has none") from None
        except Exception as error:  # of Rust, which has one class
            raise _refuse(f"the tokenizer cannot be used with grammars: {one_line(error)}") from None
        self.num_tokens = min(vocab_size, self.tokenizer.vocab_size)
        """Number of tokens, from id 0 on, that may be allowed."""
        self.eos_token_ids = eos_token_ids

    @functools.cached_property
    def special(self) -> dict[str, int]:
        """Returns the ids of special tokens by their text, without those that end a text."""
        tokenizer = self.tokenizer
        found = {}
        for token_id in range(self.num_tokens):
            if tokenizer.is_special_token(token_id) and token_id not in tokenizer.eos_tokens:
                found[tokenizer.decode_str([token_id])] = token_id
        found.pop("", None)  # a byte that no text has
        return found

    @functools.cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def literal(self, text: str) -> str:
        """Returns a text in Lark's notation. Special tokens in it become token ids, except those that end a
        text: they are text like the rest."""
        parts = [text] if self._special_pattern is None else self._special_pattern.split(text)
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else quoted(part) for part in parts if part
        )

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """Returns a new matcher, before the first token.

        Raises:
            InvalidArgumentError: names what is wrong in the grammar, or not supported.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]
        matcher = LLMatcher(self.tokenizer, grammar_text(structured, self), log_level=0, limits=limits)
        if matcher.is_error():
            raise _refuse(reason_of(matcher))
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Returns, on one line, why a matcher has failed."""
    if "coerce_one_of" in matcher.get_error():
        return "oneOf: its schemas are not known to exclude each other; anyOf allows any of them"
    return " ".join(matcher.get_error().split("<backtrace>")[0].split())[:300]


def quoted(text: str) -> str:
    """Returns a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def grammar_text(structured: StructuredOutput, vocabulary: Vocabulary) -> str:
    """Returns the grammar in llguidance's notation."""
    grammars = [{"name": "inner", **_inner(structured, vocabulary)}]
    if structured.after:
        grammars.insert(0, {"name": "outer", "lark_grammar": _outer(structured.after, vocabulary)})
    return json.dumps({"grammars": grammars})


def _outer(after: str, vocabulary: Vocabulary) -> str:
    """Returns a grammar of any text and special tokens up to the first `after`, followed by the request's own
    grammar.

    A lazy lexeme ends as soon as it can, so `end` ends with the first `after`. A token that extends past
    `after` is allowed if the grammar can begin with the rest.

    Raises:
        InvalidArgumentError: `after` contains a special token and other text.
    """
    token_id = vocabulary.special.get(after)
    if token_id is None and any(text in after for text in vocabulary.special):
        raise _refuse("after: must be one special token, or a text without any")
    others = ",".join(str(one) for one in sorted(vocabulary.special.values()) if one != token_id)
    skipped = f"(TEXT <[{others}]>)* " if others else ""
    if token_id is not None:
        return f"{_HEADER}start: {skipped}TEXT <[{token_id}]> @inner\n{_TEXT}"
    return f"{_HEADER}start: {skipped}end @inner\nend[lazy]: TEXT {quoted(after)}\n{_TEXT}"


def _inner(structured: StructuredOutput, vocabulary: Vocabulary) -> dict[str, Any]:
    match structured.kind:
        case "json":
            return {"json_schema": _schema(json.loads(structured.json))}
        case "json_object":
            return {"json_schema": _schema({"type": "object"})}
        case "regex":
            return {"lark_grammar": f"{_HEADER}start: {_regex(structured.regex)}\n"}
        case "choice":
            return {"lark_grammar": f"{_HEADER}start: {' | '.join(map(quoted, structured.choice))}\n"}
        case "grammar":
            return {"lark_grammar": _lark(structured.grammar)}
        case _:
            return {"lark_grammar": _StructuralTag(vocabulary).lark(json.loads(structured.structural_tag))}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema as `for_llguidance` rewrites it, with our llguidance options in place of the
    client's."""
    return {**for_llguidance(schema), "x-guidance": {"whitespace_pattern": _WHITESPACE}}


def _regex(pattern: str) -> str:
    """Returns a Lark regular expression: the pattern between slashes, with slashes and newlines escaped. The
    whole text must match it, so anchors at its ends change nothing."""
    return "/" + re.sub(r"\\.|[/\n]", _escaped, pattern, flags=re.DOTALL) + "/"


def _escaped(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])


def _lark(text: str) -> str:
    """Returns a grammar in Lark's notation. One with `::=` is EBNF (GBNF) and is converted; others are
    returned unchanged. Raises InvalidArgumentError if the EBNF cannot be read."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the parser raises whatever a text makes it raise
        raise _refuse(f"grammar: cannot be read as EBNF: {one_line(error)}") from None


class _StructuralTag:
    """Converts a structural tag to Lark: vLLM's `structures` and `triggers`, or xgrammar's `format`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._rules: list[str] = []

    def lark(self, stated: Mapping[str, Any]) -> str:
        stated = {key: value for key, value in stated.items() if key != "type"}
        if set(stated) == {"format"}:
            start = self._format(stated["format"], 0)
        elif set(stated) == {"structures", "triggers"}:
            tags = [
                {**one, "content": {"type": "json_schema", "json_schema": one.get("schema")}}
                for one in _objects("structures", stated["structures"])
            ]
            start = self._triggered({"tags": tags, "triggers": stated["triggers"]}, 0)
        else:
            raise _refuse("structural_tag: must have format, or structures and triggers")
        return "\n".join([f"{_HEADER}start: {start}", *self._rules, _TEXT])

    def _rule(self, body: str, attribute: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _format(self, value: Any, depth: int) -> str:
        """Returns an expression for a format, to stand in a rule."""
        if depth > MAX_TAG_DEPTH:
            raise _refuse(f"structural_tag: at most {MAX_TAG_DEPTH} formats within each other are allowed")
        stated = _object("format", value)
        match stated.get("type"):
            case "const_string":
                return self._literal("value", stated.get("value")) or '""'
            case "json_schema":
                schema = _schema(_object("json_schema", stated.get("json_schema")))
                return f"%json {json.dumps(schema)}"
            case "regex":
                return self._rule(_regex(_text("pattern", stated.get("pattern"))))
            case "any_text":
                return "TEXT"
            case "sequence":
                parts = _objects("elements", stated.get("elements"))
                return " ".join(self._format(part, depth + 1) for part in parts)
            case "or":
                parts = _objects("elements", stated.get("elements"))
                return self._rule(" | ".join(self._format(part, depth + 1) for part in parts))
            case "tag":
                return self._tag(stated, "", depth)
            case "triggered_tags":
                return self._triggered(stated, depth)
            case "tags_with_separator":
                return self._separated(stated, depth)
        known = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, "
        raise _refuse(
            f"structural_tag: type must be {known}tags_with_separator, got {kind(stated.get('type'))}"
        )

    def _tag(self, stated: Mapping[str, Any], trigger: str, depth: int) -> str:
        """Adds a rule for a tag without its initial `trigger`; returns the rule's name."""
        begin = _text("begin", stated.get("begin"))[len(trigger) :]
        content, end = stated.get("content"), _text("end", stated.get("end"))
        parts = [self._literal("begin", begin)]
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            if self._vocabulary.special.get(end) is None:
                parts.append(self._rule(f"TEXT {quoted(end)}", "[lazy]"))  # text that ends with its first end
            else:
                parts += ["TEXT", self._literal("end", end)]
        else:
            parts += [self._format(content, depth + 1), self._literal("end", end)]
        return self._rule(" ".join(filter(None, parts)))

    def _triggered(self, stated: Mapping[str, Any], depth: int) -> str:
        """Returns an expression for free text in which each trigger must begin one of the tags that start
        with it."""
        tags = _objects("tags", stated.get("tags"))
        triggers = stated.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise _refuse("structural_tag: triggers must be a list of texts")
        calls = []
        for trigger in dict.fromkeys(_text("trigger", one) for one in triggers):
            if not trigger:
                raise _refuse("structural_tag: a trigger must not be empty")
            mine = [tag for tag in tags if _text("begin", tag.get("begin")).startswith(trigger)]
            if not mine:
                raise _refuse(f"structural_tag: no tag begins with the trigger {trigger[:80]!r}")
            if (token_id := self._vocabulary.special.get(trigger)) is not None:
                head = f"TEXT <[{token_id}]>"
            else:
                head = self._rule(f"TEXT {quoted(trigger)}", "[lazy]")
            bodies = self._rule(" | ".join(self._tag(tag, trigger, depth) for tag in mine))
            calls.append(f"{head} {bodies}")
        begins = tuple(set(map(str, triggers)))
        if not all(_text("begin", tag.get("begin")).startswith(begins) for tag in tags):
            raise _refuse("structural_tag: each tag must begin with one of the triggers")
        call = self._rule(" | ".join(calls))
        if stated.get("stop_after_first"):
            return call if stated.get("at_least_one") else self._rule(f"{call} | TEXT")
        return f"{call} {call}* TEXT" if stated.get("at_least_one") else f"{call}* TEXT"

    def _separated(self, stated: Mapping[str, Any], depth: int) -> str:
        """Returns an expression for a sequence of tags with a text between each two."""
        tags = _objects("tags", stated.get("tags"))
        one = self._rule(" | ".join(self._tag(tag, "", depth) for tag in tags))
        between = self._literal("separator", stated.get("separator"))
        several = one if stated.get("stop_after_first") else f"{one} ({between} {one})*"
        return several if stated.get("at_least_one") else f"({several})?"

    def _literal(self, name: str, value: Any) -> str:
        return self._vocabulary.literal(_text(name, value))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(f"structural_tag: {name} must be text, got {kind(value)}")
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(f"structural_tag: {name} must be an object, got {kind(value)}")
    return value


def _objects(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _refuse(f"structural_tag: {name} must be a list of one object or more, got {kind(value)}")
    return [_object(name, one) for one in value]
