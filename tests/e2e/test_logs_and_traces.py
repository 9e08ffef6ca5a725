"""Logs of a real server, with its gateway: structured, and without a word of what clients send."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import stream
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

CANARY = "CANARY77fe"
PLUGIN = """
class Bad:
    def __init__(self, text):
        self.text = text

    def __call__(self, token_ids, logits):
        raise RuntimeError(self.text)
"""
ONE: dict[str, Any] = {"text_input": "Once", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("observed")
    checkpoint = make_checkpoint("llama", root / "llama", max_position_embeddings=1024)
    template = checkpoint / "chat_template.jinja"
    raises = "{% if messages[0].role == 'system' %}{{ raise_exception(messages[0].content) }}{% endif %}"
    template.write_text(raises + template.read_text("utf-8"), "utf-8")
    repository = root / "repository"
    options = {**OPTIONS, "num_blocks": 256, "logits_processors": {"bad": "plugin.py:Bad"}}
    build_repository(checkpoint, repository, placement="path", engine_options=options)
    (repository / "generator" / "1" / "plugin.py").write_text(PLUGIN)
    (repository / "generator_unary" / "1" / "plugin.py").write_text(PLUGIN)
    server = ServerProcess(repository, root, ("--log-format=json", "--log-requests")).start()
    yield server
    server.stop()


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


def post(url: str, body: bytes) -> int:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
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
def test_nothing_that_a_client_wrote_is_in_any_log(server: ServerProcess, tmp_path: Path) -> None:
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
    command = [sys.executable, "-m", "quire_client.cli", "openai", "--port=0", f"--access-log={access}"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, f"--url={server.grpc_url}"], **pipes) as gateway:
        assert gateway.stdout is not None and gateway.stderr is not None
        url = gateway.stdout.readline().strip()
        messages = [{"role": "user", "content": CANARY}]
        for model in ("chat", CANARY):
            for body in bodies(model=model, messages=messages, max_tokens=2):
                statuses.add(post(f"{url}/chat/completions", body))
            for body in bodies(model=model, prompt=CANARY, max_tokens=2):
                statuses.add(post(f"{url}/completions", body))
        gateway.terminate()
        assert CANARY not in gateway.stdout.read() + gateway.stderr.read()
        gateway.wait(20)
    assert CANARY not in access.read_text("utf-8") and '"status": 200' in access.read_text("utf-8")
    server.stop()
    text = server.log.read_text("utf-8", errors="replace")
    assert CANARY not in text, [line for line in text.splitlines() if CANARY in line]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    ends = {line["external_id"]: line for line in lines if line["message"] == "request ended"
            and line.get("external_id", "").startswith("mine-")}  # fmt: skip
    assert {line["level"] for line in lines} >= {"INFO"}
    assert all(line["request_id"] and line["pid"] and line["process"] for line in ends.values())
    reasons = [line["reason"] for line in ends.values()]
    assert reasons.count("length") > 5 and reasons.count("error") > 10
    assert {line["process"] for line in lines} >= {"engine", "generator_0_0"}
