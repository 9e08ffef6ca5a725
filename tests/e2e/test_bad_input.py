"""Each kind of bad input through the real server, next to a good request that notices nothing."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from quire import SamplingParams
from quire_client import Client, InvalidArgument
from tests.e2e.conftest import TinyServer
from tests.e2e.triton_calls import TritonStream, infer, stream, tensor
from tests.fixtures.pace import paced_input

pytestmark = pytest.mark.server

GOOD = "The good request"
IDS = np.array([5, 6, 7], np.int32)
MESSAGES = json.dumps([{"role": "user", "content": "hi"}])

BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("no prompt", {"max_tokens": 3}, {}, "prompt: exactly one of"),
    ("two prompts", {"text_input": "a", "messages": MESSAGES}, {}, "prompt: exactly one of"),
    ("empty text", {"text_input": ""}, {}, "text_input: must not be empty"),
    ("empty ids", {"input_ids": np.array([], np.int32)}, {}, "input_ids: must hold at least one"),
    ("prompt too long", {"input_ids": np.full(16_384, 5, np.int32)}, {}, "max_model_len is 16384"),
    (
        "id outside vocabulary",
        {"input_ids": np.array([5, 100000], np.int32)},
        {},
        "input_ids: token id 100000",
    ),
    ("negative id", {"input_ids": np.array([-3], np.int32)}, {}, "input_ids: token id -3"),
    ("invalid UTF-8", {"text_input": b"ab\xff\xfe"}, {}, "text_input: invalid UTF-8"),
    ("invalid JSON messages", {"messages": "[{"}, {}, "messages: "),
    ("messages of a wrong shape", {"messages": '{"role": "user"}'}, {}, "messages"),
    ("message without content", {"messages": '[{"role": "user"}]'}, {}, "messages"),
    ("template refuses the role", {"messages": '[{"role": "martian", "content": "x"}]'}, {}, "messages: "),
    ("unknown parameter", {"input_ids": IDS}, {"temprature": 1}, "temprature: unknown parameter"),
    ("ill-typed parameter", {"input_ids": IDS}, {"max_tokens": "many"}, "max_tokens: must be an integer"),
    ("unknown JSON key", {"input_ids": IDS, "sampling_parameters": '{"topp": 1}'}, {}, "topp: unknown"),
    ("invalid JSON parameters", {"input_ids": IDS, "sampling_parameters": "{"}, {}, "sampling_parameters: "),
    ("NaN temperature", {"input_ids": IDS, "temperature": float("nan")}, {}, "temperature: must be a number"),
    ("negative temperature", {"input_ids": IDS, "temperature": -0.5}, {}, "temperature: must be in"),
    ("top_p above 1", {"input_ids": IDS, "top_p": 1.5}, {}, "top_p: must be in [0, 1]"),
    ("max_tokens below 0", {"input_ids": IDS, "max_tokens": -1}, {}, "max_tokens: must be in [1,"),
    ("min over max", {"input_ids": IDS, "max_tokens": 2, "min_tokens": 3}, {}, "min_tokens: must not exceed"),
    ("stop id outside", {"input_ids": IDS, "stop_token_ids": [99999]}, {}, "stop_token_ids: token id 99999"),
    ("two temperatures", {"input_ids": IDS, "temperature": [0.1, 0.2]}, {}, "temperature"),
]


@pytest.mark.row("A37", clauses=("fuzz", "alive"))
@pytest.mark.timeout(600)
def test_five_hundred_malformed_requests_beside_ten_good_ones(tiny: TinyServer, tmp_path: Path) -> None:
    rng = random.Random(1)
    pids = {process.pid for process in tiny.server.descendants()}
    prompts = [f"good {i}" for i in range(10)]
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    expected = [output.text for output in tiny.llm.generate(prompts, params)]
    url, released = tiny.server.grpc_url, tmp_path / "released"

    def good(prompt: str) -> str:
        inputs = {"text_input": prompt, "stream": True, "max_tokens": 400, "ignore_eos": True}
        return stream(url, "generator", {**inputs, **paced_input(released)}).text

    def bad(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
        statuses = []
        with grpcclient.InferenceServerClient(url) as client:
            for inputs, parameters in cases:
                try:
                    client.infer(
                        "generator_unary", [tensor(n, v) for n, v in inputs.items()], parameters=parameters
                    )
                except InferenceServerException as error:
                    statuses.append(error.status())
                else:
                    statuses.append("OK")
        return statuses

    def mutate(index: int) -> tuple[dict[str, Any], dict[str, Any]]:
        _, inputs, parameters, _ = BAD[index % len(BAD)]
        inputs, parameters = dict(inputs), dict(parameters)
        noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
        match rng.randrange(5):
            case 0:
                inputs["sampling_parameters"] = noise + b"{"
            case 1:
                inputs["messages"] = noise
                inputs["text_input"] = noise
            case 2:
                parameters[f"x{rng.randrange(10**6)}"] = rng.random()
            case 3:
                inputs["stop"] = [b"\xff" + noise]
            case _:
                pass
        return inputs, parameters

    cases = [mutate(i) for i in range(500)]
    with ThreadPoolExecutor(12) as pool:
        good_ones = [pool.submit(good, prompt) for prompt in prompts]
        bad_ones = [pool.submit(bad, cases[i::2]) for i in range(2)]
        statuses = [status for part in bad_ones for status in part.result()]
        released.touch()
        assert [one.result() for one in good_ones] == expected
    assert len(statuses) == 500
    assert set(statuses) == {"StatusCode.INVALID_ARGUMENT"}
    assert {process.pid for process in tiny.server.descendants()} == pids, "no process was restarted"


def test_texts_that_are_no_utf8_and_far_too_long_ones_are_refused(tiny: TinyServer) -> None:
    """An id of any bytes passes HTTP's JSON; decoding it raised in `execute`, where Triton then ends requests
    that are others' to end. A text that cannot fit was tokenized before it was refused."""
    url = f"http://{tiny.server.http_url}/v2/models/generator/generate"
    long = b"x" * (2 * 2**20)
    for body, words in (
        (b'{"id": "a\xff", "text_input": "hi"}', "id: invalid UTF-8 at byte 1"),
        (b'{"tenant": "\xff", "text_input": "hi"}', "invalid UTF-8"),
        (b'{"text_input": "' + long + b'"}', "bytes are more than 16383 tokens can hold"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, body, method="POST"), timeout=60)
        assert words in json.loads(refused.value.read())["error"]
    for model in ("chat", "generator"):
        reply = stream(tiny.server.grpc_url, model, {"text_input": long.decode()})
        assert "tokens can hold" in str(reply.error)
        assert stream(tiny.server.grpc_url, model, {"text_input": "hi", "max_tokens": 4}).error is None


