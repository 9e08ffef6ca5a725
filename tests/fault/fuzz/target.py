"""The server under fire: every kind of model over one tiny checkpoint, the gateway, the engine's socket."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from quire_ensemble import builder, pbtxt
from tests.fixtures.server import ServerProcess
from tests.fixtures.vision_checkpoints import make_vision_checkpoint

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_blocks": 1024,
    "max_num_seqs": 32,
    "num_threads": 1,
}


def write_repository(root: Path) -> Path:
    """Models: generator, generator_unary, tokenizer, chat, vision_preprocessor, vision_encoder, vision_chat.

    The generators share one engine.
    """
    checkpoint, repository = make_vision_checkpoint("llava_siglip", root / "checkpoint"), root / "repository"
    builder.build_repository(checkpoint, repository, placement="path", engine_options=OPTIONS)
    for name, config in (
        ("tokenizer", pbtxt.tokenizer_config("tokenizer", checkpoint=str(checkpoint))),
        (
            "chat",
            pbtxt.ensemble_config(
                "chat", before={"tokenizer": "tokenizer"}, generator="generator", decoupled=True
            ),
        ),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "tokenizer" / "1" / "model.py").write_text(builder._python_model("tokenizer"))
    return repository


@dataclass
class Target:
    """A running server with a gateway before it; a context manager."""

    root: Path
    server: ServerProcess = field(init=False)
    gateway: subprocess.Popen[str] = field(init=False)
    gateway_url: str = field(init=False, default="")
    """"127.0.0.1:port"."""
    engine_address: str = field(init=False, default="")
    engine_pid: int = field(init=False, default=0)

    def __enter__(self) -> Target:
        self.server = ServerProcess(write_repository(self.root), self.root)
        self._start(self.server.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_gateway()
        self.server.end()

    def revive(self) -> None:
        """Another server where the old one has died, on other ports."""
        self._stop_gateway()
        self._start(self.server.again())

    def _start(self, server: ServerProcess) -> None:
        self.server = server
        command = [sys.executable, "-m", "quire_client.cli", "openai", "--port=0", f"--url={server.grpc_url}"]
        self.gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.gateway.stdout is not None
        self.gateway_url = self.gateway.stdout.readline().strip().removeprefix("http://").removesuffix("/v1")
        assert self.gateway_url, "the gateway did not start"
        (engine,) = server.running("quire.engine.loop")
        arguments, self.engine_pid = engine.cmdline(), engine.pid
        directory = Path(arguments[arguments.index("--directory") + 1])
        self.engine_address = json.loads((directory / "state.json").read_text("utf-8"))["address"]

    def _stop_gateway(self) -> None:
        self.gateway.terminate()
        self.gateway.wait(120)
        assert self.gateway.stdout is not None
        self.gateway.stdout.close()

    def processes(self) -> dict[str, psutil.Process]:
        """By a name of its role, every process of the server, and the gateway."""
        found = {}
        for process in [*self.server.descendants(), psutil.Process(self.gateway.pid)]:
            try:
                found[f"{_role(process)} {process.pid}"] = process
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    if "quire.engine.loop" in words:
        return "engine"
    if "quire_client.cli" in words:
        return "gateway"
    if process.name().startswith("triton_python_b"):
        return "stub " + next((Path(word).parts[-3] for word in words if word.endswith("model.py")), "?")
    return process.name()
