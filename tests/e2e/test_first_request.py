"""The first request after a load beside those behind it, by the CPU time of all processes of the server.

By the clock it would be the machine's other work that is measured.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
from typing import Any

import pytest

from tests.e2e.triton_calls import stream
from tests.e2e.vision import picture
from tests.fixtures.server import MODEL_REPOSITORY, ServeRepository
from tests.fixtures.threads import cpu_s

LOADS = 3
ASKED = 12
NUM_TOKENS = 32
AFTER_S = 0.1
"""In which what is behind a response's end is done."""


def request(model: str, number: int) -> dict[str, Any]:
    """Another prompt of the same length, and another picture, for each number."""
    rng = random.Random(number)
    text = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=140))
    shape = {"stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    if model == "generator":
        return {**shape, "text_input": text}
    content: Any = text
    if model == "vision_chat":
        content = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
        shape["image"] = [picture(number)]
    return {**shape, "messages": json.dumps([{"role": "user", "content": content}])}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.row("G11", clauses=("first",))
@pytest.mark.parametrize("model", ["generator", "chat", "vision_chat"])
def test_the_first_request_costs_what_the_next_ones_do(serve_repository: ServeRepository, model: str) -> None:
    """What a request of another prompt and the same shape would find done by the first one is done before.

    Sending figures is left out: that comes twice a second, with whatever request is there.
    """
    ratios = []
    for load in range(LOADS):
        server = serve_repository(MODEL_REPOSITORY, f"--load-model={model}")
        pids = [process.pid for process in server.descendants()]
        threading.Event().wait(2.0)  # the first figures
        costs = []
        for number in range(ASKED):
            before = cpu_s(pids, without=("quire-metrics",))
            reply = stream(server.grpc_url, model, request(model, 100 * load + number))
            assert reply.error is None
            threading.Event().wait(AFTER_S)
            costs.append(cpu_s(pids, without=("quire-metrics",)) - before)
        server.end()
        ratios.append(costs[0] / statistics.median(costs[1:]))
        print(f"first {ratios[-1]:.2f} of the rest; ms:", [round(1e3 * cost, 1) for cost in costs])
    assert statistics.median(ratios) <= 1.2, ratios
