"""Log-probabilities of outputs and prompts: those of transformers, whatever way a request takes."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.errors import InvalidArgumentError
from quire.frontend.output_processor import RequestProcessor
from quire.outputs import EngineCoreOutput, RequestOutput, TokenLogprobs
from quire.request.sampling_params import MAX_PROMPT_LOGPROBS, parse_sampling_params
from quire.request.validation import check_prompt_logprobs
from quire.worker import top_logprobs
from quire.worker.top_logprobs import TopLogprobs
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_logits, hf_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import AHEAD, each_way, engine, small_pool, starts_processes

FAMILIES = ("llama", "qwen3", "gemma3")
"""Two whose layers are one call; one with windows, computed operator by operator."""
BEGINNING = random_prompts(1, longest=1, seed=7)[0] * 40
PROMPTS = [
    BEGINNING[:keep] + prompt for keep, prompt in zip([0, 40, 16, 33] * 2, random_prompts(8), strict=True)
] + [[9]]
ASKS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=4, prompt_logprobs=3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {family: hf_model(path) for family, path in checkpoints.items()}


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with recorded_steps() if request.param == "recorded" else nullcontext():
        yield AHEAD[request.param]


def check_entries(entries: Sequence[TokenLogprobs], tokens: Sequence[int], rows: Any, most: int) -> None:
    """That each entry is what a row of transformers' logits says of its token and the `most` likeliest."""
    assert len(entries) == len(tokens) == len(rows)
    for entry, token, row in zip(entries, tokens, torch.log_softmax(rows.float(), -1), strict=True):
        top = row.topk(most)
        assert entry.token_ids == [token, *top.indices.tolist()]
        expected = torch.cat([row[token, None], top.values])
        torch.testing.assert_close(torch.tensor(entry.logprobs), expected, atol=1e-4, rtol=0)
        assert abs(entry.rank - 1 - int((row > row[token]).sum())) <= int(
            (row - row[token]).abs().lt(2e-4).sum()
        )


@functools.cache
def logits_of(model: Any, *token_ids: int) -> torch.Tensor:
    """`hf_logits`, once for all ways in which an engine may come to the same tokens."""
    return hf_logits(model, list(token_ids))


def check(model: Any, prompt: list[int], output: RequestOutput) -> None:
    """All log-probabilities that the choices of an output have."""
    for choice in (output, *output.others):
        logits = logits_of(model, *prompt, *choice.token_ids)
        assert choice.logprobs is not None
        check_entries(choice.logprobs, choice.token_ids, logits[len(prompt) - 1 : -1], 4)
        assert choice.cumulative_logprob == pytest.approx(sum(e.logprobs[0] for e in choice.logprobs))
        assert (choice.prompt_logprobs is None) == (choice is not output), "told once"
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    found = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
    check_entries(found, prompt[1:], logits_of(model, *prompt)[:-1], 3)


@pytest.mark.row("A15", clauses=("sampled", "paths"))
@each_way("family", [(family,) for family in FAMILIES], [("gemma3",)])
def test_equal_to_transformers_chunked_and_with_prefix_hits(
    checkpoints: dict[str, Path], models: dict[str, Any], family: str, ahead: dict[str, Any]
) -> None:
    """Beside requests that do not ask, which leave the prompts in the cache and find them there."""
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    several = SamplingParams(
        max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=3, n=2, temperature=1.0, seed=3
    )
    asks = [ASKS, several] * len(PROMPTS)
    for budget in (5,) if starts_processes(ahead) else (5, 4096):
        llm = engine(checkpoints[family], max_num_batched_tokens=budget, **ahead)
        expected = [output.token_ids for output in llm.generate(PROMPTS, greedy)]
        outputs = llm.generate([*PROMPTS, *PROMPTS], [*asks[: len(PROMPTS)], *([greedy] * len(PROMPTS))])
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            check(models[family], prompt, output)
            assert output.num_cached_tokens == 0, "their logits had to be computed"
        plain = outputs[len(PROMPTS) :]
        assert [output.token_ids for output in plain] == expected
        assert any(output.num_cached_tokens for output in plain)
        assert all(output.prompt_logprobs is None is output.logprobs for output in plain)
        only_outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True, logprobs=4))
        assert any(output.num_cached_tokens for output in only_outputs)
        for prompt, output in zip(PROMPTS, only_outputs, strict=True):
            logits = logits_of(models[family], *prompt, *output.token_ids)
            assert output.logprobs is not None
            check_entries(output.logprobs, output.token_ids, logits[len(prompt) - 1 : -1], 4)
        assert llm.core.stats().num_free_blocks == llm.core.stats().num_blocks
        llm.core.close()


