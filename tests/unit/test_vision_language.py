"""Prompts with images in the engine: the oracle is transformers' whole model, greedy, in fp32."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, InvalidArgumentError
from quire.outputs import SchedulerOutput
from quire.request.multimodal import PromptEmbeds, content_hashes
from quire.request.structured_output import StructuredOutput
from quire.worker.model_runner import ModelRunner
from tests.fixtures.adapters import ATTENTION, make_adapter, merge
from tests.fixtures.drafters import told
from tests.fixtures.drive import hf_vision_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.fixtures.vision_checkpoints import (
    MODEL_VOCAB_SIZE,
    VISION_KINDS,
    hf_image_inputs,
    make_vision_checkpoint,
)

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
# Rows of patches, columns of patches, before the merging of 2 x 2.
GRIDS = ((4, 4), (6, 4), (4, 8))
TILED_SIZES = ((3, 40, 90), (5, 97, 99), (4, 300, 60))
"""Tiles, and pixels from top to bottom and from left to right."""


@dataclass
class Case:
    """One prompt, as the engine takes it and what transformers says to it."""

    token_ids: list[int]
    embeds: PromptEmbeds | None
    expected: list[int]


@pytest.fixture(scope="module", params=(*VISION_KINDS, "gemma3"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def cases(checkpoint: Path) -> list[Case]:
    """Prompts with 0, 1 and 3 images, and one with other images than the last."""
    model = hf_vision_model(checkpoint)
    return [make_case(model, count, seed) for seed, count in enumerate((0, 1, 3, 3))]


@torch.no_grad()
def make_case(model: Any, num_images: int, seed: int, behind: tuple[int, ...] = (9, 10)) -> Case:
    """`behind`: text behind each image, after a token of its own."""
    config, rng = model.config, np.random.default_rng(seed)
    image_token = config.image_token_id
    is_qwen = "qwen" in config.model_type
    is_onevision, is_joint = config.model_type == "llava_onevision", config.model_type == "gemma3"
    token_ids = [5, 6, 7]
    spans, grids, pixels, features = [], [], [], []
    for index in range(num_images):
        if is_qwen:
            height, width = GRIDS[index]
            size = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
            shape, grid = (height * width, size), (1, height, width)
        else:
            tiles, size = 1, config.vision_config.image_size
            if config.model_type == "llava_next" or (is_onevision and num_images == 1):
                tiles = TILED_SIZES[index][0]
            shape, grid = (tiles, 3 * size**2), (tiles, *TILED_SIZES[index][1:])
        pixel = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        grids.append(torch.tensor([grid]))
        feature = model.get_image_features(**hf_image_inputs(model, pixel, grids[-1]))
        levels = getattr(feature, "deepstack_features", [])
        rows = torch.cat([torch.cat(one, -1) for one in zip(feature.pooler_output, *levels, strict=True)])
        pixels.append(pixel)
        features.append(rows)
        spans.append((len(token_ids), len(rows)))
        token_ids += [image_token] * len(rows) + [8 + index, *behind]
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {}
    position_ids = None
    if num_images:
        inputs = hf_image_inputs(model, torch.cat(pixels), torch.cat(grids))
    if is_qwen:
        types = (ids == image_token).int()
        inputs["mm_token_type_ids"] = types
        positions, _ = model.model.get_rope_index(ids, types, inputs.get("image_grid_thw"))
        position_ids = positions[:, 0].numpy().astype(np.int32)
    if is_joint:
        inputs["token_type_ids"] = (ids == image_token).int()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        **inputs,
    )
    embeds = None
    if num_images:
        rows = torch.cat(features).detach().numpy()
        hashes = tuple(content_hashes(rows, spans))
        embeds = PromptEmbeds(rows, tuple(spans), hashes, position_ids, is_joint)
    return Case(token_ids, embeds, out[0, len(token_ids) :].tolist())


def run(
    checkpoint: Path, cases: list[Case], max_tokens: int = MAX_TOKENS, **options: Any
) -> tuple[list[list[int]], LLM]:
    llm = LLM(checkpoint, dtype="float32", **{"max_model_len": 256, "num_blocks": 128, **options})
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([c.token_ids for c in cases], params, embeds=[c.embeds for c in cases])
    return [output.token_ids for output in outputs], llm


@pytest.mark.row("H1")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 10, "max_num_seqs": 2},
        {"max_num_seqs": 1},
        {"block_size": 4},
    ],
)
def test_images_give_the_tokens_of_transformers(
    checkpoint: Path, cases: list[Case], options: dict[str, Any]
) -> None:
    if "block_size" in options:  # and memory for two prompts and one of their answers
        cases = cases[2:]
        num_blocks = 2 * (len(cases[0].token_ids) // 4 + 1) + MAX_TOKENS // 4
        # A state takes a block too.
        options = {**options, "num_blocks": num_blocks, "max_model_len": (num_blocks - 2) * 4}
        if checkpoint.name == "gemma3":  # whose windows give blocks back
            options |= {"num_blocks": 52, "max_model_len": 100, "max_tokens": 60}
    if checkpoint.name == "gemma3" and options.get("max_num_batched_tokens", 10) < 10:
        with pytest.raises(InvalidArgumentError, match="image_spans: an image of 9 tokens, which one step"):
            run(checkpoint, cases, **options)
        return
    tokens, llm = run(checkpoint, cases, **options)
    assert [one[:MAX_TOKENS] for one in tokens] == [case.expected for case in cases]
    if "block_size" in options:
        assert llm.core.stats().num_preemptions > 0


@pytest.mark.row("D7")
def test_recorded_steps_take_images_and_positions_on_three_axes(checkpoint: Path, cases: list[Case]) -> None:
    with recorded_steps():
        options: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 16, "async_scheduling": True}
        tokens, llm = run(checkpoint, cases, **options)
    assert tokens == [case.expected for case in cases]
    runner = runner_of(llm.core)
    if checkpoint.name == "qwen3_5":
        assert runner.graphs is None, "steps with states are not recorded"
        return
    # Steps with rows of deepstack are computed operator by operator: here all but those of single tokens.
    levels = runner.model.config.deepstack_levels
    assert (runner.prompt_graphs.num_replays >= 2) == (levels == 0) and runner.graphs.num_replays > 2


def test_the_oracle_sees_the_images(cases: list[Case]) -> None:
    """Same text, other images: other tokens; so the comparison above can fail."""
    assert cases[2].token_ids == cases[3].token_ids
    assert cases[2].expected != cases[3].expected


@pytest.mark.row("C22", clauses=("image",))
@pytest.mark.row("H12", whole=True)
def test_another_image_never_hits_and_the_same_one_does(checkpoint: Path, cases: list[Case]) -> None:
    """The prefix cache tells images apart where texts are the same, and finds those that are the same."""
    options: dict[str, Any] = {"max_model_len": 256, "num_blocks": 128, "block_size": 4}
    llm = LLM(checkpoint, dtype="float32", **options)
    _, _, first, other = cases
    assert first.token_ids == other.token_ids and first.embeds is not None and other.embeds is not None

    def tokens(case: Case) -> tuple[list[int], int]:
        before = llm.core.stats().num_cached_tokens
        output = llm.generate([case.token_ids], GREEDY, embeds=[case.embeds])[0]
        return output.token_ids, llm.core.stats().num_cached_tokens - before

    start = first.embeds.spans[0][0]
    assert tokens(first) == (first.expected, 0)
    got, hits = tokens(other)
    assert got == other.expected
    assert hits <= start, "only the text before the first image is the same"
    for case in (first, other):
        got, hits = tokens(case)
        assert got == case.expected
        assert hits == (len(case.token_ids) - 1) // 4 * 4


@pytest.mark.row("H13", whole=True)
@pytest.mark.parametrize("checkpoint", VISION_KINDS, indirect=True)
def test_an_image_in_chunks_gives_the_bits_of_one_in_one_piece(
    checkpoint: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request that decodes, and with as many tokens in each step as the budget has, no more."""
    case, params = cases[1], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=5)
    assert case.embeds is not None
    ((start, length),) = case.embeds.spans
    whole = LLM(checkpoint, dtype="float32", max_model_len=256, num_blocks=128)
    expected = whole.generate([case.token_ids], params, embeds=[case.embeds])[0]
    assert expected.token_ids == case.expected
    budget = length // 4 + 1
    steps: list[SchedulerOutput] = []
    launch = ModelRunner.launch

    def watched(runner: ModelRunner, output: SchedulerOutput) -> None:
        steps.append(output)
        launch(runner, output)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    options: dict[str, Any] = {"max_num_batched_tokens": budget, "max_model_len": 256, "num_blocks": 128}
    llm = LLM(checkpoint, dtype="float32", **options)
    text = SamplingParams(max_tokens=60, ignore_eos=True)
    given = [[5, 6], case.token_ids]
    _, output = llm.generate(given, [text, params], embeds=[None, case.embeds])
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    rows = [item for step in steps for item in step.scheduled]
    pieces = [
        item
        for item in rows
        if item.request_id == "llm-1"
        and item.num_computed_tokens < start + length
        and item.num_computed_tokens + item.num_scheduled_tokens > start
    ]
    assert len(pieces) >= 3
    sizes = [sum(item.num_scheduled_tokens for item in step.scheduled) for step in steps]
    assert max(sizes) == budget and sizes.count(budget) >= 3


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
def test_an_image_whose_tokens_see_each_other_is_in_one_step(
    checkpoint: Path, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a block that is found in the cache ends within it. Beside a request that decodes."""
    steps: list[SchedulerOutput] = []
    launch = ModelRunner.launch

    def watched(runner: ModelRunner, output: SchedulerOutput) -> None:
        steps.append(output)
        launch(runner, output)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    options: dict[str, Any] = {"max_num_batched_tokens": 11, "max_num_seqs": 3, "block_size": 8}
    llm = LLM(checkpoint, dtype="float32", max_model_len=256, num_blocks=128, **options)
    alike = make_case(hf_vision_model(checkpoint), 1, 1, behind=(20, 21))
    text = SamplingParams(max_tokens=60, ignore_eos=True)
    for number, (case, num_cached) in enumerate(((cases[1], 0), (alike, 8), (cases[2], 0))):
        assert case.embeds is not None
        steps.clear()
        prompts, params = [[5, 6], case.token_ids], [text, GREEDY]
        _, output = llm.generate(prompts, params, embeds=[None, case.embeds])
        assert (output.token_ids, output.num_cached_tokens) == (case.expected, num_cached)
        rows = [row for step in steps for row in step.scheduled if row.request_id == f"llm-{2 * number + 1}"]
        begins = {row.num_computed_tokens for row in rows}
        inside = {at for start, length in case.embeds.spans for at in range(start + 1, start + length)}
        assert begins & inside == ({num_cached} if num_cached else set())
    assert cases[1].token_ids[:12] == alike.token_ids[:12] and alike.expected != cases[1].expected


GRAMMAR = StructuredOutput(regex="([ab]{3}c|d{9}){8}")


# One of each kind of rows and of positions.
@pytest.mark.row("H14", whole=True)
@pytest.mark.parametrize("checkpoint", ["llava_onevision", "qwen2_vl", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_adapters_grammars_and_drafts_on_images(checkpoint: Path, tmp_path: Path, ahead: bool) -> None:
    """In one batch, each alone and all at once; greedy tokens with an adapter are transformers' of merged
    weights, and drafts change nothing."""
    model = hf_vision_model(checkpoint)
    plain, other = (make_case(model, count, seed) for seed, count in ((7, 1), (8, 3)))
    path = make_adapter(tmp_path / "a", model, seed=1, within="language_model")
    adapted, adapted_other = (
        make_case(merge(hf_vision_model(checkpoint), path), count, seed) for seed, count in ((7, 1), (8, 3))
    )
    assert adapted.expected != plain.expected
    work: list[tuple[Case, str | None, StructuredOutput | None]] = [
        (plain, None, None),
        (adapted, "a", None),
        (adapted_other, "a", GRAMMAR),
        (other, None, GRAMMAR),
        (adapted_other, "a", None),
    ]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=grammar is None, structured_output=grammar)
        for _, _, grammar in work
    ]
    options: dict[str, Any] = {"max_model_len": 512, "num_blocks": 256, "block_size": 8, "dtype": "float32"}
    options |= {"enable_lora": True, "lora_modules": {"a": str(path)}, "async_scheduling": ahead}

    def ask(llm: LLM) -> list[list[int]]:
        embeds, adapters = [case.embeds for case, _, _ in work], [name for _, name, _ in work]
        prompts = [case.token_ids for case, _, _ in work]
        return [one.token_ids for one in llm.generate(prompts, params, embeds=embeds, adapters=adapters)]

    expected = ask(LLM(checkpoint, **options))
    assert expected[:2] == [plain.expected, adapted.expected] and expected[4] == adapted_other.expected
    llm = LLM(checkpoint, **options, num_draft_tokens=4)
    known = [case.token_ids + tokens for (case, _, _), tokens in zip(work, expected, strict=True)]
    with told(known, MODEL_VOCAB_SIZE):
        assert ask(llm) == expected
    assert llm.core.scheduler.num_accepted_drafts > 10
    for tokens in expected[2:4]:
        assert re.fullmatch("[abcd]+", llm.tokenizer.hf.decode(tokens))


@pytest.mark.parametrize("checkpoint", ["llava"], indirect=True)
def test_an_adapter_of_a_vision_part_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Its part in the language model alone would be another model than the one that was trained."""
    path = make_adapter(tmp_path / "a", hf_vision_model(checkpoint), targets=ATTENTION)
    with pytest.raises(CheckpointError, match="vision_tower"):
        LLM(checkpoint, dtype="float32", enable_lora=True, lora_modules={"a": str(path)}, num_blocks=128)


@pytest.mark.row("B19", clauses=("budget",))
@pytest.mark.parametrize("checkpoint", VISION_KINDS, indirect=True)
def test_a_prompt_of_images_never_starves_decoding(checkpoint: Path, cases: list[Case]) -> None:
    """While three images are prefilled in chunks, a running request gets its token in every step."""
    llm = LLM(checkpoint, dtype="float32", max_model_len=256, num_blocks=128, max_num_batched_tokens=4)
    core, images = llm.core, cases[2]
    core.add_request("text", [5, 6], SamplingParams(max_tokens=100, ignore_eos=True))
    core.step()
    core.add_request("images", images.token_ids, GREEDY, embeds=images.embeds)
    got: list[int] = []
    steps = 0
    while not got:
        outputs = {output.request_id: output.new_token_ids for output in core.step()}
        assert len(outputs["text"]) == 1
        got += outputs.get("images", [])
        steps += 1
    assert steps == -(-len(images.token_ids) // 3), "3 of 4 tokens a step were left for the images"
    while len(got) < MAX_TOKENS:
        got += next(output.new_token_ids for output in core.step() if output.request_id == "images")
    assert got == images.expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"deepstack_visual_indexes": None}, "deepstack_visual_indexes must be a list of fewer"),
        ({"deepstack_visual_indexes": [0, 1, 2]}, "must be a list of fewer than the 3 layers"),
        ({"deepstack_visual_indexes": 10**9}, "deepstack_visual_indexes must be a list"),
        (None, "deepstack_visual_indexes must be a list"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["qwen3_vl"], indirect=True)
def test_a_deepstack_that_does_not_fit_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    config = json.loads((path / "config.json").read_text())
    if change is None:
        config["vision_config"] = 5
    else:
        config["vision_config"].update(change)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        LLM(path, dtype="float32", num_blocks=128)


@pytest.mark.parametrize("change", [{"mrope_section": None}, {"mrope_interleaved": False}])
@pytest.mark.parametrize("checkpoint", ["qwen3_vl", "qwen3_5"], indirect=True)
def test_a_rope_without_interleaved_axes_is_refused(
    checkpoint: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rope_parameters"].update(change)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no mrope_section that is interleaved"):
        LLM(path, dtype="float32", num_blocks=128)
