"""Logs and traces of a real server, with its gateway.

Logs are structured, and without a word of what clients send. Spans of a request are one trace, from its
client to the engine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire_client import Client
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import stream
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.otlp import OtlpReceiver, Span
from tests.fixtures.server import ServerProcess

pytestmark = pytest.mark.server

CANARY = "CANARY77fe"
PLUGIN = """
class Bad:
    def __init__(self, text):
        self.text = text

    def __call__(self, token_ids, logits):
        raise RuntimeError(self.text)
"""
ONE: dict[str, Any] = {"text_input": "Once", "max_tokens": 2}


def start(root: Path, receiver: OtlpReceiver) -> ServerProcess:
    checkpoint = make_checkpoint("llama", root / "llama", max_position_embeddings=1024)
    template = checkpoint / "chat_template.jinja"
    raises = "{% if messages[0].role == 'system' %}{{ raise_exception(messages[0].content) }}{% endif %}"
    template.write_text(raises + template.read_text("utf-8"), "utf-8")
    repository = root / "repository"
    options = {**OPTIONS, "num_blocks": 256, "logits_processors": {"bad": "plugin.py:Bad"}}
    build_repository(checkpoint, repository, placement="path", engine_options=options)
    (repository / "generator" / "1" / "plugin.py").write_text(PLUGIN)
    (repository / "generator_unary" / "1" / "plugin.py").write_text(PLUGIN)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    loaded = (f"--load-model={name}" for name in ("generator", "generator_unary", "chat"))
    return ServerProcess(repository, root, ("--log-format=json", "--log-requests", *loaded), env).start()


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[ServerProcess]:
    server = start(tmp_path_factory.mktemp("observed"), receiver)
    yield server
    server.end()


@contextlib.contextmanager
def gateway(server: ServerProcess, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """URL and process of a gateway, which has ended behind the context."""
    command = [sys.executable, "-m", "quire_client.cli", "openai", "--port=0", f"--url={server.grpc_url}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()
            process.wait(120)


def below(spans: list[Span], parent: str) -> dict[str, Span]:
    return {span.name: span for span in spans if span.parent == parent}


@pytest.mark.row("G6", clauses=("trace", "attributes"))
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_one_trace_from_the_client_library_to_the_engine(
    server: ServerProcess, receiver: OtlpReceiver, model: str
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with Client(server.grpc_url) as client, provider.get_tracer("test").start_as_current_span("client"):
        said: Any = {"messages": [{"role": "user", "content": "Hi"}]} if model == "chat" else {"prompt": "Hi"}
        result = client.stream(**said, model=model, max_tokens=5, ignore_eos=True).result()
    (own,) = exporter.get_finished_spans()
    trace, parent = f"{own.context.trace_id:032x}", f"{own.context.span_id:016x}"
    names = {"queue", "prefill", "decode", "stream"}
    spans = receiver.wait(lambda spans: names < {span.name for span in spans if span.trace == trace})
    spans = [span for span in spans if span.trace == trace]
    assert len(spans) == 5
    ((name, top),) = below(spans, parent).items()
    operation = "chat" if model == "chat" else "text_completion"
    assert name == f"{operation} generator" and top.scope == "quire"
    phases = below(spans, top.id)
    assert phases.keys() == names
    assert own.start_time is not None and own.end_time is not None
    for span in (top, *phases.values()):
        assert own.start_time <= span.start <= span.end <= own.end_time + 60 * 10**9
    attributes = top.attributes
    assert attributes["gen_ai.operation.name"] == operation
    assert attributes["gen_ai.request.model"] == "generator"
    assert attributes["gen_ai.usage.input_tokens"] > 0
    assert attributes["gen_ai.usage.output_tokens"] == result.num_output_tokens == 5
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.response.id"] == result.request_id
    assert attributes["quire.stream"] is True and attributes["gen_ai.response.time_to_first_chunk"] > 0


def test_a_trace_goes_through_the_gateway(server: ServerProcess, receiver: OtlpReceiver) -> None:
    trace, parent = "5" * 32, "6" * 16
    with gateway(server) as (url, _):
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        status = post(
            f"{url}/chat/completions", json.dumps(body).encode(), traceparent=f"00-{trace}-{parent}-01"
        )
    assert status == 200
    spans = receiver.wait(lambda spans: any(span.parent == parent for span in spans))
    (top,) = below(spans, parent).values()
    assert (top.trace, top.name) == (trace, "chat generator")


def test_a_trace_comes_by_a_parameter(server: ServerProcess, receiver: OtlpReceiver) -> None:
    """HTTP `generate` forwards no headers."""
    trace, parent = "7" * 32, "8" * 16
    body = {"text_input": "Hi", "max_tokens": 3, "traceparent": f"00-{trace}-{parent}-01"}
    assert (
        post(f"http://{server.http_url}/v2/models/generator_unary/generate", json.dumps(body).encode()) == 200
    )
    spans = receiver.wait(lambda spans: any(span.parent == parent for span in spans))
    (top,) = below(spans, parent).values()
    assert (top.trace, top.name) == (trace, "text_completion generator_unary")
    assert top.attributes["quire.stream"] is False


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests with a canary in each place where clients write something, good ones and bad ones."""
    yield "generator", {"text_input": CANARY, "max_tokens": 2}
    yield "generator", {"text_input": f"{CANARY} " * 2000, "max_tokens": 2}  # too long
    yield "chat", {"messages": json.dumps([{"role": "user", "content": CANARY}]), "max_tokens": 2}
    yield "generator", {"messages": json.dumps([{"role": "user", "content": CANARY}]), "max_tokens": 2}
    for bad in (CANARY, f'[{{"role": "{CANARY}"}}]', f'[{{"role": "system", "content": "{CANARY}"}}]'):
        yield "chat", {"messages": bad, "max_tokens": 2}
        yield "generator", {"messages": bad, "max_tokens": 2}
    for name in ("stop", "bad_words", "session", "cache_salt"):
        yield "generator", {**ONE, name: CANARY}
    for name in ("sampling_parameters", "logit_bias", "structured_output", "chat_format"):
        yield "generator", {**ONE, name: CANARY}
        yield "generator", {**ONE, name: json.dumps({CANARY: CANARY})}
    for name in ("guided_regex", "guided_grammar", "temperature", "priority", "logits_processors", CANARY):
        yield "generator", {**ONE, "sampling_parameters": json.dumps({name: CANARY})}
    for grammar in ({"json": {"const": CANARY}}, {"regex": f"({CANARY}"}, {CANARY: CANARY}):
        yield "generator", {**ONE, "structured_output": json.dumps(grammar)}
    yield "generator", {"cache_control": json.dumps({"command": CANARY})}
    crash = [{"name": "bad", "args": {"text": CANARY}}]
    yield "generator", {**ONE, "sampling_parameters": json.dumps({"logits_processors": crash})}
    yield "generator", {"input_ids": [7], "max_tokens": 2, "stop": CANARY}


