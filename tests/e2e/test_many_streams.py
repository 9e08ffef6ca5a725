"""64 streams at once, and half of them cancelled: by Triton itself and, through the ensemble, by id."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire_client import Cancelled, Client
from tests.e2e.conftest import ENDLESS, TINY_OPTIONS, TinyServer, survives_grpc_abort
from tests.e2e.triton_calls import TritonStream, infer, stream
from tests.fixtures.pace import paced, paced_input
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

COUNT = 64


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
def test_half_of_the_streams_are_cancelled(tiny: TinyServer, tmp_path: Path, how: str) -> None:
    """None of them has a row behind the step in which the engine learns it; the others notice nothing.

    All are paced until those are gone that leave: each step takes 64 times `token_s`."""
    requests = prompts_and_lengths(400)
    expected = expected_texts(tiny, requests[::2])
    requests[1::2] = [(prompt, ENDLESS) for prompt, _ in requests[1::2]]
    already = len(aborts(tiny))
    released = Path(tempfile.mkdtemp(dir=tmp_path)) / "released"
    processors = paced(released, 0.003)
    started = threading.Barrier(COUNT)
    client = Client(tiny.server.grpc_url)

    def plain(index: int) -> str | None:
        prompt, length = requests[index]
        inputs = {"text_input": prompt, "stream": True, "max_tokens": length, "ignore_eos": True}
        inputs["logits_processors"] = json.dumps(processors)
        call = TritonStream(tiny.server.grpc_url, "generator", inputs)
        call.next()
        started.wait(240)
        if index % 2:
            call.cancel()
            call.client.close()
            return None
        return call.read_all().text

    def ours(index: int) -> str | None:
        prompt, length = requests[index]
        asked: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "logits_processors": processors}
        with client.stream(prompt, model="chat", **asked) as chunks:
            text = next(chunks).text
            started.wait(240)
            if index % 2:
                chunks.cancel()
                with pytest.raises(Cancelled):
                    for _ in chunks:
                        pass
                return None
            return text + "".join(chunk.text for chunk in chunks)

    def cancelled() -> list[str]:
        return [request_id for record in aborts(tiny)[already:] for request_id in record["request_ids"]]

    with ThreadPoolExecutor(COUNT) as pool:
        running = [pool.submit(plain if how.startswith("triton") else ours, index) for index in range(COUNT)]
        try:
            # Frontends learn of a gone client at their next poll.
            wait_until(
                lambda: (
                    len(cancelled()) >= COUNT // 2
                    or any(one.done() and one.exception() is not None for one in running)
                ),
                poll_s=0.2,
            )
        finally:
            released.touch()
        texts = [one.result() for one in running]
    assert [text for text in texts if text is not None] == expected
    stream(tiny.server.grpc_url, "generator", {"text_input": "end", "max_tokens": 2, "ignore_eos": True})
    assert len(cancelled()) == len(set(cancelled())) == COUNT // 2
    records = tiny.trace()
    steps_of = defaultdict(list)
    for step in records:
        for row in step.get("scheduled", []):
            steps_of[row[0]].append(step["step"])
    for record in aborts(tiny)[already:]:
        for request_id in record["request_ids"]:
            assert max(steps_of[request_id]) <= record["step"], f"{request_id} went on"
    assert records[-1]["num_free_blocks"] == TINY_OPTIONS["num_blocks"]
    client.close()


def aborts(tiny: TinyServer) -> list[dict]:
    return [record for record in tiny.trace() if record.get("event") == "abort" and record["request_ids"]]


def test_two_frontends_share_one_engine(tiny: TinyServer, tmp_path: Path) -> None:
    """Those of generator and generator_unary have requests in one batch."""
    engines = [
        process
        for process in tiny.server.running("quire.engine.loop")
        if str(tiny.checkpoint) not in process.cmdline()
    ]
    assert len(engines) == 2, "one for the built repository, one for the model `zero`"
    released, already = tmp_path / "released", len(tiny.trace())
    inputs = {"text_input": "hello", "max_tokens": ENDLESS, "ignore_eos": True, **paced_input(released)}
    url = tiny.server.grpc_url

    def most_at_once() -> int:
        """Frontends in one step."""
        rows = [record.get("scheduled", []) for record in tiny.trace()[already:]]
        return max(len({row[0].split("-")[0] for row in found}) for found in [*rows, []])

    with ThreadPoolExecutor(1) as pool:
        streamed = TritonStream(url, "generator", {**inputs, "stream": True}, request_id="streamed")
        whole = pool.submit(infer, url, "generator_unary", inputs, request_id="whole")
        wait_until(lambda: most_at_once() == 2, poll_s=0.1)
        for name in ("streamed", "whole"):
            stream(url, "generator", {"cancel": True}, request_id=name)
        assert streamed.read_all().finish_reasons[-1] == "cancelled"
        assert whole.result().as_numpy("finish_reason")[0] == b"cancelled"
