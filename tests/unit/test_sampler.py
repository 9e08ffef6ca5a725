"""Sampler against numpy references written from the definitions, and against transformers' processors."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as hf

from quire.core.request import Request
from quire.outputs import RowOutput
from quire.request.sampling_params import SamplingParams
from quire.worker.sampler import sampling_tensors
from quire.worker.sampling_batch import SamplingRow, collect_edits
from quire.worker.token_history import _Prompt
from quire_kernels import ops
from quire_kernels.reference.sampling import edit_logits, filter_scores, philox4x32, philox_uniform
from tests.fixtures.sampling import outputs, tokens

Array = npt.NDArray[np.float64]
VOCAB = 40
DRAWS = 20_000
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

PROMPT = [3, 5, 3, 7, 9]
OUTPUT = [5, 5, 11, 3, 5, 5]
EOS = frozenset({2, 13})


def make_row(
    prompt: Iterable[int] = PROMPT, output: Iterable[int] = OUTPUT, seed: int = 0, **params: Any
) -> SamplingRow:
    prompt = list(prompt)
    return SamplingRow(SamplingParams(**params), prompt + list(output), len(prompt), EOS, seed)


def rows_of_seeds(**params: Any) -> list[SamplingRow]:
    """DRAWS of them, which differ in their seeds."""
    one = make_row(**params)
    return [SamplingRow(one.params, one.token_ids, one.num_prompt_tokens, EOS, seed) for seed in range(DRAWS)]


def fixed_logits(vocab: int = VOCAB, seed: int = 9, scale: float = 2.0) -> Array:
    return np.random.default_rng(seed).normal(size=vocab).astype(np.float32).astype(np.float64) * scale


def apply_edits(scores: torch.Tensor, rows: list[SamplingRow]) -> None:
    tensors = sampling_tensors(rows, collect_edits(rows, scores.shape[1]), None, scores.device)
    if tensors.edits is not None:
        edit_logits(scores, tensors.edits)


def apply_filters(scores: torch.Tensor, rows: list[SamplingRow]) -> None:
    tensors = sampling_tensors(rows, None, None, scores.device)
    filter_scores(scores, tensors.top_k, tensors.top_p, tensors.min_p, tensors.typical_p)


def transform(logits: Array, row: SamplingRow) -> Array:
    """The row's scores after every transform, as the sampler is about to draw from them."""
    scores = torch.tensor(logits, dtype=torch.float32)[None]
    apply_edits(scores, [row])
    if not row.params.is_greedy:
        scores = (scores - scores.amax()) / row.params.temperature
        apply_filters(scores, [row])
    return scores[0].double().numpy()


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


# References, from the definitions, one row at a time in float64.


def ref_repetition(logits: Array, tokens: list[int], penalty: float) -> Array:
    out = logits.copy()
    for token in range(len(logits)):
        if token in tokens:
            out[token] = logits[token] / penalty if logits[token] >= 0 else logits[token] * penalty
    return out


def ref_presence_frequency(logits: Array, output: list[int], presence: float, frequency: float) -> Array:
    counts = np.array([output.count(token) for token in range(len(logits))])
    return logits - frequency * counts - presence * (counts > 0)


def ref_bias(logits: Array, bias: dict[int, float]) -> Array:
    return logits + np.array([bias.get(token, 0.0) for token in range(len(logits))])


def ref_ban(logits: Array, banned: Iterable[int]) -> Array:
    out = logits.copy()
    out[list(banned)] = -np.inf
    return out


def ref_ngram_bans(tokens: list[int], n: int, vocab: int) -> set[int]:
    grams = {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}
    return {
        token
        for token in range(vocab)
        if len(tokens) >= n and (*tokens[len(tokens) - n + 1 :], token) in grams
    }


def ref_top_k(logits: Array, k: int) -> Array:
    kept = sorted(range(len(logits)), key=lambda token: -logits[token])[:k]
    return ref_ban(logits, set(range(len(logits))) - set(kept))


def ref_top_p(logits: Array, p: float) -> Array:
    probs, kept, mass = softmax(logits), [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probs[token]):
        if mass >= p:
            break
        kept.append(token)
        mass += probs[token]
    return ref_ban(logits, set(range(len(logits))) - set(kept))


def ref_min_p(logits: Array, p: float) -> Array:
    probs = softmax(logits)
    return np.where(probs >= p * probs.max(), logits, -np.inf)


def ref_typical(logits: Array, mass: float) -> Array:
    """Locally typical sampling (arXiv 2202.00666): tokens whose surprise is nearest the entropy."""
    probs = softmax(logits)
    surprise = np.array([-math.log(q) if q > 0 else math.inf for q in probs])
    entropy = sum(q * s for q, s in zip(probs, surprise, strict=True) if q > 0)
    kept, total = [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: abs(surprise[token] - entropy)):
        if total >= mass:
            break
        kept.append(token)
        total += probs[token]
    return ref_ban(logits, set(range(len(logits))) - set(kept))


