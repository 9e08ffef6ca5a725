"""`quire serve`: flags, ports, backend directory; with the real server: readiness, stopping, what is left."""

from __future__ import annotations

import base64
import fcntl
import http.client
import importlib.util
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from click.testing import CliRunner

from quire.cli import main
from quire.engine.processes import start_time_of
from quire.engine.runtime_directory import EngineState, RuntimeDirectory
from quire.errors import ConfigError
from quire.server import http_stack, run_files, serve, tritonserver
from quire.server.gateway import Gateway
from quire.server.model_links import link_models
from quire.server.serve import (
    MAX_HTTP_BODY,
    ServeConfig,
    bind_port,
    gateway_exit_timeout_s,
    server_arguments,
    stop_times,
)
from quire.server.tritonserver import TritonServer
from quire_client.cli import cli as client_cli
from quire_client.openai import server as gateway_server
from quire_common.cache import private_directory
from tests.fixtures.server import ServeRepository, ServerProcess
from tests.fixtures.waiting import wait_until

CONFIG = """
backend: "python"
max_batch_size: 0
input [{ name: "text" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "text_out" data_type: TYPE_STRING dims: [-1] }]
instance_group [{ kind: KIND_CPU count: 1 }]
"""
IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("text_out", text)]) for text in texts]
"""
# Blocks in every request, and starts a child that no signal to the server's session reaches.
STUBBORN = """
import subprocess, time

class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def execute(self, requests):
        time.sleep(600)
