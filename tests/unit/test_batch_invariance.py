"""Logits on the CPU do not depend, in any bit, on other rows, nor on how a prompt was computed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.models.decoder import DecoderModel
from quire.worker import model_runner
from quire.worker.sampler import draw
from quire_kernels import registry
from quire_kernels.cpu.compiler import supported_isas
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import engine

BEGINNING = random_prompts(1, longest=1, seed=5)[0] * 24
PROMPTS = [(BEGINNING if i % 2 else []) + prompt for i, prompt in enumerate(random_prompts(16, seed=11))]
LONG_PROMPTS = [*PROMPTS[:14], *([BEGINNING * 11 + prompt for prompt in PROMPTS[14:]])]
"""Two of them longer than what attention adds up before it corrects sums (256 positions)."""
NUM_TOKENS = 6
PLAIN = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
ISAS = supported_isas()
PATHS = [(name, isa, "one call") for name in PLAIN for isa in ISAS]
PATHS += [(name, isa, "operators") for name in PLAIN for isa in ISAS[:1]]

CUT = ("fp32", "bf16", "int8 cache")
"""What attention's arithmetic depends on; the rest concerns linear layers."""
BEST = (ISAS[0], "one call")

Logits = dict[tuple[int, ...], torch.Tensor]
"""Of the token behind each sequence that one was drawn for."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in ("qwen3", "gemma3", "deepseek_v3")}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Logits]:
    """Generates greedily; returns all logits that tokens were drawn from."""

    def run(path: Path, batches: list[list[list[int]]], **options: Any) -> Logits:
        found: Logits = {}

        def recorded(logits: torch.Tensor, rows: Any, newest: Any = None) -> Any:
            for row, values in zip(rows, logits, strict=True):
                values, key = values.clone(), tuple(row.token_ids)
                assert torch.equal(found.setdefault(key, values), values), "computed twice, differently"
            return draw(logits, rows, newest)

        monkeypatch.setattr(model_runner, "draw", recorded)
        llm = engine(path, num_threads=2, **options)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)  # whole logits
        for batch in batches:
            llm.generate(batch, params)
        assert runner_of(llm.core).model.is_fused == (DecoderModel._fuse is not _unfused)
        llm.core.close()
        return found

    return run


def _unfused(model: DecoderModel) -> None:
    """Has the model compute its layers operator by operator."""


def check_equal(found: Logits, expected: Logits, num_prompts: int) -> None:
    assert found.keys() <= expected.keys() and len(found) == num_prompts * NUM_TOKENS, "other tokens"
    for key, values in found.items():
        assert torch.equal(values, expected[key]), f"behind {len(key)} tokens"


def check_cuts(path: Path, record: Callable[..., Logits], **options: Any) -> None:
    """Chunks of prompts, alone and beside other rows, and cached prefixes."""
    options |= {"max_model_len": 400}
    whole = record(
        path,
        [[prompt] for prompt in LONG_PROMPTS],
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        **options,
    )
    for chunk, size in ((1, 1), (3, 1), (5, 7), (16, 1), (64, 16)):
        # One after the other they take longest, and some show what all would.
        prompts = LONG_PROMPTS[::3] if size == 1 else LONG_PROMPTS
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        limits = {"max_num_batched_tokens": 4096, "max_prefill_tokens_per_request": chunk}
        found = record(path, batches, enable_prefix_caching=False, **limits, **options)
        check_equal(found, whole, len(prompts))
    # Each prompt twice: the second finds all blocks but the last, the others those of what they begin with.
    repeated = [[prompt] for prompt in LONG_PROMPTS for _ in range(2)]
    found = record(path, repeated, max_num_batched_tokens=4096, enable_prefix_caching=True, **options)
    check_equal(found, whole, len(LONG_PROMPTS))


def check_batches(path: Path, record: Callable[..., Logits], **options: Any) -> None:
    """Prompts whole in one step, and none of them cached."""
    options |= {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}
    alone = record(path, [[prompt] for prompt in PROMPTS], **options)
    assert len(alone) == len(PROMPTS) * NUM_TOKENS
    for size in (7, 16):
        batches = [PROMPTS[start : start + size] for start in range(0, 16, size)]
        check_equal(record(path, batches, **options), alone, len(PROMPTS))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], AbstractContextManager[object]]:
    """Has models compute with an instruction set, "one call" or "operators" at a time."""

    def choose(isa: str, how: str) -> AbstractContextManager[object]:
        if how == "operators":
            monkeypatch.setattr(DecoderModel, "_fuse", _unfused)
        named = [
            operator
            for operator in registry.operators()
            if any(one.name == isa for one in registry.implementations(operator))
        ]
        return registry.forced(dict.fromkeys(named, isa)) if isa != ISAS[0] else nullcontext()

    return choose


@pytest.mark.row("A12", clauses=("batch", "default"))
@pytest.mark.parametrize(("name", "isa", "how"), PATHS)
def test_logits_are_equal_bit_for_bit(
    checkpoints: dict[str, Path],
    record: Callable[..., Logits],
    on: Callable[[str, str], AbstractContextManager[object]],
    name: str,
    isa: str,
    how: str,
) -> None:
    """On each instruction set here; there is no mode to ask for."""
    with on(isa, how):
        check_batches(checkpoints["qwen3"], record, **PLAIN[name])


@pytest.mark.row("A12", clauses=("chunks", "prefix", "default"))
@pytest.mark.parametrize(
    ("name", "isa", "how"), [path for path in PATHS if path[0] in CUT or path[1:] == BEST]
)
def test_logits_do_not_depend_on_how_a_prompt_is_computed(
    checkpoints: dict[str, Path],
    record: Callable[..., Logits],
    on: Callable[[str, str], AbstractContextManager[object]],
    name: str,
    isa: str,
    how: str,
) -> None:
    """Neither on its chunks nor on what of it was cached."""
    with on(isa, how):
        check_cuts(checkpoints["qwen3"], record, **PLAIN[name])


@pytest.mark.row("A12")
@pytest.mark.parametrize("check", [check_batches, check_cuts])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_model_with_windows_are_equal_bit_for_bit(
    checkpoints: dict[str, Path], record: Callable[..., Logits], check: Callable[..., None], dtype: str
) -> None:
    check(checkpoints["gemma3"], record, dtype=dtype)


@pytest.mark.row("A12")
@pytest.mark.parametrize("check", [check_batches, check_cuts])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_a_model_with_latent_attention_are_equal_bit_for_bit(
    checkpoints: dict[str, Path],
    record: Callable[..., Logits],
    on: Callable[[str, str], AbstractContextManager[object]],
    check: Callable[..., None],
    dtype: str,
) -> None:
    with on(ISAS[0], "operators"):
        check(checkpoints["deepseek_v3"], record, dtype=dtype)
