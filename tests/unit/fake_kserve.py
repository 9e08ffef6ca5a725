"""A KServe gRPC server in this process, which behaves like Triton where the client can tell the difference.

What a request does is its prompt: `tokens 5`, `endless`, `error INVALID_ARGUMENT some text`, `midway 2`,
`no final 3`, `flag final 2`, `silent`, `choices 3`, `malformed`, `lingering`, `call`, `think`, `logprobs`,
`raw tool_calls {}` (that output, with that text). As in Triton, the members of an
ensemble never learn that the client has gone: an `endless` request to `chat` runs until it is cancelled by
its id on `generator`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

GENERATOR_INPUTS = {
    "text_input": "STRING",
    "messages": "STRING",
    "input_ids": "INT32",
    "stream": "BOOL",
    "cancel": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_num_input_tokens": "BOOL",
    "sampling_parameters": "STRING",
    "max_tokens": "INT32",
    "temperature": "FP32",
    "seed": "UINT64",
    "stop": "STRING",
    "stop_token_ids": "INT32",
    "structured_output": "STRING",
    "return_timing": "BOOL",
    "return_embedding": "BOOL",
    "return_scores": "BOOL",
    "use_activation": "BOOL",
    "text_pair": "STRING",
    "dimensions": "INT32",
    "logit_bias": "STRING",
    "n": "INT32",
    "logprobs": "INT32",
    "prompt_logprobs": "INT32",
    "request_priority": "INT32",
    "tenant": "STRING",
    "cache_pin": "BOOL",
    "cache_control": "STRING",
    "lora_name": "STRING",
}
LISTS = {"text_input", "text_pair", "input_ids", "stop", "stop_token_ids"}
OUTPUTS = {
    "text_output": "STRING",
    "output_ids": "INT32",
    "finish_reason": "STRING",
    "num_input_tokens": "UINT32",
    "num_cached_tokens": "UINT32",
    "index": "INT32",
    "cumulative_logprob": "FP32",
    "batch_index": "INT32",
    "logprobs": "STRING",
    "prompt_logprobs": "STRING",
    "reasoning_output": "STRING",
    "tool_calls": "STRING",
    "stop_reason": "STRING",
    "timing": "STRING",
    "num_reasoning_tokens": "UINT32",
    "embedding": "FP32",
    "scores": "FP32",
    "label": "STRING",
}
WORDS = {5: "a", 6: "\ufffd", 7: "é"}
"""Tokens of which `logprobs` tells."""
NAMES = {"STRING": "BYTES"}


@contextlib.contextmanager
def nobody() -> Iterator[str]:
    """HOST:PORT at which nobody listens, as long as the context lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def model_config(name: str) -> Any:
    """The configuration of one of the fake's models."""
    config = model_config_pb2.ModelConfig(name=name)
    inputs = {"text_input": "STRING", "messages": "STRING"} if name == "tokenizer" else dict(GENERATOR_INPUTS)
    if name == "chat":
        config.platform = "ensemble"
        for step in ("tokenizer", "generator"):
            config.ensemble_scheduling.step.add(model_name=step)
        del inputs["cancel"], inputs["cache_control"]
        for same in ("logprobs", "prompt_logprobs"):
            inputs[f"num_{same}"] = inputs.pop(same)
    else:
        config.backend = "python" if name == "tokenizer" else "quire"
        config.max_batch_size = 8 if name == "tokenizer" else 0
        config.model_transaction_policy.decoupled = name == "generator"
    for tensor, kind in inputs.items():
        is_list = tensor in LISTS and (tensor, name) != ("text_input", "chat")
        dims = [-1] if is_list else [1]
        config.input.add(name=tensor, data_type=f"TYPE_{kind}", dims=dims, optional=True)
    outputs = {**OUTPUTS, "input_ids": "INT32"} if name == "tokenizer" else OUTPUTS
    for tensor, kind in outputs.items():
        dims = [-1 if tensor in ("output_ids", "embedding", "scores") else 1]
        config.output.add(name=tensor, data_type=f"TYPE_{kind}", dims=dims)
    return config


def read_inputs(request: Any) -> dict[str, Any]:
    """Tensor name to list of values."""
    values: dict[str, Any] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            values[tensor.name] = list(deserialize_bytes_tensor(raw))
        else:
            values[tensor.name] = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist()
    return values