"""
BROKEN = "raise RuntimeError('this model is broken on purpose')\n"
STOP_LIMIT_S = 240.0
"""For what takes some 2 s, however busy the machine is; the sleeper would sleep for longer."""
PATIENT = "--exit-timeout=600"
"""For what is to end with status 0, which tritonserver does not where it takes longer."""


def write_model(repository: Path, name: str, source: str) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG, "utf-8")
    (version / "model.py").write_text(source, "utf-8")
    return repository


def text_input(text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def shm_of(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{prefix}*")]


def test_serves_on_loopback_and_stops_in_time_leaving_nothing(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "identity", IDENTITY), PATIENT)
    for url in (server.http_url, server.grpc_url, server.metrics_url):
        assert url.startswith("127.0.0.1:")
    client = grpcclient.InferenceServerClient(server.grpc_url)
    assert (
        client.infer("identity", [text_input("größe 日本")]).as_numpy("text_out")[0].decode() == "größe 日本"
    )
    client.close()
    assert shm_of(server.shm_prefix), "regions carry the name of the run"

    # What a user of a model does not need is closed.
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://{server.http_url}/v2/systemsharedmemory/status", timeout=60)

    assert server.stop(STOP_LIMIT_S) < STOP_LIMIT_S
    assert server.returncode == 0
    assert server.leftovers() == []
    assert not server.ready_file.exists()


ENSEMBLE = """
platform: "ensemble"
input [{ name: "text" data_type: TYPE_STRING dims: [-1] }]
output [{ name: "text_out" data_type: TYPE_STRING dims: [-1] }]
ensemble_scheduling { step [{
  # a member
  model_name: 'identity' model_version: -1
  input_map { key: "text" value: "text" } output_map { key: "text_out" value: "text_out" }
}] }
"""


@pytest.mark.parametrize("chosen", [(), ("--load-model=pair",)])
def test_no_client_loads_code_and_all_may_read_the_index(
    serve_repository: ServeRepository, tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    """`--load-model` once chose Triton's explicit mode: a load request with its own `model.py` ran it."""
    repository = write_model(tmp_path / "repository", "identity", IDENTITY)
    (repository / "pair" / "1").mkdir(parents=True)
    (repository / "pair" / "config.pbtxt").write_text(ENSEMBLE, "utf-8")
    if chosen:
        write_model(repository, "other", BROKEN)  # which would end the server
    server = serve_repository(repository, *chosen)
    client = grpcclient.InferenceServerClient(server.grpc_url)
    try:
        assert client.infer("pair", [text_input("x")]).as_numpy("text_out")[0] == b"x"

        marker = tmp_path / "ran"
        source = f"open({str(marker)!r}, 'w')\n{IDENTITY}".encode()
        config = json.dumps({"backend": "python", "max_batch_size": 0})
        with pytest.raises(grpcclient.InferenceServerException, match="not allowed"):
            client.load_model("evil", config=config, files={"file:1/model.py": source})
        body = {"parameters": {"config": config, "file:1/model.py": base64.b64encode(source).decode()}}
        for path in ("evil/load", "identity/load", "identity/unload"):
            request = urllib.request.Request(
                f"http://{server.http_url}/v2/repository/models/{path}",
                data=json.dumps(body).encode(),
                method="POST",
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert b"not allowed" in refused.value.read()
        with pytest.raises(grpcclient.InferenceServerException, match="not allowed"):
            client.unload_model("identity")
        assert not marker.exists()

        index = urllib.request.Request(f"http://{server.http_url}/v2/repository/index", data=b"{}")
        models = json.loads(urllib.request.urlopen(index, timeout=60).read())
        assert {model["name"] for model in models} == {"identity", "pair"}
        assert {model.name for model in client.get_model_repository_index().models} == {"identity", "pair"}

        # The header that would open the rest stands in the command line, which everybody can read.
        assert "quire-admin=no\nbody" in " ".join(psutil.Process(server.pid).children()[0].cmdline())
        with pytest.raises(grpcclient.InferenceServerException):
            header = {"triton-grpc-protocol-quire-admin": "no\nbody"}
            client.get_system_shared_memory_status(headers=header)
        host, port = server.http_url.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            start = b"GET /v2/systemsharedmemory/status HTTP/1.1\r\nHost: x\r\n"
            connection.sendall(start + b"quire-admin: no\nbody\r\n\r\n")
            assert b" 200 " not in connection.recv(100)
        assert client.is_server_ready()
    finally:
        client.close()


LENGTH_CONFIG = CONFIG.replace(
    '"text_out" data_type: TYPE_STRING dims: [-1]', '"length" data_type: TYPE_INT32 dims: [1]'
)
LENGTH = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        lengths = [np.array([len(text[0])], np.int32) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("length", length)]) for length in lengths]
"""


def test_the_largest_stated_body_is_answered_and_the_one_in_most_pieces_too(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    """The server's HTTP threads take stack for every piece of a body: one request of 4.2 MB, 600 KB in chunks
    of a byte, ended it by a signal. Its children have to get by with the stack that they always had."""
    repository = write_model(tmp_path / "repository", "length", LENGTH)
    (repository / "length" / "config.pbtxt").write_text(LENGTH_CONFIG, "utf-8")
    server = serve_repository(repository)
    host, port = server.http_url.split(":")

    def answer(body: bytes, *, chunked: bool) -> dict[str, object]:
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        pieces = [body[at : at + 1] for at in range(len(body))] if chunked else [body]
        if chunked:
            connection.putrequest("POST", "/v2/models/length/generate_stream")
            connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders()
            connection.send(b"".join(b"1\r\n" + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n")
        else:
            connection.request("POST", "/v2/models/length/generate_stream", body)
        response = connection.getresponse()
        assert response.status == 200
        text = response.read().decode()
        connection.close()
        return json.loads(text.removeprefix("data: "))

    frame = len(json.dumps({"text": ""}))
    for size, chunked in ((MAX_HTTP_BODY, False), (600_000, True)):
        body = json.dumps({"text": "x" * (size - frame)}).encode()
        assert len(body) == size
        assert answer(body, chunked=chunked)["length"] == size - frame
    assert server.returncode is None
    limits = {process.rlimit(psutil.RLIMIT_STACK) for process in server.descendants()}
    assert limits == {resource.getrlimit(resource.RLIMIT_STACK)}


@pytest.mark.parametrize(
    ("limits", "mode", "given", "pieces"),
    [
        ((8 << 20, -1), "0", (1 << 30, -1), None),
        ((-1, -1), "1", (1 << 30, -1), None),
        ((8 << 20, 2 << 30), "0", (1 << 30, 2 << 30), None),
        ((8 << 20, 16 << 20), "0", (16 << 20, 16 << 20), 1 << 19),
        ((8 << 20, -1), "2", (8 << 20, -1), 1 << 18),
        ((-1, -1), "2", (-1, -1), 1 << 16),
    ],
)
def test_a_stack_that_cannot_be_raised_is_one_line_that_says_what_it_is_good_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limits: tuple[int, int],
    mode: str,
    given: tuple[int, int],
    pieces: int | None,
) -> None:
    monkeypatch.setattr(http_stack, "_overcommit_mode", lambda: mode)
    assert http_stack.limits_for_server(limits) == given
    said = capsys.readouterr().err
    assert said.count("\n") == (pieces is not None)
    if pieces is not None:
        assert f"more than {pieces} pieces" in said


def test_models_to_link_are_found_or_named(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", "identity", IDENTITY)
    second = write_model(tmp_path / "second", "twin", IDENTITY)
    write_model(first, "twin", IDENTITY)
    (first / "pair").mkdir()
    (first / "pair" / "config.pbtxt").write_text(ENSEMBLE, "utf-8")
    link_models((first, second), ("pair", "pair"), tmp_path / "chosen")
    links = {path.name: path.readlink() for path in (tmp_path / "chosen").iterdir()}
    assert links == {"pair": first / "pair", "identity": first / "identity"}
    for name, complaint in (("../first", "there is no model"), ("twin", "more than one repository")):
        with pytest.raises(ConfigError, match=complaint):
            link_models((first, second), (name,), tmp_path / f"chosen {complaint}")


def pending(pid: int) -> set[int]:
    """Signals that a stopped process was sent."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    (mask,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    return {number for number in signal.valid_signals() if int(mask, 16) >> (number - 1) & 1}


def test_only_the_engine_itself_is_told_to_stop(tmp_path: Path) -> None:
    """Its pid, read from a file, was signalled: it may have gone to another process meanwhile."""
    with subprocess.Popen(["sleep", "600"]) as process:
        start = start_time_of(process.pid)
        assert start is not None
        with RuntimeDirectory.locked(tmp_path / "engine") as directory:
            directory.write_state(EngineState("ready", process.pid, start - 1, 0))
        process.send_signal(signal.SIGSTOP)  # so that what it is sent is to be seen, and does nothing yet
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        serve._stop_engines(tmp_path)
        assert signal.SIGTERM not in pending(process.pid)
        with RuntimeDirectory.locked(tmp_path / "engine") as directory:
            directory.write_state(EngineState("ready", process.pid, start, 0))
        serve._stop_engines(tmp_path)
        assert signal.SIGTERM in pending(process.pid)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGTERM
        serve._stop_engines(tmp_path)


