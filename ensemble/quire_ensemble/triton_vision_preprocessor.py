"""The `vision_preprocessor` model of an ensemble: messages or text with images in, a vision prompt out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_ensemble.images import ImageLimits
from quire_ensemble.text_limits import text_limits
from quire_ensemble.triton_model import (
    EnsembleModel,
    client_id,
    element,
    given_inputs,
    integer_parameters,
    unbatched,
)

if TYPE_CHECKING:
    from quire_ensemble.vision import VisionProcessor, VisionPrompt

REQUEST_THREADS = 4
"""Most requests of one batch that are processed at a time."""


class VisionPreprocessorModel(EnsembleModel):
    """The preprocessor of prompts with images.

    Inputs, each with a batch dimension of 1: exactly one of `text_input` STRING [1] and `messages` STRING
    [1]; at most one of `image` STRING [n] and `image_pixels` UINT8 [n, height, width, 3]. Outputs: the fields
    of `VisionPrompt`, with that dimension too.

    Parameters named like the fields of `ImageLimits` and `TextLimits` set these.
    """

    processor: VisionProcessor
    _pool: ThreadPoolExecutor

    def _load(self, checkpoint: Path, parameters: Mapping[str, str], args: Mapping[str, str]) -> None:
        from quire_ensemble.tokenizer import Tokenizer
        from quire_ensemble.vision import VisionProcessor

        limits, texts = image_limits(parameters), text_limits(parameters, checkpoint)
        self.processor = VisionProcessor(checkpoint, Tokenizer(checkpoint), limits, texts)
        self.processor.warm_up()
        self._pool = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="requests")

    def execute(self, requests: list[Any]) -> list[Any]:
        given = [given_inputs(request) for request in requests]
        # Threads of our own only where they help; Triton's objects are used in Triton's thread.
        run = map if len(given) < 2 else self._pool.map
        ids = map(client_id, requests)
        return [
            self._response(result, request_id)
            for result, request_id in zip(run(self._process, given), ids, strict=True)
        ]

    def finalize(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True)
        self.processor.close()

    def _process(self, given: dict[str, np.ndarray]) -> VisionPrompt | Exception:
        try:
            return self.processor.process(
                element(given, "messages"),
                element(given, "text_input"),
                unbatched(given, "image", 1).tolist() if "image" in given else None,
                unbatched(given, "image_pixels", 4) if "image_pixels" in given else None,
            )
        except Exception as error:  # a processor is the checkpoint's: it may raise anything
            return error

    def _response(self, result: VisionPrompt | Exception, request_id: str) -> Any:
        if isinstance(result, Exception):
            return self._refusal(result, request_id)
        pb = self.pb_utils
        return pb.InferenceResponse(
            [
                pb.Tensor(field.name, np.ascontiguousarray(getattr(result, field.name)[None]))
                for field in dataclasses.fields(result)
            ]
        )


def image_limits(parameters: Mapping[str, str]) -> ImageLimits:
    """Returns the limits that a model's parameters state, with defaults for the others. Raises
    ParameterError."""
    names = [field.name for field in dataclasses.fields(ImageLimits)]
    return ImageLimits(**integer_parameters(parameters, names))
