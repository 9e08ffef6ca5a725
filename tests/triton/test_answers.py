"""What a response says of its generation beside the text: why it ended, where its time went, counts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.outputs import EngineCoreOutput, RequestOutput, TokenLogprobs  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle, _logprobs, _vllm_logprobs  # noqa: E402
from quire.triton.result_cache import nothing_said  # noqa: E402
from quire_ensemble.generator_schema import OUTPUTS, outputs_of  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_choices import WAIT_S, Harness, tokens  # noqa: E402

ALL = frozenset(spec.name for spec in OUTPUTS)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def submit(harness: Harness, outputs: frozenset[str], **fields: Any) -> fake_pb_utils.ResponseSender:
    sender = fake_pb_utils.ResponseSender()
    params = fields.pop("params", SamplingParams())
    parsed = ParsedRequest(
        [1, 2], params, "", outputs, ALL, arrived_at=time.monotonic(), **{"stream": True, **fields}
    )
    harness.responder.submit(RequestHandle(sender, "t-1", ""), parsed)
    return sender


def answer(harness: Harness, sender: fake_pb_utils.ResponseSender, *outputs: EngineCoreOutput) -> Any:
    for output in outputs:
        harness.core.steps.put([output])
    assert sender.final.wait(WAIT_S), "no FINAL"
    return sender.responses


def value(response: Any, name: str) -> Any:
    found = response.tensors[name][0]
    return found.decode() if isinstance(found, bytes) else found


@pytest.mark.parametrize(("stop_reason", "told"), [("END", "END"), (7, "7"), (None, "")])
def test_stop_reason_is_the_string_or_the_token_id_as_text(
    harness: Harness, stop_reason: Any, told: str
) -> None:
    sender = submit(harness, frozenset({"output_ids"}))
    responses = answer(
        harness, sender, tokens(0, 5), tokens(0, 6, finish_reason="stop", stop_reason=stop_reason)
    )
    assert value(responses[-1], "stop_reason") == told
    assert not any("stop_reason" in response.tensors for response in responses[:-1])


def test_outputs_come_in_the_order_of_their_declaration(harness: Harness) -> None:
    """litellm's client of Triton takes the first for the text."""
    sender = submit(harness, ALL)
    responses = answer(harness, sender, tokens(0, 5), tokens(0, 6, finish_reason="stop"))
    for response in responses:
        names = list(response.tensors)
        assert names == [spec.name for spec in OUTPUTS if spec.name in response.tensors]
        assert names[0] == "text_output"


@pytest.mark.parametrize("cumulative", [False, True])
def test_a_stream_begins_with_its_prompt_once(harness: Harness, cumulative: bool) -> None:
    sender = submit(
        harness,
        frozenset({"text_output", "index"}),
        echo="Say: ",
        cumulative=cumulative,
        params=SamplingParams(n=2),
    )
    for index in (0, 1):
        harness.core.steps.put([tokens(index, 5)])
    wait_until(lambda: len(sender.responses) == 2)
    ends = [tokens(index, 7, finish_reason="stop") for index in (0, 1)]
    responses = answer(harness, sender, *ends)
    for index in (0, 1):
        texts = [value(one, "text_output") for one in responses if value(one, "index") == index]
        assert len(texts) > 1 and texts[0].startswith("Say: ")
        assert all(text.startswith("Say: ") == cumulative for text in texts[1:])


def test_a_prompt_alone_has_no_token(harness: Harness) -> None:
    """With log-probabilities the engine computes it, without them nobody is asked."""
    entry = TokenLogprobs([2], [-0.5], 1)
    sender = submit(harness, ALL, echo="Say", is_prompt_alone=True, stream=False)
    told = tokens(0, 6, finish_reason="stop", prompt_logprobs=[None, entry], logprobs=[entry])
    (response,) = answer(harness, sender, told)
    assert value(response, "text_output") == "Say" and len(response.tensors["output_ids"]) == 0
    assert (value(response, "finish_reason"), value(response, "num_output_tokens")) == ("length", 0)
    assert json.loads(value(response, "logprobs")) == []
    assert len(json.loads(value(response, "prompt_logprobs"))) == 2
    sender = submit(
        harness, ALL, echo="Say", is_prompt_alone=True, params=SamplingParams(n=2), results=nothing_said([2])
    )
    responses = answer(harness, sender)
    assert [value(one, "text_output") for one in responses] == ["Say", "Say"]
    assert [value(one, "index") for one in responses] == [0, 1]
    assert {value(one, "finish_reason") for one in responses} == {"length"}
    assert not any(json.loads(value(one, "timing"))["result_cached"] for one in responses)