@pytest.mark.row("A15")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_equal_to_transformers_when_preempted(
    checkpoints: dict[str, Path], models: dict[str, Any], family: str, mode: str
) -> None:
    host = {} if mode == "recompute" else {"host_cache_memory": "64MiB"}
    llm = engine(checkpoints[family], preemption_mode=mode, **small_pool(checkpoints[family]), **host)
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=4, prompt_logprobs=3)
    prompts = [*PROMPTS, *random_prompts(5, longest=6, seed=8)]
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        check(models[family], prompt, output)
    assert llm.core.stats().num_preemptions > 0
    llm.core.close()


@pytest.mark.row("A15")
@pytest.mark.parametrize("ranked", [{"best_of": 3, "n": 2, "temperature": 1.0}, {"beam_width": 2, "n": 2}])
def test_ranked_choices_carry_them_with_the_first(
    checkpoints: dict[str, Path], models: dict[str, Any], ranked: dict[str, Any]
) -> None:
    llm = engine(checkpoints["llama"])
    params = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=3, **ranked)
    output = llm.generate([PROMPTS[1]], params)[0]
    assert output.prompt_logprobs is not None and output.others[0].prompt_logprobs is None
    found = [entry for entry in output.prompt_logprobs if entry is not None]
    check_entries(found, PROMPTS[1][1:], hf_logits(models["llama"], PROMPTS[1])[:-1], 3)


