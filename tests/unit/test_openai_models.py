"""The gateway's models: names for clients, which are listed, lengths, and token ids of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from quire_client.cli import cli
from quire_client.openai.app import GatewaySettings
from quire_client.openai.keys import entry_of
from quire_client.openai.names import Names
from quire_client.protocol import ModelSchema
from tests.unit.fake_kserve import FakeKServe, read_inputs
from tests.unit.test_openai_gateway import WAIT, chat, complete, events, gateway, inputs_of, refused


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture(scope="module")
def base(server: FakeKServe) -> Iterator[str]:
    names = Names.parse(["gpt-4o", "words=generator"], "chat")
    with gateway(GatewaySettings(server.url, names=names)) as url:
        yield url


def post(base: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{base}{path}", json=body, timeout=WAIT)


# --- names ---


def schema(name: str, *steps: str) -> ModelSchema:
    return ModelSchema(name, {}, None, steps=steps)


def test_what_is_listed() -> None:
    """Of a repository as `quire repository build` makes it: one model."""
    models = [
        *(schema("generator"), schema("generator_unary"), schema("tokenizer")),
        *(schema("chat", "tokenizer", "generator"), schema("chat_unary", "tokenizer", "generator_unary")),
    ]
    built = {one.name: one for one in models}
    assert Names().listed(built) == {"chat": "chat"}
    alone = {name: built[name] for name in ("generator", "generator_unary")}
    assert Names().listed(alone) == {"generator": "generator"}
    assert Names().listed({"only_unary": schema("only_unary")}) == {"only_unary": "only_unary"}
    stated = Names({"a": "chat", "b": "chat", "words": "generator", "gone": "old"})
    assert stated.listed(built) == {"a": "chat", "b": "chat", "words": "generator"}


def test_models_have_the_names_that_are_stated(base: str, server: FakeKServe) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        assert [model.id for model in client.models.list()] == ["gpt-4o", "words"]
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"
        answer = client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "tokens 1"}]
        )
        assert answer.model == "gpt-4o" and server.requests[-1].model_name == "chat"
    assert complete(base, "tokens 1", model="words").json()["model"] == "words"
    assert chat(base, "tokens 1").status_code == 200, "its own name is good, too"
    assert refused(chat(base, "tokens 1", model="gpt-5"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("names", [["a=chat", "a=generator"], ["=chat"], [""]])
def test_names_that_cannot_be(names: list[str]) -> None:
    options = [part for name in names for part in ("--served-model-name", name)]
    result = CliRunner().invoke(cli, ["openai", *options])
    assert result.exit_code == 2 and "--served-model-name: must be NAME or NAME=MODEL" in result.output


def test_a_model_tells_its_length_and_what_its_parts_can(base: str) -> None:
    found = httpx.get(f"{base}/v1/models", timeout=WAIT).json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in found] == [("gpt-4o", 512), ("words", 512)]
    assert httpx.get(f"{base}/v1/models/generator", timeout=WAIT).json()["max_model_len"] == 512


def test_what_an_ensemble_does_not_take_goes_to_its_generator(base: str, server: FakeKServe) -> None:
    """One name is enough for a client: `chat` takes one prompt, and text."""
    answer = complete(base, ["a", "b"], model="gpt-4o").json()
    assert [choice["text"] for choice in answer["choices"]] == ["a1 a2 ", "b1 b2 "]
    assert (answer["model"], server.requests[-1].model_name) == ("gpt-4o", "generator")


# --- token ids of prompts ---


def test_tokenize(base: str, server: FakeKServe) -> None:
    for model in ("gpt-4o", "words", "chat", "generator"):
        told = post(base, "/tokenize", model=model, prompt="héllo").json()
        ids = list("héllo".encode())
        assert told == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    messages = [{"role": "user", "content": "hi"}]
    stated = {"continue_final_message": True, "chat_template_kwargs": {"a": 1}}
    told = post(base, "/tokenize", model="chat", messages=messages, **stated).json()
    assert told["tokens"] == list(b"hi")
    sent = [read_inputs(one) for one in server.requests if one.model_name == "tokenizer"][-1]
    assert json.loads(sent["messages"][0]) == {"messages": messages, **stated}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "chat"}, "prompt"),
        ("/tokenize", {"model": "chat", "prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"model": "chat", "prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"model": "chat", "prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"model": "chat", "prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/tokenize", {"model": "tokenizer", "messages": 5}, "messages"),
        ("/detokenize", {"model": "chat", "tokens": []}, "tokens"),
        ("/detokenize", {"model": "chat", "tokens": ["a"]}, "tokens"),
        ("/detokenize", {"model": "chat", "tokens": [1], "prompt": "a"}, "prompt"),
    ],
)
def test_what_is_wrong_with_tokens(base: str, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(post(base, path, **body))["param"] == param


def test_a_model_without_a_tokenizer_beside_it(base: str) -> None:
    assert "no tokenizer model" in refused(post(base, "/tokenize", model="unary", prompt="a"))["message"]


def test_detokenize(base: str, server: FakeKServe) -> None:
    told = post(base, "/detokenize", model="gpt-4o", tokens=[72, 101]).json()
    asked = json.loads(told["prompt"])
    assert server.requests[-1].outputs[0].name == "text_output"
    assert asked["input_ids"] == [72, 101] and asked["max_tokens"] == [0]
    assert asked["exclude_input_in_output"] == [False]
    assert json.loads(asked["sampling_parameters"][0]) == {"skip_special_tokens": False}


def test_tokens_need_a_key_where_there_are_keys(server: FakeKServe, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"a": {**entry_of("good"), "tenant": "t"}}), "utf-8")
    with gateway(GatewaySettings(server.url, api_keys=keys)) as url:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert refused_key(post(url, path, model="chat", **body))
            headers = {"Authorization": "Bearer good"}
            reply = httpx.post(f"{url}{path}", json={"model": "chat", **body}, headers=headers, timeout=WAIT)
            assert reply.status_code == 200
    assert read_inputs(server.requests[-1])["tenant"] == [b"t"]


def refused_key(reply: httpx.Response) -> bool:
    return reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"


def test_token_ids_of_the_prompt(base: str) -> None:
    whole = chat(base, "tokens 2", return_token_ids=True).json()
    assert whole["prompt_token_ids"] == list(b"tokens 2")
    assert whole["choices"][0]["token_ids"] == [0, 1]
    answer = complete(base, ["a", "bc"], return_token_ids=True).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[97], [98, 99]]
    (choice,) = complete(base, [5, 6], return_token_ids=True).json()["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    first, *others = events(chat(base, "tokens 2", return_token_ids=True, stream=True))
    assert first["prompt_token_ids"] == list(b"tokens 2")
    assert not any("prompt_token_ids" in part for part in others)
    parts = events(complete(base, "tokens 2", return_token_ids=True, stream=True))
    told = [part["choices"][0].get("prompt_token_ids") for part in parts]
    assert told == [list(b"tokens 2"), None, None]
    assert "prompt_token_ids" not in inputs_of(chat(base, "echo"))
