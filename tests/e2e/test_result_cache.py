"""Results of deterministic requests come again through the real server: out of memory, and out of a Redis."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import AssortedServer, engine_of
from tests.e2e.triton_calls import Reply, stream
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

GREEDY: dict[str, Any] = {
    "text_input": "hello", "stream": True, "max_tokens": 64, "ignore_eos": True, "return_timing": True,
}  # fmt: skip
SEEDED = {**GREEDY, "temperature": 1.0, "seed": 7}
ANY = {**GREEDY, "temperature": 1.0}
REPLAY_MS = 5.0


@pytest.fixture
def server(assorted: AssortedServer) -> ServerProcess:
    return assorted.server


def timing(reply: Reply) -> dict[str, Any]:
    assert reply.error is None and reply.finals == 1
    found: dict[str, Any] = json.loads(reply.results[-1].as_numpy("timing")[0])
    return found


@pytest.mark.row("G22")
@pytest.mark.parametrize("request_", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_repeated_request_is_replayed_without_the_engine(
    server: ServerProcess, assorted: AssortedServer, request_: dict[str, Any]
) -> None:
    """With the same tokens and the same text while the engine is stopped; at another pace the same result."""
    first = stream(server.grpc_url, "plugged", request_)
    assert not timing(first)["result_cached"] and len(first.token_ids) == 64
    engine = engine_of(server, assorted.root / "plugged")
    engine.suspend()
    try:
        again = stream(server.grpc_url, "plugged", request_)
        assert timing(again)["result_cached"]
        assert (again.token_ids, again.text) == (first.token_ids, first.text)
        assert again.finish_reasons[-1] == first.finish_reasons[-1] == "length"
        fine = stream(server.grpc_url, "plugged", {**request_, "stream_interval": 1})
        assert timing(fine)["result_cached"] and fine.text == first.text and len(fine.results) > 30
        whole = stream(server.grpc_url, "plugged", {**request_, "stream": False})
        assert timing(whole)["result_cached"] and whole.text == first.text and len(whole.results) == 1
    finally:
        engine.resume()


@pytest.mark.slow
@pytest.mark.row("G22", clauses=("replay",))
@pytest.mark.parametrize("seed", [None, 5])
def test_a_replay_takes_less_than_5_ms(server: ServerProcess, seed: int | None) -> None:
    """From its arrival at the model to its end; the best of many, as the machine has other things to do."""
    drawn = {} if seed is None else {"temperature": 1.0, "seed": seed}
    request_ = {**GREEDY, "text_input": "quick", **drawn}
    assert not timing(stream(server.grpc_url, "plugged", request_))["result_cached"]
    took: list[float] = []
    while len(took) < 500 and min(took, default=REPLAY_MS) >= REPLAY_MS:
        found = timing(stream(server.grpc_url, "plugged", request_))
        assert found["result_cached"]
        took.append(found["total"])
    assert min(took) < REPLAY_MS, took


def test_what_is_not_the_same_is_computed(server: ServerProcess) -> None:
    stream(server.grpc_url, "plugged", GREEDY)
    for inputs in (
        ANY, ANY, {**GREEDY, "max_tokens": 63}, {**GREEDY, "text_input": "hallo"}, {**GREEDY, "tenant": "t"},
        {**GREEDY, "cache_salt": "s"}, {**GREEDY, "cache_result": False}, {**SEEDED, "seed": 8},
    ):  # fmt: skip
        assert not timing(stream(server.grpc_url, "plugged", inputs))["result_cached"], inputs


@pytest.mark.row("G22", clauses=("redis",))
def test_a_redis_keeps_results_for_all_frontends(server: ServerProcess, assorted: AssortedServer) -> None:
    """What one model wrote another one of the same engine finds, in a process of its own."""
    if not assorted.has_redis:
        pytest.skip("there is no redis-server")
    first = stream(server.grpc_url, "redis", GREEDY)
    assert not timing(first)["result_cached"]
    for model in ("same", "redis"):
        # It is written in the background, and a Redis that is slow for once is left alone for 5 s.
        reply = wait_until(
            lambda model=model: (  # type: ignore[misc]
                timing(reply := stream(server.grpc_url, model, GREEDY))["result_cached"] and reply
            )
        )
        assert (reply.token_ids, reply.text) == (first.token_ids, first.text)
    assert not timing(stream(server.grpc_url, "plugged", {**GREEDY, "max_tokens": 9}))["result_cached"]