def test_logits_of_a_prompt_are_few_at_a_time(
    checkpoints: dict[str, Path], models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All logits of a step of 512 tokens would be 300 MB, for a vocabulary of 150 000."""
    monkeypatch.setattr(top_logprobs, "MAX_PROMPT_LOGITS", 2500)  # rows of 512
    llm = engine(checkpoints["llama"])
    sizes = []
    model = runner_of(llm.core).model
    compute_logits = model.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(model, "compute_logits", counted)
    check(models["llama"], PROMPTS[1], llm.generate([PROMPTS[1]], ASKS)[0])
    assert max(sizes) == 4 and len(sizes) > 10


def test_too_many_numbers_are_refused() -> None:
    most = MAX_PROMPT_LOGPROBS // 65 + 1
    check_prompt_logprobs(SamplingParams(prompt_logprobs=64), most)
    check_prompt_logprobs(SamplingParams(), 10**9)
    with pytest.raises(InvalidArgumentError, match=r"prompt_logprobs: 64 beside .* at most 262144"):
        check_prompt_logprobs(SamplingParams(prompt_logprobs=64), most + 1)


def test_top_logprobs_of_rows_alone_and_together() -> None:
    """Bit-equal, and the larger number that another row asks for changes nothing."""
    logits = torch.randn(16, 5000, generator=torch.Generator().manual_seed(1)) * 4
    chosen = torch.arange(16) * 7
    together = TopLogprobs.compute(logits, chosen, 8)
    for i in range(16):
        alone = TopLogprobs.compute(logits[i : i + 1], chosen[i : i + 1], i % 5)
        assert torch.equal(alone.logprobs[0], together.logprobs[i, : 1 + i % 5])
        assert torch.equal(alone.token_ids[0], together.token_ids[i, : 1 + i % 5])
        assert alone.ranks[0] == together.ranks[i] == 1 + (logits[i] > logits[i, chosen[i]]).sum()
    assert TopLogprobs.compute(logits[:, :3], chosen.clamp(max=2), 64).token_ids.shape == (16, 4), (
        "all there are"
    )


KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"structured_output": {"regex": "[a-z ]{40}"}},
    {"structured_output": {"regex": "[a-z ]{40}"}, "logprobs": 20},
    {"structured_output": {"json_object": True}, "temperature": 2.0, "seed": 3, "logprobs": 0},
    {"temperature": 1.0, "seed": 4, "logprobs": 5},
    {"repetition_penalty": 1.5, "logit_bias": {"7": 3.0}, "logprobs": 2},
]
"""Whatever the sampler takes another way for."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_row_is_the_same_alone_and_among_all(checkpoints: dict[str, Path], dtype: str) -> None:
    """Tokens, and the bits of log-probabilities."""
    llm = engine(checkpoints["llama"], dtype=dtype, max_num_seqs=16, num_threads=2)
    prompts = [BEGINNING[: 3 + n] for n in range(2 * len(KINDS))]
    each = [
        parse_sampling_params({"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, **kind})
        for kind in KINDS * 2
    ]
    together = llm.generate(prompts, each)
    for prompt, params, output in zip(prompts, each, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs), params
    # A mask does not change what is told of the model's own distribution.
    for index in (3, 3 + len(KINDS)):
        told = together[index].logprobs
        assert told and any(entry.rank > 1 for entry in told), "a token that the model did not mean"
        (free,) = llm.generate([prompts[index]], parse_sampling_params({"max_tokens": 1, "logprobs": 20}))
        assert free.logprobs and free.logprobs[0].logprobs[1:] == told[0].logprobs[1:]


@pytest.mark.row("A15", clauses=("aligned",))
@pytest.mark.parametrize("seed", range(40))
def test_as_many_as_tokens_after_a_stop_string_is_trimmed(checkpoints: dict[str, Path], seed: int) -> None:
    """Random tokens in random deltas, with stop strings out of their text: entry i is that of token i."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoints["llama"])
    rng = random.Random(seed)
    ids = [rng.randrange(5, 500) for _ in range(rng.randrange(1, 40))]
    text = tokenizer.decode(ids)
    begin = rng.randrange(len(text))
    stops = tuple(stop for stop in (text[begin : begin + rng.randrange(1, 6)],) if "�" not in stop)
    params = SamplingParams(
        stop=stops,
        logprobs=1,
        include_stop_str_in_output=rng.random() < 0.5,
        n=2,
        min_tokens=rng.choice((0, 3)),
    )
    processor = RequestProcessor("r", 1, params, tokenizer)
    told: dict[int, tuple[list[int], list[TokenLogprobs]]] = {0: ([], []), 1: ([], [])}
    for index in (0, 1):
        left, choice = list(ids), processor.choices[index]
        while left and not choice.finished:
            new = [left.pop(0) for _ in range(min(len(left), rng.choice((1, 1, 2, 7))))]
            entries = [TokenLogprobs([token, 3], [-float(token), -1.0], 1) for token in new]
            output = EngineCoreOutput("r", new, None if left else "length", logprobs=entries, index=index)
            processor.process(output)
            if rng.random() < 0.6 or choice.finished:
                part = choice.pop_output()
                told[index][0].extend(part.token_ids)
                told[index][1].extend(part.logprobs or [])
                assert len(part.token_ids) == len(part.logprobs or [])
        tokens, logprobs = told[index]
        assert [entry.token_ids[0] for entry in logprobs] == tokens == ids[: len(tokens)]
        assert choice.num_output_tokens == len(tokens)
        assert choice.cumulative_logprob == (sum(-float(token) for token in tokens) if tokens else 0.0)
    assert told[0] == told[1]


@pytest.mark.row("A15")
def test_aligned_in_the_engine_too(checkpoints: dict[str, Path], models: dict[str, Any]) -> None:
    llm = engine(checkpoints["llama"])
    full = llm.generate(["hello"], SamplingParams(max_tokens=20, ignore_eos=True))[0].text
    stop = full[len(full) // 2 :][:3]
    params = SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,), logprobs=4, prompt_logprobs=3)
    output = llm.generate(["hello"], params)[0]
    assert output.finish_reason == "stop" and 0 < len(output.token_ids) < 20
    check(models["llama"], llm.encode("hello"), output)


@pytest.mark.parametrize("seed", range(4))
def test_best_of_is_ranked_by_what_stands_before_a_stop_string(
    checkpoints: dict[str, Path], seed: int
) -> None:
    llm = engine(checkpoints["llama"])
    asked: Any = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": seed, "stop": ("e", "1")}

    def told(first: RequestOutput) -> list[Any]:
        return [(one.token_ids, one.text, one.stop_reason, one.index) for one in (first, *first.others)]

    first = llm.generate([PROMPTS[1]], SamplingParams(n=6, logprobs=0, **asked))[0]
    choices = sorted(
        (first, *first.others),
        key=lambda one: -sum(entry.logprobs[0] for entry in one.logprobs or ()) / len(one.token_ids),
    )
    assert any(one.stop_reason for one in choices)
    found = llm.generate([PROMPTS[1]], SamplingParams(n=2, best_of=6, **asked))[0]
    for place, one in enumerate(choices[:2]):
        one.index, one.others = place, []
    choices[0].others = [choices[1]]
    assert told(found) == told(choices[0])
    assert found.logprobs is None is found.others[0].logprobs
    assert not llm.core.has_work
