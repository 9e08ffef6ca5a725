"""KV groups: layers that need the same past share a block table. A group says what its layers keep: keys and
values of all tokens or of those in a window, or a state. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

STATE_WINDOW = 2
"""Window of a group of states: a token needs what its layers kept behind the token before it."""


class KVGroup(NamedTuple):
    """Layers that keep the same kind of past; layer `layers[i]` lies at position i of the group's blocks.

    They keep keys and values of each token, of all or of those in a window; or, as linear attention does, a
    state: a fixed number of bytes that each token changes. A state fills one block, however many tokens the
    request has.
    """

    window: int | None
    """Positions a token sees, itself included; None: all. STATE_WINDOW in a group of states."""
    layers: tuple[int, ...]
    state_bytes: int = 0
    """Bytes of the state of one layer; 0: the layers keep keys and values."""

    @property
    def is_state(self) -> bool:
        """Whether the layers keep a state."""
        return self.state_bytes > 0


_MOST_WASTE = 0.1
"""Largest share of the blocks of layers of one kind that may belong to no layer."""


def kv_groups(
    windows: Sequence[int | None], state_bytes: Mapping[int, int] = MappingProxyType({})
) -> tuple[KVGroup, ...]:
    """Groups of one size, so that blocks of all groups are alike and come from one pool.

    Each group costs a block table, so groups are as large as they can be: all layers of a uniform model. The
    last group of layers with a window may hold fewer than the others: 29 layers with a window and 5 without
    are six groups (of 5, the last of 4) and one, not 34 of one layer each. Groups of the layers that see most
    are always full, as theirs is the memory that grows with the sequence. Groups that see everything come
    first, groups of states last.

    Args:
        windows: per layer, positions a token sees or None; of no meaning for layers with a state.
        state_bytes: bytes of a state, by layer, of the layers that keep one.
    """
    by_kind: dict[tuple[int, float], list[int]] = {}  # (bytes of a state, window)
    for layer, window in enumerate(windows):
        reach = STATE_WINDOW if layer in state_bytes else math.inf if window is None else window
        by_kind.setdefault((state_bytes.get(layer, 0), reach), []).append(layer)
    ordered = sorted(by_kind.items(), key=lambda item: (item[0][0], item[0][1] < math.inf, item[0][1]))
    counts = {kind: len(layers) for kind, layers in ordered}
    widest = counts.pop(max(counts, key=lambda kind: (-kind[0], kind[1])))
    size = max(
        size
        for size in range(1, widest + 1)
        if widest % size == 0
        and all(math.ceil(count / size) * size <= count * (1 + _MOST_WASTE) for count in counts.values())
    )
    return tuple(
        KVGroup(None if reach == math.inf else int(reach), tuple(layers[first : first + size]), num_bytes)
        for (num_bytes, reach), layers in ordered
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
    window must be given back before those of the next step are taken. A state that leaves the end of a block
    is copied to the next one, so for a moment it holds both.

    Args:
        groups: of the model.
        num_tokens: prompt and output, all computed.
        block_size: tokens per block.
        max_step_tokens: most tokens of one sequence that a step computes.
    """
    whole = math.ceil(num_tokens / block_size)
    total = 0
    for group in groups:
        if group.window is None:
            total += whole
        else:
            num_new = 1 if group.is_state else max_step_tokens
            positions = group.window - 1 + min(num_new, num_tokens)
            total += min(whole, math.ceil(positions / block_size) + 1)
    return total
