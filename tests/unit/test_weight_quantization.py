"""Weights, and with w8a8 activations, of eight and four bits: what they do to a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.config import EngineConfig, choices
from quire.errors import ConfigError
from quire.worker.model_runner import ModelRunner
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.perplexity import DEMO, demo_answers, logits_of, own_texts, perplexity_of
from tests.fixtures.runner_of import runner_of

LIMITS = {
    ("demo", "int8"): (0.001, 0.03),
    ("demo", "w8a8"): (0.001, 0.05),
    ("demo", "int4"): (0.001, 0.2),
    ("demo", "w4a8"): (0.001, 0.2),
    ("demo", "fp8"): (0.001, 0.06),
    ("random", "int8"): (0.02, 0.07),
    ("random", "w8a8"): (0.03, 0.1),
}
"""Change of perplexity, and distance of logits relative to their spread, by what it is of. Random models are
made so that every early difference counts: in four bits, or with the three of e4m3's mantissa, they are no
longer the same models."""


@pytest.mark.row("D18", whole=True)
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("demo", name) for name in choices("quantization") if name != "dequantized"]
    + [(family, quantization) for family in ("llama", "qwen3") for quantization in ("int8", "w8a8")],
)
def test_accuracy(kind: str, quantization: str, tmp_path: Path) -> None:
    """The trained demo on its held-out answers, random models on texts of their own."""
    path = DEMO
    if kind == "demo":
        texts = demo_answers(24)
    else:
        path = make_checkpoint(kind, tmp_path, tokenizer=False)
        texts = own_texts(path)
    exact = logits_of(path, texts, dtype="float32")
    found = logits_of(path, texts, dtype="float32", quantization=quantization)
    change = perplexity_of(found, texts) / perplexity_of(exact, texts) - 1
    before, after = torch.cat(exact), torch.cat(found)
    distance = float((after - before).square().mean().sqrt() / before.std())
    agree = float((before.argmax(1) == after.argmax(1)).float().mean())
    print(f"\n{kind}, {quantization}: {change:+.3%} logits {distance:.4f} same best token {agree:.2%}")
    most_change, most_distance = LIMITS["demo" if kind == "demo" else "random", quantization]
    assert abs(change) < most_change and 0 < distance < most_distance


def test_answers_in_four_and_eight_bits() -> None:
    """Those that the demo was to learn, greedily, of one call for all layers."""
    texts = demo_answers(8)
    llm = LLM(DEMO, quantization="w4a8", dtype="bfloat16", max_model_len=1024, num_blocks=512)
    assert runner_of(llm.core).model.is_fused
    outputs = llm.generate([ids[:given] for ids, given in texts], temperature=0.0, max_tokens=200)
    found = [list(out.token_ids) for out in outputs]
    llm.core.close()
    assert [ids[given:] for ids, given in texts] == found


@pytest.mark.parametrize("quantization", ["int4", "w8a8", "w4a8"])
@pytest.mark.parametrize(
    ("family", "key", "value", "name"),
    [
        ("llama", "intermediate_size", 144, "intermediate_size=144"),
        ("qwen3_5", "linear_value_head_dim", 12, "inputs of out_proj=48"),
        ("gemma4", "global_head_dim", 20, "inputs of o_proj without a window=80"),
        ("gemma4", "hidden_size_per_layer_input", 48, "hidden_size_per_layer_input=48"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    quantization: str, family: str, key: str, value: int, name: str, tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False, **{key: value})
    config = EngineConfig.from_mapping({"model": str(path), "quantization": quantization})
    with pytest.raises(ConfigError, match=f"quantization={quantization} .* {name} .* use int8"):
        ModelRunner(config)