def test_engines_are_told_to_stop_until_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once was too early for one that was being started then, and died: streams waited for the next."""
    told, now = list[Path](), [100.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(serve, "_stop_engines", told.append)
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(serve, "_next_signal", wait)
    run = object.__new__(serve.ServerRun)
    run._drain_until, run._deadline, run._gateway = 0.0, math.inf, None
    run._files = SimpleNamespace(directory=tmp_path)  # type: ignore[assignment]
    for _ in range(3):
        assert run._handle_signal(SimpleNamespace(returncode=None), 10.0) is None  # type: ignore[arg-type]
    assert len(told) == 3


def test_a_wait_that_is_interrupted_until_its_time_is_over_has_found_no_signal() -> None:
    """A start that was stopped and continued, by a debugger say, ended: what CPython returned then was taken
    for a signal to stop."""
    limit_s, ends = 0.2, list[float]()

    def is_over() -> bool:
        return time.monotonic() > ends[-1]

    before = signal.signal(signal.SIGUSR1, lambda *_: wait_until(is_over))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, serve._SIGNALS)
    us = threading.get_ident()
    try:
        for _ in range(5):
            ends.append(time.monotonic() + 2 * limit_s)
            interrupter = threading.Timer(limit_s / 4, signal.pthread_kill, (us, signal.SIGUSR1))
            interrupter.start()
            assert serve._next_signal(limit_s) is None
            interrupter.join()
        signal.pthread_kill(us, signal.SIGHUP)
        assert serve._next_signal(60.0) == signal.SIGHUP
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR1, before)


def test_a_stop_holds_where_a_stub_is_lost_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything started again, and the signal was forgotten."""
    lost = SimpleNamespace(look=lambda: {1: "generator_0_0"}, suspects=["generator_0_0"])
    monkeypatch.setattr(serve, "LostStubs", lambda *_: lost)
    run = object.__new__(serve.ServerRun)
    run._deadline, run._load_retries = math.inf, 0

    def stop(*_: object) -> None:
        run._deadline = 0.0

    monkeypatch.setattr(run, "_handle_signal", stop)
    assert not run._wait_ready(SimpleNamespace(pid=1, returncode=None), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "load_retries", "starts_again"),
    [
        (signal.SIGABRT, 0, True),
        (signal.SIGSEGV, 0, True),
        (signal.SIGABRT, 8, False),
        (signal.SIGKILL, 0, False),
    ],
)
def test_a_first_start_in_which_the_server_crashes_is_made_again(
    monkeypatch: pytest.MonkeyPatch, number: int, load_retries: int, starts_again: bool
) -> None:
    """On a machine that stood still a lost stub ended it before the stub was looked for: the start failed."""
    monkeypatch.setattr(serve, "LostStubs", lambda *_: SimpleNamespace(suspects=[]))
    run = object.__new__(serve.ServerRun)
    run._deadline, run._load_retries = math.inf, load_retries
    monkeypatch.setattr(run, "_handle_signal", lambda process, _: process.returncode)
    process = SimpleNamespace(pid=1, returncode=-number)
    if starts_again:
        with pytest.raises(serve.StubLostError, match="tritonserver has crashed while models were loading"):
            run._wait_ready(process, 0)  # type: ignore[arg-type]
    else:
        assert not run._wait_ready(process, 0)  # type: ignore[arg-type]


def test_an_engine_that_has_died_is_not_replaced_while_the_server_ends(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir(mode=0o700)
    with RuntimeDirectory.locked(tmp_path / "engine") as directory:
        directory.write_state(EngineState("ready", os.getpid(), 1, 4))
        serve._stop_engines(tmp_path)
        assert directory.read_state() == EngineState("ready", os.getpid(), 1, 4), "another is being started"
    serve._stop_engines(tmp_path)
    with RuntimeDirectory.locked(tmp_path / "engine") as directory:
        assert directory.read_state() == EngineState("stopped", os.getpid(), 1, 4)


def test_a_blocked_request_and_a_detached_child_do_not_survive_the_stop(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN))
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.async_infer("stubborn", [text_input("x")], callback=lambda result, error: None)
    assert "sleep" in [process.name() for process in server.descendants()]
    assert server.stop(STOP_LIMIT_S) < STOP_LIMIT_S
    client.close()
    assert server.leftovers() == []


def test_a_second_signal_stops_at_once(serve_repository: ServeRepository, tmp_path: Path) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN), PATIENT)
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.async_infer("stubborn", [text_input("x")], callback=lambda result, error: None)
    os.kill(server.pid, signal.SIGINT)
    assert server.stop(STOP_LIMIT_S) < STOP_LIMIT_S
    client.close()
    assert server.returncode == 128 + signal.SIGKILL
    assert server.leftovers() == []


def test_a_checkpoint_that_is_being_fetched_is_given_up_by_a_signal(tmp_path: Path) -> None:
    """It was fetched to its end, for minutes, before any signal but SIGKILL did anything."""
    asked, temporary = socket.create_server(("127.0.0.1", 0)), tmp_path / "tmp"
    temporary.mkdir()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{asked.getsockname()[1]}", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "quire.cli", "serve", "owner/name", "--http-port=0", "--grpc-port=0"]
    environment = {**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "0", "TMPDIR": str(temporary), **hub}
    with asked, subprocess.Popen([*command, "--metrics-port=0"], env=environment) as process:
        asked.settimeout(STOP_LIMIT_S)
        with asked.accept()[0]:
            assert list(temporary.glob("quire-run-*"))
            process.terminate()
            try:
                assert process.wait(STOP_LIMIT_S) == 128 + signal.SIGTERM
            finally:
                process.kill()
    assert not list(temporary.glob("quire-run-*"))


