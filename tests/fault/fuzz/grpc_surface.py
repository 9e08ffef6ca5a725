"""gRPC: ModelInfer and ModelStreamInfer by bytes, so that a message need not be what a client can make."""

from __future__ import annotations

import itertools
import queue
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from tests.fault.fuzz import hostile
from tests.fault.fuzz.calls import PROMPTS, SPECS, Call, fuzzed_call
from tests.fault.fuzz.outcome import LIMIT_S, Outcome
from tests.fault.fuzz.target import Target

STREAMED = {
    "generator": (6, PROMPTS),
    "chat": (2, ("text_input", "messages")),
    "vision_chat": (2, ("text_input", "messages", "image")),
    "generator_unary": (1, PROMPTS),
}
UNARY = {
    "generator_unary": (5, PROMPTS),
    "tokenizer": (2, ("text_input", "messages")),
    "generator": (1, PROMPTS),
    "vision_preprocessor": (1, ("text_input", "messages", "image")),
}
_SIZES = {"TYPE_BOOL": "?", "TYPE_INT32": "i", "TYPE_UINT64": "Q", "TYPE_FP32": "f", "TYPE_UINT8": "B"}
_TYPES = (
    "BOOL",
    "INT8",
    "INT32",
    "INT64",
    "UINT8",
    "UINT64",
    "FP16",
    "FP32",
    "FP64",
    "BYTES",
    "BF16",
    "",
    "x",
)
_SHAPES: tuple[list[int], ...] = ([], [0], [-1], [2], [1, 1], [1] * 40, [2**31], [0, 2**62], [-(2**31)])
"""None whose size in bytes is 0 modulo 2**64 without a 0 among its dimensions: the 24.10 server takes such a
tensor for an empty one, and the stub of any Python model ends by it before the model sees it."""
_ID = b"PATCHED-ID-IS-HERE"

# How many streams are left. The gRPC front of the 24.10 server faults by itself about once in two thousand
# clients that leave while a response is being written (server#7840).
LEFT_AT_ONCE, LEFT_IN_STREAM = 0.03, 0.01

CLOSE_S = 30.0
"""For the server's status after the last request's end and our half-close. The 24.10 server forgets it about
once in two thousand streams: such a stream is noted as UNCLOSED."""


@dataclass(frozen=True)
class GrpcMessage:
    """Requests on one stream, one after another, or one for ModelInfer.

    Of two at a time on one stream the 24.10 server leaves one open now and then, or ends by an assertion
    of its gRPC front, however right they are.

    Attributes:
        leave_after: the fuzzer goes away after so many responses; None: it stays.
        closes_early: whether it says at once that nothing more will come.
    """

    unary: bool
    requests: list[bytes]
    headers: list[tuple[str, str]]
    leave_after: int | None = None
    closes_early: bool = False

    @property
    def num_readable(self) -> int:
        """Requests before the first that is none, with which the server ends a stream."""
        return sum(1 for _ in itertools.takewhile(_is_request, self.requests))

    def __str__(self) -> str:
        shown = []
        for data in self.requests:
            try:
                shown.append(str(pb.ModelInferRequest.FromString(data))[:1_500])
            except Exception:
                shown.append(repr(data[:600]))
        return f"unary {self.unary}, leaves {self.leave_after}, {self.headers}\n" + "\n--\n".join(shown)


def _is_request(data: bytes) -> bool:
    try:
        pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    return True


def make(rng: Random) -> GrpcMessage:
    unary = rng.random() < 0.4
    models = UNARY if unary else STREAMED
    requests, headers = [], []
    count = 1 if unary else rng.choice((1, 1, 1, 1, 2, 3))
    for _ in range(count):
        model = rng.choices(list(models), [weight for weight, _ in models.values()])[0]
        call = fuzzed_call(rng, model, models[model][1])
        if not unary and model != "generator_unary" and rng.random() < 0.7:
            call.inputs.setdefault("stream", True)
        if rng.random() < 0.02:
            call.model = rng.choice((hostile.text(rng)[:300], "vision_encoder"))
        data = _encoded(rng, call)
        if rng.random() < 0.04:
            data = hostile.damaged(rng, data)
        headers += [(name.lower(), value) for name, value in call.headers.items()]
        requests.append(data)
    leave = rng.random()
    leave_after = (
        0 if leave < LEFT_AT_ONCE else rng.choice((1, 3)) if leave < LEFT_AT_ONCE + LEFT_IN_STREAM else None
    )
    return GrpcMessage(unary, requests, headers, leave_after, rng.random() < 0.3)


