"""Ranks take their parts of every format of weights, and compute with them what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import ModelConfig
from quire.errors import ConfigError, QuireError
from quire.loader.load import load_model
from quire.outputs import RequestOutput, TokenLogprobs
from quire.request.sampling_params import parse_sampling_params
from quire_kernels.ranks import ALONE, Ranks
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.ranks import at_once, thread_ranks

IDS = torch.randint(5, 509, (40,), generator=torch.Generator().manual_seed(0)).tolist()
REFUSED = {
    "AWQ gemv": "ranks do not divide AWQ weights of version gemv",
    "GPTQ act-order": "g_idx does not divide the inputs",
    "GPTQ 3 bits": "g_idx does not divide the inputs",
    "W4A16 act-order": "g_idx does not divide the inputs",
    "FP8 blocks": "for 2 ranks,",
    "NF4": "for 2 ranks,",
    "NF4 nested": "for 2 ranks,",
}
"""What is quantised across the border of two ranks' parts, by a part of the complaint."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), **shape)


def logits(path: Path, ranks: Ranks = ALONE, **options: Any) -> torch.Tensor:
    config = ModelConfig(model=str(path), dtype="float32", packed_weights_size=0, **options)
    return Driver(load_model(config, torch.device("cpu"), ranks=ranks).model).logits(IDS)


def difference(path: Path, **options: Any) -> float:
    """Largest difference of two ranks' logits from those of one process, which are about 13 at most."""
    ranks = thread_ranks(2)
    found = at_once([lambda rank=rank: logits(path, rank, **options) for rank in ranks], ranks)  # type: ignore[misc]
    assert torch.equal(*found)
    return float((found[0] - logits(path, **options)).abs().max())


def check(path: Path) -> None:
    """As numbers the parts are exactly those of the whole. As they are kept, inputs may be rounded to eight
    bits, and another order of sums rounds some otherwise; what is taken for something else differs by 10."""
    assert difference(path, quantization="dequantized") < 1e-4
    assert difference(path) < 1.0


@pytest.mark.row("F1")
@pytest.mark.parametrize("name", MAKERS)
def test_checkpoints_quantised_by_others(plain: Path, tmp_path: Path, name: str) -> None:
    path, _ = make_foreign(plain, tmp_path / "quantised", MAKERS[name])
    if name not in REFUSED:
        check(path)
        return
    with pytest.raises(QuireError, match=REFUSED[name]):
        logits(path, Ranks(1, 2))


@pytest.mark.row("F1")
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K"])
def test_files_of_blocks(plain: Path, tmp_path: Path, kind: str) -> None:
    check(write_gguf(plain, tmp_path / "model.gguf", kind))


@pytest.mark.row("F1")
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8", "w4a8", "fp8"])
def test_weights_quantised_at_load(plain: Path, quantization: str) -> None:
    """A rank scales its own part, in some formats by other scales where inputs are divided."""
    assert difference(plain, quantization=quantization) < 2.0


def test_groups_that_no_rank_has_whole_are_refused(plain: Path, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match="=32 is no multiple of it"):
        logits(path, Ranks(0, 2), quantization="w8a8")


PARAMS = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True, logprobs=20, prompt_logprobs=20),
    "seeded": SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.9, seed=7, logprobs=2),
    "choices": SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, n=3, seed=3),
    "penalties": SamplingParams(
        max_tokens=24, ignore_eos=True, repetition_penalty=1.3, no_repeat_ngram_size=2
    ),
    "beams": SamplingParams(max_tokens=8, beam_width=3, n=3),
    "grammar": parse_sampling_params(
        {"max_tokens": 24, "structured_output": {"regex": "[a-z]{5,9} [0-9]{3}"}}
    ),
}
PROMPTS = [IDS, IDS[:20] + IDS[5:9], IDS[:3] * 9]


def rows(outputs: list[RequestOutput]) -> list[tuple[list[int], list[TokenLogprobs | None]]]:
    """Tokens and log-probabilities of all choices."""
    choices = [choice for output in outputs for choice in (output, *output.others)]
    return [(one.token_ids, [*(one.prompt_logprobs or ()), *(one.logprobs or ())]) for one in choices]


@pytest.mark.row("F1", clauses=("equal",))
def test_two_processes_draw_what_one_does(tmp_path: Path) -> None:
    """Each way of sampling, and drafts."""
    path = make_checkpoint("qwen2", tmp_path / "qwen2")
    options: dict[str, Any] = {
        "max_model_len": 128,
        "num_blocks": 64,
        "dtype": "float32",
        "num_draft_tokens": 3,
    }
    found = []
    for size in (1, 2):
        llm = LLM(path, tensor_parallel_size=size, **options)
        found.append({name: rows(llm.generate(PROMPTS, params)) for name, params in PARAMS.items()})
        llm.core.scheduler.check_integrity()
        llm.core.close()
    for name in PARAMS:
        for (tokens, logprobs), (own, own_logprobs) in zip(*(one[name] for one in found), strict=True):
            assert tokens == own, name
            assert len(logprobs) == len(own_logprobs)
            for one, other in zip(logprobs, own_logprobs, strict=True):
                if one is None or other is None:
                    assert one is other
                    continue
                assert one.token_ids[0] == other.token_ids[0]
                torch.testing.assert_close(
                    torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-4, rtol=0.0
                )
    assert sum(len(logprobs) for _, logprobs in found[0]["greedy"]) > 3 * 24
