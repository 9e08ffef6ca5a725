"""The `vision_preprocessor` model of an ensemble: messages or text with images in, a vision prompt out.

A model repository's `vision_preprocessor/1/model.py` subclasses `VisionPreprocessorModel`, as with the
tokenizer's. Nothing heavy is imported before `initialize`.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quire_ensemble.errors import EnsembleError, InputError, shown
from quire_ensemble.images import ImageLimits
from quire_ensemble.text_limits import text_limits
from quire_ensemble.triton_tokenizer import checkpoint_path, element

if TYPE_CHECKING:
    from quire_ensemble.vision import VisionProcessor, VisionPrompt

REQUEST_THREADS = 4
"""Requests of one batch that are worked on at a time."""


class VisionPreprocessorModel:
    """Triton Python model (not decoupled: each request gets one response, in the returned list).

    Inputs: exactly one of `text_input` STRING [1] and `messages` STRING [1]; at most one of `image` STRING
    [n] and `image_pixels` UINT8 [n, height, width, 3]. Outputs: the fields of `VisionPrompt`.
    """

    pb_utils: ClassVar[Any]
    """The module triton_python_backend_utils; set by the subclass."""

    processor: VisionProcessor
    _pool: ThreadPoolExecutor

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the processor of the checkpoint named by parameter `checkpoint`.

        Args:
            args: Triton's; `model_config` (JSON) and `model_repository` (the model's own directory) are read.
                Parameters named like the fields of `ImageLimits` and `TextLimits` set these.

        Raises:
            TritonModelException: a parameter is missing or wrong, or the checkpoint is not usable; one line.
        """
        from quire_ensemble.tokenizer import Tokenizer
        from quire_ensemble.vision import VisionProcessor

        config, directory = json.loads(args["model_config"]), Path(args["model_repository"])
        try:
            limits = image_limits(config)
            path = checkpoint_path(config, directory)
            texts = text_limits(config, path)
            self.processor = VisionProcessor(path, Tokenizer(path), limits, texts)
        except (EnsembleError, ValueError) as error:
            raise self.pb_utils.TritonModelException(str(error)) from None
        self._pool = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="requests")

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; a wrong input fails its own request with INVALID_ARG."""
        given = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        # Threads of our own only where they help; Triton's objects are used in Triton's thread.
        run = map if len(given) < 2 else self._pool.map
        return [self._response(result) for result in run(self._process, given)]

    def finalize(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True)
        self.processor.close()

    def _process(self, given: dict[str, np.ndarray]) -> VisionPrompt | InputError:
        try:
            return self.processor.process(
                element(given, "messages"),
                element(given, "text_input"),
                _elements(given, "image"),
                given.get("image_pixels"),
            )
        except InputError as error:
            return error

    def _response(self, result: VisionPrompt | InputError) -> Any:
        pb = self.pb_utils
        if isinstance(result, InputError):
            return pb.InferenceResponse(error=pb.TritonError(str(result), pb.TritonError.INVALID_ARG))
        return pb.InferenceResponse(
            [
                pb.Tensor(field.name, np.ascontiguousarray(getattr(result, field.name)))
                for field in dataclasses.fields(result)
            ]
        )


def image_limits(model_config: dict[str, Any]) -> ImageLimits:
    """The limits that a model configuration's parameters state.

    Raises:
        ValueError: a value is no integer, or out of range; names the parameter.
    """
    stated = {}
    for field in dataclasses.fields(ImageLimits):
        text = model_config.get("parameters", {}).get(field.name, {}).get("string_value", "")
        if text:
            try:
                stated[field.name] = int(text)
            except ValueError:
                raise ValueError(f"parameter {field.name!r} must be an integer, got {shown(text)}") from None
    return ImageLimits(**stated)


def _elements(given: dict[str, np.ndarray], name: str) -> list[bytes | str] | None:
    """The elements of a STRING tensor; None where the request does not carry it."""
    array = given.get(name)
    if array is None:
        return None
    if array.ndim != 1:
        raise InputError(name, f"must have shape [n], got {list(array.shape)}")
    return array.tolist()
