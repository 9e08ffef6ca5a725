"""A request ends in whatever phase it is when its client leaves or somebody cancels it by its id.

The engine's trace is the witness: which steps had rows of the request, and how many blocks were taken then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_client import Client
from tests.e2e.conftest import ENDLESS, NarrowServer
from tests.e2e.triton_calls import TritonStream, stream
from tests.fixtures.pace import paced_input
from tests.fixtures.server import ROOT
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

BLOCK_SIZE, NUM_BLOCKS = NarrowServer.BLOCK_SIZE, NarrowServer.NUM_BLOCKS
LONG, SHORT = 12_000, 77
"""Tokens of the prompt of the request to be cancelled; no other prompt is as long. The long one takes a step
a token beside another request, and that one is paced: two minutes at least, in which it can end."""
VICTIM = "victim"
HOW = ("stream closed", "client killed", "by id")
SEND = """
import json, sys, threading
from tests.e2e.triton_calls import TritonStream
call = TritonStream(sys.argv[1], "generator", json.loads(sys.argv[2]), request_id=sys.argv[3])
threading.Event().wait()
"""


class Trace:
    """What the engine writes from now on."""

    def __init__(self, path: Path) -> None:
        self.records: list[dict[str, Any]] = []
        self._file = path.open("rb")
        self._file.seek(0, 2)
        self._rest, self._unread = b"", deque[dict[str, Any]]()

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The first record of those not asked for yet that is so."""

        def found() -> dict[str, Any] | None:
            *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
            self._unread += map(json.loads, lines)
            while self._unread:
                self.records.append(self._unread.popleft())
                if condition(self.records[-1]):
                    return self.records[-1]
            return None

        return wait_until(found, what)  # type: ignore[return-value]


def inputs(num_prompt_tokens: int, seed: int) -> dict[str, Any]:
    """Endless; prompts of different seeds have no block in common."""
    prompt = [(seed * 7 + i * 11) % 400 + 3 for i in range(num_prompt_tokens)]
    max_tokens = min(ENDLESS, NarrowServer.MAX_MODEL_LEN - num_prompt_tokens)
    return {"input_ids": prompt, "stream": True, "max_tokens": max_tokens, "ignore_eos": True}


def leave(call: TritonStream) -> None:
    call.cancel()
    call.client.close()


@pytest.mark.row("A20", whole=True)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_a_cancelled_request_gives_everything_back_at_once(
    narrow: NarrowServer, phase: str, how: str
) -> None:
    url = narrow.server.grpc_url
    trace = Trace(narrow.trace_file)
    # Those beside it keep the engine stepping; two of them take all seats.
    others = [
        TritonStream(url, "generator", {**inputs(5, seed=index), **paced_input()})
        for index in range(2 if phase == "queued" else 1)
    ]
    for call in others:
        call.next()
    asked = inputs(LONG if phase == "prefilling" else SHORT, seed=2 + HOW.index(how))
    length = len(asked["input_ids"])
    victim: Any
    if how == "client killed":
        command = [sys.executable, "-c", SEND, url, json.dumps(asked), VICTIM]
        victim = subprocess.Popen(command, cwd=ROOT)
    else:
        victim = TritonStream(url, "generator", asked, request_id=VICTIM)
    arrived = trace.until(lambda r: any(a["prompt"] == length for a in r.get("arrivals", [])), "its arrival")
    (name,) = [arrival["id"] for arrival in arrived["arrivals"] if arrival["prompt"] == length]

    def has_row(record: dict[str, Any], num_computed: int) -> bool:
        return any(row[0] == name and row[1] >= num_computed for row in record.get("scheduled", []))

    if phase != "queued":
        computed = length if phase == "decoding" else NarrowServer.STEP_TOKENS
        trace.until(lambda record: has_row(record, computed), f"{computed} tokens of it computed")

    if how == "stream closed":
        leave(victim)
    elif how == "client killed":
        victim.kill()
        victim.wait()
    else:
        error = stream(url, "generator", {"cancel": True}, request_id=VICTIM).error
        assert error is None, error

    abort = trace.until(lambda r: r.get("event") == "abort" and name in r["request_ids"], "its abort")
    last = trace.until(lambda r: r.get("step", 0) >= abort["step"] + 2 and "scheduled" in r, "two steps more")
    steps = [record for record in trace.records if has_row(record, 0)]
    rows = [row for record in steps for row in record["scheduled"] if row[0] == name]
    assert all(record["step"] <= abort["step"] for record in steps), "it went on"
    num_computed = max((begin + count for _, begin, count in rows), default=0)
    assert {"queued": not rows, "prefilling": 0 < num_computed < length, "decoding": num_computed > length}[
        phase
    ]
    assert len(last["scheduled"]) == len(others), "the others go on"
    taken = sum(-(-(begin + count) // BLOCK_SIZE) for _, begin, count in last["scheduled"])
    assert NUM_BLOCKS - last["num_free_blocks"] == taken, "blocks of those that run, and no other's"

    if how == "by id":
        while not victim.next():
            pass
        assert victim.reply.error is None
        assert victim.reply.finish_reasons[-1] == "cancelled"
        assert bool(victim.reply.text) == (phase == "decoding")
        others[-1].next()
        assert victim.extra_responses() == 0, "a response behind the final one"
        victim.close()
    for call in others:
        leave(call)
    with Client(url) as client:
        gone = trace.until(lambda r: r.get("event") == "abort" and not r["num_running"], "the others' end")
        assert gone["num_free_blocks"] == NUM_BLOCKS
        assert client.cache_inspect()["num_blocks_in_use"] == 0