def test_nohup_keeps_its_word(serve_repository: ServeRepository, tmp_path: Path) -> None:
    """A signal that is ignored was waited for all the same: the end of a terminal ended the server."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = serve_repository(write_model(tmp_path / "repository", "identity", IDENTITY), PATIENT)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.kill(server.pid, signal.SIGHUP)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.infer("identity", [text_input("x")])
    os.kill(server.pid, signal.SIGINT)
    assert server.process is not None and server.process.wait(STOP_LIMIT_S) == 0


def test_the_gateway_beside_the_server_starts_again_and_ends_with_it(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    repository = write_model(tmp_path / "repository", "identity", IDENTITY)
    server = serve_repository(repository, "--openai-port=0", PATIENT)
    base = f"http://{json.loads(server.ready_file.read_text('utf-8'))['openai']}"

    def is_healthy() -> bool:
        try:
            return httpx.get(f"{base}/health", timeout=STOP_LIMIT_S).status_code == 200
        except httpx.TransportError:
            return False

    assert is_healthy(), "when the server says that it is ready"
    assert "OpenAI API" in server.log.read_text("utf-8")
    (gateway,) = server.running("quire_client.cli")
    gateway.kill()
    gateway.wait()
    wait_until(is_healthy)
    (gateway,) = server.running("quire_client.cli")
    server.stop(STOP_LIMIT_S)
    assert server.returncode == 0 and server.leftovers() == []
    assert not gateway.is_running()


def test_answers_through_the_gateway_have_the_servers_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cut them off after its own 5 s, without a last event, while the server would have let them go on."""
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    Gateway("127.0.0.1", 9000, "127.0.0.1:8001", 60, lambda: None)
    (command,) = started
    arguments = command[command.index("openai") + 1 :]
    seconds: list[int] = []
    monkeypatch.setattr(gateway_server, "serve", lambda *_, grace_s, **__: seconds.append(grace_s))
    assert CliRunner().invoke(client_cli, ["openai", *arguments]).exit_code == 0
    assert seconds == [60]


def test_the_gateway_ends_behind_the_engines_and_before_the_server() -> None:
    found = {
        (limit, unload): gateway_exit_timeout_s(limit, unload)
        for limit in (0, 5, 10, 60)
        for unload in (4.5, 7.0)
    }
    assert found[5, 4.5] == 5 and found[10, 7.0] == 7, "by default, before 26.04 and from there"
    assert found[60, 4.5] == 60 and found[60, 7.0] == 57
    assert found[0, 4.5] == found[0, 7.0] == 0


def test_a_gateway_is_ready_when_it_has_reached_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was when it listened. If it was asked during the start, the first answers behind "ready" were 503s,
    as its way to the server is tried again once a second."""
    statuses = [503, 503, 200, 503, 503]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with monkeypatch.context() as patch, ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        patch.setattr(subprocess, "Popen", lambda *_, **__: None)
        gateway = Gateway("127.0.0.1", server.server_port, "127.0.0.1:8001", 5, lambda: None)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert [gateway.is_ready("127.0.0.1") for _ in range(4)] == [False, False, True, False]
            now += 6.0  # it is not let know
            assert gateway.is_ready("127.0.0.1")
        finally:
            server.shutdown()
            thread.join()
    assert not gateway.is_ready("127.0.0.1")


def test_the_gateway_asks_its_server_by_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does where the environment names one; "ready" was said, and each answer was a 503."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda _, env, **__: environments.append(env))
    for address, url in (("192.0.2.1", "192.0.2.1:8001"), ("2001:db8::1", "[2001:db8::1]:8001")):
        Gateway(address, 9000, url, 5, lambda: None)
        assert environments.pop()["no_grpc_proxy"] == address


def test_a_gateway_that_always_ends_starts_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a start a second, each of which computes for one, it took a core."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ended = SimpleNamespace(wait=lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: ended)
    gateway = Gateway("127.0.0.1", 9000, "127.0.0.1:8001", 5, lambda: None)
    waits = []
    for lived in (0.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1e6, 1.5):
        began, now = now, now + lived
        gateway.reap()
        waits.append(gateway.due - began)
        now = gateway.due
        gateway.start()
    assert waits == [1, 2, 4, 8, 16, 32, 32, 1e6, 2]


def test_the_gateway_imports_nothing_from_where_serve_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file uvicorn.py in the user's folder was run in the gateway's place."""
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('run by mistake')", "utf-8")
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        Gateway("127.0.0.1", taken.getsockname()[1], "127.0.0.1:8001", 5, lambda: None)
        monkeypatch.undo()
        (command,) = commands
        told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert "cannot listen at" in told, "all was imported"


