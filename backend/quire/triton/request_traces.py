"""RequestTraces: OpenTelemetry spans of a request, made when it has ended.

Tracing is on where the standard variables say where to send spans (`OTEL_EXPORTER_OTLP_ENDPOINT` or
`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, by HTTP) and do not turn it off, and OpenTelemetry's packages are
installed. If the variables do not ask for it, nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

from quire.triton.observers import RequestEnded
from quire.triton.scheduling_fields import TRACE_HEADERS

logger = logging.getLogger("quire")

_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_CONTEXT = 512
"""Longest value in a trace context that is used, in characters; W3C asks everybody to pass on so many. The
SDK's time for n blanks grows with n^2."""
_STATED = (
    *("max_tokens", "temperature", "top_p", "top_k", "seed"),
    *("frequency_penalty", "presence_penalty"),
)
"""Sampling parameters that a request's span may have as attributes, because OpenTelemetry's conventions name
them. Stop strings also have a name there, but spans get no such texts."""


class RequestTraces:
    """Observer that makes the spans of a request; the span processor sends them.

    A request's span is a child of Triton's own where Triton traces the request, else of the caller's, if any.
    Below it are the phases that the request reached: `queue` (until it first ran), `prefill` (until the
    engine had a first token), `decode` and, from its first response, `stream`. Spans hold no text of prompts
    or answers. Commands have no span.

    Args:
        processor: OpenTelemetry span processor that gets the spans.
    """

    def __init__(self, processor: Any) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()  # of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)  # warnings show a header's text

    @classmethod
    def of_environment(cls) -> RequestTraces | None:
        """Makes the observer if the standard variables ask for it; else, or without the packages, None."""
        environment = os.environ
        if (
            not any(environment.get(name) for name in _ENDPOINTS)
            or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
            or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
        ):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            logger.warning("no traces: %s is not installed (pip install %s)", error.name, _PACKAGES)
            return None
        return cls(BatchSpanProcessor(OTLPSpanExporter()))

    def context_of(self, request: Any) -> tuple[dict[str, str], dict[str, str]]:
        """W3C trace contexts of a `pb_utils.InferenceRequest`: its caller's, and that of Triton's own span.

        Each is empty if there is none or if it cannot be read; both are if the request's parameters cannot be
        read. Values above MAX_CONTEXT are left out.
        """
        caller: dict[str, Any] = {}
        server: dict[str, Any] = {}
        try:
            stated = json.loads(request.parameters() or "{}")
            caller = {name.lower(): value for name, value in stated.items() if name.lower() in TRACE_HEADERS}
            trace = request.trace() if hasattr(request, "trace") else None
            context = None if trace is None else trace.get_context()
            server = json.loads(context) if context else {}
        except (ValueError, AttributeError):
            pass  # the parser will say what is wrong with the parameters
        return _texts(caller), _texts(server)

    def ended(self, record: RequestEnded) -> None:
        """Makes the spans of a request that has ended; does nothing for a command."""
        if record.is_command:
            return
        from opentelemetry.trace import (
            Link,
            SpanKind,
            Status,
            StatusCode,
            get_current_span,
            set_span_in_context,
        )

        offset_ns = time.time_ns() - time.monotonic_ns()

        def at(when: float) -> int:
            return offset_ns + int(when * 1e9)

        caller = self._propagator.extract(record.caller_trace)
        server = self._propagator.extract(record.server_trace)
        context, links = caller, []
        if record.server_trace:
            context = server
            ours, theirs = (get_current_span(one).get_span_context() for one in (server, caller))
            if theirs.is_valid and theirs.trace_id != ours.trace_id:
                links.append(Link(theirs))
        attributes = attributes_of(record)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {record.model}",
            context,
            SpanKind.SERVER,
            attributes,
            links,
            at(record.arrived_at),
        )
        if record.error_code:
            span.set_status(Status(StatusCode.ERROR))
        below = set_span_in_context(span)
        for name, begin, end in phases_of(record):
            self._tracer.start_span(name, below, start_time=at(begin)).end(at(end))
        span.end(at(record.ended_at))

    def close(self, timeout_s: float) -> None:
        """Sends the remaining spans; waits `timeout_s` seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="quire-traces", daemon=True)
        thread.start()
        thread.join(timeout_s)


def _texts(context: Any) -> dict[str, str]:
    if not isinstance(context, dict):
        return {}
    return {
        name: text for name, text in context.items() if isinstance(text, str) and len(text) <= MAX_CONTEXT
    }


def phases_of(record: RequestEnded) -> list[tuple[str, float, float]]:
    """Returns name, begin and end (CLOCK_MONOTONIC seconds) of each phase that a request reached: queue,
    prefill and decode one after the other, and stream beside them."""
    starts = {
        "queue": record.arrived_at,
        "prefill": record.admitted_at,
        "decode": record.first_token_at,
    }
    came_to = [(name, begin) for name, begin in starts.items() if begin]
    ends = [begin for _, begin in came_to[1:]] + [record.ended_at]
    phases = [(name, begin, end) for (name, begin), end in zip(came_to, ends, strict=True)]
    if record.first_sent_at:
        phases.append(("stream", record.first_sent_at, record.ended_at))
    return phases


def attributes_of(record: RequestEnded) -> dict[str, Any]:
    """Returns the attributes of a request's span.

    Most names are those of OpenTelemetry's conventions for generative AI; `quire.*` are ours.
    """
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if record.is_chat else "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.external_id or record.request_id,
        "gen_ai.response.finish_reasons": [record.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": record.num_reasoning_tokens,
        "quire.request_id": record.request_id,
        "quire.stream": record.is_stream,
        "quire.preemptions": record.num_preemptions,
        "quire.draft_tokens": record.num_draft_tokens,
        "quire.accepted_draft_tokens": record.num_accepted_drafts,
        "quire.paused_s": record.paused_s,
    }
    if record.first_sent_at:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_sent_at - record.arrived_at
    if record.error_code:
        attributes["error.type"] = record.error_code
    if record.tenant:
        attributes["quire.tenant"] = record.tenant
    if record.adapter:
        attributes["quire.adapter"] = record.adapter
    if record.params is not None:
        attributes["gen_ai.request.choice.count"] = record.n
        for name in _STATED:
            value = getattr(record.params, name)
            if value is not None and value < 2**63:  # integers of OTLP are signed
                attributes[f"gen_ai.request.{name}"] = value
    return attributes
