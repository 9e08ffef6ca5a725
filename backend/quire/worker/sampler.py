"""Sampler: logits in, one token per row out.

Every row is computed by operations that look at that row only, and its random number is a pure function
of (seed, output position), so that a request's tokens do not depend on the batch around it, on preemption
or on a restart.

Why inverse-CDF with one Philox number per draw, and not Gumbel-max: Gumbel-max needs a random number per
vocabulary entry (10 million for 64 rows of 150k), while one number per row is drawn on the CPU in
microseconds, by the same integers on every device. The CDF is evaluated in two levels (sums of chunks,
then within the chosen chunk) in float64, so that no float32 running sum over the vocabulary exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch

from quire.outputs import TokenLogprobs
from quire.sampling_params import MAX_LOGPROBS
from quire.worker.device import to_device, to_device_together
from quire.worker.sampling_batch import (
    Edits,
    SamplingRow,
    collect_edits,
    edit_arrays,
)
from quire_kernels import ops
from quire_kernels.reference.sampling import edit_logits
from quire_kernels.sampling import LogitEdits, SamplingTensors

__all__ = ["NO_TOKEN", "Sampler", "SamplerOutput", "SamplingRow", "philox_uniform"]

NO_TOKEN = -1
"""Stands for the token of a row that could not be sampled."""

_CANDIDATES = 1024
"""How many of the largest logits are sorted before a row falls back to sorting its whole vocabulary."""
_CHUNK = 256
_MIN_TEMPERATURE = 1e-6
_BAD_LOGITS = "the model produced logits that are NaN or have no finite maximum"


@dataclass(slots=True)
class SamplerOutput:
    """One entry per row, in the order of the rows."""

    token_ids: list[int]
    """`NO_TOKEN` for rows in `errors`."""
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    """Row index to message, for rows whose logits hold NaN or have no finite maximum."""


@dataclass(slots=True)
class Draw:
    """What was drawn, still on the device of the logits: only `output` needs it on the host."""

    token_ids: torch.Tensor
    """int64 [N]"""
    wanted: list[tuple[int, int]] = field(default_factory=list)
    """(row, how many log-probabilities beside the chosen token's) of rows that asked for them."""
    logprobs: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64, float32) [len(wanted), most + 1]: ids and log-probabilities, the chosen token first."""
    beams: list[tuple[int, int]] = field(default_factory=list)
    """(row, number of candidates) of rows of beam search."""
    candidates: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64, float32) [len(beams), most]: ids and log-probabilities in descending order."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        return [self.token_ids, *(self.logprobs or ()), *(self.candidates or ())]

    def output(self, tensors: Sequence[torch.Tensor] | None = None) -> SamplerOutput:
        """The draw on the host; `tensors`: copies of `self.tensors` there, if there are any already."""
        lists = [tensor.tolist() for tensor in (self.tensors if tensors is None else tensors)]
        chosen: list[int] = lists.pop(0)
        logprobs: list[TokenLogprobs | None] = [None] * len(chosen)
        if self.logprobs is not None:
            ids, values = lists.pop(0), lists.pop(0)
            for place, (row, count) in enumerate(self.wanted):
                if chosen[row] != NO_TOKEN:
                    logprobs[row] = TokenLogprobs(ids[place][: count + 1], values[place][: count + 1])
        if self.candidates is not None:
            ids, values = lists.pop(0), lists.pop(0)
            for place, (row, count) in enumerate(self.beams):
                if chosen[row] != NO_TOKEN:
                    # The best one stands in front, as the chosen token does elsewhere.
                    logprobs[row] = TokenLogprobs(
                        ids[place][:1] + ids[place][:count], values[place][:1] + values[place][:count]
                    )
        return SamplerOutput(chosen, logprobs, _errors(chosen))


def philox_uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, a pure function of (seed, position) per element.

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
    keys: npt.NDArray[np.uint64],
    counters: npt.NDArray[np.uint64],
    counters_high: npt.NDArray[np.uint64] | None = None,
) -> list[npt.NDArray[np.uint64]]:
    """Ten rounds of Philox4x32; four arrays [n] of 32-bit words held in uint64."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = keys & low, keys >> shift
    high = np.zeros_like(counters) if counters_high is None else counters_high
    c0, c1, c2, c3 = counters & low, counters >> shift, high & low, high >> shift
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return [c0, c1, c2, c3]


