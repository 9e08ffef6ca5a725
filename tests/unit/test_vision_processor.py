"""VisionProcessor: prompts, pixel values and positions equal transformers' processors and models."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire_common.errors import InputError
from quire_ensemble.errors import VisionError
from quire_ensemble.images import ImageLimits
from quire_ensemble.memory_gate import MemoryGate
from quire_ensemble.messages import parse_conversation
from quire_ensemble.mrope import mrope_positions
from quire_ensemble.tokenizer import Tokenizer
from quire_ensemble.vision import VisionProcessor, VisionPrompt
from quire_ensemble.vision_config import AnyresConfig
from tests.fixtures.vision_checkpoints import (
    QWEN_KINDS,
    VISION_KINDS,
    hf_image_inputs,
    make_vision_checkpoint,
)

QWEN = QWEN_KINDS
KINDS = (*VISION_KINDS, "gemma3")
PLACEHOLDER = {kind: "<|image_pad|>" if kind in QWEN else "<image>" for kind in VISION_KINDS}
PLACEHOLDER["gemma3"] = "<start_of_image>"
Message = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {kind: make_vision_checkpoint(kind, root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def processors(checkpoints: dict[str, Path]) -> dict[str, VisionProcessor]:
    return {kind: VisionProcessor(path, Tokenizer(path)) for kind, path in checkpoints.items()}


@pytest.fixture(scope="module")
def oracles(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {kind: hf_processor(kind, path) for kind, path in checkpoints.items()}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoModelForImageTextToText

    return {k: AutoModelForImageTextToText.from_pretrained(p).eval() for k, p in checkpoints.items()}


def hf_processor(kind: str, path: Path) -> Any:
    """The processor of transformers for the kind. Those of Qwen want a video processor, and that wants
    torchvision; they need none for images."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    name = json.loads((path / "preprocessor_config.json").read_text())["processor_class"]

    class Unchecked(getattr(transformers, name)):  # type: ignore[misc]
        def check_argument_for_proper_class(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
            return None

    tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
    image_processor = AutoImageProcessor.from_pretrained(str(path), backend="pil")
    if kind in QWEN:
        return Unchecked(image_processor, tokenizer, chat_template=tokenizer.chat_template)
    settings = json.loads((path / "processor_config.json").read_text())
    del settings["processor_class"]
    return Unchecked(image_processor, tokenizer, chat_template=tokenizer.chat_template, **settings)


def picture(width: int = 90, height: int = 60, mode: str = "RGB", seed: int = 0) -> Image.Image:
    rng = np.random.default_rng([seed, width, height])
    bands = {"RGBA": 4, "CMYK": 4, "L": 1, "LA": 2}.get(mode, 3)
    small = [Image.fromarray(rng.integers(0, 256, (5, 6), dtype=np.uint8)) for _ in range(bands)]
    merged = Image.merge(
        mode if bands != 3 else "RGB",
        [band.resize((width, height), Image.Resampling.BICUBIC) for band in small],
    )
    return merged.convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def user(*parts: str | Message) -> Message:
    """A user's message; strings are text parts."""
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


IMAGE: Message = {"type": "image"}


def dump(*messages: Message) -> bytes:
    return json.dumps(list(messages)).encode()


def data_url(raw: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def same(one: VisionPrompt, other: VisionPrompt) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def with_config(checkpoint: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    shutil.copytree(checkpoint, path)
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


FILES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encode(picture(123, 77), "JPEG"),
    "grey jpeg": lambda: encode(picture(64, 64, "L"), "JPEG"),
    "cmyk jpeg": lambda: encode(picture(70, 50, "CMYK"), "JPEG"),
    "png": lambda: encode(picture(57, 91)),
    "transparent png": lambda: encode(picture(80, 60, "RGBA")),
    "grey transparent png": lambda: encode(picture(80, 60, "LA")),
    "palette png": lambda: encode(picture(61, 45, "P")),
    "transparent palette png": lambda: encode(picture(61, 45, "P"), transparency=3),
    "grey png with a transparent value": lambda: encode(picture(61, 45, "L"), transparency=128),
    "rgb png with a transparent colour": lambda: encode(
        Image.new("RGB", (40, 40), (9, 8, 7)), transparency=(9, 8, 7)
    ),
    "black and white png": lambda: encode(picture(33, 41, "1")),
    "webp": lambda: encode(picture(200, 150), "WEBP"),
    "transparent webp": lambda: encode(picture(50, 90, "RGBA"), "WEBP", lossless=True),
    "gif": lambda: encode(picture(44, 55, "P"), "GIF"),
    "transparent gif": lambda: encode(picture(44, 55, "P"), "GIF", transparency=0),
    "one pixel": lambda: encode(Image.new("RGB", (1, 1), (200, 10, 30))),
    "two by three": lambda: encode(picture(2, 3)),
    "wide": lambda: encode(picture(600, 31)),
    "tall": lambda: encode(picture(31, 600)),
    "large": lambda: encode(picture(1111, 909), "JPEG"),
}


@pytest.mark.row("H10", clauses=("pixels",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_pixel_values_equal_those_of_transformers(
    name: str, kind: str, processors: dict[str, VisionProcessor], oracles: dict[str, Any]
) -> None:
    raw = FILES[name]()
    expected = oracles[kind].image_processor(images=[Image.open(io.BytesIO(raw))], return_tensors="np")
    prompt = processors[kind].process(None, PLACEHOLDER[kind].encode(), [raw])
    pixels = expected["pixel_values"]
    rows = pixels if kind in QWEN else pixels.reshape(-1, prompt.pixel_values.shape[1])
    assert prompt.pixel_values.dtype == np.float32
    assert prompt.pixel_values.shape == rows.shape
    np.testing.assert_allclose(prompt.pixel_values, rows, rtol=0, atol=1e-5)
    if kind in QWEN:
        assert prompt.image_grid.tolist() == expected["image_grid_thw"].tolist()
    assert prompt.image_grid.dtype == np.int32
    planned = processors[kind]._num_patches(Image.open(io.BytesIO(raw)).size, 0, True)
    assert planned == processors[kind].config.patches(*prompt.image_grid[0])
    assert prompt.pixel_values.std() > 0 or "pixel" in name or "colour" in name


CONVERSATIONS: dict[str, list[Message]] = {
    "one": [user("Look: ", IMAGE, " What is it?")],
    "three": [user(IMAGE, "and", IMAGE, IMAGE, "Compare!")],
    "turns": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        user("Grüße 日本", IMAGE),
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        user(IMAGE, "And this?", IMAGE),
    ],
    "none": [user("Just text.")],
}


def pictures(count: int) -> list[Image.Image]:
    return [picture(70 + 61 * i, 130 - 43 * i, seed=i) for i in range(count)]


def filled(messages: list[Message], images: list[Image.Image]) -> list[Message]:
    """The messages as transformers takes them, with the images in their parts."""
    rest = iter(images)
    return [
        {
            **message,
            "content": [
                {"type": "image", "image": next(rest)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def image_count(messages: list[Message]) -> int:
    return sum(part["type"] == "image" for message in messages for part in message["content"])


@pytest.mark.row("H5", clauses=("positions",))
@pytest.mark.row("H1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_whole_prompts_equal_those_of_transformers(
    name: str,
    kind: str,
    processors: dict[str, VisionProcessor],
    oracles: dict[str, Any],
    models: dict[str, Any],
) -> None:
    messages = CONVERSATIONS[name]
    images = pictures(image_count(messages))
    expected = oracles[kind].apply_chat_template(
        filled(messages, images),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    prompt = processors[kind].process(dump(*messages), None, [encode(image) for image in images])
    assert prompt.input_ids.dtype == np.int32
    assert prompt.input_ids.tolist() == expected["input_ids"][0].tolist()
    row_size = processors[kind].row_size
    if images:
        tiles = prompt.image_grid[:, 0].tolist()
        if kind == "llava_next":  # padded to as many tiles
            rows = torch.cat([image[:t] for image, t in zip(expected["pixel_values"], tiles, strict=True)])
        else:
            rows = expected["pixel_values"]
        rows = rows.reshape(-1, row_size)
        np.testing.assert_allclose(prompt.pixel_values, rows, rtol=0, atol=1e-5)
    else:
        assert prompt.pixel_values.shape == (0, row_size)
    _check_spans(prompt, processors[kind].placeholder_id, len(images))
    if kind in QWEN:
        positions, _ = models[kind].model.get_rope_index(
            expected["input_ids"], expected["mm_token_type_ids"], expected.get("image_grid_thw")
        )
        assert prompt.position_ids.dtype == np.int32
        assert prompt.position_ids.tolist() == positions[:, 0].tolist()
    else:
        assert prompt.position_ids.shape == (0, 0)


def _check_spans(prompt: VisionPrompt, placeholder_id: int, images: int) -> None:
    assert prompt.image_spans.shape == (images, 2)
    assert prompt.image_spans.dtype == np.int32
    assert prompt.image_grid.shape == (images, 3)
    inside = np.zeros(len(prompt.input_ids), dtype=bool)
    for start, count in prompt.image_spans:
        assert count > 0 and not inside[start : start + count].any()
        inside[start : start + count] = True
    assert np.array_equal(inside, prompt.input_ids == placeholder_id)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_as_many_tokens_as_the_model_makes_rows(
    kind: str, processors: dict[str, VisionProcessor], models: dict[str, Any]
) -> None:
    for image in (*pictures(3), picture(1, 1), picture(500, 40)):
        prompt = processors[kind].process(None, f"a{PLACEHOLDER[kind]}b".encode(), [encode(image)])
        assert prompt.image_spans[0, 1] == feature_rows(models[kind], kind, prompt)


def feature_rows(model: Any, kind: str, prompt: VisionPrompt) -> int:
    pixels = torch.from_numpy(prompt.pixel_values)
    with torch.no_grad():
        out = model.get_image_features(**hf_image_inputs(model, pixels, torch.from_numpy(prompt.image_grid)))
    return sum(len(rows) for rows in out.pooler_output)


@pytest.mark.parametrize(("kind", "strategy"), [("llava", "full"), ("llava_siglip", "default")])
def test_the_other_strategies_of_llava_give_the_rows_of_the_model(
    kind: str, strategy: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    path = with_config(
        checkpoints[kind], tmp_path / "c", lambda c: c.update(vision_feature_select_strategy=strategy)
    )
    prompt = VisionProcessor(path, Tokenizer(path)).process(None, b"<image>", [encode(picture())])
    assert prompt.image_spans[0, 1] == {"full": 17, "default": 8}[strategy]
    assert (
        feature_rows(AutoModelForImageTextToText.from_pretrained(path), kind, prompt)
        == prompt.image_spans[0, 1]
    )


@pytest.mark.parametrize("seed", range(8))
def test_positions_of_random_layouts_equal_get_rope_index(seed: int, models: dict[str, Any]) -> None:
    """Grids of every shape, text of every length between the images, none before or behind."""
    rng = np.random.default_rng(seed)
    kinds, grids, spans, length = [], [], [], 0
    for _ in range(int(rng.integers(1, 6))):
        text = int(rng.integers(1 if grids else 0, 5))
        grid = (1, 2 * int(rng.integers(1, 9)), 2 * int(rng.integers(1, 9)))
        rows = grid[1] * grid[2] // 4
        kinds += [0] * text + [1] * rows
        spans.append((length + text, rows))
        grids.append(grid)
        length += text + rows
    tail = int(rng.integers(0, 4))
    kinds += [0] * tail
    expected, _ = models[QWEN[seed % 2]].model.get_rope_index(
        torch.zeros((1, length + tail), dtype=torch.long), torch.tensor([kinds]), torch.tensor(grids)
    )
    assert mrope_positions(length + tail, spans, grids, 2).tolist() == expected[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_text_with_placeholders_equals_the_processor_of_transformers(
    kind: str, processors: dict[str, VisionProcessor], oracles: dict[str, Any]
) -> None:
    mark = PLACEHOLDER[kind]
    for text, count in ((f"{mark}x{mark}", 2), (f"A: {mark}{mark}\nGrüße", 2), (mark, 1), ("no image", 0)):
        images = pictures(count)
        # In a list of their own: as those of one prompt.
        given = [images] if kind == "llava_onevision" and images else images
        expected = oracles[kind](text=text, images=given or None)
        prompt = processors[kind].process(None, text.encode(), [encode(image) for image in images])
        assert prompt.input_ids.tolist() == np.asarray(expected["input_ids"]).reshape(-1).tolist()
        _check_spans(prompt, processors[kind].placeholder_id, count)


@pytest.mark.row("H9")
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_send_an_image_gives_the_same_prompt(
    kind: str, processors: dict[str, VisionProcessor]
) -> None:
    process = processors[kind].process
    image = picture(64, 48)
    raw = encode(image)
    text = base64.b64encode(raw).decode()
    expected = process(dump(user(IMAGE, "?")), None, [raw])
    own: list[Message] = [
        {"type": "image", "image": text},
        {"type": "image", "image": data_url(raw)},
        {"type": "image_url", "image_url": data_url(raw)},
        {"type": "image_url", "image_url": {"url": data_url(raw), "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": text}},
    ]
    for part in own:
        assert same(process(dump(user(part, "?")), None), expected)
    for part in ({"type": "image_url"}, {"type": "image", "image": None}):
        assert same(process(dump(user(part, "?")), None, [text.encode()]), expected)
    pixels = np.asarray(image)[None]
    assert same(process(dump(user(IMAGE, "?")), None, None, pixels), expected)
    assert same(process(dump(user(IMAGE, "?")), None, [], pixels), expected)
    assert same(process(dump(user(IMAGE, "?")), None, [encode(image, "WEBP", lossless=True)]), expected)


def test_parts_without_data_take_the_given_images_in_order(processors: dict[str, VisionProcessor]) -> None:
    process = processors["qwen2_vl"].process
    a, b, c = (encode(image) for image in pictures(3))
    own = {"type": "image_url", "image_url": {"url": data_url(b)}}
    mixed = process(dump(user("x", IMAGE, own), user({"type": "image_url"}, "y")), None, [a, c])
    assert same(mixed, process(dump(user("x", IMAGE, IMAGE), user(IMAGE, "y")), None, [a, b, c]))
    assert not same(
        mixed, process(dump(user("x", IMAGE, own), user({"type": "image_url"}, "y")), None, [c, a])
    )


@pytest.mark.parametrize(
    ("messages", "given", "reason"),
    [
        ([user(IMAGE, IMAGE)], 1, "2 image parts without data, and 1 image in `image` or `image_pixels`"),
        ([user(IMAGE)], 0, "1 image part without data, and 0 images in `image`"),
        ([user("hi")], 2, "0 image parts without data, and 2 images in `image`"),
        ([user("hi <image>")], 1, "0 image parts without data, and 1 image in `image`"),
        ([user("what is <image>?")], 0, "the prompt has 1 placeholder '<image>' and 0 images"),
        ([user(IMAGE, "is <image> a tag?")], 1, "the prompt has 2 placeholders '<image>' and 1 image;"),
        ([{"role": "user", "content": "<image>"}], 0, "the prompt has 1 placeholder '<image>' and 0 images"),
    ],
)
def test_counts_that_disagree_are_both_named(
    messages: list[Message], given: int, reason: str, processors: dict[str, VisionProcessor]
) -> None:
    for kind in ("llava", "llava_siglip"):
        with pytest.raises(InputError) as refused:
            processors[kind].process(dump(*messages), None, [encode(picture())] * given)
        assert refused.value.field == "messages"
        assert refused.value.reason.startswith(reason)


def test_a_text_with_the_wrong_number_of_placeholders_is_refused_before_anything_is_decoded(
    processors: dict[str, VisionProcessor],
) -> None:
    process = processors["qwen2_5_vl"].process
    with pytest.raises(
        InputError, match=r"text_input: the prompt has 0 placeholders '<\|image_pad\|>' and 1 image;"
    ):
        process(None, b"no image", [b"not looked at"])
    with pytest.raises(InputError, match=r"text_input: the prompt has 2 placeholders .* and 1 image;"):
        process(None, b"<|image_pad|><|image_pad|>", [b"not looked at"])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "image": 5}, r"messages: \[0\].content\[0\].image must be a string, got int 5"),
        ({"type": "image_url", "image_url": {}}, r"\[0\].content\[0\].image_url must have the key 'url'"),
        (
            {"type": "image_url", "image_url": {"url": []}},
            r"\[0\].content\[0\].image_url.url must be a string",
        ),
        (
            {"type": "image", "url": "x"},
            r"\[0\].content\[0\]: unknown key 'url'; known are 'type' and 'image'",
        ),
        ({"type": "image", "min_pixels": 5}, r"\[0\].content\[0\]: unknown key 'min_pixels'"),
        (
            {"type": "video"},
            r"\[0\].content\[0\].type 'video' is not supported; known: 'text', 'image', 'image_url'",
        ),
        (
            {"type": "image_url", "image_url": "http://a/b.png"},
            r"image\[0\]: URLs are not fetched, .*'http:'",
        ),
        (
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            r"image\[0\]: URLs are not fetched",
        ),
        ({"type": "image", "image": "/etc/passwd"}, r"image\[0\]: (bad base64|not an image)"),
        ({"type": "image", "image": "data:image/png;base64,AAA"}, r"image\[0\]: bad base64"),
        ({"type": "image", "image": ""}, r"image\[0\]: must not be empty"),
    ],
)
def test_wrong_image_parts_are_refused_by_their_place(
    part: Message, reason: str, processors: dict[str, VisionProcessor]
) -> None:
    with pytest.raises(InputError, match=reason):
        processors["llava"].process(dump(user(part)), None)


def test_texts_only_callers_refuse_image_parts_as_before(processors: dict[str, VisionProcessor]) -> None:
    for part in (IMAGE, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}):
        with pytest.raises(
            InputError, match=rf"content\[0\].type '{part['type']}' is not supported; known: 'text'$"
        ):
            processors["llava"].tokenizer.encode_chat(dump(user(part)))[0]


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_wrong_images_are_named_by_their_index(kind: str, processors: dict[str, VisionProcessor]) -> None:
    good = encode(picture())
    own = {"type": "image", "image": base64.b64encode(good[:200]).decode()}
    with pytest.raises(InputError, match=r"image\[1\]: (truncated or damaged|cannot be read)"):
        processors[kind].process(dump(user(IMAGE, own, IMAGE)), None, [good, good])
    with pytest.raises(InputError, match=r"image\[2\]: not an image"):
        processors[kind].process(None, (PLACEHOLDER[kind] * 3).encode(), [good, good, b"AAAA"])


def test_limits_of_a_request_hold(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["llava"]
    process = VisionProcessor(path, Tokenizer(path), ImageLimits(1000, 5000, 2)).process
    small = encode(Image.new("RGB", (100, 50)))
    assert process(None, b"<image><image>", [small, small]).image_spans.shape == (2, 2)
    for field, reason, images in (
        ("image", "3 images, at most 2 are allowed (max_images)", [small] * 3),
        ("image[1]", "100 x 51 = 5100 pixels, at most 5000", [small, encode(Image.new("RGB", (100, 51)))]),
        ("image[0]", "bytes, at most 1000 are allowed (max_image_bytes)", [encode(picture(60, 60), "PNG")]),
    ):
        with pytest.raises(InputError) as refused:
            process(None, b"<image>" * len(images), images)
        assert refused.value.field == field
        assert reason in refused.value.reason
    with pytest.raises(InputError, match=r"image: 3 images, at most 2"):
        process(None, b"<image>" * 3, None, np.zeros((3, 4, 4, 3), np.uint8))


def test_a_line_of_pixels_that_scaling_would_blow_up_is_refused(
    processors: dict[str, VisionProcessor],
) -> None:
    """CLIP's processor scales the shorter side to the height of the model's image, and the other with it."""
    line = encode(Image.new("L", (1, 30_000)))
    with pytest.raises(
        InputError,
        match=r"image\[0\]: 1 x 30000 pixels are too long .* 56 x 1680000 of them, at most 67108864",
    ):
        processors["llava"].process(None, b"<image>", [line])
    assert processors["llava_siglip"].process(None, b"<image>", [line]).image_spans.shape == (1, 2)
    with pytest.raises(InputError, match=r"image\[0\]: refused by the image processor: .*aspect ratio"):
        processors["qwen2_vl"].process(None, b"<|image_pad|>", [line])


def test_an_image_padded_to_a_square_is_limited_too(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(checkpoints["llava"], path)
    file = path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "image_processor_type": "LlavaImageProcessor", "do_pad": True}))
    processor = VisionProcessor(path, Tokenizer(path))
    image = picture(120, 30)
    oracle = hf_processor("llava", path).image_processor(images=[image], return_tensors="np")
    prompt = processor.process(None, b"<image>", [encode(image)])
    np.testing.assert_allclose(prompt.pixel_values, oracle["pixel_values"].reshape(1, -1), rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"image\[0\]: 1 x 30000 pixels .* 30000 x 30000 of them"):
        processor.process(None, b"<image>", [encode(Image.new("L", (1, 30_000)))])


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        # Made for strings: a list would be printed.
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "user: #\n#\nab\ncd\nuser: x\n",
        ),
        # Reads text parts and drops all others.
        (
            "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}",
            "user: #\n#\nab\ncd\nuser: x\n",
        ),
        # Reads parts, images among them, but not strings.
        (
            "{% for m in messages %}{% for p in m.content %}{{ '#' if p.type == 'image' else p.text }}"
            "{% endfor %}/{% endfor %}",
            "ab##cd/x/",
        ),
        # Reads both, and writes them differently.
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}[{{ '#' if p.type == 'image' else p.text }}]{% endfor %}"
            "{% endif %}/{% endfor %}",
            "[ab][#][#][cd]/x/",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["llava_siglip", "qwen2_vl"])
def test_templates_that_do_not_know_image_parts_get_placeholders_before_the_text(
    kind: str, template: str, prompt: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "c"
    shutil.copytree(checkpoints[kind], path)
    mark = PLACEHOLDER[kind]
    (path / "chat_template.jinja").write_text(template.replace("#", mark))
    processor = VisionProcessor(path, Tokenizer(path))
    image = encode(picture())
    got = processor.process(
        dump(user("ab", IMAGE, IMAGE, "cd"), {"role": "user", "content": "x"}), None, [image] * 2
    )
    knows = "image" in template
    shown = mark if knows or kind not in QWEN else f"<|vision_start|>{mark}<|vision_end|>"
    collapsed = [i for at, i in enumerate(got.input_ids.tolist()) if not _repeats(got, at)]
    assert processor.tokenizer.hf.decode(collapsed) == prompt.replace("#", shown)
    plain = processor.tokenizer.render(parse_conversation(dump(user("x"))))
    assert "x" in plain and "type" not in plain


def _repeats(prompt: VisionPrompt, at: int) -> bool:
    return any(start < at < start + count for start, count in prompt.image_spans)


def test_a_template_that_reads_lists_only_loses_no_string(processors: dict[str, VisionProcessor]) -> None:
    """LLaVA 1.5's template renders nothing of a string: a text prompt was a bare 'USER: ASSISTANT:'."""
    tokenizer = processors["llava"].tokenizer
    for message in ({"role": "user", "content": "hello"}, user("hello")):
        assert tokenizer.render(parse_conversation(dump(message))) == "USER: hello ASSISTANT:"


def test_the_template_of_an_older_processor_is_found(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(checkpoints["llava"], path)
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").unlink()
    assert not Tokenizer(path).hf.chat_template
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    messages, image = dump(user(IMAGE, "?")), encode(picture())
    first = checkpoints["llava"]
    expected = VisionProcessor(first, Tokenizer(first)).process(messages, None, [image])
    assert same(VisionProcessor(path, Tokenizer(path)).process(messages, None, [image]), expected)


def test_the_image_processor_may_be_part_of_processor_config(
    checkpoints: dict[str, Path], processors: dict[str, VisionProcessor], tmp_path: Path
) -> None:
    """Where transformers 5 saves it."""
    path = tmp_path / "c"
    shutil.copytree(checkpoints["llava"], path)
    image = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").unlink()
    file = path / "processor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_processor": image}))
    raw = encode(picture())
    got = VisionProcessor(path, Tokenizer(path)).process(None, b"<image>", [raw])
    assert np.array_equal(got.pixel_values, processors["llava"].process(None, b"<image>", [raw]).pixel_values)


