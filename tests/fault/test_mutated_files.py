"""Files of checkpoints with one key changed give transformers' tokens, or are refused by name."""

from __future__ import annotations

import collections
import json

import pytest

from tests.fault.mutated_files import Change, Files, outcome, quiet

SEED = 20261128


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    quiet()
    return Files(tmp_path_factory.mktemp("checkpoints"))


def check(files: Files, first: int, count: int) -> collections.Counter[str]:
    seen: collections.Counter[str] = collections.Counter()
    faults = []
    for number in range(first, first + count):
        change = files.change(SEED, number)
        kind, reason = outcome(files, change)
        seen[kind] += 1
        is_named = kind not in ("refused", "strict") or any(word in reason for word in names(change))
        if kind in ("differs", "broken") or not is_named:
            faults.append(f"{number}: {change}: {kind}: {reason}")
    assert not faults, "\n".join(faults)
    return seen


def names(change: Change) -> tuple[str, ...]:
    """What the message of a refusal may name: the file that was changed, or the weights that do not fit."""
    return (
        change.file.replace("header", "model.gguf"),
        "model.safetensors",
        "max_model_len",
        "max_tokens",
        "min_tokens",
        change.key[-1],
    )


def test_sixty_changed_files(files: Files) -> None:
    seen = check(files, 0, 60)
    assert seen["equal"] >= 20 and seen["refused"] + seen["strict"] >= 10


@pytest.mark.parametrize(
    "change",
    [
        Change("gpt_oss", "config.json", ("rope_parameters",), "value", {}),
        Change("llama", "header", ("llama.rope.scaling.factor",), "value", 0.0),
    ],
    ids=str,
)
def test_what_gave_other_tokens(change: Change, files: Files) -> None:
    assert outcome(files, change) == ("equal", "")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_thousand_changed_files(files: Files) -> None:
    seen = check(files, 0, 5000)
    print(json.dumps(seen))
    assert sum(seen.values()) == 5000 and seen["equal"] > 2000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            Change("llama", "header", ("tokenizer.ggml.eot_token_id",), "type", "array"),
            "tokenizer.ggml.eot_token_id must be a whole number, got [4]",
        ),
        (
            Change("qwen3", "header", ("qwen3.rope.scaling.factor",), "value", 1e-30),
            "rope parameter factor must be a positive number, got 1.0",
        ),
        (
            Change("gemma2", "config.json", ("attn_logit_softcapping",), "value", 1e6),
            "attention_softcap of 1000000.0 is more than 10000",
        ),
    ],
)
def test_what_the_fuzzer_found(change: Change, message: str, files: Files) -> None:
    kind, reason = outcome(files, change)
    assert kind in ("strict", "refused") and message in reason