def test_the_parts_of_the_time_are_the_whole(harness: Harness) -> None:
    """Queue, prefill and decode add up to total; the first token lies within, where it was sent."""
    sender = submit(harness, ALL)
    arrived = time.monotonic()
    first = tokens(0, 5, admitted_at=arrived, first_token_at=time.monotonic(), num_cached_tokens=1)
    counts = {"num_preemptions": 2, "num_draft_tokens": 7, "num_accepted_drafts": 3}
    responses = answer(harness, sender, first, tokens(0, 6, finish_reason="length", **counts))
    timings = [json.loads(value(response, "timing")) for response in responses]
    for timing in timings:
        parts = timing["queue"], timing["prefill"], timing["decode"]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == pytest.approx(timing["total"], abs=0.002), "each is rounded to a microsecond"
        assert timing["queue"] + timing["prefill"] <= timing["first_token"] + 0.001 <= timing["total"] + 0.002
        assert timing["num_cached_tokens"] == 1
    assert counts.items() <= timings[-1].items()
    assert timings[0]["total"] <= timings[-1]["total"]


def test_a_request_that_never_ran_has_waited_all_its_time(harness: Harness) -> None:
    sender = submit(harness, ALL)
    [response] = answer(harness, sender, tokens(0, finish_reason="timeout"))
    timing = json.loads(value(response, "timing"))
    assert timing["queue"] == pytest.approx(timing["total"], abs=0.002)
    assert timing["prefill"] == timing["decode"] == 0


def test_reasoning_tokens_are_those_that_the_output_counts() -> None:
    sender = fake_pb_utils.ResponseSender()
    handle = RequestHandle(sender, "t-1", "")
    handle.parsed = ParsedRequest([1], SamplingParams(), "", ALL, ALL)
    handle.send(RequestOutput("t-1", "x", [1, 2], "stop", None, 1, 2, 0, num_reasoning_tokens=1))
    assert value(sender.responses[0], "num_reasoning_tokens") == 1


@pytest.mark.parametrize("form", ["quire", "vllm", "tensorrt_llm", "batched"])
def test_every_dialect_has_every_output(form: str) -> None:
    names = frozenset(spec.name for spec in outputs_of(batched=form == "batched"))
    sender = fake_pb_utils.ResponseSender()
    handle = RequestHandle(sender, "t-1", "")
    handle.parsed = ParsedRequest([1], SamplingParams(), "", names, names, form=form)
    handle.send(RequestOutput("t-1", "x", [1, 2], "stop", None, 1, 2, 0))
    assert sender.responses[0].tensors.keys() == names
    assert sender.responses[0].text == "x"


def test_log_probabilities_as_vllm_backend_writes_them() -> None:
    """Most likely ones by place; a token drawn from behind them has its own rank, which beams do not know."""
    entries = [
        TokenLogprobs([7, 5, 7], [-0.9, -0.5, -0.9], 2),
        TokenLogprobs([9, 5, 7], [-4.0, -0.5, -0.9], 31),
        TokenLogprobs([9, 5], [-4.0, -0.5], 0),
    ]
    output = RequestOutput("r", "", [7, 9, 9], None, None, 1, 3, 0, logprobs=entries)
    found = json.loads(_vllm_logprobs(output, "<{}>".format))
    ranks = [{token: one["rank"] for token, one in entry.items()} for entry in found]
    assert ranks == [{"5": 1, "7": 2}, {"5": 1, "7": 2, "9": 31}, {"5": 1, "9": 2}]
    assert found[1]["9"] == {"logprob": -4.0, "rank": 31, "decoded_token": "<9>"}


def test_parts_of_characters_are_told_with_their_bytes() -> None:
    class Decoder:
        def text_of(self, token: int) -> str:
            return "\ufffd" if token in (7, 8) else "a"

        def bytes_of(self, token: int) -> bytes | None:
            return {5: b"a", 7: b"\xc3"}.get(token)

    decoder: Any = Decoder()
    entries = [TokenLogprobs([7, 5, 8], [-0.9, -0.5, -1.0], 2), None, TokenLogprobs([5], [-0.5], 1)]
    part, none, whole = json.loads(_logprobs(entries, decoder))
    assert part["bytes"] == {"7": [0xC3]}, "where they are known"
    assert none is None and "bytes" not in whole
