"""RequestReader: copies a Triton request while Triton still owns its memory.

It runs on the stub's main thread, which must not be held up. So most of what is too large is refused here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire import converters
from quire.config import FrontendConfig
from quire.engine.device_array import DeviceBuffer
from quire.engine.messages import EngineInfo
from quire.engine.shared_array import SharedBuffer
from quire.errors import InvalidArgumentError
from quire.request.sampling_params import MAX_BAD_WORDS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from quire.request.scheduling_params import MAX_NAME_LENGTH
from quire.request.validation import check_prompt_length
from quire_common import client_json
from quire_ensemble.generator_schema import (
    INPUTS,
    MAX_PROMPTS,
    PROMPT_INPUTS,
    TENSORRT_LLM_INPUTS,
    TEXT_PAIR,
)

SPECS = {spec.name: spec for spec in (*TENSORRT_LLM_INPUTS, *INPUTS)}
"""Specifications of the inputs by name, TensorRT-LLM's inputs among them."""
NAME = converters.name(MAX_NAME_LENGTH)
_PROMPT_NAMES = tuple(spec.name for spec in (*PROMPT_INPUTS, TEXT_PAIR))
_SEQUENCE_END = 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

MAX_WORD_TOKENS = 4096
"""Most token ids in TensorRT-LLM's `stop_words_list` or `bad_words_list`, over all its words."""
MAX_BIASED_WORDS = 1024

_MOST_ENTRIES = {
    "text_input": MAX_PROMPTS,
    "text_pair": MAX_PROMPTS,
    "stop": MAX_STOP_STRINGS,
    "stop_words": MAX_STOP_STRINGS,
    "sampling_param_stop": MAX_STOP_STRINGS,
    "stop_words_list": 2 * MAX_WORD_TOKENS,
    "bad_words_list": 2 * MAX_WORD_TOKENS,
    "embedding_bias_words": MAX_BIASED_WORDS,
    "embedding_bias_weights": MAX_BIASED_WORDS,
    "bad_words": MAX_BAD_WORDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}
_EMBEDS = ("image_embeds", "prompt_embeds")
_PER_TOKEN = {"image_spans": 2, "position_ids": 3}
"""Most elements of an input for each token of the longest prompt, by the input's name. Embeddings are not
listed: they have at most a row for each token."""


@dataclass(slots=True)
class RawRequest:
    """Copy of a Triton request. Its sizes are checked, and the encoding of all texts but the tensors; most
    else is not."""

    tensors: dict[str, list[Any]]
    """Elements of each input, as a flat list, by the input's name; BYTES elements are `bytes`. The rows of
    embeddings are in `embeds`."""
    shapes: dict[str, tuple[int, ...]]
    parameters: str
    external_id: str
    requested_outputs: frozenset[str]
    arrived_at: float = 0.0
    """When the request was read, in CLOCK_MONOTONIC seconds; deadlines count from here."""
    timeout_us: int = 0
    """Triton's request timeout, in microseconds; 0: none."""
    correlation_id: str = ""
    sequence_end: bool = False
    embeds: SharedBuffer | DeviceBuffer | None = None
    """Rows of `image_embeds` or `prompt_embeds`; None: the request has none."""
    num_bytes: int = 0
    """Size of the request's BYTES tensors together, in bytes. One text_input with several texts in text_pair
    counts once for each of them."""


