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

    Triton's dynamic batcher hands it what has come in while it worked, as a list: one round trip for all.
    Every tensor of a request has a batch dimension, of one.

    A model repository's `model.py` subclasses one and gives it Triton's Python utilities, which exist only
    inside a stub process. Nothing heavy is imported before `initialize`: Triton starts a second interpreter
    before each load.
    """

    pb_utils: ClassVar[Any]
    """The module triton_python_backend_utils; set by the subclass."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the checkpoint that the parameter `checkpoint` names.

        Args:
            args: Triton's; `model_config` (JSON), `model_repository` (the model's own directory) are read.

        Raises:
            TritonModelException: a wrong parameter, or no usable checkpoint there; one line.
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
            checkpoint: directory.
            parameters: of config.pbtxt, `checkpoint` among them.
            args: see `initialize`.
        """

    @abstractmethod
    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request, in order; None for one that is answered by its sender.

        A wrong input fails its own request with INVALID_ARG, and what cannot be foreseen with INTERNAL.
        """

    def _refusal(self, error: Exception, request_id: str) -> Any:
        """The response to a request that failed; `request_id` is its client's."""
        pb = self.pb_utils
        if isinstance(error, InputError):
            return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
        _log.error("a request failed", exc_info=error, extra={"external_id": request_id})
        return pb.InferenceResponse(error=pb.TritonError(one_line(error), pb.TritonError.INTERNAL))


def client_id(request: Any) -> str:
    """The id that the client gave its request, for log lines; empty where it cannot be read."""
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        return ""


def given_inputs(request: Any) -> dict[str, np.ndarray]:
    """A request's input tensors by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def unbatched(given: Mapping[str, np.ndarray], name: str, dims: int) -> np.ndarray:
    """An input without its batch dimension, which must be 1: a request is one conversation."""
    array = given.get(name)
    if array is None:
        raise InputError(name, "is missing")
    if array.ndim != dims + 1 or array.shape[0] != 1:
        raise InputError(name, f"must have a batch of 1 and {dims} more dimensions, got {list(array.shape)}")
    return array[0]


def element(given: Mapping[str, np.ndarray], name: str) -> bytes | None:
    """The one element of a STRING tensor; None where the request does not carry it."""
    array = given.get(name)
    if array is None:
        return None
    if array.size != 1:
        raise InputError(name, f"must have shape [1, 1], got {list(array.shape)}")
    value = array.reshape(-1)[0]
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)


def checkpoint_path(parameters: Mapping[str, str], model_directory: Path) -> Path:
    """Directory named by the parameter `checkpoint`; relative paths start at the model's directory.

    Raises:
        ParameterError: the parameter is missing, or this process opens no such path.
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
    """The stated ones of the named parameters, each an integer of at least 1; raises ParameterError."""
    return {name: integer_parameter(name, parameters[name]) for name in names if parameters.get(name)}


def integer_parameter(name: str, text: str, minimum: int = 1) -> int:
    """The number that a parameter states.

    Raises:
        ParameterError: anything else, or less than `minimum`; names the parameter.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ParameterError(
            f"parameter {name!r} must be an integer of at least {minimum}, got {shown(text)}"
        )
    return int(text)
