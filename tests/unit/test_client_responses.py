"""How quire_client reads responses: as tritonclient does, and whatever comes is a chunk or an error."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from quire_client import AsyncClient, Chunk, Client, ProtocolError, ServerError
from quire_client._io import AsyncioCall
from quire_client.protocol import parse_response
from quire_client.types import Extras, collect
from tests.fixtures.properties import settings
from tests.unit.fake_kserve import FakeKServe

WAIT = 60.0
"""Seconds any event may take on a busy machine; none is reached when the code is right."""
TEXTS = ("text_output", "finish_reason", "logprobs")
FLOATS = ("cumulative_logprob",)
INTEGERS = ("output_ids", "index", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
TYPED = {
    "BYTES": "bytes_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def _elements(datatype: str) -> st.SearchStrategy[Any]:
    dtype = np.dtype(triton_to_np_dtype(datatype))
    if dtype.kind == "f":
        return st.floats(width=8 * dtype.itemsize, allow_nan=False)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[str, list[Any], list[int]]]:
    """Outputs of a response in any order: name to datatype, elements and shape; some are left out."""
    names = draw(st.permutations([*TEXTS, *FLOATS, *INTEGERS, "of another model"]))
    outputs: dict[str, tuple[str, list[Any], list[int]]] = {}
    for name in names[: draw(st.integers(0, len(names)))]:
        if name in TEXTS:
            datatype = "BYTES"
            element: st.SearchStrategy[Any] = st.binary(max_size=9) | st.text(max_size=9).map(str.encode)
            if name == "logprobs":
                numbers = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=3)
                element = st.just(b"") | numbers.map(lambda v: json.dumps({"é": v}).encode())
        elif name == "of another model":
            datatype, element = "FP32", _elements("FP32")
        else:
            kinds = [k for k in TYPED if k != "BYTES" and k.startswith("FP") == (name in FLOATS)]
            datatype = draw(st.sampled_from(kinds))
            element = _elements(datatype)
        values = draw(st.lists(element, max_size=5))
        shape = draw(st.sampled_from([[len(values)], [1, len(values)], [len(values), 1]]))
        outputs[name] = (datatype, values, shape)
    return outputs


def response_of(
    outputs: dict[str, tuple[str, list[Any], list[int]]], *, raw: bool, final: bool | None
) -> Any:
    response = service_pb2.ModelInferResponse(model_name="generator", id="1")
    if final is not None:
        response.parameters["triton_final_response"].bool_param = final
    for name, (datatype, values, shape) in outputs.items():
        output = response.outputs.add(name=name, datatype=datatype, shape=shape)
        if not raw:
            getattr(output.contents, TYPED[datatype]).extend(values)
        elif datatype == "BYTES":
            array = np.array([*values, None], dtype=object)[:-1]
            data = serialize_byte_tensor(array).item() if values else b""
            response.raw_output_contents.append(data)
        else:
            response.raw_output_contents.append(np.array(values, triton_to_np_dtype(datatype)).tobytes())
    # As it comes off the wire.
    return service_pb2.ModelInferResponse.FromString(response.SerializeToString())


def chunks_by_tritonclient(response: Any, received_at: float, *, final: bool) -> list[Chunk]:
    """The chunks of a response with raw contents, its tensors read by `InferResult`."""
    if not response.outputs:
        return []
    result = InferResult(response)
    arrays = {name: result.as_numpy(name) for name in (*TEXTS, *FLOATS, *INTEGERS)}
    values = {name: [] if a is None else a.reshape(-1).tolist() for name, a in arrays.items()}

    def of(name: str, i: int) -> Any:
        value = values[name][i] if i < len(values[name]) else None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    count = max(1, len(values["text_output"]))
    return [
        Chunk(
            of("text_output", i) or "",
            tuple(values["output_ids"]) if count == 1 else (),
            of("finish_reason", i) or None,
            i if of("index", i) is None else of("index", i),
            final and i == count - 1,
            json.loads(of("logprobs", i)) if of("logprobs", i) else None,
            of("num_input_tokens", 0),
            of("num_output_tokens", i),
            received_at,
            of("num_cached_tokens", 0),
            of("cumulative_logprob", i),
        )
        for i in range(count)
    ]


@settings(max_examples=200)
@given(tensors(), st.sampled_from([True, False, None]))
def test_outputs_are_read_as_tritonclient_reads_them(
    outputs: dict[str, tuple[str, list[Any], list[int]]], final: bool | None
) -> None:
    """Raw contents against `InferResult`; typed ones, of which it reads only BYTES, against the raw ones."""
    response = response_of(outputs, raw=True, final=final)
    chunks = chunks_by_tritonclient(response, 1.5, final=bool(final))
    assert parse_response(response, 1.5) == (chunks, final)
    assert parse_response(response_of(outputs, raw=False, final=final), 1.5) == (chunks, final)


@st.composite
def damages(draw: st.DrawFn) -> Any:
    """A response some of whose fields are not what belongs there."""
    response = response_of(draw(tensors().filter(bool)), raw=True, final=draw(st.booleans()))
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(response.outputs) - 1))
        raw, output = response.raw_output_contents, response.outputs[i]
        what = draw(st.sampled_from(["cut", "add", "any", "drop", "more", "shape", "datatype", "name"]))
        if what in ("cut", "add", "any") and i < len(raw):
            end = draw(st.binary(min_size=1, max_size=9))
            raw[i] = {"cut": raw[i][: -len(end)], "add": raw[i] + end, "any": end}[what]
        elif what == "drop" and raw:
            del raw[-1]
        elif what == "more":
            raw.append(b"")
        elif what == "shape":
            output.shape[:] = draw(
                st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 3), max_size=40)
            )
        elif what == "datatype":
            output.datatype = draw(st.sampled_from([*TYPED, "BOOL", "BF16", "", "é" * 99]))
        elif what == "name":
            output.name = draw(st.sampled_from([*TEXTS, *FLOATS, *INTEGERS]))
    return response


def _response_with(name: str, datatype: str, shape: list[int], raw: bytes) -> Any:
    response = service_pb2.ModelInferResponse(raw_output_contents=[raw])
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    return response


@settings(max_examples=200)
@given(damages())
@example(_response_with("text_output", "BYTES", [1], b"\xff\xff\xff\xffshort"))
@example(_response_with("text_output", "BYTES", [1], b"\1\0\0"))
@example(_response_with("logprobs", "BYTES", [1], b"\x04\0\0\0[[[["))
@example(_response_with("output_ids", "INT32", [2**63 - 1] * 200_000, b"1234"))
def test_a_damaged_response_is_chunks_or_one_error(response: Any) -> None:
    """Numbers that nobody can tell from right ones are taken; all else is an error that names the output."""
    try:
        chunks, final = parse_response(response, 0.0)
    except ProtocolError as error:
        assert len(str(error)) < 200
        assert any(name in str(error) for name in (*TEXTS, *FLOATS, *INTEGERS, "raw data of"))
    else:
        assert all(isinstance(chunk.text, str) for chunk in chunks)
        assert final in (True, False, None)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (_response_with("output_ids", "INT32", [2], b"1234"), "output output_ids: .*shape"),
        (_response_with("output_ids", "INT32", [1], b"12345"), "output output_ids: .*shape"),
        (_response_with("output_ids", "INT32", [-1], b"1234"), "output output_ids: .*shape"),
        (_response_with("output_ids", "FP32", [1], b"1234"), "output output_ids: must be of int, .*'FP32'"),
        (_response_with("text_output", "BYTES", [2], b"\1\0\0\0a"), "output text_output: .*shape"),
        (_response_with("text_output", "BYTES", [1], b"\2\0\0\0a"), "output text_output: .*shape"),
        (_response_with("text_output", "INT32", [1], b"1234"), "output text_output: must be of str"),
        (_response_with("logprobs", "BYTES", [1], b"\1\0\0\0{"), "output logprobs: not JSON"),
    ],
)
def test_what_is_wrong_with_a_response_is_named(response: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_response(response, 0.0)


def test_log_probabilities_of_prompts_are_in_their_order() -> None:
    """They were in the order in which their responses came, and were told of another prompt's text."""
    chunks = [Chunk("", extras=Extras(batch_index=prompt, prompt_logprobs=[prompt])) for prompt in (2, 0, 1)]
    assert collect("r", "m", 0.0, chunks).prompt_logprobs == ([0], [1], [2])


