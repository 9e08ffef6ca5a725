"""`ops.sample` of every implementation: against the sampler's own, the exact distribution, and itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from quire.sampling_params import SamplingParams
from quire.worker.sampler import Sampler
from quire.worker.sampling_batch import SamplingRow
from quire_kernels import ops
from quire_kernels.sampling import SamplingTensors
from tests.kernels.common import every_implementation, forced, is_interpreted, with_cases

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


def take(rows: SamplingTensors, index: slice) -> SamplingTensors:
    return SamplingTensors(**{name: value[index] for name, value in vars(rows).items()})


def sample(name: str, device: str, logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    with forced("sample", name):
        tokens = ops.sample(logits.to(device), rows)
    assert tokens.dtype == torch.int64 and tokens.shape == (logits.shape[0],)
    return tokens.cpu()


@pytest.mark.row("D10", without="penalties in the kernel: they are operations before it")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_draws_what_the_sampler_draws(kind: str) -> None:
    """The sampler sums exp in float32 chunks, the reference in float64: a draw in 10,000 may fall between."""
    count, vocab_size = 2000, 1000
    logits = draw_logits(kind, count, vocab_size)
    tokens = sample("reference", "cpu", logits, settings(count, FILTERS))
    seeds = seeds_of(count, 0)
    rows = []
    for i in range(count):
        history = [0] * i
        params = SamplingParams(**{"temperature": 1.0, **FILTERS[i % len(FILTERS)]})
        rows.append(SamplingRow(params, history, 0, frozenset(), int(seeds[i])))
    expected = torch.tensor(Sampler(vocab_size)(logits.clone(), rows).token_ids)
    assert int((tokens != expected).sum()) <= 1


@pytest.mark.row("D10", without="penalties in the kernel: they are operations before it")
@pytest.mark.parametrize(("name", "device"), OTHERS)
@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [*itertools.product(KINDS, [1000]), ("random", 9000), ("flat", 9000), ("random", 1)],
)
def test_tokens_equal_the_references(name: str, device: str, kind: str, vocab_size: int) -> None:
    """All of them: where float32 rounding decides is rarer than one draw in 10,000."""
    count = len(FILTERS) * (1 if is_interpreted(name, device) else 50)
    logits = draw_logits(kind, count, vocab_size)
    for first in (0, 2**40):
        expected = sample("reference", "cpu", logits, settings(count, FILTERS, position=first))
        tokens = sample(name, device, logits, settings(count, FILTERS, device, position=first))
        assert tokens.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "device"), OTHERS)
@pytest.mark.parametrize("kind", ["random", "flat"])
def test_tokens_that_rounding_decides_are_rare(name: str, device: str, kind: str) -> None:
    """Boundaries of probabilities lie about 1e-7 apart from the reference's; in flat rows there are many."""
    count = 1000 if is_interpreted(name, device) else 100_000
    logits = draw_logits(kind, 1, 4000).expand(count, -1)
    rows = settings(count, [{}, {"top_p": 0.7}])
    expected = sample("reference", "cpu", logits, rows)
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


@pytest.mark.row("D10", without="penalties in the kernel: they are operations before it")
@pytest.mark.parametrize(
    ("name", "device", "filters"),
    with_cases(
        IMPLEMENTATIONS,
        [{"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}],
        interpreted=1,
    ),
)
def test_draws_have_the_exact_distribution(name: str, device: str, filters: dict[str, Any]) -> None:
    """Chi-square; the seeds are fixed, so that a run is either always good or always bad."""
    count, vocab_size = 250 if is_interpreted(name, device) else 20_000, 30
    logits = draw_logits("random", 1, vocab_size, seed=4) / 2
    tokens = sample(name, device, logits.expand(count, -1), settings(count, [filters], device, seed=1))
    probs = exact(logits[0], **filters).numpy()
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    assert not counts[probs == 0].any(), "a token that a filter removes"
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
        assert int(sample(name, device, logits[i : i + 1], take(rows, slice(i, i + 1)))) == int(together[i])
    # Rows of a wider matrix, and in another order.
    flipped = torch.cat((logits, logits), 1).flip(0)[:, 3000:]
    back = SamplingTensors(**{key: value.flip(0) for key, value in vars(rows).items()})
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
    count = 30 if is_interpreted(name, device) else 200
    for filters in ({"top_k": 3}, {"top_p": 0.5}):
        tokens = sample(name, device, logits.expand(count, -1), settings(count, [filters], device))
        found = set(tokens.tolist())
        assert found <= {5, *range(10, 20)} and len(found) > 6


@pytest.mark.parametrize(("name", "device"), IMPLEMENTATIONS)
def test_the_best_token_is_the_first_of_equals(name: str, device: str) -> None:
    logits = torch.zeros(2, 6000)
    logits[:, [4500, 100, 5999]] = 7.0
    tokens = sample(
        name, device, logits, settings(2, [{"temperature": 0.0}, {"temperature": 1e-7, "top_k": 1}])
    )
    assert int(tokens[0]) == 100 and int(tokens[1]) in (100, 4500, 5999)
