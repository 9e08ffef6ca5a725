"""KV groups: layers that need the same past share a block table. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class KVGroup(NamedTuple):
    """Layers of one attention window; layer `layers[i]` lies at position i of the group's blocks."""

    window: int | None
    """Positions a token sees, itself included; None: all."""
    layers: tuple[int, ...]


_MOST_WASTE = 0.1
"""Largest share of the blocks of layers with one window that may belong to no layer."""


def kv_groups(windows: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Groups of one size, so that blocks of all groups are alike and come from one pool.

    Each group costs a block table, so groups are as large as they can be: all layers of a uniform model. The
    last group of layers with a window may hold fewer than the others: 29 layers with a window and 5 without
    are six groups (of 5, the last of 4) and one, not 34 of one layer each. Groups of the layers that see most
    are always full, as theirs is the memory that grows with the sequence. Groups that see everything come
    first.

    Args:
        windows: per layer, positions a token sees or None.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    counts = {math.inf if window is None else window: len(layers) for window, layers in by_window.items()}
    widest = counts.pop(max(counts))
    size = max(
        size
        for size in range(1, widest + 1)
        if widest % size == 0
        and all(math.ceil(count / size) * size <= count * (1 + _MOST_WASTE) for count in counts.values())
    )
    ordered = sorted(by_window.items(), key=lambda item: (item[0] is not None, item[0] or 0))
    return tuple(
        KVGroup(window, tuple(layers[first : first + size]))
        for window, layers in ordered
        for first in range(0, len(layers), size)
    )


def layers_per_group(groups: Sequence[KVGroup]) -> int:
    """Layers that a block has room for."""
    return max(len(group.layers) for group in groups)


def blocks_per_sequence(
    groups: Sequence[KVGroup], num_tokens: int, block_size: int, max_step_tokens: int
) -> int:
    """Most blocks that one sequence of `num_tokens` holds at any time, over all groups.

    A group with a window holds what the first token of a step sees and what the step's tokens fill: at most
    window - 1 + max_step_tokens positions, which may begin in the middle of a block. The blocks behind the
    window must be given back before those of the next step are taken.

    Args:
        groups: of the model.
        num_tokens: prompt and output, all computed.
        block_size: tokens per block.
        max_step_tokens: most tokens of one sequence that a step computes.
    """
    whole = math.ceil(num_tokens / block_size)
    total = 0
    for window, _ in groups:
        if window is None:
            total += whole
        else:
            positions = window - 1 + min(max_step_tokens, num_tokens)
            total += min(whole, math.ceil(positions / block_size) + 1)
    return total
