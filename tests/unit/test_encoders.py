"""Encoders: embeddings and scores equal those of transformers, alone and in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, ConfigError, InvalidArgumentError
from quire.request.sampling_params import PoolingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.encoders import SIZE, make_encoder
from tests.unit.test_embeddings import write_pooling
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import engine

PROMPTS = [[1, *(max(5, token) for token in prompt), 2] for prompt in random_prompts(6, longest=60, seed=3)]
PROMPTS += [[7], [1] * 128]
PAIRS = [("a red fox", "the quick brown fox"), ("x", "y " * 40), ("", "only a second one")]


def states(model: Any, prompt: list[int], types: list[int] | None = None) -> torch.Tensor:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        hidden: torch.Tensor = model(torch.tensor([prompt]), **given).last_hidden_state[0]
    return hidden


def close(found: Any, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(found)), expected, atol=atol, rtol=1e-5)


@pytest.mark.row("A30", clauses=("pooling",))
@pytest.mark.row("E11", clauses=("equal",))
@pytest.mark.parametrize("mode", ["cls", "mean"])
@pytest.mark.parametrize("kind", ["Bert", "XLMRoberta", "ModernBert"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, kind: str, mode: str) -> None:
    """Of the first token, as without a word of sentence-transformers, or of the mean of all."""
    model = make_encoder(kind, tmp_path)
    if mode == "mean":
        write_pooling(tmp_path, "mean_tokens", types=("Transformer", "Pooling", "Normalize"))
    llm = engine(tmp_path, max_num_batched_tokens=256)
    found = llm.embed(PROMPTS)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        hidden = states(model, prompt)
        pooled = hidden.mean(0) if mode == "mean" else hidden[0]
        close(vector, functional.normalize(pooled, dim=0))
        assert np.array_equal(llm.embed([prompt])[0], vector), "a row does not depend on the others"
    stats = llm.core.stats()
    assert (stats.num_free_blocks, stats.num_cached_blocks) == (stats.num_blocks, 0)
    llm.core.close()


@pytest.mark.row("E11", clauses=("equal",))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bert", {"num_labels": 3}),
        ("XLMRoberta", {"num_labels": 1}),
        ("ModernBert", {"num_labels": 2, "classifier_pooling": "mean"}),
        ("ModernBert", {"num_labels": 2, "norm_bias": True, "classifier_bias": True, "mlp_bias": True}),
    ],
)
def test_scores_of_pairs_are_those_of_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    model = make_encoder(kind, tmp_path, head="ForSequenceClassification", **options)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    llm = engine(tmp_path, max_num_batched_tokens=256)
    firsts, seconds = zip(*PAIRS, strict=True)
    found = llm.classify(firsts, seconds)
    logits = llm.classify(firsts, seconds, use_activation=False)
    for pair, scores, raw in zip(PAIRS, found, logits, strict=True):
        given = tokenizer(*pair, return_tensors="pt", return_token_type_ids=True)
        types = {"token_type_ids": given["token_type_ids"]} if kind == "Bert" else {}
        if kind == "Bert":
            assert given["token_type_ids"].any()
        with torch.inference_mode():
            expected = model(given["input_ids"], **types).logits[0]
        close(raw, expected)
        close(scores, expected.sigmoid() if len(expected) == 1 else expected.softmax(0))
    llm.core.close()


def test_what_an_encoder_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    make_encoder("Bert", tmp_path)
    llm = engine(tmp_path, max_num_batched_tokens=128)
    classify = SamplingParams(dimensions=2, pooling=PoolingParams(task="classify"))
    for prompt, params, complaint in (
        ([5], SamplingParams(), r"return_embedding: must be true: .* generates no tokens"),
        ([5], classify, "scores: are not supported"),
        ([5] * 129, SamplingParams(dimensions=SIZE), r"prompt: 129 tokens, at most 128 \(max_model_len\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=complaint):
            llm.generate([prompt], params)
    llm.core.close()
    with pytest.raises(ConfigError, match=r"max_model_len=128: .* one step, .* 64 tokens \(max_num_batched"):
        engine(tmp_path, max_num_batched_tokens=64)
    llm = engine(tmp_path, max_num_batched_tokens=64, max_model_len=None)
    assert llm.core.info.max_model_len == 64, "what a step can compute"
    llm.core.close()
    with pytest.raises(ConfigError, match="kv_cache_dtype=int8: an encoder keeps no keys"):
        engine(tmp_path, max_num_batched_tokens=128, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="enable_lora: adapters of encoders are not supported"):
        engine(tmp_path, max_num_batched_tokens=128, enable_lora=True)
    write_pooling(tmp_path, "mean_tokens", "cls_token")
    with pytest.raises(CheckpointError, match="embeddings are not supported: the checkpoint pools by"):
        engine(tmp_path, max_num_batched_tokens=128)


def test_older_names_of_tensors(tmp_path: Path) -> None:
    """LayerNorm's gamma and beta, a prefix, and heads that are not used."""
    from safetensors.torch import load_file, save_file

    model = make_encoder("Bert", tmp_path)
    file = tmp_path / "model.safetensors"
    renamed = {"cls.predictions.bias": torch.zeros(3)}
    for name, value in load_file(file).items():
        older = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        renamed[f"bert.{older}"] = value
    save_file(renamed, file, {"format": "pt"})
    llm = engine(tmp_path, max_num_batched_tokens=128)
    close(llm.embed([PROMPTS[0]])[0], functional.normalize(states(model, PROMPTS[0])[0], dim=0))
    llm.core.close()


