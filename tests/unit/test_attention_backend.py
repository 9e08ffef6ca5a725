"""`attention_backend`: what is asked for computes, or the start fails and says why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire_kernels.ops  # noqa: F401  (registers the implementations)
from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.models.decoder import DecoderModel
from quire_kernels import registry
from tests.fixtures.checkpoints import make_checkpoint

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the implementations of attention that compute."""
    names: set[str] = set()

    def noted(one: registry.Implementation) -> registry.Implementation:
        def function(*args: Any) -> Any:
            names.add(one.name)
            return one.function(*args)

        return dataclasses.replace(one, function=function)

    found = registry._implementations["paged_attention"]
    replaced = {name: noted(one) for name, one in found.items()}
    monkeypatch.setitem(registry._implementations, "paged_attention", replaced)
    registry._picked.clear()
    yield names
    registry._picked.clear()


def usable() -> list[str]:
    return [
        one.name
        for one in registry.implementations("paged_attention")
        if one.name not in ("cuda", "flashinfer", "triton")
    ]


@pytest.mark.row("D24", clauses=("select",))
@pytest.mark.parametrize("name", usable())
def test_each_gives_the_same_tokens(checkpoint: Path, name: str) -> None:
    prompts = [[5, 6, 7, 8] * 5, [9, 10]]
    expected = LLM(checkpoint, dtype="float32").generate(prompts, GREEDY)
    llm = LLM(checkpoint, dtype="float32", attention_backend=name)
    found = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


@pytest.mark.row("D24", clauses=("refusal",))
def test_what_cannot_be_is_refused_at_start_with_the_reason(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend=cuda .*only on cuda.*head_dim .*reference: can"
    ):
        LLM(checkpoint, attention_backend="cuda", device="cpu")
    with pytest.raises(ConfigError, match="there is none of this name"):
        LLM(checkpoint, attention_backend="flash")
    cpu = next(name for name in usable() if name != "reference")
    with pytest.raises(
        ConfigError, match=rf"attention_backend={cpu} .*only for bfloat16, float32.*float16 on cpu"
    ):
        LLM(checkpoint, attention_backend=cpu, dtype="float16")


def test_a_backend_must_serve_the_heads_of_all_layers(tmp_path: Path) -> None:
    """Where layers differ in them, each step failed."""
    path = make_checkpoint("gemma4", tmp_path, tokenizer=False, head_dim=16, global_head_dim=40)
    cpu = next(name for name in usable() if name != "reference")
    with pytest.raises(ConfigError, match=rf"attention_backend={cpu} cannot serve .*head_dim 40"):
        LLM(path, attention_backend=cpu, dtype="float32")


@pytest.mark.parametrize("is_fused", [False, True])
def test_each_engine_of_a_process_keeps_its_own(
    checkpoint: Path, called: set[str], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice was one for the process: whatever engine was made last decided for those before it."""
    if not is_fused:
        monkeypatch.setattr(DecoderModel, "_fuse", lambda self: None)
    best = usable()[0]
    llms = {
        name: LLM(checkpoint, dtype="float32", attention_backend=name) for name in ("reference", "auto", best)
    }
    for _ in range(2):
        for name, llm in llms.items():
            called.clear()
            llm.generate([[5, 6, 7, 8]], GREEDY)
            # Where all layers are one call, it is that of the best one, and no operators.
            expected = set() if is_fused else {best}
            assert called == ({"reference"} if name == "reference" else expected)
