"""Sampling in PyTorch, for all rows of a batch at once. Used for typical-p, or without C++ or CUDA kernels.

Top-k and top-p compute only rows that use either, typical-p only rows that use it. The host must know these
rows, so with a GPU it waits for the device. The draw's cumulative sums have two levels: over chunks, then
within the chosen chunk. Both are float64; only the sum of each chunk is float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire_kernels.registry import implementation, select
from quire_kernels.sampling import LogitEdits, SamplingTensors

MIN_TEMPERATURE = 1e-6
_CANDIDATES = 1024
"""Most tokens of a row, beginning with the best, that top-k, top-p or typical-p sorts. If they do not
suffice, the row's whole vocabulary is examined."""
_CHUNK = 256
_Words = npt.NDArray[np.uint64]
_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)
"""Sums that Philox has added to the two words of the key before each round: uint64 [10, 2, 1]."""


def philox_uniform(seeds: _Words, positions: _Words) -> npt.NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) with 53 random bits. Each is a pure function of its seed and
    position.

    Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the seed as
    key and the position as the low half of the counter.

    Args:
        seeds: [n] uint64.
        positions: [n] uint64.

    Returns:
        [n] float64.
    """
    words = philox4x32(seeds, positions)
    bits = (words[0] << np.uint64(32)) | words[1]
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def philox4x32(
    keys: _Words,
    counters: _Words,
    counters_high: _Words | None = None,
) -> list[_Words]:
    """Computes ten rounds of Philox4x32 for 64-bit keys [n] and 128-bit counters, given as halves [n] (no
    high half: 0). Returns four arrays [n] of 32-bit words, held in uint64."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = np.array([counters, np.zeros_like(counters) if counters_high is None else counters_high])
    even, odd = counter & low, counter >> half
    for key in (np.array([keys & low, keys >> half]) + _KEY_STEPS) & low:
        product = even * _FACTORS
        even, odd = (product >> half)[::-1] ^ odd ^ key, (product & low)[::-1]
    return [even[0], odd[0], even[1], odd[1]]


_Places = tuple[torch.Tensor, torch.Tensor]
"""Rows and columns of some logits, int32 or int64 [m] each."""


def _penalise(
    logits: torch.Tensor,
    at: _Places,
    output_counts: torch.Tensor,
    factors: torch.Tensor,
    newest: torch.Tensor | None,
) -> None:
    """Applies the penalties of `LogitEdits` in place.

    Args:
        logits: float32 [n, vocab_size].
        at: places of the listed tokens' logits, all different.
        output_counts: float32 [m]; see `LogitEdits`.
        factors: float32 [3, n]; see `LogitEdits`.
        newest: int64 [n], or None; see `LogitEdits`.
    """
    rows, token_ids = at
    if newest is not None:
        is_newest = token_ids == newest[rows]
        output_counts = output_counts + is_newest
        is_listed = torch.zeros_like(newest).index_add_(0, rows, is_newest.long()) > 0
        place = torch.arange(len(newest), device=newest.device), newest.clamp(min=0)
        values = logits[place]
        penalised = _penalised(values, torch.ones_like(values), factors)
        logits[place] = torch.where((newest >= 0) & ~is_listed, penalised, values)
    logits[at] = _penalised(logits[at], output_counts, factors[:, rows])


