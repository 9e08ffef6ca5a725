"""Spans of requests: one trace from the client to the engine, made when a request has ended."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.observers import RequestEnded  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_traces import RequestTraces  # noqa: E402
from quire_client._connection import CALLER_TRACE, trace_metadata  # noqa: E402
from tests.fixtures.fake_runner import FakeRunner  # noqa: E402
from tests.fixtures.frontend import Ended, Frontend  # noqa: E402

OUTPUTS = frozenset({"text_output", "output_ids", "finish_reason"})
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5, seed=2**63 + 1, stop=("SECRET",))
ONES, TWOS = "1" * 32, "2" * 32


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Iterator[RequestTraces]:
    traces = RequestTraces(SimpleSpanProcessor(exporter))
    yield traces
    traces.close(10)


def request(parameters: dict[str, Any], context: dict[str, str] | None = None) -> Any:
    """A Triton request as far as traces look at it; `context`: of Triton's span."""
    shown = None if context is None else json.dumps(context)
    server = SimpleNamespace(get_context=lambda: shown)
    return SimpleNamespace(parameters=lambda: json.dumps(parameters), trace=lambda: server)


def record(**fields: Any) -> RequestEnded:
    times = {"arrived_at": 10.0, "admitted_at": 11.0, "first_token_at": 13.0, "first_sent_at": 13.5}
    known = {"request_id": "x-1", "external_id": "mine", "model": "m", "finish_reason": "stop"}
    return RequestEnded(**{**known, **times, "ended_at": 17.0, **fields})


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


@pytest.mark.row("G6", clauses=("trace", "attributes"))
def test_one_trace_from_the_client_to_the_engine(
    tmp_path: Path, exporter: InMemorySpanExporter, traces: RequestTraces
) -> None:
    client = TracerProvider()
    client.add_span_processor(SimpleSpanProcessor(exporter))
    began = time.time_ns() - 10**9  # clocks are read one after the other
    core = EngineCore(
        EngineConfig.from_mapping({"model": "fake", "block_size": 4}),
        RunnerExecutor(FakeRunner(64, 4, max_model_len=64)),
    )
    ended = Ended()
    frontend = Frontend(tmp_path, core, observers=[traces, ended])
    handle = RequestHandle(fake_pb_utils.ResponseSender(), "x-1", "mine")
    try:
        with client.get_tracer("client").start_as_current_span("client"):
            handle.traces = traces.context_of(request(dict(trace_metadata())))
            parsed = ParsedRequest(
                [3, 1, 4, 1, 5], PARAMS, "mine", OUTPUTS, OUTPUTS, stream=True, is_chat=True
            )
            frontend.responder.submit(handle, parsed)
            ended.wait(1)
    finally:
        frontend.close()
    spans = by_name(exporter)
    assert spans.keys() == {"client", "chat generator", "queue", "prefill", "decode", "stream"}
    assert len({span.context.trace_id for span in spans.values()}) == 1
    root, top = spans["client"], spans["chat generator"]
    assert top.parent is not None and top.parent.span_id == root.context.span_id
    assert top.kind is trace.SpanKind.SERVER and top.status.is_unset
    for name in ("queue", "prefill", "decode", "stream"):
        parent = spans[name].parent
        assert parent is not None and parent.span_id == top.context.span_id
    queue, prefill, decode, stream = (spans[name] for name in ("queue", "prefill", "decode", "stream"))
    assert began <= top.start_time == queue.start_time and top.end_time <= time.time_ns() + 10**9
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert decode.start_time <= stream.start_time <= stream.end_time == decode.end_time == top.end_time
    attributes = dict(top.attributes or {})
    seconds = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(seconds, float) and 0 < seconds < 60
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "generator",
        "gen_ai.response.model": "generator",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "quire.request_id": "x-1",
        "quire.stream": True,
        "quire.preemptions": 0,
        "quire.draft_tokens": 0,
        "quire.accepted_draft_tokens": 0,
        "quire.paused_s": 0.0,
    }


@pytest.mark.parametrize(
    ("parameters", "server", "trace_id", "parent", "linked"),
    [
        ({}, None, None, None, []),
        ({"traceparent": "nonsense"}, None, None, None, []),
        ({"traceparent": 7}, None, None, None, []),
        ({"Traceparent": f"00-{ONES}-{'3' * 16}-01"}, None, ONES, "3" * 16, []),
        ({"traceparent": f"00-{ONES}-{'3' * 16}-01"}, f"00-{ONES}-{'4' * 16}-01", ONES, "4" * 16, []),
        ({"traceparent": f"00-{ONES}-{'3' * 16}-01"}, f"00-{TWOS}-{'4' * 16}-01", TWOS, "4" * 16, [ONES]),
        ({}, f"00-{TWOS}-{'4' * 16}-01", TWOS, "4" * 16, []),
    ],
)
def test_the_parent_is_tritons_span_or_the_callers(
    exporter: InMemorySpanExporter,
    traces: RequestTraces,
    parameters: dict[str, Any],
    server: str | None,
    trace_id: str | None,
    parent: str | None,
    linked: list[str],
) -> None:
    context = None if server is None else {"traceparent": server}
    caller_trace, server_trace = traces.context_of(request(parameters, context))
    traces.ended(record(caller_trace=caller_trace, server_trace=server_trace))
    top = by_name(exporter)["text_completion m"]
    if trace_id is None:
        assert top.parent is None
    else:
        assert top.parent is not None and f"{top.parent.span_id:016x}" == parent
        assert f"{top.context.trace_id:032x}" == trace_id
    assert [f"{link.context.trace_id:032x}" for link in top.links] == linked


