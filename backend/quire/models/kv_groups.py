"""KV groups: layers that share a block table because they keep the same kind of past. This past is the keys
and values of all tokens, the keys and values of the tokens in a window, or a state. This module does not
import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

STATE_WINDOW = 2
"""Window of a group of states: a token needs only the state after the token before it."""


class KVGroup(NamedTuple):
    """Layers that keep the same kind of past. Layer `layers[i]` has position i in the group's blocks.

    Layers with attention keep keys and values of all tokens, or of those in a window. Other layers (linear
    attention, Mamba-2, short convolutions) keep a state: a fixed number of bytes that each token changes. One
    block has room for the states of a group's layers, however many tokens the request has. An encoder has one
    group, though its layers keep nothing.
    """

    window: int | None
    """Positions that a token sees, itself included; None: all. STATE_WINDOW in a group of states."""
    layers: tuple[int, ...]
    state_bytes: int = 0
    """Bytes of the state of one layer; 0: the layers keep keys and values."""

    @property
    def is_state(self) -> bool:
        """Whether the layers keep a state."""
        return self.state_bytes > 0


_MOST_WASTE = 0.1
"""Most unused layer places that groups of one kind of layer may have, as a fraction of that kind's layers."""


def kv_groups(
    windows: Sequence[int | None], state_bytes: Mapping[int, int] = MappingProxyType({})
) -> tuple[KVGroup, ...]:
    """Divides the layers into groups of one size, so that all groups' blocks are alike and come from one
    pool.

    Each group costs a block table, so groups are as large as _MOST_WASTE allows: a uniform model has one. The
    last group of a kind (one window, or one size of states) may hold fewer layers than the others. Example:
    29 layers with a window and 5 without make six groups with a window (five of 5 layers, one of 4) and one
    without, instead of 34 groups of one layer. The groups of the layers that see most positions are always
    full, because they hold most blocks. Groups without a window come first, groups of states last.

    Args:
        windows: for each layer, the positions that a token sees; None: all. Ignored for layers with a state.
        state_bytes: bytes of a layer's state, by layer, for the layers that keep one.
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
    """Returns the number of layers that a block has room for."""
    return max(len(group.layers) for group in groups)


def blocks_per_sequence(
    groups: Sequence[KVGroup], num_tokens: int, block_size: int, max_step_tokens: int
) -> int:
    """Returns a number of blocks, in all groups together, that a sequence of `num_tokens` never exceeds.

    A group with a window holds what the first token of a step sees and what the step's tokens fill: at most
    window - 1 + max_step_tokens positions, which may begin in the middle of a block. The caller must free the
    blocks before the window before it allocates those of the next step. A state at the end of a block is
    copied to another block before it changes again, so the sequence briefly holds both.

    Args:
        groups: the model's KV groups.
        num_tokens: number of prompt and output tokens.
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
