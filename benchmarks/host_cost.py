"""What a streamed token costs on the host beside the model: CPU time of tritonserver and of the stub.

The figure is CPU microseconds per token, read from /proc around a run of N streams, for the server process
and for the frontends (stubs) apart; the engine's and the client's own time are told too but are not part
of it. Deltas merge while a stream falls behind, so tokens and responses are counted both.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.prompts import prompts
from quire_client import AsyncClient

ROLES = ("server", "stub", "engine")


@dataclass(frozen=True)
class HostCost:
    """CPU time per streamed token of one run."""

    model: str
    streams: int
    tokens: int
    responses: int
    wall_s: float
    cpu_us_per_token: dict[str, float]

    @property
    def host_us(self) -> float:
        """Server and stub together: what Triton's path costs."""
        return self.cpu_us_per_token["server"] + self.cpu_us_per_token["stub"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "streams": self.streams,
            "tokens": self.tokens,
            "responses": self.responses,
            "tokens_per_s": self.tokens / self.wall_s,
            "cpu_us_per_token": self.cpu_us_per_token,
            "host_us_per_token": self.host_us,
        }


def role_of(process: psutil.Process) -> str | None:
    """The part of the host that a process is."""
    command = process.cmdline()
    if process.name() == "tritonserver":
        return "server"
    if "quire.engine.loop" in command:
        return "engine"
    return "stub" if command and command[0].endswith("triton_python_backend_stub") else None


def find_processes(server_pid: int) -> dict[str, list[psutil.Process]]:
    """Processes below `quire serve`, by role."""
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    for process in psutil.Process(server_pid).children(recursive=True):
        role = role_of(process)
        if role is not None:
            found[role].append(process)
    return found


def measure(url: str, server_pid: int, model: str, *, streams: int, max_tokens: int) -> HostCost:
    """Runs `streams` streams at once to their end, `max_tokens` tokens each."""
    processes = find_processes(server_pid)
    asyncio.run(_run(url, model, prompts(streams, seed=1), 4))
    before = {role: _cpu_seconds(group) for role, group in processes.items()}
    start = time.monotonic()
    tokens, responses = asyncio.run(_run(url, model, prompts(streams), max_tokens))
    wall = time.monotonic() - start
    cost = {role: (_cpu_seconds(group) - before[role]) * 1e6 / tokens for role, group in processes.items()}
    return HostCost(model, streams, tokens, responses, wall, cost)


async def _run(url: str, model: str, texts: list[str], max_tokens: int) -> tuple[int, int]:
    async with AsyncClient(url) as client:

        async def one(text: str) -> tuple[int, int]:
            tokens = responses = 0
            stream = client.stream(text, model=model, max_tokens=max_tokens, ignore_eos=True)
            async for chunk in stream:
                tokens += len(chunk.token_ids)
                responses += 1
            return tokens, responses

        results = await asyncio.gather(*(one(text) for text in texts))
    return sum(t for t, _ in results), sum(r for _, r in results)


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def table(costs: list[HostCost]) -> str:
    """Markdown."""
    lines = [
        "| model | streams | tok/s | tokens/response | server us/token | stub us | both | engine us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cost in costs:
        cpu = cost.cpu_us_per_token
        lines.append(
            f"| {cost.model} | {cost.streams} | {cost.tokens / cost.wall_s:.0f} | "
            f"{cost.tokens / cost.responses:.2f} | {cpu['server']:.0f} | {cpu['stub']:.0f} | "
            f"{cost.host_us:.0f} | {cpu['engine']:.0f} |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--url", required=True, help="gRPC endpoint of a running server.")
@click.option("--server-pid", required=True, type=int, help="Process id of its `quire serve`.")
@click.option("--models", default="generator,chat", show_default=True)
@click.option("--streams", default="1,16,64", show_default=True)
@click.option("--max-tokens", default=256, show_default=True)
def main(url: str, server_pid: int, models: str, streams: str, max_tokens: int) -> None:
    """Prints the host cost per streamed token of a running server."""
    costs = [
        measure(url, server_pid, model, streams=int(count), max_tokens=max_tokens)
        for model in models.split(",")
        for count in streams.split(",")
    ]
    click.echo(table(costs))


if __name__ == "__main__":
    main()
