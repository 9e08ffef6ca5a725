"""The `vision_encoder` model: with stand-in Triton utilities, and in a fresh interpreter."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from quire_ensemble import triton_vision_encoder
from quire_ensemble.triton_vision_encoder import NICENESS, EncoderOptions, VisionEncoderModel
from quire_ensemble.vision_tower import VisionTower, default_num_threads
from tests.fixtures import fake_pb_utils
from tests.fixtures.fake_metrics import FakeMetricFamily
from tests.fixtures.vision_checkpoints import make_vision_checkpoint
from tests.unit.test_encoder_cache import check_integrity

ROOT = Path(__file__).resolve().parents[2]
GRIDS = [(1, 4, 6), (1, 10, 8), (1, 2, 12)]
"""Images of different sizes: 24, 80 and 24 patches, 6, 20 and 6 rows of output."""
ROW_SIZE, HIDDEN = 3 * 2 * 14 * 14, 64


class Model(VisionEncoderModel):
    pb_utils: ClassVar[Any] = fake_pb_utils


class Image:
    """An image with its own pixels, as the preprocessor gives it."""

    def __init__(self, number: int) -> None:
        self.grid = GRIDS[number % len(GRIDS)]
        rows = self.grid[0] * self.grid[1] * self.grid[2]
        self.pixels = np.random.default_rng(number).standard_normal((rows, ROW_SIZE), dtype=np.float32)


def tensors(images: Sequence[Image]) -> dict[str, np.ndarray]:
    """The model's inputs, with the batch dimension."""
    empty = np.zeros((0, ROW_SIZE), np.float32)
    return {
        "pixel_values": np.concatenate([empty, *(image.pixels for image in images)])[None],
        "image_grid": np.array([image.grid for image in images], np.int32).reshape(1, -1, 3),
    }


def request(*images: Image, **changed: np.ndarray | None) -> fake_pb_utils.InferenceRequest:
    """A request of these images; a changed input of None is left out."""
    given = tensors(images) | changed
    return fake_pb_utils.InferenceRequest({k: v for k, v in given.items() if v is not None})