def test_a_gateway_that_cannot_start_ends_the_server(
    serve_repository: ServeRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = write_model(tmp_path / "repository", "identity", IDENTITY)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "uvicorn.py").write_text("1 / 0", "utf-8")
    with pytest.raises(AssertionError, match=r"(?s)status 1:.*--openai-port: the gateway does not start"):
        serve_repository(repository, "--openai-port=0", env={"PYTHONPATH": str(tmp_path / "broken")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    told = CliRunner().invoke(main, ["serve", "--model-repository", str(repository), "--openai-port", "0"])
    assert "needs the gateway: pip install 'quire-triton-client[openai]'" in told.output


def test_when_tritonserver_dies_serve_ends_with_its_status_and_cleans_up(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN))
    (triton,) = psutil.Process(server.pid).children()
    triton.kill()
    assert server.process is not None
    assert server.process.wait(timeout=60) == 128 + signal.SIGKILL
    assert server.leftovers() == []


def test_when_serve_is_killed_tritonserver_stops_and_the_next_start_removes_what_it_left(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    repository = write_model(tmp_path / "repository", "identity", IDENTITY)
    killed = serve_repository(repository)
    processes = killed.descendants()
    assert killed.process is not None
    killed.process.kill()
    killed.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == [], "tritonserver and its stubs end with the process that served them"
    left = shm_of(killed.shm_prefix)
    assert not left or f"{killed.shm_prefix}lock" in left, "none, if a server of others has started since"

    run_files.remove_stale()
    assert shm_of(killed.shm_prefix) == []


def test_a_model_that_does_not_load_ends_serve(serve_repository: ServeRepository, tmp_path: Path) -> None:
    # The status of a server that ended while we waited for readiness was once consumed, and then waited for
    # again, for ever.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with pytest.raises(AssertionError, match=r"(?s)ended with status 1:.*broken on purpose"):
        repository = write_model(tmp_path / "repository", "broken", BROKEN)
        serve_repository(repository, env={"TMPDIR": str(temporary)})
    assert list(temporary.iterdir()) == []


def test_a_missing_repository_is_one_clear_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", "--model-repository", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert result.output == f"Error: --model-repository: {tmp_path}/nowhere is not a directory\n"


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "quire.cli", "serve", "--model-repository", str(tmp_path)]
        command += ["--http-port=0", f"--grpc-port={port}", "--metrics-port=0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: --grpc-port: cannot use port {port} on 127.0.0.1: Address already in use "
        "(0 takes a free one)\n"
    )


def test_a_held_port_is_given_to_the_server_and_to_nobody_else() -> None:
    holder = bind_port("127.0.0.1", 0, "--http-port")
    port = holder.getsockname()[1]
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as tritonserver does
        server.bind(("127.0.0.1", port))
        server.listen()
    holder.close()


def test_a_name_as_address_is_that_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's HTTP listened at 255.255.255.255 for localhost, and the start never came to an end. An empty
    address was every address of the machine."""
    found: list[str] = []
    monkeypatch.setattr(serve, "_run", lambda config, *_: found.append(config.address) or 0)
    command = ["serve", "--model-repository", str(tmp_path), "--address"]
    for address in ("localhost", "0.0.0.0", "::1"):
        assert CliRunner().invoke(main, [*command, address]).exit_code == 0
    assert found == ["127.0.0.1", "0.0.0.0", "::1"]
    for address in ("", "a" * 99):
        assert "Invalid value for '--address'" in CliRunner().invoke(main, [*command, address]).output


def test_one_port_is_not_given_to_two(tmp_path: Path) -> None:
    """Models were loaded before Triton found its HTTP or gRPC port taken. Without a port for its metrics it
    served, and the gateway's was announced as theirs."""
    for one, other in (("http", "openai"), ("metrics", "openai"), ("http", "grpc")):
        with pytest.raises(ConfigError, match=f"--{other}-port: 29000 is --{one}-port, too"):
            ServeConfig(repositories=(tmp_path,), **{f"{one}_port": 29000, f"{other}_port": 29000})
    assert ServeConfig(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, openai_port=0)


@pytest.mark.parametrize("status", [200, 403, 503])
def test_a_server_is_ready_when_it_has_said_so_itself(status: int) -> None:
    """Of two that were started for the same ports the one that found them taken said "ready", as the other
    answered. A 403 is of who restricts `health`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever, args=(0.05,), daemon=True).start()
        with subprocess.Popen(["sleep", "600"]) as other:
            asked = [serve._is_ready(pid, *http_server.server_address) for pid in (os.getpid(), other.pid)]
            other.kill()
        asked.append(serve._is_ready(other.pid, *http_server.server_address))
        http_server.shutdown()
    assert asked == [status != 503, False, False]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to serve"),
        (["--", "--model-repository=x"], "nothing to serve"),
        (["a", "b"], "unexpected extra argument (b)"),
        (["--model-repository=/tmp", "--option=dtype=float32"], "--option is about a checkpoint"),
        (["a", "--option=dtype"], "'dtype' must have the form KEY=VALUE"),
        (["a", "--", "--model-control-mode=explicit"], "lets every client load models"),
        (["a", "--", "--allow-http=false"], "whether the server is ready"),
        (["a", "--", "--allow-http", "0"], "whether the server is ready"),
        (
            ["a", "--openai-port=0", "--", "--allow-grpc=false"],
            "the gateway of --openai-port asks the server by",
        ),
        (["a", "--openai-port=0", "--", "--grpc-use-ssl", "1"], "asks the server without TLS"),
        (["a", "--ready-file=/no/such/folder/ready"], "--ready-file: /no/such/folder/ready cannot be a file"),
        (["a", "--ready-file=/"], "--ready-file: / cannot be a file"),
        (["a", "--", "--http-port=9000"], "--http-port: give --http-port before --"),
        (["a", "--", "--grpc-addr", "0.0.0.0"], "--grpc-address: give --address before --"),
    ],
)
def test_what_is_to_be_served_must_be_said(arguments: list[str], complaint: str) -> None:
    told = CliRunner().invoke(main, ["serve", *arguments])
    assert told.exit_code and complaint in told.output


def test_arguments_are_safe_by_default_and_leave_out_what_the_server_does_not_know(tmp_path: Path) -> None:
    config = ServeConfig(repositories=(tmp_path,), extra_args=("--log-verbose=1",))
    known = frozenset(
        {"model-repository", "http-address", "http-port", "model-control-mode", "http-restricted-api"}
    )
    arguments = server_arguments(
        config, known, tmp_path / "backends", (1, 2, 3), "quire-x-", config.repositories
    )
    assert arguments[:4] == [
        f"--model-repository={tmp_path}",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--model-control-mode=none",
    ]
    assert arguments[4].startswith("--http-restricted-api=shared-memory,trace,logging:")
    assert arguments[5:] == ["--log-verbose=1"]

    some = ServeConfig(repositories=(tmp_path,), load_models=("a", "b"))
    chosen = (tmp_path / "chosen",)
    arguments = server_arguments(some, known | {"load-model"}, tmp_path, (1, 2, 3), "quire-x-", chosen)
    assert {f"--model-repository={chosen[0]}", "--model-control-mode=none"} <= set(arguments)
    assert not any(argument.startswith("--load-model") for argument in arguments)


@pytest.mark.parametrize(("flag", "expected"), [("trace-config", (5, 4.5)), ("allow-client-shm", (10, 7.0))])
def test_a_server_has_the_time_that_it_takes_to_unload(
    flag: str, expected: tuple[int, float], tmp_path: Path
) -> None:
    """26.09 waits for unloads in whole seconds: the demo took 5 s and ended with "Exit timeout expired". One
    of 24.10 must not have the time, as it leaks streams and then waits for them."""
    known = frozenset({"exit-timeout-secs", flag})
    config = ServeConfig(repositories=(tmp_path,))
    assert stop_times(config, known) == expected
    assert f"--exit-timeout-secs={expected[0]}" in server_arguments(
        config, known, tmp_path, (1, 2, 3), "quire-x-", ()
    )
    stated = ServeConfig(repositories=(tmp_path,), exit_timeout_s=60)
    assert stop_times(stated, known) == (60, expected[1])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model-control-mode=explicit",),
        ("--model-control-mode", "explicit"),
        ("--model-cont=explicit",),
        ("--model-control-mode=explicit", "--http-restricted-api=model-repository:key=value"),
    ],
)
def test_extra_arguments_do_not_let_clients_load_code(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lets every client load models"):
        ServeConfig(repositories=(tmp_path,), extra_args=arguments)


def test_explicit_control_is_left_to_who_restricts_it(tmp_path: Path) -> None:
    restricted = "statistics,model-repository:key=value"
    arguments = (
        "--model-control-mode=explicit",
        f"--http-restricted-api={restricted}",
        f"--grpc-restricted-protocol={restricted}",
    )
    assert ServeConfig(repositories=(tmp_path,), extra_args=arguments).extra_args == arguments


def test_everything_listens_on_the_one_address(tmp_path: Path) -> None:
    """tritonserver's own default for each of the three is all addresses of the machine."""
    services = ("http", "grpc", "metrics")
    known = frozenset(f"{name}-{what}" for name in services for what in ("address", "port"))
    for address, of_http, of_grpc in (("127.0.0.1",) * 3, ("::1", "ipv6:::1", "[::1]")):
        expected = {"http": of_http, "grpc": of_grpc, "metrics": of_http}
        config = ServeConfig(repositories=(tmp_path,), address=address)
        arguments = server_arguments(config, known, tmp_path, (1, 2, 3), "quire-x-", ())
        assert arguments == [
            f"--{name}-{what}={value}"
            for port, name in enumerate(services, 1)
            for what, value in (("address", expected[name]), ("port", port))
        ]


def test_only_headers_that_models_know_are_forwarded(tmp_path: Path) -> None:
    known = frozenset({"http-header-forward-pattern", "grpc-header-forward-pattern"})

    def patterns(config: ServeConfig) -> list[str]:
        arguments = server_arguments(config, known, tmp_path, (1, 2, 3), "quire-x-", config.repositories)
        return [argument.partition("=")[2] for argument in arguments]

    both = patterns(ServeConfig(repositories=(tmp_path,)))
    assert len(both) == 2 and both[0] == both[1]
    for name in ("X-Quire-Tenant", "x-tenant-id", "X-QUIRE-PRIORITY", "x-quire-cache-salt"):
        assert re.fullmatch(both[0], name)
    for name in ("Authorization", "Cookie", "x-quire-tenant-2", "my-x-tenant-id"):
        assert not re.fullmatch(both[0], name)
    assert patterns(ServeConfig(repositories=(tmp_path,), forward_headers="")) == ["", ""]


@pytest.fixture(scope="module")
def wheel_server() -> TritonServer:
    server = tritonserver.find()
    if not server.is_wheel:
        pytest.skip("an official tritonserver is installed; these test the wheel's layout")
    return server


def test_backend_directory_is_made_once_even_by_several_at_a_time(
    wheel_server: TritonServer, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: tritonserver.backend_directory(wheel_server, tmp_path), range(4)))
    (directory,) = made
    assert [entry.name for entry in (tmp_path / "backends").iterdir()] == [directory.name]
    assert {path.name for path in (directory / "python").iterdir()} == {
        "libtriton_python.so",
        tritonserver.STUB,
        tritonserver.UTILS,
    }
    assert (directory / "quire" / "model.py").is_file()
    assert {"http-address", "backend-directory", "exit-timeout-secs"} <= wheel_server.flags(directory)


