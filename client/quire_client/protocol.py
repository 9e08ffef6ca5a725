"""KServe messages: model schemas, requests and responses. No I/O, except that image files are read.

The client asks a model for its configuration, and shapes requests by the inputs and outputs that the model
declares. A sampling keyword becomes a typed tensor if the model has an input of that name (or of its alias)
and the value fits it. Otherwise it becomes an entry of the `sampling_parameters` JSON or, without that input,
a request parameter. So the server, and not this package, judges most values.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, model_config_pb2, service_pb2
from tritonclient.utils import triton_to_np_dtype

from quire_client.errors import InvalidArgument, ProtocolError
from quire_client.types import NO_EXTRAS, Chunk, Extras, Message

CHAT_MODEL = "chat"
"""Name of the ensemble of tokenizer and generator: the default model for messages and text without images."""
VISION_MODEL = "vision_chat"
"""Name of the ensemble of vision models and generator: the default model where images are given."""
GENERATOR_MODEL = "generator"
"""Name of the decoupled model that generates: the default model for token ids alone."""
LARGE_PROMPT = 2**16
"""Number of characters of a text, or of token ids, above which building a request counts as slow."""
JSON_INPUT = "sampling_parameters"
FINAL_PARAMETER = "triton_final_response"
_NO_REASONS = (None, "", "None")
"""Finish reasons of responses before the end; "None" in the dialect of vllm_backend."""
MAX_DIMS = 32
"""Most dims of an output's shape that are used; further ones are ignored. A hostile server might send so many
that their product takes long."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Input tensor of a model: KServe datatype (`BYTES`, `INT32` ...) and dims (-1: any)."""

    datatype: str
    dims: tuple[int, ...] = (1,)

    @property
    def is_list(self) -> bool:
        return self.dims != (1,)


def _table(text: str, *, dims: tuple[int, ...] = (1,)) -> dict[str, TensorInfo]:
    return {n: TensorInfo(kind, dims) for n, _, kind in (entry.partition(":") for entry in text.split())}


# Stands in for a model whose configuration the server does not give away (restricted protocols).
KNOWN_INPUTS: dict[str, TensorInfo] = {
    **_table(
        "messages:BYTES sampling_parameters:BYTES logit_bias:BYTES stream:BOOL"
        " exclude_input_in_output:BOOL ignore_eos:BOOL skip_special_tokens:BOOL"
        " include_stop_str_in_output:BOOL max_tokens:INT32 min_tokens:INT32 top_k:INT32"
        " no_repeat_ngram_size:INT32 temperature:FP32 top_p:FP32 min_p:FP32 typical_p:FP32"
        " repetition_penalty:FP32 presence_penalty:FP32 frequency_penalty:FP32 seed:UINT64"
        " n:INT32 best_of:INT32 beam_width:INT32 length_penalty:FP32 early_stopping:BOOL"
        " request_priority:INT32 tenant:BYTES ttft_deadline_ms:INT32 deadline_ms:INT32"
        " cache_salt:BYTES cache_retention:INT32 cache_ttl_ms:INT32 cache_pin:BOOL"
        " cache_result:BOOL session:BYTES session_end:BOOL num_draft:INT32"
        " stream_interval:INT32 stream_interval_ms:INT32 structured_output:BYTES lora_name:BYTES"
    ),
    **_table("text_input:BYTES input_ids:INT32 stop_token_ids:INT32 stop:BYTES bad_words:BYTES", dims=(-1,)),
}

# Inputs whose names differ from the caller's keywords. The inputs and outputs of an ensemble share one
# namespace, and `logprobs` and `prompt_logprobs` are outputs. Triton has a parameter named `priority`.
_INPUT_ALIASES = {
    "logprobs": "num_logprobs",
    "prompt_logprobs": "num_prompt_logprobs",
    "priority": "request_priority",
}
_CHOICES = ("n", "best_of", "beam_width")