HISTORY = PROMPT + OUTPUT
BAD_WORDS = ((4,), (5, 5, 8), (5, 9), (6, 5, 10), (2,), (3, 5, 5, 21))
# [4] always; [5, 5, 8] and [3, 5, 5, 21] because the history ends with 3, 5, 5; [5, 9] too; [6, 5, 10] not;
# [2] is EOS and stays, as in transformers.
BAD_WORD_BANS = {4, 8, 9, 21}
BIAS = {0: 5.0, 1: -100.0, 6: 100.0, 39: -0.5}

Case = tuple[dict[str, Any], Callable[[Array], Array]]
CASES: dict[str, Case] = {
    "neutral": ({"temperature": 1.0}, lambda x: x),
    "temperature_high": ({"temperature": 1.7}, lambda x: x / 1.7),
    "temperature_low": ({"temperature": 0.3}, lambda x: x / 0.3),
    "top_k": ({"temperature": 1.0, "top_k": 7}, lambda x: ref_top_k(x, 7)),
    "top_k_1": ({"temperature": 1.0, "top_k": 1}, lambda x: ref_top_k(x, 1)),
    "top_k_beyond": ({"temperature": 1.0, "top_k": 10**6}, lambda x: x),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, lambda x: ref_top_p(x, 0.8)),
    "top_p_tiny": ({"temperature": 1.0, "top_p": 1e-9}, lambda x: ref_top_k(x, 1)),
    "min_p": ({"temperature": 1.0, "min_p": 0.1}, lambda x: ref_min_p(x, 0.1)),
    "min_p_1": ({"temperature": 1.0, "min_p": 1.0}, lambda x: ref_top_k(x, 1)),
    "typical_p": ({"temperature": 1.0, "typical_p": 0.6}, lambda x: ref_typical(x, 0.6)),
    "typical_p_tiny": ({"temperature": 1.0, "typical_p": 1e-9}, lambda x: ref_typical(x, 1e-9)),
    "repetition_penalty": (
        {"temperature": 1.0, "repetition_penalty": 1.6},
        lambda x: ref_repetition(x, HISTORY, 1.6),
    ),
    "repetition_reward": (
        {"temperature": 1.0, "repetition_penalty": 0.7},
        lambda x: ref_repetition(x, HISTORY, 0.7),
    ),
    "presence_penalty": (
        {"temperature": 1.0, "presence_penalty": 1.5},
        lambda x: ref_presence_frequency(x, OUTPUT, 1.5, 0.0),
    ),
    "frequency_penalty": (
        {"temperature": 1.0, "frequency_penalty": -0.8},
        lambda x: ref_presence_frequency(x, OUTPUT, 0.0, -0.8),
    ),
    "logit_bias": (
        {"temperature": 1.0, "logit_bias": {0: 3.0, 1: -4.0}},
        lambda x: ref_bias(x, {0: 3, 1: -4}),
    ),
    "logit_bias_extreme": ({"temperature": 1.0, "logit_bias": BIAS}, lambda x: ref_bias(x, BIAS)),
    "min_tokens": (
        {"temperature": 1.0, "min_tokens": 7, "stop_token_ids": (17, 19)},
        lambda x: ref_ban(x, [2, 13, 17, 19]),
    ),
    "min_tokens_reached": ({"temperature": 1.0, "min_tokens": 6, "stop_token_ids": (17,)}, lambda x: x),
    "min_tokens_ignore_eos": (
        {"temperature": 1.0, "min_tokens": 7, "ignore_eos": True, "stop_token_ids": (17,)},
        lambda x: ref_ban(x, [17]),
    ),
    "ignore_eos": ({"temperature": 1.0, "ignore_eos": True}, lambda x: x),
    "bad_words": ({"temperature": 1.0, "bad_words_ids": BAD_WORDS}, lambda x: ref_ban(x, BAD_WORD_BANS)),
    "no_repeat_ngram": (
        {"temperature": 1.0, "no_repeat_ngram_size": 2},
        lambda x: ref_ban(x, ref_ngram_bans(HISTORY, 2, VOCAB)),
    ),
    "no_repeat_unigram": (
        {"temperature": 1.0, "no_repeat_ngram_size": 1},
        lambda x: ref_ban(x, set(HISTORY)),
    ),
    "everything": (
        {
            "temperature": 0.8,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.01,
            "typical_p": 0.9,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.2,
            "logit_bias": {0: 1.0, 4: 50.0},
            "min_tokens": 7,
            "bad_words_ids": BAD_WORDS,
            "no_repeat_ngram_size": 2,
        },
        lambda x: ref_typical(
            ref_min_p(
                ref_top_p(
                    ref_top_k(
                        ref_ban(
                            ref_bias(
                                ref_presence_frequency(ref_repetition(x, HISTORY, 1.3), OUTPUT, 0.4, 0.2),
                                {0: 1.0, 4: 50.0},
                            ),
                            BAD_WORD_BANS | ref_ngram_bans(HISTORY, 2, VOCAB) | EOS,
                        )
                        / 0.8,
                        20,
                    ),
                    0.95,
                ),
                0.01,
            ),
            0.9,
        ),
    ),
}


