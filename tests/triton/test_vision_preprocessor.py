"""The `vision_preprocessor` model: with stand-in Triton utilities, and as the builder writes it, served."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.grpc as grpc
from PIL import Image
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from quire_ensemble.builder import build_repository
from quire_ensemble.images import ImageLimits
from quire_ensemble.tokenizer import Tokenizer
from quire_ensemble.triton_vision_preprocessor import VisionPreprocessorModel, image_limits
from quire_ensemble.vision import VisionProcessor, VisionPrompt
from quire_ensemble.vision_schema import PREPROCESSOR_OUTPUTS
from tests.fixtures import fake_pb_utils
from tests.fixtures.server import ServeRepository
from tests.fixtures.vision_checkpoints import make_vision_checkpoint

FIELDS = [spec.name for spec in PREPROCESSOR_OUTPUTS]
IMAGE = {"type": "image"}


class Model(VisionPreprocessorModel):
    pb_utils: ClassVar[Any] = fake_pb_utils


def arguments(directory: Path, **parameters: str) -> dict[str, str]:
    values = {name: {"string_value": value} for name, value in parameters.items()}
    config = json.dumps({"parameters": values})
    return {
        "model_config": config,
        "model_repository": str(directory),
        "model_instance_name": "preprocessor_0",
    }


def picture(seed: int, kind: str = "PNG", size: tuple[int, int] = (90, 64)) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize(size).save(buffer, kind)
    return buffer.getvalue()


def one_colour(width: int, height: int) -> bytes:
    """A WebP of 40 bytes, whatever its size."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height)).save(buffer, "WEBP", lossless=True, method=0)
    return buffer.getvalue()


def user(*parts: Any) -> bytes:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return json.dumps([{"role": "user", "content": content}]).encode()


def request(**inputs: Any) -> fake_pb_utils.InferenceRequest:
    """Of bytes (one element), lists of bytes, and arrays."""
    arrays = {}
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            value = np.array([value] if isinstance(value, bytes) else value, dtype=object)
        arrays[name] = value[None]
    return fake_pb_utils.InferenceRequest(arrays)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint("qwen2_vl", tmp_path_factory.mktemp("repository") / "generator" / "tiny")


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> VisionProcessor:
    return VisionProcessor(checkpoint, Tokenizer(checkpoint))


@pytest.fixture(scope="module")
def directory(checkpoint: Path) -> Path:
    path = checkpoint.parent.parent / "vision_preprocessor"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    model = Model()
    model.initialize(arguments(directory, checkpoint="../generator/tiny"))
    yield model
    model.finalize()


def test_a_request_gets_the_prompt_of_the_processor_under_the_contracts_names(
    model: Model, processor: VisionProcessor
) -> None:
    images = [picture(seed) for seed in range(3)]
    messages = user(IMAGE, "and", IMAGE, IMAGE)
    pixels = np.asarray(Image.open(io.BytesIO(images[0])))[None]
    responses = model.execute(
        [
            request(messages=messages, image=images),
            request(messages=user(IMAGE), image_pixels=pixels),
            request(text_input=b"see <|image_pad|>", image=[base64.b64encode(images[1])]),
            request(text_input=b"no image"),
            request(text_input=b"no image", image=[]),
        ]
    )
    expected = [
        processor.process(messages, None, images),
        processor.process(user(IMAGE), None, images[:1]),
        processor.process(None, b"see <|image_pad|>", images[1:2]),
        processor.process(None, b"no image"),
        processor.process(None, b"no image"),
    ]
    dtypes = [np.int32, np.float32, np.int32, np.int32, np.int32, np.object_]
    for response, prompt in zip(responses, expected, strict=True):
        assert response.error is None
        assert list(response.tensors) == FIELDS
        assert [array.dtype for array in response.tensors.values()] == dtypes
        for name, array in response.tensors.items():
            assert array.shape == (1, *getattr(prompt, name).shape)
            assert np.array_equal(array[0], getattr(prompt, name))
            assert array.flags.c_contiguous


def test_the_outputs_are_those_of_the_schema() -> None:
    assert [field.name for field in dataclasses.fields(VisionPrompt)] == FIELDS