class Sampler:
    """Chooses the next token of each row.

    Order of the transforms: repetition penalty, presence and frequency penalties, logit bias, bans
    (n-grams, bad words, min-tokens masks), then for rows that sample temperature, top-k, top-p, min-p,
    typical-p. A bias cannot revive a banned token. Ties: greedy takes the lowest id; a filter keeps every
    token tied with the last one it keeps, so that the outcome does not depend on the order of a sort.

    When the bans leave a row no token at all, the row's bans are lifted for that step: a request that
    asked for the impossible gets its most plausible violation instead of an error in mid-stream.

    Log-probabilities are those of the model: log-softmax of the logits before any transform.

    Rows of beam search get their best candidates instead. As in transformers, penalties and bans apply to
    their log-probabilities, which are not normalised again: `TokenLogprobs` then holds the best token, and
    behind it the row's `num_candidates` best ones in descending order, that first one among them.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __call__(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """As `draw`, with the result on the host."""
        return self.draw(logits, rows).output()

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], newest: torch.Tensor | None = None
    ) -> Draw:
        """Samples one token per row.

        Args:
            logits: [N, vocab_size] float32, any device; may be changed in place.
            rows: N rows.
            newest: int64 [N], on the device of the logits: the token before the one to be drawn, of rows
                that are `is_uncounted`; None: there are no such rows.
        """
        assert logits.shape == (len(rows), self.vocab_size), (logits.shape, len(rows), self.vocab_size)
        assert logits.dtype == torch.float32, logits.dtype
        if not rows:
            return Draw(torch.empty(0, dtype=torch.int64))

        beams = [i for i, row in enumerate(rows) if row.is_beam]
        if beams:
            logits[_index(beams, logits)] = torch.log_softmax(_take(logits, beams), dim=-1)
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and not row.is_beam]
        raw = torch.log_softmax(_take(logits, wanted), dim=-1) if wanted else None

        edits = collect_edits(rows, self.vocab_size)
        assert newest is not None or edits is None or edits.uncounted is None, "the newest tokens are needed"
        drawn = Draw(self._choose(logits, rows, edits, newest))
        if raw is not None:
            drawn.wanted = [(i, rows[i].params.logprobs or 0) for i in wanted]
            drawn.logprobs = _logprobs(raw, _take(drawn.token_ids, wanted))
        if beams:
            drawn.beams = [(i, rows[i].num_candidates) for i in beams]
            most = min(max(count for _, count in drawn.beams), self.vocab_size)
            values, ids = _take(logits, beams).topk(most)
            drawn.candidates = ids, values
        return drawn

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        edits: Edits | None,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """[N, V] -> int64 [N]; makes the edits, too."""
        sampling = [i for i, row in enumerate(rows) if not (row.params.is_greedy or row.is_beam)]
        if edits is None and not sampling:
            return ops.argmax(logits)
        if _is_fused(logits.device) and not any(rows[i].params.typical_p < 1.0 for i in sampling):
            return ops.sample(logits, sampling_tensors(rows, edits, newest, logits.device))
        if edits is not None:
            apply_edits(logits, rows, edits, newest)
        if not sampling:
            return ops.argmax(logits)
        if len(sampling) == len(rows):
            return _sample(logits, rows)
        greedy = [i for i, row in enumerate(rows) if row.params.is_greedy or row.is_beam]
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        token_ids[_index(greedy, logits)] = ops.argmax(_take(logits, greedy))
        token_ids[_index(sampling, logits)] = _sample(_take(logits, sampling), [rows[i] for i in sampling])
        return token_ids


def _is_fused(device: torch.device) -> bool:
    """Whether `ops.sample` draws there: on a CPU single operations are faster than the reference's sort."""
    return device.type != "cpu"


def sampling_tensors(
    rows: Sequence[SamplingRow], edits: Edits | None, newest: torch.Tensor | None, device: torch.device
) -> SamplingTensors:
    """What `ops.sample` needs; rows of beam search count as greedy. One copy to the device.

    Args:
        rows: N rows.
        edits: of these rows, from `collect_edits`.
        newest: see `Sampler.draw`.
        device: of the logits.
    """
    floats = np.empty((3, len(rows)), dtype=np.float32)
    words = np.empty((3, len(rows)), dtype=np.int64)
    for i, row in enumerate(rows):
        params = row.params
        is_greedy = params.is_greedy or row.is_beam
        floats[:, i] = 0.0 if is_greedy else params.temperature, params.top_p, params.min_p
        words[:, i] = params.top_k, np.uint64(row.seed).astype(np.int64), row.num_output_tokens
    arrays = {} if edits is None else edit_arrays(rows, edits)
    there = to_device_together({"words": words, "floats": floats, **arrays}, device)
    top_k, seeds, positions = there["words"].unbind()
    temperature, top_p, min_p = there["floats"].unbind()
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k.int(),
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        edits=None if edits is None else _logit_edits(there, newest),
    )