def same_distribution(scores: Array, reference: Array) -> None:
    """Equal removed tokens and equal probabilities (scores may differ by a constant)."""
    np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(reference))
    np.testing.assert_allclose(softmax(scores), softmax(reference), rtol=2e-5, atol=1e-9)


@pytest.mark.row("A9", clauses=("reference",))
@pytest.mark.parametrize("name", CASES)
def test_transform_equals_numpy_reference(name: str) -> None:
    params, reference = CASES[name]
    for seed in range(5):
        logits = fixed_logits(seed=seed)
        same_distribution(transform(logits, make_row(**params)), reference(logits))


@pytest.mark.row("A9", clauses=("draws",))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_draws_pass_chi_square(name: str, device: str) -> None:
    """20,000 draws of the whole sampler, one per seed, against the reference's probabilities."""
    params, reference = CASES[name]
    logits = fixed_logits()
    rows = rows_of_seeds(**params)
    batch = torch.tensor(logits, dtype=torch.float32, device=device).repeat(DRAWS, 1)
    drawn = tokens(batch, rows)
    chi_square(drawn, softmax(reference(logits)))


def chi_square(drawn: list[int], probs: Array) -> None:
    observed = np.bincount(drawn, minlength=len(probs))
    assert not observed[probs == 0].any(), "a removed token was drawn"
    expected = probs * len(drawn)
    # The test wants 5 expected draws per cell: the rare tokens share one.
    rare = expected < 5
    cells = [(observed[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() >= 5:
        cells.append((observed[rare].sum(), expected[rare].sum()))
    else:
        assert observed[rare].sum() < 25
    got, want = (np.array(column, dtype=np.float64) for column in zip(*cells, strict=True))
    if len(cells) > 1:
        assert stats.chisquare(got, want * got.sum() / want.sum()).pvalue > 1e-4


@pytest.mark.row("A9", clauses=("ignore-eos",))
@pytest.mark.row("A13", clauses=("stop-ids",))
@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, True),
        ({"ignore_eos": True}, False),
        ({"min_tokens": 2}, False),
        ({"min_tokens": 1}, True),
        ({"ignore_eos": True, "stop_token_ids": (13,)}, True),
    ],
)
def test_drawn_eos_ends_the_request_unless_ignored(params: dict[str, Any], ends: bool) -> None:
    request = Request("r", [3, 5], SamplingParams(**params), eos_token_ids=EOS)
    request.token_ids.append(13)
    assert request.check_stop(100) is ends


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [256, 257, 1000])
def test_draws_over_several_chunks_pass_chi_square(vocab: int, device: str) -> None:
    """The cumulative distribution is summed by chunks of 256 tokens: borders and the last, partial one."""
    logits = fixed_logits(vocab, scale=1.5)
    logits[vocab - 1] = logits.max()
    rows = rows_of_seeds(temperature=1.0)
    batch = torch.tensor(logits, dtype=torch.float32, device=device).repeat(DRAWS, 1)
    chi_square(tokens(batch, rows), softmax(logits))


@pytest.mark.row("A9")
def test_draws_of_one_seed_over_positions_pass_chi_square() -> None:
    """As one long request sees it: the positions of a seed are independent draws too."""
    logits = fixed_logits()
    # A position is the number of tokens behind the prompt: a negative prompt saves 20,000 long lists.
    params = SamplingParams(temperature=1.0)
    rows = [SamplingRow(params, [0], 1 - position, EOS, 12345) for position in range(DRAWS)]
    assert rows[7].num_output_tokens == 7
    drawn = tokens(torch.tensor(logits, dtype=torch.float32).repeat(DRAWS, 1), rows)
    chi_square(drawn, softmax(logits))
    # Neighbouring draws do not depend on each other: the table of pairs of 8 groups factorises.
    group = np.searchsorted(np.cumsum(softmax(logits)), np.linspace(0, 1, 9)[1:-1])
    groups = np.searchsorted(group, drawn, side="right")
    table = np.zeros((8, 8))
    np.add.at(table, (groups[:-1], groups[1:]), 1)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    assert stats.chi2_contingency(table).pvalue > 1e-4


# transformers

