"""Classifiers, rerankers and reward models on decoders: scores equal those of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.errors import CheckpointError, ConfigError, InvalidArgumentError
from quire.layers.hf_config import HFConfig
from quire.layers.pooling import Classifier, read_classifier
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_model
from tests.unit.test_embeddings import BEGINNING, PROMPTS, write_pooling
from tests.unit.test_oracle_matrix import engine


def make_classifier(family: str, path: Path, kind: str, num_labels: int) -> Any:
    """Writes a checkpoint whose layers are a decoder's, and returns its `transformers` model."""
    import transformers

    whole = make_checkpoint(family, path)
    config = transformers.AutoConfig.from_pretrained(whole, num_labels=num_labels, pad_token_id=None)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    model.model.load_state_dict(hf_model(whole).model.state_dict())
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    for file in path.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(path)
    return model.eval()


def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return found


@pytest.mark.row("A30", clauses=("scores",))
@pytest.mark.row("E11", clauses=("equal",))
@pytest.mark.parametrize(
    ("family", "kind", "num_labels"), [("llama", "Llama", 3), ("qwen2", "Qwen2", 1), ("qwen3", "Qwen3", 2)]
)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, kind: str, num_labels: int) -> None:
    """In chunks, with cached prefixes and in one step; probabilities, and logits as rewards."""
    model = make_classifier(family, tmp_path, kind, num_labels)
    for budget in (5, 4096):
        llm = engine(tmp_path, max_num_batched_tokens=budget)
        scores, raw = llm.classify(PROMPTS), llm.classify(PROMPTS, use_activation=False)
        for prompt, one, rewards in zip(PROMPTS, scores, raw, strict=True):
            expected = logits(model, prompt)
            torch.testing.assert_close(torch.tensor(rewards), expected, atol=1e-4, rtol=1e-5)
            probabilities = expected.sigmoid() if num_labels == 1 else expected.softmax(0)
            torch.testing.assert_close(torch.tensor(one), probabilities, atol=1e-5, rtol=1e-5)
        assert llm.core.stats().num_cached_tokens >= 2 * (len(BEGINNING) // 8) * 8
        for params, complaint in (
            (SamplingParams(), "return_scores: must be true: .* generates no tokens"),
            (SamplingParams(dimensions=4), "embedding: is not supported: the checkpoint is a classifier"),
        ):
            with pytest.raises(InvalidArgumentError, match=complaint):
                llm.generate([[5]], params)
        llm.core.close()


@pytest.mark.row("A30", clauses=("scores",))
def test_a_reranker_that_answers_yes_or_no(tmp_path: Path) -> None:
    """As Qwen3-Reranker's original form: the probability of one of two tokens, which still generates."""
    whole = make_checkpoint("qwen3", tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = "a", "e"
    model = hf_model(whole)
    llm = engine(tmp_path, classifier_from_token=f"{no},{yes}")
    scores, raw = llm.classify(PROMPTS), llm.classify(PROMPTS, use_activation=False)
    for prompt, one, rewards in zip(PROMPTS, scores, raw, strict=True):
        with torch.inference_mode():
            found = model(torch.tensor([prompt])).logits[0, -1, [vocabulary[no], vocabulary[yes]]]
        np.testing.assert_allclose(one, found.softmax(0)[1:], atol=1e-5)
        np.testing.assert_allclose(rewards, found[1:] - found[:1], atol=1e-4)
    assert llm.generate([[5]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finish_reason == "length"
    assert llm.embed([[5]]).shape == (1, 64)
    llm.core.close()
    for named in ("a", "a,e,i", "a,there is no such token"):
        with pytest.raises(ConfigError, match=r"classifier_from_token=.*must name two tokens"):
            engine(tmp_path, classifier_from_token=named)


def test_scores_of_a_model_without_any_are_refused(tmp_path: Path) -> None:
    llm = engine(make_checkpoint("llama", tmp_path / "model"))
    with pytest.raises(InvalidArgumentError, match="scores: are not supported: the checkpoint is no class"):
        llm.classify([[5]])
    llm.core.close()
    path = tmp_path / "classifier"
    make_classifier("llama", path, "Llama", 2)
    with pytest.raises(ConfigError, match="classifier_from_token: this checkpoint computes no logits"):
        engine(path, classifier_from_token="a,e")
    with pytest.raises(CheckpointError, match="TransformersModel computes no scores"):
        engine(path, model_impl="transformers")
    shutil.rmtree(path)
    write_pooling(tmp_path / "model", "mean_tokens")
    with pytest.raises(ConfigError, match="classifier_from_token: needs pooling of the last token, not mean"):
        engine(tmp_path / "model", classifier_from_token="a,e")


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, Classifier(("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, Classifier(("LABEL_0",), "sigmoid")),
        ({"id2label": {"0": "no", "1": "yes"}}, Classifier(("no", "yes"), "softmax")),
        ({"problem_type": "regression", "num_labels": 1}, Classifier(("LABEL_0",), "identity")),
        ({"problem_type": "multi_label_classification"}, Classifier(("LABEL_0", "LABEL_1"), "sigmoid")),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            Classifier(("LABEL_0", "LABEL_1"), "identity"),
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            Classifier(("LABEL_0", "LABEL_1"), "sigmoid"),
        ),
        ({"architectures": ["LlamaForCausalLM"], "id2label": {}}, None),
        ({"id2label": {"1": "yes"}}, "id2label must name label 0 to 0"),
        ({"id2label": {}}, "id2label must name 1 to"),
        ({"num_labels": 0}, "num_labels must be a positive"),
        ({"problem_type": "other"}, "problem_type must be one of"),
        ({"problem_type": []}, "problem_type must be one of"),
        ({"sbert_ce_default_activation_function": "os.system"}, "activation 'os.system' of scores"),
    ],
)
def test_what_a_classifier_states(tmp_path: Path, values: dict[str, Any], found: Any) -> None:
    hf = HFConfig(tmp_path / "config.json", {**CLASSIFIER, **values})
    if isinstance(found, str):
        with pytest.raises(CheckpointError, match=found):
            read_classifier(hf)
    else:
        assert read_classifier(hf) == found
