"""A hundred thousand requests, most of them ended before their time, with engines killed among them.

Whatever ends a request, what it held must come back: memory, descriptors, shared memory, blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest

from quire_client import AsyncClient
from quire_client.errors import InvalidArgument, QuireClientError, Unavailable
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.fault.fuzz.memory import anonymous_mib
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

CONCURRENCY = 48
FEW = 10_000
LIMIT_S = 120.0
"""For any single request; one that takes longer was lost."""
NUM_SAMPLES = 10
OURS_MIB, SERVER_MIB, SHARED_MIB = 4.0, 128.0, 16.0
"""What half of the requests may leave behind in a process of ours; in tritonserver 24.10, which loses some
memory with every stream; in shared memory, which never shrinks. Of a few requests nothing is said: what a
process takes for them at first may be more."""
DESCRIPTORS = 16
KINDS = {"whole": 6, "unary": 2, "several": 1, "guided": 1, "left": 4, "dropped": 3, "late": 3, "bad": 4}
"""Kinds of requests, and how many of 24 are of each."""
PROMPTS = ("hello", "a longer prompt that fills a block or two of the cache", "x" * 300, "soak")
ASKED: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
SEEDED: dict[str, Any] = {**ASKED, "temperature": 1.0, "seed": 5}
ENDLESS: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}
BAD: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": float("nan")},
    {"top_p": 7.0},
    {"stop": ["x"] * 10_000},
    {"structured_output": '{"json": {"type": "nothing"}}'},
    {"structured_output": '{"regex": "("}'},
    {"repetition_penalty": -3.0},
)


@dataclass
class Soak:
    """Sends random requests and counts what became of them."""

    server: ServerProcess
    rng: Random
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_done: int = 0

    async def send(self, count: int, kills: Sequence[int] = ()) -> None:
        """Sends so many; the engine is killed each time when as many as `kills` says are done in all."""
        todo, left = iter(range(count)), list(kills)
        async with AsyncClient(self.server.grpc_url, timeout=LIMIT_S) as client:
            if not self.expected:
                self.expected = {prompt: await self._reference(client, prompt) for prompt in PROMPTS}

            async def work() -> None:
                for _ in todo:
                    kind = self.rng.choices(list(KINDS), list(KINDS.values()))[0]
                    while (outcome := await self._outcome(client, kind)) == "UNAVAILABLE":
                        self.outcomes["there was no engine"] += 1
                        process = self.server.process
                        assert process is not None and process.poll() is None, self.server.log_text()[-3000:]
                        await asyncio.sleep(0.1)
                    self.outcomes[f"{kind}: {outcome}"] += 1
                    self.num_done += 1
                    if left and self.num_done >= left[0]:
                        left.pop(0)
                        for engine in self.server.running("quire.engine.loop"):
                            os.kill(engine.pid, signal.SIGKILL)

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        assert not left, "the engine was not killed as often as it should have been"

    async def _outcome(self, client: AsyncClient, kind: str) -> str:
        try:
            return await self._request(client, kind)
        except QuireClientError as error:
            if error.code != "UNAVAILABLE" and error.code != "DEADLINE_EXCEEDED":
                self.wrong.append(f"{kind}: {error.code}: {error}")
            return error.code

    async def _reference(self, client: AsyncClient, prompt: str) -> tuple[int, ...]:
        return (await client.stream(prompt, model="generator", **SEEDED).result()).token_ids

    async def _request(self, client: AsyncClient, kind: str) -> str:
        prompt = self.rng.choice(PROMPTS)
        if kind == "bad":
            arguments = {**ASKED, **self.rng.choice(BAD)}
            try:
                await client.stream(prompt, model="generator", **arguments).result()
            except (InvalidArgument, ValueError):
                return "refused"
            self.wrong.append(f"taken: {arguments!r:.200}")
            return "taken"
        if kind in ("whole", "unary"):
            ask = client.stream if kind == "whole" else client.generate
            model = "generator" if kind == "whole" else "generator_unary"
            asked: Any = ask(prompt, model=model, **SEEDED)
            result = await (asked.result() if kind == "whole" else asked)
            if result.token_ids != self.expected[prompt]:
                self.wrong.append(f"{kind} {prompt!r:.20}: {result.token_ids}, not {self.expected[prompt]}")
            return str(result.finish_reason)
        if kind == "several":
            result = await client.stream([prompt, "hello"], model="generator", n=2, **SEEDED).result()
            ids = [choice.token_ids for choice in result.choices]
            if len(ids) != 4 or ids[2] != self.expected["hello"]:
                self.wrong.append(f"several: {ids}")
            return "stop"
        if kind == "guided":
            guided: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
            guided["structured_output"] = '{"regex": "[a-c]{4}"}'
            result = await client.stream(prompt, model="generator", **guided).result()
            if len(result.text) != 4 or set(result.text) - set("abc"):
                self.wrong.append(f"guided: {result.text!r}")
            return "stop"
        if kind == "late":
            deadline = {"deadline_ms": self.rng.choice((1, 5, 20, 50))} if self.rng.random() < 0.5 else {}
            timeout = None if deadline else self.rng.choice((0.005, 0.02, 0.05))
            stream = client.stream(prompt, model="generator", timeout=timeout, **ENDLESS, **deadline)
            return str((await stream.result()).finish_reason)
        stream = client.stream(prompt, model="generator", **ENDLESS)
        chunks = self.rng.choice((0, 1, 1, 2, 5))
        if kind == "dropped":
            reading = asyncio.ensure_future(stream.result())
            await asyncio.sleep(0.01 * chunks)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return "dropped"
        async with stream:
            while chunks and await anext(stream, None) is not None:
                chunks -= 1
        return "left"


def descriptors(server: ServerProcess) -> dict[str, int]:
    """Open files by process; that of tritonserver has those of the front's connections too."""
    found = {}
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            found[f"{process.name()} {process.pid}"] = process.num_fds()
    return found