def test_the_name_of_an_older_image_processor_class_loads_the_same(
    checkpoints: dict[str, Path], processors: dict[str, VisionProcessor], tmp_path: Path
) -> None:
    """Published Qwen2.5-VL checkpoints name the torchvision class of transformers 4."""
    path = tmp_path / "c"
    shutil.copytree(checkpoints["qwen2_5_vl"], path)
    file = path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "image_processor_type": "Qwen2VLImageProcessorFast"}))
    raw = encode(picture())
    got = VisionProcessor(path, Tokenizer(path)).process(None, b"<|image_pad|>", [raw])
    assert same(got, processors["qwen2_5_vl"].process(None, b"<|image_pad|>", [raw]))


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_what_the_fixtures_say_depends_on_the_image(
    kind: str, processors: dict[str, VisionProcessor], models: dict[str, Any]
) -> None:
    """Else every comparison of outputs with these checkpoints would be worthless."""
    answers = []
    for seed in range(3):
        raw = encode(picture(112, 84, seed=seed))
        prompt = processors[kind].process(dump(user(IMAGE, "What is in this picture?")), None, [raw])
        ids = torch.from_numpy(prompt.input_ids)[None].long()
        pixels, grid = torch.from_numpy(prompt.pixel_values), torch.from_numpy(prompt.image_grid)
        inputs = hf_image_inputs(models[kind], pixels, grid)
        if kind in QWEN:
            inputs["mm_token_type_ids"] = (ids == processors[kind].placeholder_id).int()
        with torch.no_grad():
            out = models[kind].generate(input_ids=ids, max_new_tokens=12, do_sample=False, **inputs)
        answers.append(out[0, ids.shape[1] :].tolist())
    assert len({tuple(answer) for answer in answers}) == 3
    assert min(len(set(answer)) for answer in answers) >= 4