def _encoded(rng: Random, call: Call) -> bytes:
    request = pb.ModelInferRequest(model_name=_clean(call.model), id=_clean(call.request_id))
    if rng.random() < 0.02:
        request.id = _ID.decode()
    if rng.random() < 0.02:
        request.model_version = rng.choice(("1", "2", "-1", "x", "9" * 30))
    for name, value in call.parameters.items():
        _set_parameter(request.parameters[_clean(name)], value)
    for name in call.outputs:
        request.outputs.add(name=_clean(name))
    raw = rng.random() < 0.7
    for name, value in call.tensors().items():
        _add_input(rng, request, name, value, raw)
    if rng.random() < 0.1 and request.inputs:
        _mistreat(rng, request)
    data: bytes = request.SerializeToString()
    return data.replace(_ID, b"\xff\xfe\xed\xa0\x80" + _ID[5:])


def _clean(text: str) -> str:
    """Protobuf's clients refuse other text; bytes that are no UTF-8 come in by `_ID`."""
    return text.encode("utf-8", "replace").decode()


def _set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        parameter.int64_param = value
    elif isinstance(value, int) and 0 <= value < 2**64:
        parameter.uint64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = _clean(str(value))


def _add_input(rng: Random, request: Any, name: str, value: Any, raw: bool) -> None:
    spec = SPECS.get(name)
    datatype = spec.datatype if spec is not None else "TYPE_INT32"
    tensor = request.inputs.add(
        name=_clean(name), datatype=datatype.removeprefix("TYPE_").replace("STRING", "BYTES")
    )
    elements, shape = _flat(value)
    tensor.shape.extend(shape)
    items = (
        [_as_bytes(one) for one in elements]
        if datatype == "TYPE_STRING"
        else [_packed(datatype, one) for one in elements]
    )
    if raw:
        length = (lambda one: struct.pack("<I", len(one))) if datatype == "TYPE_STRING" else (lambda one: b"")
        request.raw_input_contents.append(b"".join(length(one) + one for one in items))
        return
    match datatype:
        case "TYPE_STRING":
            tensor.contents.bytes_contents.extend(items)
        case "TYPE_BOOL":
            tensor.contents.bool_contents.extend(bool(one) for one in elements)
        case _:
            fields = {
                "TYPE_INT32": "int_contents",
                "TYPE_UINT64": "uint64_contents",
                "TYPE_UINT8": "uint_contents",
            }
            code = _SIZES[datatype]
            values = [struct.unpack(f"<{code}", one)[0] for one in items]
            getattr(tensor.contents, fields.get(datatype, "fp32_contents")).extend(values)