HF_CASES: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "repetition_penalty": (
        {"repetition_penalty": 1.6},
        lambda: hf.RepetitionPenaltyLogitsProcessor(1.6),
    ),
    "no_repeat_2": ({"no_repeat_ngram_size": 2}, lambda: hf.NoRepeatNGramLogitsProcessor(2)),
    "no_repeat_3": ({"no_repeat_ngram_size": 3}, lambda: hf.NoRepeatNGramLogitsProcessor(3)),
    "no_repeat_1": ({"no_repeat_ngram_size": 1}, lambda: hf.NoRepeatNGramLogitsProcessor(1)),
    "no_repeat_6": ({"no_repeat_ngram_size": 6}, lambda: hf.NoRepeatNGramLogitsProcessor(6)),
    "bad_words": (
        {"bad_words_ids": BAD_WORDS},
        lambda: hf.NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS], eos_token_id=sorted(EOS)),
    ),
    "min_tokens": (
        {"min_tokens": 7},
        lambda: hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, sorted(EOS)),
    ),
    "temperature": ({"temperature": 0.6}, lambda: hf.TemperatureLogitsWarper(0.6)),
    "top_k": ({"temperature": 1.0, "top_k": 9}, lambda: hf.TopKLogitsWarper(9)),
    "top_p": ({"temperature": 1.0, "top_p": 0.7}, lambda: hf.TopPLogitsWarper(0.7)),
    "top_p_high": ({"temperature": 1.0, "top_p": 0.999}, lambda: hf.TopPLogitsWarper(0.999)),
    "min_p": ({"temperature": 1.0, "min_p": 0.05}, lambda: hf.MinPLogitsWarper(0.05)),
    "typical_p": ({"temperature": 1.0, "typical_p": 0.5}, lambda: hf.TypicalLogitsWarper(0.5)),
    "typical_p_high": ({"temperature": 1.0, "typical_p": 0.95}, lambda: hf.TypicalLogitsWarper(0.95)),
}


@pytest.mark.row("A9")
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
@pytest.mark.parametrize("name", HF_CASES)
def test_transform_equals_transformers(name: str, vocab: int) -> None:
    """The larger vocabulary does not fit the sorted candidates, so that whole rows are sorted as well."""
    params, build = HF_CASES[name]
    rng = random.Random(1)
    for seed, scale in [(0, 3.0), (1, 1.0), (2, 0.1)]:
        logits = fixed_logits(vocab, seed, scale)
        output = OUTPUT if seed == 0 else [*PROMPT, *rng.choices([3, 5, 7], k=30), *PROMPT[:4]]
        row = make_row(output=output if name != "min_tokens" else OUTPUT, **params)
        expected = build()(
            torch.tensor([row.token_ids]), torch.tensor(logits, dtype=torch.float32)[None].clone()
        )
        same_distribution(transform(logits, row), expected[0].double().numpy())


@pytest.mark.parametrize(
    ("params", "reference"),
    [
        ({"top_k": 3000}, lambda x: ref_top_k(x, 3000)),
        ({"top_k": 1024}, lambda x: ref_top_k(x, 1024)),
        ({"top_k": 1025}, lambda x: ref_top_k(x, 1025)),
        ({"top_p": 0.9}, lambda x: ref_top_p(x, 0.9)),
        ({"top_k": 3000, "top_p": 0.9}, lambda x: ref_top_p(ref_top_k(x, 3000), 0.9)),
        ({"top_k": 500, "top_p": 0.9}, lambda x: ref_top_p(ref_top_k(x, 500), 0.9)),
        ({"typical_p": 0.9}, lambda x: ref_typical(x, 0.9)),
        ({"top_k": 3000, "typical_p": 0.9}, lambda x: ref_typical(ref_top_k(x, 3000), 0.9)),
    ],
)
def test_flat_rows_beyond_the_candidates(params: dict[str, Any], reference: Callable[[Array], Array]) -> None:
    """With a nearly flat distribution the nucleus is larger than the candidates that are sorted first."""
    logits = fixed_logits(5000, scale=0.05)
    same_distribution(transform(logits, make_row(temperature=1.0, **params)), reference(logits))


@pytest.mark.parametrize("kept", [1, 2, 5])
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_nucleus_whose_mass_is_exactly_p_is_complete(vocab: int, kept: int) -> None:
    """The fewest tokens that reach the mass are kept; where theirs was p to the last bit, one more was."""
    scores = torch.tensor(fixed_logits(vocab), dtype=torch.float32)[None]
    scores -= scores.max()
    ordered = scores.sort(descending=True).values
    mass = (ordered - scores.logsumexp(-1, keepdim=True)).exp().double().cumsum(-1)[0]
    for top_p, expected in ((mass[kept - 1], kept), (torch.nextafter(mass[kept - 1], mass[-1]), kept + 1)):
        part = scores.clone()
        none = torch.zeros(1, dtype=torch.int64)
        filter_scores(part, none, top_p[None], none.double(), None)
        assert int(part.isfinite().sum()) == expected


def test_ties_with_the_last_kept_token_are_kept() -> None:
    """So the outcome does not depend on how a sort orders equals; top-k and typical-p as transformers."""
    logits = np.array([1.0, 3.0, 1.0, 2.0, 1.0, -1.0])
    kept = np.isfinite(transform(logits, make_row(temperature=1.0, top_k=3)))
    assert kept.tolist() == [True, True, True, True, True, False]
    assert np.isfinite(transform(np.zeros(6), make_row(temperature=1.0, top_p=0.1))).all()
    assert np.isfinite(transform(np.zeros(3000), make_row(temperature=1.0, top_k=2))).all()


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.3125, 2), (0.8125, 4)])
def test_a_mass_of_exactly_top_p_is_enough(top_p: float, count: int) -> None:
    """Four tokens in order whose probabilities are 1/4 in every arithmetic: one more is one too many."""
    logits = np.array([0.0, -1e-30, -2e-30, -3e-30])
    kept = np.isfinite(transform(logits, make_row(temperature=1.0, top_p=top_p)))
    assert kept.tolist() == [index < count for index in range(4)]