@pytest.mark.parametrize(("kind", "alone"), [("llava_next", False), ("llava_onevision", True)])
def test_an_image_has_the_tiles_of_its_size(
    kind: str, alone: bool, processors: dict[str, VisionProcessor]
) -> None:
    """Of the whole image and of its parts; LLaVA-OneVision may have the whole one alone."""
    config = processors[kind].config
    assert isinstance(config, AnyresConfig)
    down, across = config.tiles(90, 40)
    assert down * across > 1
    config.check_image(1 + down * across, 90, 40)
    wrong = {0, down * across, 2 + down * across, *([] if alone else [1])}
    if alone:
        config.check_image(1, 90, 40)
    for count in wrong:
        with pytest.raises(InputError, match=f"an image of 90 x 40 pixels has .* tiles, got {count}"):
            config.check_image(count, 90, 40)


@pytest.mark.parametrize("kind", VISION_KINDS)
def test_a_prompt_without_images_has_empty_tensors(kind: str, processors: dict[str, VisionProcessor]) -> None:
    prompt = processors[kind].process(None, b"text", None)
    length = len(prompt.input_ids)
    shapes = {name: getattr(prompt, name).shape for name in vars(prompt)}
    assert shapes == {
        "input_ids": (length,),
        "pixel_values": (0, processors[kind].row_size),
        "image_grid": (0, 3),
        "image_spans": (0, 2),
        "position_ids": (3, length) if kind in QWEN else (0, 0),
        "chat_format": (1,),
    }
    dtypes = [getattr(prompt, name).dtype for name in vars(prompt)]
    assert dtypes == [np.int32, np.float32, np.int32, np.int32, np.int32, np.object_]
    assert prompt.chat_format[0] == b""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((None, None), "text_input, messages: exactly one is needed, none is given"),
        ((b"[]", b"a"), "text_input, messages: exactly one is allowed, both are given"),
        ((None, b"\xff"), "text_input: invalid UTF-8 at byte 0 of 1"),
        ((None, b""), "text_input: must not be empty"),
        ((b"[{]", None), "messages: invalid JSON at line 1 column 3"),
        (
            (None, b"<image>", [b"x"], np.zeros((1, 4, 4, 3), np.uint8)),
            "image, image_pixels: at most one is allowed, both are given",
        ),
        ((None, b"<image>", None, np.zeros((4, 4, 3), np.uint8)), "image_pixels: must have shape"),
    ],
)
def test_wrong_requests_name_the_field(
    arguments: tuple[Any, ...], reason: str, processors: dict[str, VisionProcessor]
) -> None:
    with pytest.raises(InputError) as refused:
        processors["llava"].process(*arguments)
    assert str(refused.value).startswith(reason)


