"""Embeddings: transformers' hidden states, pooled as the checkpoint says, whatever way a request takes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, InvalidArgumentError
from quire.layers.pooling import Pooling, read_pooling
from quire.worker.pooler import embedding_output
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import AHEAD, each_way, engine, starts_processes

FAMILIES = ("llama", "qwen3", "gemma3")
"""Two whose layers are one call; one with windows, computed operator by operator."""
KINDS = {"none": Pooling(), "mean": Pooling("mean"), "last": Pooling(normalizes=False)}
BEGINNING = random_prompts(1, longest=1, seed=7)[0] * 40
PROMPTS = [
    BEGINNING[:keep] + prompt for keep, prompt in zip([0, 40, 16, 33], random_prompts(4), strict=True)
] + [[9]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SIZE = 64


def write_pooling(checkpoint: Path, *modes: str, types: tuple[str, ...] = ("Transformer", "Pooling")) -> None:
    """The files of sentence-transformers."""
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": folders.get(kind, ""),
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(types)
    ]
    (checkpoint / "modules.json").write_text(json.dumps(modules), "utf-8")
    stated: dict[str, Any] = {"word_embedding_dimension": SIZE, "include_prompt": True}
    stated |= {f"pooling_mode_{mode}": mode in modes for mode in ("cls_token", "mean_tokens", "lasttoken")}
    (checkpoint / "1_Pooling").mkdir(exist_ok=True)
    (checkpoint / "1_Pooling" / "config.json").write_text(json.dumps(stated), "utf-8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for family in FAMILIES:
        for kind in KINDS:
            path = made[family, kind] = root / f"{family}-{kind}"
            if kind == "none":
                make_checkpoint(family, path)
                continue
            shutil.copytree(made[family, "none"], path)
            if kind == "mean":
                write_pooling(path, "mean_tokens", types=("Transformer", "Pooling", "Normalize"))
            else:
                write_pooling(path, "lasttoken")
    return made


@pytest.fixture(scope="module")
def models(checkpoints: dict[tuple[str, str], Path]) -> dict[str, Any]:
    return {family: hf_model(checkpoints[family, "none"]) for family in FAMILIES}


POOLED = [("llama", "none"), ("llama", "mean"), ("qwen3", "last"), ("gemma3", "mean")]


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with recorded_steps() if request.param == "recorded" else nullcontext():
        yield AHEAD[request.param]


def expected(model: Any, prompt: list[int], pooling: Pooling, dimensions: int = SIZE) -> torch.Tensor:
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = (states.mean(0) if pooling.mode == "mean" else states[-1])[:dimensions]
    return functional.normalize(vector, dim=0) if pooling.normalizes else vector


def check(model: Any, prompt: list[int], found: bytes, pooling: Pooling, dimensions: int = SIZE) -> None:
    vector = torch.from_numpy(np.frombuffer(found, np.float32).copy())
    torch.testing.assert_close(vector, expected(model, prompt, pooling, dimensions), atol=1e-5, rtol=1e-5)


@pytest.mark.row("A30", clauses=("pooling",))
@each_way("family,kind", POOLED, POOLED[-1:])
def test_equal_to_transformers_chunked_cached_and_beside_others(
    checkpoints: dict[tuple[str, str], Path],
    models: dict[str, Any],
    family: str,
    kind: str,
    ahead: dict[str, Any],
) -> None:
    """Requests that generate leave the prompts in the cache and find them there, and get the same tokens."""
    model, pooling = models[family], KINDS[kind]
    for budget in (5,) if starts_processes(ahead) else (5, 4096):
        llm = engine(checkpoints[family, kind], max_num_batched_tokens=budget, **ahead)
        alone = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        sizes = [SIZE, 16, SIZE, 3, SIZE]
        params = [GREEDY, *(SamplingParams(dimensions=size) for size in sizes)]
        outputs = llm.generate([PROMPTS[0], *PROMPTS, *PROMPTS], [*params, *([GREEDY] * len(PROMPTS))])
        for prompt, output, size in zip(PROMPTS, outputs[1:], sizes, strict=False):
            check(model, prompt, output.embedding, pooling, size)
            assert (output.finish_reason, output.token_ids, output.text) == ("stop", [], "")
            assert output.num_prompt_tokens == len(prompt)
            if pooling.mode == "mean":
                assert output.num_cached_tokens == 0, "the hidden states of all tokens had to be computed"
        if pooling.mode != "mean":
            assert any(output.num_cached_tokens for output in outputs[1 : 1 + len(PROMPTS)])
        generated = [outputs[0], *outputs[1 + len(PROMPTS) :]]
        assert [output.token_ids for output in generated] == [alone[0], *alone]
        stats = llm.core.stats()
        assert (stats.num_free_blocks, stats.num_running) == (stats.num_blocks, 0)
        llm.core.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kind", ["none", "mean"])
def test_equal_to_transformers_when_preempted(
    checkpoints: dict[tuple[str, str], Path], models: dict[str, Any], kind: str, mode: str
) -> None:
    """After any of its chunks, also with steps launched ahead. A mean begins anew, and is not moved out."""
    host = {} if mode == "recompute" else {"host_cache_memory": "64MiB", "preemption_mode": "swap"}
    for is_async in (False, True):
        options = {"max_num_batched_tokens": 8, "async_scheduling": is_async, **host}
        llm = engine(checkpoints["llama", kind], enable_prefix_caching=False, **options)
        prompt = PROMPTS[1]
        for num_steps in range(1, len(prompt) // 8 + 1):
            llm.core.add_request("r", prompt, SamplingParams(dimensions=SIZE))
            for _ in range(num_steps):
                assert llm.core.step() == []
            roster = llm.core.scheduler.roster
            request = roster.requests["r"]
            assert 0 < request.num_computed_tokens <= len(prompt)
            roster.preempt(request)
            assert (request.swapped is not None) == (mode == "swap" and kind != "mean")
            (end,) = run(llm)
            check(models["llama"], prompt, end.embedding, KINDS[kind])
            assert end.num_preemptions == 1
        assert llm.core.stats().num_free_blocks == llm.core.stats().num_blocks
        llm.core.close()


def test_alone_and_in_a_batch_bit_for_bit(checkpoints: dict[tuple[str, str], Path]) -> None:
    llm = engine(checkpoints["llama", "mean"], enable_prefix_caching=False, max_num_batched_tokens=4096)
    together = llm.embed(PROMPTS)
    assert together.shape == (len(PROMPTS), SIZE) and together.dtype == np.float32
    for prompt, vector in zip(PROMPTS, together, strict=True):
        assert np.array_equal(llm.embed([prompt])[0], vector)
    texts = llm.embed(["hello", "good day"], dimensions=8)
    assert texts.shape == (2, 8)
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1.0, atol=1e-6)
    assert np.array_equal(llm.embed("hello", 8)[0], texts[0])
    llm.core.close()


def test_what_cannot_be_is_refused_by_name(checkpoints: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    llm = engine(checkpoints["llama", "none"])
    for field, params in {
        "dimensions: at most 64": SamplingParams(dimensions=65),
        "n: must not": SamplingParams(dimensions=8, n=2),
        "best_of: must not": SamplingParams(dimensions=8, best_of=2),
        "beam_width: must not": SamplingParams(dimensions=8, beam_width=2),
        "logprobs: must not": SamplingParams(dimensions=8, logprobs=0),
        "prompt_logprobs: must not": SamplingParams(dimensions=8, prompt_logprobs=0),
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"^{field}"):
            llm.generate([[5]], params)
    llm.core.close()
    path = tmp_path / "several"
    shutil.copytree(checkpoints["llama", "none"], path)
    write_pooling(path, "cls_token", "mean_tokens")
    llm = engine(path)
    with pytest.raises(InvalidArgumentError, match=r"embedding: is not supported: .* pooling_mode_cls"):
        llm.embed([[5]])
    assert llm.generate([[5]], GREEDY)[0].finish_reason == "length"
    llm.core.close()


def test_a_vector_that_is_not_finite_fails_its_request_alone(
    checkpoints: dict[tuple[str, str], Path], models: dict[str, Any]
) -> None:
    assert "not finite" in embedding_output(torch.tensor([1.0, float("nan")])).error
    llm = engine(checkpoints["llama", "none"], enable_prefix_caching=False)
    model: Any = runner_of(llm.core).model
    forward = model.forward
    model.forward = lambda inputs: torch.where(inputs.input_ids[:, None] == 7, float("nan"), forward(inputs))
    llm.core.add_request("bad", [5, 7], SamplingParams(dimensions=SIZE))
    llm.core.add_request("good", PROMPTS[1], SamplingParams(dimensions=SIZE))
    ends = {output.request_id: output for output in run(llm)}
    assert "not finite" in str(ends["bad"].error)
    check(models["llama"], PROMPTS[1], ends["good"].embedding, Pooling())
    llm.core.close()


def run(llm: LLM) -> list[Any]:
    outputs = []
    while llm.core.has_work:
        outputs += llm.core.step()
    return outputs


def test_cancelled_between_two_chunks(
    checkpoints: dict[tuple[str, str], Path], models: dict[str, Any]
) -> None:
    for kind in ("none", "mean"):
        llm = engine(checkpoints["llama", kind], max_num_batched_tokens=4)
        for request_id in ("gone", "kept"):
            llm.core.add_request(request_id, PROMPTS[1], SamplingParams(dimensions=SIZE))
        assert llm.core.step() == []
        (end,) = llm.core.abort(["gone"])
        assert (end.finish_reason, end.embedding) == ("cancelled", b"")
        (kept,) = run(llm)
        check(models["llama"], PROMPTS[1], kept.embedding, KINDS[kind])
        assert llm.core.stats().num_free_blocks == llm.core.stats().num_blocks
        llm.core.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_saved_without_its_head(tmp_path: Path, tied: bool) -> None:
    """As those of embeddings are: the class is `Qwen3Model`, names have no `model.` before them."""
    whole = make_checkpoint("qwen3", tmp_path / "whole", tied=tied)
    model = hf_model(whole)
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    model.model.save_pretrained(bare)
    assert json.loads((bare / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    llm = engine(bare)
    for prompt, vector in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        check(model, prompt, vector.tobytes(), Pooling())
    llm.core.close()


@pytest.mark.parametrize(
    ("modes", "types", "found"),
    [
        (("mean_tokens",), ("Transformer", "Pooling"), Pooling("mean", False)),
        (("lasttoken",), ("Transformer", "Pooling", "Normalize"), Pooling("last", True)),
        (("cls_token",), ("Transformer", "Pooling"), Pooling("cls", False)),
        (("mean_tokens", "lasttoken"), ("Transformer", "Pooling"), "pools by pooling_mode_mean_tokens, poo"),
        ((), ("Transformer", "Pooling"), "pools by nothing"),
        (("lasttoken",), ("Transformer", "Pooling", "Dense"), "has a module Dense"),
    ],
)
def test_how_a_checkpoint_pools(
    modes: tuple[str, ...], types: tuple[str, ...], found: Any, tmp_path: Path
) -> None:
    assert read_pooling(tmp_path) == Pooling("last", True)
    write_pooling(tmp_path, *modes, types=types)
    pooling = read_pooling(tmp_path)
    assert found in pooling.why_not if isinstance(found, str) else pooling == found


def test_broken_files_of_pooling_are_named(tmp_path: Path) -> None:
    for text, reason in (
        ("{}", "hold a JSON list"),
        ("[1]", "list of objects"),
        ("[", "cannot be read"),
    ):
        (tmp_path / "modules.json").write_text(text, "utf-8")
        with pytest.raises(CheckpointError, match=rf"modules\.json: .*{reason}"):
            read_pooling(tmp_path)
    write_pooling(tmp_path, "lasttoken")
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json"):
        read_pooling(tmp_path)
    os.mkfifo(tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(CheckpointError, match=r"'config\.json' is neither a file nor a directory"):
        read_pooling(tmp_path)
    for name in ("../elsewhere", "..", "/etc", "x\n" * 1000, None, 3):
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": name}]), "utf-8")
        with pytest.raises(CheckpointError, match="is not the name of a folder beside it") as refused:
            read_pooling(tmp_path)
        assert str(refused.value).isprintable() and len(str(refused.value)) < 500
