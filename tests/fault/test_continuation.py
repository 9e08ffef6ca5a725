"""An engine is killed under streams of all kinds, and each goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import write_generator
from tests.e2e.triton_calls import Reply, TritonStream, infer
from tests.fault.test_engine_death import WAIT_S, engines, served_generators, wait_for_running
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ServerProcess, SharedServer

pytestmark = pytest.mark.server

MAX_TOKENS = 1500
NEXT_ENGINE_S = 120.0
"""For an engine's start, however busy the machine is."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    root = tmp_path_factory.mktemp("continuation")
    with served_generators(root, MAX_TOKENS + 100, num_blocks=4000) as server:
        yield server


@pytest.fixture
def server(shared: SharedServer) -> ServerProcess:
    return shared.current()


def requests(hidden: int) -> list[dict[str, Any]]:
    """32 of them: greedy, seeded, penalised, guided, with choices, and two with images."""
    rng = np.random.default_rng(0)
    common = {"stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"sampling_parameters": '{"repetition_penalty": 1.2, "frequency_penalty": 0.3}'},
        {"temperature": 1.5, "seed": 7, "sampling_parameters": '{"guided_regex": "([a-z]{1,9} ){1500}"}'},
        {"temperature": 1.0, "seed": 9, "sampling_parameters": '{"logprobs": 1}', "max_tokens": 300},
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
    deadline = time.monotonic() + NEXT_ENGINE_S
    while not (found := [engine for engine in engines(server) if engine.pid not in gone]):
        assert time.monotonic() < deadline, "no engine took over"
        time.sleep(0.02)
    return found[0]


def check(replies: list[Reply], undisturbed: list[Reply]) -> None:
    for reply, expected in zip(replies, undisturbed, strict=True):
        assert reply.error is None, reply.error
        assert reply.token_ids == expected.token_ids
        assert reply.text == expected.text
        assert reply.finals == 1 and reply.finish_reasons[-1] == expected.finish_reasons[-1]
        assert not any(reply.finish_reasons[:-1])


def kill_under_streams(server: ServerProcess, num_kills: int, rng: random.Random) -> None:
    """Streams run one after the other until the engine was killed so often, each time at a random moment."""
    asked = requests(64)
    with ThreadPoolExecutor(len(asked)) as pool:
        undisturbed = list(pool.map(TritonStream.read_all, begun(server, asked)))
        assert all(reply.error is None for reply in undisturbed)
        gone: set[int] = set()
        while len(gone) < num_kills:
            calls = begun(server, asked)
            replies = [pool.submit(call.read_all) for call in calls]
            for _ in range(2):
                engine = next_engine(server, gone)
                time.sleep(rng.uniform(0.0, 4.0))  # random moments: while it starts, in prompts, in answers
                if all(reply.done() for reply in replies):
                    break
                gone.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            check([reply.result() for reply in replies], undisturbed)
            assert [call.extra_responses() for call in calls] == [0] * len(calls)


@pytest.mark.row("F17", whole=True)
def test_streams_of_all_kinds_outlive_two_engines(server: ServerProcess) -> None:
    others = {process.pid for process in server.descendants()} - {engine.pid for engine in engines(server)}
    kill_under_streams(server, 2, random.Random(os.environ.get("QUIRE_FUZZ_SEED", "0")))
    assert others <= {process.pid for process in server.descendants()}, "the server's processes are the same"


@pytest.mark.slow
def test_streams_outlive_twenty_engines(server: ServerProcess) -> None:
    kill_under_streams(server, 20, random.Random())
    server.stop()
    assert server.leftovers() == []


def test_one_answer_that_is_not_streamed_outlives_its_engine(server: ServerProcess, tmp_path: Path) -> None:
    inputs = {"text_input": "hello", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": False}
    released = tmp_path / "released"
    released.touch()
    inputs |= paced_input(released)
    while True:  # an engine may have died before this test, of which this frontend has yet to find the next
        try:
            before = infer(server.grpc_url, "generator_unary", inputs).as_numpy("output_ids").tolist()
            break
        except InferenceServerException as error:
            assert "try again" in str(error)
            time.sleep(0.05)
    (engine,) = engines(server)
    released.unlink()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(infer, server.grpc_url, "generator_unary", inputs)
        stream = TritonStream(server.grpc_url, "generator", {**inputs, "stream": True})
        stream.next()
        wait_for_running(server, 2)  # what comes while there is no engine would be refused
        os.kill(engine.pid, signal.SIGKILL)
        released.touch()
        assert call.result(NEXT_ENGINE_S + WAIT_S).as_numpy("output_ids").tolist() == before
        assert stream.read_all().token_ids == before
    server.stop()
    assert server.leftovers() == []


DEADLY = """
import os

class Deadly:
    '''Ends the process at a request's 20th token.'''

    def __call__(self, token_ids, logits):
        if len(token_ids) > 24:
            os._exit(1)
"""


def test_a_request_that_kills_engines_ends_and_no_other(tmp_path: Path, serve_repository: Any) -> None:
    """31 others lose time, no token."""
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    listed = {"deadly": "plugin.py:Deadly"}
    write_generator(
        tmp_path / "repository", "generator", checkpoint, logits_processors=listed, max_model_len=700
    )
    (tmp_path / "repository" / "generator" / "1" / "plugin.py").write_text(DEADLY)
    server: ServerProcess = serve_repository(tmp_path / "repository")
    common = {"stream": True, "max_tokens": 600, "ignore_eos": True}
    asked = [{**common, "text_input": f"hello {n}"} for n in range(31)]
    with ThreadPoolExecutor(len(asked) + 1) as pool:
        undisturbed = list(pool.map(TritonStream.read_all, begun(server, asked)))
        calls = begun(server, asked)
        replies = [pool.submit(call.read_all) for call in calls]
        deadly = {**common, "input_ids": [5, 6, 7, 8], "logits_processors": '["deadly"]'}
        reply = TritonStream(server.grpc_url, "generator", deadly).read_all()
        assert reply.error is not None and "two engines died" in str(reply.error)
        check([one.result() for one in replies], undisturbed)
