"""Bounds on the text, time and memory of chat templates. A template is a program of the checkpoint that runs
on data of clients.

Text: a template may write each tool once per message, and `tojson(indent=4)` puts every value of deep JSON on
a line of its own behind hundreds of spaces. So rendering ends as soon as there is more text than allowed.
Time: each turn of a loop and each call of a macro looks at the clock. Memory: Jinja's sandbox bounds `range`,
and this module bounds the results of the operators +, *, ** and ~. Results of methods, of most filters and of
the operator % are not bounded; `limited_memory` limits them while a template is tried.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire_common.errors import InputError

MAX_S = 5.0
"""Seconds of CPU time after which a rendering is ended, when it looks at the clock the next time."""
MAX_MADE = 2**24
"""Most characters, entries or bits of what one operator +, * or ** makes, as `_num_made` estimates them."""
MAX_MEMORY = 2**31
"""Most bytes by which a process's address space may grow in `limited_memory`."""


class _Bounds(NamedTuple):
    field: str
    """Name of the input field in errors."""
    max_characters: int
    end: float
    """Value of the thread's CPU clock at which the time limit is reached, in seconds."""


_NONE = _Bounds("", sys.maxsize, math.inf)
_bounds: ContextVar[_Bounds] = ContextVar("bounds", default=_NONE)
"""Bounds of the current rendering. Outside `bounded` they allow any text and time."""


@contextmanager
def bounded(field: str, max_characters: int) -> Iterator[None]:
    """Context manager that bounds transformers' renderer. The renderer raises InputError of `field` if a
    template writes more than `max_characters`, in all or as one piece (such as a JSON text); TimeoutError
    after MAX_S; and MemoryError if +, * or ** makes more than MAX_MADE."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment  # type: ignore[misc]
    token = _bounds.set(_Bounds(field, max_characters, time.thread_time() + MAX_S))
    try:
        yield
    finally:
        _bounds.reset(token)


@contextmanager
def limited_memory() -> Iterator[None]:
    """Context manager in which this process gets MemoryError if its address space grows by more than
    MAX_MEMORY. The limit applies to all threads, so it is for the time before there are requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
    resource.setrlimit(
        resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard)
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' renderer, with the bounds of `bounded`."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, **options: Any) -> None:
        # What is constant would be computed while a template is compiled.
        super().__init__(**options, optimized=False, finalize=_in_context)
        self.concat = _joined  # type: ignore[method-assign]
        del self.globals["lipsum"]  # makes any amount of text

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        self.filters["tojson"] = _to_json  # in place of the one that transformers puts there
        return super()._generate(_Bounding().visit(source), *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of a binary operator, as SandboxedEnvironment does. Raises MemoryError if
        `_num_made` estimates it at more than MAX_MADE."""
        if _num_made(operator, left, right) > MAX_MADE:
            raise MemoryError(f"{operator} makes more than {MAX_MADE} characters, entries or bits")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concatenated(*parts: Any) -> str:
        """Returns the text that the operator ~ makes of its operands. Raises InputError if it is longer than
        `bounded` allows."""
        return _joined(map(str, parts))

    @staticmethod
    def look_at_clock() -> None:
        """Raises TimeoutError if the CPU time limit of `bounded` has passed."""
        if time.thread_time() > _bounds.get().end:
            raise TimeoutError(f"it takes more than {MAX_S:g} s")


@pass_context
def _in_context(_: Any, value: Any) -> Any:
    """Returns the value. As `finalize` of an environment it asks for a context, so Jinja cannot compute
    constant outputs while it compiles a template."""
    return value


class _Bounding(NodeTransformer):
    """Changes a template: each body of a `for`, `macro`, `call` or `block` begins with a call of
    `look_at_clock`, and `concatenated` replaces the operator ~."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            look = nodes.ExprStmt(_own_call("look_at_clock", []))
            node.body.insert(0, look.set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own_call("concatenated", node.nodes).set_lineno(node.lineno)


def _own_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _num_made(operator: str, left: Any, right: Any) -> int:
    """Estimates, rather too high than too low, how many characters, entries or bits the result of +, * or **
    has."""

    def size(value: Any) -> int:
        if isinstance(value, int):
            return value.bit_length()
        return len(value) if isinstance(value, str | bytes | list | tuple) else 0

    if isinstance(right, int) and (operator == "**" or (operator == "*" and not isinstance(left, int))):
        return size(left) * right
    if operator == "*" and isinstance(left, int) and not isinstance(right, int):
        return left * size(right)
    return size(left) + size(right)


def _joined(pieces: Iterable[str]) -> str:
    field, most, _ = _bounds.get()
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
    """Replaces transformers' `tojson` filter, with the same result. Raises InputError if the result is longer
    than `bounded` allows."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # Without `indent`, the JSON is about as long as what the client sent.
    return _joined([encoder.encode(value)] if indent is None else encoder.iterencode(value))
