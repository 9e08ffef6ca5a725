"""64 streams at once, and half of them cancelled: by Triton itself and, through the ensemble, by id."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire import SamplingParams
from quire_client import Cancelled, Client
from tests.e2e.conftest import ENDLESS, TINY_OPTIONS, TinyServer, survives_grpc_abort
from tests.e2e.triton_calls import TritonStream, stream

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

COUNT = 64
MESSAGE_S = 0.05
"""What a message from one process to another takes when no other work holds it up."""
WAIT_S = 60.0


def prompts_and_lengths(longest: int) -> list[tuple[str, int]]:
    rng = random.Random(longest)
    words = ["one", "two", "three", "vier", "fünf", "шесть", "七", "acht"]
    return [
        (
            " ".join(rng.choice(words) for _ in range(rng.randrange(1, 12))),
            rng.randrange(longest // 2, longest),
        )
        for _ in range(COUNT)
    ]


def expected_texts(tiny: TinyServer, requests: list[tuple[str, int]]) -> list[str]:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in requests]
    return [output.text for output in tiny.llm.generate([prompt for prompt, _ in requests], params)]


@pytest.mark.row("A2")
def test_sixty_four_streams_over_the_ensemble(tiny: TinyServer) -> None:
    requests = prompts_and_lengths(100)
    expected = expected_texts(tiny, requests)

    def run(request: tuple[str, int]) -> tuple[str, int, int]:
        prompt, length = request
        inputs = {"text_input": prompt, "stream": True, "max_tokens": length, "ignore_eos": True}
        call = TritonStream(tiny.server.grpc_url, "chat", inputs)
        reply = call.read_all()
        assert reply.error is None
        return reply.text, reply.finals, call.extra_responses()

    with ThreadPoolExecutor(COUNT) as pool:
        replies = list(pool.map(run, requests))
    assert [text for text, _, _ in replies] == expected
    assert all((finals, extra) == (1, 0) for _, finals, extra in replies)


@pytest.mark.row("A20", clauses=("decode",))
@pytest.mark.row("A21", clauses=("cancel",))
@pytest.mark.parametrize("how", ["tritonclient on the generator", "quire_client through the ensemble"])
@survives_grpc_abort
def test_half_of_the_streams_are_cancelled(tiny: TinyServer, how: str) -> None:
    """Blocks are free within one engine step of the frontend learning it; the others notice nothing."""
    requests = prompts_and_lengths(400)
    expected = expected_texts(tiny, requests[::2])
    requests[1::2] = [(prompt, ENDLESS) for prompt, _ in requests[1::2]]
    already = len(aborts(tiny))
    started = threading.Barrier(COUNT)
    client = Client(tiny.server.grpc_url)

    def plain(index: int) -> str | None:
        prompt, length = requests[index]
        inputs = {"text_input": prompt, "stream": True, "max_tokens": length, "ignore_eos": True}
        call = TritonStream(tiny.server.grpc_url, "generator", inputs)
        call.next()
        started.wait(120)
        if index % 2:
            call.cancel()
            call.client.close()
            return None
        return call.read_all().text

    def ours(index: int) -> str | None:
        prompt, length = requests[index]
        with client.stream(prompt, model="chat", max_tokens=length, ignore_eos=True) as chunks:
            text = next(chunks).text
            started.wait(120)
            if index % 2:
                chunks.cancel()
                with pytest.raises(Cancelled):
                    for _ in chunks:
                        pass
                return None
            return text + "".join(chunk.text for chunk in chunks)

    with ThreadPoolExecutor(COUNT) as pool:
        texts = list(pool.map(plain if how.startswith("triton") else ours, range(COUNT)))
    assert [text for text in texts if text is not None] == expected

    # The frontends learn of a gone client at their next poll; one more request after that is a step more.
    deadline = time.monotonic() + WAIT_S
    while sum(len(record["request_ids"]) for record in aborts(tiny)[already:]) < COUNT // 2:
        assert time.monotonic() < deadline, "not all cancellations arrived"
        stream(tiny.server.grpc_url, "generator", {"text_input": "end", "max_tokens": 2, "ignore_eos": True})
    stream(tiny.server.grpc_url, "generator", {"text_input": "end", "max_tokens": 2, "ignore_eos": True})
    records = tiny.trace()
    ended = aborts(tiny)[already:]
    cancelled = [request_id for record in ended for request_id in record["request_ids"]]
    assert len(cancelled) == len(set(cancelled)) == COUNT // 2
    steps_of = defaultdict(list)
    for step in records:
        for row in step.get("scheduled", []):
            steps_of[row[0]].append(step)
    num_later = []
    for record in ended:
        for request_id in record["request_ids"]:
            steps = steps_of[request_id]
            assert all(step["step"] <= record["step"] for step in steps), f"{request_id} went on"
            num_later.append(sum(step["time"] > record["learned_at"] + MESSAGE_S for step in steps))
    # A process that was not given a core learns late, but not all of them.
    assert min(num_later) <= 1, f"steps after the frontend knew: {sorted(num_later)}"
    assert records[-1]["num_free_blocks"] == TINY_OPTIONS["num_blocks"]
    client.close()


def aborts(tiny: TinyServer) -> list[dict]:
    return [record for record in tiny.trace() if record.get("event") == "abort" and record["request_ids"]]


def test_two_frontends_share_one_engine(tiny: TinyServer) -> None:
    """generator has two instances, generator_unary one more: three frontends, one pool."""
    engines = [
        process
        for process in tiny.server.running("quire.engine.loop")
        if str(tiny.checkpoint) not in process.cmdline()
    ]
    assert len(engines) == 2, "one for the built repository, one for the model `zero`"
    inputs = {"text_input": "hello", "stream": True, "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: stream(tiny.server.grpc_url, "generator", inputs), range(16)))
    records = [record for record in tiny.trace() if "scheduled" in record]
    both = max(len({row[0].split("-")[0] for row in record["scheduled"]}) for record in records)
    assert both >= 2, "requests of both instances in one batch"
