"""EnsembleModel: what the Triton models before the generator have in common."""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from quire_common import logs
from quire_common.checkpoint_files import check_directory, without_links
from quire_common.errors import InputError, ParameterError, ReportedError, one_line, shown

_log = logging.getLogger(__name__)


class EnsembleModel(ABC):
    """Triton Python model (not decoupled: each request gets one response).

    Triton's dynamic batcher passes the requests that came in while the model worked, up to `max_batch_size`,
    as one list, so that one round trip serves all. An input must have a batch dimension of 1.

    A `model.py` in a model repository subclasses one of our models and sets `pb_utils` to Triton's Python
    utilities, which exist only inside a stub process. Nothing heavy is imported before `initialize`: Triton
    starts a second interpreter before each load.
    """

    pb_utils: ClassVar[Any]
    """The module triton_python_backend_utils; set by the subclass."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the checkpoint that the parameter `checkpoint` names.

        Args:
            args: Triton's. `model_config` (JSON), `model_repository` (the model's own directory) and
                `model_instance_name` are read here, others by some models.

        Raises:
            TritonModelException: a parameter is wrong, or there is no usable checkpoint. The message is one
                line.
        """
        logs.set_up(args["model_instance_name"])
        stated = json.loads(args["model_config"]).get("parameters", {})
        parameters = {name: value["string_value"] for name, value in stated.items()}
        try:
            checkpoint = checkpoint_path(parameters, Path(args["model_repository"]))
            if checkpoint.is_dir():
                check_directory(checkpoint, ParameterError)
            self._load(checkpoint, parameters, args)
        except ReportedError as error:
            raise self.pb_utils.TritonModelException(str(error)) from None

    @abstractmethod
    def _load(self, checkpoint: Path, parameters: Mapping[str, str], args: Mapping[str, str]) -> None:
        """Makes the model ready.

        Args:
            checkpoint: directory or .gguf file of the checkpoint.
            parameters: parameters of config.pbtxt, `checkpoint` included.
            args: see `initialize`.
        """

    @abstractmethod
    def execute(self, requests: list[Any]) -> list[Any]:
        """Returns one response per request, in order; None for a request that is answered through its
        response sender. A wrong input fails only its own request, with INVALID_ARG. Other errors end a
        request with INTERNAL. (But a tensor that Triton cannot decode fails the whole list.)
        """

    def _refusal(self, error: Exception, request_id: str) -> Any:
        """Returns the error response to a request that failed. `request_id`: the client's id for the request,
        for the log."""
        pb = self.pb_utils
        if isinstance(error, InputError):
            return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
        _log.error("a request failed", exc_info=error, extra={"external_id": request_id})
        return pb.InferenceResponse(error=pb.TritonError(one_line(error), pb.TritonError.INTERNAL))


def client_id(request: Any) -> str:
    """Returns the id that the client gave its request, for log lines; empty if it is not UTF-8."""
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        return ""


def given_inputs(request: Any) -> dict[str, np.ndarray]:
    """Returns a request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def unbatched(given: Mapping[str, np.ndarray], name: str, dims: int) -> np.ndarray:
    """Returns an input without its batch dimension, which must be 1: a request is one prompt. `dims`: how
    many dimensions the result must have. Raises InputError if the input is missing or has another shape."""
    array = given.get(name)
    if array is None:
        raise InputError(name, "is missing")
    if array.ndim != dims + 1 or array.shape[0] != 1:
        raise InputError(name, f"must have a batch of 1 and {dims} more dimensions, got {list(array.shape)}")
    return array[0]


def element(given: Mapping[str, np.ndarray], name: str) -> bytes | None:
    """Returns the only element of a STRING tensor; None if the request does not have the tensor. Raises
    InputError if the tensor has another number of elements."""
    array = given.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise InputError(name, f"must have shape [1, 1], got {list(array.shape)}")
    value = array.reshape(-1)[0]
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def checkpoint_path(parameters: Mapping[str, str], model_directory: Path) -> Path:
    """Returns the path that the parameter `checkpoint` names; relative paths start at the model's directory.

    Raises:
        ParameterError: the parameter is missing, or the path has letters that this process cannot open it by.
    """
    stated = parameters.get("checkpoint")
    if not stated:
        file = model_directory / "config.pbtxt"
        raise ParameterError(f"{file}: parameter 'checkpoint' must name the checkpoint directory")
    try:
        return without_links(model_directory / stated)
    except UnicodeEncodeError:
        raise ParameterError(
            f"checkpoint {stated!r}: Triton's Python opens paths of ASCII letters alone: name a link to it"
        ) from None


def integer_parameters(parameters: Mapping[str, str], names: Iterable[str]) -> dict[str, int]:
    """Returns the values of those of the named parameters that are stated and not empty. Raises
    ParameterError unless each is an integer of at least 1."""
    return {name: integer_parameter(name, parameters[name]) for name in names if parameters.get(name)}


def integer_parameter(name: str, text: str, minimum: int = 1) -> int:
    """Returns the integer that a parameter states.

    Raises:
        ParameterError: the text is not 1 to 18 digits, or the number is less than `minimum`; the message
            names the parameter.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ParameterError(
            f"parameter {name!r} must be an integer of at least {minimum}, got {shown(text)}"
        )
    return int(text)
