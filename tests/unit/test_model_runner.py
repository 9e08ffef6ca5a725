"""ModelRunner.execute on plans written by hand: blocks that move, choices, beam candidates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from quire.config import EngineConfig
from quire.models.kv_groups import blocks_per_sequence
from quire.outputs import (
    KVLoad,
    KVSave,
    ModelRunnerOutput,
    NewRequestData,
    RowOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.request.sampling_params import SamplingParams, choice_seed
from quire.worker.model_runner import ModelRunner
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_greedy, hf_logits, hf_model

PROMPT = torch.randint(5, 512, (13,), generator=torch.Generator().manual_seed(5)).tolist()
BLOCKS = [7, 2, 9, 4, 11, 1, 3, 0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("runner"), tokenizer=False)


def make_runner(checkpoint: Path, **options: Any) -> ModelRunner:
    values = {"max_model_len": 64, "num_blocks": 32, "block_size": 4, "num_threads": 1, "device": "cpu"}
    return ModelRunner(EngineConfig.from_mapping({**values, **options, "model": str(checkpoint)}))


def plan(*rows: ScheduledRequest, drop: Sequence[str] = (), **moves: Any) -> SchedulerOutput:
    return SchedulerOutput(0, list(rows), list(drop), **moves)


def prompt_row(
    request_id: str, tokens: list[int], blocks: list[int], computed: int = 0, **options: Any
) -> ScheduledRequest:
    params = SamplingParams(**options.pop("params", {}))
    data = NewRequestData(list(tokens), len(tokens), params, frozenset((2, 4)), **options)
    return ScheduledRequest(request_id, computed, len(tokens) - computed, [blocks], True, data)


def decode_row(
    request_id: str, computed: int, blocks: Sequence[int] = (), **options: Any
) -> ScheduledRequest:
    return ScheduledRequest(request_id, computed, 1, [list(blocks)], True, **options)


def execute(runner: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
    runner.launch(step)
    return runner.collect()


def drawn(runner: ModelRunner, step: SchedulerOutput) -> dict[str, int]:
    """First token that a step draws for each row, by request."""
    rows = zip(step.scheduled, execute(runner, step).rows, strict=True)
    return {row.request_id: output.token_ids[0] for row, output in rows if output.token_ids}


def decode(runner: ModelRunner, request_id: str, computed: int, steps: int, spare: list[int]) -> list[int]:
    """Greedy tokens of a row; blocks are taken from `spare` as its table needs them."""
    tokens = []
    for position in range(computed, computed + steps):
        blocks = [spare.pop(0)] if position % 4 == 0 else []
        tokens.append(drawn(runner, plan(decode_row(request_id, position, blocks)))[request_id])
    return tokens


def test_a_copied_block_goes_on_as_its_source(checkpoint: Path) -> None:
    """What a fork does: full blocks shared, the partial one copied, each row then on its own."""
    expected = hf_greedy(hf_model(checkpoint), PROMPT, 9)
    runner = make_runner(checkpoint)
    first = drawn(runner, plan(prompt_row("a", PROMPT, BLOCKS[:4])))["a"]
    assert first == expected[0]
    copied = [*BLOCKS[:3], 20]
    fork = prompt_row("a#1", [*PROMPT, first], copied, computed=len(PROMPT))
    both = drawn(runner, plan(decode_row("a", 13), fork, block_copies=[(BLOCKS[3], 20)]))
    assert both == {"a": expected[1], "a#1": expected[1]}
    runner.kv_cache.blocks[BLOCKS[3]] = 0xFF
    assert decode(runner, "a#1", 14, 7, [21, 22]) == expected[2:]


def test_copies_are_all_read_before_any_is_written(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    before = runner.kv_cache.blocks.random_(0, 255).clone()
    execute(runner, plan(block_copies=[(3, 4), (4, 5), (5, 3)]))
    after = runner.kv_cache.blocks
    assert [torch.equal(after[target], before[source]) for source, target in ((3, 4), (4, 5), (5, 3))] == [
        True
    ] * 3
    assert torch.equal(after[6:], before[6:])


class RecordingTiers:
    """Keeps saved blocks in a dict; a load copies at once and is reported at the next poll."""

    def __init__(self, runner: ModelRunner) -> None:
        self.cache = runner.kv_cache
        self.stored: dict[bytes, np.ndarray] = {}
        self.done: list[tuple[int, int]] = []

    def save(self, saves: list[KVSave]) -> None:
        for save in saves:
            self.stored[save.key] = np.empty((1, self.cache.block_bytes), np.uint8)
            self.cache.read([save.block_id], self.stored[save.key])

    def start_load(self, load: KVLoad) -> None:
        for key, block_id in load.blocks:
            self.cache.write([block_id], self.stored[key])
        self.done.append((load.load_id, len(load.blocks)))

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, int]]:
        done, self.done = self.done, []
        return done


def test_blocks_are_saved_before_they_are_overwritten_and_loaded_back(checkpoint: Path) -> None:
    """A request is swapped out, its blocks are computed over in the same step, and it returns elsewhere."""
    expected = hf_greedy(hf_model(checkpoint), PROMPT, 6)
    other = PROMPT[::-1]
    runner = make_runner(checkpoint)
    runner.tiers = RecordingTiers(runner)  # type: ignore[assignment]
    assert execute(runner, plan(prompt_row("a", PROMPT, BLOCKS[:4]))).loads_done == []
    saves = [KVSave(b"%d" % index, block, pinned=True) for index, block in enumerate(BLOCKS[:4])]
    step = plan(prompt_row("b", other, BLOCKS[:4]), drop=["a"], kv_saves=saves)
    assert drawn(runner, step) == {"b": hf_greedy(hf_model(checkpoint), other, 1)[0]}
    assert list(runner.batch.requests) == ["b"]
    load = KVLoad(17, [(save.key, block) for save, block in zip(saves, [20, 21, 22, 23], strict=True)])
    result = execute(runner, plan(kv_loads=[load]))
    assert result.loads_done == [(17, 4)] and not result.rows
    back = prompt_row("a", [*PROMPT, expected[0]], [20, 21, 22, 23], computed=len(PROMPT))
    assert drawn(runner, plan(back)) == {"a": expected[1]}
    assert decode(runner, "a", 14, 4, [24]) == expected[2:]


def test_choices_are_drawn_as_by_requests_of_their_own_seeds(checkpoint: Path) -> None:
    runner = make_runner(checkpoint)
    params = {"temperature": 1.5, "seed": 99, "logprobs": 2, "repetition_penalty": 1.1}
    step = plan(prompt_row("a", PROMPT, BLOCKS[:4], params=params, num_choices=5))
    (row,) = execute(runner, step).rows
    together = [row, *row.choices]
    alone = []
    for index in range(5):
        own = {**params, "seed": choice_seed(99, index)}
        result = execute(
            runner, plan(prompt_row(f"{index}", PROMPT, [20, 21, 22, 23], params=own), drop=["a"])
        )
        (one,) = result.rows
        alone.append(one.token_ids[0])
        assert one.logprobs == together[index].logprobs and not one.choices
        execute(runner, plan(drop=[f"{index}"]))
    assert [one.token_ids[0] for one in together] == alone and len(set(alone)) > 2


def test_greedy_choices_are_the_same_token_and_only_the_first_draw_has_choices(checkpoint: Path) -> None:
    expected = hf_greedy(hf_model(checkpoint), PROMPT, 3)
    runner = make_runner(checkpoint)
    first = RowOutput([expected[0]])
    result = execute(runner, plan(prompt_row("a", PROMPT, BLOCKS[:4], num_choices=3)))
    assert result.rows == [RowOutput([expected[0]], choices=[first, first])]
    assert execute(runner, plan(decode_row("a", 13))).rows == [RowOutput([expected[1]])]


@pytest.mark.parametrize("penalised", [False, True], ids=["plain", "penalties"])
def test_beam_rows_return_candidates_as_transformers_scores_them(checkpoint: Path, penalised: bool) -> None:
    """log_softmax, then the processors, as in `_beam_search`; the token is the scheduler's to give."""
    tokens = [*PROMPT, PROMPT[4], PROMPT[5]]
    params: dict[str, Any] = {"beam_width": 3, "logprobs": 1}
    processors = LogitsProcessorList()
    if penalised:
        params |= {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
        processors += [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2)]
    scores = torch.log_softmax(hf_logits(hf_model(checkpoint), tokens)[-1:], dim=-1)
    scores = processors(torch.tensor([tokens]), scores)
    # Two ids end a sequence: two beside the width, so that three unfinished ones are among them.
    values, ids = scores[0].topk(5)

    runner = make_runner(checkpoint)
    other = prompt_row("b", PROMPT, [20, 21, 22, 23], params={"temperature": 0.7, "seed": 3})
    result = execute(runner, plan(prompt_row("a", tokens, BLOCKS[:4], params=params), other))
    first, second = result.rows
    assert first.logprobs is not None and second.logprobs is None
    (found,) = first.logprobs
    assert found.token_ids == [int(ids[0]), *ids.tolist()]
    assert found.logprobs[1:] == pytest.approx(values.tolist(), abs=1e-4)
    assert found.logprobs[0] == found.logprobs[1]
    assert runner.batch.requests["a"].token_ids == tokens

    chosen = found.token_ids[3]
    (follow,) = execute(runner, plan(decode_row("a", len(tokens), given_token_ids=[chosen]))).rows
    scores = torch.log_softmax(hf_logits(hf_model(checkpoint), [*tokens, chosen])[-1:], dim=-1)
    best = processors(torch.tensor([[*tokens, chosen]]), scores).argmax()
    assert follow.logprobs is not None and follow.logprobs[0].token_ids[0] == best


@pytest.mark.row("C14")
def test_the_pool_is_sized_by_groups_and_windows(tmp_path: Path) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    overrides = {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": layers,
    }
    path = make_checkpoint("qwen3", tmp_path, tokenizer=False, **overrides)
    options = {"num_blocks": None, "max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    runner = make_runner(path, **options)
    assert [group.window for group in runner.info.kv_groups] == [None, 8, 8, 8]
    per_sequence = 128 // 4 + 3 * (6 + 1)
    assert blocks_per_sequence(runner.info.kv_groups, 128, 4, 16) == per_sequence
    assert runner.info.num_blocks == 3 * per_sequence
    # One layer of 2 heads of 32 dimensions, keys and values in float32.
    assert runner.kv_cache.block_bytes == 1 * 2 * 2 * 4 * 32 * 4
    assert runner.info.kv_cache_bytes == runner.info.num_blocks * runner.kv_cache.block_bytes