def test_many_threads_share_one_processor(processors: dict[str, VisionProcessor]) -> None:
    processor = processors["qwen2_5_vl"]
    requests = [
        (dump(user(*[IMAGE] * (n % 4), f"request {n}")), None, [encode(image) for image in pictures(n % 4)])
        for n in range(24)
    ]
    expected = [processor.process(*request) for request in requests]
    with ThreadPoolExecutor(6) as pool:
        for got, wanted in zip(pool.map(lambda r: processor.process(*r), requests), expected, strict=True):
            assert same(got, wanted)


def test_neither_torch_nor_torchvision_is_needed(
    checkpoints: dict[str, Path], processors: dict[str, VisionProcessor]
) -> None:
    """The preprocessor's process forbids torch: it would take a gigabyte and seconds more to start."""
    raw = encode(picture())
    program = (
        "import hashlib, json, sys\n"
        "from quire_ensemble.tokenizer import Tokenizer, forbid_torch\n"
        "from quire_ensemble.vision import VisionProcessor\n"
        "assert not {'torch', 'transformers', 'PIL'} & set(sys.modules), 'importing is light'\n"
        "forbid_torch()\n"
        "raw = sys.stdin.buffer.read()\n"
        "for path, mark in json.loads(sys.argv[1]):\n"
        "    prompt = VisionProcessor(path, Tokenizer(path)).process(None, mark.encode(), [raw])\n"
        "    print(prompt.input_ids.tolist(), hashlib.md5(prompt.pixel_values.tobytes()).hexdigest())\n"
        "assert sys.modules['torch'] is None\n"
    )
    arguments = json.dumps([(str(checkpoints[kind]), PLACEHOLDER[kind]) for kind in VISION_KINDS])
    ran = subprocess.run(
        [sys.executable, "-c", program, arguments], input=raw, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()
    for line, kind in zip(ran.stdout.decode().splitlines(), VISION_KINDS, strict=True):
        here = processors[kind].process(None, PLACEHOLDER[kind].encode(), [raw])
        digest = hashlib.md5(here.pixel_values.tobytes()).hexdigest()
        assert line == f"{here.input_ids.tolist()} {digest}"


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (
            "llava",
            lambda c: c.update(model_type="llama4"),
            "model_type 'llama4' has no known vision part; known",
        ),
        ("llava", lambda c: c.pop("model_type"), "config.json: cannot be read: Unrecognized model"),
        (
            "llava",
            lambda c: c["vision_config"].update(model_type="siglip2_vision_model"),
            "tower 'siglip2_vision_model' is not supported",
        ),
        (
            "llava",
            lambda c: c["vision_config"].update(image_size=70),
            r"gives \[3, 56, 56\], .* takes \[3, 70, 70\]",
        ),
        ("llava", lambda c: c.update(image_token_index=7000), r"no special tokens for \[7000\]"),
        ("qwen2_vl", lambda c: c.update(image_token_id=70), r"no special tokens for \[512, 70, 513\]"),
        (
            "llava_next",
            lambda c: c.update(image_grid_pinpoints=[[56, 112]]),
            "image_grid_pinpoints differ between the image processor and config.json",
        ),
        (
            "llava_next",
            lambda c: c.update(image_grid_pinpoints=[[56, 112], [56, 57]]),
            r"image_grid_pinpoints must be pairs of multiples of 56, at most 256 tiles, got \(56, 57\)",
        ),
        ("llava_next", lambda c: c.update(image_grid_pinpoints=[]), "must be 1 to 1024 sizes, got 0"),
        (
            "llava_next",
            lambda c: c.update(image_grid_pinpoints=[[56 * 17, 56 * 16]]),
            "at most 256 tiles, got",
        ),
        (
            "llava_next",
            lambda c: c.update(vision_feature_select_strategy="full"),
            "leaves rows that are not those of the patches",
        ),
        (
            "llava_next",
            lambda c: c["vision_config"].update(patch_size=57),
            "patch_size 57 of the vision tower is larger than its image_size 56",
        ),
        (
            "llava_onevision",
            lambda c: c.update(vision_aspect_ratio="anyres_max_0"),
            "vision_aspect_ratio 'anyres_max_0' is not anyres_max_N",
        ),
        (
            "llava_onevision",
            lambda c: c.update(vision_aspect_ratio="anyres_max_1", image_grid_pinpoints=[[50, 200]]),
            "would scale lines of 4 tiles to nothing",
        ),
        (
            "qwen2_vl",
            lambda c: c["vision_config"].update(spatial_merge_size=4),
            "merge_size is 2 .* and 4 in config",
        ),
        (
            "qwen2_5_vl",
            lambda c: c["vision_config"].update(patch_size=16),
            "patch_size is 14 .* and 16 in config",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_when_loading(
    kind: str,
    change: Callable[[dict[str, Any]], None],
    reason: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    path = with_config(checkpoints[kind], tmp_path / "c", change)
    with pytest.raises(VisionError, match=reason) as refused:
        VisionProcessor(path, Tokenizer(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_and_broken_files_are_one_clear_line(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def refusal(name: str, text: str | None) -> str:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(checkpoints["qwen2_vl"], path)
        (path / name).unlink() if text is None else (path / name).write_text(text)
        with pytest.raises(VisionError) as refused:
            VisionProcessor(path, Tokenizer(checkpoints["qwen2_vl"]))
        message = str(refused.value)
        assert message.startswith(str(path)) and "\n" not in message
        return message

    assert "config.json: not found" in refusal("config.json", None)
    assert "config.json: cannot be read: " in refusal("config.json", "{")
    assert "image processor cannot be loaded" in refusal("preprocessor_config.json", None)
    assert "image processor cannot be loaded" in refusal("preprocessor_config.json", "{")
    broken = json.dumps(
        {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5], "image_std": [0.1, 0.2]}
    )
    assert "the image processor does not work" in refusal("preprocessor_config.json", broken)


def test_code_of_a_checkpoint_is_never_run(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(checkpoints["llava"], path)
    marker = tmp_path / "was_run"
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    file = path / "preprocessor_config.json"
    settings = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    file.write_text(json.dumps(settings))
    with pytest.raises(VisionError, match="image processor cannot be loaded"):
        VisionProcessor(path, Tokenizer(path))
    assert not marker.exists()


# --- what a request may take ---


def one_colour(width: int, height: int, kind: str = "WEBP") -> bytes:
    """A whole picture; as WebP it has 40 bytes, whatever its size."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"lossless": True, "method": 0} if kind == "WEBP" else {}
    Image.new("RGB", (width, height), (9, 80, 200)).save(buffer, kind, **options)
    return buffer.getvalue()


def request_of(count: int) -> bytes:
    return json.dumps([{"role": "user", "content": [{"type": "image"}] * count}]).encode()


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava"])
@pytest.mark.parametrize("form", ["file", "pixels"])
def test_all_images_of_a_request_are_added_up_before_one_is_decoded(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    """16 files of 40 bytes, each within the limit of one image, became 540 megapixels: a minute of work and
    2.8 GB."""
    limits = ImageLimits(max_image_pixels=120_000, max_request_pixels=250_000)
    processor = VisionProcessor(checkpoints[kind], Tokenizer(checkpoints[kind]), limits)
    inputs: dict[str, Any] = {"images": [one_colour(400, 300)] * 2}
    if form == "pixels":
        inputs = {"pixels": np.zeros((2, 300, 400, 3), np.uint8)}
    processor.process(request_of(2), None, **inputs)
    inputs = {name: np.concatenate([v, v]) if form == "pixels" else v * 2 for name, v in inputs.items()}
    monkeypatch.setattr(processor, "_process_image", lambda *_: pytest.fail("an image was worked on"))
    with pytest.raises(InputError, match=r"image: more than 250000 pixels .* \(max_request_pixels\)"):
        processor.process(request_of(4), None, **inputs)
    processor.close()


def test_bytes_and_patches_of_a_request_are_added_up(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen2_vl"]
    raw = one_colour(112, 112)
    patches = VisionProcessor(path, Tokenizer(path)).process(request_of(1), None, [raw]).pixel_values.shape[0]
    for name, most in (("max_request_patches", 3 * patches), ("max_request_bytes", 3 * len(raw))):
        processor = VisionProcessor(path, Tokenizer(path), ImageLimits(**{name: most}))
        processor.process(request_of(3), None, [raw] * 3)
        with pytest.raises(InputError, match=rf"image: more than {most} .* \({name}\)"):
            processor.process(request_of(4), None, [raw] * 4)
        processor.close()


def test_lines_that_become_large_when_they_are_scaled_are_added_up(
    processors: dict[str, VisionProcessor],
) -> None:
    """One of 500 pixels is scaled to 336 x 168000 by a LLaVA processor, and 16 of them were one request."""
    processor = processors["llava"]
    edge = dict(processor._image_processor.size)["shortest_edge"]
    line = one_colour(1, 60_000_000 // edge**2, "PNG")
    processor._read_images([line])
    with pytest.raises(InputError, match="max_request_pixels"):
        processor.process(request_of(2), None, [line] * 2)


@pytest.mark.parametrize("size", [(1, 30_000), (30_000, 1)])
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_lines_are_refused_by_their_header(
    processors: dict[str, VisionProcessor],
    models: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: tuple[int, int],
) -> None:
    processor, images = processors[kind], 1
    raw = one_colour(*size, "PNG")
    if kind in ("llava_siglip", "llava_next", "llava_onevision"):  # scale to sizes of their own
        prompt = processor.process(request_of(1), None, [raw])
        assert prompt.image_spans[0, 1] == feature_rows(models[kind], kind, prompt)
        if kind != "llava_onevision":
            return
        images = 2  # each padded to a square
    monkeypatch.setattr(processor, "_process_image", lambda *_: pytest.fail("the image was worked on"))
    with pytest.raises(InputError, match=r"^image\[0\]: "):
        processor.process(request_of(images), None, [raw] * images)


def test_images_of_several_requests_share_the_memory(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each within its limits, requests side by side took four times what one may."""
    path = checkpoints["qwen2_vl"]
    processor = VisionProcessor(path, Tokenizer(path), ImageLimits(max_image_pixels=40_000))
    inside: list[int] = []
    hold = processor._gate.hold

    @contextmanager
    def watched(amount: int) -> Iterator[None]:
        with hold(amount):
            inside.append(processor._gate.used)
            yield

    monkeypatch.setattr(processor._gate, "hold", watched)
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(processor.process, request_of(3), None, [one_colour(120, 120)] * 3) for _ in range(4)
        ]
        shapes = {job.result().pixel_values.shape for job in jobs}
    assert len(shapes) == 1 and len(inside) == 12
    assert max(inside) <= 40_000 and processor._gate.used == 0
    processor.close()


def test_a_gate_lets_in_what_has_room_in_order_and_the_large_alone() -> None:
    gate = MemoryGate(10)
    entered: queue.Queue[str] = queue.Queue()
    leave = {name: threading.Event() for name in "abcd"}

    def work(name: str, amount: int) -> None:
        with gate.hold(amount):
            entered.put(name)
            assert leave[name].wait(60)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, "a", 6)]
        assert entered.get(timeout=60) == "a"
        jobs.append(pool.submit(work, "b", 4))
        assert entered.get(timeout=60) == "b"
        jobs.append(pool.submit(work, "c", 99))
        leave["a"].set()
        jobs[0].result(60)
        assert entered.empty() and gate.used == 4
        leave["b"].set()
        assert entered.get(timeout=60) == "c"
        jobs.append(pool.submit(work, "d", 1))
        assert gate.used == 99
        leave["c"].set()
        assert entered.get(timeout=60) == "d"
        leave["d"].set()
    assert gate.used == 0
