"""Sampling in PyTorch, with a sort: the meaning of `ops.sample`, not its speed."""

from __future__ import annotations

import torch

from quire_kernels.reference.elementwise import argmax
from quire_kernels.registry import implementation
from quire_kernels.sampling import LogitEdits, SamplingTensors

_MASK = 0xFFFFFFFF
MIN_TEMPERATURE = 1e-6


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1) with 53 random bits: Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        seeds: int64 [n], the bits of an unsigned key.
        positions: int64 [n], the low half of the counter.

    Returns:
        float64 [n], a pure function of each pair.
    """
    k0, k1 = seeds & _MASK, (seeds >> 32) & _MASK
    c0, c1 = positions & _MASK, (positions >> 32) & _MASK
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    # The upper 53 of 64 bits.
    return ((c0 << 21) | (c1 >> 11)).double() * 2.0**-53


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of a product of 32-bit numbers: in parts, since int64 would overflow into its sign."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16) + (low >> 16)
    return (high >> 16) & _MASK, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


_Places = tuple[torch.Tensor, torch.Tensor]
"""Rows and columns of logits, int32 or int64 [m] each."""


def _penalise(
    logits: torch.Tensor,
    at: _Places,
    output_counts: torch.Tensor,
    factors: torch.Tensor,
    newest: torch.Tensor | None,
) -> None:
    """The penalties of `LogitEdits`, in place.

    Args:
        logits: float32 [n, vocab_size].
        at: the penalised ones, no two the same.
        output_counts: float32 [m].
        factors: float32 [3, n].
        newest: int64 [n] or None.
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
    """float32 [m]; factors [3, m]: repetition, presence, frequency."""
    repetition, presence, frequency = factors.unbind()
    penalised = torch.where(values < 0, values * repetition, values / repetition)
    penalised = penalised - frequency * output_counts - presence * (output_counts > 0)
    # A tiny repetition penalty may overflow, and an infinite maximum would make the softmax NaN. Infinite
    # logits of the model itself are left for the check at the end.
    penalised = penalised.clamp(max=torch.finfo(torch.float32).max)
    return torch.where(values.isinf(), values, penalised)


def _ban(logits: torch.Tensor, at: _Places) -> None:
    """The bans of `LogitEdits`, in place; logits float32 [n, vocab_size], places may repeat."""
    saved = logits[at]
    logits[at] = -torch.inf
    nothing_left = logits.amax(dim=-1)[at[0]] == -torch.inf
    logits[at] = torch.where(nothing_left, saved, -torch.inf)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """All edits of `LogitEdits`, in place; logits float32 [n, vocab_size]."""
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
    if rows.edits is not None:
        edit_logits(logits, rows.edits)
    best = argmax(logits)
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
    target = philox_uniform(rows.seeds, rows.positions) * cumulative[:, -1]
    # Below the sum, so that the token found always has a positive weight.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    return torch.where((rows.temperature > 0) & (best >= 0), drawn, best)