def _penalised(values: torch.Tensor, output_counts: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns penalised logits, float32 [m]. `factors` [3, m]: repetition, presence, frequency."""
    repetition, presence, frequency = factors.unbind()
    penalised = torch.where(values < 0, values * repetition, values / repetition)
    penalised = penalised - frequency * output_counts - presence * (output_counts > 0)
    # A tiny repetition penalty may overflow, and an infinite maximum would make the softmax NaN. Infinite
    # logits of the model itself are left for the check at the end.
    penalised = penalised.clamp(max=torch.finfo(torch.float32).max)
    return torch.where(values.isinf(), values, penalised)


def _ban(logits: torch.Tensor, at: _Places) -> None:
    """Applies the bans of `LogitEdits` in place. `logits`: float32 [n, vocab_size]. Places may repeat."""
    saved = logits[at]
    logits[at] = -torch.inf
    nothing_left = logits.amax(dim=-1)[at[0]] == -torch.inf
    logits[at] = torch.where(nothing_left, saved, -torch.inf)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """Applies all edits of `LogitEdits` in place. `logits`: float32 [n, vocab_size]."""
    penalty_starts, bias_starts, ban_starts = edits.starts.unbind()
    if len(edits.penalty_ids) or edits.newest is not None:
        at = _places(penalty_starts, edits.penalty_ids)
        _penalise(logits, at, edits.output_counts, edits.factors, edits.newest)
    if len(edits.bias_ids):
        logits[_places(bias_starts, edits.bias_ids)] += edits.biases
    if len(edits.ban_ids):
        _ban(logits, _places(ban_starts, edits.ban_ids))


def _places(starts: torch.Tensor, token_ids: torch.Tensor) -> _Places:
    # With its size given, torch does not ask the device for the sum.
    return torch.repeat_interleave(starts.diff(), output_size=token_ids.shape[0]), token_ids


@implementation("sample", "reference")
def sample(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """See `ops.sample`."""
    argmax = select("argmax", logits.device.type, logits.dtype)
    if rows.edits is not None:
        edit_logits(logits, rows.edits)
    draws = _numbers(rows.temperature) > 0
    if draws.all():
        return _draw(logits, rows)
    if not draws.any():
        return argmax(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    best, drawn = _index(~draws, logits), _index(draws, logits)
    token_ids[best] = argmax(logits[best])
    token_ids[drawn] = _draw(logits[drawn], rows.select_rows(drawn))
    return token_ids


def _draw(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """Draws a token for each row of logits [n, V]. Returns int64 [n]; -1 if the row's maximum is not finite.
    No row's temperature may be 0."""
    best, best_ids = logits.max(dim=-1)
    # Shifted first: dividing by a small temperature could overflow otherwise.
    scores = (logits - best[:, None]).div_(rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None])
    filter_scores(scores, rows.top_k, rows.top_p, rows.min_p, rows.typical_p)
    seeds, positions = (_numbers(words).view(np.uint64) for words in (rows.seeds, rows.positions))
    uniform = torch.from_numpy(philox_uniform(seeds, positions)).to(logits.device)
    token_ids = _inverse_cdf(scores, uniform)
    # Rounding may in principle point at a removed token; the most likely one always remains.
    removed = scores.gather(1, token_ids[:, None]).squeeze(1) == -torch.inf
    token_ids = torch.where(removed, best_ids, token_ids)
    return torch.where(best.isfinite(), token_ids, -1)


def filter_scores(
    scores: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None,
) -> None:
    """Applies top-k, top-p, min-p and typical-p in place, in this order.

    Args:
        scores: [n, V] float32, divided by the temperature. A row's maximum is 0, unless the row has NaN.
        top_k: [n]; for this and the other arguments see `SamplingTensors`.
    """
    ks, masses = _numbers(top_k), _numbers(top_p)
    ranked = (ks > 0) | (masses < 1)
    if ranked.any():
        part = _select_rows(scores, ranked)
        _filter_ranked(part, ks[ranked], masses[ranked])
        _put(scores, ranked, part)
    if _numbers(min_p).any():
        # p < min_p * p_max is score < log(min_p), because the maximum is 0.
        scores.masked_fill_(scores < min_p.log()[:, None], -torch.inf)
    if typical_p is not None:
        masses = _numbers(typical_p)
        typical = masses < 1
        part = _select_rows(scores, typical)
        _filter_typical(part, masses[typical])
        _put(scores, typical, part)


def _filter_ranked(scores: torch.Tensor, ks: npt.NDArray[Any], masses: npt.NDArray[Any]) -> None:
    """Applies top-k [n], then top-p [n] to the remaining tokens, in place. `scores`: [n, V]."""
    vocab_size = scores.shape[1]
    # The width is fixed, not taken from the batch: no row may depend on others.
    width = min(_CANDIDATES, vocab_size)
    top = scores.topk(width).values
    ks = ks.clip(max=vocab_size)
    if ks.any():
        columns = torch.from_numpy(ks.clip(1, width).astype(np.int64) - 1).to(scores.device)
        threshold = top.gather(1, columns[:, None]).squeeze(1)
        threshold[_index(ks == 0, scores)] = -torch.inf
        for i in (ks > width).nonzero()[0].tolist():
            threshold[i] = _key_reaching(scores[i], None, int(ks[i]))
        scores.masked_fill_(scores < threshold[:, None], -torch.inf)
        top = top.masked_fill(top < threshold[:, None], -torch.inf)

    cut = masses < 1
    if cut.any():
        part, top = _select_rows(scores, cut), _select_rows(top, cut)
        total = part.logsumexp(dim=-1, keepdim=True)
        probs = (part - total).exp()
        threshold = _mass_threshold(part, top, (top - total).exp(), probs, masses[cut])
        part.masked_fill_(part < threshold[:, None], -torch.inf)
        _put(scores, cut, part)


