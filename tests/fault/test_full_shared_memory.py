"""Shared memory of the real server that cannot grow: what does not fit is told, and nothing hangs."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import Reply, TritonStream, stream
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import STOP_S, ServerProcess

pytestmark = pytest.mark.server

NUM_TOKENS = 1_400
LARGE = {"text_input": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 64, "n": 3}
"""About 2.4 MB of log-probabilities for each choice: more than a stub's pool has without growing."""
SMALL = {"text_input": "hello", "stream": True, "max_tokens": 40, "ignore_eos": True}
WAIT_S = 120.0


@pytest.fixture
def server(tmp_path: Path, serve_repository: Any) -> ServerProcess:
    checkpoint = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=NUM_TOKENS + 200)
    repository = tmp_path / "repository"
    options = {**OPTIONS, "max_model_len": NUM_TOKENS + 200}
    build_repository(checkpoint, repository, placement="path", engine_options=options)
    loaded = (f"--load-model={name}" for name in ("generator", "generator_unary", "chat"))
    started: ServerProcess = serve_repository(repository, *loaded)
    return started


def generator_stubs(server: ServerProcess) -> list[psutil.Process]:
    found = [p for p in server.running("generator") if "stub" in p.name()]
    assert found
    return found


@contextmanager
def no_growth(server: ServerProcess) -> Iterator[None]:
    """Files of the stubs cannot grow beyond what their pools had at the start, as on a full /dev/shm."""
    pids = [process.pid for process in generator_stubs(server)]
    for pid in pids:
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2**21, hard))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def ask(server: ServerProcess, model: str, inputs: dict[str, Any]) -> Reply:
    """`stream`, in a time after which it counts as hanging."""
    replies: list[Reply] = []
    thread = threading.Thread(
        target=lambda: replies.append(stream(server.grpc_url, model, inputs)), daemon=True
    )
    thread.start()
    thread.join(WAIT_S)
    assert replies, f"{model}: no end within {WAIT_S} s"
    return replies[0]


def test_what_does_not_fit_ends_with_an_error_and_the_rest_goes_on(server: ServerProcess) -> None:
    """A response that the stub's pool had no room for was dropped: its stream ended without it as if it had
    never been, or, where it was the last, hung until the client gave up, and then nothing could be unloaded.
    """
    small = ask(server, "generator", SMALL)
    one = {**LARGE, "n": 1, "max_tokens": NUM_TOKENS}
    with no_growth(server):
        beside = TritonStream(server.grpc_url, "generator", {**SMALL, "max_tokens": NUM_TOKENS})
        beside.next()
        renamed = {"num_logprobs" if name == "logprobs" else name: value for name, value in one.items()}
        asked = (("generator", LARGE), ("generator", one), ("chat", renamed), ("generator_unary", one))
        for model, inputs in asked:
            reply = ask(server, model, inputs)
            assert reply.error is not None, f"{model}: {len(reply.results)} responses and no error"
            assert "output was lost" in str(reply.error)
        assert len(beside.read_all().token_ids) == NUM_TOKENS
        assert ask(server, "generator", SMALL).token_ids == small.token_ids
    whole = ask(server, "generator", LARGE)
    assert whole.error is None
    assert whole.finish_reasons == ["length"] * 3
    assert server.stop() < STOP_S, "nothing is left open that unloading would wait for"
    assert server.leftovers() == []