def test_a_request_whose_response_is_malformed_is_ended_on_the_server() -> None:
    """A ValueError of numpy came to the caller instead, who could not know whose fault it was."""
    with FakeKServe() as server, Client(server.url) as client:
        stream = client.stream("malformed", model="generator")
        with pytest.raises(ProtocolError, match="text_output") as raised:
            next(stream)
        assert raised.value.request_id == stream.request_id
        assert server.cancelled_ids == [stream.request_id]
        assert server.ended.wait(WAIT)


def test_async_request_whose_response_is_malformed_is_ended_on_the_server() -> None:
    async def run(url: str) -> str:
        async with AsyncClient(url) as client:
            stream = client.stream("malformed", model="generator")
            with pytest.raises(ProtocolError, match="text_output"):
                await anext(stream)
            return stream.request_id

    with FakeKServe() as server:
        request_id = asyncio.run(run(server.url))
        assert server.cancelled_ids == [request_id]
        assert server.ended.wait(WAIT)


@pytest.fixture
def garbage_url() -> Iterator[str]:
    """A server whose streams consist of bytes that are no message."""
    handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter([b"\xff\xff", b"\xff"]))
    server = grpc.server(ThreadPoolExecutor(4))
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelStreamInfer": handler}
    )
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_bytes_that_are_no_message_are_an_error(garbage_url: str, kind: str) -> None:
    """grpc.aio hands out None for them, which looked like an end of the stream without a final response."""

    async def run() -> None:
        async with AsyncClient(garbage_url) as client:
            await client.generate("x")

    with pytest.raises(ServerError, match="deserializ") as raised:
        if kind == "async":
            asyncio.run(run())
        else:
            with Client(garbage_url) as client:
                client.generate("x")
    assert raised.value.code == "INTERNAL"


