"""What a request may ask for, through the real server: several prompts, output modes, cancellation by id."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire import SamplingParams
from tests.e2e.conftest import TinyServer
from tests.e2e.test_generate import PROMPT, engine_text, events, post
from tests.e2e.triton_calls import stream

pytestmark = pytest.mark.server

PROMPTS = ["a", "two words", PROMPT, "数字 10 以内", "naïve café 🙂", "x" * 100, PROMPT * 4, "b " * 150]


@pytest.mark.row("A18", clauses=("prompts", "index", "independent"))
def test_eight_prompts_in_one_request_get_eight_answers(tiny: TinyServer) -> None:
    asked = {"max_tokens": 60, "stop_token_ids": list(range(4, 20))}
    expected = tiny.llm.generate(PROMPTS, SamplingParams(max_tokens=60, stop_token_ids=tuple(range(4, 20))))
    assert len({len(answer.token_ids) for answer in expected}) > 2, "they must end at different times"
    url = tiny.server.grpc_url
    for streams in (True, False):
        reply = stream(url, "generator", {"text_input": PROMPTS, "stream": streams, **asked})
        assert reply.error is None and reply.finals == 1
        texts = [""] * 8
        ended = []
        for result in reply.results:
            item = int(result.as_numpy("batch_index")[0])
            assert item not in ended
            texts[item] += result.as_numpy("text_output")[0].decode()
            if result.as_numpy("finish_reason") is not None:
                ended.append(item)
        assert texts == [answer.text for answer in expected]
        assert sorted(ended) == list(range(8)) and ended != sorted(ended)
    body = {"text_input": PROMPTS, "stream": True, **asked}
    status, answer = post(f"{tiny.server.http_url}/v2/models/generator/generate_stream", body)
    parts = events(answer)
    assert status == 200
    for item, whole in enumerate(expected):
        assert "".join(part["text_output"] for part in parts if part["batch_index"] == item) == whole.text


@pytest.mark.row("A32", clauses=("modes",))
def test_output_modes(tiny: TinyServer) -> None:
    asked: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    expected = engine_text(tiny, PROMPT, max_tokens=60, ignore_eos=True)
    url = tiny.server.grpc_url

    def said(mode: str) -> tuple[list[str], list[int], list[int]]:
        inputs = {**asked, "output_mode": mode, "return_num_output_tokens": True}
        reply = stream(url, "generator", inputs)
        assert reply.error is None and reply.finals == 1
        counts = [int(result.as_numpy("num_output_tokens")[0]) for result in reply.results]
        logprobs = [len(json.loads(result.as_numpy("logprobs")[0])) for result in reply.results]
        assert counts == logprobs == [len(result.as_numpy("output_ids")) for result in reply.results]
        return reply.texts, counts, reply.token_ids

    deltas, counts, token_ids = said("delta")
    assert "".join(deltas) == expected and sum(counts) == 60 and len(deltas) > 1
    texts, counts, _ = said("cumulative")
    assert texts[-1] == expected and counts[-1] == 60 and len(texts) > 1
    assert all(expected.startswith(text) for text in texts) and counts == sorted(set(counts))
    assert said("final") == ([expected], [60], token_ids)
