"""Two thousand requests with one thing wrong, in every field, form, dialect and protocol, beside ten good.

Each must be refused at once, with the status for wrong arguments, in words that name the field.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from quire_ensemble.generator_schema import (
    IMAGE_INPUTS,
    INPUTS,
    PROMPT_INPUTS,
    TENSORRT_LLM_INPUTS,
    TensorSpec,
)
from tests.e2e.conftest import TinyServer
from tests.e2e.triton_calls import infer, stream
from tests.fault.fuzz.calls import DTYPES
from tests.fault.fuzz.memory import anonymous_mib
from tests.fixtures.server import ServerProcess

COUNT = 2_000
GROWTH_MIB = 32.0
"""By how much a process of ours may grow after the first fifth."""
SERVER_GROWTH_MIB = 128.0
"""Likewise tritonserver 24.10, which loses some memory with every stream."""
LIMIT_S = 60.0
UNBATCHED = ("generator", "vllm_model", "generator_unary")
BATCHED = ("tensorrt_llm", "tensorrt_llm_unary")
ONCE = {"generator": "generator_unary", "vllm_model": "generator_unary", "tensorrt_llm": "tensorrt_llm_unary"}
"""Models that answer HTTP `infer` in the place of those that are decoupled."""
NO_BAD_VALUE = {"pad_id", *(spec.name for spec in IMAGE_INPUTS), "prompt_embeds"}
"""What is passed over whatever it is, and what is wrong only beside others."""
NOT_A_SCALAR = {"sampling_parameters", "cache_control"}
FORMS = ("value", "value", "type", "shape", "json", "parameter", "unknown")
PROTOCOLS = ("grpc", "generate", "infer")


@dataclass(frozen=True)
class Malformed:
    model: str
    protocol: str
    form: str
    field: str
    inputs: dict[str, np.ndarray]
    parameters: dict[str, Any]


def malformed(rng: Random, number: int) -> Malformed:
    """A request that is right but for one field, of which each model has its turn."""
    models = (*UNBATCHED, "tensorrt_llm")
    turn, model = number // len(models), models[number % len(models)]
    batched = model in BATCHED
    specs = [spec for spec in INPUTS if not (batched and spec.name == "stop")]
    specs += TENSORRT_LLM_INPUTS if batched else ()
    spec = specs[turn % len(specs)]
    form = rng.choice(FORMS if turn >= len(specs) else ("value", "type", "shape"))
    if form == "value" and (spec.datatype == "TYPE_BOOL" or spec.name in NO_BAD_VALUE):
        form = "type"
    if form in ("json", "parameter") and (spec.name == "pad_id" or spec.name in NOT_A_SCALAR):
        form = "shape"
    protocol = rng.choice(PROTOCOLS if form in ("json", "parameter", "unknown") else ("grpc", "infer"))
    is_prompt = spec.name in {one.name for one in PROMPT_INPUTS}
    inputs: dict[str, np.ndarray] = {"max_tokens": np.array([4], np.int32)}
    name = "input_ids" if spec.name == "input_lengths" or protocol == "generate" else "text_input"
    if not is_prompt or form in ("json", "parameter", "unknown"):
        inputs[name] = np.array([5, 6], np.int32) if name == "input_ids" else np.array([b"hi"], np.object_)
    parameters: dict[str, Any] = {}
    field = spec.name
    match form:
        case "value":
            inputs[field] = _bad_value(rng, spec)
        case "type":
            kind = np.float64 if spec.datatype != "TYPE_STRING" else np.int8
            inputs[field] = np.ones([1 if dim == -1 else dim for dim in spec.dims], kind)
        case "shape":
            # Of a batch's first dimension, Triton's core tells only that some input differs from the rest.
            size = [1, 1, 1, 1] if batched else rng.choice(([1] * 4, [2, 3, 1], [0, 0, 0, 1]))
            inputs[field] = np.full(size, b"1" if spec.datatype == "TYPE_STRING" else 1).astype(
                DTYPES[spec.datatype]
            )
        case "json":
            text = json.dumps({field: rng.choice(({"x": {}}, [[[]]], {"": []}))})
            inputs["sampling_parameters"] = np.array([text.encode()], np.object_)
        case "parameter":
            field = rng.choice([one.name for one in INPUTS if one.datatype in ("TYPE_INT32", "TYPE_FP32")])
            parameters[field] = rng.choice(("x", "1.5.5", "", "0x", "[", "nan"))
            protocol = "grpc"
        case _:
            field = f"{field}_{rng.randrange(1000)}"
            parameters[field] = rng.choice((1, "x", True))
    if batched and form != "shape":
        inputs = {key: value[None] for key, value in inputs.items()}
    elif batched:
        inputs = {key: value if key == field else value[None] for key, value in inputs.items()}
    if protocol == "infer":
        model = ONCE.get(model, model)
    return Malformed(model, protocol, form, field, inputs, parameters)


def _bad_value(rng: Random, spec: TensorSpec) -> np.ndarray:
    match spec.datatype:
        case "TYPE_INT32" | "TYPE_UINT64" if spec.name.endswith("seed"):
            return np.ones(2, np.uint64)
        case "TYPE_INT32":
            shape = [3 if dim == -1 else dim for dim in spec.dims]
            return np.full(shape, rng.choice((-(2**31), -(2**31) + 7)), np.int32)
        case "TYPE_FP32":
            shape = [3 if dim == -1 else dim for dim in spec.dims]
            return np.full(shape, rng.choice((np.nan, -1e9, 3e38, -np.inf)), np.float32)
        case _:
            return np.array([rng.choice((b"\xff", b"a\xed\xa0\x80", b"{\xc0"))], np.object_)


class Served:
    def __init__(self, server: ServerProcess) -> None:
        self.server, self.url, self.http_url = server, server.grpc_url, server.http_url

    def refusal(self, request: Malformed) -> tuple[str, str]:
        """Status and message; a status of "" where the protocol's streams do not tell it."""
        if request.protocol == "grpc":
            return self._by_grpc(request)
        connection = http.client.HTTPConnection(self.http_url, timeout=LIMIT_S)
        try:
            path, body = self._as_json(request)
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
        return str(response.status), text

    def _as_json(self, request: Malformed) -> tuple[str, bytes]:
        model = f"/v2/models/{request.model}"
        if request.protocol == "generate":
            values = {name: _plain(array) for name, array in request.inputs.items()}
            return f"{model}/generate", json.dumps({**values, **request.parameters}).encode()
        inputs = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": np_to_triton_dtype(array.dtype),
                "data": _plain(array, flat=True),
            }
            for name, array in request.inputs.items()
        ]
        body = json.dumps({"inputs": inputs, "parameters": request.parameters}, ensure_ascii=False)
        return f"{model}/infer", body.encode("utf-8", "surrogateescape")

    def _by_grpc(self, request: Malformed) -> tuple[str, str]:
        if request.model not in ONCE:
            try:
                infer(self.url, request.model, request.inputs, parameters=request.parameters)
            except InferenceServerException as error:
                return str(error.status()), str(error)
            return "OK", ""
        reply = stream(self.url, request.model, request.inputs, parameters=request.parameters)
        return ("OK", reply.text) if reply.error is None else ("", str(reply.error))


