"""Prompts with images in the engine: the oracle is transformers' whole model, greedy, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.multimodal import PromptEmbeds, content_hashes
from tests.fixtures.drive import hf_vision_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.fixtures.vision_checkpoints import VISION_KINDS, make_vision_checkpoint

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
# Rows of patches, columns of patches, before the merging of 2 x 2.
GRIDS = ((4, 4), (6, 4), (4, 8))


@dataclass
class Case:
    """One prompt, as the engine takes it and what transformers says to it."""

    token_ids: list[int]
    embeds: PromptEmbeds | None
    expected: list[int]


@pytest.fixture(scope="module", params=VISION_KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(request.param, tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def cases(checkpoint: Path) -> list[Case]:
    """Prompts with 0, 1 and 3 images, and one with other images than the last."""
    model = hf_vision_model(checkpoint)
    return [make_case(model, count, seed) for seed, count in enumerate((0, 1, 3, 3))]


@torch.no_grad()
def make_case(model: Any, num_images: int, seed: int) -> Case:
    config, rng = model.config, np.random.default_rng(seed)
    image_token = config.image_token_id
    is_qwen = "qwen" in config.model_type
    token_ids = [5, 6, 7]
    spans, grids, pixels, features = [], [], [], []
    for index in range(num_images):
        if is_qwen:
            height, width = GRIDS[index]
            size = 3 * config.vision_config.temporal_patch_size * config.vision_config.patch_size**2
            pixel = torch.from_numpy(rng.standard_normal((height * width, size), dtype=np.float32))
            grid = torch.tensor([[1, height, width]])
            feature = model.get_image_features(pixel, grid)
            grids.append(grid)
        else:
            side = config.vision_config.image_size
            pixel = torch.from_numpy(rng.standard_normal((1, 3, side, side), dtype=np.float32))
            feature = model.get_image_features(pixel)
        rows = torch.cat([*feature.pooler_output]).reshape(-1, config.text_config.hidden_size)
        pixels.append(pixel)
        features.append(rows)
        spans.append((len(token_ids), len(rows)))
        token_ids += [image_token] * len(rows) + [8 + index, 9, 10]
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {}
    position_ids = None
    if num_images:
        inputs["pixel_values"] = torch.cat(pixels)
    if is_qwen:
        types = (ids == image_token).int()
        inputs["mm_token_type_ids"] = types
        if num_images:
            inputs["image_grid_thw"] = torch.cat(grids)
        positions, _ = model.model.get_rope_index(ids, types, inputs.get("image_grid_thw"))
        position_ids = positions[:, 0].numpy().astype(np.int32)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        **inputs,
    )
    embeds = None
    if num_images:
        rows = torch.cat(features).detach().numpy()
        embeds = PromptEmbeds(rows, tuple(spans), tuple(content_hashes(rows, spans)), position_ids)
    return Case(token_ids, embeds, out[0, len(token_ids) :].tolist())


def run(checkpoint: Path, cases: list[Case], **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(checkpoint, dtype="float32", **{"max_model_len": 256, "num_blocks": 128, **options})
    outputs = llm.generate([c.token_ids for c in cases], GREEDY, embeds=[c.embeds for c in cases])
    return [output.token_ids for output in outputs], llm


@pytest.mark.row("H1")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"block_size": 4, "num_blocks": 24, "max_model_len": 96},
    ],
)
def test_images_give_the_tokens_of_transformers(
    checkpoint: Path, cases: list[Case], options: dict[str, Any]
) -> None:
    tokens, llm = run(checkpoint, cases, **options)
    assert tokens == [case.expected for case in cases]
    if "num_blocks" in options:
        assert llm.core.stats().num_preemptions > 0


@pytest.mark.row("D7")
def test_recorded_steps_take_images_and_positions_on_three_axes(checkpoint: Path, cases: list[Case]) -> None:
    with recorded_steps():
        tokens, llm = run(checkpoint, cases, max_num_batched_tokens=40, async_scheduling=True)
    assert tokens == [case.expected for case in cases]
    runner = runner_of(llm.core)
    assert runner.prompt_graphs.num_replays >= 2 and runner.graphs.num_replays > 2


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


@pytest.mark.row("B19", clauses=("budget",))
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
