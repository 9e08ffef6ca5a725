"""Roofline: estimates the bytes and operations of a step, and how close it came to the device's limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Row = tuple[int, int, bool]
"""(num_computed_tokens, num_scheduled_tokens, whether the row samples) of a row of a step."""


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read from memory, and floating point operations."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Numbers of a model from which the bytes that a step reads and the operations that it computes are
    estimated.

    Weights count once per step, with their bytes in memory. Activations, states, rows of the embedding table
    and everything that is written do not count.
    """

    layer_bytes: int
    """Bytes of the weights of all linear layers but the output head; of a layer's experts, only as many count
    as one token uses."""
    layer_flops: int
    """Operations of all layers' matrix products for one token, without attention."""
    head_bytes: int
    """Bytes of the output head; they count in steps that sample."""
    head_flops: int
    """Operations of the output head for one row of logits."""
    kv_token_bytes: int
    """Bytes that one layer with attention keeps in the KV cache for one token."""
    pair_flops: int
    """Operations of attention between one query token and one key token in one layer."""
    windows: tuple[int | None, ...]
    """Most positions that a token sees, including its own, for each layer with attention; None: no limit."""

    def of_step(self, rows: Iterable[Row]) -> Work:
        """Returns the estimated work of a step with these rows."""
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
    """Returns the number of (query, key) pairs of `count` tokens after `computed` ones, each with the tokens
    that it sees."""
    growing = count if window is None else max(0, min(count, window - computed))
    pairs = growing * computed + growing * (growing + 1) // 2
    return pairs if window is None else pairs + (count - growing) * window


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Highest rates that were measured on a device."""

    bytes_s: float
    """Bytes per second read from memory."""
    flops_s: float
    """Operations per second in a large matrix product."""
    method: str
    """How the rates were measured."""

    def compare(self, work: Work, seconds: float) -> dict[str, float | str]:
        """Compares `work`, done in `seconds`, with the limits.

        Returns:
            `mbu` and `mfu`: reached fractions of the memory and of the compute limit. `bound`: "memory" or
            "compute", whichever would take longer at its limit. `of_limit`: that longer time as a fraction of
            `seconds`, the larger of `mbu` and `mfu`.
        """
        mbu, mfu = work.num_bytes / self.bytes_s / seconds, work.flops / self.flops_s / seconds
        bound = "memory" if mbu >= mfu else "compute"
        return {"mbu": mbu, "mfu": mfu, "bound": bound, "of_limit": max(mbu, mfu)}
