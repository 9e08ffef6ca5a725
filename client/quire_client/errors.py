"""Exceptions of the client, one for each kind of failure a caller may want to tell apart.

`code` is the name of the gRPC status (`INVALID_ARGUMENT`, `UNAVAILABLE` ...), so that a caller who does not
care for classes can switch on it.
"""

from __future__ import annotations

import re

import grpc

_RETRY_AFTER = re.compile(r"retry after (\d+(?:\.\d+)?) s")


class QuireClientError(Exception):
    """Base of the errors that the client raises about a request or a server."""

    code = "UNKNOWN"

    def __init__(self, message: str, *, code: str | None = None, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        if code is not None:
            self.code = code


class InvalidArgument(QuireClientError):
    """A request or an argument is wrong; the message says what, mostly as `field: limit`."""

    code = "INVALID_ARGUMENT"


class NotFound(QuireClientError):
    """Something that a call names is not there: a model, an adapter to unload or a request to cancel."""

    code = "NOT_FOUND"


class Unavailable(QuireClientError):
    """The server cannot take or finish the request now, for example because its queue is full, a quota is
    used up, or it is shutting down."""

    code = "UNAVAILABLE"

    @property
    def retry_after(self) -> float | None:
        """Seconds until another attempt has a chance; None if the server did not say."""
        found = _RETRY_AFTER.search(self.message)
        return float(found[1]) if found else None


class ConnectError(Unavailable):
    """There is no connection to a server at the address, or it broke."""


class Cancelled(QuireClientError):
    """The request was cancelled, by this client, by another one that knows its id, or by the server."""

    code = "CANCELLED"


class DeadlineExceeded(QuireClientError):
    """The request did not end within its timeout or deadline. The server is told to
    cancel a generation, embedding or scoring that it has not ended itself."""

    code = "DEADLINE_EXCEEDED"


class PermissionDenied(QuireClientError):
    """The server restricts this operation, or wants credentials."""

    code = "PERMISSION_DENIED"


class ServerError(QuireClientError):
    """The server failed, or reports an error that no other class is for (`code` says which)."""

    code = "INTERNAL"


class ProtocolError(ServerError):
    """The server's answer breaks the protocol: for example, there is no final response, or an output's data
    do not fit its shape."""


_BY_CODE: dict[str, type[QuireClientError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
}

# Texts of gRPC's own transport; a server's UNAVAILABLE carries the server's words instead.
_TRANSPORT_TEXTS = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "dns resolution failed",
    "name resolution failure",
    "socket closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "goaway received",
    "ssl_error_ssl",
    "handshake failed",
    "recvmsg:",
    "endpoint closing",
    "stream removed",
)


def error_from_rpc(error: grpc.RpcError, url: str) -> QuireClientError:
    """Returns the exception for a failed call to the server at `url`.

    The errors of blocking and of asyncio calls both have `code()` and `details()`. A `code()` of None counts
    as UNKNOWN.
    """
    code = error.code()
    name = code.name if code is not None else "UNKNOWN"
    text = error.details() or f"the server answered {name} without a message"
    if name == "UNAVAILABLE" and any(mark in text.lower() for mark in _TRANSPORT_TEXTS):
        return ConnectError(f"no connection to {url}: {text}")
    if name == "UNAVAILABLE" and "protocol is restricted" in text.lower():
        # Triton's answer where --grpc-restricted-protocol keeps a group of calls to holders of a key.
        return PermissionDenied(text)
    return _BY_CODE.get(name, ServerError)(text, code=name)


# An error inside a stream is a text only. The code is read from it: a code in brackets, else the wording of
# Quire ("field: limit") and of Triton. Ensembles put their name in front.
_ENSEMBLE_PREFIX = re.compile(r"^in ensemble '[^']*', ")
_CODE_PREFIX = re.compile(r"^\[([A-Z_]+)\] ")
_WORDINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), code)
    for pattern, code in (
        (_RETRY_AFTER.pattern, "UNAVAILABLE"),
        # Errors that name a field although the request itself is not wrong.
        (
            r"^structured_output: (the process that|was not checked within)|"
            r"^(lora_name|name): .* is (being unloaded$|in use by \d+ request)",
            "UNAVAILABLE",
        ),
        (r"^name: .* is not the name of an adapter$", "NOT_FOUND"),
        (r"^[a-z_][a-z0-9_.\[\]]*: ", "INVALID_ARGUMENT"),
        (
            r"inference input|unexpected (shape|datatype|inference)|unable to parse|malformed",
            "INVALID_ARGUMENT",
        ),
        (
            r"unknown model|not found|no request with id|no such request|no running request|unknown request",
            "NOT_FOUND",
        ),
        (r"\bcancell?ed\b", "CANCELLED"),
        (r"deadline|timed out|timeout", "DEADLINE_EXCEEDED"),
        (
            r"\bengine (ended|process|died|did not|was not|is (not|asleep|about)|has)|\bfull\b|"
            r"maximum queue size|"
            r"unavailable|no available versions|shutting down|restarting|not ready|not healthy|"
            r"is being unloaded|the request cannot be read|embeddings are (gone|cut off)|"
            r"waits for their ends|is being recorded|are being carried out|adapters: unload one",
            "UNAVAILABLE",
        ),
    )
)


def error_from_text(text: str) -> QuireClientError:
    """Returns the exception for an error that came as text in a stream.

    Its code is the one in brackets at the beginning of the text (an ensemble's prefix aside), else it is
    inferred from the wording. For the exact code there is `triton_grpc_error`, which may crash a server (see
    `error_codes` of `AsyncClient`).
    """
    message = _ENSEMBLE_PREFIX.sub("", text)
    marked = _CODE_PREFIX.match(message)
    if marked is not None:
        code = {"INVALID_ARG": "INVALID_ARGUMENT"}.get(marked[1], marked[1])
        message = message[marked.end() :]
    else:
        code = next((code for pattern, code in _WORDINGS if pattern.search(message)), "UNKNOWN")
    return _BY_CODE.get(code, ServerError)(message, code=code)
