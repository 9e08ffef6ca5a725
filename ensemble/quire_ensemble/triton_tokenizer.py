"""The `tokenizer` model of an ensemble: text or chat messages in, token ids out.

A model repository's `tokenizer/1/model.py` subclasses `TokenizerModel` and gives it Triton's Python
utilities, which exist only inside a stub process. Nothing heavy is imported before `initialize`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quire_ensemble.errors import InputError, TokenizerError
from quire_ensemble.text_limits import TextLimits, text_limits

if TYPE_CHECKING:
    from quire_ensemble.tokenizer import Tokenizer

CHECKPOINT_PARAMETER = "checkpoint"


class TokenizerModel:
    """Triton Python model (not decoupled: each request gets one response, in the returned list).

    Inputs, exactly one: `text_input` STRING [1], `messages` STRING [1]. Output: `input_ids` INT32 [n].
    """

    pb_utils: ClassVar[Any]
    """The module triton_python_backend_utils; set by the subclass."""

    tokenizer: Tokenizer
    limits: TextLimits

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer named by parameter `checkpoint`; parameters may set `TextLimits`.

        Args:
            args: Triton's; `model_config` (JSON) and `model_repository` (the model's own directory) are read.

        Raises:
            TritonModelException: parameter missing or wrong, or no usable tokenizer there; one line.
        """
        from quire_ensemble.tokenizer import Tokenizer

        config = json.loads(args["model_config"])
        try:
            path = checkpoint_path(config, Path(args["model_repository"]))
            self.limits = text_limits(config, path)
            self.tokenizer = Tokenizer(path)
        except TokenizerError as error:
            raise self.pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; a wrong input fails its own request with INVALID_ARG."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        pb = self.pb_utils
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            text, messages = element(given, "text_input"), element(given, "messages")
            token_ids = self.limits.encode(self.tokenizer, text, messages)
        except InputError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
        return pb.InferenceResponse([pb.Tensor("input_ids", np.asarray(token_ids, dtype=np.int32))])


def element(given: dict[str, np.ndarray], name: str) -> bytes | None:
    """The one element of a STRING tensor; None where the request does not carry it."""
    array = given.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise InputError(name, f"must have shape [1], got {list(array.shape)}")
    value = array.reshape(-1)[0]
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def checkpoint_path(model_config: dict[str, Any], model_directory: Path) -> Path:
    """Directory named by the parameter `checkpoint`; relative paths start at the model's directory.

    Raises:
        TokenizerError: the parameter is missing.
    """
    stated = model_config.get("parameters", {}).get(CHECKPOINT_PARAMETER, {}).get("string_value", "")
    if not stated:
        raise TokenizerError(
            f"{model_directory / 'config.pbtxt'}: parameter {CHECKPOINT_PARAMETER!r} must name the "
            "checkpoint directory"
        )
    return (model_directory / stated).resolve()