def test_wrong_requests_fail_alone_with_invalid_arg(model: Model) -> None:
    good = picture(0)
    wrong = {
        "text_input, messages: exactly one is needed, none is given": request(image=[good]),
        "text_input, messages: exactly one is allowed, both are given": request(
            text_input=b"a", messages=user("a")
        ),
        "image, image_pixels: at most one is allowed, both are given": request(
            messages=user(IMAGE), image=[good], image_pixels=np.zeros((1, 4, 4, 3), np.uint8)
        ),
        "messages: must have shape [1, 1], got [1, 2]": request(messages=[user("a"), user("b")]),
        "image: must have a batch of 1 and 1 more dimensions, got [1, 1, 1]": request(
            messages=user(IMAGE), image=np.array([[good]], dtype=object)
        ),
        "image_pixels: must have shape [n, height, width, 3], got [1, 4, 4, 1]": request(
            messages=user(IMAGE), image_pixels=np.zeros((1, 4, 4, 1), np.uint8)
        ),
        "messages: 1 image part without data, and 2 images": request(messages=user(IMAGE), image=[good] * 2),
        "text_input: the prompt has 0 placeholders '<|image_pad|>' and 1 image;": request(
            text_input=b"a", image=[good]
        ),
        "image: 17 images, at most 16 are allowed (max_images)": request(
            text_input=b"<|image_pad|>" * 17, image=[good] * 17
        ),
        "image: more than 67108864 pixels in the images of the request are not allowed": (
            request(messages=user(IMAGE, IMAGE, IMAGE), image=[one_colour(5000, 5000)] * 3)
        ),
        "image[1]: truncated or damaged": request(
            text_input=b"<|image_pad|>" * 2, image=[good, picture(1, "JPEG", (300, 300))[:2000]]
        ),
        "image[0]: not an image of a known format": request(messages=user({**IMAGE, "image": "aGVsbG8="})),
        "image[0]: URLs are not fetched, this one begins with 'http:'": request(
            messages=user({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}})
        ),
        "messages: [0].content[0].type 'video' is not supported": request(messages=user({"type": "video"})),
    }
    fine = request(messages=user(IMAGE), image=[good])
    responses = model.execute([fine, *wrong.values(), fine])
    assert len(responses) == len(wrong) + 2
    for response, message in zip(responses[1:-1], wrong, strict=True):
        assert response.error is not None
        assert response.error.message().startswith(message)
        assert response.error.code() == fake_pb_utils.TritonError.INVALID_ARG
        assert response.tensors == {}
    for response in (responses[0], responses[-1]):
        assert response.tensors["image_spans"].shape == (1, 1, 2)


def test_what_nobody_foresaw_ends_its_own_request_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of a request's thread came out of `execute`, and its whole batch failed with it."""
    process = model.processor.process

    def broken(messages: bytes | None, text: bytes | None, *rest: Any) -> VisionPrompt:
        if text == b"unknown":
            raise RuntimeError("no such\nresampling filter")
        return process(messages, text, *rest)

    monkeypatch.setattr(model.processor, "process", broken)
    good, bad = model.execute([request(text_input=b"good"), request(text_input=b"unknown")])
    assert good.error is None
    assert bad.error.message() == "no such resampling filter"
    assert bad.error.code() == fake_pb_utils.TritonError.INTERNAL


