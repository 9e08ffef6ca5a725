"""LoRA adapters through client, command line and gateway, before a KServe server in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from quire_client import Client, NotFound
from quire_client.cli import cli
from quire_client.openai import adapters
from quire_client.openai.app import GatewaySettings
from quire_client.openai.keys import entry_of
from tests.unit.fake_kserve import FakeKServe
from tests.unit.test_openai_gateway import WAIT, chat, complete, gateway, inputs_of, refused


@pytest.fixture
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        fake.adapters = {"doll": "/loras/doll", "chat": "/loras/chat"}
        yield fake


@pytest.fixture
def base(server: FakeKServe) -> Iterator[str]:
    with gateway(GatewaySettings(server.url)) as url:
        yield url


def test_a_client_lists_loads_and_unloads(server: FakeKServe) -> None:
    with Client(server.url) as client:
        assert client.load_adapter("sheep", "new/sheep")["name"] == "sheep"
        assert [one["name"] for one in client.adapters()["adapters"]] == ["doll", "chat", "sheep"]
        assert client.unload_adapter("doll", drain=True) == {"name": "doll"}
        with pytest.raises(NotFound):
            client.unload_adapter("doll")
        answer = json.loads(client.generate("echo", lora_name="sheep").text)
    assert answer["lora_name"] == ["sheep"]


def test_the_command_line_has_them_for_people_and_programs(server: FakeKServe) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["adapters", *arguments, "--url", server.url])
        assert done.exit_code == 0, done.output
        return done.output

    assert run("list").splitlines()[1].split() == ["doll", "8", "-", "-", "-", "-", "-", "/loras/doll"]
    assert json.loads(run("load", "sheep", "new/sheep", "--json"))["path"] == "new/sheep"
    assert run("unload", "sheep", "--drain") == ""
    assert [one["name"] for one in json.loads(run("list", "--json"))["adapters"]] == ["doll", "chat"]
    said = CliRunner().invoke(cli, ["generate", "echo", "--lora-name", "doll", "--url", server.url])
    assert json.loads(said.output)["lora_name"] == ["doll"]


def test_an_adapter_is_a_model_of_the_gateway(server: FakeKServe, base: str) -> None:
    """A model of the same name is meant before it."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        listed = {one.id: one for one in client.models.list()}
        assert {*listed} == {"chat", "doll"}
        one = client.models.retrieve("doll").model_dump()
    assert one == listed["doll"].model_dump()
    assert (one["parent"], one["root"]) == ("generator", "/loras/doll")
    assert "parent" not in listed["chat"].model_dump()
    answer = chat(base, "echo", model="doll")
    assert answer.json()["model"] == "doll" and server.requests[-1].model_name == "generator"
    assert inputs_of(answer)["lora_name"] == ["doll"]
    completion = complete(base, "echo", model="doll").json()["choices"][0]["text"]
    assert json.loads(completion)["lora_name"] == ["doll"]
    assert inputs_of(chat(base, "echo", lora_name="doll"))["lora_name"] == ["doll"]
    assert "lora_name" not in inputs_of(chat(base, "echo"))
    assert refused(chat(base, "echo", model="doll", lora_name="sheep"))["param"] == "lora_name"
    assert refused(chat(base, "echo", model="nobody"), 404)
    vectors = httpx.post(f"{base}/v1/embeddings", json={"model": "doll", "input": "abc"}, timeout=WAIT)
    assert vectors.json()["model"] == "doll" and server.requests[-1].model_name == "generator"


def test_a_list_is_asked_for_again_when_it_is_old(
    server: FakeKServe, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(chat(base, "echo", model="late"), 404)
    server.adapters["late"] = "/loras/late"
    monkeypatch.setattr(adapters, "LISTED_S", 0.0)
    assert inputs_of(chat(base, "echo", model="late"))["lora_name"] == ["late"]
    del server.adapters["late"]
    assert refused(chat(base, "echo", model="late"), 404)


def change(base: str, what: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{base}/v1/{what}_lora_adapter", json=body, headers=headers, timeout=WAIT)


def test_vllm_s_routes_load_and_unload_at_every_server(server: FakeKServe) -> None:
    with FakeKServe() as second, gateway(GatewaySettings(f"{server.url},{second.url}")) as base:
        added = change(base, "load", lora_name="sheep", lora_path="/loras/sheep")
        assert added.text == "Success: LoRA adapter 'sheep' added successfully." and added.status_code == 200
        assert server.adapters["sheep"] == second.adapters["sheep"] == "/loras/sheep"
        again = {"lora_name": "sheep", "lora_path": "/loras/other"}
        assert "load_inplace" in refused(change(base, "load", **again))["message"]
        assert change(base, "load", **again, load_inplace=True).status_code == 200
        assert server.adapters["sheep"] == "/loras/other"
        removed = change(base, "unload", lora_name="sheep")
        assert removed.text == "Success: LoRA adapter 'sheep' removed successfully."
        assert "sheep" not in server.adapters and "sheep" not in second.adapters
        refused(change(base, "unload", lora_name="sheep"), 404)
        for wrong, param in (({}, "lora_name"), ({"lora_name": "a", "more": 1}, "more")):
            assert refused(change(base, "unload", **wrong))["param"] == param


def test_only_an_administrator_s_key_may(server: FakeKServe, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"bob": entry_of("one"), "eve": {**entry_of("two"), "admin": True}}))
    body = {"lora_name": "sheep", "lora_path": "/loras/sheep"}
    with gateway(GatewaySettings(server.url, api_keys=file)) as base:
        assert change(base, "load", **body).status_code == 401
        reply = change(base, "load", "one", **body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden")
        assert "sheep" not in server.adapters
        assert change(base, "load", "two", **body).status_code == 200 and "sheep" in server.adapters
    made = CliRunner().invoke(cli, ["api-key", "eve", "--admin"])
    assert json.loads(made.stdout)["eve"]["admin"] is True