# --- the task that reads a call of the asyncio client ---


def test_a_stream_dropped_after_its_final_response_leaves_no_call_behind() -> None:
    """The task that reads the call would wait for the server's end of it for ever."""

    async def run(url: str) -> bool:
        async with AsyncClient(url) as client:
            stream = client.stream("lingering", model="generator")
            assert (await anext(stream)).final
            del stream
            gc.collect()
            return await asyncio.to_thread(server.ended.wait, WAIT)

    with FakeKServe() as server:
        assert asyncio.run(run(server.url))
        assert not server.cancelled_ids


class CallOfNumbers:
    """A call of grpc.aio's whose responses are 1 ... `count`, all there at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read_so_far = 0

    async def read(self) -> Any:
        if self.read_so_far == self.count:
            return grpc.aio.EOF
        self.read_so_far += 1
        return self.read_so_far

    def cancel(self) -> None:
        self.count = self.read_so_far


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_call_is_read_little_ahead_and_in_order() -> None:
    """Responses that nobody takes stay with the server, by gRPC's flow control."""

    async def run() -> None:
        numbers = CallOfNumbers(50)
        call = AsyncioCall(numbers)
        received = []
        while (response := await call.receive()) is not None:
            received.append(response)
            if response % 7 == 0:
                await _settle()
            assert numbers.read_so_far <= response + 2
        assert received == list(range(1, 51))
        assert await call.receive() is None

    asyncio.run(asyncio.wait_for(run(), WAIT))


def test_a_cancelled_call_with_unread_responses_leaves_no_task() -> None:
    async def run() -> None:
        call = AsyncioCall(CallOfNumbers(50))
        await _settle()
        call.cancel()
        await _settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_receiver_that_is_cancelled_loses_no_response() -> None:
    async def run() -> None:
        class Late(CallOfNumbers):
            allowed = asyncio.Semaphore(0)

            async def read(self) -> Any:
                await self.allowed.acquire()
                return await super().read()

        numbers = Late(3)
        call = AsyncioCall(numbers)
        for expected in (1, 2, 3):
            receiving = asyncio.ensure_future(call.receive())
            await _settle()
            receiving.cancel()
            await _settle()
            numbers.allowed.release()
            await _settle()
            assert await call.receive() == expected

    asyncio.run(asyncio.wait_for(run(), WAIT))


def test_the_dialect_of_vllm_says_none_before_the_end() -> None:
    outputs = {"text_output": ("BYTES", [b"a"], [1]), "finish_reason": ("BYTES", [b"None"], [1])}
    (chunk,), _ = parse_response(response_of(outputs, raw=True, final=False), 0.0)
    assert (chunk.text, chunk.finish_reason) == ("a", None)


def test_prompt_logprobs_are_those_of_the_first_response_that_has_some() -> None:
    """The other choices' responses have empty ones."""
    chunks = [
        Chunk("a", index=i, extras=Extras(prompt_logprobs=found)) for i, found in enumerate(([1], [], None))
    ]
    assert collect("r", "m", 0.0, chunks).prompt_logprobs == ([1],)
    assert collect("r", "m", 0.0, chunks[1:]).prompt_logprobs == ([],)
