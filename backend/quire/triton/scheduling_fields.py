"""Reads a request's SchedulingParams from tensors, JSON, request parameters, headers, and Triton's own
timeout and sequence id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.converters import INT32_MAX, boolean, fail, integer, name
from quire.request.scheduling_params import (
    DEFAULT_RETENTION,
    MAX_DRAFT_TOKENS,
    MAX_NAME_LENGTH,
    MAX_PIN_TTL_S,
    MAX_PRIORITY,
    MAX_RETENTION,
    SchedulingParams,
)

_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "request_priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
    "tenant": name(MAX_NAME_LENGTH),
    "cache_salt": name(MAX_NAME_LENGTH),
    "ttft_deadline_ms": integer(1, INT32_MAX),
    "deadline_ms": integer(1, INT32_MAX),
    "cache_retention": integer(0, MAX_RETENTION),
    "cache_ttl_ms": integer(1, INT32_MAX),
    "cache_pin": boolean,
    "cache_result": boolean,
    "session": name(MAX_NAME_LENGTH),
    "session_end": boolean,
    "num_draft": integer(0, MAX_DRAFT_TOKENS),
}

SCHEDULING_FIELDS: tuple[str, ...] = tuple(_CONVERTERS)
"""Names of a request's scheduling fields. A field has one name as a tensor, in JSON and as a request
parameter."""

ALIASES: dict[str, str] = {"priority": "request_priority"}
"""Our name of a field, by other backends' name of it. Only `sampling_parameters` may use theirs, as Triton
has a request parameter of its own with this name."""

HEADERS: dict[str, str] = {
    "x-quire-tenant": "tenant",
    "x-tenant-id": "tenant",
    "x-quire-priority": "request_priority",
    "x-quire-cache-salt": "cache_salt",
}
"""Scheduling field by header (in lower case), where the server forwards headers as request parameters."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of a W3C trace context (in lower case), where the server forwards them as request parameters."""


def parse_scheduling_params(
    *sources: Mapping[str, Any],
    arrived_at: float,
    timeout_us: int = 0,
    correlation_id: str = "",
    sequence_end: bool = False,
) -> SchedulingParams:
    """Checks and merges a request's scheduling fields; the first source that names a field wins.

    Args:
        sources: mappings of a name of SCHEDULING_FIELDS (or ALIASES) to its raw value, most specific first
            (typed tensors, JSON object, request parameters, headers). A value of None means "not given".
        arrived_at: CLOCK_MONOTONIC seconds from which deadlines count.
        timeout_us: Triton's own timeout of the request, microseconds; 0: none. The shorter one of it and
            `deadline_ms` is the deadline.
        correlation_id: Triton's sequence id; names the session where no source does. Empty: none.
        sequence_end: Triton's flag that this is the sequence's last request. It counts only where
            `correlation_id` names the session and no source states `session_end`.

    Raises:
        InvalidArgumentError: a wrong type or value, an end without a session, or a pin without a
            `cache_ttl_ms` of at most MAX_PIN_TTL_S seconds; names the field.
    """
    given: dict[str, Any] = {}
    for source in sources:
        for written, value in source.items():
            field = ALIASES.get(written, written)
            if value is not None:
                # Every source is checked, also where a more specific one overrides it.
                given.setdefault(field, _CONVERTERS[field](written, value))
    if not given.get("session") and correlation_id:
        given["session"] = name(MAX_NAME_LENGTH)("sequence_id", correlation_id)
        given.setdefault("session_end", sequence_end)
    if given.get("session_end") and not given.get("session"):
        raise fail("session_end", "needs the session's name")
    limits_ms = [given["deadline_ms"]] if "deadline_ms" in given else []
    if timeout_us:
        limits_ms.append(timeout_us / 1000)
    if given.get("cache_pin") and not 1 <= given.get("cache_ttl_ms", 0) <= MAX_PIN_TTL_S * 1000:
        raise fail(
            "cache_pin", f"needs a cache_ttl_ms of at most {MAX_PIN_TTL_S * 1000:.0f}: pins have an end"
        )
    ttft_ms, ttl_ms = given.get("ttft_deadline_ms"), given.get("cache_ttl_ms")
    return SchedulingParams(
        priority=given.get("request_priority", 0),
        tenant=given.get("tenant", ""),
        cache_salt=given.get("cache_salt", ""),
        retention=given.get("cache_retention", DEFAULT_RETENTION),
        cache_ttl_s=None if ttl_ms is None else ttl_ms / 1000,
        pin=given.get("cache_pin", False),
        cache_result=given.get("cache_result", True),
        session=given.get("session", ""),
        session_end=given.get("session_end", False),
        num_draft=given.get("num_draft"),
        ttft_deadline=None if ttft_ms is None else arrived_at + ttft_ms / 1000,
        deadline=arrived_at + min(limits_ms) / 1000 if limits_ms else None,
    )
