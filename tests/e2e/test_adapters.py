"""LoRA adapters behind a real server: named, loaded and unloaded by clients; an engine's death between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM
from quire_client import Client
from quire_client.errors import InvalidArgument, Unavailable
from quire_client.openai.app import GatewaySettings
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import OPTIONS
from tests.fixtures.adapters import make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV, paced
from tests.fixtures.waiting import wait_until
from tests.unit.test_openai_gateway import gateway

PROMPT = "the quick brown fox jumps over the lazy dog"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
LONG = 400


@pytest.mark.row("E20", clauses=("load",))
def test_clients_name_load_and_unload_adapters(tmp_path: Path, serve_repository: Any) -> None:
    from transformers import LlamaForCausalLM

    checkpoint = make_checkpoint("llama", tmp_path / "llama", max_position_embeddings=1024)
    root = tmp_path / "loras"
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    paths = {
        name: make_adapter(root / name, model, seed=seed) for seed, name in enumerate(("first", "second"))
    }
    enabled = {**OPTIONS, "enable_lora": True, "lora_root": str(root)}
    first = {"lora_modules": {"first": str(paths["first"])}}
    build_repository(
        checkpoint,
        tmp_path / "models",
        instance_count=2,
        placement="path",
        engine_options={**enabled, **first, **PACED},
    )
    modules = {"lora_modules": {name: str(path) for name, path in paths.items()}}
    llm = LLM(checkpoint, **{**enabled, **modules})
    outputs = llm.generate([PROMPT] * 3, max_tokens=LONG, adapters=[None, *paths], **GREEDY)
    expected = {name: output.token_ids for name, output in zip(["", *paths], outputs, strict=True)}
    assert len({tuple(ids[:12]) for ids in expected.values()}) == 3
    names = ("generator", "generator_unary", "chat")
    server = serve_repository(tmp_path / "models", *(f"--load-model={name}" for name in names), env=PACED_ENV)
    with Client(server.grpc_url) as client:

        def tokens(name: str, model: str = "generator") -> list[int]:
            found = client.generate(PROMPT, model=model, max_tokens=12, lora_name=name, **GREEDY)
            return list(found.token_ids)

        def answer() -> dict[str, Any] | None:
            try:
                return client.adapters()
            except Unavailable:  # of an engine that died just now; commands are not repeated
                return None

        def listed() -> list[str]:
            found = wait_until(answer, "the engine did not come back")
            return [one["name"] for one in found["adapters"]]  # type: ignore[index]

        assert listed() == ["first"]
        for model_name in names:
            for name in ("", "first"):
                assert tokens(name, model_name) == expected[name][:12], (model_name, name)
        with pytest.raises(InvalidArgument, match="lora_name"):
            tokens("second")
        with pytest.raises(InvalidArgument):
            client.load_adapter("outside", str(checkpoint))
        assert client.load_adapter("second", "second")["name"] == "second" and listed() == ["first", "second"]
        assert all(tokens("second") == expected["second"][:12] for _ in range(4)), "any instance knows it"

        (engine,) = server.running("quire.engine.loop")
        released = tmp_path / "released"
        asked = {**GREEDY, "lora_name": "second", "logits_processors": paced(released, 0.3)}
        with client.stream(PROMPT, model="generator", max_tokens=LONG, **asked) as stream:
            chunks = [next(stream)]
            with pytest.raises(Unavailable, match="in use by 1 request"):
                client.unload_adapter("second")
            engine.kill()
            released.touch()
            chunks += stream
        assert [token for chunk in chunks for token in chunk.token_ids] == expected["second"]
        assert listed() == ["first", "second"], "the next engine has them again"

        with gateway(GatewaySettings(server.grpc_url)) as base:
            models = {one["id"]: one for one in httpx.get(f"{base}/v1/models").json()["data"]}
            assert models["second"]["parent"] == "generator" and models["second"]["root"] == str(
                paths["second"]
            )
            asked = {"model": "second", "prompt": PROMPT, "max_tokens": 12, **GREEDY}
            told = httpx.post(f"{base}/v1/completions", json=asked, timeout=60).json()
            own = client.generate(PROMPT, model="generator", max_tokens=12, lora_name="second", **GREEDY)
            assert told["choices"][0]["text"] == own.text
            removed = httpx.post(
                f"{base}/v1/unload_lora_adapter", json={"lora_name": "second", "model": "generator"}
            )
            assert removed.status_code == 200, removed.text
        assert listed() == ["first"]
        with pytest.raises(InvalidArgument, match="lora_name"):
            tokens("second")
