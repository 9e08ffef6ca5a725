"""Intake: bounds how much client data the gateway holds and how long it waits for it, and parses the JSON.

Any client chooses the length, pace and content of its bodies. This module has bounds for all three.
`Hold.work` runs slow work for a large body in a thread, because one event loop carries the tokens of all
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar

from starlette.requests import Request

from quire_client.openai.errors import RequestError

MAX_BODY_BYTES = 32 * 2**20
"""Most bytes of one request's body, together with the images fetched for it, in base64. One image of the
server's default limit fits."""
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Most bytes that all holds together may account for at a time: bodies, fetched images, and estimates for the
values of the JSON."""
BODY_TIMEOUT = 60.0
"""Seconds a body may take to arrive."""
BODY_GRACE = 5.0
"""Seconds after which a body that is still arriving may be cut off to make room for others."""
MAX_VALUES = 2**19
"""Most values in the JSON of one body, as `count_values` counts them: enough for a prompt of half a million
token ids."""
MAX_DEPTH = 64
"""Most levels of nested lists and objects in the JSON of a body; the outermost object is one."""
RETRY_AFTER = 1
"""Seconds in Retry-After when there is no room for a request."""
_VALUE_BYTES = 64
"""Bytes that each value of JSON counts for; `Hold.take_text` may add more for long texts."""
_INLINE_BYTES = 2**16
"""Most bytes of a request whose `Hold.work` runs in the event loop, because a thread would take longer."""

P = ParamSpec("P")
T = TypeVar("T")


class Intake:
    """Accounts for the client data that the gateway holds, in a `Hold` for each body.

    working: lock for the `Hold.work` of large requests, such as parsing, so that one at a time takes the
        memory for it. If one character of a text needs four bytes, Python stores all of them in four.
    """

    def __init__(self) -> None:
        self.held = 0
        self.working = asyncio.Lock()
        self.coming: dict[Hold, tuple[float, Callable[[], object]]] = {}
        """Bodies that are still arriving, oldest first: start time (CLOCK_MONOTONIC seconds), and a function
        that cuts the body off."""

    def has_room(self, count: int, asking: Hold) -> bool:
        """Returns whether `count` more bytes can be held. To make room, it cuts off slow bodies of other
        requests, so that stalling clients do not shut out the rest."""
        for hold, (began, end) in list(self.coming.items()):
            if self.held + count <= MAX_HELD_BYTES or time.monotonic() - began < BODY_GRACE:
                break
            if hold is not asking:
                hold.close()
                end()
        return self.held + count <= MAX_HELD_BYTES

    def open(self) -> Hold:
        """Opens a hold for one request; close it when the request has been passed on to the server."""
        return Hold(self)


class Hold:
    """The bytes of the intake that one request holds. As a context manager it releases them on exit."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0
        self._received = 0

    def receive(self, count: int) -> None:
        """Adds `count` bytes that arrived for the request.

        Raises:
            RequestError: the request is too long (413), or there is no room (503).
        """
        self._received += count
        if self._received > MAX_BODY_BYTES:
            raise RequestError(
                f"the body, with images fetched for it, is longer than {MAX_BODY_BYTES} bytes", status=413
            )
        self._reserve(count)

    def take_values(self, count: int) -> None:
        """Adds the memory of `count` values of JSON.

        Raises:
            RequestError: a body may not have so many values (400), or there is no room (503).
        """
        if count > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} values")
        self._reserve(count * _VALUE_BYTES)

    def take_text(self, num_bytes: int) -> None:
        """Adds the part of `num_bytes`, the memory of a body's texts, that exceeds the bytes received. These
        are already counted.

        Raises:
            RequestError: there is no room (503).
        """
        self._reserve(max(num_bytes - self._received, 0))

    @contextlib.contextmanager
    def coming(self, end: Callable[[], object]) -> Iterator[None]:
        """Context manager for the time in which the body arrives. `end` is called if the body is cut off."""
        self._intake.coming[self] = time.monotonic(), end
        try:
            yield
        finally:
            self._intake.coming.pop(self, None)

    def _reserve(self, count: int) -> None:
        if not self._intake.has_room(count, self):
            raise RequestError(
                "the gateway has no room for the request now", status=503, retry_after=RETRY_AFTER
            )
        self._intake.held += count
        self._held += count

    async def work(self, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T:
        """Runs a function and returns its result; in a thread if the request is large."""
        if self._received <= _INLINE_BYTES:
            return function(*args, **named)
        async with self._intake.working:
            return await asyncio.to_thread(function, *args, **named)

    def close(self) -> None:
        self._intake.coming.pop(self, None)
        self._intake.held -= self._held
        self._held = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def read_body(request: Request, hold: Hold) -> bytes:
    """Reads and returns the body of a request.

    Raises:
        RequestError: the Content-Type is not JSON (415), the body is too long (413) or too slow (408), or
            there is no room for it (503).
        ClientDisconnect: the client left before the body's end.
    """
    # Browsers send other types to any address without asking it first, so that every page could post here.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("Content-Type: must be application/json", status=415)

    async def read() -> bytes:
        body = bytearray()
        async for piece in request.stream():
            hold.receive(len(piece))
            body += piece
        return bytes(body)

    reading = asyncio.ensure_future(read())
    ended: list[bool] = []
    try:
        with hold.coming(lambda: ended.append(reading.cancel())):
            return await asyncio.wait_for(reading, BODY_TIMEOUT)
    except (asyncio.TimeoutError, TimeoutError):
        raise RequestError(f"the body did not come within {BODY_TIMEOUT:g} s", status=408) from None
    except asyncio.CancelledError:
        if not ended:
            raise
        raise RequestError(
            f"the body did not come within {BODY_GRACE:g} s, and others needed its room", status=408
        ) from None


def count_values(body: bytes) -> int:
    """Returns an upper bound of the number of values in a JSON text; it counts commas and brackets in
    strings, too."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def text_bytes(value: Any) -> int:
    """Returns the sum of the bytes of memory by which strings in a JSON value, keys included, each exceed
    `_VALUE_BYTES`."""
    total, nodes = 0, [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, str):
            total += max(sys.getsizeof(node) - _VALUE_BYTES, 0)
        elif isinstance(node, dict):
            nodes += [*node, *node.values()]
        elif isinstance(node, list):
            nodes += node
    return total


def write_json(value: Any) -> bytes:
    """Returns a value as JSON in UTF-8, except that lone surrogates stay. The JSON is written in pieces,
    because one `str` of the whole would store every character as wide as the widest."""
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    return b"".join(piece.encode("utf-8", "surrogatepass") for piece in pieces)


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a request's body.

    Raises:
        RequestError: invalid UTF-8 or JSON, not an object, or nested more than MAX_DEPTH deep.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise RequestError(f"the body is nested too deeply, at most {MAX_DEPTH} levels are allowed") from None
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise RequestError(f"the body is nested too deeply, at most {MAX_DEPTH} levels are allowed")


def _children(node: Any) -> list[Any]:
    """Returns the lists and objects directly inside a list or an object."""
    return [
        child
        for child in (node.values() if isinstance(node, dict) else node)
        if isinstance(child, list | dict)
    ]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
