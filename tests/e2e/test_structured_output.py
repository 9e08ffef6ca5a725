"""Grammars through the real server: streamed, eight at a time, with prompts of several chunks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest

from tests.e2e.conftest import TinyServer
from tests.e2e.triton_calls import Reply, stream
from tests.fixtures.schemas import SCHEMAS

pytestmark = pytest.mark.server

LONG_PROMPT = "What the fox said to the lazy dog, and what it said to the fox. " * 40
"""More tokens than a step takes."""
HOSTILE = {"allOf": [{"type": "string", "pattern": f"^(a|b|ab)*c{{{7 * i},}}$"} for i in range(1, 31)]}


@pytest.mark.row("A23")
@pytest.mark.row("A24", clauses=("chunks",))
def test_200_of_200_streamed_with_prompts_in_chunks(tiny: TinyServer) -> None:
    assert len(tiny.llm.encode(LONG_PROMPT)) > tiny.llm.config.scheduler.max_num_batched_tokens

    def run(number: int) -> tuple[str, Reply]:
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        inputs = {
            "text_input": f"{number} {LONG_PROMPT}",
            "stream": True,
            "max_tokens": 3000,
            "temperature": np.array([2.0], np.float32),
            "seed": np.array([number], np.uint64),
            "structured_output": json.dumps({"json": SCHEMAS[name]}),
        }
        return name, stream(tiny.server.grpc_url, "generator", inputs)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(200)))
    for name, reply in found:
        assert reply.error is None and reply.finals == 1
        assert reply.finish_reasons[-1] == "stop", reply.text
        jsonschema.validate(json.loads(reply.text), SCHEMAS[name])
    assert len(found) == 200 and sum(len(reply.results) > 1 for _, reply in found) > 150


@pytest.mark.row("A23")
def test_a_bad_grammar_is_refused_and_a_hostile_one_holds_up_nobody(tiny: TinyServer) -> None:
    def run(model: str, **inputs: object) -> Reply:
        return stream(tiny.server.grpc_url, model, {"text_input": "x", "max_tokens": 8, **inputs})

    hostile = json.dumps({"structured_output": {"json": HOSTILE}})
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(run, "chat", sampling_parameters=hostile)
        for _ in range(4):
            assert run("generator").error is None
        refused = bad.result()
    assert "takes more than 0.5 s or 1024 MiB to compile" in str(refused.error)
    for name, value, words in (
        ("structured_output", '{"json": {"not": {}}}', 'structured_output: Unimplemented keys: ["not"]'),
        ("structured_output", "[]", "structured_output: must be a JSON object"),
        ("sampling_parameters", '{"guided_regex": "("}', "unclosed group"),
    ):
        error = run("generator", **{name: value}).error
        assert words in str(error)
    answer = run("chat", sampling_parameters='{"guided_choice": ["left", "right"]}')
    assert answer.text in ("left", "right")