def _errors(token_ids: list[int]) -> dict[int, str]:
    return {i: _BAD_LOGITS for i, token_id in enumerate(token_ids) if token_id == NO_TOKEN}


def _logit_edits(there: Mapping[str, torch.Tensor], newest: torch.Tensor | None) -> LogitEdits:
    """Of the arrays of `edit_arrays`, on the device."""
    names = (field.name for field in fields(LogitEdits) if field.name != "newest")
    uncounted = there.get("uncounted")
    known = None if newest is None or uncounted is None else torch.where(uncounted, newest, -1)
    return LogitEdits(**{name: there[name] for name in names}, newest=known)


def apply_edits(
    logits: torch.Tensor, rows: Sequence[SamplingRow], edits: Edits, newest: torch.Tensor | None
) -> None:
    """The edits of the rows, in place; logits [N, V] float32, `newest` see `Sampler.draw`."""
    edit_logits(logits, _logit_edits(to_device_together(edit_arrays(rows, edits), logits.device), newest))


def apply_filters(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Top-k, top-p, min-p and typical-p, in place, as transformers' warpers in that order.

    Args:
        scores: [n, V] float32, scaled by the temperature, each row's maximum 0.
        rows: n rows.
    """
    ranked = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1.0]
    if ranked:
        part = _take(scores, ranked)
        _filter_ranked(part, [rows[i] for i in ranked])
        scores[_index(ranked, scores)] = part

    min_p = [row.params.min_p for row in rows]
    if any(min_p):
        # p < min_p * p_max is score < log(min_p), because the maximum is 0.
        floor = [math.log(value) if value > 0 else -math.inf for value in min_p]
        threshold = torch.tensor(floor, dtype=torch.float32).to(scores.device)
        scores.masked_fill_(scores < threshold[:, None], -torch.inf)

    typical = [i for i, row in enumerate(rows) if row.params.typical_p < 1.0]
    if typical:
        part = _take(scores, typical)
        log_probs = torch.log_softmax(part, dim=-1)
        probs = log_probs.exp()
        entropy = -(log_probs * probs).nansum(dim=-1, keepdim=True)
        closeness = -(log_probs + entropy).abs()
        masses = torch.tensor([rows[i].params.typical_p for i in typical], dtype=torch.float64)
        width = min(_CANDIDATES, scores.shape[1])
        near, order = closeness.topk(width)
        threshold = _mass_threshold(closeness, near, probs.gather(1, order), probs, masses.to(scores.device))
        scores[_index(typical, scores)] = part.masked_fill(closeness < threshold[:, None], -torch.inf)


def _filter_ranked(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Top-k, then top-p over what top-k left; scores [n, V], in place."""
    vocab_size = scores.shape[1]
    # The width is fixed, not taken from the batch: see the module's first paragraph.
    width = min(_CANDIDATES, vocab_size)
    top = scores.topk(width).values
    ks = [min(row.params.top_k, vocab_size) for row in rows]
    if any(ks):
        columns = _index([min(max(k, 1), width) - 1 for k in ks], scores)
        threshold = top.gather(1, columns[:, None]).squeeze(1)
        limited = torch.tensor([k > 0 for k in ks]).to(scores.device)
        threshold = torch.where(limited, threshold, -torch.inf)
        for i, k in enumerate(ks):
            if k > width:
                threshold[i] = _key_reaching(scores[i], None, k)
        scores.masked_fill_(scores < threshold[:, None], -torch.inf)
        top = top.masked_fill(top < threshold[:, None], -torch.inf)

    cut = [i for i, row in enumerate(rows) if row.params.top_p < 1.0]
    if cut:
        part, top = _take(scores, cut), _take(top, cut)
        total = part.logsumexp(dim=-1, keepdim=True)
        masses = torch.tensor([rows[i].params.top_p for i in cut], dtype=torch.float64)
        probs = (part - total).exp()
        threshold = _mass_threshold(part, top, (top - total).exp(), probs, masses.to(scores.device))
        scores[_index(cut, scores)] = part.masked_fill(part < threshold[:, None], -torch.inf)


def _mass_threshold(
    keys: torch.Tensor,
    top_keys: torch.Tensor,
    top_probs: torch.Tensor,
    probs: torch.Tensor,
    masses: torch.Tensor,
) -> torch.Tensor:
    """The key of the last token of the smallest set, by descending key, whose probability reaches `masses`.

    Args:
        keys: [n, V] float32, what tokens are ordered by.
        top_keys: [n, width], the largest keys in descending order; `top_probs` their probabilities.
        probs: [n, V] float32.
        masses: [n] float64.

    Returns:
        [n] float32; tokens with a smaller key are to be removed.
    """
    width, vocab_size = top_keys.shape[1], keys.shape[1]
    last = (top_probs.double().cumsum(dim=-1) < masses[:, None]).sum(dim=-1)
    threshold = top_keys.gather(1, last.clamp(max=width - 1)[:, None]).squeeze(1)
    if width < vocab_size:
        for i in (last == width).nonzero().flatten().tolist():
            threshold[i] = _key_reaching(keys[i], probs[i], float(masses[i]))
    return threshold


def _key_reaching(keys: torch.Tensor, weights: torch.Tensor | None, target: float) -> float:
    """The largest key such that the keys from it upwards weigh at least `target`; the smallest if none does.

    By two histograms, of the upper and of the lower half of the keys' bits: on a CPU a sort of all takes ten
    times as long, and any client can make every step do it.

    Args:
        keys: [V] float32.
        weights: [V] float32; None: each key weighs 1.
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


def _sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """[n, V] -> [n] int64: one draw per row; NO_TOKEN without a finite maximum."""
    best, best_ids = logits.max(dim=-1)
    temperature = torch.tensor(
        [max(row.params.temperature, _MIN_TEMPERATURE) for row in rows], dtype=torch.float32
    ).to(logits.device)
    # Shifted first: dividing by a small temperature could overflow otherwise.
    scores = (logits - best[:, None]).div_(temperature[:, None])
    finite = best.isfinite()
    filtered = [i for i, row in enumerate(rows) if row.has_filters]
    if len(filtered) == len(rows):
        apply_filters(scores, rows)
    elif filtered:
        part = _take(scores, filtered)
        apply_filters(part, [rows[i] for i in filtered])
        scores[_index(filtered, scores)] = part
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    positions = np.array([row.num_output_tokens for row in rows], dtype=np.uint64)
    uniform = torch.from_numpy(philox_uniform(seeds, positions)).to(logits.device)
    token_ids = _inverse_cdf(scores, uniform)
    # Rounding may in principle point at a removed token; the most likely one always remains.
    removed = scores.gather(1, token_ids[:, None]).squeeze(1) == -torch.inf
    token_ids = torch.where(removed, best_ids, token_ids)
    return torch.where(finite, token_ids, NO_TOKEN)


def _inverse_cdf(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First token, by id, whose cumulative probability exceeds `uniform`.

    Args:
        scores: [n, V] float32 unnormalised log-probabilities, maximum 0.
        uniform: [n] float64 in [0, 1).

    Returns:
        [n] int64, in range also for rows of NaN.
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
    """Index [n] of the first entry of `cumulative` [n, m] above `target` [n], and the target used.

    The target is kept below the last entry, so that the entry found always has a positive weight.
    """
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return index.clamp(max=cumulative.shape[1] - 1), target


def _logprobs(log_probs: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the chosen token, then the MAX_LOGPROBS most likely ones in descending order.

    Args:
        log_probs: float32 [n, V].
        token_ids: int64 [n].

    Returns:
        ids and log-probabilities, [n, MAX_LOGPROBS + 1] or as many as there are tokens.
    """
    chosen = token_ids.clamp(min=0)[:, None]
    values, ids = log_probs.topk(min(MAX_LOGPROBS, log_probs.shape[1]))
    return torch.cat([chosen, ids], dim=1), torch.cat([log_probs.gather(1, chosen), values], dim=1)


def _index(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), like.device)


def _take(tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """A copy of rows `index` of `tensor`."""
    return tensor.index_select(0, _index(index, tensor))
