"""InputBatch: what it keeps of the requests, and the flat tensors it makes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from quire.models.kv_spec import KVLayers
from quire.outputs import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.request.sampling_params import SamplingParams, choice_seed
from quire.worker.input_batch import InputBatch, StepInputs

BLOCK_SIZE = 4
NO_CACHE = cast(KVLayers, None)
"""No model computes here."""


def batch(num_groups: int = 1, max_num_seqs: int = 4) -> InputBatch:
    return InputBatch(max_num_seqs, 32, NO_CACHE, BLOCK_SIZE, torch.device("cpu"), num_groups)


def new(tokens: Sequence[int], **options: object) -> NewRequestData:
    params = SamplingParams(**options.pop("params", {}))  # type: ignore[arg-type]
    return NewRequestData(list(tokens), len(tokens), params, **options)  # type: ignore[arg-type]


def row(
    request_id: str,
    computed: int,
    count: int,
    blocks: list[list[int]],
    *,
    samples: bool = False,
    data: NewRequestData | None = None,
    given: Sequence[int] = (),
) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, count, blocks, samples, data, list(given))


def step(inputs: InputBatch, *rows: ScheduledRequest, drop: Sequence[str] = ()) -> StepInputs:
    inputs.update(SchedulerOutput(0, list(rows), list(drop)))
    return inputs.prepare(list(rows))


def slots_by_hand(blocks: list[int], first: int, count: int) -> list[int]:
    return [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for position in range(first, first + count)
    ]


def sampled(made: StepInputs) -> list[int]:
    """Rows whose tokens are drawn."""
    return [number for number, _ in made.samples]


def accept(inputs: InputBatch, request_id: str, token_id: int) -> None:
    """A token is drawn and known."""
    state = inputs.requests[request_id]
    state.on_sampled()
    state.on_token([token_id])


@pytest.mark.parametrize("num_groups", [1, 3])
def test_each_group_has_its_own_blocks_of_one_batch(num_groups: int) -> None:
    inputs = batch(num_groups)
    a = [[10 * group + 1, 10 * group + 2] for group in range(num_groups)]
    b = [[10 * group + 5] for group in range(num_groups)]
    made = step(
        inputs, row("a", 0, 6, a, data=new(range(6))), row("b", 0, 3, b, data=new([7, 8, 9]), samples=True)
    )
    assert made.forward.input_ids.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert made.forward.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert made.sample_indices.tolist() == [8] and sampled(made) == [1]
    assert made.choice_indices is None and len(made.forward.metas) == num_groups
    for group, meta in enumerate(made.forward.metas):
        assert meta.block_table.shape == (2, 2) and meta.block_table.is_contiguous()
        assert meta.block_table[0].tolist() == a[group] and meta.block_table[1, 0] == b[group][0]
        assert meta.slot_mapping.tolist() == slots_by_hand(a[group], 0, 6) + slots_by_hand(b[group], 0, 3), (
            "token i lies in block i // block_size of its group"
        )
        assert meta.slot_mapping.is_contiguous()
        assert meta.query_start_loc is made.forward.metas[0].query_start_loc
        assert meta.plans is not made.forward.metas[0].plans or group == 0
    # Later steps append.
    more = [[10 * group + 3] for group in range(num_groups)]
    inputs.requests["a"].token_ids += [6, 6, 6]
    made = step(inputs, row("a", 6, 3, more))
    for group, meta in enumerate(made.forward.metas):
        assert meta.block_table.tolist() == [[*a[group], *more[group]]]
        assert meta.slot_mapping.tolist() == slots_by_hand([*a[group], *more[group]], 6, 3)


def test_blocks_outside_the_window_become_a_valid_id() -> None:
    """A prefix hit beyond the window: the scheduler never had the first blocks."""
    made = step(batch(2), row("a", 9, 2, [[3, 4, 5], [-1, -1, 7]], data=new(range(11))))
    full, sliding = made.forward.metas
    assert full.block_table.tolist() == [[3, 4, 5]]
    assert sliding.block_table.min() >= 0 and sliding.block_table[0, 2] == 7
    assert sliding.slot_mapping.tolist() == [7 * BLOCK_SIZE + 1, 7 * BLOCK_SIZE + 2]


def test_a_request_may_be_dropped_and_come_back_in_one_plan() -> None:
    """A preempted request that is admitted again: it begins with an empty table, in any row."""
    inputs = batch(2, max_num_seqs=1)
    step(inputs, row("a", 0, 5, [[1, 2], [3, 4]], data=new(range(5))))
    made = step(inputs, row("a", 0, 6, [[8, 9], [6, 5]], data=new(range(6))), drop=["a", "unknown"])
    assert [meta.block_table.tolist() for meta in made.forward.metas] == [[[8, 9]], [[6, 5]]]
    assert made.forward.input_ids.tolist() == [0, 1, 2, 3, 4, 5]


def test_given_tokens_are_known_before_the_step() -> None:
    inputs = batch()
    step(inputs, row("a", 0, 3, [[1]], data=new([4, 5, 6], params={"beam_width": 2}), samples=True))
    accept(inputs, "a", 99)
    made = step(inputs, row("a", 3, 1, [[]], given=[7], samples=True))
    assert made.forward.input_ids.tolist() == [7]
    assert inputs.requests["a"].token_ids == [4, 5, 6, 7], "beam search does not append what was sampled"


def test_the_first_draw_of_a_row_has_all_its_choices() -> None:
    inputs = batch()
    data = new([4, 5, 6], params={"temperature": 1.0, "seed": 11}, num_choices=3)
    made = step(
        inputs,
        row("a", 0, 3, [[1]], data=data, samples=True),
        row("b", 0, 1, [[2]], data=new([9]), samples=False),
        row("c", 0, 2, [[3]], data=new([7, 8]), samples=True),
    )
    assert sampled(made) == [0, 0, 0, 2]
    assert made.sample_indices.tolist() == [2, 5], "the logits of a row are computed once"
    assert made.choice_indices is not None and made.choice_indices.tolist() == [0, 0, 0, 1]
    assert [drawn.seed for drawn in made.sampling_rows] == [11, choice_seed(11, 1), choice_seed(11, 2), 0]
    accept(inputs, "a", 30)
    accept(inputs, "c", 31)
    made = step(inputs, row("a", 3, 1, [[]], samples=True), row("c", 2, 1, [[]], samples=True))
    assert sampled(made) == [0, 1] and made.choice_indices is None
    assert made.forward.input_ids.tolist() == [30, 31] and made.sampling_rows[0].seed == 11


def test_choices_wait_for_the_whole_prompt() -> None:
    inputs = batch()
    made = step(inputs, row("a", 0, 2, [[1]], data=new([4, 5, 6], num_choices=2)))
    assert sampled(made) == [] and made.choice_indices is None
    assert sampled(step(inputs, row("a", 2, 1, [[]], samples=True))) == [0, 0]


def test_choice_seeds_are_fixed_and_apart() -> None:
    assert choice_seed(12345, 0) == 12345
    assert [choice_seed(0, index) for index in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    # Engine seeds of requests without one are 0x9E37... apart, SplitMix64's own step.
    seeds = [(7 + 0x9E3779B97F4A7C15 * request) % 2**64 for request in range(200)]
    made = {choice_seed(seed, index) for seed in seeds for index in range(20)}
    assert len(made) == 200 * 20 and all(0 <= seed < 2**64 for seed in made)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_steps_of_single_tokens_are_those_of_a_batch_made_anew(num_groups: int) -> None:
    """Requests of different lengths decode over block borders, one leaves, one comes back in its place."""
    kept = batch(num_groups, max_num_seqs=3)
    free, tables = list(range(40)), {}
    tokens = {"a": list(range(5)), "b": [9], "c": list(range(20, 31))}

    def plan(target: InputBatch, names: list[str], fresh: bool) -> StepInputs:
        rows = []
        for name in names:
            known = len(tokens[name])
            held = tables.setdefault(name, [[] for _ in range(num_groups)])
            missing = -(-known // BLOCK_SIZE) - len(held[0])
            added = [[free.pop() for _ in range(missing)] for _ in held]
            held[:] = [own + more for own, more in zip(held, added, strict=True)]
            is_new = fresh or name not in target.requests
            data = new(tokens[name]) if is_new else None
            blocks, begin = (held, 0 if not fresh else known - 1) if is_new else (added, known - 1)
            rows.append(row(name, begin, known - begin, blocks, samples=True, data=data))
        return step(target, *rows, drop=[] if fresh else list(set(target.requests) - set(names)))

    for number in range(16):
        names = ["a", "b", "c"] if number not in (6, 7) else ["a", "c"]
        if number == 7:
            tables.pop("b", None)
        made = plan(kept, names, False)
        again = plan(batch(num_groups), names, True)
        if number not in (0, 8):  # prompts are whole there
            assert made.forward.input_ids.tolist() == again.forward.input_ids.tolist()
            assert made.forward.positions.tolist() == again.forward.positions.tolist()
        assert made.sampling_rows == [kept.requests[name].sampling for name in names]
        for ours, theirs in zip(made.forward.metas, again.forward.metas, strict=True):
            assert ours.seq_lens.tolist() == ours.seq_lens_list == theirs.seq_lens_list
            assert ours.max_seq_len == theirs.max_seq_len and not ours.plans
            assert ours.slot_mapping[made.sample_indices].tolist() == theirs.slot_mapping.tolist()
            for seq, length in enumerate(theirs.seq_lens_list):
                count = -(-length // BLOCK_SIZE)
                assert ours.block_table[seq, :count].tolist() == theirs.block_table[seq, :count].tolist()
        for name in names:
            accept(kept, name, 100 * number + len(tokens[name]))
            tokens[name] = list(kept.requests[name].token_ids)
