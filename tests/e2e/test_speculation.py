"""Speculation behind a real server: streams of a batch, drawn at a temperature, through an engine's death."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import AssortedServer, engine_of
from tests.e2e.triton_calls import Reply, TritonStream, stream
from tests.fault.test_engine_death import wait_for_end

pytestmark = pytest.mark.server

MODEL = "drafting"
NUM_TOKENS = 400


@pytest.mark.row("E28", clauses=("batch",))
def test_a_batch_of_eight_streams_gets_what_each_gets_without_drafts(assorted: AssortedServer) -> None:
    """Through the death of an engine, too. How many are tried is a matter of what they cost: some of those
    that are all but sure are, whatever that is."""
    server = assorted.server

    def inputs(number: int, **values: Any) -> dict[str, Any]:
        drawn = {"temperature": 0.3, "seed": number} if number % 4 else {"temperature": 0.0}
        asked = {"text_input": f"number {number}", "max_tokens": NUM_TOKENS, "ignore_eos": True, **drawn}
        return {**asked, "stream": True, "return_timing": True, **values}

    def ask(number: int, **values: Any) -> Reply:
        reply = stream(server.grpc_url, MODEL, inputs(number, **values))
        assert reply.error is None
        return reply

    def drafts(reply: Reply) -> tuple[int, int]:
        timing = json.loads(reply.results[-1].as_numpy("timing")[0])
        return timing["num_draft_tokens"], timing["num_accepted_drafts"]

    expected = [ask(number, num_draft=0) for number in range(8)]
    assert all(drafts(reply) == (0, 0) for reply in expected)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(8)))
        assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in expected]
        assert [reply.text for reply in replies] == [reply.text for reply in expected]
        assert all(tried >= right for tried, right in map(drafts, replies))
        assert sum(right for _, right in map(drafts, replies)) > 0
    engine = engine_of(server, assorted.root / "drafting")
    calls = [TritonStream(server.grpc_url, MODEL, inputs(number)) for number in range(8)]
    for call in calls:
        call.next()  # what comes while there is no engine would be refused
    engine.kill()
    wait_for_end(engine)
    assert [call.read_all().token_ids for call in calls] == [reply.token_ids for reply in expected]
