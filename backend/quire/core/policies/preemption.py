"""PreemptionCost: whether a preempted request is computed again or moved out and back."""

from __future__ import annotations

from collections.abc import Callable

FADE = 1.0 - 1.0 / 32.0
"""Weight that the measurements so far keep with each new one."""

Rates = Callable[[], tuple[float | None, float | None]]
"""Bytes per second from the pool to the host tier and back, as measured; None: not yet."""


class PreemptionCost:
    """Weighs the time to compute tokens again against the time to move their blocks out and back.

    `recompute` and `swap` are as they say; `auto` takes the smaller time by measured rates. To learn them:
    while no copy out was measured it swaps; while no copy back was, that is taken to be as fast as the way
    out; while no prefill was, it recomputes. Copies that overlap with steps count in full.

    Args:
        mode: recompute, swap or auto.
        block_bytes: of a block; 0: not known, then auto recomputes.
        rates: of copies.
    """

    def __init__(self, mode: str, block_bytes: int, rates: Rates) -> None:
        assert mode in ("recompute", "swap", "auto"), mode
        self._mode = mode
        self._block_bytes = block_bytes
        self._rates = rates
        self._tokens = self._seconds = 0.0

    def on_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step that computed this many prompt tokens."""
        if num_tokens > 0 and seconds > 0:
            self._tokens = self._tokens * FADE + num_tokens
            self._seconds = self._seconds * FADE + seconds

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether to move `num_blocks` blocks rather than to compute `num_tokens` tokens again."""
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._tokens or not self._block_bytes:
            return False
        out, back = self._rates()
        if out is None:
            return True
        move_s = num_blocks * self._block_bytes * (1 / out + 1 / (back or out))
        return move_s < num_tokens * self._seconds / self._tokens
