"""The `vision_encoder` model of an ensemble: processed pixels in, rows for the language model out."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from quire_common.errors import InputError, ParameterError, one_line
from quire_ensemble.encoder_cache import EncoderCache
from quire_ensemble.errors import VisionError
from quire_ensemble.triton_metrics import immortal
from quire_ensemble.triton_model import EnsembleModel, given_inputs, integer_parameter, unbatched

if TYPE_CHECKING:
    from quire_ensemble.vision_tower import VisionTower

PIXELS, GRID, EMBEDS = "pixel_values", "image_grid", "image_embeds"
NICENESS = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The encoder model's parameters in config.pbtxt (all of them `string_value`), except `checkpoint`."""

    device: str = "auto"
    """Device of the encoder: cpu, cuda, cuda:N or auto. auto: the GPU of a KIND_GPU instance, else CUDA where
    it is visible, else cpu."""
    dtype: str = "float32"
    cache_bytes: int = 268435456
    """Most bytes of main memory for cached outputs, for each instance."""
    max_patches: int = 16384
    num_threads: int | None = None
    """Threads that torch may use if the encoder is on the CPU; unset: half of the cores."""
    output_device: str = "cpu"
    """cpu: the output is in main memory; gpu: it is on the encoder's GPU, for a generator that reads it
    there."""
    allow_pickle: bool = False

    @staticmethod
    def from_parameters(parameters: Mapping[str, str]) -> EncoderOptions:
        """Returns the options that a model's parameters state. Names in capitals, which are Triton's own, are
        ignored.

        Raises:
            ParameterError: a parameter is unknown, or its value is not allowed (`device` and `dtype` are
                checked later).
        """
        readers: Mapping[str, Any] = {
            "cache_bytes": partial(integer_parameter, minimum=0),
            "max_patches": integer_parameter,
            "num_threads": integer_parameter,
            "output_device": partial(_choice, {"cpu": "cpu", "gpu": "gpu"}),
            "allow_pickle": partial(_choice, {"true": True, "false": False}),
        }
        values: dict[str, Any] = {}
        known = {option.name for option in dataclasses.fields(EncoderOptions)}
        for name, text in parameters.items():
            if name in known:
                values[name] = readers[name](name, text) if name in readers else text
            elif name != "checkpoint" and not name.isupper():
                raise ParameterError(
                    f"parameter {name!r} is unknown; known: checkpoint, {', '.join(sorted(known))}"
                )
        return EncoderOptions(**values)


class _Image(NamedTuple):
    """An image of a request."""

    key: str
    """Key of the image's output rows in the cache."""
    pixels: np.ndarray
    """float32 [rows of the image, row_size]."""
    grid: np.ndarray
    """int32 [3]: the image's grid; the model family decides what the numbers mean."""


