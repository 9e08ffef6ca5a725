"""From a Triton request to a validated one.

Two halves, because they run on two threads: `read_request` copies what the request holds while Triton still
owns it (on the stub's main thread, which must not be held up), `RequestParser.parse` checks and tokenizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bad_words import with_bad_words_ids
from quire.engine.device_array import DeviceBuffer
from quire.engine.messages import EmbedsMessage, EngineInfo
from quire.engine.shared_array import SharedBuffer
from quire.errors import InvalidArgumentError, UnavailableError
from quire.multimodal import check_spans, content_hashes
from quire.sampling_params import SamplingParams, parse_sampling_params
from quire.validation import check_prompt, check_token_parameters
from quire_ensemble.errors import InputError
from quire_ensemble.generator_schema import (
    CONTROL_INPUTS,
    INPUTS,
    OUTPUTS,
    PROMPT_INPUTS,
    SAMPLING_INPUTS,
)

_SPECS = {spec.name: spec for spec in INPUTS}
_SAMPLING_NAMES = frozenset(spec.name for spec in SAMPLING_INPUTS)
_CONTROL_NAMES = frozenset(spec.name for spec in CONTROL_INPUTS)
_OUTPUT_NAMES = frozenset(spec.name for spec in OUTPUTS)
_PROMPT_NAMES = tuple(spec.name for spec in PROMPT_INPUTS)

# Triton's own request parameters; some of them reach a model although it cannot use them. `id` is what HTTP
# generate calls the request id.
_RESERVED = frozenset(
    {
        "id",
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "binary_data_output",
    }
)


@dataclass(slots=True)
class RawRequest:
    """A copy of what a Triton request holds; nothing is checked yet."""

    tensors: dict[str, list[Any]]
    """Input name to its elements, flat; BYTES elements are `bytes`."""
    shapes: dict[str, tuple[int, ...]]
    parameters: str
    external_id: str
    requested_outputs: frozenset[str]
    embeds: SharedBuffer | DeviceBuffer | None = None
    """`image_embeds`, where the request has rows of it."""


@dataclass(slots=True)
class ParsedRequest:
    """A request the engine may be given."""

    prompt_token_ids: list[int]
    params: SamplingParams
    external_id: str
    outputs: frozenset[str]
    """Outputs of every response."""
    final_outputs: frozenset[str]
    """Outputs of the last response."""
    stream: bool = False
    cancel: bool = False
    """Not a generation: ends the running request with the same external id."""
    echo: str = ""
    """Prompt text that precedes the output (exclude_input_in_output=false)."""
    embeds: EmbedsMessage | None = None
    """Points into memory that lives as long as `buffer` is open."""
    buffer: SharedBuffer | DeviceBuffer | None = None


def read_request(request: Any, max_embeds_bytes: int) -> RawRequest:
    """Copies a `pb_utils.InferenceRequest`: its tensors die when `execute` returns.

    Raises:
        UnavailableError: the embeddings of all requests here would take more than `max_embeds_bytes`.
    """
    tensors: dict[str, list[Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    embeds: SharedBuffer | DeviceBuffer | None = None
    for tensor in request.inputs():
        name = tensor.name()
        if name == "image_embeds" and not tensor.is_cpu():
            embeds = DeviceBuffer(tensor.to_dlpack())
            continue
        array = tensor.as_numpy()
        if name == "image_embeds":
            if SharedBuffer.total_bytes + array.nbytes > max_embeds_bytes:
                raise UnavailableError(
                    f"queue full: image_embeds of {SharedBuffer.total_bytes} bytes are waiting or in use, "
                    f"{array.nbytes} more exceed the limit (max_embeds_bytes {max_embeds_bytes})"
                )
            if array.size:
                embeds = SharedBuffer(array)
            continue
        tensors[name], shapes[name] = array.reshape(-1).tolist(), array.shape
    return RawRequest(
        tensors=tensors,
        shapes=shapes,
        parameters=request.parameters(),
        external_id=request.request_id(),
        requested_outputs=frozenset(request.requested_output_names()),
        embeds=embeds,
    )


class RequestParser:
    """Checks requests against one model.

    Args:
        tokenizer: a `quire_ensemble.tokenizer.Tokenizer`; None: only token ids are accepted.
        defaults: sampling defaults of the checkpoint.
        info: the engine's limits; a callable since a restarted engine may answer differently.
        max_prompt_bytes: longest text_input or messages.
        decoupled: whether the model may stream.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        defaults: SamplingParams,
        info: Callable[[], EngineInfo],
        *,
        max_prompt_bytes: int,
        decoupled: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.info = info
        self.max_prompt_bytes = max_prompt_bytes
        self.decoupled = decoupled

    def parse(self, raw: RawRequest) -> ParsedRequest:
        """Raises InvalidArgumentError naming the field and the limit; has no effect then."""
        for name, values in raw.tensors.items():
            spec = _SPECS[name]
            if spec.dims == (1,) and len(values) != 1:
                raise InvalidArgumentError(
                    name, f"must hold exactly one element, got shape {raw.shapes[name]}"
                )
        parameters = self._parameters(raw.parameters)
        control = {name: _boolean(name, parameters.pop(name)) for name in _CONTROL_NAMES & parameters.keys()}
        control |= {name: bool(raw.tensors[name][0]) for name in _CONTROL_NAMES & raw.tensors.keys()}

        stream = control.get("stream", False)
        if stream and not self.decoupled:
            raise InvalidArgumentError(
                "stream", "this model is not decoupled and answers once; use its decoupled variant"
            )
        if control.get("cancel", False):
            if not raw.external_id:
                raise InvalidArgumentError(
                    "cancel", "needs the id of the request to cancel as its request id"
                )
            outputs = raw.requested_outputs
            return ParsedRequest([], self.defaults, raw.external_id, outputs, outputs, cancel=True)

        params = self._sampling(raw, parameters, control)
        echo_wanted = not control.get("exclude_input_in_output", True)
        if echo_wanted and stream:
            raise InvalidArgumentError("exclude_input_in_output", "must be true when streaming")
        token_ids, text = self._prompt(raw)
        info = self.info()
        check_prompt(token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        check_token_parameters(params, info.vocab_size)
        embeds = _embeds(raw, len(token_ids), info)
        outputs, final_outputs = _outputs(raw.requested_outputs, control, params, stream)
        return ParsedRequest(
            token_ids,
            params,
            raw.external_id,
            outputs,
            final_outputs,
            stream=stream,
            echo=text if echo_wanted else "",
            embeds=embeds,
            buffer=raw.embeds,
        )

    def _parameters(self, text: str) -> dict[str, Any]:
        values = json.loads(text) if text else {}
        return {
            key: value
            for key, value in values.items()
            if key not in _RESERVED and not key.startswith("triton_")
        }

    def _sampling(
        self, raw: RawRequest, parameters: Mapping[str, Any], control: Mapping[str, bool]
    ) -> SamplingParams:
        typed: dict[str, Any] = {}
        for name in _SAMPLING_NAMES & raw.tensors.keys():
            values = [_text(name, value) for value in raw.tensors[name]]
            typed[name] = values if _SPECS[name].dims == (-1,) else values[0]
        from_json: Any = {}
        if "sampling_parameters" in raw.tensors:
            text = _text("sampling_parameters", raw.tensors["sampling_parameters"][0])
            if text.strip():
                try:
                    from_json = json.loads(text)
                except ValueError as error:
                    raise InvalidArgumentError("sampling_parameters", f"invalid JSON: {error}") from None
            if not isinstance(from_json, dict):
                raise InvalidArgumentError("sampling_parameters", "must be a JSON object")
        params = parse_sampling_params(typed, from_json, parameters, defaults=self.defaults)
        if control.get("return_logprobs") and params.logprobs is None:
            params = parse_sampling_params({"logprobs": 0}, defaults=params)
        if (params.stop or params.bad_words) and self.tokenizer is None:
            field = "stop" if params.stop else "bad_words"
            raise InvalidArgumentError(field, "needs a tokenizer, and this checkpoint has none")
        if params.bad_words:
            params = with_bad_words_ids(params, self.tokenizer)
        return params

    def _prompt(self, raw: RawRequest) -> tuple[list[int], str]:
        given = [name for name in _PROMPT_NAMES if name in raw.tensors]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise InvalidArgumentError(
                "prompt", f"exactly one of {', '.join(_PROMPT_NAMES)} must be given, got {found}"
            )
        name = given[0]
        if name == "input_ids":
            token_ids = [int(value) for value in raw.tensors[name]]
            if not token_ids:
                raise InvalidArgumentError("input_ids", "must hold at least one token")
            return token_ids, ""
        value: bytes = raw.tensors[name][0]
        if self.tokenizer is None:
            raise InvalidArgumentError(name, "this checkpoint has no tokenizer: send input_ids")
        if len(value) > self.max_prompt_bytes:
            raise InvalidArgumentError(name, f"at most {self.max_prompt_bytes} bytes, got {len(value)}")
        try:
            if name == "messages":
                return self.tokenizer.encode_messages(value), ""
            return self.tokenizer.encode_bytes(name, value), value.decode("utf-8")
        except InputError as error:
            raise InvalidArgumentError(error.field, error.reason) from None


def _embeds(raw: RawRequest, num_prompt_tokens: int, info: EngineInfo) -> EmbedsMessage | None:
    """Checks the image inputs against each other and the model; None where the prompt has no image."""
    values = raw.tensors.get("image_spans", [])
    spans = list(zip(values[::2], values[1::2], strict=True))
    shape = (0, info.hidden_size) if raw.embeds is None else raw.embeds.shape
    positions = raw.tensors.get("position_ids", [])
    if not (spans or positions or raw.embeds):
        return None
    if "input_ids" not in raw.tensors:
        raise InvalidArgumentError("image_embeds", "the prompt must be given as input_ids")
    check_spans(spans, num_rows=shape[0], num_prompt_tokens=num_prompt_tokens)
    if shape[1] != info.hidden_size:
        raise InvalidArgumentError(
            "image_embeds", f"rows of {shape[1]} numbers, the model has a hidden size of {info.hidden_size}"
        )
    if positions:
        if not info.takes_position_ids:
            raise InvalidArgumentError("position_ids", "the model has no M-RoPE and takes none")
        expected = (3, num_prompt_tokens)
        if raw.shapes["position_ids"] != expected:
            raise InvalidArgumentError(
                "position_ids", f"shape {list(raw.shapes['position_ids'])}, expected {list(expected)}"
            )
        if min(positions) < 0 or max(positions) >= info.max_model_len:
            raise InvalidArgumentError("position_ids", f"must be in [0, {info.max_model_len})")
    elif spans and info.takes_position_ids:
        raise InvalidArgumentError("position_ids", "the model has M-RoPE and needs them with images")
    if raw.embeds is None:
        return None
    # What a client says of its images is not asked: a wrong hash would give others wrong text.
    hashes = content_hashes(raw.embeds.array, spans)
    packed = np.asarray(positions, dtype=np.int32).tobytes()
    return EmbedsMessage(raw.embeds.descriptor(), spans, hashes, packed)


def _outputs(
    requested: frozenset[str], control: Mapping[str, bool], params: SamplingParams, stream: bool
) -> tuple[frozenset[str], frozenset[str]]:
    """Outputs of every response, and of the last one.

    A client that names outputs gets exactly these, each time (a step behind the generator in an ensemble
    fails without its inputs). One that names none is sent all by Triton's rules; then every response
    carries what a stream consists of, the last one also what is known once, and the rest comes on request:
    a tensor costs about 10 us of CPU on either side of the stub.
    """
    if requested != _OUTPUT_NAMES:
        return requested, requested
    outputs = {"text_output", "output_ids"}
    outputs |= {name.removeprefix("return_") for name, wanted in control.items() if wanted} & requested
    if params.logprobs is not None:
        outputs.add("logprobs")
    final = outputs | {"finish_reason", "num_input_tokens"}
    if not stream:
        final.add("num_output_tokens")  # of this response, which here is all of them
    return frozenset(outputs), frozenset(final)


def _text(field: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(field, f"invalid UTF-8 at byte {error.start}") from None


def _boolean(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise InvalidArgumentError(field, f"must be a boolean, got {value!r:.80}")
