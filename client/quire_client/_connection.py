"""Settings of a connection, the deadline of a request, trace headers, and the times cancelling may take."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from quire_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    QuireClientError,
)

Metadata: TypeAlias = tuple[tuple[str, str], ...]

DEFAULT_URL = "localhost:8001"
CANCEL_TIMEOUT = 2.0
"""Seconds a cancel request may take."""
DRAIN_TIMEOUT = 0.5
"""Seconds for each wait for a stream, whose request has ended or was cancelled, to end by itself. Its call is
cancelled after that."""
LATE_CANCEL_DELAYS = (0.02, 0.1, 0.3)
"""Seconds before each repetition of a cancel request, whose first sending may have arrived before the request
itself."""
CONTROL_TIMEOUT = 30.0
"""Seconds for a call that generates nothing (about models, or the server) if it has no deadline."""

# Prompts and answers have no limit here; the server has its own.
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A client that is recreated often must not inherit the backoff of an earlier channel to that address.
    ("grpc.use_local_subchannel_pool", 1),
]


_NEAR = re.compile(r"(localhost|127\.[\d.]+|\[::1\]):")
"""Matches the beginning of a URL that is a loopback address of this machine with a port."""


@dataclass(frozen=True)
class Settings:
    """Address of a server and how to call it; times in seconds. Raises InvalidArgument for an address that is
    empty or has a scheme (`://`), and for a timeout that is not positive."""

    url: str = DEFAULT_URL
    timeout: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    credentials: grpc.ChannelCredentials | None = None
    channel_options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.url or "://" in self.url:
            raise InvalidArgument(f"url: must be HOST:PORT of the gRPC endpoint, got {self.url!r}")
        if self.timeout is not None:
            check_timeout(self.timeout)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Options of the gRPC channel. For a loopback address they switch off the environment's proxy, which
        gRPC would otherwise use."""
        is_near = _NEAR.match(self.url) is not None
        return [
            *CHANNEL_OPTIONS,
            *([("grpc.enable_http_proxy", 0)] if is_near else []),
            *self.channel_options,
        ]

    def metadata(self, *, error_codes: bool = False) -> Metadata:
        """gRPC metadata of a call.

        Args:
            error_codes: True: adds `triton_grpc_error`. A model's error then ends the stream with its status
                code, and may crash the server (see `AsyncClient`). False: a model's error comes as a text in
                the stream.
        """
        own = (("triton_grpc_error", "true"),) if error_codes else ()
        return (*((k.lower(), v) for k, v in self.headers.items()), *own)


CALLER_TRACE: ContextVar[Metadata] = ContextVar("quire_caller_trace", default=())
"""W3C trace context of the caller on whose behalf a request is sent. Used if OpenTelemetry has none."""


def trace_metadata() -> Metadata:
    """The caller's trace context as gRPC metadata: OpenTelemetry's if there is one, else `CALLER_TRACE`."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        if carrier:
            return tuple(carrier.items())
    return CALLER_TRACE.get()


def check_timeout(timeout: float) -> None:
    if not timeout > 0:
        raise InvalidArgument(f"timeout: must be a positive number of seconds, got {timeout}")


class Deadline:
    """A point in time by which a request must end; with a timeout of None there is none. Raises
    InvalidArgument for a timeout that is not positive."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None:
            check_timeout(timeout)
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self) -> float | None:
        """Seconds until the deadline; None if there is no deadline.

        Raises:
            DeadlineExceeded: the deadline has passed.
        """
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the request did not end within {self.timeout:g} s")
        return left

    def explained(self, error: QuireClientError) -> QuireClientError:
        """Returns the exception to raise for an error of a call that had this deadline.

        This is a DeadlineExceeded that names the timeout if the error is a DeadlineExceeded (gRPC's own text
        is only "Deadline Exceeded"), or if the deadline has passed and the error is INTERNAL or CANCELLED,
        which gRPC reports when the deadline passes while it sends the request. Otherwise, and without a
        deadline, it is the error itself.
        """
        if self._end is None:
            return error
        is_late = time.monotonic() >= self._end and error.code in ("INTERNAL", "CANCELLED")
        if not (is_late or isinstance(error, DeadlineExceeded)):
            return error
        return DeadlineExceeded(
            f"the request did not end within {self.timeout:g} s", request_id=error.request_id
        )
