"""Embeddings through the client, its command line and the gateway, before a KServe server in this process."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from quire_client import Cancelled, Client, DeadlineExceeded, InvalidArgument, ProtocolError
from quire_client import embedding as embedding_module
from quire_client.cli import cli
from quire_client.openai.app import GatewaySettings
from quire_client.openai.requests import MAX_INPUTS
from tests.unit import fake_kserve
from tests.unit.fake_kserve import FakeKServe, read_inputs
from tests.unit.test_openai_gateway import WAIT, gateway, post_raw, refused

REST = (0.5, -0.25)


@pytest.fixture
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture
def client(server: FakeKServe) -> Iterator[Client]:
    with Client(server.url) as one:
        yield one


@pytest.fixture
def base(server: FakeKServe) -> Iterator[str]:
    with gateway(GatewaySettings(server.url)) as url:
        yield url


def test_one_vector_for_each_prompt_in_their_order(
    server: FakeKServe, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_module, "MAX_OPEN", 4)
    texts = ["x" * (1 + 7 * number % 11) for number in range(10)]
    found = client.embed(texts)
    assert found.vectors == tuple((float(len(text)), *REST) for text in texts)
    assert (found.num_input_tokens, found.num_cached_tokens) == (30, 20)
    assert client.embed("hello").vectors == ((5.0, *REST),)
    assert client.embed([7, 8]).vectors == ((2.0, *REST),)
    assert client.embed([[7, 8], [9]], dimensions=2).vectors == ((2.0, 0.5), (1.0, 0.5))
    assert client.embed([]).vectors == ()
    request = server.requests[-1]
    inputs = read_inputs(request)
    assert {output.name for output in request.outputs} == set(embedding_module.OUTPUTS)
    assert (inputs["return_embedding"], inputs["dimensions"], inputs["stream"]) == ([True], [2], [False])


def test_what_is_wrong_is_named_and_the_others_end(server: FakeKServe, client: Client) -> None:
    bad = "error INVALID_ARGUMENT text_input: is bad"
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]: is bad"):
        client.embed(["fine", bad, "silent"])
    assert server.ended.wait(WAIT), "the last one was cancelled"
    with pytest.raises(InvalidArgument, match=r"^prompts: is bad"):
        client.embed(bad)
    for reason, error in (("timeout", DeadlineExceeded), ("cancelled", Cancelled), ("stop", ProtocolError)):
        with pytest.raises(error):
            client.embed(f"ended {reason}")


def test_a_model_without_embeddings_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: kind for name, kind in fake_kserve.OUTPUTS.items() if name != "embedding"}
    monkeypatch.setattr(fake_kserve, "OUTPUTS", without)
    with pytest.raises(InvalidArgument, match=r"^model: 'generator' gives no embeddings"):
        client.embed("hello")


def test_the_command_line_prints_a_line_for_each_text(server: FakeKServe) -> None:
    where = ("embed", "--url", server.url)
    words = CliRunner().invoke(cli, [*where, "ab", "abc", "--dimensions", "2"])
    assert words.output == "[2.0, 0.5]\n[3.0, 0.5]\n"
    assert CliRunner().invoke(cli, where, input="ab\n\nabc d\n").output == (
        "[2.0, 0.5, -0.25]\n[5.0, 0.5, -0.25]\n"
    )


def create(base: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{base}/v1/embeddings", json={"model": "generator", **body}, timeout=WAIT)


def test_the_gateway_answers_as_openai(base: str) -> None:
    given: tuple[tuple[Any, list[float]], ...] = (
        ("hello", [5.0]),
        (["hello", "ab"], [5.0, 2.0]),
        ([5, 6, 7], [3.0]),
        ([[5], [6, 7]], [1.0, 2.0]),
    )
    for value, firsts in given:
        answer = create(base, input=value, user="someone", priority=1).json()
        assert (answer["object"], answer["model"]) == ("list", "generator")
        assert answer["usage"] == {"prompt_tokens": 3 * len(firsts), "total_tokens": 3 * len(firsts)}
        assert answer["data"] == [
            {"object": "embedding", "index": index, "embedding": [first, *REST]}
            for index, first in enumerate(firsts)
        ]
        coded = create(base, input=value, encoding_format="base64", dimensions=2).json()["data"]
        vectors = [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in coded]
        assert vectors == [(first, 0.5) for first in firsts]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [[5], []]}, "input"),
        ({"input": [5, True]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "model": ""}, "model"),
        ({"input": ["a", "error INVALID_ARGUMENT text_input: is bad"]}, "input[1]"),
        ({"input": "error INVALID_ARGUMENT dimensions: at most 8"}, "dimensions"),
    ],
    ids=range(16),
)
def test_the_gateway_names_what_is_wrong(base: str, body: dict[str, Any], param: str) -> None:
    assert refused(create(base, **body))["param"] == param


def test_who_leaves_the_gateway_ends_its_requests(server: FakeKServe, base: str) -> None:
    with post_raw(base, {"model": "generator", "input": ["silent"]}, "/v1/embeddings"):
        assert server.started.wait(WAIT)
    assert server.ended.wait(WAIT)
    refused(create(base, input="a", model="nope"), 404)