# What a `Chunk` is made of.
_CHUNK_OUTPUTS: dict[str, type] = {
    **dict.fromkeys(("text_output", "finish_reason", "logprobs"), str),
    **dict.fromkeys(
        ("output_ids", "index", "num_input_tokens", "num_output_tokens", "num_cached_tokens"), int
    ),
    "cumulative_logprob": float,
}
# What its `Extras` are made of: the type of their elements, and the field.
_EXTRA_OUTPUTS: dict[str, tuple[type, str]] = {
    "reasoning_output": (str, "reasoning"),
    "tool_calls": (str, "tool_calls"),
    "stop_reason": (str, "stop_reason"),
    "timing": (str, "server_timing"),
    "num_reasoning_tokens": (int, "num_reasoning_tokens"),
    "prompt_logprobs": (str, "prompt_logprobs"),
    "batch_index": (int, "batch_index"),
    "embedding": (float, "embedding"),
    "scores": (float, "scores"),
    "label": (str, "label"),
}
_LISTS = ("embedding", "scores")
# Type of the elements, letter of `struct` and field of `InferTensorContents` of each datatype.
_DATATYPES: dict[str, tuple[type, str, str]] = {
    "BYTES": (str, "", "bytes_contents"),
    "INT8": (int, "b", "int_contents"),
    "INT16": (int, "h", "int_contents"),
    "INT32": (int, "i", "int_contents"),
    "INT64": (int, "q", "int64_contents"),
    "UINT8": (int, "B", "uint_contents"),
    "UINT16": (int, "H", "uint_contents"),
    "UINT32": (int, "I", "uint_contents"),
    "UINT64": (int, "Q", "uint64_contents"),
    "FP32": (float, "f", "fp32_contents"),
    "FP64": (float, "d", "fp64_contents"),
}


@dataclass(frozen=True, slots=True)
class ModelSchema:
    """Schema of one model, as far as the client knows it, with its tensors and an ensemble's members."""

    name: str
    inputs: Mapping[str, TensorInfo]
    outputs: frozenset[str] | None
    """Names of the outputs; None when unknown. Requests that name no outputs then ask for all."""
    kind: str = ""
    decoupled: bool | None = None
    steps: tuple[str, ...] = ()
    """Models of an ensemble's steps, first to last; empty if the model is no ensemble, or none are known."""
    is_batched: bool = False
    """Whether each tensor has a batch dimension before its dims."""


def schema_from_config(response: Any) -> ModelSchema:
    """Returns the schema from a `ModelConfigResponse`."""
    config = response.config
    steps = tuple(step.model_name for step in config.ensemble_scheduling.step)
    inputs = {i.name: TensorInfo(_datatype(i.data_type), tuple(i.dims)) for i in config.input}
    kind = "ensemble" if steps or config.platform == "ensemble" else config.backend
    decoupled = None if steps else config.model_transaction_policy.decoupled
    outputs = frozenset(o.name for o in config.output)
    return ModelSchema(config.name, inputs, outputs, kind, decoupled, steps, config.max_batch_size > 0)


def schema_from_metadata(metadata: Any) -> ModelSchema:
    """Returns the schema from a `ModelMetadataResponse`. This has tensors, but neither an ensemble's members
    nor whether the model is decoupled: an ensemble is assumed to have the one member `generator`."""
    is_ensemble = metadata.platform == "ensemble"
    return ModelSchema(
        metadata.name,
        {i.name: TensorInfo(i.datatype, tuple(i.shape)) for i in metadata.inputs},
        frozenset(o.name for o in metadata.outputs),
        metadata.platform,
        steps=(GENERATOR_MODEL,) if is_ensemble else (),
    )


def assumed_schema(name: str) -> ModelSchema:
    """Returns a schema with usual inputs of Quire's models, for a model about which the server says
    nothing."""
    if name == CHAT_MODEL:
        return ModelSchema(name, KNOWN_INPUTS, None, "ensemble", steps=(GENERATOR_MODEL,))
    commands = {"cancel": TensorInfo("BOOL"), "cache_control": TensorInfo("BYTES")}
    return ModelSchema(name, {**KNOWN_INPUTS, **commands}, None)


