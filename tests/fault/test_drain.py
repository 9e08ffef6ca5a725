"""Models are unloaded and loaded again while streams run, behind a real server."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from quire_ensemble.builder import build_repository
from tests.compat.site import end_of
from tests.e2e.conftest import OPTIONS
from tests.e2e.triton_calls import TritonStream, stream
from tests.fault.test_engine_death import LONG, MAX_TOKENS, WAIT_S, engines, read_all, start_streams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import MODEL_REPOSITORY, STOP_S, ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

DRAIN_S = 1.5
KEY = {"triton-grpc-protocol-control": "open"}
EXPLICIT = (
    "--",
    "--model-control-mode=explicit",
    "--load-model=generator",
    "--load-model=generator_unary",
    "--http-restricted-api=model-repository:control=open",
    "--grpc-restricted-protocol=model-repository:control=open",
)
SHORT = {**LONG, "max_tokens": 8}


class Site:
    """A server whose models are loaded and unloaded by hand."""

    def __init__(self, folder: Path, serve: Any, *arguments: str) -> None:
        self.checkpoint = folder / "llama"
        self.make_checkpoint(0)
        options = {**OPTIONS, "max_model_len": MAX_TOKENS + 1000, "num_blocks": 10_000, "drain_s": DRAIN_S}
        build_repository(self.checkpoint, folder / "repository", placement="path", engine_options=options)
        self.server: ServerProcess = serve(folder / "repository", *arguments, *EXPLICIT)
        self.client = grpcclient.InferenceServerClient(self.server.grpc_url)

    def make_checkpoint(self, seed: int) -> None:
        make_checkpoint("llama", self.checkpoint, max_position_embeddings=MAX_TOKENS + 1000, seed=seed)

    def load(self, model: str) -> None:
        self.client.load_model(model, headers=KEY)

    def unload(self, model: str) -> None:
        self.client.unload_model(model, headers=KEY)

    def is_ready(self, model: str) -> bool:
        return bool(self.client.is_model_ready(model))

    def tokens(self, model: str) -> list[int]:
        if model == "generator":
            return stream(self.server.grpc_url, model, SHORT).token_ids
        body = {"text_input": "hello", "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{self.server.http_url}/v2/models/{model}/generate", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return list(json.load(answer)["output_ids"])


@pytest.mark.row("G10", clauses=("unload",))
def test_unloading_during_streams_and_loading_another_checkpoint(
    tmp_path: Path, serve_repository: Any
) -> None:
    """Triton waits for the streams of a model that is unloaded for ever, and tells the backend nothing."""
    site = Site(tmp_path, serve_repository)
    before = site.tokens("generator")
    assert site.tokens("generator_unary") == before
    (shared,) = engines(site.server)

    calls = start_streams(site.server, 8)
    began = time.monotonic()
    site.unload("generator")
    assert not site.is_ready("generator")
    refused = stream(site.server.grpc_url, "generator", SHORT).error
    assert refused is not None, "a model that is being unloaded takes nothing"
    replies = read_all(calls)
    assert time.monotonic() - began > DRAIN_S
    for reply, call in zip(replies, calls, strict=True):
        assert "the model is being unloaded" in str(reply.error)
        assert reply.finish_reasons[-1] == "shutdown"
        assert call.extra_responses() == 0
    assert site.tokens("generator_unary") == before, "the other model goes on, with the engine of both"
    assert [engine.pid for engine in engines(site.server)] == [shared.pid]

    # The files of the checkpoint are replaced where they are; the other model has them loaded already.
    site.make_checkpoint(1)
    site.load("generator")
    after = site.tokens("generator")
    assert after != before
    assert site.tokens("generator_unary") == before
    assert len(engines(site.server)) == 2

    # Loaded again without being unloaded, for which Triton wants a change in the model's own folder: one
    # engine serves both once more, the old one ends.
    (tmp_path / "repository" / "generator_unary" / "1" / "quire.json").touch()
    site.load("generator_unary")
    wait_until(lambda: len(engines(site.server)) == 1, "the old engine ends with its last model")
    assert site.tokens("generator_unary") == after == site.tokens("generator")

    # Orders that nobody plans: unloaded twice, and while it is being loaded.
    site.unload("generator")
    site.unload("generator")
    loading = threading.Thread(target=lambda: site_load_again(site))
    loading.start()
    for model in ("generator", "generator_unary"):
        site.unload(model)
    loading.join(60)
    assert not loading.is_alive()
    for model in ("generator", "generator_unary"):
        site.unload(model)
    wait_until(lambda: not engines(site.server), "no model is loaded, and no engine is left")
    site.load("generator")
    assert site.tokens("generator") == after
    calls = start_streams(site.server, 8)
    site.client.close()
    took = site.server.stop()
    assert took < STOP_S, f"stopping took {took:.2f} s"
    assert site.server.leftovers() == []
    for call in calls:
        call.client.close()


@pytest.mark.row("G10")
def test_a_plain_server_that_is_told_to_end_waits_for_streams(tmp_path: Path, serve_repository: Any) -> None:
    """It was asked meanwhile whether the model is ready, and hung with all its streams."""
    site = Site(tmp_path, serve_repository, "--exit-timeout=60")
    inputs = {**LONG, "max_tokens": 1500, "stream_interval": 100}
    calls = [TritonStream(site.server.grpc_url, "generator", inputs) for _ in range(8)]
    for call in calls:
        call.next()
    (triton,) = [one for one in site.server.descendants() if one.name() == "tritonserver"]
    triton.terminate()
    for reply in read_all(calls):
        assert reply.error is None and reply.finish_reasons[-1] == "length"
    site.client.close()
    assert site.server.process is not None
    assert site.server.process.wait(WAIT_S) == 0
    assert site.server.leftovers() == []


@pytest.mark.slow
@pytest.mark.row("G10")
def test_the_demo_ends_in_time_under_32_streams(serve_repository: Any) -> None:
    """By SIGTERM, with one final response for each. Status 0: within `--exit-timeout`; 1 is tritonserver's
    where it took longer, 137 that `quire serve` has killed it."""
    server: ServerProcess = serve_repository(MODEL_REPOSITORY)
    calls = start_streams(server, 32, {**LONG, "max_tokens": 100_000})
    with ThreadPoolExecutor(33) as pool:
        stopping = pool.submit(server.stop)
        ends = Counter(pool.map(end_of, calls))
        took_s = stopping.result()
    print(f"\nended in {took_s:.2f} s with {server.returncode}: {ends}")
    assert ends == {"the engine is shutting down": 32}
    assert server.returncode == 0, f"{server.returncode} after {took_s:.2f} s"
    assert server.leftovers() == []


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_while_models_are_loaded(tmp_path: Path, times: int) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    build_repository(checkpoint, tmp_path / "repository", placement="path", engine_options=OPTIONS)
    server = ServerProcess(tmp_path / "repository", tmp_path)
    failed: list[str] = []

    def start() -> None:
        try:
            server.start()
        except AssertionError as error:
            failed.append(str(error))

    starting = threading.Thread(target=start)
    starting.start()
    wait_until(lambda: server.process is not None and engines(server), "an engine is being started")
    for _ in range(times):
        server.process.terminate()  # type: ignore[union-attr]
    starting.join(WAIT_S)
    assert failed, "it goes on"
    assert server.leftovers() == []


def site_load_again(site: Site) -> None:
    with grpcclient.InferenceServerClient(site.server.grpc_url) as client:
        try:
            client.load_model("generator", headers=KEY)
        except InferenceServerException:
            pass  # it was unloaded meanwhile