def test_a_caller_who_samples_nothing_is_heard(exporter: InMemorySpanExporter, traces: RequestTraces) -> None:
    caller, _ = traces.context_of(request({"traceparent": f"00-{ONES}-{'3' * 16}-00"}))
    traces.ended(record(caller_trace=caller))
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("parameters", ["", "[]", "{", "null"])
def test_requests_that_cannot_be_read_have_no_context(traces: RequestTraces, parameters: str) -> None:
    old = SimpleNamespace(parameters=lambda: parameters)  # a server without traces of requests
    assert traces.context_of(old) == ({}, {})


def test_a_server_context_that_is_no_object_is_none(traces: RequestTraces) -> None:
    own = f"00-{ONES}-{'3' * 16}-01"
    asked = SimpleNamespace(
        parameters=lambda: json.dumps({"traceparent": own}),
        trace=lambda: SimpleNamespace(get_context=lambda: "[1]"),
    )
    assert traces.context_of(asked) == ({"traceparent": own}, {})


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"admitted_at": 0.0, "first_token_at": 0.0, "first_sent_at": 0.0}, {"queue"}),
        ({"first_token_at": 0.0, "first_sent_at": 0.0}, {"queue", "prefill"}),
        ({"first_sent_at": 0.0}, {"queue", "prefill", "decode"}),
    ],
)
def test_a_request_that_fails_has_the_spans_that_it_came_to(
    exporter: InMemorySpanExporter, traces: RequestTraces, fields: dict[str, float], names: set[str]
) -> None:
    traces.ended(record(finish_reason="error", error_code="UNAVAILABLE", tenant="t", **fields))
    spans = by_name(exporter)
    top = spans.pop("text_completion m")
    assert spans.keys() == names and max(span.end_time or 0 for span in spans.values()) == top.end_time
    assert top.status.status_code is trace.StatusCode.ERROR
    assert top.attributes is not None and top.attributes["error.type"] == "UNAVAILABLE"
    assert top.attributes["quire.tenant"] == "t"


@pytest.mark.parametrize(
    "hostile",
    [
        {"traceparent": f"00-{ONES}-{'3' * 16}-01", "tracestate": "a" + " " * 50_000 + "b"},
        {"traceparent": f"01-{ONES}-{'3' * 16}-01-" + " " * 50_000 + "\nb"},
    ],
    ids=["state", "parent"],
)
def test_a_long_header_takes_no_time_of_the_thread_that_sends(
    exporter: InMemorySpanExporter, traces: RequestTraces, hostile: dict[str, str]
) -> None:
    """The SDK's expressions take the square of the blanks in it: some seconds here, in which no stream of
    the model had a token. Any client may state one, as a request parameter."""
    began = time.process_time()
    caller, _ = traces.context_of(request(hostile))
    traces.ended(record(caller_trace=caller))
    assert time.process_time() - began < 1.0
    assert "text_completion m" in by_name(exporter)


def test_what_a_header_says_is_not_logged(traces: RequestTraces, caplog: pytest.LogCaptureFixture) -> None:
    parent = f"00-{ONES}-{'3' * 16}-01"
    caller, _ = traces.context_of(request({"traceparent": parent, "tracestate": "SECRET of a client"}))
    traces.ended(record(caller_trace=caller))
    assert "SECRET" not in caplog.text


def test_commands_have_no_spans(exporter: InMemorySpanExporter, traces: RequestTraces) -> None:
    traces.ended(record(is_command=True))
    assert exporter.get_finished_spans() == ()


def test_the_gateways_caller_counts_where_nothing_is_traced_here() -> None:
    passed = (("traceparent", f"00-{ONES}-{'3' * 16}-01"),)
    token = CALLER_TRACE.set(passed)
    try:
        assert trace_metadata() == passed
        with TracerProvider().get_tracer("t").start_as_current_span("own") as span:
            (name, value), *_ = trace_metadata()
        assert name == "traceparent" and f"{span.get_span_context().span_id:016x}" in value
    finally:
        CALLER_TRACE.reset(token)


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_nothing_is_imported_unless_it_is_on(environment: dict[str, str], is_on: bool) -> None:
    code = (
        "import sys\n"
        "from quire.triton.request_traces import RequestTraces\n"
        "made = RequestTraces.of_environment() is not None\n"
        "print(made, any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), **environment},
    )
    assert done.stdout.split() == [str(is_on)] * 2
