"""Quire behind tritonserver: the same engine, asked over gRPC, every token streamed."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from benchmarks.peers.adapters.quire_engine import engine_options
from benchmarks.peers.protocol import Run, RunResult, drive_streams, serve
from benchmarks.peers.workloads import Request
from benchmarks.served import served
from quire_client.aio import AsyncClient

MODEL = "generator"


def load(weights: Path, options: dict[str, Any]) -> Run:
    """Serves a repository with one generator for as long as this process lives."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    version = folder / "repository" / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "quire"\n')
    (version / "quire.json").write_text(json.dumps(engine_options(weights, options)))
    server = opened.enter_context(served(folder / "repository", log=folder / "serve.log"))
    return lambda requests, running: asyncio.run(_run(server.url, requests, running))


async def _run(url: str, requests: Sequence[Request], running: int) -> RunResult:
    async with AsyncClient(url) as client:
        await client.server_ready()

        async def stream(request: Request) -> AsyncIterator[Sequence[int]]:
            options = {"max_tokens": request.num_output, "ignore_eos": True}
            wanted = ["output_ids"]  # each output costs time per response
            async for chunk in client.stream(
                input_ids=request.prompt, model=MODEL, outputs=wanted, **options
            ):
                yield chunk.token_ids

        return await drive_streams(stream, requests, running)


if __name__ == "__main__":
    serve(load, ("quire-triton", "torch", "nvidia-pytriton"))
