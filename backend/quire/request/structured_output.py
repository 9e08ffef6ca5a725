"""StructuredOutput: the grammar that a request's output must follow, parsed from the forms that clients use.

This module checks only what needs no vocabulary; compiling the grammar finds further errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.converters import boolean, fail, has_surrogates
from quire.errors import InvalidArgumentError
from quire_common.client_json import parse_json
from quire_common.errors import InputError, kind

MAX_GRAMMAR_LENGTH = 2**17
"""Most characters of a grammar, a JSON schema or a structural tag. The last two are measured as ASCII JSON
text without spaces."""
MAX_REGEX_LENGTH = 2**13
MAX_ALTERNATIVES = 2**10
"""Most strings in a `choice`."""
MAX_ALTERNATIVE_LENGTH = 2**12
MAX_ALTERNATIVES_LENGTH = 2**16
"""Most characters of all strings of a `choice` together."""
MAX_AFTER_LENGTH = 2**8

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraint on a request's output, or on the part of it behind `after`; exactly one of KINDS is set.
    Hashable."""

    json: str = ""
    """A JSON schema, as JSON text of an object."""
    json_object: bool = False
    """Whether the constrained text must be a JSON object, of any content."""
    regex: str = ""
    """A regular expression that the whole constrained text must match."""
    choice: tuple[str, ...] = ()
    """Strings, one of which the constrained text must be."""
    grammar: str = ""
    """A context-free grammar in EBNF or Lark's notation."""
    structural_tag: str = ""
    """JSON text of a structural tag, which usually allows free text and, after certain tags in it, parts that
    follow a grammar."""
    after: str = ""
    """Text after whose first occurrence in the output the grammar applies; empty: it applies from the
    start."""

    @property
    def kind(self) -> str:
        """Name of the one field among KINDS that is set."""
        return next(name for name in KINDS if getattr(self, name))


def parse_structured_output(field: str, value: Any) -> StructuredOutput | None:
    """Parses the grammar in a client's value.

    Args:
        field: name of the value, one of FIELDS; it decides how the value is read.
        value: the client's value, not None; or a StructuredOutput, which is checked and returned.

    Returns:
        The grammar; None: the value asks for none (`response_format` for plain text, or a false
        `guided_json_object`).

    Raises:
        InvalidArgumentError: the value is wrong; says in what.
    """
    if isinstance(value, StructuredOutput):
        check_structured_output(value)
        return value
    return FIELDS[field](field, value)


def check_structured_output(value: StructuredOutput) -> None:
    """Raises InvalidArgumentError for a grammar that parsing a client's value cannot give, such as one whose
    JSON text has spaces between its parts."""
    stated = {name: given for name, given in msgspec.structs.asdict(value).items() if given}
    if _build("structured_output", stated) != value:
        raise fail("structured_output", "must hold normalized JSON")


def _object(field: str, value: Any) -> dict[str, Any]:
    """Returns a JSON object that is given as a mapping or as JSON text. Raises InvalidArgumentError if it is
    neither."""
    try:
        found = parse_json(field, value) if isinstance(value, str) else value
    except InputError as error:
        raise fail(field, error.reason) from None
    if not isinstance(found, Mapping):
        raise fail(field, f"must be a JSON object, got {kind(found)}")
    return dict(found)


def _json(field: str, value: Any) -> str:
    """Returns the JSON text, without spaces, of an object given as such or as JSON text. Keys keep their
    order, because the output has a schema's properties in that order. Raises InvalidArgumentError."""
    found = _object(field, value)
    try:
        text = json.dumps(found, separators=(",", ":"))
        parse_json(field, text, max_bytes=MAX_GRAMMAR_LENGTH)
    except InputError as error:
        raise fail(field, error.reason) from None
    except (TypeError, ValueError, RecursionError):
        raise fail(field, "must be a JSON object, got one that has no JSON text") from None
    return text