def test_limits_are_parameters(directory: Path) -> None:
    model = Model()
    model.initialize(
        arguments(
            directory,
            checkpoint="../generator/tiny",
            max_images="1",
            max_image_pixels="4000",
            max_image_bytes="500",
        )
    )
    assert model.processor.limits == ImageLimits(max_images=1, max_image_pixels=4000, max_image_bytes=500)
    assert image_limits({}) == ImageLimits()
    two, large, long = model.execute(
        [
            request(text_input=b"<|image_pad|>" * 2, image=[b"x", b"x"]),
            request(text_input=b"<|image_pad|>", image_pixels=np.zeros((1, 50, 81, 3), np.uint8)),
            request(text_input=b"<|image_pad|>", image=[picture(0, "PNG")]),
        ]
    )
    assert two.error.message() == "image: 2 images, at most 1 are allowed (max_images)"
    assert "81 x 50 = 4050 pixels, at most 4000 are allowed (max_image_pixels)" in large.error.message()
    assert "at most 500 are allowed (max_image_bytes)" in long.error.message()
    model.finalize()


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, "parameter 'checkpoint' must name the checkpoint directory"),
        ({"checkpoint": "../absent"}, "tokenizer directory does not exist"),
        (
            {"checkpoint": "x", "max_images": "many"},
            "parameter 'max_images' must be an integer of at least 1, got 'many'",
        ),
        (
            {"checkpoint": "x", "max_image_pixels": "0"},
            "parameter 'max_image_pixels' must be an integer of at least 1, got '0'",
        ),
        ({"checkpoint": "x", "max_image_pixels": "9" * 12}, "max_image_pixels must be at most 178956970"),
    ],
)
def test_a_model_that_cannot_work_says_so_when_it_loads(
    parameters: dict[str, str], reason: str, directory: Path
) -> None:
    with pytest.raises(fake_pb_utils.TritonModelException, match=reason) as refused:
        Model().initialize(arguments(directory, **parameters))
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_vision_part_is_refused(
    directory: Path, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        fake_pb_utils.TritonModelException, match="model_type 'llama' has no known vision part"
    ):
        Model().initialize(arguments(directory, checkpoint=str(tmp_path / "c")))


@pytest.mark.row("H1")
@pytest.mark.row("H9")
def test_the_built_model_serves_prompts_through_grpc(
    serve_repository: ServeRepository, checkpoint: Path, processor: VisionProcessor, tmp_path: Path
) -> None:
    build_repository(checkpoint, tmp_path / "all", placement="path")
    repository = tmp_path / "repository"
    repository.mkdir()
    (tmp_path / "all" / "vision_preprocessor").rename(repository / "vision_preprocessor")
    server = serve_repository(repository, "--", "--disable-auto-complete-config")
    images = [picture(seed, kind) for seed, kind in enumerate(("PNG", "JPEG", "WEBP"))]
    url = "data:image/png;base64," + base64.b64encode(images[0]).decode()
    openai = user("What is this?", {"type": "image_url", "image_url": {"url": url}}, IMAGE)
    pixels = np.asarray(Image.open(io.BytesIO(images[1])))[None]

    def infer(**inputs: Any) -> dict[str, np.ndarray]:
        tensors = []
        for name, value in inputs.items():
            array = (value if isinstance(value, np.ndarray) else np.array(value, dtype=object))[None]
            tensors.append(grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        result = client.infer("vision_preprocessor", tensors)
        return {name: result.as_numpy(name) for name in FIELDS}

    with grpc.InferenceServerClient(server.grpc_url) as client:
        for inputs, expected in (
            (
                {"messages": [user(IMAGE, "x", IMAGE, IMAGE)], "image": images},
                processor.process(user(IMAGE, "x", IMAGE, IMAGE), None, images),
            ),
            ({"messages": [openai], "image_pixels": pixels}, processor.process(openai, None, images[1:2])),
            (
                {"text_input": [b"a<|image_pad|>"], "image": [base64.b64encode(images[2])]},
                processor.process(None, b"a<|image_pad|>", images[2:]),
            ),
            ({"text_input": ["Grüße".encode()]}, processor.process(None, "Grüße".encode())),
        ):
            got = infer(**inputs)
            for name, array in got.items():
                assert array.shape == (1, *getattr(expected, name).shape)
                assert np.array_equal(array[0], getattr(expected, name))
        for wrong, message in (
            ({"image": images}, "text_input, messages: exactly one is needed"),
            ({"messages": [openai], "image": images}, "1 image part without data, and 3 images"),
            ({"messages": [user(IMAGE)], "image": [b"GIF89a"]}, "image[0]: cannot be read as an image"),
        ):
            with pytest.raises(InferenceServerException, match=re.escape(message)) as refused:
                infer(**wrong)
            assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
