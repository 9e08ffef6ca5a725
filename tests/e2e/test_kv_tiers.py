"""Blocks on disk outlive the engine and the server; those in host memory come back by copy."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_client import Client
from quire_client.errors import Unavailable
from tests.e2e.conftest import OPTIONS, write_generator
from tests.e2e.triton_calls import Reply, stream
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

BLOCK_SIZE = 16
PROMPT = [(i * 13) % 400 + 3 for i in range(200)]
IN_BLOCKS = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
SMALL: dict[str, Any] = {**OPTIONS, "num_blocks": 64}
"""The least that max_model_len allows."""


class Served:
    """A repository of two models, the directory of the disk tier, and servers one after the other."""

    def __init__(self, root: Path, checkpoint: Path) -> None:
        self.root = root
        self.directory = root / "blocks"
        self.traces = {name: root / f"{name}.jsonl" for name in ("disk", "host")}
        tiers = {
            "disk": {"disk_cache_directory": str(self.directory)},
            "host": {"host_cache_memory": "64MiB"},
        }
        for name, keys in tiers.items():
            options = {**SMALL, **keys, "trace_file": str(self.traces[name])}
            write_generator(root / "repository", name, checkpoint, **options)

    def server(self, name: str, *models: str) -> ServerProcess:
        folder = self.root / name
        folder.mkdir()
        return ServerProcess(self.root / "repository", folder, tuple(f"--load-model={m}" for m in models))

    def num_computed(self, model: str) -> int:
        """Prompt tokens computed for the latest request, by the engine's trace."""
        records = [json.loads(line) for line in self.traces[model].read_text("utf-8").splitlines()]
        latest = [arrival["id"] for record in records for arrival in record.get("arrivals", [])][-1]
        rows = [row for record in records for row in record.get("scheduled", []) if row[0] == latest]
        return sum(max(0, min(begin + count, len(PROMPT)) - begin) for _, begin, count in rows)


@pytest.fixture
def served(tmp_path: Path, tiny_checkpoint: Path) -> Iterator[Served]:
    yield Served(tmp_path, tiny_checkpoint)


def ask(server: ServerProcess, model: str, prompt: list[int] = PROMPT) -> Reply:
    inputs = {"input_ids": prompt, "max_tokens": 20, "ignore_eos": True, "return_num_cached_tokens": True}
    return stream(server.grpc_url, model, inputs)


def num_cached(reply: Reply) -> int:
    assert reply.error is None
    return int(reply.results[-1].as_numpy("num_cached_tokens")[0])


def flood(server: ServerProcess, model: str) -> None:
    """Leaves nothing in the pool of what was there."""
    for start in (1, 2):
        prompt = [(start * 31 + i * 7) % 400 + 3 for i in range(900)]
        assert ask(server, model, prompt).error is None


def inspect(server: ServerProcess, model: str) -> dict[str, Any]:
    with Client(server.grpc_url) as client:
        return client.cache_inspect(model=model)


def kill_engine(server: ServerProcess) -> None:
    """And waits until the next one answers."""
    (engine,) = server.running("quire.engine.loop")
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()

    def is_back() -> bool:
        try:
            return bool(inspect(server, "disk"))
        except Unavailable:
            return False

    wait_until(is_back, "the engine did not come back")


@pytest.mark.row("C10", clauses=("restart", "checksum"))
@pytest.mark.row("C9", clauses=("returns",))
def test_blocks_come_back_from_host_memory_and_after_every_end(served: Served) -> None:
    with served.server("first", "disk", "host") as server:
        cold = {model: ask(server, model) for model in ("disk", "host")}
        want = cold["disk"].token_ids
        assert (num_cached(cold["disk"]), served.num_computed("disk")) == (0, len(PROMPT))
        assert cold["host"].token_ids == want

        flood(server, "host")
        warm = ask(server, "host")
        assert (num_cached(warm), warm.token_ids) == (IN_BLOCKS, want)
        assert served.num_computed("host") == len(PROMPT) - IN_BLOCKS
        assert inspect(server, "host")["num_loaded_tokens"] == IN_BLOCKS
        server.stop()
        assert server.leftovers() == []

    with served.server("second", "disk") as server:
        warm = ask(server, "disk")
        assert (num_cached(warm), warm.token_ids) == (IN_BLOCKS, want)
        assert served.num_computed("disk") == len(PROMPT) - IN_BLOCKS
        assert inspect(server, "disk")["num_loaded_tokens"] == IN_BLOCKS

        kill_engine(server)
        warm = ask(server, "disk")
        assert (num_cached(warm), warm.token_ids) == (IN_BLOCKS, want)

        damaged = list(served.directory.glob("*/*/*.kv"))
        assert len(damaged) >= IN_BLOCKS // BLOCK_SIZE
        for path in damaged:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        kill_engine(server)
        miss = ask(server, "disk")
        assert (num_cached(miss), miss.token_ids) == (0, want)
        assert served.num_computed("disk") == len(PROMPT)
        assert inspect(server, "disk")["tiers"]["disk_damaged_blocks"] >= 1
