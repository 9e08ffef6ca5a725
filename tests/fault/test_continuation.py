"""An engine is killed under streams of all kinds, and each goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.e2e.triton_calls import Reply, TritonStream, infer
from tests.fault.test_engine_death import engines, wait_for_running
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

MAX_TOKENS = 300
NEXT_ENGINE_S = 240.0
"""For an engine's start and what goes on then, however busy the machine is."""


def requests(hidden: int, released: Path) -> list[dict[str, Any]]:
    """32 of them: greedy, seeded, penalised, guided, with log-probabilities, and two with images. Paced until
    there is the file `released`: a step of all takes 32 times as long."""
    rng = np.random.default_rng(0)
    common = {"stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True, **paced_input(released, 0.003)}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"sampling_parameters": '{"repetition_penalty": 1.2, "frequency_penalty": 0.3}'},
        {"temperature": 1.5, "seed": 7, "sampling_parameters": '{"guided_regex": "([a-z]{1,9} ){300}"}'},
        {"temperature": 1.0, "seed": 9, "sampling_parameters": '{"logprobs": 1}', "max_tokens": 100},
    ]
    asked = [{**common, "text_input": f"hello {n}", **kinds[n % len(kinds)]} for n in range(30)]
    for length in (2, 3):
        image = {
            "input_ids": [5, *[6] * length, 7],
            "image_embeds": rng.standard_normal((length, hidden), dtype=np.float32),
            "image_spans": np.array([[1, length]], dtype=np.int32),
        }
        asked.append({**common, **image})
    return asked


def begun(server: ServerProcess, asked: list[dict[str, Any]]) -> list[TritonStream]:
    """Streams that have a token: what comes while there is no engine would be refused."""
    calls = [TritonStream(server.grpc_url, "generator", inputs) for inputs in asked]
    for call in calls:
        call.next()
    return calls


def next_engine(server: ServerProcess, gone: set[int]) -> psutil.Process:
    """The engine that takes the places of those that are gone, as soon as it is a process."""
    found = wait_until(
        lambda: [engine for engine in engines(server) if engine.pid not in gone], "no engine took over"
    )
    return found[0]


def check(replies: list[Reply], undisturbed: list[Reply]) -> None:
    for reply, expected in zip(replies, undisturbed, strict=True):
        assert reply.error is None, reply.error
        assert reply.token_ids == expected.token_ids
        assert reply.text == expected.text
        assert reply.finals == 1 and reply.finish_reasons[-1] == expected.finish_reasons[-1]
        assert not any(reply.finish_reasons[:-1])


def kill_under_streams(server: ServerProcess, num_kills: int, rng: random.Random, folder: Path) -> None:
    """Streams run beside each other again and again until the engine was killed so often, each time at a
    random moment: while it starts, or some responses further."""
    released = folder / "released"
    asked = requests(64, released)
    with ThreadPoolExecutor(len(asked)) as pool:
        released.touch()
        undisturbed = list(pool.map(TritonStream.read_all, begun(server, asked)))
        assert all(reply.error is None for reply in undisturbed)
        gone: set[int] = set()
        while len(gone) < num_kills:
            released.unlink()
            calls = begun(server, asked)
            replies = [pool.submit(call.read_all) for call in calls]
            for is_first in (True, False):
                engine = next_engine(server, gone)
                if is_first or rng.random() < 0.7:
                    wanted = num_responses(calls) + rng.randrange(200)
                    wait_until(lambda: num_responses(calls) >= wanted)  # noqa: B023
                gone.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            assert not all(reply.done() for reply in replies)
            released.touch()
            check([reply.result() for reply in replies], undisturbed)
            assert [call.extra_responses() for call in calls] == [0] * len(calls)


def num_responses(calls: list[TritonStream]) -> int:
    return sum(len(call.reply.results) for call in calls)


@pytest.mark.row("F17", whole=True)
def test_streams_of_all_kinds_outlive_two_engines(mortal: ServerProcess, tmp_path: Path) -> None:
    others = {process.pid for process in mortal.descendants()} - {engine.pid for engine in engines(mortal)}
    kill_under_streams(mortal, 2, random.Random(os.environ.get("QUIRE_FUZZ_SEED", "0")), tmp_path)
    assert others <= {process.pid for process in mortal.descendants()}, "the server's processes are the same"


@pytest.mark.slow
def test_streams_outlive_twenty_engines(mortal: ServerProcess, tmp_path: Path) -> None:
    kill_under_streams(mortal, 20, random.Random(), tmp_path)
    mortal.stop()
    assert mortal.leftovers() == []


def test_one_answer_that_is_not_streamed_outlives_its_engine(mortal: ServerProcess, tmp_path: Path) -> None:
    inputs = {"text_input": "hello", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": False}
    released = tmp_path / "released"
    released.touch()
    inputs |= paced_input(released, 0.1)

    def answer() -> list[int] | None:
        """None: an engine has died before this test, and this frontend has yet to find the next one."""
        try:
            ids: list[int] = infer(mortal.grpc_url, "generator_unary", inputs).as_numpy("output_ids").tolist()
            return ids
        except InferenceServerException as error:
            assert "try again" in str(error)
            return None

    before = wait_until(answer)
    (engine,) = engines(mortal)
    released.unlink()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(infer, mortal.grpc_url, "generator_unary", inputs)
        stream = TritonStream(mortal.grpc_url, "generator", {**inputs, "stream": True})
        stream.next()
        wait_for_running(mortal, 2)  # what comes while there is no engine would be refused
        os.kill(engine.pid, signal.SIGKILL)
        released.touch()
        assert call.result(NEXT_ENGINE_S).as_numpy("output_ids").tolist() == before
        assert stream.read_all().token_ids == before


def test_a_request_that_kills_engines_ends_and_no_other(mortal: ServerProcess, tmp_path: Path) -> None:
    """31 others lose time, no token; they are paced until it has ended."""
    released = tmp_path / "released"
    common = {"stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    asked = [{**common, "text_input": f"hello {n}", **paced_input(released, 0.003)} for n in range(31)]
    with ThreadPoolExecutor(len(asked) + 1) as pool:
        released.touch()
        undisturbed = list(pool.map(TritonStream.read_all, begun(mortal, asked)))
        released.unlink()
        calls = begun(mortal, asked)
        replies = [pool.submit(call.read_all) for call in calls]
        deadly = {**common, "input_ids": [5, 6, 7, 8], "logits_processors": '["deadly"]'}
        reply = TritonStream(mortal.grpc_url, "generator", deadly).read_all()
        released.touch()
        assert reply.error is not None and "two engines died" in str(reply.error)
        check([one.result() for one in replies], undisturbed)
