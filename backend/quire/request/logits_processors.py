"""Logits processors: an operator's code that runs between the model's logits and the sampler, by name.

The configuration key `logits_processors` maps names to "file.py:Class" or "package.module:Class". In Triton
a file is relative to the model's version directory, and inside it. A request can only name entries of that
mapping, and may pass arguments to them.

Such a class is a `LogitsProcessor`. Its objects are made and called on the thread that computes steps, so all
requests wait meanwhile. An `Exception` of an object ends only the request that the object belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from quire.converters import fail, has_surrogates
from quire.errors import EngineError, InvalidArgumentError, describe
from quire.named_code import load_class
from quire_common.client_json import parse_json
from quire_common.errors import InputError, kind

if TYPE_CHECKING:
    import torch

MAX_PROCESSORS = 8
MAX_NAME = 128
MAX_ARGS = 16 * 1024
"""Most characters of one processor's arguments, as JSON."""


class LogitsProcessor(Protocol):
    """Interface of logits processors, which operators write. One is constructed as `Class(**args)` for each
    sequence of a request, and a new one whenever the runner gets the sequence again, as after a preemption.
    So its effect must depend only on its arguments and `token_ids`."""

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Changes the logits of the next token in place, before penalties, bias, bans and filters.

        Args:
            token_ids: prompt and output so far; must not be changed.
            logits: float32 [vocab_size], on the model's device. -inf bans a token; if no finite entry is
                left, the request ends with an error.
        """


class NamedProcessor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A logits processor that a request asks for."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    args: Annotated[str, Meta(max_length=MAX_ARGS)] = "{}"
    """Keyword arguments, as the text of a JSON object."""


def parse_logits_processors(field: str, value: Any) -> tuple[NamedProcessor, ...]:
    """Parses a list of names or of {"name": ..., "args": {...}}, or its JSON text.

    Raises:
        InvalidArgumentError: it is not such a list, or the list or an entry is too long.
    """
    if isinstance(value, str):
        try:
            value = parse_json(field, value)
        except InputError as error:
            raise fail(field, error.reason) from None
    if not isinstance(value, list | tuple):
        raise fail(field, f'must be a list of names or of {{"name", "args"}}, got {kind(value)}')
    if len(value) > MAX_PROCESSORS:
        raise fail(field, f"at most {MAX_PROCESSORS} entries are allowed, got {len(value)}")
    return tuple(_parse_entry(field, entry) for entry in value)


def _parse_entry(field: str, entry: Any) -> NamedProcessor:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, dict) or not entry.keys() <= {"name", "args"} or "name" not in entry:
        raise fail(field, f'entries must be a name or an object of "name" and "args", got {kind(entry)}')
    name, args = entry["name"], entry.get("args", {})
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or has_surrogates(name):
        raise fail(field, f"a name must be a string of 1 to {MAX_NAME} characters with a UTF-8 form")
    if not isinstance(args, dict):
        raise fail(field, f'"args" must be an object, got {kind(args)}')
    text = json.dumps(args)
    if len(text) > MAX_ARGS:
        raise fail(field, f'"args" are limited to {MAX_ARGS} characters of JSON, got {len(text)}')
    return NamedProcessor(name, text)


def load_logits_processors(entries: Mapping[str, str]) -> dict[str, Callable[..., LogitsProcessor]]:
    """Imports and returns the classes of the configuration key `logits_processors`, by name.

    Raises:
        ConfigError: one cannot be imported; names it and says why.
    """
    return {name: load_class(f"logits_processors: {name!r:.80}", where) for name, where in entries.items()}


class RowProcessors:
    """Runs the processors of one sequence.

    Args:
        classes: all classes that the configuration lists.
        named: the processors that the request asks for, in order.
    """

    __slots__ = ("_calls", "error", "error_code")

    def __init__(
        self, classes: Mapping[str, Callable[..., LogitsProcessor]], named: Sequence[NamedProcessor]
    ) -> None:
        self._calls: list[tuple[str, LogitsProcessor]] = []
        self.error = ""
        """Error for which the request must end; empty: none."""
        self.error_code = EngineError.code
        for one in named:
            try:
                self._calls.append((one.name, classes[one.name](**json.loads(one.args))))
            except Exception as error:
                self.error = f"logits_processors: {one.name} does not take these args: {describe(error)}"
                self.error_code = InvalidArgumentError.code
                return

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Calls the processors in order. An exception is stored in `error` and ends the calls, also those of
        later tokens."""
        for name, call in () if self.error else self._calls:
            try:
                call(token_ids, logits)
            except Exception as error:
                self.error = f"logits_processors: {name} failed: {describe(error)}"
                return