def _plain(array: np.ndarray, *, flat: bool = False) -> Any:
    values = [
        one.decode("utf-8", "surrogateescape") if isinstance(one, bytes) else one
        for one in array.reshape(-1).tolist()
    ]
    return values if flat or len(values) != 1 else values[0]


@pytest.fixture
def served(tiny: TinyServer) -> Served:
    return Served(tiny.server)


def good_requests(url: str) -> list[Callable[[], Any]]:
    """Ten that are right, in every dialect."""
    asked: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "stream": True}

    def tokens(model: str, **inputs: Any) -> Any:
        reply = stream(url, model, {**asked, **inputs})
        assert reply.error is None, reply.error
        return reply.text

    def row(prompt: str) -> Any:
        batched = {"max_tokens": np.array([[60]], np.int32), "ignore_eos": np.array([[True]])}
        batched |= {"stream": np.array([[True]]), "text_input": np.array([[prompt.encode()]], np.object_)}
        reply = stream(url, "tensorrt_llm", batched)
        assert reply.error is None, reply.error
        return reply.text

    def unary() -> Any:
        found = infer(url, "generator_unary", {"text_input": "unary", "max_tokens": 60, "ignore_eos": True})
        return found.as_numpy("text_output").tolist()

    return [
        *(lambda i=i: tokens("generator", text_input=f"good {i}") for i in range(3)),
        lambda: tokens("generator", input_ids=[5, 6, 7]),
        lambda: tokens("generator", text_input="seeded", temperature=1.0, seed=7),
        *(lambda i=i: tokens("vllm_model", text_input=f"vllm {i}", temperature=0.0) for i in range(2)),
        *(lambda i=i: row(f"row {i}") for i in range(2)),
        unary,
    ]


