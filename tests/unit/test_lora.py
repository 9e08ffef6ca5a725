"""LoRA adapters in the engine: tokens are those of merged weights in transformers, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from tests.fixtures.adapters import ATTENTION, make_adapter, merge
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_greedy, hf_logits, hf_model

MAX_TOKENS = 12
NAMES = ("", "a", "b", "c")
PROMPTS = {
    name: torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in zip(NAMES, (21, 30, 9, 40), strict=True)
}
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 16, "num_blocks": 256, "block_size": 8}


class Adapted(NamedTuple):
    """A checkpoint, adapters of it, and what is right with each ("": without one)."""

    path: Path
    modules: dict[str, str]
    models: dict[str, Any]
    expected: dict[str, list[int]]


def make_adapted(family: str, path: Path) -> Adapted:
    checkpoint = make_checkpoint(family, path / "model", tokenizer=False)
    base = hf_model(checkpoint)
    kinds: dict[str, dict[str, Any]] = {
        "a": {"rank": 4},
        "b": {"rank": 8, "targets": ATTENTION, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
        "c": {
            "rank": 16, "targets": ("q_proj", "gate_proj", "down_proj"), "layers_to_transform": [1],
            "alpha_pattern": {"gate_proj": 5},
        },
    }  # fmt: skip
    modules = {
        name: str(make_adapter(path / name, base, seed=number, **kind))
        for number, (name, kind) in enumerate(kinds.items())
    }
    models = {"": base} | {name: merge(hf_model(checkpoint), path / name) for name in kinds}
    expected = {name: hf_greedy(models[name], PROMPTS[name], MAX_TOKENS) for name in NAMES}
    bare = {name: hf_greedy(base, PROMPTS[name], MAX_TOKENS) for name in NAMES}
    assert all(bare[name] != expected[name] for name in kinds), (
        "an adapter that changes nothing proves nothing"
    )
    return Adapted(checkpoint, modules, models, expected)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("llama", tmp_path_factory.mktemp("lora"))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | values)


def start(adapted: Adapted, **options: Any) -> LLM:
    return LLM(adapted.path, **{**SETTINGS, "lora_modules": adapted.modules, **options})


def run(llm: LLM, names: list[str], **values: Any) -> list[RequestOutput]:
    return llm.generate([PROMPTS[name] for name in names], params(**values), adapters=list(names))


@pytest.mark.row("E19")
def test_a_batch_of_three_adapters_and_the_base(adapted: Adapted) -> None:
    llm = start(adapted)
    outputs = run(llm, list(NAMES), logprobs=0, prompt_logprobs=0)
    for name, output in zip(NAMES, outputs, strict=True):
        assert output.token_ids == adapted.expected[name], name
        tokens = PROMPTS[name] + output.token_ids
        right = hf_logits(adapted.models[name], tokens).log_softmax(-1)
        found = [*output.prompt_logprobs[1:], *output.logprobs]  # type: ignore[index, misc]
        ours = torch.tensor([one.logprobs[0] for one in found])
        theirs = right[range(len(tokens) - 1), tokens[1:]]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.row("E19")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"async_scheduling": True, "max_num_batched_tokens": 24},
        {"num_blocks": 12, "enable_prefix_caching": False},
        {"num_blocks": 14, "preemption_mode": "swap", "host_cache_memory": "8MiB", "async_scheduling": True},
        {"worker_process": True},
        {"max_loras": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_however_it_is_computed(llama: Adapted, options: dict[str, Any]) -> None:
    llm = start(llama, **options)
    try:
        names = [*NAMES, "b", "", "a"]
        for _ in range(2):
            outputs = run(llm, names)
            assert [one.token_ids for one in outputs] == [llama.expected[name] for name in names]
        stats = llm.core.stats()
        if "num_blocks" in options:
            assert stats.num_preemptions
        if options.get("enable_prefix_caching", True) and "num_blocks" not in options:
            assert outputs[0].num_cached_tokens and outputs[1].num_cached_tokens
    finally:
        llm.core.close()
