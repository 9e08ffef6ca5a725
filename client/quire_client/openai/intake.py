"""Intake: how much of its clients' data the gateway holds, how long it waits for it, and the JSON in it.

Whoever reaches the gateway chooses the length of bodies, their pace and what they hold. All of it is bounded
here, before memory is taken; and what takes long with a large body is done in a thread, since the tokens of
all requests pass through one event loop.
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
"""Bytes of one HTTP request with the images that are fetched for it: room for an image of the largest size
that the server takes, in base64."""
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Bytes of all requests that were not yet passed on to the server, and of the values in their JSON."""
BODY_TIMEOUT = 60.0
"""Seconds a body may take to arrive."""
BODY_GRACE = 5.0
"""Seconds after which a body that is still coming is ended where others need its room."""
MAX_VALUES = 2**19
"""Values in the JSON of one body: a prompt of half a million token ids."""
MAX_DEPTH = 64
"""Lists and objects within each other."""
RETRY_AFTER = 1
"""Seconds, said to those for whom there is no room."""
_VALUE_BYTES = 64
"""Bytes of memory that a small value of JSON counts as."""
_INLINE_BYTES = 2**16
"""Work on so much data takes less time than handing it to a thread."""

P = ParamSpec("P")
T = TypeVar("T")


class Intake:
    """The account of all that is held.

    working: held by who works on much data: text in which one character needs it takes four bytes for each of
        the others too, while it is parsed or written.
    """

    def __init__(self) -> None:
        self.held = 0
        self.working = asyncio.Lock()
        self.coming: dict[Hold, tuple[float, Callable[[], object]]] = {}
        """Bodies that have not arrived, the oldest first: when they began (CLOCK_MONOTONIC seconds), and what
        ends them."""

    def has_room(self, count: int, asking: Hold) -> bool:
        """Whether `count` bytes more can be held; slow bodies of others are ended for it, so that those who
        stall do not shut out the rest."""
        for hold, (began, end) in list(self.coming.items()):
            if self.held + count <= MAX_HELD_BYTES or time.monotonic() - began < BODY_GRACE:
                break
            if hold is not asking:
                hold.close()
                end()
        return self.held + count <= MAX_HELD_BYTES

    def open(self) -> Hold:
        """One request's part of it, to be closed when the request has been passed on."""
        return Hold(self)


class Hold:
    """One request's part of the intake: the bytes that it holds. Leaving it as a context gives them back."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0
        self._received = 0

    def receive(self, count: int) -> None:
        """Takes `count` bytes more that came for the request.

        Raises:
            RequestError: more than one request may bring (413), or than there is room for (503).
        """
        self._received += count
        if self._received > MAX_BODY_BYTES:
            raise RequestError(
                f"the body, with images fetched for it, is longer than {MAX_BODY_BYTES} bytes", status=413
            )
        self._reserve(count)

    def take_values(self, count: int) -> None:
        """Takes the memory of `count` values of JSON.

        Raises:
            RequestError: more than a body may have (400), or than there is room for (503).
        """
        if count > MAX_VALUES:
            raise RequestError(f"the body has more than {MAX_VALUES} values")
        self._reserve(count * _VALUE_BYTES)

    def take_text(self, num_bytes: int) -> None:
        """Takes what the texts of a body have in memory beyond the bytes that came.

        Raises:
            RequestError: more than there is room for (503).
        """
        self._reserve(max(num_bytes - self._received, 0))

    @contextlib.contextmanager
    def coming(self, end: Callable[[], object]) -> Iterator[None]:
        """Context in which the body arrives. `end` is called when its room is given to others."""
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
        """The result of a call that takes the longer, the larger the request is; the event loop goes on."""
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
    """The body of a request.

    Raises:
        RequestError: of another type than JSON (415), too long (413), too slow (408), or no room (503).
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
    """Upper bound of the number of values in a JSON text; commas and brackets in strings count too."""
    return 1 + body.count(b",") + body.count(b"[") + body.count(b"{")


def text_bytes(value: Any) -> int:
    """Bytes of memory of the strings in a value of JSON, beyond the _VALUE_BYTES counted for each value."""
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
    """JSON text in UTF-8; never in one string, all of which would be as wide as its widest character."""
    pieces = json.JSONEncoder(ensure_ascii=False).iterencode(value)
    return b"".join(piece.encode("utf-8", "surrogatepass") for piece in pieces)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

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
    """Lists and objects directly in one."""
    return [
        child
        for child in (node.values() if isinstance(node, dict) else node)
        if isinstance(child, list | dict)
    ]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
