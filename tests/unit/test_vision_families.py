"""Each family from messages and image files to tokens: preprocessor, encoder and engine in one process give
what transformers' processor and whole model give."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire import LLM, SamplingParams
from quire.request.multimodal import PromptEmbeds, content_hashes
from quire_common.errors import InputError
from quire_ensemble.errors import VisionError
from quire_ensemble.tokenizer import Tokenizer
from quire_ensemble.vision import VisionProcessor, VisionPrompt
from quire_ensemble.vision_tower import VisionTower
from tests.e2e.vision import WholeModel, picture
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.fixtures.vision_checkpoints import OTHER_KINDS, VISION_KINDS, make_vision_checkpoint

MAX_TOKENS = 12
SIZES = ((64, 48), (30, 90), (120, 56))


class Pipeline:
    """The three parts of `vision_chat`."""

    def __init__(self, path: Path, **options: Any) -> None:
        threads = torch.get_num_threads()
        self.processor = VisionProcessor(path, Tokenizer(path))
        self.tower = VisionTower(path, device="cpu", num_threads=1)
        torch.set_num_threads(threads)
        self.llm = LLM(path, dtype="float32", **{"max_model_len": 512, "num_blocks": 256, **options})

    def embeds(self, prompt: VisionPrompt) -> PromptEmbeds | None:
        """What the generator makes of a prompt, once its images are encoded."""
        positions = prompt.position_ids if prompt.position_ids.size else None
        if not len(prompt.image_grid):
            return None
        self.tower.check(prompt.pixel_values, prompt.image_grid)
        rows = np.concatenate(self.tower.encode(prompt.pixel_values, prompt.image_grid))
        spans = tuple((int(start), int(count)) for start, count in prompt.image_spans)
        return PromptEmbeds(rows, spans, tuple(content_hashes(rows, spans)), positions)

    def ask(self, messages: list[dict[str, Any]], images: list[bytes], params: SamplingParams) -> Any:
        prompt = self.processor.process(json.dumps(messages).encode(), None, images)
        planned = [
            self.processor._num_patches(Image.open(io.BytesIO(image)).size, index, len(images) == 1)
            for index, image in enumerate(images)
        ]
        config = self.processor.config
        assert planned == [config.patches(*map(int, grid)) for grid in prompt.image_grid]
        return self.llm.generate([prompt.input_ids.tolist()], params, embeds=[self.embeds(prompt)])[0]


def conversation(num_images: int, text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in range(num_images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.row("H4", clauses=("next",))
@pytest.mark.row("H5", "H6")
@pytest.mark.parametrize("kind", (*VISION_KINDS, *OTHER_KINDS))
def test_answers_and_log_probabilities_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(kind, tmp_path / kind)
    pipeline, whole = Pipeline(path), WholeModel(path)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=20)
    answers = []
    for count in (0, 1, 3):
        images = [picture(count * 10 + i, SIZES[i]) for i in range(count)]
        messages = conversation(count, f"look at {count}")
        token_ids, expected = whole.generate(messages, images, MAX_TOKENS)
        output = pipeline.ask(messages, images, params)
        assert output.token_ids == token_ids, f"{count} images"
        for entry, row in zip(output.logprobs, expected, strict=True):
            got = torch.tensor(entry.logprobs)
            torch.testing.assert_close(got, row[entry.token_ids], rtol=0, atol=1e-4)
        answers.append(output.token_ids)
    other = pipeline.ask(conversation(1, "look at 1"), [picture(99, SIZES[0])], params)
    assert other.token_ids != answers[1], "the answer depends on the image"


def test_recorded_pieces_know_which_layers_see_images_both_ways(tmp_path: Path) -> None:
    """Of Gemma 4, those with a window: the others are causal."""
    path = make_vision_checkpoint("gemma4_large", tmp_path / "gemma4_large")
    images, messages = [picture(10, SIZES[0])], conversation(1, "look at 1")
    with recorded_steps():
        pipeline = Pipeline(path, max_num_seqs=4, async_scheduling=True)
        output = pipeline.ask(messages, images, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    assert output.token_ids == WholeModel(path).answer(messages, images, MAX_TOKENS)
    assert runner_of(pipeline.llm.core).prompt_graphs.num_replays > 0


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_moe"])
def test_a_placeholder_without_an_image_is_looked_up_as_padding(kind: str, tmp_path: Path) -> None:
    """In text, and where the model makes one itself."""
    path = make_vision_checkpoint(kind, tmp_path / kind)
    pipeline, whole = Pipeline(path), WholeModel(path)
    prompt = [5, 6, 7, whole.model.config.image_token_id, 8, 9, 10]
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    (output,) = pipeline.llm.generate([prompt], params)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        logits = whole.model(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids)).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    assert output.prompt_logprobs is not None
    assert [one.logprobs[0] for one in output.prompt_logprobs[1:] if one] == pytest.approx(expected, abs=1e-4)


def test_images_of_gemma_4_have_the_patches_of_transformers(tmp_path: Path) -> None:
    path = make_vision_checkpoint("gemma4", tmp_path / "gemma4")
    processor, whole = VisionProcessor(path, Tokenizer(path)), WholeModel(path)
    for size in ((64, 48), (1, 1), (2, 3), (700, 31), (31, 700), (611, 409)):
        image = picture(1, size)
        expected = whole.processor(images=[Image.open(io.BytesIO(image))], return_tensors="np")
        prompt = processor.process(None, b"a <|image|> b", [image])
        places = expected["image_position_ids"][0]
        is_patch = places[:, 0] >= 0
        np.testing.assert_allclose(prompt.pixel_values, expected["pixel_values"][0][is_patch], atol=1e-5)
        ((t, h, w),) = prompt.image_grid
        assert places[is_patch].tolist() == [[x, y] for y in range(h) for x in range(w)] and t == 1
        assert prompt.image_spans[0, 1] == expected["num_soft_tokens_per_image"][0] == h * w // 9
        assert processor._num_patches(size, 0, True) == h * w
    tower = VisionTower(path, device="cpu", num_threads=1)
    for grid in ((1, 3, 4), (2, 3, 3), (1, 0, 3), (1, 303, 3)):
        with pytest.raises(InputError, match=r"must be 1, and height and width multiples of 3 up to 300"):
            tower.check(np.zeros((grid[1] * grid[2], 48), np.float32), np.array([grid]))


def set_vision(name: str, value: Any) -> Any:
    return lambda config, _: config["vision_config"].update({name: value})


def set_processor(name: str, value: Any) -> Any:
    return lambda _, processor: processor.update({name: value})


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("internvl", lambda c, _: c.update(downsample_ratio=0.3), "downsample_ratio 0.3 does not divide"),
        ("internvl", lambda c, _: c.update(downsample_ratio=1e-9), "downsample_ratio 1e-09 does not divide"),
        ("internvl", set_vision("image_size", [56, 70]), "image_size of the vision tower must be one number"),
        ("internvl", set_vision("image_size", [112, 112]), r"gives \[3, 56, 56\], .* takes \[3, 112, 112\]"),
        ("internvl", lambda c, _: c.update(vision_feature_select_strategy="full"), "'full' is not supported"),
        (
            "internvl",
            set_processor("max_patches", 10**9),
            "max_patches of the image processor must be from 1",
        ),
        ("internvl", lambda c, _: c.update(image_token_id=70), r"no special tokens for \[70\]"),
        # A tower of so many layers took memory and time without end; ids beyond 64 bits were a traceback.
        ("internvl", set_vision("num_hidden_layers", 10**9), "must be from 1 to 1024, got 1000000000"),
        ("internvl", set_vision("hidden_size", 10**9), "hidden_size of the vision tower must be from 1 to"),
        ("mistral3", set_vision("head_dim", 10**9), "head_dim of the vision tower must be from 1 to"),
        ("internvl", lambda c, _: c.update(image_token_id=2**70), "no special tokens for"),
        ("internvl", lambda c, _: c.update(image_token_id=-1), r"no special tokens for \[-1\]"),
        ("mistral3", lambda c, _: c.update(spatial_merge_size=0), "spatial_merge_size must be an integer"),
        ("mistral3", set_processor("size", {"longest_edge": 113}), "must be an integer up to 112, got 113"),
        ("mistral3", set_vision("image_size", 111), "must be an integer up to 84, got 112"),
        ("mistral3", set_vision("model_type", "clip_vision_model"), "'clip_vision_model' is not supported"),
        ("gemma3", lambda c, _: c.update(mm_tokens_per_image=8), "mm_tokens_per_image 8 must be the square"),
        (
            "gemma3",
            lambda c, _: c.update(mm_tokens_per_image=16),
            "mm_tokens_per_image 16 must be the square",
        ),
        (
            "gemma3",
            lambda c, _: c.update(mm_tokens_per_image=49),
            "mm_tokens_per_image 49 must be the square",
        ),
        ("gemma3", lambda c, _: c.update(boi_token_index=70), r"no special tokens for \[70\]"),
        ("gemma3", lambda c, _: c.update(eoi_token_index=70), r"no special tokens for \[513\]"),
        ("gemma3", set_processor("do_pan_and_scan", True), "do_pan_and_scan true of the image processor"),
        ("gemma4", set_vision("pooling_kernel_size", 2), "pooling_kernel_size is 3 in the image"),
        ("gemma4", set_vision("pooling_kernel_size", 65), "pooling_kernel_size of the vision tower must be"),
        (
            "gemma4",
            set_vision("position_embedding_size", 11),
            "position_embedding_size 11 must be at least 12",
        ),
        ("gemma4", set_vision("position_embedding_size", 200), "images of up to 210 patches a side, at most"),
        ("gemma4", lambda c, _: c.update(vision_config=None), "has no vision_config"),
        ("gemma4", set_processor("patch_size", 8), "patch_size is 8 in the image processor and 4 in config"),
        ("gemma4", set_processor("do_resize", False), "do_resize false of the image processor is not"),
        ("gemma4", set_processor("max_soft_tokens", 71), "`max_soft_tokens` must be one of"),
        ("pixtral", set_processor("size", {"height": 56, "width": 56}), "longest_edge .*, got None"),
    ],
)
def test_parts_that_do_not_fit_are_refused(kind: str, change: Any, reason: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(kind, tmp_path / kind)
    files = [path / name for name in ("config.json", "preprocessor_config.json")]
    values = [json.loads(file.read_text()) for file in files]
    change(*values)
    for file, value in zip(files, values, strict=True):
        file.write_text(json.dumps(value))
    with pytest.raises(VisionError, match=reason) as refused:
        VisionProcessor(path, Tokenizer(path))
    assert "\n" not in str(refused.value)


def test_images_and_grids_that_are_none_of_a_family_are_refused(tmp_path: Path) -> None:
    path = make_vision_checkpoint("mistral3", tmp_path / "mistral3")
    processor, tower = VisionProcessor(path, Tokenizer(path)), VisionTower(path, device="cpu", num_threads=1)
    line = io.BytesIO()
    Image.new("L", (30_000, 1)).save(line, "PNG")
    with pytest.raises(InputError, match=r"image\[0\]: .* 30000 x 1 pixels are too long and narrow"):
        processor.process(None, b"[IMG]", [line.getvalue()])
    for grid in ((1, 3, 4), (2, 4, 4), (1, 10, 2), (1, 0, 2), (1, -2, -2)):
        with pytest.raises(InputError, match=r"image_grid\[0\]: must be 1, and height and width multiples"):
            tower.check(np.zeros((max(0, grid[1] * grid[2]), 588), np.float32), np.array([grid]))
    path = make_vision_checkpoint("internvl", tmp_path / "internvl")
    tower = VisionTower(path, device="cpu", num_threads=1)
    for grid in ((0, 4, 4), (257, 4, 4), (1, 4, 2)):
        with pytest.raises(InputError, match=r"image_grid\[0\]: must be 1 to 256 tiles of \[4, 4\]"):
            tower.check(np.zeros((max(0, grid[0]), 9408), np.float32), np.array([grid]))


@pytest.mark.parametrize("kind", ["pixtral", "mistral3"])
def test_an_image_of_pixtral_takes_no_room_for_the_sizes_of_others(tmp_path: Path, kind: str) -> None:
    """A hundred images of four patches beside a long and a wide one, 1 MiB, took 3 GiB; and Mistral 3's tower
    failed at an image of one row alone."""
    tower = VisionTower(make_vision_checkpoint(kind, tmp_path / kind), device="cpu", num_threads=1)
    grid = np.array([[1, 8, 2], [1, 2, 8], [1, 2, 2], [1, 2, 2]])
    pixels = np.random.default_rng(0).standard_normal((sum(tower.rows(grid)), tower.row_size))
    seen: list[int] = []

    def see(module: object, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0].numel())

    tower._family.module.vision_tower.patch_conv.register_forward_pre_hook(see)
    together = tower.encode(pixels, grid)
    assert sum(seen) == pixels.size
    alone = tower.encode(pixels[-4:], grid[-1:])[0]
    assert alone.shape == (4 if kind == "pixtral" else 1, tower.hidden_size)
    np.testing.assert_allclose(alone, together[-1], atol=1e-5)
