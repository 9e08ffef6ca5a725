"""`quire serve`: flags, ports, backend directory; with the real server: readiness, stopping, what is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from click.testing import CliRunner

from quire import run_files, tritonserver
from quire.cli import main
from quire.errors import ConfigError
from quire.serve import FORWARDED_HEADERS, ServeConfig, bind_port, server_arguments
from quire.tritonserver import TritonServer
from tests.fixtures.server import ServeRepository, ServerProcess

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
STOP_LIMIT_S = 15.0
"""For what takes some 2 s, however busy the machine is; the sleeper would sleep for longer."""


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
    server = serve_repository(write_model(tmp_path / "repository", "identity", IDENTITY))
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
        urllib.request.urlopen(f"http://{server.http_url}/v2/systemsharedmemory/status", timeout=10)

    assert server.stop() < STOP_LIMIT_S
    assert server.returncode == 0
    assert server.leftovers() == []
    assert not server.ready_file.exists()


def test_a_blocked_request_and_a_detached_child_do_not_survive_the_stop(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN))
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.async_infer("stubborn", [text_input("x")], callback=lambda result, error: None)
    assert "sleep" in [process.name() for process in server.descendants()]
    assert server.stop() < STOP_LIMIT_S
    client.close()
    assert server.leftovers() == []


def test_a_second_signal_stops_at_once(serve_repository: ServeRepository, tmp_path: Path) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN), "--exit-timeout=60")
    client = grpcclient.InferenceServerClient(server.grpc_url)
    client.async_infer("stubborn", [text_input("x")], callback=lambda result, error: None)
    os.kill(server.pid, signal.SIGINT)
    assert server.stop() < STOP_LIMIT_S
    client.close()
    assert server.returncode == 128 + signal.SIGKILL
    assert server.leftovers() == []


def test_when_tritonserver_dies_serve_ends_with_its_status_and_cleans_up(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    server = serve_repository(write_model(tmp_path / "repository", "stubborn", STUBBORN))
    (triton,) = psutil.Process(server.pid).children()
    triton.kill()
    assert server.process is not None
    assert server.process.wait(timeout=10) == 128 + signal.SIGKILL
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
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert alive == [], "tritonserver and its stubs end with the process that served them"
    assert f"{killed.shm_prefix}lock" in shm_of(killed.shm_prefix)

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
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


def test_arguments_are_safe_by_default_and_leave_out_what_the_server_does_not_know(tmp_path: Path) -> None:
    config = ServeConfig(repositories=(tmp_path,), extra_args=("--log-verbose=1",))
    known = frozenset(
        {"model-repository", "http-address", "http-port", "model-control-mode", "http-restricted-api"}
    )
    arguments = server_arguments(config, known, tmp_path / "backends", (1, 2, 3), "quire-x-")
    assert arguments[:4] == [
        f"--model-repository={tmp_path}",
        "--http-address=127.0.0.1",
        "--http-port=1",
        "--model-control-mode=none",
    ]
    assert arguments[4].startswith("--http-restricted-api=shared-memory,trace,logging:")
    assert arguments[5:] == ["--log-verbose=1"]

    explicit = ServeConfig(repositories=(tmp_path,), load_models=("a", "b"))
    arguments = server_arguments(explicit, known | {"load-model"}, tmp_path, (1, 2, 3), "quire-x-")
    assert {"--model-control-mode=explicit", "--load-model=a", "--load-model=b"} <= set(arguments)


def test_everything_listens_on_the_one_address(tmp_path: Path) -> None:
    """tritonserver's own default for each of the three is all addresses of the machine."""
    services = ("http", "grpc", "metrics")
    known = frozenset(f"{name}-{what}" for name in services for what in ("address", "port"))
    for address in ("127.0.0.1", "::1"):
        config = ServeConfig(repositories=(tmp_path,), address=address)
        arguments = server_arguments(config, known, tmp_path, (1, 2, 3), "quire-x-")
        assert arguments == [
            f"--{name}-{what}={value}"
            for port, name in enumerate(services, 1)
            for what, value in (("address", address), ("port", port))
        ]


def test_only_headers_that_models_know_are_forwarded(tmp_path: Path) -> None:
    known = frozenset({"http-header-forward-pattern", "grpc-header-forward-pattern"})

    def patterns(config: ServeConfig) -> list[str]:
        arguments = server_arguments(config, known, tmp_path, (1, 2, 3), "quire-x-")
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
    assert {path.name for path in out.iterdir()} == {"model.py", "quire", "quire_kernels", "quire_ensemble"}
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


def test_help_imports_neither_torch_nor_the_client(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom click.testing import CliRunner\nfrom quire.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\nassert result.exit_code == 0, result.output\n"
        "assert 'repository' in result.output and 'healthcheck' in result.output\n"
        "heavy = {'torch', 'transformers', 'tritonclient', 'numpy', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_healthcheck_asks_a_served_model_for_a_token(demo_server: ServerProcess) -> None:
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


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_the_images_forward_the_same_headers(image: str) -> None:
    """They start tritonserver without us."""
    text = (Path(__file__).parents[2] / "docker" / f"Dockerfile.{image}").read_text("utf-8")
    for protocol in ("http", "grpc"):
        assert f'"--{protocol}-header-forward-pattern={FORWARDED_HEADERS}"' in text