@pytest.fixture(scope="module")
def good(tiny_session: TinyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A stream that runs beside all bad requests, and is checked at its end. Tests without it stand above: it
    holds up each step of the engine."""
    tiny_session.revive()
    released = tmp_path_factory.mktemp("good") / "released"
    inputs = {"text_input": GOOD, "stream": True, "max_tokens": 600, "ignore_eos": True}
    call = TritonStream(tiny_session.server.grpc_url, "generator", {**inputs, **paced_input(released, 0.3)})
    call.next()
    yield
    released.touch()
    reply = call.read_all()
    params = SamplingParams(max_tokens=600, ignore_eos=True)
    assert reply.text == tiny_session.llm.generate([GOOD], params)[0].text
    assert reply.finals == 1


@pytest.mark.row("A8", clauses=("naming", "isolation"))
@pytest.mark.parametrize(("inputs", "parameters", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_invalid_argument_and_names_the_field(
    tiny: TinyServer, good: None, inputs: dict[str, Any], parameters: dict[str, Any], words: str
) -> None:
    url = tiny.server.grpc_url
    with pytest.raises(InferenceServerException) as unary:
        infer(url, "generator_unary", inputs, parameters=parameters)
    assert unary.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert words in unary.value.message()
    reply = stream(url, "generator", {**inputs, "stream": True}, parameters=parameters)
    if reply.error is not None:
        assert words in str(reply.error)
    else:
        raise AssertionError("the stream did not end with an error")


def test_our_client_raises_by_kind(tiny: TinyServer, good: None) -> None:
    with Client(tiny.server.grpc_url) as client:
        for model in ("generator", "chat"):
            with pytest.raises(InvalidArgument, match="top_p"):
                client.generate("hello", model=model, top_p=2.0)
