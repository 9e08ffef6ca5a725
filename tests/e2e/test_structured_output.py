"""Grammars through the real server: streamed, eight at a time, with prompts of several chunks."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.e2e.conftest import TinyServer
from tests.e2e.triton_calls import Reply, TritonStream, stream
from tests.fixtures.pace import gated_input
from tests.fixtures.schemas import SCHEMAS

pytestmark = pytest.mark.server

LONG_PROMPT = "What the fox said to the lazy dog, and what it said to the fox. " * 40
"""More tokens than a step takes."""
COUNT = 60
HOSTILE = {"allOf": [{"type": "string", "pattern": f"^(a|b|ab)*c{{{7 * i},}}$"} for i in range(1, 31)]}


@pytest.mark.row("A23")
@pytest.mark.row("A24", clauses=("chunks",))
def test_outputs_are_valid_streamed_and_with_prompts_in_chunks(tiny: TinyServer, tmp_path: Path) -> None:
    assert len(tiny.llm.encode(LONG_PROMPT)) > tiny.llm.config.scheduler.max_num_batched_tokens

    def asked(number: int) -> tuple[str, dict[str, Any]]:
        name = list(SCHEMAS)[number % len(SCHEMAS)]
        return name, {
            "text_input": f"{number} {LONG_PROMPT}",
            "stream": True,
            "max_tokens": 3000,
            "temperature": np.array([2.0], np.float32),
            "seed": np.array([number], np.uint64),
            "structured_output": json.dumps({"json": SCHEMAS[name]}),
        }

    def run(number: int) -> tuple[str, Reply]:
        name, inputs = asked(number)
        return name, stream(tiny.server.grpc_url, "generator", inputs)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(COUNT)))
    name, inputs = asked(COUNT)
    first_came = tmp_path / "first came"
    call = TritonStream(tiny.server.grpc_url, "generator", {**inputs, **gated_input(first_came)})
    assert not call.next()
    first_came.touch()
    found.append((name, call.read_all()))
    assert len(call.reply.results) > 1
    for name, reply in found:
        assert reply.error is None and reply.finals == 1
        assert reply.finish_reasons[-1] == "stop", reply.text
        jsonschema.validate(json.loads(reply.text), SCHEMAS[name])


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
    # By its CPU time; by the clock where the machine has none to spare.
    assert re.search("takes (more than )?[0-9.]+ s|was not checked within", str(refused.error))
    for name, value, words in (
        ("structured_output", '{"json": {"not": {}}}', 'structured_output: Unimplemented keys: ["not"]'),
        ("structured_output", "[]", "structured_output: must be a JSON object"),
        ("sampling_parameters", '{"guided_regex": "("}', "unclosed group"),
    ):
        error = run("generator", **{name: value}).error
        assert words in str(error)
    answer = run("chat", sampling_parameters='{"guided_choice": ["left", "right"]}')
    assert answer.text in ("left", "right")