def test_a_prompt_waits_for_a_step_that_it_fits_into(tmp_path: Path) -> None:
    """Prompts are never computed in parts, and those behind do not pass one that waits."""
    model = make_encoder("Bert", tmp_path)
    llm = engine(tmp_path, max_model_len=48, max_num_batched_tokens=48)
    lengths = (30, 30, 10, 48, 1)
    for number, length in enumerate(lengths):
        llm.core.add_request(f"r{number}", [1] * length, SamplingParams(dimensions=SIZE))
    steps = []
    while llm.core.has_work:
        outputs = llm.core.step()
        steps.append([output.request_id for output in outputs])
        for output in outputs:
            vector = np.frombuffer(output.embedding, np.float32)
            prompt = [1] * lengths[int(output.request_id[1:])]
            close(vector, functional.normalize(states(model, prompt)[0], dim=0))
    assert steps == [["r0"], ["r1", "r2"], ["r3"], ["r4"]]
    llm.core.close()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "is_decoder true"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
)
def test_encoders_that_are_not_served_are_refused(
    tmp_path: Path, values: dict[str, Any], complaint: str
) -> None:
    make_encoder("Bert", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}), "utf-8")
    with pytest.raises(CheckpointError, match=complaint):
        engine(tmp_path, max_num_batched_tokens=128)


def test_quantised_weights(tmp_path: Path) -> None:
    model = make_encoder("Bert", tmp_path)
    llm = engine(tmp_path, max_num_batched_tokens=256, quantization="int8")
    for prompt, vector in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        close(vector, functional.normalize(states(model, prompt)[0], dim=0), atol=0.05)
    llm.core.close()


def test_health_checks_and_warm_up(tmp_path: Path) -> None:
    """Requests of the engine's own are pooled where no token can be generated."""
    make_encoder("Bert", tmp_path, head="ForSequenceClassification", num_labels=3)
    llm: LLM = engine(tmp_path, max_num_batched_tokens=128)
    llm.core.warm_up()
    params = llm.core.internal_params(SamplingParams())
    assert (params.dimensions, params.pooling.task) == (3, "classify")
    llm.core.close()


def test_urgent_prompts_that_preempt_are_whole_too(tmp_path: Path) -> None:
    """They get their seats before the step has room for them: one waits for the next step."""
    model = make_encoder("Bert", tmp_path)
    options = {"max_num_seqs": 2, "async_scheduling": True, "queue_policy": "priority"}
    llm = engine(tmp_path, max_model_len=48, max_num_batched_tokens=48, **options)

    def add(request_id: str, length: int, priority: int) -> None:
        scheduling = SchedulingParams(priority=priority)
        llm.core.add_request(request_id, [7] * length, SamplingParams(dimensions=SIZE), scheduling=scheduling)

    for number in range(2):
        add(f"10 usual {number}", 10, 0)
    assert llm.core.step() == []
    for number in range(2):
        add(f"30 urgent {number}", 30, -10)
    ends = []
    while llm.core.has_work:
        ends += llm.core.step()
    assert len(ends) == 4 and max(end.num_preemptions for end in ends) == 1
    for end in ends:
        hidden = states(model, [7] * int(end.request_id.split()[0]))
        close(np.frombuffer(end.embedding, np.float32), functional.normalize(hidden[0], dim=0))
    llm.core.close()