def arguments(directory: Path, **parameters: str) -> dict[str, str]:
    stated = {key: {"string_value": value} for key, value in parameters.items()}
    return {
        "model_config": json.dumps({"parameters": stated}),
        "model_repository": str(directory),
        "model_name": "vision_encoder",
        "model_version": "1",
        "model_instance_name": "vision_encoder_0_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }


@pytest.fixture(autouse=True)
def niceness(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the model adds to the process's niceness, kept from the test's own process, and its threads."""
    added: list[int] = []
    monkeypatch.setattr(os, "nice", added.append)
    before = torch.get_num_threads()
    yield added
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository's encoder directory, with the checkpoint where the builder puts it."""
    repository = tmp_path_factory.mktemp("repository")
    make_vision_checkpoint("qwen2_5_vl", repository / "generator" / "1" / "tiny")
    (repository / "vision_encoder").mkdir()
    return repository / "vision_encoder"


Load = Callable[..., Model]


@pytest.fixture
def load(directory: Path) -> Load:
    """A model with parameters; one thread and CPU unless they are given."""

    def load(**parameters: str) -> Model:
        model = Model()
        stated = {"checkpoint": "../generator/1/tiny", "device": "cpu", "num_threads": "1", **parameters}
        model.initialize(arguments(directory, **stated))
        return model

    return load


@pytest.fixture(scope="module")
def expected(directory: Path) -> Callable[..., np.ndarray]:
    """The output of a request: each image by a tower of its own, alone."""
    tower = VisionTower(directory.parent / "generator" / "1" / "tiny", device="cpu", num_threads=1)

    def rows(*images: Image) -> np.ndarray:
        outputs = [tower.encode(i.pixels, np.array([i.grid]))[0] for i in images]
        return np.concatenate([np.zeros((0, HIDDEN), np.float32), *outputs])

    return rows


class Forwards:
    """Counts a model's forwards by the number of their images, and lets those of one image fail."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, failing: Image | None = None) -> None:
        self.images: list[int] = []
        encode = model.tower.encode

        def counted(pixels: np.ndarray, grid: np.ndarray) -> list[np.ndarray]:
            self.images.append(len(grid))
            if failing is not None and (failing.pixels[0] == pixels).all(axis=1).any():
                raise RuntimeError("CUDA error:\n  device-side assert")
            return encode(pixels, grid)

        monkeypatch.setattr(model.tower, "encode", counted)


def embeds(response: Any) -> np.ndarray:
    assert response.error is None, response.error.message()
    array = response.tensors["image_embeds"]
    assert array.dtype == np.float32 and array.ndim == 2 and array.shape[1] == HIDDEN
    return array


def assert_close(ours: np.ndarray, other: np.ndarray) -> None:
    assert ours.shape == other.shape
    np.testing.assert_allclose(ours, other, rtol=0, atol=1e-5)


def test_requests_of_a_batch_are_encoded_by_one_forward(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    forwards = Forwards(model, monkeypatch)
    images = [Image(n) for n in range(6)]
    asked = [images[:1], images[1:4], [], images[4:]]
    responses = model.execute([request(*part) for part in asked])
    assert forwards.images == [6]
    for part, response in zip(asked, responses, strict=True):
        assert_close(embeds(response), expected(*part))
    assert embeds(responses[2]).shape == (0, HIDDEN)
    assert embeds(responses[0]).flags.writeable, "the cache's own array must not be handed out"


@pytest.mark.row("H11")
def test_a_second_request_runs_no_forward(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    forwards = Forwards(model, monkeypatch)
    first, second, third = (Image(n) for n in range(3))
    (cold,) = model.execute([request(first, second)])
    assert forwards.images == [2]
    warm, swapped = model.execute([request(first, second), request(second, first)])
    assert forwards.images == [2], "an image was encoded again"
    assert np.array_equal(embeds(warm), embeds(cold))
    assert_close(embeds(swapped), expected(second, first))
    (mixed,) = model.execute([request(second, third)])
    assert forwards.images == [2, 1]
    assert_close(embeds(mixed), expected(second, third))


@pytest.mark.row("H11")
def test_the_same_image_twice_in_a_batch_is_encoded_once(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache keeps nothing: what the batch encoded answers all of its requests."""
    first, second = Image(0), Image(1)
    for cache_bytes in ("1000000", "0"):
        model = load(cache_bytes=cache_bytes)
        forwards = Forwards(model, monkeypatch)
        responses = model.execute([request(first), request(second, first, first), request(first)])
        assert forwards.images == [2]
        for response, part in zip(responses, ([first], [second, first, first], [first]), strict=True):
            assert_close(embeds(response), expected(*part))


def test_the_cache_stays_within_its_bytes(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 20 rows, images of 6, 20 and 6: the first round leaves the last one, the second the large."""
    model = load(cache_bytes=str(20 * HIDDEN * 4))
    forwards = Forwards(model, monkeypatch)
    images = [Image(n) for n in range(3)]
    for _ in range(2):
        (response,) = model.execute([request(*images)])
        assert_close(embeds(response), expected(*images))
        check_integrity(model.cache)
    assert forwards.images == [3, 2]
    assert model.cache.bytes == 20 * HIDDEN * 4


def test_the_same_pixels_on_another_grid_are_another_image(
    load: Load, expected: Callable[..., np.ndarray]
) -> None:
    model = load()
    square, wide = Image(0), Image(2)
    wide.pixels = square.pixels
    for image in (square, wide, square):
        (response,) = model.execute([request(image)])
        assert_close(embeds(response), expected(image))


def test_wrong_requests_fail_alone_with_invalid_arg(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, other = Image(0), Image(2)
    given = tensors([image])
    wrong = {
        "pixel_values: has 23 rows, image_grid means 24": request(
            image, pixel_values=given["pixel_values"][:, 1:]
        ),
        "pixel_values: has 24 rows, image_grid means 48": request(
            image, image_grid=np.array([[GRIDS[0]] * 2], np.int32)
        ),
        "pixel_values: must have shape [rows, 1176], got [24, 1175]": request(
            image, pixel_values=given["pixel_values"][:, :, 1:]
        ),
        "pixel_values: must have a batch of 1 and 2 more dimensions, got [2, 24, 1176]": request(
            image, pixel_values=np.repeat(given["pixel_values"], 2, axis=0)
        ),
        "pixel_values: is missing": request(image, pixel_values=None),
        "image_grid[0]: must be positive, height and width multiples of 2, got [1, 3, 8]": request(
            image, image_grid=np.array([[[1, 3, 8]]], np.int32)
        ),
        "image_grid: must have shape [images, 3], got [1, 2]": request(
            image, image_grid=given["image_grid"][:, :, :2]
        ),
    }
    model = load()
    forwards = Forwards(model, monkeypatch)
    responses = model.execute([request(other), *wrong.values(), request(other)])
    assert forwards.images == [1]
    for response, message in zip(responses[1:-1], wrong, strict=True):
        assert response.error is not None, message
        assert response.error.message() == message
        assert response.error.code() == fake_pb_utils.TritonError.INVALID_ARG
        assert response.tensors == {}
    for response in (responses[0], responses[-1]):
        assert_close(embeds(response), expected(other))


def test_a_failing_forward_fails_its_requests_and_the_model_goes_on(
    load: Load, expected: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(max_patches="48")
    first, large, last, cached = Image(0), Image(1), Image(2), Image(3)
    model.execute([request(cached)])
    broken = Forwards(model, monkeypatch, failing=large)
    responses = model.execute(
        [request(first), request(cached, large), request(last), request(cached), request(last, first)]
    )
    assert broken.images == [1, 1, 1], "24, 80 and 24 patches in forwards of at most 48"
    error = responses[1].error
    assert error.code() == fake_pb_utils.TritonError.INTERNAL
    assert error.message() == "image[1]: the vision encoder failed: CUDA error: device-side assert"
    for index, part in {0: [first], 2: [last], 3: [cached], 4: [last, first]}.items():
        assert_close(embeds(responses[index]), expected(*part))
    monkeypatch.undo()
    (again,) = model.execute([request(cached, large)])
    assert_close(embeds(again), expected(cached, large))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"checkpoint": "../absent"}, "absent/config.json: not found"),
        ({"checkpoint": ""}, "parameter 'checkpoint' must name the checkpoint directory"),
        ({"cache_bytes": "256MiB"}, "parameter 'cache_bytes' must be an integer of at least 0, got '256MiB'"),
        ({"max_patches": "0"}, "parameter 'max_patches' must be an integer of at least 1, got '0'"),
        ({"num_threads": "-1"}, "parameter 'num_threads' must be an integer of at least 1, got '-1'"),
        ({"output_device": "tpu"}, "parameter 'output_device' must be one of cpu, gpu, got 'tpu'"),
        ({"output_device": "gpu"}, "output_device 'gpu' needs the encoder on a GPU, it is on cpu"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported; supported: auto, float32"),
        ({"device": "cuda:99"}, "device 'cuda:99' is not there"),
        ({"cash_bytes": "1"}, "parameter 'cash_bytes' is unknown; known: checkpoint, allow_pickle,"),
    ],
)
def test_a_wrong_parameter_fails_the_load_with_one_line(
    parameters: dict[str, str], reason: str, load: Load
) -> None:
    with pytest.raises(fake_pb_utils.TritonModelException, match=re.escape(reason)) as refused:
        load(**parameters)
    assert "\n" not in str(refused.value)


def test_options_are_those_of_the_tower_and_their_defaults() -> None:
    assert EncoderOptions.from_parameters({}) == EncoderOptions()
    stated = {
        "checkpoint": "x",
        "device": "cpu",
        "dtype": "bfloat16",
        "cache_bytes": "0",
        "max_patches": "7",
        "num_threads": "2",
        "output_device": "gpu",
        "allow_pickle": "true",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
    }
    assert EncoderOptions.from_parameters(stated) == EncoderOptions(
        device="cpu",
        dtype="bfloat16",
        cache_bytes=0,
        max_patches=7,
        num_threads=2,
        output_device="gpu",
        allow_pickle=True,
    )


def test_a_gpu_instance_takes_its_own_gpu(directory: Path) -> None:
    args = arguments(directory, checkpoint="x") | {
        "model_instance_kind": "GPU",
        "model_instance_device_id": "3",
    }
    assert triton_vision_encoder._device(EncoderOptions(), args) == "cuda:3"
    assert triton_vision_encoder._device(EncoderOptions(device="cpu"), args) == "cpu"
    assert triton_vision_encoder._device(EncoderOptions(), args | {"model_instance_kind": "MODEL"}) == "auto"


def test_on_cpu_it_gives_way_to_decoding(load: Load, niceness: list[int], directory: Path) -> None:
    load()
    assert niceness == [NICENESS]
    assert torch.get_num_threads() == 1
    model = Model()
    model.initialize(arguments(directory, checkpoint="../generator/1/tiny", device="cpu"))
    assert torch.get_num_threads() == default_num_threads()


def test_metrics_count_images_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMetricFamily.reset(monkeypatch, fake_pb_utils)
    model = load(max_patches="100")
    first, large = Image(0), Image(1)
    model.execute([request(first, large), request(first)])
    model.execute([request(large), request(image := Image(2), pixel_values=image.pixels[None, 1:])])

    def values() -> dict[str, float]:
        return FakeMetricFamily.shown("model", "version", "instance")

    counted = {
        "quire_vision_encoder_runs_total": 2,
        "quire_vision_encoder_images_total": 2,
        "quire_vision_cache_hits_total": 2,
        "quire_vision_cache_misses_total": 2,
    }
    assert values() == {**counted, "quire_vision_cache_bytes": 26 * HIDDEN * 4}
    for metric in FakeMetricFamily.all_metrics.values():
        assert metric.labels == {
            "model": "vision_encoder",
            "version": "1",
            "instance": "vision_encoder_0_0",
        }
    model.finalize()
    del model
    gc.collect()
    assert values() == {**counted, "quire_vision_cache_bytes": 0}
    assert not FakeMetricFamily.deleted, "a reloaded model has these metrics, too"


def test_nothing_heavy_is_imported_before_initialize() -> None:
    """Triton starts an interpreter before each load only to complete the configuration."""
    program = """
import sys
import quire_ensemble.triton_vision_encoder
heavy = {"torch", "transformers", "quire"} & set(sys.modules)
assert not heavy, heavy
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