# Randomness

# Counter, key and result of the known-answer tests published with Random123, words low to high.
KNOWN_ANSWERS = [
    (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (2**64 - 1, 2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x85A308D3243F6A88,
        0x0370734413198A2E,
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("low", "high", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(low: int, high: int, key: int, words: tuple[int, ...]) -> None:
    def one(value: int) -> npt.NDArray[np.uint64]:
        return np.array([value], dtype=np.uint64)

    assert tuple(int(word[0]) for word in philox4x32(one(key), one(low), one(high))) == words


def test_uniform_is_in_range_and_uniform() -> None:
    n = 200_000
    values = philox_uniform(np.full(n, 2**64 - 1, dtype=np.uint64), np.arange(n, dtype=np.uint64))
    assert values.min() >= 0.0 and values.max() < 1.0
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert len(np.unique(values)) == n


MODEL_VOCAB = 3000
MODEL = torch.randn(64, MODEL_VOCAB, generator=torch.Generator().manual_seed(4)) * 2


def next_logits(row: SamplingRow) -> torch.Tensor:
    """A model: logits depend on the newest two tokens."""
    return MODEL[row.token_ids[-1] % 64] + MODEL[row.token_ids[-2] % 64].flip(0)


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of parameters, greedy or not."""
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.5, 1.0, 1.5, 3.0],
        "top_k": [0, 0, 5, 50, 2000],
        "top_p": [1.0, 0.5, 0.9, 0.999],
        "min_p": [0.0, 0.0, 0.05],
        "typical_p": [1.0, 1.0, 0.4, 0.95],
        "repetition_penalty": [1.0, 1.2],
        "presence_penalty": [0.0, 0.5],
        "frequency_penalty": [0.0, -0.5],
        "no_repeat_ngram_size": [0, 0, 2],
        "logit_bias": [{}, {1: 5.0}],
        "bad_words_ids": [(), ((5,), (1, 2))],
        "min_tokens": [0, 10],
        "logprobs": [None, 0, 5],
    }
    return SamplingParams(**{name: rng.choice(values) for name, values in choices.items()})


@pytest.mark.row("A11")
@pytest.mark.parametrize("trial", range(8))
def test_same_seed_alone_and_among_15_random_requests(trial: int) -> None:
    """40 tokens: the others come and go, have other parameters, and the row's place changes each step."""
    rng = random.Random(trial)
    params, seed = random_params(rng), rng.getrandbits(64)
    if params.is_greedy:
        params = SamplingParams(temperature=1.0, top_p=0.95)
    prompt = [1, 2, 3]

    def run(num_others: int) -> list[int]:
        row = SamplingRow(params, list(prompt), len(prompt), EOS, seed)
        for _ in range(40):
            batch = [row]
            for _ in range(num_others):
                other = rng.choices(range(MODEL_VOCAB), k=rng.randint(2, 50))
                batch.append(SamplingRow(random_params(rng), other, 2, EOS, rng.getrandbits(64)))
            rng.shuffle(batch)
            logits = torch.stack([next_logits(member) for member in batch])
            place = next(i for i, member in enumerate(batch) if member is row)
            row.token_ids.append(tokens(logits, batch)[place])
        return row.token_ids[len(prompt) :]

    alone = run(0)
    assert len(set(alone)) > 5
    assert run(15) == alone


@pytest.mark.row("A11")
def test_resumed_request_continues_the_same() -> None:
    """After preemption the row is made anew from prompt and output: same position, same random numbers."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.1, no_repeat_ngram_size=3)

    def run(resume_every: int) -> list[int]:
        row = SamplingRow(params, [1, 2, 3], 3, EOS, 77)
        for step in range(40):
            if step % resume_every == 0:
                row = SamplingRow(params, list(row.token_ids), 3, EOS, 77)
            row.token_ids.append(tokens(next_logits(row)[None].clone(), [row])[0])
        return row.token_ids

    assert run(1) == run(7) == run(1000)


def test_seeds_and_positions_give_different_draws() -> None:
    logits = torch.zeros(1, MODEL_VOCAB)
    rows = [make_row(temperature=1.0, seed=seed) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)]
    rows += [make_row(output=[0] * count, temperature=1.0) for count in (0, 1, 2)]
    drawn = tokens(logits.repeat(len(rows), 1), rows)
    assert len(set(drawn)) == len(rows)


# History


def test_history_grown_token_by_token_equals_a_fresh_one() -> None:
    rng = random.Random(5)
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "bad_words_ids": ((1,), (2, 3), (0, 1, 2)),
    }
    for n in range(1, 8):
        grown = make_row([0, 1], [], no_repeat_ngram_size=n, **params)
        for _ in range(150):
            grown.token_ids.append(rng.choice([0, 1, 2, 3] if n > 2 else range(VOCAB)))
            fresh = make_row([0, 1], grown.token_ids[2:], no_repeat_ngram_size=n, **params)
            logits = fixed_logits()
            expected = ref_presence_frequency(
                ref_repetition(logits, grown.token_ids, 1.3), grown.token_ids[2:], 0.5, 0.25
            )
            bans = ref_ngram_bans(grown.token_ids, n, VOCAB) | {
                word[-1]
                for word in ((1,), (2, 3), (0, 1, 2))
                if grown.token_ids[len(grown.token_ids) - len(word) + 1 :] == list(word[:-1])
            }
            if len(bans) < VOCAB:
                expected = ref_ban(expected, bans)
            got = transform(logits, grown)
            np.testing.assert_array_equal(got, transform(logits, fresh))
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_shortened_tokens_start_the_history_anew() -> None:
    row = make_row(repetition_penalty=2.0, frequency_penalty=1.0)
    logits = fixed_logits()
    transform(logits, row)
    del row.token_ids[-3:]
    np.testing.assert_array_equal(
        transform(logits, row),
        transform(logits, make_row(output=OUTPUT[:-3], repetition_penalty=2.0, frequency_penalty=1.0)),
    )


class CountedTokens(list[int]):
    """A row's tokens that count how many of them are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()


@pytest.mark.parametrize(
    "params",
    [
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 4},
        {"no_repeat_ngram_size": 5},
        {"no_repeat_ngram_size": 1024},
        {"bad_words_ids": tuple((*[7] * (1022 - i), 7, 10) for i in range(256))},
        {"repetition_penalty": 1.1},
    ],
)
def test_a_step_does_not_read_the_whole_history_again(params: dict[str, Any]) -> None:
    """A legal request once held everybody's step for hundreds of milliseconds: with a long repeated text, an
    n-gram ban compared 1023 tokens at each of its positions, and each bad word the newest 1022 tokens."""
    row = make_row([7] * 6000, [], **params)
    row.token_ids = tokens = CountedTokens(row.token_ids)
    logits = fixed_logits()
    transform(logits, row)
    assert tokens.reads <= 10_000, "the prompt is read once"
    tokens.reads = 0
    for _ in range(5):
        tokens.append(7)
        scores = transform(logits, row)
    assert tokens.reads <= 5 * 1100
    if "bad_words_ids" in params:
        assert scores[10] == -np.inf, "the words are banned all the same"
    elif "no_repeat_ngram_size" in params:
        assert scores[7] == -np.inf


def test_biases_are_read_once_and_belong_to_their_row() -> None:
    """Rows with and without biases, in changing order: each gets its own. 4096 biases of 64 rows were turned
    into arrays anew in every step, for 24 ms and more."""

    class CountedBiases(dict[int, float]):
        reads = 0

        def keys(self) -> Any:
            self.reads += 1
            return super().keys()

        def items(self) -> Any:
            self.reads += 1
            return super().items()

        __hash__ = None  # type: ignore[assignment]

    counted = CountedBiases({1: 5.0, 900: 2.0, 3: -5.0})
    biases: list[dict[int, float]] = [{}, counted, {}, {2: 7.0}, {39: -3.0}]
    rows = [make_row(output=[], logit_bias=one) for one in biases]
    for order in ([0, 1, 2, 3, 4], [4, 2, 3, 1, 0], [1], [2, 1, 4]):
        scores = torch.zeros(len(order), VOCAB)
        batch = [rows[i] for i in order]
        apply_edits(scores, batch)
        expected = torch.zeros(len(order), VOCAB)
        for place, i in enumerate(order):
            for token, bias in biases[i].items():
                if token < VOCAB:
                    expected[place, token] = bias
        assert torch.equal(scores, expected)
    assert counted.reads == 1 + 4, "once by the row, four times here"


def test_choices_share_their_prompt_and_nothing_else() -> None:
    """64 choices of a long prompt each read it again for their n-grams. What one of them has said must not
    ban anything of another, and the shared part goes with the last of them."""
    prompt = [random.Random(3).randrange(30) for _ in range(3000)]
    params: dict[str, Any] = {"no_repeat_ngram_size": 3, "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    rows = [make_row(prompt, [], **params) for _ in range(8)]
    rng = random.Random(4)
    logits = fixed_logits()
    for _ in range(30):
        for row in rows:
            row.token_ids.append(rng.randrange(35))
            expected = transform(logits, make_row(list(prompt), row.token_ids[3000:], **params))
            np.testing.assert_array_equal(transform(logits, row), expected)
            bans = ref_ngram_bans(row.token_ids, 3, VOCAB)
            assert set(np.flatnonzero(expected == -np.inf).tolist()) == set(bans)
    shared = {id(row.history()._prompt) for row in rows}
    assert len(shared) == 1
    key = rows[0].history()._prompt
    assert key is not None and key in _Prompt.living.values()
    del rows, row, key
    assert not any(list(one._tokens) == prompt for one in _Prompt.living.values())


def test_grams_whose_hashes_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one hash for all of them, what is left is the comparison."""
    monkeypatch.setattr("quire.worker.token_history._MODULUS", 1)
    rng = random.Random(6)
    row = make_row([0], [], no_repeat_ngram_size=3)
    for _ in range(200):
        row.token_ids.append(rng.randrange(5))
        banned = np.flatnonzero(transform(fixed_logits(), row) == -np.inf)
        assert set(banned.tolist()) == set(ref_ngram_bans(row.token_ids, 3, VOCAB))


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9999}, {"top_k": 2500}, {"typical_p": 0.999}, {"top_k": 2500, "top_p": 0.99}]
)
@pytest.mark.parametrize("kind", ["flat", "random", "tied", "equal", "signs"])
def test_filters_that_keep_most_of_the_vocabulary_need_no_sort(
    params: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hot temperature with a top-p near 1 sorted the whole vocabulary in every step, 12 ms for each row.
    The same tokens remain as by the definition with a sort."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(3, MODEL_VOCAB, generator=generator)
    if kind == "flat":
        scores /= 100
    elif kind == "tied":
        scores = (4 * scores).round() / 4
    elif kind == "equal":
        scores[:] = 1.0
    elif kind == "signs":
        scores = torch.where(scores > 0, 0.0, -0.0)
    scores -= scores.amax(dim=-1, keepdim=True)
    rows = [make_row(temperature=1.0, **params) for _ in range(3)]
    sorts: list[Any] = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda *args, **named: sorts.append(args) or sort(*args, **named)
    )
    got = scores.clone()
    apply_filters(got, rows)
    assert not sorts
    monkeypatch.undo()
    for one, filtered in zip(scores, got, strict=True):
        expected = one.clone()
        if "top_k" in params:
            expected[one < one.sort(descending=True).values[params["top_k"] - 1]] = -torch.inf
        for name in ("top_p", "typical_p"):
            if name not in params:
                continue
            probs = expected.double().softmax(dim=-1)
            keys = expected
            if name == "typical_p":
                log_probs = torch.log_softmax(expected, dim=-1)
                keys = -(log_probs + -(log_probs.exp() * log_probs).nansum()).abs()
            order = keys.sort(descending=True).indices
            last = int((probs[order].cumsum(dim=-1) < params[name]).sum())
            expected[keys < keys[order[min(last, len(order) - 1)]]] = -torch.inf
        assert torch.equal(filtered.isfinite(), expected.isfinite())


def test_ids_without_a_logit_are_ignored() -> None:
    """Image placeholders in prompts, and a tokenizer's ids beyond a smaller head."""
    row = make_row(
        prompt=[-1, 500, 3],
        output=[5, 900],
        repetition_penalty=2.0,
        no_repeat_ngram_size=1,
        logit_bias={700: 5.0},
        bad_words_ids=((800,),),
        min_tokens=9,
        stop_token_ids=(901,),
    )
    logits = fixed_logits()
    np.testing.assert_allclose(
        transform(logits, row), ref_ban(ref_repetition(logits, [3, 5], 2.0), [3, 5, *EOS]), rtol=1e-6
    )


# Greedy


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_is_argmax_with_the_lowest_id_of_equals(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-torch.inf, -2.0, -1.0, -torch.inf]])
    drawn = outputs(logits.to(device), [make_row() for _ in range(3)])
    assert drawn == [RowOutput([1]), RowOutput([0]), RowOutput([2])]


def test_greedy_fast_path_is_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that ask for nothing pay for nothing over the vocabulary but the argmax."""
    touched: list[str] = []
    argmax = ops.argmax

    def recorded_argmax(logits: torch.Tensor) -> torch.Tensor:
        touched.append("argmax")
        with torch.utils._python_dispatch._disable_current_modes():
            return argmax(logits)

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if max((a.numel() for a in args if isinstance(a, torch.Tensor)), default=0) > 8:
                touched.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(ops, "argmax", recorded_argmax)
    logits = torch.randn(8, 1000)
    rows = [make_row(top_k=5, top_p=0.5) for _ in range(8)]
    with Recorder():
        outputs(logits, rows)
    assert touched == ["argmax"]


def test_greedy_applies_the_transforms_but_not_the_filters() -> None:
    logits = fixed_logits(seed=0)
    best = int(logits.argmax())
    assert best not in EOS
    banned = make_row(bad_words_ids=((best,),), top_k=1)
    drawn = tokens(torch.tensor(logits, dtype=torch.float32)[None], [banned])
    assert drawn == [int(ref_ban(logits, [best]).argmax())]


def test_mixed_batch_equals_its_rows_alone() -> None:
    rng = random.Random(8)
    rows = [
        SamplingRow(random_params(rng), rng.choices(range(200), k=20), 5, EOS, rng.getrandbits(64))
        for _ in range(64)
    ]
    assert 5 < sum(row.params.is_greedy for row in rows) < 59
    logits = torch.stack([next_logits(row) for row in rows])
    together = outputs(logits.clone(), rows)
    for i, row in enumerate(rows):
        assert outputs(logits[i : i + 1].clone(), [row]) == [together[i]]


def test_empty_batch() -> None:
    assert tokens(torch.empty(0, VOCAB), []) == []


# Rows without a distribution


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5},
        {"repetition_penalty": 1.5, "logprobs": 3},
    ],
)
def test_bad_logits_are_an_error_of_their_row_only(params: dict[str, Any], device: str) -> None:
    good = torch.tensor(fixed_logits(), dtype=torch.float32)
    bad_rows = [good.clone() for _ in range(3)]
    bad_rows[0][7] = torch.nan
    bad_rows[1][7] = torch.inf
    bad_rows[2][:] = -torch.inf
    batch = torch.stack([good, *bad_rows, good]).to(device)
    rows = [make_row(seed=3, **params) for _ in range(5)]
    drawn = outputs(batch, rows)
    assert [len(output.token_ids) for output in drawn] == [1, 0, 0, 0, 1]
    assert ["finite" in output.error for output in drawn] == [False, True, True, True, False]
    alone = outputs(good[None].clone().to(device), rows[:1])
    assert drawn[0].token_ids == drawn[4].token_ids == alone[0].token_ids
    assert [output.logprobs is None for output in drawn] == [
        "logprobs" not in params or bool(output.error) for output in drawn
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_are_lifted(temperature: float) -> None:
    """A request that bans every token goes on as without bans; penalties and its neighbours stay."""
    logits = fixed_logits()
    everything = tuple((token,) for token in range(VOCAB) if token not in EOS)
    params: dict[str, Any] = {
        "temperature": temperature,
        "bad_words_ids": everything,
        "min_tokens": 99,
        "presence_penalty": 2.0,
    }
    impossible = make_row(**params)
    possible = make_row(temperature=temperature, bad_words_ids=everything[1:], min_tokens=99)
    plain = make_row(temperature=temperature, presence_penalty=2.0)
    batch = torch.tensor(logits, dtype=torch.float32).repeat(3, 1)
    token_ids = tokens(batch, [impossible, possible, plain])
    assert token_ids[0] == token_ids[2]
    assert token_ids[1] == 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-45},
        {"temperature": 1e-6, "top_p": 0.5},
        {"temperature": 100.0, "top_p": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1e-45},
        {"temperature": 1.0, "repetition_penalty": 100.0},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
        {"temperature": 1.0, "typical_p": 1e-30, "top_p": 1e-30, "min_p": 1.0, "top_k": 1},
    ],
)
def test_extreme_parameters_always_give_a_token(params: dict[str, Any]) -> None:
    largest = torch.finfo(torch.float32).max
    rows = [make_row(seed=seed, **params) for seed in range(20)]
    for logits in (
        torch.tensor(fixed_logits(), dtype=torch.float32),
        torch.zeros(VOCAB),
        torch.full((VOCAB,), -largest),
        torch.full((VOCAB,), largest),
        torch.tensor([largest, -largest] * (VOCAB // 2)),
        torch.tensor([0.0, *[-torch.inf] * (VOCAB - 1)]),
    ):
        assert all(0 <= token_id < VOCAB for token_id in tokens(logits.repeat(20, 1), rows))


def test_low_temperature_becomes_greedy() -> None:
    logits = fixed_logits()
    rows = [make_row(seed=seed, temperature=1e-4) for seed in range(200)]
    assert set(tokens(torch.tensor(logits, dtype=torch.float32).repeat(200, 1), rows)) == {
        int(logits.argmax())
    }


# Log-probabilities


def test_logprobs_are_the_models_before_any_transform() -> None:
    logits = fixed_logits(seed=0)
    expected = np.log(softmax(logits))
    order = np.argsort(-logits)
    assert order[0] not in EOS
    rows = [
        make_row(logprobs=0),
        make_row(logprobs=3, temperature=1.3, seed=4, repetition_penalty=1.9, top_k=30),
        make_row(),
        make_row(logprobs=64, bad_words_ids=((int(order[0]),),)),
    ]
    drawn = outputs(torch.tensor(logits, dtype=torch.float32).repeat(4, 1), rows)
    assert drawn[2].logprobs is None
    for i, count in ((0, 0), (1, 3), (3, VOCAB)):
        (entry,) = drawn[i].logprobs or ()
        assert entry is not None
        assert entry.token_ids == [*drawn[i].token_ids, *order[:count].tolist()]
        np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], rtol=1e-5, atol=1e-6)
    assert drawn[3].token_ids == [order[1]]


def test_ends_of_a_beam_are_not_candidates_once_for_each_beam() -> None:
    """256 stop ids made 8224 candidates of each of 32 beams, and a step in which all others waited seconds
    for their order."""
    row = make_row(beam_width=32, stop_token_ids=tuple(range(256)))
    assert row.num_candidates == 32 + 256 + len(EOS)
    assert make_row(beam_width=2, ignore_eos=True).num_candidates == 2