def _filter_typical(scores: torch.Tensor, masses: npt.NDArray[Any]) -> None:
    """Applies typical-p [n] in place. `scores`: [n, V]."""
    log_probs = torch.log_softmax(scores, dim=-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(dim=-1, keepdim=True)
    closeness = -(log_probs + entropy).abs()
    near, order = closeness.topk(min(_CANDIDATES, scores.shape[1]))
    threshold = _mass_threshold(closeness, near, probs.gather(1, order), probs, masses)
    scores.masked_fill_(closeness < threshold[:, None], -torch.inf)


def _mass_threshold(
    keys: torch.Tensor,
    top_keys: torch.Tensor,
    top_probs: torch.Tensor,
    probs: torch.Tensor,
    masses: npt.NDArray[Any],
) -> torch.Tensor:
    """Returns for each row the key of the last token in the smallest set, by descending key, whose
    probability reaches `masses`. If rounding leaves no such set, returns the row's smallest key.

    Args:
        keys: [n, V] float32, numbers by which tokens are ordered.
        top_keys: [n, width], the largest keys in descending order.
        top_probs: [n, width], the probabilities of these tokens.
        probs: [n, V] float32.
        masses: [n].

    Returns:
        [n] float32; tokens with a smaller key must be removed.
    """
    width, vocab_size = top_keys.shape[1], keys.shape[1]
    wanted = torch.from_numpy(masses).double().to(keys.device)
    last = (top_probs.double().cumsum(dim=-1) < wanted[:, None]).sum(dim=-1)
    threshold = top_keys.gather(1, last.clamp(max=width - 1)[:, None]).squeeze(1)
    if width < vocab_size:
        for i in (last == width).nonzero().flatten().tolist():
            threshold[i] = _key_reaching(keys[i], probs[i], float(masses[i]))
    return threshold


def _key_reaching(keys: torch.Tensor, weights: torch.Tensor | None, target: float) -> float:
    """Returns the largest key such that all keys from it upwards weigh at least `target`; if no key does, the
    smallest key.

    It uses two histograms, of the upper and lower halves of the keys' bits. On a CPU, sorting all keys takes
    ten times as long, and any client could cause that in every step.

    Args:
        keys: [V] float32.
        weights: [V] float32; None: each key weighs 1.
        target: least weight.
    """
    values = keys.cpu().numpy() + np.float32(0.0)  # -0.0 is 0.0
    weigh = None if weights is None else weights.cpu().double().numpy()
    bits = values.view(np.uint32)
    # Descending as the floats do: 0 is the bits of the largest.
    ranks = np.where(bits >> 31, bits, ~bits & 0x7FFFFFFF)
    found = 0
    for shift in (16, 0):
        digits = (ranks >> shift & 0xFFFF).astype(np.int64)
        sums = np.bincount(digits, weigh).cumsum()
        digit = min(int(np.searchsorted(sums, target)), len(sums) - 1)
        found = found << 16 | digit
        inside = digits == digit
        target -= sums[digit - 1] if digit else 0
        ranks, weigh = ranks[inside], None if weigh is None else weigh[inside]
    bit_pattern = found if found >> 31 else ~found & 0x7FFFFFFF
    return float(np.array(bit_pattern, dtype=np.uint32).view(np.float32))


def _inverse_cdf(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first token, by id, whose cumulative probability exceeds `uniform`.

    Args:
        scores: [n, V] float32 unnormalised log-probabilities. A row's maximum is 0, unless the row has NaN.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64, valid token ids even for rows of NaN.
    """
    n, vocab_size = scores.shape
    num_chunks = -(-vocab_size // _CHUNK)
    weights = scores.new_zeros(n, num_chunks * _CHUNK)
    torch.exp(scores, out=weights[:, :vocab_size])
    chunks = weights.view(n, num_chunks, _CHUNK)
    cumulative = chunks.sum(dim=-1).double().cumsum(dim=-1)
    chunk, target = _first_above(cumulative, uniform * cumulative[:, -1])
    before = cumulative.gather(1, (chunk - 1).clamp(min=0)[:, None]).squeeze(1)
    target = torch.where(chunk > 0, target - before, target)
    inside = chunks[torch.arange(n, device=scores.device), chunk].double().cumsum(dim=-1)
    offset, _ = _first_above(inside, target)
    return (chunk * _CHUNK + offset).clamp(max=vocab_size - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the index [n] of the first entry of `cumulative` [n, m] above `target` [n], and the target
    used.

    The target is kept below the last entry, so the entry found has a positive weight, unless a row holds NaN.
    """
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return index.clamp(max=cumulative.shape[1] - 1), target


def _numbers(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns the tensor as an array on the host: a copy of a GPU's tensor, a view of another."""
    return tensor.cpu().numpy()


def _index(which: npt.NDArray[np.bool_], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(which.nonzero()[0]).to(like.device)


def _select_rows(rows: torch.Tensor, which: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Returns the rows for which `which` is true: a copy, or `rows` itself if that is all rows."""
    return rows if which.all() else rows.index_select(0, _index(which, rows))


def _put(rows: torch.Tensor, which: npt.NDArray[np.bool_], part: torch.Tensor) -> None:
    """Writes the result of `_select_rows` back into the rows."""
    if part is not rows:
        rows[_index(which, rows)] = part