def complaint(request: Malformed, status: str, message: str) -> str:
    """What is wrong with a refusal; empty: nothing."""
    wrong = []
    if request.protocol == "grpc":
        if status not in ("", "StatusCode.INVALID_ARGUMENT"):
            wrong.append(f"status {status}")
    elif status != "400":
        wrong.append(f"status {status}")
    if request.field not in message:
        wrong.append("does not name the field")
    return f"{request}: {', '.join(wrong)}: {message[:300]}" if wrong else ""


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_malformed_requests(served: Served) -> None:
    bombard(served, COUNT)


@pytest.mark.server
def test_three_hundred_malformed_requests(served: Served) -> None:
    bombard(served, 300)


def bombard(served: Served, count: int) -> None:
    rng = Random(18)
    requests = [malformed(rng, number) for number in range(count)]
    good = good_requests(served.url)
    expected = [ask() for ask in good]
    pids = {process.pid for process in served.server.descendants()}
    over, rounds, problems = threading.Event(), Counter[int](), []

    def repeat(number: int) -> None:
        while not over.is_set() or not rounds[number]:
            found = good[number]()
            if found != expected[number]:
                problems.append(f"good request {number}: {found!r:.200}, not {expected[number]!r:.200}")
            rounds[number] += 1

    def refused(request: Malformed) -> str:
        try:
            return complaint(request, *served.refusal(request))
        except Exception as error:
            return f"{request}: {type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(good) + 4) as pool:
        running = [pool.submit(repeat, number) for number in range(len(good))]
        try:
            first = count // 5
            complaints = list(pool.map(refused, requests[:first]))
            before = anonymous_mib(served.server)
            complaints += list(pool.map(refused, requests[first:]))
        finally:
            over.set()
        for one in running:
            one.result(2 * LIMIT_S)
    problems += [one for one in complaints if one]
    for name, now in anonymous_mib(served.server).items():
        bound = SERVER_GROWTH_MIB if name.startswith("tritonserver") else GROWTH_MIB
        if now > before.get(name, now) + bound:
            problems.append(f"{name} grew from {before[name]:.0f} to {now:.0f} MiB")
    assert {process.pid for process in served.server.descendants()} >= pids, "a process has died"
    print(
        f"{count} requests, {Counter((r.model, r.protocol, r.form) for r in requests)}, good {dict(rounds)}"
    )
    assert not problems, f"{len(problems)} of {count}:\n" + "\n".join(problems[:40])


def test_every_field_type_form_and_protocol_is_among_them() -> None:
    rng = Random(18)
    made = [malformed(rng, number) for number in range(COUNT)]
    fields = {request.field for request in made}
    assert {spec.name for spec in (*INPUTS, *TENSORRT_LLM_INPUTS)} <= fields
    assert {request.model for request in made} == {*UNBATCHED, *BATCHED}
    assert {request.form for request in made} == set(FORMS)
    assert {request.protocol for request in made} == set(PROTOCOLS)
