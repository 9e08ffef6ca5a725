"""The gateway's keys, TLS, CORS, metrics and log, before a KServe server in this process (`fake_kserve`)."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import yaml
from click.testing import CliRunner

from quire_client.cli import cli
from quire_client.openai import app as app_module
from quire_client.openai import keys as keys_module
from quire_client.openai import observer as observer_module
from quire_client.openai.app import GatewaySettings
from quire_client.openai.errors import RequestError
from quire_client.openai.keys import Budget, KeyRing, entry_of
from quire_client.openai.observer import Exchange, Observer
from quire_client.types import Chunk, Extras
from tests.fixtures.server import ROOT
from tests.unit.fake_kserve import FakeKServe
from tests.unit.test_openai_gateway import WAIT, chat_body, gateway, inputs_of, post_raw

TLS = ROOT / "tests" / "fixtures" / "tls"


@pytest.fixture
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that budgets see."""
    now = [1000.0]
    monkeypatch.setattr("quire_client.openai.keys.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def write(path: Path, **entries: Any) -> Path:
    path.write_text(json.dumps(entries), "utf-8")
    return path


def ask(base: str, key: str | None, prompt: str = "tokens 4", **others: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = chat_body(prompt, **others)
    return httpx.post(f"{base}/v1/chat/completions", json=body, headers=headers, timeout=WAIT)


# --- keys ---


def test_only_who_has_a_key_is_answered(server: FakeKServe, tmp_path: Path) -> None:
    file = write(tmp_path / "keys.json", alice=entry_of("one"), bob={**entry_of("two"), "tenant": "team"})
    with gateway(GatewaySettings(server.url, api_keys=file)) as base:
        for wrong in (None, "none", "One", entry_of("one")["sha256"]):
            reply = ask(base, wrong)
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (401, "invalid_api_key")
            assert reply.headers["www-authenticate"] == "Bearer"
            assert error["type"] == "authentication_error"
        assert httpx.get(f"{base}/v1/models", timeout=WAIT).status_code == 401
        basic = httpx.get(f"{base}/v1/models", headers={"authorization": "Basic one"}, timeout=WAIT)
        assert basic.status_code == 401
        assert httpx.get(f"{base}/health", timeout=WAIT).status_code == 200
        assert not server.requests
        assert inputs_of(ask(base, "one", "echo"))["tenant"] == ["alice"]
        assert inputs_of(ask(base, "two", "echo"))["tenant"] == ["team"]
        claimed = {"authorization": "bearer two", "x-quire-tenant": "alice", "x-tenant-id": "alice"}
        body = chat_body("echo")
        reply = httpx.post(f"{base}/v1/chat/completions", json=body, headers=claimed, timeout=WAIT)
        assert inputs_of(reply)["tenant"] == ["team"], "not what the client claims"


def test_the_file_is_read_again_when_it_changes(
    server: FakeKServe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "keys.json", alice=entry_of("one"))
    with gateway(GatewaySettings(server.url, api_keys=file)) as base:
        assert ask(base, "one").status_code == 200
        write(file, alice=entry_of("other"), bob=entry_of("two"))
        assert [ask(base, key).status_code for key in ("one", "other", "two")] == [401, 200, 200]
        file.write_text("{", "utf-8")
        for _ in range(3):  # it is read once
            assert ask(base, "two").status_code == 200, "as it was"
        file.unlink()
        assert ask(base, "two").status_code == 200
        assert capsys.readouterr().err.count("the API keys stay as they were") == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_key_has_so_many_tokens_a_minute(
    server: FakeKServe, tmp_path: Path, clock: list[float], streams: bool
) -> None:
    """3 tokens of prompt and 4 of answer each; the bucket holds 10: the third request finds a debt of 4."""
    file = write(tmp_path / "keys.json", a={**entry_of("one"), "tokens_per_minute": 10}, b=entry_of("two"))
    with gateway(GatewaySettings(server.url, api_keys=file)) as base:
        assert [ask(base, "one", stream=streams).status_code for _ in range(2)] == [200, 200]
        reply = ask(base, "one", stream=streams)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "25")
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"] == "the key 'a' has used its 10 tokens per minute"
        assert ask(base, "two").status_code == 200
        clock[0] += 24
        assert ask(base, "one").status_code == 429
        clock[0] += 1
        assert ask(base, "one").status_code == 200


def test_a_bucket_holds_no_more_than_a_minute_s_tokens(clock: list[float]) -> None:
    budget = Budget(60)
    clock[0] += 3600
    budget.spend(60)
    assert budget.retry_after == 1
    budget.set_rate(600)
    clock[0] += 1
    assert budget.retry_after == 0
    budget.spend(110)
    assert budget.retry_after == 11


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be an object of 1 to"),
        ("{}", "must be an object of 1 to"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": 1}', "'a': must be an object"),
        ('{"": {}}', "1 to 256 printable"),
        ('{"a": {"key": "x"}}', "'a': unknown field 'key', there are admin, sha256, tenant, "),
        ('{"a": {"sha256": "ab"}}', "'a': sha256 must be 64"),
        (json.dumps({"a": {**entry_of("x"), "tenant": 1}}), "tenant must be a string"),
        (
            json.dumps({"a": {**entry_of("x"), "tokens_per_minute": 0}}),
            "tokens_per_minute must be an integer",
        ),
        (json.dumps({"a": {**entry_of("x"), "tokens_per_minute": True}}), "tokens_per_minute"),
        (json.dumps({"a": entry_of("x"), "b": entry_of("x")}), "'b' and 'a' have the same sha256"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        KeyRing(file)
    result = CliRunner().invoke(cli, ["openai", "--port=0", f"--api-keys={file}"])
    assert result.exit_code == 1 and message in result.output


@pytest.mark.row("G21", clauses=("keys",))
def test_the_sample_configuration_has_api_keys(server: FakeKServe, tmp_path: Path) -> None:
    """docker/compose.keys.yaml, with a file made as it says, used by OpenAI's own client."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.keys.yaml").read_text("utf-8"))
    command = compose["services"]["gateway"]["command"]
    assert command[:2] == ["quire-client", "openai"]
    file = tmp_path / "api-keys.json"
    made = CliRunner().invoke(cli, ["api-key", "alice", "--tenant=research", "--tokens-per-minute=10"])
    file.write_text(made.stdout, "utf-8")
    key = made.stderr.strip()
    assert key not in made.stdout
    given = {"--host": "127.0.0.1", "--url": server.url, "--api-keys": str(file)}
    options = [(name, given.get(name, value)) for name, _, value in (w.partition("=") for w in command[2:])]
    words = [f"{name}={value}" if value else name for name, value in options]
    process = subprocess.Popen(
        [sys.executable, "-m", "quire_client.cli", "openai", "--port=0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process, contextlib.ExitStack() as ending:
        ending.callback(process.terminate)
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()

        def client(api_key: str) -> openai.OpenAI:
            return ending.enter_context(openai.OpenAI(base_url=url, api_key=api_key, max_retries=0))

        def answer(one: openai.OpenAI) -> Any:
            messages: Any = [{"role": "user", "content": "tokens 4"}]
            return one.chat.completions.create(model="chat", messages=messages)

        for wrong in ("none", file.read_text("utf-8").partition('sha256": "')[2][:64]):
            with pytest.raises(openai.AuthenticationError):
                answer(client(wrong))
        ours = client(key)
        assert answer(ours).choices[0].message.content == "t0 t1 t2 t3 "
        assert server.requests[-1].inputs
        answer(ours)
        with pytest.raises(openai.RateLimitError) as limited:
            answer(ours)
        assert int(limited.value.response.headers["retry-after"]) > 1
        lines = [json.loads(process.stderr.readline()) for _ in range(5)]
        assert [(line["status"], line["key"]) for line in lines] == [
            (401, None),
            (401, None),
            (200, "alice"),
            (200, "alice"),
            (429, "alice"),
        ]


# --- TLS, CORS ---


def test_tls(server: FakeKServe) -> None:
    command = [sys.executable, "-m", "quire_client.cli", "openai", f"--url={server.url}", "--port=0"]
    files = [f"--tls-cert={TLS / 'certificate.pem'}", f"--tls-key={TLS / 'key.pem'}"]
    with subprocess.Popen([*command, *files], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("https://127.0.0.1:")
            trusted = ssl.create_default_context(cafile=str(TLS / "certificate.pem"))
            assert httpx.get(f"{url}/models/chat", verify=trusted, timeout=WAIT).status_code == 200
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{url.replace('https', 'http')}/models/chat", timeout=WAIT)
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([f"--tls-cert={TLS / 'certificate.pem'}"], "go together"),
        ([f"--tls-cert={TLS / 'key.pem'}", f"--tls-key={TLS / 'key.pem'}"], "key.pem"),
        (["--access-log=/no/such/folder/x"], "/no/such/folder/x: No such file"),
    ],
)
def test_files_that_cannot_be_used(options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["openai", "--port=0", *options])
    assert result.exit_code in (1, 2) and message in result.output


def test_pages_of_other_origins_may_only_where_it_is_allowed(server: FakeKServe, tmp_path: Path) -> None:
    file = write(tmp_path / "keys.json", alice=entry_of("one"))
    origin = "https://page.example"
    question = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    def preflight(base: str, **headers: str) -> httpx.Response:
        return httpx.options(f"{base}/v1/chat/completions", headers={**question, **headers}, timeout=WAIT)

    with gateway(GatewaySettings(server.url)) as base:
        assert "access-control-allow-origin" not in preflight(base).headers
        reply = httpx.get(f"{base}/v1/models/chat", headers=question, timeout=WAIT)
        assert "access-control-allow-origin" not in reply.headers
    settings = GatewaySettings(server.url, api_keys=file, cors_origins=(origin,))
    with gateway(settings) as base:
        reply = preflight(base)
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, origin)
        assert "access-control-allow-credentials" not in reply.headers
        assert preflight(base, Origin="https://other.example").status_code == 400
        refusal = httpx.get(f"{base}/v1/models", headers=question, timeout=WAIT)
        assert (refusal.status_code, refusal.headers["access-control-allow-origin"]) == (401, origin)


# --- metrics, log ---


def figures(base: str) -> dict[str, float]:
    """Samples of /metrics."""
    lines = httpx.get(f"{base}/metrics", timeout=WAIT).text.splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def test_metrics(server: FakeKServe) -> None:
    with gateway(GatewaySettings(server.url)) as base:
        assert httpx.get(f"{base}/metrics", timeout=WAIT).status_code == 404
    with gateway(GatewaySettings(server.url, metrics=True)) as base:
        ask(base, None, "tokens 4", stream=True)
        ask(base, None, "tokens 2")
        ask(base, None, "tokens 2", temprature=1)
        ask(base, None, "tokens 2", model="no-such")
        httpx.get(f"{base}/v1/no/such/path", timeout=WAIT)
        httpx.get(f"{base}/health", timeout=WAIT)
        found = figures(base)
        kind = httpx.get(f"{base}/metrics", timeout=WAIT).headers["content-type"]
    assert kind.startswith("text/plain; version=0.0.4")
    path = 'path="/v1/chat/completions"'
    name = "quire_gateway"
    counts = {
        status: found[f'{name}_requests_total{{{path},status="{status}"}}'] for status in (200, 400, 404)
    }
    assert counts == {200: 2, 400: 1, 404: 1}
    assert found[f'{name}_requests_total{{path="other",status="404"}}'] == 1
    assert found[f"{name}_requests_running"] == 0
    model = '{model="chat"}'
    assert found[f"{name}_input_tokens_total{model}"] == 6
    assert found[f"{name}_cached_tokens_total{model}"] == 4
    assert found[f"{name}_output_tokens_total{model}"] == 6
    assert found[f"{name}_time_to_first_token_seconds_count{model}"] == 1
    assert found[f"{name}_inter_token_seconds_count{model}"] == 3
    assert found[f"{name}_request_seconds_count{{{path}}}"] == 4
    assert "no-such" not in str(found), "no label is a client's to make up"


def test_a_debt_is_paid_at_the_rate_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(keys_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    budget = Budget(60)
    budget.spend(120)
    assert budget.retry_after == 61
    now[0] += 30
    budget.set_rate(600)
    assert budget.retry_after == 4, "30 tokens are owed still, and 10 a second come now"
    now[0] += 3.5
    assert budget.retry_after == 0


def test_a_chunk_of_several_tokens_is_as_many_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Observer(None, metrics=True, log=None)
    exchange = Exchange("POST", "/v1/completions", "", observer, model="m", began=0.0)
    for now, token_ids in ((1.0, (5,)), (3.0, (6, 7, 8, 9))):
        clock = SimpleNamespace(monotonic=lambda now=now: now)
        monkeypatch.setattr(observer_module, "time", clock)
        exchange.streamed(Chunk("a", token_ids))
    assert observer.metrics is not None
    text = observer.metrics.text().decode()
    assert 'quire_gateway_inter_token_seconds_count{model="m"} 4.0' in text
    assert 'quire_gateway_inter_token_seconds_sum{model="m"} 2.0' in text
    assert 'quire_gateway_time_to_first_token_seconds_sum{model="m"} 1.0' in text


def test_the_tokens_of_all_prompts_of_a_stream_are_counted(tmp_path: Path) -> None:
    """Of several prompts those of the first alone were charged to the key, and the rest was free."""
    keys = write(tmp_path / "keys.json", a={**entry_of("one"), "tokens_per_minute": 600})
    observer = Observer(keys, metrics=True, log=None)
    assert observer.keys is not None
    key = observer.keys.find("Bearer one")
    exchange = Exchange("POST", "/v1/completions", "", observer, key=key, model="m")
    for prompt, num_reasoning_tokens in ((1, None), (0, None), (1, 5), (0, 6)):
        extras = Extras(batch_index=prompt, num_reasoning_tokens=num_reasoning_tokens)
        chunk = Chunk("a", (5,), num_input_tokens=500 + prompt, num_cached_tokens=prompt, extras=extras)
        exchange.streamed(chunk)
    assert exchange.usage == {
        "prompt_tokens": 1001,
        "completion_tokens": 4,
        "total_tokens": 1005,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 11},
    }
    with pytest.raises(RequestError, match="600 tokens per minute"):
        observer.keys.admit(key)
    assert 'quire_gateway_input_tokens_total{model="m"} 1001.0' in observer.metrics.text().decode()
    assert 'quire_gateway_inter_token_seconds_count{model="m"} 2.0' in observer.metrics.text().decode()


def test_the_log_has_a_line_for_each_request_and_no_text(server: FakeKServe, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    with gateway(GatewaySettings(server.url, access_log=log)) as base:
        ask(base, None, "tokens 4", stream=True)
        answer = ask(base, None, "tokens 2").json()
        ask(base, None, "error INVALID_ARGUMENT seed: secret")
        httpx.get(f"{base}/v1/models/chat?secret", timeout=WAIT)
        httpx.get(f"{base}/health", timeout=WAIT)
        lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 400),
        ("GET", "/v1/models/chat", 200),
    ]
    stream, whole = lines[:2]
    counts = {"input_tokens": 3, "cached_tokens": 2, "model": "chat", "finish_reason": "stop"}
    assert counts.items() <= stream.items() and counts.items() <= whole.items()
    assert (stream["stream"], stream["output_tokens"], whole["output_tokens"]) == (True, 4, 2)
    assert stream["seconds"] >= stream["ttft"] >= 0 and whole["ttft"] is None
    assert answer["id"] == f"chatcmpl-{whole['request_id']}"
    text = log.read_text("utf-8")
    assert "tokens 4" not in text and "secret" not in text and "t0" not in text


@pytest.mark.parametrize(("prompt", "streams"), [("silent", False), ("endless", True)])
def test_a_client_that_leaves_is_in_the_log(
    server: FakeKServe, tmp_path: Path, prompt: str, streams: bool
) -> None:
    log = tmp_path / "access.log"
    with gateway(GatewaySettings(server.url, access_log=log)) as base:
        with post_raw(base, chat_body(prompt, stream=streams)) as connection:
            assert server.started.wait(WAIT)
            assert prompt == "silent" or connection.recv(4096), "its head"
        assert server.ended.wait(WAIT)
    (line,) = log.read_text("utf-8").splitlines()
    assert json.loads(line)["status"] == 499


def test_a_crash_is_500_in_the_log_as_for_the_client(
    server: FakeKServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(self: Any, request: Any) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(app_module._Gateway, "models", crash)
    log = tmp_path / "access.log"
    with gateway(GatewaySettings(server.url, access_log=log)) as base:
        assert httpx.get(f"{base}/v1/models", timeout=WAIT).status_code == 500
    (line,) = log.read_text("utf-8").splitlines()
    assert json.loads(line)["status"] == 500


def test_a_log_that_exists_goes_on(server: FakeKServe, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_text("before\n", "utf-8")
    with gateway(GatewaySettings(server.url, access_log=log)) as base:
        ask(base, None)
    assert log.read_text("utf-8").startswith(f"before{os.linesep}{{")
