"""What a streamed token costs on the host beside the model: CPU time of tritonserver and of the stub.

The figure is CPU microseconds per token, read from /proc around a run of N streams, for the server process
and for the frontends (stubs) apart; the engine's and the client's own time are told too but are not part
of it. Deltas merge while a stream falls behind, so tokens and responses are counted both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from benchmarks import load, report
from benchmarks.load import Arrival, prompts
from quire_client import AsyncClient

ROLES = ("server", "stub", "engine")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class HostCost:
    """CPU time per streamed token of one run."""

    model: str
    streams: int
    tokens_per_s: float
    tokens_per_response: float
    cpu_us_per_token: dict[str, float]
    host_us_per_token: float
    """Server and stub together: what Triton's path costs."""


def role_of(process: psutil.Process) -> str | None:
    """The part of the host that a process is."""
    command = process.cmdline()
    if process.name() == "tritonserver":
        return "server"
    if "quire.engine.loop" in command:
        return "engine"
    return "stub" if command and command[0].endswith("triton_python_backend_stub") else None


def measure(url: str, server_pid: int, model: str, *, streams: int, max_tokens: int) -> HostCost:
    """Runs `streams` streams at once to their end, `max_tokens` tokens each.

    Args:
        server_pid: process id of the `quire serve` that answers at `url`.
    """
    below = [(role_of(one), one) for one in psutil.Process(server_pid).children(recursive=True)]

    def cpu_seconds() -> dict[str, float]:
        return {role: sum(sum(one.cpu_times()[:2]) for own, one in below if own == role) for role in ROLES}

    async def run(seed: int, max_tokens: int) -> list[report.RequestRecord]:
        arrivals = [Arrival(0.0, prompt, max_tokens) for prompt in prompts(streams, seed=seed)]
        async with AsyncClient(url) as client:
            return await load.closed_loop(client, model, arrivals, streams, TIMEOUT_S)

    asyncio.run(run(1, 4))
    before = cpu_seconds()
    summary = report.summarize(asyncio.run(run(0, max_tokens)))
    tokens = summary["output_tokens"]
    cost = {role: 1e6 * (seconds - before[role]) / tokens for role, seconds in cpu_seconds().items()}
    rates = summary["tokens_per_s"], summary["tokens_per_response"]
    return HostCost(model, streams, *rates, cost, cost["server"] + cost["stub"])


def table(costs: Sequence[HostCost]) -> str:
    """Markdown."""
    return report.table(
        ("model", "streams", "tok/s", "tokens/response", "server us/token", "stub us", "both", "engine us"),
        [
            [
                cost.model,
                str(cost.streams),
                f"{cost.tokens_per_s:.0f}",
                f"{cost.tokens_per_response:.2f}",
                f"{cost.cpu_us_per_token['server']:.0f}",
                f"{cost.cpu_us_per_token['stub']:.0f}",
                f"{cost.host_us_per_token:.0f}",
                f"{cost.cpu_us_per_token['engine']:.0f}",
            ]
            for cost in costs
        ],
    )
