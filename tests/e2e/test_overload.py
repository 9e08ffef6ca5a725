"""Five times as many requests as a server has room for: the accepted are served, the others refused at once.

Nothing is judged by the clock: while two requests hold the seats, refusals come and no token does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire_client.aio import AsyncClient
from quire_client.errors import Unavailable
from tests.e2e.conftest import ENDLESS, NarrowServer
from tests.fixtures.pace import paced
from tests.fixtures.server import ServerProcess

pytestmark = pytest.mark.server

MAX_NUM_SEQS, MAX_WAITING = NarrowServer.SEATS, NarrowServer.WAITING
OFFERED = 5 * (MAX_NUM_SEQS + MAX_WAITING)
ROUNDS = 4
NUM_TOKENS = 50
PROMPT_TOKENS = 32
MAX_GROWTH = 64 * 2**20
"""Bytes that each process may grow while some hundred requests are refused."""


def start(client: AsyncClient, number: int, num_tokens: int, **options: Any) -> Any:
    prompt = [(number * 37 + i * 11) % 400 + 3 for i in range(PROMPT_TOKENS)]
    asked = {"model": "generator", "max_tokens": num_tokens, "ignore_eos": True, **options}
    return client.stream(input_ids=prompt, **asked)


async def storm(client: AsyncClient, numbers: Iterator[int]) -> list[float | None]:
    """What those who were refused were told of when to come again."""
    held = {"logits_processors": paced()}
    blockers = [start(client, next(numbers), ENDLESS, **held) for _ in range(MAX_NUM_SEQS)]
    for blocker in blockers:
        await anext(blocker)
    token_came = asyncio.Event()

    async def one(number: int) -> int | Unavailable:
        count = 0
        try:
            async for chunk in start(client, number, NUM_TOKENS):
                token_came.set()
                count += len(chunk.token_ids)
        except Unavailable as error:
            assert not count, "refused after its first token"
            return error
        return count

    tasks = [asyncio.create_task(one(next(numbers))) for _ in range(OFFERED)]
    refusals = []
    for ended in itertools.islice(asyncio.as_completed(tasks), OFFERED - MAX_WAITING):
        error = await ended
        assert isinstance(error, Unavailable), "one that came first was to wait for a seat"
        refusals.append(error.retry_after)
    assert not token_came.is_set(), "none of those that wait can have had a seat"
    for blocker in blockers:
        await blocker.aclose()
    counts = [count for count in await asyncio.gather(*tasks) if not isinstance(count, Unavailable)]
    assert counts == [NUM_TOKENS] * MAX_WAITING, "an accepted request is served to its end"
    return refusals


def memory(server: ServerProcess) -> dict[str, int]:
    """Resident bytes of every process of the server."""
    return {f"{p.name()} {p.pid}": p.memory_info().rss for p in server.descendants()}


@pytest.mark.row("B15", clauses=("flat", "retry"))
def test_five_times_the_load(narrow: NarrowServer) -> None:
    server = narrow.server
    with narrow.trace_file.open("rb") as trace:
        begin = trace.seek(0, 2)

    async def run() -> tuple[list[list[float | None]], dict[str, int]]:
        """Refusals of each round, and memory after the second one, when it has grown to what it takes."""
        numbers, rounds, before = itertools.count(), [], {}
        async with AsyncClient(server.grpc_url) as client:
            for index in range(ROUNDS):
                rounds.append(await storm(client, numbers))
                before = memory(server) if index == 1 else before
        return rounds, before

    rounds, before = asyncio.run(run())
    after = memory(server)
    assert after.keys() == before.keys(), "nobody died"
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < MAX_GROWTH, growth
    # Nothing is foretold before anything has ended, nor long after it, on a machine that stood still.
    known = [seconds for told in rounds for seconds in told if seconds is not None]
    assert known and min(known) > 0, rounds

    with narrow.trace_file.open("rb") as trace:
        trace.seek(begin)
        records = [json.loads(line) for line in trace]
    steps = [record for record in records if "scheduled" in record]
    assert max(record["num_waiting"] for record in steps) == MAX_WAITING
    arrived = [arrival["id"] for record in steps for arrival in record["arrivals"]]
    assert len(arrived) == ROUNDS * (MAX_NUM_SEQS + MAX_WAITING), "who is refused never gets as far"
    begun = list(dict.fromkeys(row[0] for record in steps for row in record["scheduled"]))
    assert begun == arrived, "first come, first served"
