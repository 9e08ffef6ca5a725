"""A bound on the text that a chat template makes: a small conversation may become a very long one.

A template may write each tool once per message, and `tojson(indent=4)` puts every value of deep JSON on a
line of its own behind hundreds of spaces. So rendering ends as soon as there is more text than is allowed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from quire_ensemble.errors import InputError

_most: ContextVar[tuple[str, int]] = ContextVar("most", default=("", sys.maxsize))
"""The field to name, and the most characters; other renderings of the same template have no bound."""


@contextmanager
def bounded(template: str, field: str, max_characters: int) -> Iterator[None]:
    """Context in which transformers' renderer raises InputError of `field` where a template writes more.

    Args:
        template: source of the template that will be rendered, in this thread.
        max_characters: of the rendered text, and of each JSON text in it.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment  # one for each template, shared by threads
    environment.concat = _joined
    environment.filters["tojson"] = _to_json
    token = _most.set((field, max_characters))
    try:
        yield
    finally:
        _most.reset(token)


def _joined(pieces: Iterable[str]) -> str:
    field, most = _most.get()
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise InputError(
                field, f"the chat template makes more than {most} bytes of the messages and tools"
            )
        kept.append(piece)
    return "".join(kept)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Does as transformers' filter of this name."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Without lines of its own for each value JSON is no longer than what the client sent, within escapes.
    return _joined([encoder.encode(value)] if indent is None else encoder.iterencode(value))