class FakeKServe(service_pb2_grpc.GRPCInferenceServiceServicer):
    """The server; `url` once entered. Everything a test may want to look at is a public attribute."""

    def __init__(self, *, restricted: bool = False) -> None:
        self.restricted = restricted
        self.asked_for_codes = False
        self.requests: list[Any] = []
        self.running: dict[str, threading.Event] = {}
        self.tenants: dict[str, str] = {}
        """Tenant of each running request that states one, by id; a cancel request has to state the same."""
        self.cancelled_ids: list[str] = []
        self.started = threading.Event()
        """An endless request has its first token under way."""
        self.ended = threading.Event()
        """An endless request has come to its end."""
        self.begun: set[str] = set()
        """Ids of all endless requests so far."""
        self.accept_cancel = True
        self.adapters: dict[str, str] = {}
        """Directories of LoRA adapters by name."""
        self.config_calls: list[str] = []
        self._events: list[threading.Event] = []
        self._server = grpc.server(ThreadPoolExecutor(80))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeKServe:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self._events:
            event.set()
        self._server.stop(0).wait()

    # The names of the following methods are those of the KServe protocol.

    def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name != "broken")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        index = service_pb2.RepositoryIndexResponse()
        for name in ("chat", "generator", "tokenizer"):
            index.models.add(name=name, version="1", state="READY")
        index.models.add(name="broken", version="1", state="UNAVAILABLE", reason="no such file: config.json")
        return index

    def ModelConfig(self, request: Any, context: Any) -> Any:
        self.config_calls.append(request.name)
        if self.restricted:
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'k'")
        if request.name not in ("chat", "generator", "tokenizer", "unary"):
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found"
            )
        return service_pb2.ModelConfigResponse(config=model_config(request.name))

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        config = model_config(request.name)
        answer = service_pb2.ModelMetadataResponse(name=config.name, platform=config.platform)
        for tensors, to in ((config.input, answer.inputs), (config.output, answer.outputs)):
            for tensor in tensors:
                kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
                to.add(name=tensor.name, datatype=NAMES.get(kind, kind), shape=tensor.dims)
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            inputs = read_inputs(request)
            if inputs.get("cancel") == [True]:
                yield from self._cancel(request, _tenant(inputs), context)
                continue
            self.requests.append(request)
            if request.model_name == "tokenizer":
                yield self._tokenized(request, inputs)
                continue
            if "cache_control" in inputs:
                command = json.loads(inputs["cache_control"][0])
                if "adapter" in command["command"]:
                    yield from self._adapters(request, command, context)
                    continue
                yield self._response(request, json.dumps({"did": command}), [], "stop", final=True)
                continue
            yield from self._infer(request, inputs, context)

    def _tokenized(self, request: Any, inputs: dict[str, Any]) -> Any:
        """Its token ids are the bytes of a prompt. As in Triton, tensors without a batch are refused."""
        if any(list(tensor.shape) != [1, 1] for tensor in request.inputs):
            message = "[request id: <id_unknown>] inference request batch-size must be <= 8 for 'tokenizer'"
            return service_pb2.ModelStreamInferResponse(error_message=message)
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        ids = np.frombuffer(self._text(inputs).encode(), np.uint8).astype(np.int32)
        answer.outputs.add(name="input_ids", datatype="INT32", shape=[1, len(ids)])
        answer.raw_output_contents.append(ids.tobytes())
        return service_pb2.ModelStreamInferResponse(infer_response=answer)

    def _adapters(self, request: Any, command: dict[str, Any], context: Any) -> Iterator[Any]:
        name = command.get("name", "")
        if command["command"] == "unload_adapter" and name not in self.adapters:
            yield from self._error(context, "NOT_FOUND", f"name: {name!r} is not the name of an adapter")
            return
        if command["command"] == "load_adapter":
            self.adapters[name] = command["path"]
        elif command["command"] == "unload_adapter":
            del self.adapters[name]
        listed = [{"name": one, "path": path, "rank": 8, "slot": -1} for one, path in self.adapters.items()]
        told = {"max_loras": 4, "max_model_len": 512, "adapters": listed}
        answers = {"adapters": told, "unload_adapter": {"name": name}}
        answer = answers.get(command["command"], listed[-1] if listed else {})
        yield self._response(request, json.dumps(answer), [], "stop", final=True)

    def _cancel(self, request: Any, tenant: str, context: Any) -> Iterator[Any]:
        self.cancelled_ids.append(request.id)
        event = self.running.get(request.id)
        is_theirs = self.tenants.get(request.id, "") == tenant
        if event is None or not is_theirs or not self.accept_cancel:
            yield from self._error(context, "NOT_FOUND", f"no running request has the id {request.id}")
            return
        event.set()
        yield self._response(request, "", [], "cancelled", final=True)

    def _scored(self, request: Any, text: str, inputs: dict[str, Any]) -> Any:
        """Two scores of a conversation or a text, one of a pair: the lengths of its texts."""
        scores = [float(len(text)), 0.5]
        if "text_pair" in inputs:
            scores = [len(text) + len(inputs["text_pair"][0]) / 100]
        if inputs.get("use_activation") == [False]:
            scores = [-score for score in scores]
        return self._response(request, "", [], "stop", final=True, scores=scores, label="longest")

    def _infer(self, request: Any, inputs: dict[str, Any], context: Any) -> Iterator[Any]:
        texts = inputs.get("text_input", [])
        if len(texts) > 1:
            yield from self._several(request, texts)
            return
        text = self._text(inputs)
        verb, _, rest = text.partition(" ")
        if inputs.get("return_embedding") == [True] and verb not in ("error", "silent"):
            vector = [float(len(inputs.get("input_ids", text))), 0.5, -0.25]
            vector = vector[: inputs.get("dimensions", [3])[0]]
            reason = rest if verb == "ended" else "stop"
            vector = [] if verb == "ended" else vector
            yield self._response(request, "", [], reason, final=True, embedding=vector)
        elif inputs.get("return_scores") == [True] and verb not in ("error", "silent"):
            yield self._scored(request, text, inputs)
        elif verb in ("call", "think", "logprobs", "raw"):
            yield from self._chat(request, verb, rest, inputs)
        elif verb == "tokens":
            count = int(rest)
            for i in range(count):
                last = i == count - 1
                yield self._response(request, f"t{i} ", [i], "stop" if last else "", final=last)
        elif verb == "choices":
            # The pieces of the choices alternate, and the first choice ends last.
            count = int(rest)
            for index in range(count):
                yield self._response(request, f"c{index} ", [index], "", final=False, index=index)
            for index in reversed(range(count)):
                reason = "length" if index else "stop"
                yield self._response(request, "end", [9], reason, final=not index, index=index)
        elif verb == "echo":
            yield self._response(request, json.dumps(_jsonable(inputs)), [1, 2], "stop", final=True)
        elif verb == "error":
            code, _, message = rest.partition(" ")
            yield from self._error(context, code, message)
        elif verb == "midway":
            for i in range(int(rest)):
                yield self._response(request, f"t{i} ", [i], "", final=False)
            yield from self._error(context, "UNAVAILABLE", "the engine died")
        elif text.startswith("no final"):
            for i in range(int(text.split()[-1])):
                yield self._response(request, f"t{i} ", [i], "", final=False)
        elif text.startswith("flag final"):
            for i in range(int(text.split()[-1])):
                yield self._response(request, f"t{i} ", [i], "", final=False)
            answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
            answer.parameters["triton_final_response"].bool_param = True
            yield service_pb2.ModelStreamInferResponse(infer_response=answer)
        elif verb in ("endless", "silent", "malformed", "lingering"):
            self.tenants[request.id] = _tenant(inputs)
            first = self._response(request, "first ", [7], "", final=verb == "lingering")
            if verb == "malformed":
                first.infer_response.raw_output_contents[0] += b"more"
            yield from self._endless(request, context, None if verb == "silent" else first)
        else:
            raise AssertionError(f"the fake does not know {text!r}")

    def _several(self, request: Any, texts: list[bytes]) -> Iterator[Any]:
        """Each prompt is its answer, in two pieces; the last prompt begins and ends first."""
        for part in ("1", "2"):
            for index, text in reversed(list(enumerate(texts))):
                reason = "stop" if part == "2" else ""
                final = part == "2" and index == 0
                said = f"{text.decode()}{part} "
                yield self._response(request, said, [1], reason, final=final, batch_index=index)

    def _chat(self, request: Any, verb: str, rest: str, inputs: dict[str, Any]) -> Iterator[Any]:
        def say(text: str, reason: str = "", ids: tuple[int, ...] = (1,), **outputs: Any) -> Any:
            return self._response(request, text, list(ids), reason, final=bool(reason), **outputs)

        def call(index: int, function: dict[str, str], **first: str) -> str:
            return json.dumps([{"index": index, **first, "function": function}])

        timing = json.dumps({"queue": 0.5, "total": 9.5})
        if verb == "call":
            yield say("hm ")
            for i in range(2):
                name = {"name": f"f{i}", "arguments": ""}
                yield say("", tool_calls=call(i, name, id=f"call_{i}", type="function"))
                yield say("", tool_calls=call(i, {"arguments": '{"x": '}))
                yield say("", tool_calls=call(i, {"arguments": f"{i}}}"}))
            yield say("", "tool_calls", (), timing=timing)
        elif verb == "think":
            yield say("", reasoning_output="so ")
            yield say("", reasoning_output="what")
            yield say("19", "stop", num_reasoning_tokens=2, stop_reason="END", timing=timing)
        elif verb == "raw":
            name, _, text = rest.partition(" ")
            yield say("", "stop", **{name: text})
        else:
            top = {"5": -0.5, "7": -1.5, "6": -1.0}
            others = {"rank": 1, "top": top, "tokens": {str(i): word for i, word in WORDS.items()}}
            entries = [
                {"token_id": i, "token": WORDS.get(i), "logprob": -0.5, **others} for i in (5, 6, 7, 8)
            ]
            echoes = inputs.get("exclude_input_in_output") == [False]
            prompt = (
                json.dumps([None, entries[2]])
                if {"prompt_logprobs", "num_prompt_logprobs"} & set(inputs)
                else ""
            )
            first = f"{verb} {rest}" if echoes else ""
            yield say(f"{first}a", logprobs=json.dumps(entries[:1]), prompt_logprobs=prompt)
            yield say("é", "stop", (6, 7, 8), logprobs=json.dumps(entries[1:]))

    def _endless(self, request: Any, context: Any, first: Any | None) -> Iterator[Any]:
        event = threading.Event()
        self.running[request.id] = event
        self._events.append(event)
        self.begun.add(request.id)
        if request.model_name != "chat" and not context.add_callback(event.set):
            event.set()  # the client has left already
        # The engine is not the call: it goes on when gRPC has given up the call of a client that left.
        threading.Thread(target=self._engine, args=(request.id, event), daemon=True).start()
        if first is not None:
            yield first
        self.started.set()
        event.wait()
        if context.is_active():
            yield from self._error(context, "CANCELLED", "the request was cancelled")

    def _engine(self, request_id: str, event: threading.Event) -> None:
        event.wait()
        self.running.pop(request_id, None)
        self.ended.set()

    @staticmethod
    def _text(inputs: dict[str, Any]) -> str:
        if "text_input" in inputs:
            return inputs["text_input"][0].decode("utf-8", "surrogatepass")
        if "messages" in inputs:
            asked = json.loads(inputs["messages"][0])
            return str((asked["messages"] if isinstance(asked, dict) else asked)[-1]["content"])
        return "echo"

    def _error(self, context: Any, code: str, message: str) -> Iterator[Any]:
        metadata = dict(context.invocation_metadata())
        if metadata.get("triton_grpc_error") == "true":
            self.asked_for_codes = True
            context.abort(grpc.StatusCode[code], message)
        yield service_pb2.ModelStreamInferResponse(error_message=message)

    def _response(
        self, request: Any, text: str, ids: list[int], reason: str, *, final: bool, **others: Any
    ) -> Any:
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        if request.model_name != "unary":
            answer.parameters["triton_final_response"].bool_param = final
        said: dict[str, Any] = {
            "text_output": text,
            "finish_reason": reason,
            "num_input_tokens": 3,
            "num_cached_tokens": 2,
            "index": 0,
            "cumulative_logprob": -0.5 - others.get("index", 0),
            **others,
        }
        values: dict[str, tuple[str, Any]] = {"output_ids": ("INT32", np.array(ids, dtype=np.int32))}
        for name, kind in OUTPUTS.items():
            if name == "output_ids":
                continue
            datatype = NAMES.get(kind, kind)
            value = said.get(name, "" if kind == "STRING" else 0)
            stated = value.encode() if kind == "STRING" else value
            dtype = object if kind == "STRING" else triton_to_np_dtype(datatype)
            shape: Any = -1 if name in ("embedding", "scores") else 1
            values[name] = (datatype, np.array([stated], dtype=dtype).reshape(shape))
        wanted = [output.name for output in request.outputs] or list(values)
        for name in wanted:
            datatype, value = values[name]
            answer.outputs.add(name=name, datatype=datatype, shape=value.shape)
            raw = serialize_byte_tensor(value).item() if datatype == "BYTES" else value.tobytes()
            answer.raw_output_contents.append(raw)
        return service_pb2.ModelStreamInferResponse(infer_response=answer)


def _tenant(inputs: dict[str, Any]) -> str:
    others = json.loads(inputs.get("sampling_parameters", [b"{}"])[0])
    return inputs["tenant"][0].decode() if "tenant" in inputs else others.get("tenant", "")


def _jsonable(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
        for name, values in inputs.items()
    }
