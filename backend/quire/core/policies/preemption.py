"""PreemptionCost: chooses between recomputing a preempted request and swapping its blocks."""

from __future__ import annotations

from collections.abc import Callable

FADE = 1.0 - 1.0 / 32.0
"""Weight of the measurements so far when a new one is added."""

Rates = Callable[[], tuple[float | None, float | None]]
"""Returns the measured bytes per second from the pool to the KV tiers, and back; None: not measured."""


class PreemptionCost:
    """Compares the time to recompute tokens with the time to move their blocks out and back.

    Mode `auto` chooses the smaller time by measured rates; the other modes are fixed. While no prefill was
    measured, `auto` recomputes. After that it swaps while no copy out was measured, to obtain a measurement.
    A copy back that was not measured is assumed as fast as the copy out. Copies that overlap with steps count
    in full.

    Args:
        mode: recompute, swap or auto.
        block_bytes: bytes of a block; 0: unknown, and `auto` recomputes.
        rates: returns the measured rates (out, back) of copies in bytes per second; None: not measured.
    """

    def __init__(self, mode: str, block_bytes: int, rates: Rates) -> None:
        assert mode in ("recompute", "swap", "auto"), mode
        self._mode = mode
        self._block_bytes = block_bytes
        self._rates = rates
        self._tokens = self._seconds = 0.0

    def on_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records a step that computed `num_tokens` prompt tokens in `seconds`."""
        if num_tokens > 0 and seconds > 0:
            self._tokens = self._tokens * FADE + num_tokens
            self._seconds = self._seconds * FADE + seconds

    def should_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Returns whether to swap `num_blocks` blocks rather than recompute `num_tokens` tokens."""
        if self._mode != "auto":
            return self._mode == "swap"
        if not self._tokens or not self._block_bytes:
            return False
        out, back = self._rates()
        if out is None:
            return True
        move_s = num_blocks * self._block_bytes * (1 / out + 1 / (back or out))
        return move_s < num_tokens * self._seconds / self._tokens
