"""`ops.sample` of every implementation: against its definition, the exact distribution, and itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

from quire.request.sampling_params import SamplingParams
from quire.worker import sampler as sampler_module
from quire.worker.sampler import sampling_tensors
from quire.worker.sampling_batch import SamplingRow, collect_edits
from quire_kernels import ops
from quire_kernels.cpu.compiler import supported_isas
from quire_kernels.cpu.native import set_num_threads
from quire_kernels.reference.sampling import MIN_TEMPERATURE, edit_logits, philox_uniform
from quire_kernels.sampling import SamplingTensors
from tests.fixtures import sampling
from tests.kernels.common import every_implementation, forced, with_cases

IMPLEMENTATIONS = every_implementation("sample")
OTHERS = [one for one in IMPLEMENTATIONS if one.values[0] != "reference"]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_p": 0.99},
    {"temperature": 3.0, "top_k": 40},
    {"temperature": 1e-7},
]
KINDS = ("random", "peaked", "flat", "tied", "banned")


def draw_logits(kind: str, rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    logits = 2 * torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed))
    if kind == "peaked":
        return 6 * logits
    if kind == "flat":
        return logits / 1000
    if kind == "tied":
        return logits.round()
    if kind == "banned":
        logits[:, 3::2] = -math.inf
    return logits


def settings(
    count: int, filters: list[dict[str, Any]], device: str = "cpu", *, seed: int = 0, position: int = 0
) -> SamplingTensors:
    """Row i has filters i, i modulo their number; seeds use all 64 bits."""
    chosen = [filters[i % len(filters)] for i in range(count)]

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([one.get(name, default) for one in chosen], dtype=dtype).to(device)

    return SamplingTensors(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=torch.from_numpy(seeds_of(count, seed).view(np.int64)).to(device),
        positions=torch.arange(position, position + count).to(device),
    )


def seeds_of(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def defined(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """`ops.sample` with a sort of everything and sums in float64; no typical-p."""
    if rows.edits is not None:
        edit_logits(logits, rows.edits)
    best = ops.argmax(logits)
    peak = logits.max(dim=-1, keepdim=True).values
    scores = (logits - peak) / rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    ordered = scores.sort(dim=-1, descending=True).values
    last = torch.where(rows.top_k > 0, rows.top_k, logits.shape[1]).clamp(max=logits.shape[1]) - 1
    threshold = ordered.gather(1, last.long()[:, None])
    scores = scores.masked_fill(scores < threshold, -torch.inf)
    ordered = ordered.masked_fill(ordered < threshold, -torch.inf)
    mass = ordered.double().softmax(dim=-1).cumsum(dim=-1)
    last = (mass < rows.top_p[:, None].double()).sum(dim=-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    threshold = torch.where(rows.top_p[:, None] < 1, ordered.gather(1, last), -torch.inf)
    scores = scores.masked_fill(scores < threshold, -torch.inf)
    scores = scores.masked_fill(scores < rows.min_p[:, None].log(), -torch.inf)
    cumulative = scores.double().exp().cumsum(dim=-1)
    words = (words.numpy().view(np.uint64) for words in (rows.seeds, rows.positions))
    target = torch.from_numpy(philox_uniform(*words)) * cumulative[:, -1]
    # Below the sum, so that the token found always has a positive weight.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    return torch.where((rows.temperature > 0) & (best >= 0), drawn, best)


def sample(name: str, device: str, logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """int64 [n] on the CPU, of rows on `device`: kernels get addresses, and cannot see where those are."""
    for part in (rows, rows.edits):
        for column in vars(part).values() if part is not None else ():
            assert not isinstance(column, torch.Tensor) or column.device.type == device
    with forced("sample", name):
        tokens = ops.sample(logits.to(device), rows)
    assert tokens.dtype == torch.int64 and tokens.shape == (logits.shape[0],)
    return tokens.cpu()


@pytest.mark.row("D10")
@pytest.mark.parametrize("kind", KINDS)
def test_reference_and_sampler_draw_what_is_defined(kind: str) -> None:
    """The reference sums exp in float32 chunks, not in float64: a draw in 10,000 may fall between."""
    count, vocab_size = 2000, 1000
    logits = draw_logits(kind, count, vocab_size)
    tokens = defined(logits, settings(count, FILTERS))
    found = sample("reference", "cpu", logits, settings(count, FILTERS))
    assert int((tokens != found).sum()) <= 1
    seeds = seeds_of(count, 0)
    rows = []
    for i in range(count):
        history = [0] * i
        params = SamplingParams(**{"temperature": 1.0, **FILTERS[i % len(FILTERS)]})
        rows.append(SamplingRow(params, history, 0, frozenset(), int(seeds[i])))
    expected = torch.tensor(sampling.tokens(logits.clone(), rows))
    assert int((tokens != expected).sum()) <= 1


@pytest.mark.row("D10", clauses=("filters",))
@pytest.mark.parametrize(
    ("name", "device", "drawn"),
    with_cases(
        OTHERS,
        [("random", 9000), *itertools.product(KINDS, [1000]), ("flat", 9000), ("random", 1)],
    ),
)
def test_tokens_are_those_defined(name: str, device: str, drawn: tuple[str, int]) -> None:
    """All of them: where float32 rounding decides is rarer than one draw in 10,000."""
    kind, vocab_size = drawn
    count = len(FILTERS) * 50
    logits = draw_logits(kind, count, vocab_size)
    for first in (0, 2**40):
        tokens = sample(name, device, logits, settings(count, FILTERS, device, position=first))
        assert tokens.tolist() == defined_tokens(kind, vocab_size, count, first)


@functools.cache
def defined_tokens(kind: str, vocab_size: int, count: int, first: int) -> list[int]:
    """Once for all implementations, as sorting takes longer than they do."""
    logits = draw_logits(kind, count, vocab_size)
    return list(map(int, defined(logits, settings(count, FILTERS, position=first))))


def hard_logits(vocab_size: int) -> torch.Tensor:
    """Rows on which searches for thresholds go astray: equal and nearly equal numbers, both zeros, one number
    alone, numbers without weight, a few that weigh as much as all others, pieces that hold all large ones."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = torch.randn((12, vocab_size), generator=generator)
    rows[1] = 3.0
    rows[2] = (rows[2] > 0).float() * -0.0
    rows[3, : vocab_size - 1] = -math.inf
    rows[4] = rows[4].round()
    rows[5] *= 1e-6
    rows[6] *= 30
    rows[7, :5] = rows[7].logsumexp(0)
    rows[8, : vocab_size // 3] += 20
    rows[9] -= 27 + rows[9].amax()
    rows[9, vocab_size // 2] = 0.0
    rows[10] = torch.linspace(-3e38, 3e38, vocab_size)
    rows[11] = torch.linspace(0, -60, vocab_size)
    return rows


@pytest.mark.row("A12")
@pytest.mark.parametrize("vocab_size", [1, 15, 17, 257, 5000, 20_000])
def test_hard_rows_are_the_same_on_every_instruction_set(vocab_size: int) -> None:
    """Those defined, but where rounding of a sum over so many decides; with any number of threads."""
    filters = [
        *FILTERS,
        {"top_p": 1e-30},
        {"top_p": 0.9999},
        {"top_p": 0.5, "temperature": 0.01},
        {"top_k": vocab_size, "top_p": 0.7},
        {"top_k": max(vocab_size - 1, 1)},
        {"top_k": vocab_size // 3 + 1},
        {"top_k": 2000, "top_p": 0.3, "temperature": 20.0},
    ]
    each = hard_logits(vocab_size)
    logits = each.repeat_interleave(len(filters), 0)
    rows = settings(len(logits), filters)
    names = [one.values[0] for one in OTHERS if one.values[0] in supported_isas()]
    found = {name: sample(name, "cpu", logits, rows) for name in names}
    for tokens in found.values():
        assert torch.equal(tokens, found[names[0]])
        assert int((tokens != defined(logits, rows)).sum()) <= (0 if vocab_size <= 257 else 2)
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            set_num_threads(count)
            assert torch.equal(sample(names[0], "cpu", logits, rows), found[names[0]])
    finally:
        set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), OTHERS)
@pytest.mark.parametrize("kind", ["random", "flat"])
def test_tokens_that_rounding_decides_are_rare(name: str, device: str, kind: str) -> None:
    """Boundaries of probabilities lie about 1e-7 apart from the defined; in flat rows there are many."""
    count = 100_000
    logits = draw_logits(kind, 1, 4000).expand(count, -1)
    rows = settings(count, [{}, {"top_p": 0.7}])
    expected = defined(logits, rows)
    tokens = sample(name, device, logits, settings(count, [{}, {"top_p": 0.7}], device))
    missed = int((tokens != expected).sum())
    print(f"\n{name}, {kind}: {missed} of {count} tokens differ")
    assert missed <= 2 + count // 5000


def exact(logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """float64 probabilities by the definitions, for a row without ties."""
    probs = logits.double().softmax(-1)
    order = probs.argsort(descending=True)
    if top_k:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    if top_p < 1:
        reached = int((probs[order].cumsum(0) < top_p).sum())
        probs[order[reached + 1 :]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.row("D10")
@pytest.mark.parametrize(
    ("name", "device", "filters"),
    with_cases(
        IMPLEMENTATIONS,
        [{"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}],
    ),
)
def test_draws_have_the_exact_distribution(name: str, device: str, filters: dict[str, Any]) -> None:
    """Chi-square; the seeds are fixed, so that a run is either always good or always bad."""
    count, vocab_size = 20_000, 30
    logits = draw_logits("random", 1, vocab_size, seed=4) / 2
    tokens = sample(name, device, logits.expand(count, -1), settings(count, [filters], device, seed=1))
    check_distribution(tokens, exact(logits[0], **filters))


def check_distribution(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    probs, count = probabilities.numpy(), len(tokens)
    counts = np.bincount(tokens.numpy(), minlength=len(probs))
    assert not counts[probs == 0].any(), "a token that was removed"
    # Rare tokens together, so that every cell expects five.
    rare = (probs * count < 5) & (probs > 0)
    got, want = [*counts[~rare & (probs > 0)]], [*(count * probs[~rare & (probs > 0)])]
    if rare.any():
        got, want = [*got, counts[rare].sum()], [*want, count * probs[rare].sum()]
    assert stats.chisquare(got, want).pvalue > 1e-3


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_a_row_does_not_depend_on_the_batch(name: str, device: str) -> None:
    count = len(FILTERS)
    logits = draw_logits("random", count, 3000, seed=3)
    rows = settings(count, FILTERS, device)
    together = sample(name, device, logits, rows)
    for i in range(0, count, 3):
        row = rows.select_rows(torch.tensor([i]))
        assert int(sample(name, device, logits[i : i + 1], row)) == int(together[i])
    # Rows of a wider matrix, and in another order.
    flipped = torch.cat((logits, logits), 1).flip(0)[:, 3000:]
    back = rows.select_rows(torch.arange(count).flip(0))
    assert torch.equal(sample(name, device, flipped, back).flip(0), together)


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_rows_that_are_not_finite_have_no_token(name: str, device: str) -> None:
    logits = draw_logits("random", 12, 5000)
    logits[1, 4990], logits[3, 0] = math.nan, math.inf
    logits[5], logits[7, :] = -math.inf, math.nan
    logits[9], logits[9, 4321] = -math.inf, -3e38
    logits[10] = 3e38
    for filters in ({}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0.0}):
        tokens = sample(name, device, logits, settings(12, [filters], device))
        bad = [1, 3, 5, 7]
        assert tokens[bad].tolist() == [-1] * 4 and int(tokens[9]) == 4321
        rest = [i for i in range(12) if i not in bad]
        assert all(0 <= token < 5000 for token in tokens[rest].tolist())


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_tokens_tied_with_the_last_one_are_kept(name: str, device: str) -> None:
    logits = torch.full((1, 40), -4.0)
    logits[0, 5], logits[0, 10:20] = 2.0, 1.0
    count = 200
    for filters in ({"top_k": 3}, {"top_p": 0.5}):
        tokens = sample(name, device, logits.expand(count, -1), settings(count, [filters], device))
        found = set(tokens.tolist())
        assert found <= {5, *range(10, 20)} and len(found) > 6


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_a_mass_of_exactly_top_p_is_enough(name: str, device: str) -> None:
    """Four tokens in order whose probabilities are 1/4 in every arithmetic: one more is one too many."""
    order = [30, 7, 21, 3]
    logits = torch.full((1, 40), -torch.inf)
    logits[0, order] = torch.tensor([0.0, -1e-30, -2e-30, -3e-30])
    count = 400
    for top_p, num_kept in ((0.25, 1), (0.5, 2), (0.75, 3), (0.3125, 2), (0.8125, 4)):
        rows = settings(count, [{"top_p": top_p}], device)
        found = set(sample(name, device, logits.expand(count, -1), rows).tolist())
        assert found == set(order[:num_kept]), top_p


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_the_best_token_is_the_first_of_equals(name: str, device: str) -> None:
    logits = torch.zeros(2, 6000)
    logits[:, [4500, 100, 5999]] = 7.0
    filters: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1e-7, "top_k": 1}]
    tokens = sample(name, device, logits, settings(2, filters, device))
    assert int(tokens[0]) == 100 and int(tokens[1]) in (100, 4500, 5999)


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_typical_p_is_drawn_whoever_is_chosen(name: str, device: str) -> None:
    """Kernels without it leave such a batch to the reference; 1 is none. The token whose surprise is
    nearest to the entropy is not the best one."""
    probs = torch.tensor([0.5, 0.3, 0.2])
    logits = probs.log().repeat(4, 1)
    rows = settings(4, [{}, {"temperature": 0.0}], device)
    typical = torch.tensor([1e-6, 1e-6, 1.0, 1e-6], device=device)
    wanted = dataclasses.replace(
        rows, typical_p=typical, temperature=torch.tensor([1.0, 0.0, 1.0, 1.0]).to(device)
    )
    tokens = sample(name, device, logits, wanted)
    assert tokens[[0, 1, 3]].tolist() == [1, 0, 1]
    assert tokens[2] == defined(logits, settings(4, [{}]))[2]


# Penalties, biases and bans

EOS = 2


def ragged_rows(count: int, vocab_size: int, seed: int) -> list[SamplingRow]:
    """Rows that edit logits in every way or not at all; the last one bans every token."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        # Ids without a logit are among the tokens, and few others, so that tokens and n-grams repeat.
        tokens = [draw.randrange(-1, min(vocab_size, 12) + 2) for _ in range(draw.randint(1, 30))]
        params: dict[str, Any] = {**FILTERS[i % len(FILTERS)]}
        params.setdefault("temperature", 1.0)
        if draw.random() < 0.6:
            params["repetition_penalty"] = draw.choice([1.0, 0.5, 1.3, 1e-45, 100.0])
            params["presence_penalty"] = draw.choice([0.0, 0.5, -2.0])
            params["frequency_penalty"] = draw.choice([0.0, 0.7, -0.3])
        if draw.random() < 0.4:
            biased = draw.sample(range(vocab_size + 2), draw.randint(1, min(vocab_size, 8)))
            params["logit_bias"] = {token: draw.choice([-100.0, 100.0, 0.37]) for token in biased}
        if draw.random() < 0.4:
            words = draw.choices(range(vocab_size + 2), k=draw.randint(1, 8))
            # Twice each, and once more where the n-gram says so.
            params["bad_words_ids"] = tuple((word,) for word in words + words)
            params["no_repeat_ngram_size"] = draw.choice([0, 1, 2])
        if draw.random() < 0.3:
            params["min_tokens"] = draw.choice([1, 1000])
        if i == count - 1:
            # Backwards, so that no thread finds its own tokens lifted.
            params["bad_words_ids"] = tuple((token,) for token in reversed(range(vocab_size)))
            params["min_tokens"], params["temperature"] = 1000, 0.0
        prompt = draw.randint(0, len(tokens))
        rows.append(
            SamplingRow(SamplingParams(**params), tokens, prompt, frozenset({EOS}), draw.getrandbits(64))
        )
    # More penalties than a kernel has threads.
    rows[0] = SamplingRow(
        SamplingParams(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.1),
        list(range(vocab_size)),
        vocab_size // 2,
        frozenset({EOS}),
        7,
    )
    return rows


def ragged_logits(rows: list[SamplingRow], vocab_size: int, seed: int) -> torch.Tensor:
    """Some rows hold NaN, infinities, or numbers that overflow; in two only the banned tokens are finite."""
    logits = draw_logits("random", len(rows), vocab_size, seed)
    logits[:, 1::5] = -math.inf
    logits[3, 0], logits[4, 3], logits[5, 3] = math.nan, math.inf, -math.inf
    logits[6], logits[7] = -math.inf, torch.finfo(torch.float32).max
    logits[8] = -logits[7]
    edits = collect_edits(rows, vocab_size)
    assert edits is not None
    sizes = np.diff(edits["starts"][2])
    row_of = np.repeat(np.arange(len(rows)), sizes)
    banning = (i for i, size in enumerate(sizes) if 0 < size < vocab_size // 2 and i > 8)
    for row, rest in zip(banning, (-math.inf, math.nan), strict=False):
        banned = edits["ban_ids"][row_of == row].tolist()
        logits[row] = rest
        logits[row, banned] = 1.0
    return logits


def edited(logits: torch.Tensor, rows: list[SamplingRow], newest: torch.Tensor | None = None) -> torch.Tensor:
    """What the sampler's own operations, which tests/unit/test_sampler.py checks, make of the logits."""
    out = logits.clone()
    tensors = sampling_tensors(rows, collect_edits(rows, logits.shape[1]), newest, logits.device)
    assert tensors.edits is not None
    edit_logits(out, tensors.edits)
    return out


def forget_newest(rows: list[SamplingRow]) -> tuple[list[SamplingRow], torch.Tensor]:
    """The rows with an output before the host knows its last token; and that token, of others any."""
    pending, newest = [], []
    for row in rows:
        has_output = row.num_output_tokens > 0
        tokens = row.token_ids[:-1] if has_output else row.token_ids
        arguments = (row.params, tokens, row.num_prompt_tokens, row.eos_token_ids, row.seed)
        pending.append(SamplingRow(*arguments, num_pending=int(has_output)))
        newest.append(row.token_ids[-1] if has_output else 3)
    return pending, torch.tensor(newest)


def without_ngrams(rows: list[SamplingRow], highest: int) -> list[SamplingRow]:
    """Rows whose edits depend on which tokens there are by penalties alone, tokens up to `highest`."""
    found = []
    for row in rows:
        fields = {name: getattr(row.params, name) for name in SamplingParams.__struct_fields__}
        params = SamplingParams(**{**fields, "no_repeat_ngram_size": 0})
        tokens = [min(token, highest) for token in row.token_ids]
        found.append(SamplingRow(params, tokens, row.num_prompt_tokens, row.eos_token_ids, row.seed))
    return found


@pytest.mark.row("D10", clauses=("edits",))
@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("count", "vocab_size"), [(40, 40), (20, 2500)])
def test_edits_are_those_of_the_sampler(name: str, device: str, count: int, vocab_size: int) -> None:
    """The edited logits to the last bit, the reference's tokens, and a row alone as among the others."""
    rows = ragged_rows(count, vocab_size, seed=vocab_size)
    logits = ragged_logits(rows, vocab_size, seed=vocab_size)
    expected = edited(logits, rows)
    assert expected[-1].isfinite().any(), "bans of everything are lifted"
    tensors = sampling_tensors(rows, collect_edits(rows, vocab_size), None, torch.device(device))
    assert tensors.edits is not None
    sizes = tensors.edits.starts.diff()
    assert bool(((sizes == 0).any(1) & (sizes > 0).any(1)).all()), "rows with and without each of the edits"

    there = logits.to(device, copy=True)
    tokens = sample(name, device, there, tensors)
    torch.testing.assert_close(there.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    known = sampling_tensors(rows, collect_edits(rows, vocab_size), None, torch.device("cpu"))
    assert tokens.tolist() == defined(logits.clone(), known).tolist()
    assert 0 < int((tokens < 0).sum()) < count // 2

    for i in range(0, count, 7):
        own = sampling_tensors(
            rows[i : i + 1], collect_edits(rows[i : i + 1], vocab_size), None, tensors.seeds.device
        )
        alone = logits[i : i + 1].to(device, copy=True)
        assert int(sample(name, device, alone, own)) == int(tokens[i])
        torch.testing.assert_close(alone[0].cpu(), expected[i], rtol=0, atol=0, equal_nan=True)


@pytest.mark.row("D10")
@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
@pytest.mark.parametrize(("count", "vocab_size"), [(40, 40), (20, 2500)])
def test_a_token_counts_that_only_the_device_knows(
    name: str, device: str, count: int, vocab_size: int
) -> None:
    """As if the host knew it, to the last bit: in the list of penalties, beside it, or there is none."""
    rows = without_ngrams(ragged_rows(count, vocab_size, seed=vocab_size), vocab_size - 1)
    next(row for row in rows if row.has_penalties and row.num_output_tokens).token_ids[-1] = -1
    logits = ragged_logits(ragged_rows(count, vocab_size, seed=vocab_size), vocab_size, seed=vocab_size)
    expected = edited(logits, rows)
    pending, newest = forget_newest(rows)
    penalised = [
        (row, token) for row, token in zip(pending, newest.tolist(), strict=True) if row.is_uncounted
    ]
    listed = [token in row.token_ids for row, token in penalised if token >= 0]
    assert any(listed) and not all(listed) and any(token < 0 for _, token in penalised)
    torch.testing.assert_close(edited(logits, pending, newest), expected, rtol=0, atol=0, equal_nan=True)

    tensors = sampling_tensors(
        pending, collect_edits(pending, vocab_size), newest.to(device), torch.device(device)
    )
    there = logits.to(device, copy=True)
    tokens = sample(name, device, there, tensors)
    torch.testing.assert_close(there.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    known = sampling_tensors(rows, collect_edits(rows, vocab_size), None, torch.device("cpu"))
    assert tokens.tolist() == defined(logits.clone(), known).tolist()


@pytest.mark.row("D10", clauses=("greedy",))
@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_the_sampler_gives_what_it_gives_by_the_reference(name: str, device: str) -> None:
    """Tokens, log-probabilities before the edits, and candidates of beam search after them."""
    count, vocab_size = 40, 300
    rows = ragged_rows(count, vocab_size, seed=1)
    for i in range(10, count, 3):
        kind = {"logprobs": 3} if i % 2 else {"beam_width": 2, "temperature": 0.0}
        fields = {name: getattr(rows[i].params, name) for name in SamplingParams.__struct_fields__}
        params = SamplingParams(**{**fields, **kind})
        rows[i] = SamplingRow(params, rows[i].token_ids, rows[i].num_prompt_tokens, frozenset({EOS}), i)
    assert any(row.is_beam and row.has_penalties for row in rows)
    assert any(row.params.is_greedy and row.has_penalties and not row.is_beam for row in rows)
    logits = ragged_logits(rows, vocab_size, seed=2)
    with forced("sample", "reference"):
        expected = sampling.outputs(logits.clone(), rows)
    greedy = [row for row in rows if row.params.is_greedy]
    greedy_logits = logits[[i for i, row in enumerate(rows) if row.params.is_greedy]]
    with forced("sample", "reference"):
        expected_greedy = sampling.outputs(greedy_logits.clone(), greedy)
    with forced("sample", name):
        got = sampling.outputs(logits.to(device, copy=True), rows)
        got_greedy = sampling.outputs(greedy_logits.to(device, copy=True), greedy)
    for one, other in ((got, expected), (got_greedy, expected_greedy)):
        for mine, theirs in zip(one, other, strict=True):
            assert mine.token_ids == theirs.token_ids and mine.error == theirs.error
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            if mine.logprobs is not None and theirs.logprobs is not None:
                assert mine.logprobs[0].token_ids == theirs.logprobs[0].token_ids
                np.testing.assert_allclose(mine.logprobs[0].logprobs, theirs.logprobs[0].logprobs, rtol=1e-5)


@pytest.mark.row("D10")
def test_what_rows_ask_for_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[list[str]] = []
    together = sampler_module.to_device_together

    def counted(arrays: Any, device: torch.device) -> Any:
        copies.append(list(arrays))
        return together(arrays, device)

    def never(*_: Any) -> None:
        raise AssertionError("a copy of its own")

    monkeypatch.setattr(sampler_module, "to_device_together", counted)
    monkeypatch.setattr(sampler_module, "to_device", never)
    rows = ragged_rows(40, 40, seed=3)
    sampling.outputs(ragged_logits(rows, 40, seed=3), rows)
    assert len(copies) == 1 and "penalty_ids" in copies[0]
    plain = [SamplingRow(SamplingParams(temperature=1.0), [1], 1, frozenset(), 0)] * 2
    sampling.outputs(torch.zeros(2, 40), plain)
    assert copies[1:] == [["words", "floats"]], "nothing more than before for rows without edits"


def test_edits_of_the_reference_do_not_wait_for_the_device() -> None:
    """A fake tensor has no numbers: whatever asks for one, as a synchronisation does, is an error."""
    rows, _ = forget_newest(ragged_rows(40, 40, seed=4))
    tensors = sampling_tensors(rows, collect_edits(rows, 40), torch.arange(40), torch.device("cpu"))
    assert tensors.edits is not None
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in vars(tensors.edits).items()}
        edit_logits(torch.zeros(40, 40), type(tensors.edits)(**fake))


@functools.cache
def many_edits(
    count: int, vocab_size: int, tokens: tuple[int, ...], num_prompt: int, temperature: float, device: str
) -> SamplingTensors:
    """Rows with every edit, of a seed each; once for all implementations, as they take longer to collect."""
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 1.5, 20: 2.0, 21: 3.0},
        bad_words_ids=((21,), (22,), (21,)),
    )
    rows = [
        SamplingRow(params, list(tokens), num_prompt, frozenset(), int(seed)) for seed in seeds_of(count, 6)
    ]
    return sampling_tensors(rows, collect_edits(rows, vocab_size), None, torch.device(device))


@pytest.mark.row("D10")
@pytest.mark.parametrize(("name", "device", "temperature"), with_cases(IMPLEMENTATIONS, [1.0, 0.6]))
def test_draws_with_edits_have_the_exact_distribution(name: str, device: str, temperature: float) -> None:
    """As above, with penalties, a bias and bans by their definitions in float64."""
    count, vocab_size = 20_000, 30
    logits = draw_logits("random", 1, vocab_size, seed=5)[0]
    prompt, output = [4, 9, 9], [5, 6, 5, 5, 11]
    tensors = many_edits(count, vocab_size, (*prompt, *output), len(prompt), temperature, device)
    tokens = sample(name, device, logits.repeat(count, 1).to(device), tensors)
    scores = logits.double()
    for token in {*prompt, *output}:
        scores[token] = scores[token] * 1.4 if scores[token] < 0 else scores[token] / 1.4
        scores[token] -= 0.2 * output.count(token) + 0.3 * (token in output)
    scores[[5, 20]] += torch.tensor([1.5, 2.0], dtype=torch.float64)
    scores[[21, 22]] = -math.inf
    check_distribution(tokens, (scores / temperature).softmax(-1))