def test_backend_directories_of_removed_checkouts_are_forgotten(
    wheel_server: TritonServer, tmp_path: Path
) -> None:
    dangling = tmp_path / "backends" / "3.11-0000"
    dangling.mkdir(parents=True)
    (dangling / "quire").symlink_to(tmp_path / "removed checkout")
    kept = tritonserver.backend_directory(wheel_server, tmp_path)
    assert list((tmp_path / "backends").iterdir()) == [kept]


def test_environment_puts_this_python_first(wheel_server: TritonServer) -> None:
    environment = wheel_server.environment()
    libpython = Path(environment["LD_LIBRARY_PATH"].split(os.pathsep)[0])
    assert (libpython / f"libpython{tritonserver.PYTHON_VERSION}.so.1.0").is_file()
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["QUIRE_PYTHON"] == sys.executable


def test_a_python_without_shared_libpython_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tritonserver.sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(tritonserver.sys, "base_prefix", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no shared libpython3\.\d+\.so\.1\.0 .* --enable-shared"):
        tritonserver.libpython_directory.__wrapped__()


def test_a_missing_server_and_a_stub_of_another_python_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tritonserver, "OFFICIAL_BINARY", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no tritonserver found"):
        tritonserver.find()
    with pytest.raises(ConfigError, match="not an executable file"):
        tritonserver.find(str(tmp_path / "none"))

    binary = tmp_path / "bin" / "tritonserver"
    stub = tmp_path / "backends" / "python" / tritonserver.STUB
    for file, content in ((binary, b"#!/bin/sh\n"), (stub, b"\x7fELF...libpython3.99.so.1.0\0")):
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        file.chmod(0o755)
    with pytest.raises(ConfigError, match=r"built for Python 3\.99"):
        tritonserver.find(str(binary))


def test_an_installed_backend_folder_works_on_its_own(tmp_path: Path) -> None:
    out = tmp_path / "backends" / "quire"
    result = CliRunner().invoke(main, ["backend", "install", "--out", str(out)])
    assert result.exit_code == 0, result.output
    packages = {"quire", "quire_common", "quire_ensemble", "quire_kernels"}
    assert {path.name for path in out.iterdir()} == {"model.py", *packages}
    assert not list(out.rglob("__pycache__"))
    # As the stub does it: the folder is appended to sys.path, the module is called `model`. The packages
    # beside it win over those installed in this environment.
    program = (
        "import sys, unittest.mock\n"
        "sys.modules['triton_python_backend_utils'] = unittest.mock.MagicMock()\n"
        f"sys.path.append({str(out)!r})\n"
        "import model, quire, quire_kernels, quire_ensemble\n"
        "assert model.TritonPythonModel.__module__ == 'quire.triton.frontend'\n"
        "print(quire.__file__, quire_kernels.__file__, quire_ensemble.__file__, sep='\\n')\n"
        "assert 'torch' not in sys.modules, 'auto-complete would pay for torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [Path(line).parent.parent for line in done.stdout.split()] == [out] * 3


def test_files_of_a_live_run_are_not_stale(tmp_path: Path) -> None:
    files = run_files.RunFiles()
    region = Path("/dev/shm") / f"{files.shm_prefix}region"
    region.touch()
    (files.directory / "socket").touch()
    run_files.remove_stale()
    assert region.exists()
    assert files.directory.is_dir()
    files.remove()
    assert shm_of(files.shm_prefix) == []
    assert not files.directory.exists()


def test_a_run_that_begins_is_not_taken_for_one_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the making of its lock and the locking a start beside it could find it free: the directory with
    the engine's socket was gone before the engine came to it."""
    lock = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        monkeypatch.setattr(run_files.fcntl, "flock", lock)
        run_files.remove_stale()  # of another server, just now
        lock(fd, operation)

    monkeypatch.setattr(run_files.fcntl, "flock", flock)
    files = run_files.RunFiles()
    try:
        assert files.directory.is_dir()
        assert shm_of(files.shm_prefix) == [f"{files.shm_prefix}lock"]
        run_files.remove_stale()
        assert files.directory.is_dir()
    finally:
        files.remove()
    assert not files.directory.exists() and not shm_of(f".{files.shm_prefix}")


def test_names_that_others_put_into_shared_memory_remove_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user can make files in /dev/shm; the part of a name between `quire-` and `-lock` became that of a
    directory to remove."""
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    monkeypatch.setattr(run_files, "SHM", shm)
    monkeypatch.setattr(run_files.tempfile, "gettempdir", lambda: str(temporary))
    ids = ("..", "mine", "0123456789", "0000000a", "0000000b", "0000000c", "0000000d")
    for name in ids:
        (temporary / f"quire-run-{name}").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("..", "mine", "0123456789", "0000000d"):
        (shm / f"quire-{name}-lock").touch()
    (shm / "quire-0000000a-lock").symlink_to(tmp_path / "file")
    os.mkfifo(shm / "quire-0000000b-lock")
    (shm / "quire-0000000c-lock").touch()
    monkeypatch.setattr(run_files.os, "getuid", lambda: 4242)
    run_files.remove_stale()
    assert len(list(temporary.iterdir())) == len(ids), "another user's are left alone"
    monkeypatch.undo()
    monkeypatch.setattr(run_files, "SHM", shm)
    monkeypatch.setattr(run_files.tempfile, "gettempdir", lambda: str(temporary))
    run_files.remove_stale()
    assert {path.name.removeprefix("quire-run-") for path in temporary.iterdir()} == {*ids[:5]}


def test_a_link_in_place_of_the_ready_file_is_not_written_through(tmp_path: Path) -> None:
    """The unfinished file had a name that could be foreseen: a link there let its target be overwritten."""
    ready, target = tmp_path / "ready.json", tmp_path / "target"
    target.write_text("precious")
    ready.symlink_to(target)
    (tmp_path / f".ready.json.{os.getpid()}").symlink_to(target)
    config = ServeConfig(repositories=(tmp_path,), ready_file=ready)
    run = serve.ServerRun(config, TritonServer(*[tmp_path] * 4, is_wheel=True), tmp_path)
    try:
        run._announce((1, 2, 3))
        assert target.read_text() == "precious"
        assert json.loads(ready.read_text())["pid"] == os.getpid()
        run._remove_ready_file()
        assert not ready.exists()
        ready.write_text("of somebody else")
        run._remove_ready_file()
        assert ready.exists()
    finally:
        run._files.remove()


def test_help_imports_neither_torch_nor_the_client(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom quire.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\nassert result.exit_code == 0, result.output\n"
        "assert 'repository' in result.output and 'healthcheck' in result.output\n"
        "heavy = {'torch', 'transformers', 'tritonclient', 'numpy', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_options_of_commands_that_are_imported_late(shell: str) -> None:
    told = CliRunner().invoke(main, ["completion", shell])
    assert told.exit_code == 0 and f"_QUIRE_COMPLETE={shell}_complete" in told.output
    words = {"COMP_WORDS": "quire serve --openai", "COMP_CWORD": "--openai" if shell == "fish" else "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from quire.cli import main; main(prog_name='quire')"],
        env={**os.environ, **words, "_QUIRE_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "--openai-port" in done.stdout, done.stderr


def test_healthcheck_asks_a_served_model_for_a_token(
    demo_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # by which it asked
    healthy = CliRunner().invoke(main, ["healthcheck", "--url", demo_server.grpc_url, "--timeout", "60"])
    assert healthy.exit_code == 0, healthy.output
    assert healthy.output.startswith(f"quire: generator at {demo_server.grpc_url} is healthy (")

    command = ["healthcheck", "--url", demo_server.grpc_url, "--model", "no-such-model", "--timeout", "60"]
    missing = CliRunner().invoke(main, command)
    assert missing.exit_code == 1
    assert "no-such-model" in missing.output.split("is NOT healthy:")[1]
    assert missing.output.count("\n") == 1


def test_healthcheck_without_a_server_is_one_line_and_status_1() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(main, ["healthcheck", "--url", url, "--timeout", "3"])
    assert result.exit_code == 1
    assert result.output.startswith(f"quire: generator at {url} is NOT healthy: ")
    assert result.output.count("\n") == 1


def test_the_images_run_quire_serve() -> None:
    """That for GPUs ran tritonserver without us, by flags that had to be the same."""
    for name in ("Dockerfile", "Dockerfile.cpu"):
        text = (Path(__file__).parents[2] / "docker" / name).read_text("utf-8")
        command = json.loads(text.rpartition("\nCMD ")[2])
        assert command[:2] == ["quire", "serve"]
        told = CliRunner().invoke(main, [*command[1:], "--load-model", "none"])
        assert "/models is not a directory" in told.output, "all options are known"


@pytest.mark.parametrize("damage", ["flags.txt", "quire/model.py", "python/triton_python_backend_stub"])
def test_a_backend_directory_that_lost_a_file_is_made_again(
    wheel_server: TritonServer, tmp_path: Path, damage: str
) -> None:
    """What was there once was believed for ever: after a crash or a cleaner of old files no start worked."""
    made = tritonserver.backend_directory(wheel_server, tmp_path)
    if damage == "quire/model.py":  # of the checkout, behind a link
        (made / "quire").unlink()
    elif damage == "flags.txt":
        (made / damage).write_text("")
    else:
        os.truncate(made / damage, 1000)
    assert tritonserver.backend_directory(wheel_server, tmp_path) == made
    assert "model-repository" in wheel_server.flags(made)
    assert (made / "quire" / "model.py").is_file()
    stub = made / "python" / tritonserver.STUB
    assert stub.read_bytes() == wheel_server.stub.read_bytes()
    before = stub.stat().st_ino
    assert tritonserver.backend_directory(wheel_server, tmp_path) == made
    assert stub.stat().st_ino == before, "a whole one is left alone"


def test_a_backend_directory_where_nothing_may_be_executed_is_said_to_be_that(
    wheel_server: TritonServer, tmp_path: Path
) -> None:
    """Its library and its stub are executed from there: the server started, and could load no model."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec", "none", str(tmp_path)], check=False
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        for _ in range(2):  # made, and found
            with pytest.raises(ConfigError, match=r"noexec.*QUIRE_CACHE_DIR"):
                tritonserver.backend_directory(wheel_server, tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_backend_directory_that_cannot_be_kept_is_this_processs(
    wheel_server: TritonServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "backends").write_text("in the way")
    made = tritonserver.backend_directory(wheel_server, tmp_path)
    assert made.is_relative_to(private_directory())
    assert (made / "quire" / "model.py").is_file()
    assert "cannot be kept" in caplog.text