def post(url: str, body: bytes, **headers: str) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def bodies(**fields: Any) -> Iterator[bytes]:
    """The same, as JSON over HTTP."""
    yield json.dumps(fields).encode()
    yield json.dumps({**fields, "temperature": CANARY}).encode()
    yield json.dumps({**fields, CANARY: CANARY}).encode()
    yield json.dumps({**fields, "stop": [CANARY], "max_tokens": CANARY}).encode()
    yield json.dumps(fields).encode()[:-1] + b'"' + CANARY.encode()


@pytest.mark.row("G7", clauses=("redaction", "structure"))
def test_nothing_that_a_client_wrote_is_in_any_log(
    server: ServerProcess, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    num_good = num_bad = 0
    for index, (model, inputs) in enumerate(requests()):
        reply = stream(server.grpc_url, model, inputs, request_id=f"mine-{index}")
        num_bad += reply.error is not None
        num_good += reply.error is None
    assert num_good > 8 and num_bad > 12
    statuses = {post(f"http://{server.http_url}/v2/models/generator_unary/generate", body)
                for body in bodies(text_input=CANARY, max_tokens=2)}  # fmt: skip
    assert 200 in statuses and len(statuses) > 1
    access = tmp_path / "access.log"
    with gateway(server, f"--access-log={access}") as (url, process):
        messages = [{"role": "user", "content": CANARY}]
        for model in ("chat", CANARY):
            for body in bodies(model=model, messages=messages, max_tokens=2):
                statuses.add(post(f"{url}/chat/completions", body))
            for body in bodies(model=model, prompt=CANARY, max_tokens=2):
                statuses.add(post(f"{url}/completions", body))
        process.terminate()
        assert process.stdout is not None and process.stderr is not None
        assert CANARY not in process.stdout.read() + process.stderr.read()
    assert CANARY not in access.read_text("utf-8") and '"status": 200' in access.read_text("utf-8")
    server.stop()
    text = server.log.read_text("utf-8", errors="replace")
    assert all(CANARY not in repr(span) for span in receiver.spans)
    assert CANARY not in text, [line for line in text.splitlines() if CANARY in line]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ends = {line["external_id"]: line for line in lines if line["message"] == "request ended"
            and line.get("external_id", "").startswith("mine-")}  # fmt: skip
    assert {line["level"] for line in lines} >= {"INFO"}
    assert all(line["request_id"] and line["pid"] and line["process"] for line in ends.values())
    reasons = [line["reason"] for line in ends.values()]
    assert reasons.count("length") > 5 and reasons.count("error") > 10
    assert {line["process"] for line in lines} >= {"engine", "generator_0_0"}
