"""Roofline: the least that a step must read and compute, and how near to the machine's limits it came."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Row = tuple[int, int, bool]
"""(num_computed_tokens, num_scheduled_tokens, whether it samples) of a row of a step."""


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that have to be read from memory, and floating point operations."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Bytes that a model reads and operations that it computes. Weights count once per step, with the bytes
    that they take in memory. Activations, looked up rows of the embedding table and everything that is
    written count nothing."""

    layer_bytes: int
    """Bytes of the weights of all layers; of a layer's experts only as many count as one token chooses."""
    layer_flops: int
    """Operations of all layers' matrix products for one token, attention apart."""
    head_bytes: int
    """Bytes of the output head, which only steps that sample read."""
    head_flops: int
    """Operations of the output head for one row of logits."""
    kv_token_bytes: int
    """Bytes of one token's keys and values in one layer."""
    pair_flops: int
    """Operations of attention between one query token and one key token in one layer."""
    windows: tuple[int | None, ...]
    """How many positions a token sees in each layer, itself included; None: all."""

    def of_step(self, rows: Iterable[Row]) -> Work:
        """The least that a step with these rows takes."""
        tokens = keys = pairs = draws = 0
        by_window = {window: self.windows.count(window) for window in dict.fromkeys(self.windows)}
        for computed, count, samples in rows:
            tokens += count
            draws += samples
            for window, num_layers in by_window.items():
                before = computed if window is None else min(computed, window - 1)
                keys += num_layers * (before + count)
                pairs += num_layers * _num_pairs(computed, count, window)
        if not tokens:
            return Work()
        num_bytes = self.layer_bytes + keys * self.kv_token_bytes + (self.head_bytes if draws else 0)
        return Work(num_bytes, tokens * self.layer_flops + pairs * self.pair_flops + draws * self.head_flops)


def _num_pairs(computed: int, count: int, window: int | None) -> int:
    """Pairs of one of `count` tokens behind `computed` ones with each token that it sees."""
    growing = count if window is None else max(0, min(count, window - computed))
    pairs = growing * computed + growing * (growing + 1) // 2
    return pairs if window is None else pairs + (count - growing) * window


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The most that was measured on a device."""

    bytes_s: float
    """Read from memory."""
    flops_s: float
    """Operations per second, in large matrix products."""
    method: str
    """How they were measured."""

    def compare(self, work: Work, seconds: float) -> dict[str, float | str]:
        """Shares of the limits that `work`, done in `seconds`, has used.

        Returns:
            `mbu` and `mfu` (shares of the limits of memory and of products), `bound`: "memory" or "compute",
            whichever needs longer at its limit, and `of_limit`: how much of the time that one needs.
        """
        mbu, mfu = work.num_bytes / self.bytes_s / seconds, work.flops / self.flops_s / seconds
        bound = "memory" if mbu >= mfu else "compute"
        return {"mbu": mbu, "mfu": mfu, "bound": bound, "of_limit": max(mbu, mfu)}