def shared_mib(server: ServerProcess) -> float:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"{server.shm_prefix}*")) / 2**20


def at_rest(server: ServerProcess) -> None:
    """Until no request is open and no block in use; what is lost never comes back."""

    def is_at_rest() -> bool:
        found = inspect(server)
        return found is not None and not found["requests"] and not found["num_blocks_in_use"]

    wait_until(is_at_rest, lambda: inspect(server), poll_s=0.1)


def inspect(server: ServerProcess) -> dict[str, Any] | None:
    """What the engine says of its cache and its requests; None while there is no engine."""

    async def ask() -> dict[str, Any] | None:
        async with AsyncClient(server.grpc_url, timeout=LIMIT_S) as client:
            try:
                requests = await client.requests(model="generator")
                return {**await client.cache_inspect(model="generator"), **requests}
            except Unavailable:
                return None

    return asyncio.run(ask())


def slope(samples: list[tuple[int, float]]) -> float:
    """KiB that a request leaves behind, by least squares over (requests done, MiB)."""
    done, size = np.array(samples, dtype=float).T
    return float(np.polyfit(done, size * 1024, 1)[0])


def serve(tmp_path: Path, serve_repository: Any) -> ServerProcess:
    checkpoint = make_checkpoint(
        "llama", tmp_path / "llama", max_position_embeddings=OPTIONS["max_model_len"]
    )
    build_repository(checkpoint, tmp_path / "repository", instance_count=2, engine_options=OPTIONS)
    started: ServerProcess = serve_repository(tmp_path / "repository")
    return started


def test_a_thousand_requests(mortal: ServerProcess) -> None:
    soak(mortal, 1_000)


@pytest.mark.slow
@pytest.mark.row("G32", whole=True)
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_requests(tmp_path: Path, serve_repository: Any) -> None:
    server = serve(tmp_path, serve_repository)
    soak(server, 100_000)
    server.stop()
    assert server.leftovers() == []


def soak(server: ServerProcess, count: int) -> None:
    """Half of the requests with three kills among them; the other half with samples of memory."""
    run = Soak(server, Random(19))
    began = time.monotonic()
    asyncio.run(run.send(count // 2, kills=[count * part // 10 for part in (1, 2, 3)]))
    at_rest(server)
    handles, samples = descriptors(server), defaultdict[str, list[tuple[int, float]]](list)
    shared = shared_mib(server)
    for _ in range(NUM_SAMPLES):
        asyncio.run(run.send(count // 2 // NUM_SAMPLES))
        at_rest(server)
        for name, size in anonymous_mib(server).items():
            samples[name].append((run.num_done, size))
    print(f"{run.num_done} requests in {time.monotonic() - began:.0f} s: {dict(run.outcomes)}")
    problems = run.wrong[:20]
    for name, found in samples.items():
        kib = slope(found)
        print(f"{name}: {found[0][1]:.1f} -> {found[-1][1]:.1f} MiB, {1024 * kib:.0f} bytes a request")
        bound = SERVER_MIB if name.startswith("tritonserver") else OURS_MIB
        if count > FEW and kib * count / 2 > 1024 * bound:
            problems.append(f"{name} loses {1024 * kib:.0f} bytes a request")
    for name, number in descriptors(server).items():
        if number > handles.get(name, number) + DESCRIPTORS:
            problems.append(f"{name} has {number} descriptors, {handles[name]} before")
    if shared_mib(server) > shared + SHARED_MIB:
        problems.append(f"{shared_mib(server):.0f} MiB of shared memory, {shared:.0f} before")
    assert not problems, "\n".join(problems)
    for kind in KINDS:
        assert any(name.startswith(f"{kind}:") for name in run.outcomes), run.outcomes
