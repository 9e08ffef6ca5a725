"""Groups of layers that share a block table, and the blocks a sequence needs over all of them."""

from __future__ import annotations

import pytest

from quire.models.kv_groups import KVGroup, blocks_per_sequence, kv_groups, layers_per_group


def test_layers_of_one_window_are_one_group() -> None:
    assert kv_groups([None] * 3) == (KVGroup(None, (0, 1, 2)),)
    assert kv_groups([12, 12]) == (KVGroup(12, (0, 1)),)


@pytest.mark.row("C14")
def test_groups_of_mixed_layers_have_one_size_and_hold_every_layer_once() -> None:
    assert kv_groups([8, None, 8, None]) == (KVGroup(None, (1, 3)), KVGroup(8, (0, 2)))
    # Five sliding layers for one that sees everything, twice, as in Gemma 3.
    groups = kv_groups(([16] * 5 + [None]) * 2)
    assert groups[0] == KVGroup(None, (5, 11))
    assert [group.window for group in groups[1:]] == [16] * 5
    assert groups[1] == KVGroup(16, (0, 1)) and groups[5] == KVGroup(16, (9, 10))
    # A group of two would be half empty: one layer each.
    assert [group.layers for group in kv_groups([4, 4, None])] == [(2,), (0,), (1,)]


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "room"), [(26, 7, 4), (34, 7, 5), (48, 6, 8), (62, 13, 5)]
)
def test_the_gemma3_models_have_few_groups_and_little_waste(
    num_layers: int, num_groups: int, room: int
) -> None:
    """One layer in six sees everything; 34 and 62 layers have 5 and 10 of them, and 29 and 52 others."""
    windows = [None if (layer + 1) % 6 == 0 else 1024 for layer in range(num_layers)]
    groups = kv_groups(windows)
    assert (len(groups), layers_per_group(groups)) == (num_groups, room)
    sliding = [group for group in groups if group.window is not None]
    assert len(sliding) * room <= 1.1 * (num_layers - num_layers // 6)
    assert all(len(group.layers) == room for group in groups if group.window is None)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


def first_needed_block(window: int | None, num_computed: int, block_size: int) -> int:
    return 0 if window is None else max(0, num_computed - window + 1) // block_size


@pytest.mark.row("C14")
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 33])
@pytest.mark.parametrize("chunk", [1, 3, 16, 50, 1000])
def test_no_sequence_needs_more_blocks_than_stated(block_size: int, window: int | None, chunk: int) -> None:
    """Any sequence in chunks that begin anywhere, followed by decode."""
    num_tokens, groups = 120, (KVGroup(window, (0,)),)
    stated = blocks_per_sequence(groups, num_tokens, block_size, chunk)
    worst = 0
    for first_chunk in range(1, min(chunk, num_tokens) + 1):
        computed, count = 0, first_chunk
        while computed < num_tokens:
            end = min(computed + count, num_tokens)
            worst = max(worst, -(-end // block_size) - first_needed_block(window, computed, block_size))
            computed, count = end, chunk
    assert worst <= stated <= worst + 1
    assert blocks_per_sequence(groups * 3, num_tokens, block_size, chunk) == 3 * stated


def test_long_sequences_need_no_more_than_short_ones_beyond_the_window() -> None:
    groups = kv_groups([32, 32])
    assert blocks_per_sequence(groups, 10_000, 16, 64) == blocks_per_sequence(groups, 1_000, 16, 64) == 7
    mixed = kv_groups([32, None])
    assert blocks_per_sequence(mixed, 1_600, 16, 64) == 100 + 7
