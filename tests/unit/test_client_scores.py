"""Scores through the client and the gateway, before a KServe server in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire_client import Client, InvalidArgument
from quire_client.openai.app import GatewaySettings
from tests.unit import fake_kserve
from tests.unit.fake_kserve import FakeKServe, read_inputs
from tests.unit.test_openai_gateway import WAIT, gateway, refused

BAD = "error INVALID_ARGUMENT text_pair: is bad"


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


def test_scores_of_prompts_and_pairs_in_their_order(
    server: FakeKServe, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = client.classify(["ab", "abcd"])
    assert (found.values, found.labels) == (((2.0, 0.5), (4.0, 0.5)), ("longest",) * 2)
    assert (found.num_input_tokens, found.num_cached_tokens) == (6, 4)
    assert client.classify([5, 6], use_activation=False).values == ((-4.0, -0.5),)
    pairs = client.score("abc", ["x", "xyz"])
    assert [one for (one,) in pairs.values] == pytest.approx([3.01, 3.03])
    each = client.score(["a", "ab"], ["x", "xyz"])
    assert [one for (one,) in each.values] == pytest.approx([1.01, 2.03])
    inputs = read_inputs(server.requests[-1])
    assert (inputs["text_input"], inputs["text_pair"], inputs["return_scores"]) == ([b"ab"], [b"xyz"], [True])
    assert client.score("a", []).values == ()
    with pytest.raises(InvalidArgument, match="seconds: must be as many as the first texts"):
        client.score(["a", "b"], ["x"])
    with pytest.raises(InvalidArgument, match=r"^seconds\[1\]: is bad"):
        client.score(["a", BAD], ["x", "y"])
    without = {name: kind for name, kind in fake_kserve.OUTPUTS.items() if name != "scores"}
    monkeypatch.setattr(fake_kserve, "OUTPUTS", without)
    with Client(server.url) as other, pytest.raises(InvalidArgument, match="'generator' gives no scores"):
        other.classify("a")


def post(base: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{base}/v1/{path}", json={"model": "generator", **body}, timeout=WAIT)


def test_the_gateway_reranks(base: str) -> None:
    """By descending score, with the documents or without, all of them or the best."""
    documents = ["x", "xyz", {"text": "xy"}]
    answer = post(base, "rerank", query="abc", documents=documents).json()
    assert (answer["model"], answer["usage"]) == ("generator", {"total_tokens": 9})
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]
    assert [one["document"]["text"] for one in answer["results"]] == ["xyz", "xy", "x"]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([3.03, 3.02, 3.01])
    answer = post(
        base,
        "rerank",
        query="abc",
        documents=documents,
        top_n=1,
        return_documents=False,
        use_activation=False,
    ).json()
    (one,) = answer["results"]
    assert one == {"index": 0, "relevance_score": pytest.approx(-3.01)}


def test_the_gateway_scores_and_classifies(server: FakeKServe, base: str) -> None:
    for first, second, expected in (
        ("ab", "x", [2.01]),
        ("ab", ["x", "xy"], [2.01, 2.02]),
        (["ab"], ["x", "xy"], [2.01, 2.02]),
        (["ab", "abc"], ["x", "xy"], [2.01, 3.02]),
    ):
        answer = post(base, "score", text_1=first, text_2=second, user="someone", priority=1).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected)
        assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("list", 3 * len(expected))
    for given, lengths in (("abc", [3]), (["a", "ab"], [1, 2]), ([5, 6], [4]), ([[5], [6]], [4, 4])):
        data = post(base, "classify", input=given).json()["data"]
        assert data == [
            {"index": index, "label": "longest", "probs": [length, 0.5], "num_classes": 2}
            for index, length in enumerate(lengths)
        ]
    (one,) = post(base, "classify", messages=[{"role": "user", "content": "hello"}]).json()["data"]
    assert one["probs"] == [5.0, 0.5]
    asked = json.loads(read_inputs(server.requests[-1])["messages"][0])
    assert asked["add_generation_prompt"] is False, "a reward is of an answer that is there"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("rerank", {"documents": ["a"]}, "query"),
        ("rerank", {"query": "a"}, "documents"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": "a", "documents": ["a", 5]}, "documents"),
        ("rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("rerank", {"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents"),
        ("rerank", {"query": BAD, "documents": ["a"]}, "documents[0]"),
        ("rerank", {"query": "a", "documents": ["a"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        ("score", {"text_1": "a"}, "text_2"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("score", {"text_1": 5, "text_2": ["a"]}, "text_1"),
        ("classify", {}, "input"),
        ("classify", {"input": ""}, "input"),
        ("classify", {"input": ["a", ""]}, "input"),
        ("classify", {"input": "a", "messages": []}, "input"),
        ("classify", {"messages": "a"}, "messages"),
        ("classify", {"input": "a", "use_activation": 1}, "use_activation"),
        ("classify", {"input": "a", "model": ""}, "model"),
    ],
    ids=range(18),
)
def test_the_gateway_names_what_is_wrong(base: str, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(post(base, path, **body))["param"] == param


def test_a_model_with_several_scores_cannot_rank(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FakeKServe,
        "_scored",
        lambda self, request, text, inputs: self._response(
            request, "", [], "stop", final=True, scores=[1.0, 2.0], label="b"
        ),
    )
    error = refused(post(base, "rerank", query="a", documents=["b"]))
    assert (error["param"], "gives 2 scores of a pair" in error["message"]) == ("model", True)