def _datatype(value: int) -> str:
    name = model_config_pb2.DataType.Name(value).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a request, in the forms in which the caller gave it. The server checks that the forms go
    together."""

    text: str | bytes | Sequence[str] | None = None
    """A text, or several for models that take several prompts in one request."""
    messages: Sequence[Message] | Mapping[str, Any] | str | bytes | None = None
    """List of messages, an object {"messages": ..., "tools": ...}, or JSON text of either."""
    input_ids: Sequence[int] | None = None
    images: Sequence[bytes | str | os.PathLike[str]] = ()
    """Encoded images (bytes), or files to read them from, in the order of their places in the prompt."""

    @property
    def is_large(self) -> bool:
        """Whether building the request may be slow: there are images, or more than LARGE_PROMPT token ids,
        characters of a prompt that is one string, or texts of one that is a list. Messages that are not JSON
        text do not count."""
        texts = (self.text, self.messages if isinstance(self.messages, str | bytes) else None, self.input_ids)
        return bool(self.images) or any(part is not None and len(part) > LARGE_PROMPT for part in texts)

    @property
    def may_call_tools(self) -> bool:
        """Whether the messages may have tools. JSON text is not parsed, so it counts as having them."""
        if isinstance(self.messages, Mapping):
            return bool(self.messages.get("tools"))
        return isinstance(self.messages, str | bytes)

    @property
    def num_prompts(self) -> int:
        is_list = self.text is not None and not isinstance(self.text, str | bytes)
        return len(self.text or ()) if is_list else 1

    @property
    def default_model(self) -> str:
        """Default model: the vision ensemble with images, the generator for token ids alone, else the chat
        ensemble."""
        if self.images:
            return VISION_MODEL
        ids_only = self.input_ids is not None and self.text is None and self.messages is None
        return GENERATOR_MODEL if ids_only else CHAT_MODEL


def conversation(
    messages: str | list[Message], *, system: str | None = None, **beside: Any
) -> list[Message] | dict[str, Any]:
    """Returns the `messages` of a `Prompt`, made from a list of messages or from one text of the user.

    They are a list, or an object with the list and the fields beside it if any are given.

    Args:
        system: text of a system message to put first; None: none.
        beside: fields beside the messages (`tools`, `tool_choice` ...); a value of None means not given.
    """
    told: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    told += [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    stated = {name: value for name, value in beside.items() if value is not None}
    return {"messages": told, **stated} if stated else told


def with_image_parts(messages: Sequence[Message], count: int) -> list[Message]:
    """Returns the messages. If none has image parts, `count` image parts are put before the content of the
    user's last message; without a user's message nothing is added."""
    lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    if any(isinstance(p, dict) and p.get("type") in ("image", "image_url") for parts in lists for p in parts):
        return list(messages)
    last = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=None)
    if last is None:
        return list(messages)
    content = messages[last].get("content")
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    question = {**messages[last], "content": [{"type": "image"}] * count + texts}
    return [*messages[:last], question, *messages[last + 1 :]]


def _image_bytes(image: bytes | str | os.PathLike[str]) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"image {os.fspath(image)}: {error.strerror}") from None


def build_request(
    schema: ModelSchema,
    prompt: Prompt,
    *,
    request_id: str,
    stream: bool,
    sampling: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    outputs: Iterable[str] | None = None,
) -> Any:
    """Returns the `ModelInferRequest` for a prompt.

    Args:
        sampling: keywords of the caller; None values mean "not given". The key `sampling_parameters`
            holds a mapping whose entries the other keywords override.
        parameters: request parameters (str, bool, int, float).
        timeout: seconds, sent as Triton's `timeout` parameter in microseconds.
        outputs: names of the outputs to ask for; None: those that the chunks of this request need (all, if
            the model's outputs are not known).

    Raises:
        InvalidArgument: the model has no place for a value, several texts or images, `input_ids` do not fit
            their input, `sampling_parameters` cannot be written as JSON, or an image file cannot be read.
    """
    request = service_pb2.ModelInferRequest(model_name=schema.name, id=request_id)
    _add_prompt(request, schema, prompt)
    for name, value in (("stream", stream), ("exclude_input_in_output", True)):
        if name in schema.inputs and sampling.get(name) is None:
            _add(request, name, "BOOL", np.array([value]))
    _add_sampling(request, schema, sampling, request_id)
    wanted = _wanted_outputs(schema, prompt, stream, sampling) if outputs is None else list(outputs)
    for name in wanted:
        request.outputs.add(name=name)
        flag = f"return_{name}"
        if flag in schema.inputs and sampling.get(flag) is None:
            _add(request, flag, "BOOL", np.array([True]))
    if timeout is not None:
        request.parameters["timeout"].int64_param = max(1, math.ceil(timeout * 1e6))
    for name, value in (parameters or {}).items():
        _set_parameter(request, name, value, schema, request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def tenant_of(sampling: Mapping[str, Any], parameters: Mapping[str, Any] | None) -> str:
    """Returns the tenant that the arguments of `build_request` state; empty if they state none."""
    for stated in (sampling, sampling.get(JSON_INPUT) or {}, parameters or {}):
        if stated.get("tenant") is not None:
            return str(stated["tenant"])
    return ""


def build_cancel(schema: ModelSchema, request_id: str, tenant: str) -> Any:
    """Returns the `ModelInferRequest` that cancels a tenant's unfinished request on a generator."""
    request = service_pb2.ModelInferRequest(model_name=schema.name, id=request_id)
    _add(request, "cancel", "BOOL", np.array([True]))
    _add_sampling(request, schema, {"tenant": tenant or None}, request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def build_tokenize(schema: ModelSchema, name: str, prompt: str | bytes) -> Any:
    """Returns the `ModelInferRequest` that asks a tokenizer for token ids; `name` is the prompt's input."""
    request = service_pb2.ModelInferRequest(model_name=schema.name)
    value = _bytes_array(prompt)
    _add(request, name, "BYTES", value.reshape(1, 1) if schema.is_batched else value)
    return request


def parse_token_ids(response: Any, name: str) -> list[int] | None:
    """Returns the integers of an output; None if the response has no output of this name.

    Raises:
        ProtocolError: the output is not of integers, or its data do not match its datatype and shape.
    """
    contents = response.raw_output_contents
    for i, output in enumerate(response.outputs):
        if output.name == name:
            return list(_elements(name, int, output, contents[i] if i < len(contents) else None))
    return None


def cache_answer(text: str) -> dict[str, Any]:
    """Returns the JSON object with which a generator answers a cache command.

    Raises:
        ProtocolError: the answer is not a JSON object.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ProtocolError(f"the answer to the cache command is not a JSON object: {text!r:.80}")
    return answer


def _add(request: Any, name: str, datatype: str, value: np.ndarray) -> None:
    tensor = InferInput(name, list(value.shape), datatype)
    tensor.set_data_from_numpy(value)
    request.inputs.append(tensor._get_tensor())
    request.raw_input_contents.append(tensor._get_content())


def _bytes_array(*values: str | bytes) -> np.ndarray:
    # A lone surrogate goes out as it is: "not UTF-8" is then the server's answer, naming the field.
    encoded = [v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v for v in values]
    return np.array(encoded, dtype=np.object_)


def _add_prompt(request: Any, schema: ModelSchema, prompt: Prompt) -> None:
    if prompt.text is not None:
        texts = [prompt.text] if isinstance(prompt.text, str | bytes) else prompt.text
        declared = schema.inputs.get("text_input")
        if len(texts) != 1 and declared is not None and not declared.is_list:
            raise InvalidArgument(f"text_input: the model {schema.name!r} takes one prompt per request")
        _add(request, "text_input", "BYTES", _bytes_array(*texts))
    if prompt.messages is not None:
        messages = prompt.messages
        count = len(prompt.images)
        if count and isinstance(messages, Mapping):
            messages = {**messages, "messages": with_image_parts(messages.get("messages", ()), count)}
        elif count and isinstance(messages, Sequence) and not isinstance(messages, str | bytes):
            messages = with_image_parts(messages, count)
        try:
            text = messages if isinstance(messages, str | bytes) else json.dumps(messages, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"messages: must be JSON: {error}") from None
        _add(request, "messages", "BYTES", _bytes_array(text))
    if prompt.images:
        if "image" not in schema.inputs:
            raise InvalidArgument(f"image: the model {schema.name!r} takes no images")
        _add(request, "image", "BYTES", _bytes_array(*map(_image_bytes, prompt.images)))
    if prompt.input_ids is not None:
        declared = schema.inputs.get("input_ids", KNOWN_INPUTS["input_ids"])
        value = _tensor_value(TensorInfo(declared.datatype, (-1,)), list(prompt.input_ids))
        if value is None:
            raise InvalidArgument(f"input_ids: must be integers that fit {declared.datatype}")
        _add(request, "input_ids", declared.datatype, value)


def _add_sampling(request: Any, schema: ModelSchema, sampling: Mapping[str, Any], request_id: str) -> None:
    as_json = dict(sampling.get(JSON_INPUT) or {})
    for name, value in sampling.items():
        if value is None or name == JSON_INPUT:
            continue
        as_json.pop(name, None)
        tensor_name = next((n for n in (_INPUT_ALIASES.get(name), name) if n and n in schema.inputs), None)
        tensor = None if tensor_name is None else _tensor_value(schema.inputs[tensor_name], value)
        if tensor is not None and tensor_name is not None:
            _add(request, tensor_name, schema.inputs[tensor_name].datatype, tensor)
        elif JSON_INPUT in schema.inputs:
            as_json[name] = value
        else:
            _set_parameter(request, name, value, schema, request_id)
    if as_json:
        try:
            text = json.dumps(as_json, ensure_ascii=False)
        except TypeError as error:
            raise InvalidArgument(f"{JSON_INPUT}: {error}", request_id=request_id) from None
        _add(request, JSON_INPUT, "BYTES", _bytes_array(text))


def _tensor_value(info: TensorInfo, value: Any) -> np.ndarray | None:
    """Returns the value as data for this input. None: it has another type, or is an integer out of range."""
    values = list(value) if info.is_list and isinstance(value, list | tuple | np.ndarray) else [value]
    if info.datatype == "BYTES":
        if not info.is_list and isinstance(value, Mapping):
            values = [json.dumps(value)]
        return _bytes_array(*values) if all(isinstance(v, str | bytes) for v in values) else None
    dtype = np.dtype(triton_to_np_dtype(info.datatype))
    if dtype.kind == "b":
        fits = all(isinstance(v, bool | np.bool_) for v in values)
    elif dtype.kind in "iu":
        limits = np.iinfo(dtype)
        fits = all(_is_integer(v) and limits.min <= v <= limits.max for v in values)
    else:
        fits = all(_is_float(v) for v in values)
    return np.array(values, dtype=dtype) if fits else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    """Whether the value is a float, or an integer in the range of Python's floats. A bool is neither."""
    if _is_integer(value):
        return abs(int(value)) <= sys.float_info.max
    return isinstance(value, float | np.floating)


def _set_parameter(request: Any, name: str, value: Any, schema: ModelSchema, request_id: str) -> None:
    parameter = request.parameters[name]
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    else:
        raise InvalidArgument(
            f"{name}: model '{schema.name}' has no input for a {type(value).__name__}", request_id=request_id
        )


def _wanted_outputs(
    schema: ModelSchema, prompt: Prompt, stream: bool, sampling: Mapping[str, Any]
) -> list[str]:
    """Returns the names of the outputs to ask for: only useful ones, because each output costs the server
    time per response. An empty list asks for all; it is returned if the model's outputs are not known."""
    if schema.outputs is None:
        return []
    wanted = ["text_output", "output_ids", "finish_reason"]
    if not stream:
        wanted += ["num_input_tokens", "num_output_tokens", "num_cached_tokens", "stop_reason"]
    elif "output_ids" not in schema.outputs:
        wanted.append("num_output_tokens")
    extra = sampling.get(JSON_INPUT) or {}
    if any(sampling.get(n) is not None or n in extra for n in _CHOICES):
        wanted.append("index")
    if any(sampling.get(n) is not None or n in extra for n in ("best_of", "beam_width")):
        wanted.append("cumulative_logprob")
    for name in ("logprobs", "prompt_logprobs"):
        if sampling.get(name) is not None or name in extra:
            wanted.append(name)
    if prompt.messages is not None:
        wanted.append("reasoning_output")
        if prompt.may_call_tools:
            wanted.append("tool_calls")
    if prompt.num_prompts > 1:
        wanted.append("batch_index")
    for flag in ("return_timing", "return_stop_reason", "return_num_reasoning_tokens"):
        if sampling.get(flag) and (name := flag.removeprefix("return_")) not in wanted:
            wanted.append(name)
    return [name for name in wanted if name in schema.outputs]


def parse_response(response: Any, received_at: float) -> tuple[list[Chunk], bool | None]:
    """Returns the chunks of one `ModelInferResponse`, and whether the response is final (None if the server
    does not say).

    A response without outputs (a bare final flag) has no chunks. A response with k texts becomes k chunks,
    and one with outputs but no text becomes one. For k above 1 the token ids are left out, because they
    cannot be assigned to the texts.

    Raises:
        ProtocolError: an output has another kind of elements than expected, its data do not match its
            datatype and shape, an output that holds JSON (`logprobs`, `prompt_logprobs`, `tool_calls`,
            `timing`) is malformed, or there are not as many raw data as outputs.
    """
    parameters = response.parameters
    final = parameters[FINAL_PARAMETER].bool_param if FINAL_PARAMETER in parameters else None
    outputs = response.outputs
    if not outputs:
        return [], final
    values = _output_values(outputs, response.raw_output_contents)
    texts = values.get("text_output") or ("",)
    reasons, logprobs = values.get("finish_reason", ()), values.get("logprobs", ())
    indices, sums = values.get("index", ()), values.get("cumulative_logprob", ())
    ids: Sequence[int] = values.get("output_ids", ()) if len(texts) == 1 else ()
    num_output = values.get("num_output_tokens", ())
    num_input = _at(values.get("num_input_tokens", ()), 0)
    num_cached = _at(values.get("num_cached_tokens", ()), 0)
    extras = _extras(told) if (told := values.get("")) else NO_EXTRAS
    last = len(texts) - 1
    chunks = [
        Chunk(
            text,
            tuple(ids),
            None if (reason := _at(reasons, i)) in _NO_REASONS else reason,
            indices[i] if i < len(indices) else i,
            bool(final) and i == last,
            _parsed("logprobs", lp) if (lp := _at(logprobs, i)) else None,
            num_input,
            _at(num_output, i),
            received_at,
            num_cached,
            _at(sums, i),
            extras,
        )
        for i, text in enumerate(texts)
    ]
    return chunks, final


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if i < len(values) else None


def _extras(told: Sequence[tuple[str, Any]]) -> Extras:
    fields = {name: _EXTRA_PARSERS.get(name, _same)(value) for name, value in told if value not in ("", None)}
    return Extras(**fields) if fields else NO_EXTRAS


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"output {name}: not JSON: {text!r:.80}") from None


def _tool_calls(text: str) -> tuple[dict[str, Any], ...]:
    calls = _parsed("tool_calls", text)
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise ProtocolError(f"output tool_calls: not a list of calls: {text!r:.80}")
    return tuple(calls)


def _is_call(call: Any) -> bool:
    """Whether the value can be read as a tool call's delta: an object whose `index` is an integer and whose
    `id`, `name` and `arguments` are texts, as far as they are there."""
    if not isinstance(call, dict) or not isinstance(call.get("index", 0), int):
        return False
    function = call.get("function") or {}
    if not isinstance(function, dict):
        return False
    texts = (call.get("id"), function.get("name"), function.get("arguments"))
    return all(text is None or isinstance(text, str) for text in texts)


def _timing(text: str) -> dict[str, Any]:
    timing = _parsed("timing", text)
    if not isinstance(timing, dict):
        raise ProtocolError(f"output timing: not an object: {text!r:.80}")
    return timing


def _same(value: Any) -> Any:
    return value


_EXTRA_PARSERS: dict[str, Callable[[str], Any]] = {
    "tool_calls": _tool_calls,
    "server_timing": _timing,
    "prompt_logprobs": partial(_parsed, "prompt_logprobs"),
}
"""Parsers of the outputs that come as JSON text, by the field of `Extras` that they become."""


def _output_values(outputs: Sequence[Any], raw_contents: Sequence[bytes]) -> dict[str, Sequence[Any]]:
    """Returns the elements, in row-major order, of each output that a `Chunk` needs, by the output's name.

    The key "" holds pairs for `Extras`: a field, and the output's first element (all elements for an
    embedding and for scores; None for an empty output). Neither numpy nor `InferResult` is used: both take
    several times as long for so few elements.
    """
    if raw_contents and len(raw_contents) != len(outputs):
        raise ProtocolError(f"a response has {len(outputs)} outputs and the raw data of {len(raw_contents)}")
    values: dict[str, Sequence[Any]] = {}
    extras: list[tuple[str, Any]] = []
    for i, output in enumerate(outputs):
        name = output.name
        kind = _CHUNK_OUTPUTS.get(name)
        if kind is not None:
            values[name] = _elements(name, kind, output, raw_contents[i] if raw_contents else None)
        elif name in _EXTRA_OUTPUTS:
            kind, field = _EXTRA_OUTPUTS[name]
            elements = _elements(name, kind, output, raw_contents[i] if raw_contents else None)
            extras.append((field, elements if name in _LISTS else _at(elements, 0)))
    if extras:
        values[""] = extras
    return values


def _elements(name: str, kind: type, output: Any, raw: bytes | None) -> Sequence[Any]:
    """Returns the elements of an output, strings decoded.

    Args:
        kind: type that the elements must have.
        raw: the output's raw data; None: its data are in `output.contents`.

    Raises:
        ProtocolError: the elements are of another type, or the data do not match the shape.
    """
    stated, letter, field = _DATATYPES.get(output.datatype, (None, "", ""))
    if stated is not kind:
        raise ProtocolError(f"output {name}: must be of {kind.__name__}, is of {output.datatype!r:.20}")
    count = math.prod(output.shape[:MAX_DIMS])
    elements: Sequence[Any] | None
    if raw is None:
        elements = tuple(getattr(output.contents, field))
    elif kind is str:
        elements = _byte_strings(raw)
    else:
        try:
            elements = struct.unpack(f"<{count}{letter}", raw)
        except struct.error:
            elements = None
    if elements is None or len(elements) != count:
        raise ProtocolError(f"output {name}: the data do not fit the shape {output.shape[:MAX_DIMS]!r:.80}")
    return [v.decode("utf-8", "replace") for v in elements] if kind is str else elements


def _byte_strings(raw: bytes) -> list[bytes] | None:
    """Returns the elements of a BYTES tensor from its raw data, in which 4 bytes with its length precede each
    element; None if the data end inside an element."""
    strings, position, end = [], 0, len(raw)
    while position < end:
        start = position + 4
        position = start + int.from_bytes(raw[position:start], "little")
        strings.append(raw[start:position])
    return strings if position == end else None