def _text(most: int) -> Callable[[str, Any], str]:
    def convert(field: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise fail(field, f"must be non-empty text, got {kind(value)}")
        if len(value) > most:
            raise fail(field, f"at most {most} characters are allowed, got {len(value)}")
        if has_surrogates(value):
            raise fail(field, "must not hold unpaired surrogates, which have no UTF-8 form")
        return value

    return convert


def _alternatives(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = parse_json(field, value)
        except InputError as error:
            raise fail(field, error.reason) from None
    if not isinstance(value, list | tuple) or not value:
        raise fail(field, f"must be a list of one string or more, got {kind(value)}")
    if len(value) > MAX_ALTERNATIVES:
        raise fail(field, f"at most {MAX_ALTERNATIVES} strings are allowed, got {len(value)}")
    one = _text(MAX_ALTERNATIVE_LENGTH)
    strings = tuple(one(field, entry) for entry in value)
    total = sum(map(len, strings))
    if total > MAX_ALTERNATIVES_LENGTH:
        raise fail(field, f"at most {MAX_ALTERNATIVES_LENGTH} characters together, got {total}")
    return tuple(dict.fromkeys(strings))


_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "json": _json,
    "json_object": boolean,
    "regex": _text(MAX_REGEX_LENGTH),
    "choice": _alternatives,
    "grammar": _text(MAX_GRAMMAR_LENGTH),
    "structural_tag": _json,
    "after": _text(MAX_AFTER_LENGTH),
}


def _build(field: str, stated: Mapping[str, Any]) -> StructuredOutput:
    """Returns the constraint that a `structured_output` object states. A key that is null counts as not
    given, and so does a false `json_object`."""
    given: dict[str, Any] = {}
    for key, value in stated.items():
        if key not in _KEYS:
            raise fail(field, f"unknown key {key!r:.80}; known are {', '.join(_KEYS)}")
        if value is not None:
            try:
                given[key] = _KEYS[key](key, value)
            except InvalidArgumentError as error:
                raise fail(field, f"{key}: {error.reason}") from None
    kinds = [name for name in KINDS if given.get(name)]
    if len(kinds) != 1:
        found = ", ".join(kinds) if kinds else "none"
        raise fail(field, f"exactly one of {', '.join(KINDS)} must be given, got {found}")
    return StructuredOutput(**given)


def _own(field: str, value: Any) -> StructuredOutput:
    return _build(field, _object(field, value))


def _vllm(field: str, value: Any) -> StructuredOutput:
    """Parses vLLM's object, which may have more keys than ours. They are ignored if their values are empty,
    zero, false or null, and refused otherwise."""
    stated = {key: given for key, given in _object(field, value).items() if given or key in KINDS}
    return _build(field, stated)


def _openai(field: str, value: Any) -> StructuredOutput | None:
    """Parses OpenAI's `response_format`, in which vLLM's type `structural_tag` is allowed too. None: it asks
    for plain text."""
    stated = _object(field, value)
    form = stated.pop("type", None)
    if form == "text":
        return None
    if form == "json_object":
        return StructuredOutput(json_object=True)
    if form == "json_schema":
        inner = stated.get("json_schema")
        if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
            raise fail(field, "json_schema must be an object with an object in schema")
        return _build(field, {"json": inner["schema"]})
    if form == "structural_tag":
        return _build(field, {"structural_tag": stated})
    forms = "text, json_object, json_schema or structural_tag"
    raise fail(field, f"type must be {forms}, got {kind(form)}")


def _guided(key: str) -> Callable[[str, Any], StructuredOutput | None]:
    def convert(field: str, value: Any) -> StructuredOutput | None:
        if key == "json_object" and not boolean(field, value):
            return None
        return StructuredOutput(**{key: _KEYS[key](field, value)})

    return convert


FIELDS: dict[str, Callable[[str, Any], StructuredOutput | None]] = {
    "structured_output": _own,
    "structured_outputs": _vllm,
    "guided_decoding": _vllm,
    "guided_json": _guided("json"),
    "guided_json_object": _guided("json_object"),
    "guided_regex": _guided("regex"),
    "guided_choice": _guided("choice"),
    "guided_grammar": _guided("grammar"),
    "response_format": _openai,
}
"""Parser of each request field that holds a grammar, by name: ours first, then vLLM's, then OpenAI's."""