class VisionEncoderModel(EnsembleModel):
    """The encoder of images.

    Inputs of a request, each with a batch dimension of 1: `pixel_values` FP32 [rows, row_size], `image_grid`
    INT32 [images, 3]. Output: `image_embeds` FP32 [embedding rows of all its images, `hidden_size` of
    `VisionTower`], without a batch dimension. A request without images gets no rows.

    Parameters: `checkpoint` and the fields of `EncoderOptions`. Further arguments of `initialize` that are
    read: the instance's kind and device, the model's name and version.
    """

    tower: VisionTower
    cache: EncoderCache

    def _load(self, checkpoint: Path, parameters: Mapping[str, str], args: Mapping[str, str]) -> None:
        options = EncoderOptions.from_parameters(parameters)
        # Before torch is imported: threads that spin for long take the cores that decoding needs.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        from quire_ensemble.vision_tower import VisionTower, choose_device

        device = choose_device(_device(options, args))
        if options.output_device == "gpu" and device.type != "cuda":
            raise VisionError(f"output_device 'gpu' needs the encoder on a GPU, it is on {device}")
        if device.type == "cpu":
            # A decode step is short and many streams wait for it, an image is long and one request waits:
            # where both want a core, decoding goes first. Before loading, because threads inherit it.
            os.nice(NICENESS)
        self.tower = VisionTower(
            checkpoint,
            device=str(device),
            dtype=options.dtype,
            num_threads=options.num_threads,
            max_patches=options.max_patches,
            allow_pickle=options.allow_pickle,
        )
        self.tower.warm_up()
        self.cache = EncoderCache(options.cache_bytes)
        self._output_on_gpu = options.output_device == "gpu"
        self._metrics = _EncoderMetrics(self.pb_utils, args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns one response per request, in order. An image that is not cached is encoded once for all
        requests that have it. The images of all requests share forward passes (`VisionTower.split`). A wrong
        request fails alone, with INVALID_ARG. Requests with an image whose forward pass failed end with
        INTERNAL. (A tensor that Triton cannot decode fails the whole list.)
        """
        jobs = [self._images(request) for request in requests]
        asked = [image for job in jobs if isinstance(job, list) for image in job]
        images = {image.key: image for image in asked}
        cached = {key: self.cache.get(key) for key in images}
        found = {key: rows for key, rows in cached.items() if rows is not None}
        pending = [image for key, image in images.items() if key not in found]
        failures = self._encode(pending, found)
        self._metrics.count(hits=len(asked) - len(pending), misses=len(pending))
        self._metrics.set_cache_bytes(self.cache.bytes)
        return [self._respond(job, found, failures) for job in jobs]

    def finalize(self) -> None:
        """Sets the metric of cached bytes to 0. The series stay, because a reloaded model uses them."""
        self._metrics.set_cache_bytes(0)

    def _images(self, request: Any) -> list[_Image] | InputError:
        try:
            given = given_inputs(request)
            pixel_values, grid = (unbatched(given, name, 2) for name in (PIXELS, GRID))
            self.tower.check(pixel_values, grid)
        except InputError as error:
            return error
        pixels = np.split(pixel_values, np.cumsum(self.tower.rows(grid)))[: len(grid)]
        return [_Image(_cache_key(*image), *image) for image in zip(pixels, grid, strict=True)]

    def _encode(self, pending: Sequence[_Image], found: dict[str, np.ndarray]) -> dict[str, str]:
        """Encodes the pending images, and adds their output rows to `found` and to the cache. Returns the
        reasons of failures, by key of the image."""
        failures: dict[str, str] = {}
        for part in self.tower.split(np.array([image.grid for image in pending])):
            keys, pixels, grids = zip(*pending[part], strict=True)
            try:
                outputs = self.tower.encode(np.concatenate(pixels), np.stack(grids))
            except Exception as error:  # whatever torch raises must not end the model
                _log.exception("quire vision encoder: a forward of %d images failed", len(keys))
                failures |= dict.fromkeys(keys, one_line(error))
                continue
            self._metrics.count(runs=1, images=len(keys))
            for key, output in zip(keys, outputs, strict=True):
                # Requests of this batch take it from here, so that what the cache drops is no loss to them.
                found[key] = output
                self.cache.put(key, output)
        return failures

    def _respond(
        self,
        images: Sequence[_Image] | InputError,
        found: Mapping[str, np.ndarray],
        failures: Mapping[str, str],
    ) -> Any:
        pb = self.pb_utils
        if isinstance(images, InputError):
            return self._refusal(images, "")
        failed = [(i, failures[image.key]) for i, image in enumerate(images) if image.key in failures]
        if failed:
            index, reason = failed[0]
            message = f"image[{index}]: the vision encoder failed: {reason}"
            return pb.InferenceResponse(error=pb.TritonError(message, pb.TritonError.INTERNAL))
        empty = np.zeros((0, self.tower.hidden_size), np.float32)
        embeds = np.concatenate([empty, *(found[image.key] for image in images)])
        return pb.InferenceResponse([self._output(embeds)])

    def _output(self, embeds: np.ndarray) -> Any:
        """Returns the output tensor, in main memory or on the GPU as `output_device` says. (No test runs the
        latter, because that needs a GPU.)"""
        if not self._output_on_gpu:
            return self.pb_utils.Tensor(EMBEDS, embeds)
        import torch

        return self.pb_utils.Tensor.from_dlpack(EMBEDS, torch.from_numpy(embeds).to(self.tower.device))


class _EncoderMetrics:
    """The instance's custom metrics; does nothing if Triton's utilities have no metrics. Each update is a
    call to the server of 20 to 80 us. A batch of images makes few of them, so they are not collected and
    flushed, as the generator's updates are.
    """

    FAMILIES: ClassVar[dict[str, tuple[str, str]]] = {
        "runs": ("quire_vision_encoder_runs_total", "Forwards of the vision encoder"),
        "images": ("quire_vision_encoder_images_total", "Images encoded"),
        "hits": ("quire_vision_cache_hits_total", "Images answered without encoding them"),
        "misses": ("quire_vision_cache_misses_total", "Images that had to be encoded"),
    }
    GAUGE = ("quire_vision_cache_bytes", "Bytes of cached image embeddings")

    def __init__(self, pb_utils: Any, args: Mapping[str, str]) -> None:
        self._counters: dict[str, Any] = {}
        self._gauge: Any = None
        kind = getattr(pb_utils, "MetricFamily", None)
        if kind is None:
            return
        # Instances are processes: without a label of their own they would set each other's gauge.
        labels = {
            "model": args.get("model_name", ""),
            "version": args.get("model_version", ""),
            "instance": args.get("model_instance_name", ""),
        }

        def metric(name: str, description: str, family_kind: Any) -> Any:
            family = immortal(kind(name=name, description=description, kind=family_kind))
            return immortal(family.Metric(labels=labels))

        for key, (name, description) in self.FAMILIES.items():
            self._counters[key] = metric(name, description, kind.COUNTER)
        self._gauge = metric(*self.GAUGE, kind.GAUGE)

    def count(self, **amounts: int) -> None:
        """Adds amounts to the counters with these keys in FAMILIES."""
        for key, amount in amounts.items():
            if amount and self._counters:
                self._counters[key].increment(amount)

    def set_cache_bytes(self, value: int) -> None:
        if self._gauge is not None:
            self._gauge.set(value)


def _device(options: EncoderOptions, args: Mapping[str, str]) -> str:
    if options.device == "auto" and args.get("model_instance_kind") == "GPU":
        return f"cuda:{args.get('model_instance_device_id', '0')}"
    return options.device


def _cache_key(pixels: np.ndarray, grid: np.ndarray) -> str:
    """Returns a hash of everything that an image's output depends on; about 1 ms per MB. It is computed here,
    because a wrong hash from a client would give other clients wrong images."""
    content = hashlib.blake2b(np.ascontiguousarray(grid).data, digest_size=32)
    content.update(np.ascontiguousarray(pixels).data)
    return content.hexdigest()


def _choice(choices: Mapping[str, Any], name: str, text: str) -> Any:
    if text not in choices:
        raise ParameterError(f"parameter {name!r} must be one of {', '.join(choices)}, got {text!r}")
    return choices[text]
