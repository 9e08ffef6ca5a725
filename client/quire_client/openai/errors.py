"""Failures as OpenAI error objects with their HTTP status."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireClientError,
    Unavailable,
)

_STATUS: tuple[tuple[type[QuireClientError], int], ...] = (
    (InvalidArgument, 400),
    (NotFound, 404),
    (Unavailable, 503),
    (DeadlineExceeded, 504),
)
MAX_MESSAGE = 2000
"""Most characters of an error object's `message` and of its `param`. Uncut, both may repeat any part of a
request."""
_FIELD = re.compile(r"([a-z_][a-z0-9_.\[\]]*): ")


@dataclass(eq=False)
class RequestError(Exception):
    """An HTTP request that this gateway itself refuses."""

    message: str
    param: str | None = None
    """Path in the request's body of the value that the error is about; None if it is not about one."""
    status: int = 400
    retry_after: int | None = None
    """Seconds after which another attempt has a chance; None: not known."""
    code: str | None = None
    """Value of `code` in the error object."""


def error_object(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the body of an error answer. `message` and `param` are cut to MAX_MESSAGE characters, and their
    lone surrogates, which have no UTF-8 form, are replaced."""
    message, param = _text(message), None if param is None else _text(param)
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _text(text: str) -> str:
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode("utf-8")


def describe(error: QuireClientError | RequestError) -> tuple[int, dict[str, Any]]:
    """Returns the HTTP status and the body for a failure."""
    if isinstance(error, RequestError):
        body = error_object(error.message, error.status, param=error.param, code=error.code)
        return error.status, body
    if retry_after(error) is not None:
        return 429, error_object(error.message, 429, code="rate_limit_exceeded")
    status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
    field = _FIELD.match(error.message) if status == 400 else None
    param = field[1] if field else None
    code = error.code.lower()
    if status == 404:
        param, code = "model", "model_not_found"
    return status, error_object(error.message, status, param=param, code=code)


@contextlib.contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Context manager for InvalidArgument errors. If a message begins with the server's name of a field, the
    name becomes the one that the HTTP client used.

    Args:
        names: the HTTP client's names by the server's.
    """
    try:
        yield
    except InvalidArgument as error:
        found = _FIELD.match(error.message)
        ours = re.match(r"\w+", error.message)
        if found and ours and ours[0] in names:
            error.message = names[ours[0]] + error.message[ours.end() :]
        raise


def retry_after(error: QuireClientError | RequestError) -> int | None:
    """Returns whole seconds for the header Retry-After; None if it is not known when to try again."""
    seconds = error.retry_after if isinstance(error, Unavailable | RequestError) else None
    return None if seconds is None else max(1, math.ceil(seconds))