class RequestReader:
    """Reads requests to one model.

    Args:
        info: the engine's limits; a callable since a restarted engine may answer differently.
        batched: whether the model's tensors have a batch dimension.
    """

    def __init__(self, info: Callable[[], EngineInfo], config: FrontendConfig, *, batched: bool) -> None:
        self._info, self._config, self._batched = info, config, batched

    def read(self, request: Any) -> RawRequest:
        """Copies a `pb_utils.InferenceRequest`: its tensors die when `execute` returns.

        Raises:
            InvalidArgumentError: the id or another text outside the tensors is not UTF-8, the id, parameters
                or a tensor is larger than any that could be right, a tensor lacks an element, or both kinds
                of embeddings are given.
            UnavailableError: the embeddings of this frontend's requests would exceed `max_embeds_bytes`.
            EngineError: embeddings on a GPU have another form than float32 [rows, width], or CUDA fails.
        """
        info = self._info()
        raw = RawRequest(
            tensors={},
            shapes={},
            # First, as HTTP generate repeats it as a parameter.
            external_id=NAME("id", _utf8("id", request.request_id)),
            parameters=_utf8("parameters", request.parameters),
            requested_outputs=frozenset(_utf8("outputs", request.requested_output_names)),
            arrived_at=time.monotonic(),
            timeout_us=request.timeout(),
            correlation_id=str(_utf8("sequence_id", request.correlation_id) or ""),
            sequence_end=bool(request.flags() & _SEQUENCE_END),
        )
        _check_size("parameters", len(raw.parameters), client_json.MAX_BYTES)
        for tensor in request.inputs():
            name = tensor.name()
            if name in _EMBEDS and raw.embeds is not None:
                raise InvalidArgumentError("prompt_embeds", "must not be given with image_embeds")
            if name == "prompt_embeds":
                raw.tensors[name] = []  # that the prompt comes by it; the rows are in `embeds`
            if name in _EMBEDS and not tensor.is_cpu():
                raw.embeds = DeviceBuffer(tensor.to_dlpack(), self._config.max_embeds_bytes)
                continue
            array = tensor.as_numpy()
            self._check_elements(name, array, info)
            if name in _EMBEDS:
                raw.shapes[name] = array.shape
                if array.size:
                    rows_of_all = array.reshape(-1, array.shape[-1])
                    raw.embeds = SharedBuffer(rows_of_all, self._config.max_embeds_bytes)
                continue
            values = array.reshape(-1).tolist()
            if array.dtype == np.object_:
                raw.num_bytes += self._check_text(name, values)
            raw.tensors[name], raw.shapes[name] = values, array.shape
        firsts, seconds = raw.tensors.get("text_input", []), raw.tensors.get("text_pair", [])
        if len(firsts) == 1 < len(seconds):  # tokenized with each of them
            raw.num_bytes += (len(seconds) - 1) * len(firsts[0])
            _check_size("text_pair", raw.num_bytes, self._config.max_prompt_bytes)
        return raw

    def _check_elements(self, name: str, array: np.ndarray, info: EngineInfo) -> None:
        """Raises InvalidArgumentError for a tensor with more elements than any valid one of its name, for a
        batch of more than MAX_PROMPTS, and for single values and texts that lack an element."""
        rows = max(1, array.shape[0]) if self._batched and array.ndim else 1
        if rows > MAX_PROMPTS:
            raise InvalidArgumentError(name, f"a batch of at most {MAX_PROMPTS} is allowed, got {rows}")
        if SPECS[name].dims == (1,) or array.dtype == np.bool_:
            if array.size != rows:
                raise InvalidArgumentError(name, f"must hold exactly one element, got shape {array.shape}")
        elif name == "input_ids":
            check_prompt_length(array.size // rows, info.max_model_len, is_pooled=True)
        else:
            most = _MOST_ENTRIES.get(name)
            if name == "embedding_bias":
                most = info.vocab_size
            if most is None:
                most = info.max_model_len * _PER_TOKEN.get(name, info.embeds_size)
            if array.size > most * rows:
                raise InvalidArgumentError(name, f"at most {most} elements are allowed, got {array.size}")
            if name in ("text_input", "text_pair") and not array.size:
                raise InvalidArgumentError(name, "must hold at least one text")

    def _check_text(self, name: str, values: list[bytes]) -> int:
        """Returns the size of a BYTES tensor's values in bytes.

        Raises:
            InvalidArgumentError: it exceeds the limit of this input.
        """
        num_bytes = sum(map(len, values))
        most = self._config.max_prompt_bytes if name in _PROMPT_NAMES else client_json.MAX_BYTES
        _check_size(name, num_bytes, most)
        return num_bytes


def decoded(field: str, value: Any) -> Any:
    """Returns `value`, decoded if it is bytes. Raises InvalidArgumentError for bytes that are not UTF-8."""
    return _utf8(field, value.decode) if isinstance(value, bytes) else value


def _utf8(field: str, read: Callable[[], Any]) -> Any:
    """Calls `read`, a getter of Triton's or a `bytes.decode`, and returns its result.

    Triton decodes texts only in its getters, and HTTP lets any bytes through.

    Raises:
        InvalidArgumentError: the bytes are not UTF-8; names `field`.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(field, f"invalid UTF-8 at byte {error.start}") from None


def _check_size(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidArgumentError(field, f"at most {most} bytes, got {num_bytes}")
