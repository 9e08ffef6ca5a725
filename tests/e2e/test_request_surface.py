"""What a request may ask for, through the real server: several prompts, output modes, cancellation by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import SamplingParams
from tests.e2e.conftest import AssortedServer, TinyServer
from tests.e2e.test_generate import PROMPT, engine_text, events, post
from tests.e2e.triton_calls import TritonStream, stream
from tests.fixtures.pace import gated_input, paced_input

pytestmark = pytest.mark.server

PROMPTS = ["a", "two words", PROMPT, "数字 10 以内", "naïve café 🙂", "x" * 100, PROMPT * 4, "b " * 150]


@pytest.mark.row("A18", clauses=("prompts", "index"))
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
        assert sorted(ended) == list(range(8))
    body = {"text_input": PROMPTS, "stream": True, **asked}
    status, answer = post(f"{tiny.server.http_url}/v2/models/generator/generate_stream", body)
    parts = events(answer)
    assert status == 200
    for item, whole in enumerate(expected):
        assert "".join(part["text_output"] for part in parts if part["batch_index"] == item) == whole.text


@pytest.mark.row("A32", clauses=("modes",))
def test_output_modes(tiny: TinyServer, tmp_path: Path) -> None:
    """The engine stands behind the first token until that of a stream is there."""
    asked: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    expected = engine_text(tiny, PROMPT, max_tokens=60, ignore_eos=True)
    url = tiny.server.grpc_url

    def said(mode: str) -> tuple[list[str], list[int], list[int]]:
        first_came = tmp_path / mode
        inputs = {**asked, "output_mode": mode, "return_num_output_tokens": True, **gated_input(first_came)}
        if mode == "final":
            first_came.touch()
        call = TritonStream(url, "generator", inputs)
        assert call.next() == (mode == "final")
        first_came.touch()
        reply = call.reply if mode == "final" else call.read_all()
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


@pytest.mark.row("A33", clauses=("equal",))
def test_embeddings_that_the_client_looked_up_give_the_tokens_of_the_ids(tiny: TinyServer) -> None:
    from transformers import AutoModelForCausalLM

    table = AutoModelForCausalLM.from_pretrained(tiny.checkpoint, dtype=torch.float32).get_input_embeddings()
    asked: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "stream": True}
    for prompt in (PROMPT, "数字 10 以内", PROMPT * 20, PROMPT):  # the last from the prefix cache
        ids = tiny.llm.encode(prompt)
        expected = tiny.llm.generate([ids], SamplingParams(max_tokens=40, ignore_eos=True))[0]
        rows = table(torch.tensor(ids)).detach().numpy()
        reply = stream(tiny.server.grpc_url, "generator", {"prompt_embeds": rows, **asked})
        assert reply.error is None and reply.token_ids == expected.token_ids and reply.text == expected.text
        assert int(reply.results[-1].as_numpy("num_input_tokens")[0]) == len(ids)


@pytest.mark.row("A7", clauses=("equal",))
@pytest.mark.parametrize("model", ["generator", "chat"])
def test_the_same_tokens_by_ids_as_by_text(tiny: TinyServer, model: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "stream": True}
    for prompt in PROMPTS:
        ids = np.array(tiny.llm.encode(prompt), np.int32)
        by_text = stream(tiny.server.grpc_url, model, {"text_input": prompt, **asked})
        by_ids = stream(tiny.server.grpc_url, "generator", {"input_ids": ids, **asked})
        assert by_ids.token_ids == by_text.token_ids and len(by_ids.token_ids) == 60
        assert by_ids.text == by_text.text


@pytest.mark.row("A7", clauses=("no-tokenizer",))
def test_token_ids_in_and_out_without_any_tokenizer_files(tiny: TinyServer, assorted: AssortedServer) -> None:
    ids = tiny.llm.encode(PROMPT)
    expected = tiny.llm.generate([ids], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
    url = assorted.server.grpc_url
    asked = {"input_ids": np.array(ids, np.int32), "max_tokens": 20, "ignore_eos": True, "stream": True}
    assert stream(url, "bare", asked).token_ids == expected
    refused = stream(url, "bare", {"text_input": PROMPT})
    assert "text_input: this checkpoint has no tokenizer: send input_ids" in str(refused.error)


@pytest.mark.row("A8", clauses=("isolation",))
def test_a_bad_parameter_touches_no_other_request(tiny: TinyServer, tmp_path: Path) -> None:
    """Thirty wrong requests of every form while a stream runs: it says what it says alone."""
    url, released = tiny.server.grpc_url, tmp_path / "released"
    asked: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
    paced = {**asked, **paced_input(released, 0.3)}
    call = TritonStream(url, "generator", {"text_input": PROMPT, "stream": True, **paced})
    assert not call.next()
    for _ in range(10):
        for further, parameters, name in (
            ({"temperature": -1.0}, {}, "temperature"),
            ({"sampling_parameters": '{"top_q": 1}'}, {}, "top_q"),
            ({}, {"seed": "x"}, "seed"),
        ):
            error = stream(url, "generator", {"text_input": "b", **further}, parameters=parameters).error
            assert f"{name}: " in str(error)
    released.touch()
    assert call.read_all().text == engine_text(tiny, PROMPT, **asked)