def _flat(value: Any) -> tuple[list[Any], list[int]]:
    """Elements and shape of what is nested as a tensor is."""
    if not isinstance(value, list):
        return [value], [1]
    shape = [len(value)]
    while value and isinstance(value[0], list):
        value = [item for row in value for item in (row if isinstance(row, list) else [row])]
        shape.append(len(value) // max(1, int(np.prod(shape))))
    if not value:
        shape = shape if len(shape) > 1 else [0]
    return value, shape


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _packed(datatype: str, value: Any) -> bytes:
    """The value's bits in the type, wrapped round where it is too large."""
    code = _SIZES[datatype]
    size = struct.calcsize(code)
    if code == "f":
        try:
            return struct.pack("<f", float(value))
        except (OverflowError, ValueError, TypeError):
            return struct.pack("<f", float("inf"))
    try:
        number = int(value)
    except (OverflowError, ValueError, TypeError):
        number = -1
    return (number % 256**size).to_bytes(size, "little") if code != "?" else bytes([bool(number)])


def _mistreat(rng: Random, request: Any) -> None:
    """Makes contents, shapes and types disagree."""
    tensor = rng.choice(request.inputs)
    match rng.randrange(8):
        case 0:
            tensor.datatype = rng.choice(_TYPES)
        case 1:
            del tensor.shape[:]
            tensor.shape.extend(rng.choice(_SHAPES))
        case 2 if request.raw_input_contents:
            place = rng.randrange(len(request.raw_input_contents))
            request.raw_input_contents[place] = hostile.damaged(rng, request.raw_input_contents[place])
        case 3 if request.raw_input_contents:
            del request.raw_input_contents[-1]
        case 4:
            request.raw_input_contents.append(hostile.blob(rng))
        case 5:
            request.inputs.add().CopyFrom(tensor)
        case 6:
            tensor.contents.fp64_contents.extend([1.0, 2.0])
        case _:
            name = rng.choice(("shared_memory_region", "binary_data_size", "shared_memory_offset"))
            _set_parameter(tensor.parameters[name], rng.choice((hostile.number, hostile.text))(rng))


class GrpcSurface:
    """Sends messages on one channel; of one thread."""

    def __init__(self, target: Target) -> None:
        unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        own = ("grpc.use_local_subchannel_pool", 1)
        self._channel = grpc.insecure_channel(target.server.grpc_url, options=[*unbounded, own])
        service = "/inference.GRPCInferenceService/"
        as_they_are = {"request_serializer": None, "response_deserializer": None}
        self._unary = self._channel.unary_unary(service + "ModelInfer", **as_they_are)
        self._stream = self._channel.stream_stream(service + "ModelStreamInfer", **as_they_are)

    def close(self) -> None:
        self._channel.close()

    def send(self, message: GrpcMessage) -> Outcome:
        outcome = Outcome()
        (self._ask if message.unary else self._read)(message, outcome)
        return outcome

    def _ask(self, message: GrpcMessage, outcome: Outcome) -> None:
        call = self._unary.future(message.requests[0], timeout=LIMIT_S, metadata=message.headers)
        if message.leave_after is not None:
            call.cancel()
            outcome.end("LEFT")
            return
        try:
            call.result()
            outcome.end("OK")
        except grpc.RpcError as error:
            self._refused(error, message, outcome)

    def _read(self, message: GrpcMessage, outcome: Outcome) -> None:
        """Reads until each request has had its end, then closes: nothing may come after that."""
        gate: queue.SimpleQueue[None] = queue.SimpleQueue()

        def requests() -> Iterator[bytes]:
            for data in message.requests:
                yield data
                if data is not message.requests[-1] or not message.closes_early:
                    gate.get()

        call = self._stream(requests(), timeout=LIMIT_S, metadata=message.headers)
        timer = threading.Timer(CLOSE_S, call.cancel)
        received = 0
        try:
            if message.leave_after == 0:
                self._leave(call, outcome)
                return
            for data in call:
                received, ended = received + 1, True
                response = pb.ModelStreamInferResponse.FromString(data)
                if response.error_message:
                    outcome.end("REFUSED", response.error_message)  # with what status is not told
                elif response.infer_response.parameters["triton_final_response"].bool_param:
                    outcome.end("OK")
                else:
                    ended = False
                if ended:
                    gate.put(None)
                    if len(outcome.ends) == message.num_readable:
                        timer.start()
                if received == message.leave_after and len(outcome.ends) < message.num_readable:
                    self._leave(call, outcome)
                    return
            if len(outcome.ends) != message.num_readable:
                outcome.problems.append(f"{len(outcome.ends)} ends for {message.num_readable} requests")
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED and len(outcome.ends) == message.num_readable:
                outcome.end("UNCLOSED")
            else:
                self._refused(error, message, outcome)
        finally:
            timer.cancel()
            for _ in message.requests:
                gate.put(None)

    @staticmethod
    def _leave(call: Any, outcome: Outcome) -> None:
        call.cancel()
        outcome.end("LEFT")

    @staticmethod
    def _refused(error: Any, message: GrpcMessage, outcome: Outcome) -> None:
        status = error.code().name
        if message.num_readable < len(message.requests) and status == "INTERNAL":
            outcome.end("REFUSED")  # by gRPC itself, which calls bytes that are no request INTERNAL
        else:
            outcome.end(status, error.details() or "")
