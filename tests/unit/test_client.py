"""quire_client against a KServe server in this process (`fake_kserve`)."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from tritonclient.grpc import service_pb2

from quire.server import healthcheck
from quire_client import (
    AsyncClient,
    AsyncStream,
    Cancelled,
    Client,
    ConnectError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolError,
    QuireClientError,
    ServerError,
    Stream,
    Unavailable,
)
from quire_client import _connection as conn
from quire_client import cli as cli_module
from quire_client._io import BlockingIO, run_blocking
from quire_client._terminal import Waiting, without_controls
from quire_client.errors import error_from_text
from quire_client.protocol import KNOWN_INPUTS, ModelSchema, Prompt, assumed_schema, build_request
from tests.fixtures.waiting import GROWING_S, wait_until
from tests.unit.fake_kserve import FakeKServe, nobody, read_inputs

CLIENT_DIR = Path(__file__).parents[2] / "client"
WAIT = 60.0
"""Seconds any event may take on a busy machine; none is reached when the code is right."""


@pytest.fixture
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake
        assert not fake.asked_for_codes


@pytest.fixture
def client(server: FakeKServe) -> Iterator[Client]:
    with Client(server.url) as one:
        yield one


def sent(result_text: str) -> dict[str, Any]:
    """Inputs as the fake's `echo` saw them."""
    return json.loads(result_text)


# --- what is sent ---


def test_a_server_of_this_machine_is_not_asked_by_a_proxy(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC goes by the environment's proxy, to 127.0.0.1 too: the README's first lines failed behind one."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = server.url.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost"):
        with Client(f"{host}:{port}") as client:
            assert client.generate("tokens 2").text == "t0 t1 "
    for url, is_near in (("[::1]:8001", True), ("localhost.a.com:8001", False), ("10.0.0.1:8001", False)):
        assert (("grpc.enable_http_proxy", 0) in conn.Settings(url).options) == is_near
        assert bool(healthcheck.NEAR.match(url)) == is_near, "a server behind a proxy was not reached"


def test_keywords_become_the_tensors_the_model_declares(client: Client) -> None:
    inputs = sent(
        client.generate(
            "echo", max_tokens=5, temperature=0.5, seed=2**64 - 1, stop="\n", logit_bias={3: 1.5}
        ).text
    )
    assert inputs["max_tokens"] == [5]
    assert inputs["temperature"] == [0.5]
    assert inputs["seed"] == [2**64 - 1]
    assert inputs["stop"] == ["\n"]
    assert json.loads(inputs["logit_bias"][0]) == {"3": 1.5}
    assert "sampling_parameters" not in inputs
    assert inputs["exclude_input_in_output"] == [True]


def test_what_fits_no_tensor_goes_as_json_for_the_server_to_judge(client: Client) -> None:
    odd = {
        "max_tokens": "many",
        "temperature": True,
        "seed": -1,
        "stop": ["a", 5],
        "no_such": 1,
        "top_p": 0.5,
        "min_p": 10**400,  # no float is as large
    }
    inputs = sent(client.generate("echo", sampling_parameters={"top_p": 0.1, "top_k": 4}, **odd).text)
    assert json.loads(inputs["sampling_parameters"][0]) == {**odd, "top_k": 4}
    assert not {"max_tokens", "temperature", "seed", "stop", "min_p"} & set(inputs)


def test_none_means_not_given(client: Client) -> None:
    assert "temperature" not in sent(client.generate("echo", temperature=None).text)


def test_stream_flag_and_outputs(server: FakeKServe, client: Client) -> None:
    client.generate("echo")
    list(client.stream("tokens 1"))
    unary, streamed = server.requests
    assert sent(client.generate("echo").text)["stream"] == [False]
    assert {o.name for o in unary.outputs} == {
        "text_output",
        "output_ids",
        "finish_reason",
        "num_input_tokens",
        "num_cached_tokens",
        "stop_reason",
    }
    assert {o.name for o in streamed.outputs} == {"text_output", "output_ids", "finish_reason"}


def test_outputs_that_are_asked_for_by_what_is_wanted(server: FakeKServe, client: Client) -> None:
    usual = {"text_output", "output_ids", "finish_reason"}

    def asked(prompt: str | None = None, **arguments: Any) -> set[str]:
        list(client.stream(prompt, **arguments))
        return {output.name for output in server.requests[-1].outputs} - usual

    messages = [{"role": "user", "content": "tokens 1"}]
    assert asked(messages=messages) == {"reasoning_output"}
    assert asked(messages={"messages": messages, "tools": []}) == {"reasoning_output"}
    assert asked(messages={"messages": messages, "tools": [{}]}) == {"reasoning_output", "tool_calls"}
    assert asked("tokens 1", prompt_logprobs=0) == {"prompt_logprobs"}
    assert asked("tokens 1", return_timing=True) == {"timing"}
    assert asked("tokens 1", return_timing=False) == set()
    assert asked(["a", "b"], model="generator") == {"batch_index"}


def test_tools_and_formats_go_with_the_messages(server: FakeKServe, client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    beside = {"tools": tools, "tool_choice": "auto", "response_format": {"type": "text"}}
    result = client.chat("call", system="be kind", parallel_tool_calls=False, **beside)
    told = json.loads(sent_by(server)["messages"][0])
    assert told == {
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "call"}],
        "parallel_tool_calls": False,
        **beside,
    }
    assert result.tool_calls == tuple(
        {"id": f"call_{i}", "type": "function", "function": {"name": f"f{i}", "arguments": f'{{"x": {i}}}'}}
        for i in range(2)
    )
    assert (result.text, result.finish_reason) == ("hm ", "tool_calls")
    client.generate("echo", model="generator", structured_output={"regex": "a+"})
    assert json.loads(sent_by(server)["structured_output"][0]) == {"regex": "a+"}


def sent_by(server: FakeKServe) -> dict[str, Any]:
    return read_inputs(server.requests[-1])


def test_reasoning_and_the_rest_of_an_answer(server: FakeKServe, client: Client) -> None:
    asked = {"messages": [{"role": "user", "content": "think"}], "return_timing": True}
    asked |= {"return_stop_reason": True, "return_num_reasoning_tokens": True}
    chunks = list(client.stream(**asked))
    assert [(c.reasoning, c.text) for c in chunks] == [("so ", ""), ("what", ""), ("", "19")]
    assert chunks[0].stop_reason is None and chunks[0].server_timing is None
    result = client.generate(**asked)
    assert (result.reasoning, result.text, result.stop_reason) == ("so what", "19", "END")
    assert result.num_reasoning_tokens == 2
    assert result.server_timing == {"queue": 0.5, "total": 9.5}
    plain = client.chat("tokens 1")
    assert (plain.reasoning, plain.tool_calls, plain.stop_reason) == ("", (), None)
    assert (plain.server_timing, plain.prompt_logprobs) == (None, ())


def test_log_probabilities_of_prompt_and_answer(server: FakeKServe, client: Client) -> None:
    result = client.generate("logprobs", logprobs=3, prompt_logprobs=3)
    inputs = sent_by(server)
    assert (inputs["num_logprobs"], inputs["num_prompt_logprobs"]) == ([3], [3]), "names of an ensemble"
    first, second = result.prompt_logprobs[0]
    assert first is None and second["token_id"] == 7
    assert [entry["token_id"] for part in result.choices[0].logprobs for entry in part] == [5, 6, 7, 8]


def test_several_prompts_in_one_request(server: FakeKServe, client: Client) -> None:
    chunks = list(client.stream(["a", "b"], model="generator"))
    assert [(c.batch_index, c.text) for c in chunks] == [(1, "b1 "), (0, "a1 "), (1, "b2 "), (0, "a2 ")]
    result = client.generate(["a", "b"], model="generator")
    assert [(c.batch_index, c.index, c.text) for c in result.choices] == [(0, 0, "a1 a2 "), (1, 0, "b1 b2 ")]
    assert (result.num_input_tokens, result.num_cached_tokens) == (6, 4), "of both"
    with pytest.raises(InvalidArgument, match="text_input: the model 'chat' takes one prompt"):
        client.generate(["a", "b"])


@pytest.mark.parametrize(
    "raw",
    [
        "tool_calls {",
        "tool_calls {}",
        "tool_calls [1]",
        'tool_calls [{"index": "x"}]',
        'tool_calls [{"function": 1}]',
        'tool_calls [{"function": {"arguments": {}}}]',
        "timing []",
        "prompt_logprobs {",
    ],
)
def test_outputs_of_another_form_are_errors(client: Client, raw: str) -> None:
    outputs = ["text_output", raw.partition(" ")[0]]
    with pytest.raises(ProtocolError, match=f"output {outputs[1]}: not"):
        client.generate(f"raw {raw}", outputs=outputs)


def test_the_requests_of_a_generator(server: FakeKServe, client: Client) -> None:
    assert client.requests()["did"] == {"command": "requests"}
    assert "tenant" not in sent_by(server)
    client.requests(tenant="a")
    assert sent_by(server)["tenant"] == [b"a"], "whose command it is"


@pytest.mark.row("A16")
def test_choices_come_apart_by_index(server: FakeKServe, client: Client) -> None:
    chunks = list(client.stream("choices 3", n=3))
    assert [(c.index, c.finish_reason) for c in chunks[3:]] == [(2, "length"), (1, "length"), (0, "stop")]
    assert {o.name for o in server.requests[-1].outputs} > {"index"}
    result = client.generate("choices 3", n=3)
    assert [(c.index, c.text) for c in result.choices] == [(0, "c0 end"), (1, "c1 end"), (2, "c2 end")]
    assert (result.text, result.finish_reason, result.num_output_tokens) == ("c0 end", "stop", 6)
    ranked = client.generate("choices 2", n=2, sampling_parameters={"beam_width": 4})
    assert [choice.cumulative_logprob for choice in ranked.choices] == [-0.5, -1.5]


def test_scheduling_keywords(client: Client) -> None:
    echo = sent(client.generate("echo", priority=-2, tenant="blue", cache_pin=True, session="talk").text)
    assert (echo["request_priority"], echo["tenant"], echo["cache_pin"]) == ([-2], ["blue"], [True])
    assert json.loads(echo["sampling_parameters"][0]) == {"session": "talk"}, "the fake has no such tensor"
    odd = sent(client.generate("echo", priority="high").text)
    assert json.loads(odd["sampling_parameters"][0]) == {"priority": "high"}, "the server judges"


def test_tokens_from_the_cache_are_told(client: Client) -> None:
    result = client.generate("tokens 2")
    assert (result.num_input_tokens, result.num_cached_tokens) == (3, 2)


@pytest.mark.row("C8")
def test_cache_commands(server: FakeKServe, client: Client) -> None:
    assert client.cache_reset() == {"did": {"command": "reset"}}
    assert client.cache_inspect() == {"did": {"command": "inspect"}}
    assert client.cache_unpin() == {"did": {"command": "unpin", "all": True}}
    one = client.cache_unpin("talk", tenant="blue")
    assert one == {"did": {"command": "unpin", "session": "talk", "tenant": "blue"}}
    assert {request.model_name for request in server.requests} == {"generator"}

    async def ask() -> Any:
        async with AsyncClient(server.url) as other:
            return await other.cache_inspect(), await other.cache_unpin("talk")

    inspected, unpinned = asyncio.run(ask())
    assert inspected == {"did": {"command": "inspect"}}
    assert unpinned == {"did": {"command": "unpin", "session": "talk"}}


@pytest.mark.parametrize("error_codes", [True, False])
def test_a_refusal_tells_when_to_try_again(error_codes: bool) -> None:
    """With exact codes and without: the text alone says as much."""
    text = "error UNAVAILABLE tenant: 'a' has used its 100 tokens per minute; retry after 2.5 s"
    with FakeKServe() as server, Client(server.url, error_codes=error_codes) as client:
        with pytest.raises(Unavailable) as caught:
            client.generate(text)
        assert caught.value.retry_after == 2.5
        with pytest.raises(Unavailable) as caught:
            client.generate("error UNAVAILABLE the queue is full")
        assert caught.value.retry_after is None


def test_default_models(server: FakeKServe, client: Client) -> None:
    client.generate("tokens 1")
    client.chat("tokens 1", system="be brief")
    result = client.generate(input_ids=[5, 6])
    assert [r.model_name for r in server.requests] == ["chat", "chat", "generator"]
    assert sent(result.text)["input_ids"] == [5, 6]


def test_messages_and_several_sources_are_passed_on(client: Client) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    inputs = sent(client.generate("echo", messages=messages, input_ids=[1]).text)
    assert json.loads(inputs["messages"][0]) == messages
    assert inputs["input_ids"] == [1]


def test_invalid_utf8_reaches_the_server(server: FakeKServe) -> None:
    request = build_request(
        assumed_schema("generator"), Prompt("\ud800"), request_id="r", stream=False, sampling={}
    )
    with pytest.raises(UnicodeDecodeError):
        request.raw_input_contents[0].decode()


def test_token_id_that_fits_no_tensor_is_refused_here(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="input_ids: must be integers that fit INT32"):
        client.generate(input_ids=[2**31])
    with pytest.raises(InvalidArgument, match=r"messages: must be JSON: .*bytes"):
        client.chat([{"role": "user", "content": b"x"}])  # type: ignore[list-item]


def test_request_ids_are_unguessable_and_can_be_given(server: FakeKServe, client: Client) -> None:
    client.generate("tokens 1")
    client.generate("tokens 1")
    client.generate("tokens 1", request_id="mine")
    first, second, third = (r.id for r in server.requests)
    assert len(first) == len(second) == 32 and first != second and third == "mine"


def test_timeout_is_told_to_the_server_too(server: FakeKServe, client: Client) -> None:
    client.generate("tokens 1", timeout=5000)
    left_us = server.requests[0].parameters["timeout"].int64_param
    assert 4_000_000_000 < left_us <= 5_000_000_000, "but for what was asked of the server before"


def test_own_table_agrees_with_the_generator() -> None:
    """The client may not import quire_ensemble, so its fallback table is compared with the source here."""
    schema = pytest.importorskip("quire_ensemble.generator_schema")
    declared = {
        s.name: (s.datatype.removeprefix("TYPE_").replace("STRING", "BYTES"), s.dims) for s in schema.INPUTS
    }
    assert {n: (t.datatype, t.dims) for n, t in KNOWN_INPUTS.items()}.items() <= declared.items()
    assert {spec.name for spec in schema.SCHEDULING_INPUTS} <= KNOWN_INPUTS.keys()


def test_restricted_configuration_falls_back_to_metadata() -> None:
    with FakeKServe(restricted=True) as server, Client(server.url) as client:
        assert sent(client.generate("echo", seed=3).text)["seed"] == [3]
        stream = client.stream("endless")
        next(stream)
        stream.close()
        assert server.ended.wait(WAIT)


def test_names_that_nobody_denies_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_client.aio.MAX_SCHEMAS", 3)
    with FakeKServe(restricted=True) as server, Client(server.url) as client:
        for name in "abcdefg":
            assert run_blocking(client._async._schema(name)).name == name
            assert len(client._async._schemas) <= 3


# --- streaming ---


def test_stream_yields_chunks_and_ends_after_the_final(client: Client) -> None:
    chunks = list(client.stream("tokens 3"))
    assert [c.text for c in chunks] == ["t0 ", "t1 ", "t2 "]
    assert [c.token_ids for c in chunks] == [(0,), (1,), (2,)]
    assert [c.finish_reason for c in chunks] == [None, None, "stop"]
    assert [c.final for c in chunks] == [False, False, True]


def test_result_adds_up(client: Client) -> None:
    result = client.generate("tokens 4")
    assert result.text == "t0 t1 t2 t3 "
    assert result.token_ids == (0, 1, 2, 3)
    assert result.finish_reason == "stop"
    assert result.num_input_tokens == 3
    assert result.num_output_tokens == 4
    assert result.timing.ttft is not None and 0 < result.timing.ttft <= result.timing.total


def test_separate_final_flag_is_no_chunk(client: Client) -> None:
    assert [c.text for c in client.stream("flag final 2")] == ["t0 ", "t1 "]


def test_one_response_of_a_model_that_is_not_decoupled_is_final(client: Client) -> None:
    assert client.generate("tokens 1", model="unary").text == "t0 "


def test_stream_without_final_raises(client: Client) -> None:
    stream = client.stream("no final 2")
    assert [next(stream).text, next(stream).text] == ["t0 ", "t1 "]
    with pytest.raises(ProtocolError, match="without a final response"):
        next(stream)


def test_many_streams_share_one_channel(client: Client) -> None:
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda n: client.generate(f"tokens {n + 1}"), range(32)))
    assert [len(r.token_ids) for r in results] == [n + 1 for n in range(32)]


# --- errors ---


CODES = [
    ("INVALID_ARGUMENT", InvalidArgument),
    ("NOT_FOUND", NotFound),
    ("UNAVAILABLE", Unavailable),
    ("CANCELLED", Cancelled),
    ("INTERNAL", ServerError),
    ("UNKNOWN", ServerError),
]


@pytest.mark.parametrize(("code", "kind"), CODES)
def test_status_codes_become_exceptions(code: str, kind: type[QuireClientError]) -> None:
    with FakeKServe() as server, Client(server.url, error_codes=True) as client:
        with pytest.raises(kind, match="some words") as caught:
            client.generate(f"error {code} some words")
        assert type(caught.value) is kind
        assert caught.value.code == code
        assert len(caught.value.request_id) == 32


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("top_p: must be in (0, 1], got 7", "INVALID_ARGUMENT"),
        ("in ensemble 'chat', top_p: must be in (0, 1], got 7", "INVALID_ARGUMENT"),
        ("messages[0].role: is missing", "INVALID_ARGUMENT"),
        ("unexpected inference input 'top_q' for model 'generator'", "INVALID_ARGUMENT"),
        ("Request for unknown model: 'x' is not found", "NOT_FOUND"),
        ("the request was cancelled", "CANCELLED"),
        ("the queue is full (64 requests)", "UNAVAILABLE"),
        ("the engine process ended with status -9", "UNAVAILABLE"),
        ("structured_output: was not checked within 5 s", "UNAVAILABLE"),
        ("name: 'a' is not the name of an adapter", "NOT_FOUND"),
        ("name: 'a' is being unloaded", "UNAVAILABLE"),
        ("name: 'a' is in use by 2 requests: \"drain\": true waits for their ends", "UNAVAILABLE"),
        ("name: 'x is being unloaded' is too long", "INVALID_ARGUMENT"),
        ("no request with id 'a' is running", "NOT_FOUND"),
        ("there are 64 adapters: unload one", "UNAVAILABLE"),
        ("a profile is being recorded, and there is one at a time", "UNAVAILABLE"),
        ("the request's embeddings are gone: their buffer was closed", "UNAVAILABLE"),
        ("Request for unknown thing: something odd", "UNKNOWN"),
        ("[UNAVAILABLE] top_p: whatever", "UNAVAILABLE"),
        ("[INVALID_ARG] some words", "INVALID_ARGUMENT"),
        ("[INTERNAL] stop: some words", "INTERNAL"),
    ],
)
def test_codes_are_read_from_the_text_where_the_server_gives_none(text: str, code: str) -> None:
    error = error_from_text(text)
    assert error.code == code
    assert type(error) is dict(CODES)[code]
    assert not error.message.startswith(("[", "in ensemble"))


def test_error_after_chunks(client: Client) -> None:
    stream = client.stream("midway 2")
    assert next(stream).text + next(stream).text == "t0 t1 "
    with pytest.raises(Unavailable, match="the engine died"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_no_server_is_asked_for_error_codes_by_itself() -> None:
    """tritonserver 2.51 dies of a segmentation fault at the second or third `triton_grpc_error`; that of
    26.08, which was asked for being new, lost the responses before the error and died likewise."""
    with FakeKServe() as server:
        with Client(server.url) as client, pytest.raises(ServerError, match="bad thing") as caught:
            client.generate("error INTERNAL bad thing")
        assert caught.value.code == "UNKNOWN"
        assert not server.asked_for_codes
        with Client(server.url, error_codes=True) as client, pytest.raises(ServerError) as caught:
            client.generate("error INTERNAL bad thing")
        assert caught.value.code == "INTERNAL"


def test_unknown_model(client: Client) -> None:
    with pytest.raises(NotFound, match="'nope'"):
        client.generate("tokens 1", model="nope")


def test_no_server_is_one_clear_error() -> None:
    with nobody() as url, Client(url) as client:
        assert client.server_ready(timeout=WAIT) is False
        with pytest.raises(ConnectError, match=f"no connection to {re.escape(url)}"):
            client.generate("tokens 1")


def test_server_that_goes_away_mid_stream() -> None:
    with FakeKServe() as server, Client(server.url) as client:
        stream = client.stream("endless", model="generator")
        next(stream)
        server.__exit__()
        with pytest.raises(QuireClientError):
            list(stream)


@pytest.mark.parametrize("url", ["http://localhost:8000", ""])
def test_url_must_be_host_and_port(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url: must be HOST:PORT"):
        Client(url)


def test_timeout_must_be_positive(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="timeout: must be a positive"):
        client.generate("tokens 1", timeout=0)


def test_configuration_is_asked_again_after_an_invalid_argument(server: FakeKServe, client: Client) -> None:
    with pytest.raises(InvalidArgument):
        client.generate("error INVALID_ARGUMENT unexpected inference input 'x'")
    client.generate("tokens 1")
    client.generate("tokens 1")
    assert server.config_calls == ["chat", "chat"]


# --- cancelling ---


@pytest.mark.parametrize("model", ["chat", "generator"])
@pytest.mark.parametrize("how", ["close", "with", "drop", "exception"])
def test_leaving_a_stream_cancels_on_the_server(
    server: FakeKServe, client: Client, model: str, how: str
) -> None:
    stream: Any = client.stream("endless", model=model)
    request_id = stream.request_id
    assert next(stream).text == "first "
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "drop":
        del stream
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError), stream:
            raise ZeroDivisionError
    assert server.ended.wait(WAIT)
    client.close()
    assert request_id in server.cancelled_ids
    assert not server.running


def test_cancel_from_another_thread_wakes_the_reader(server: FakeKServe, client: Client) -> None:
    stream = client.stream("silent")

    def cancel() -> None:
        assert server.started.wait(WAIT)
        stream.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(Cancelled, match="by this client"):
        list(stream)
    thread.join(WAIT)
    assert server.ended.wait(WAIT)
    with pytest.raises(Cancelled):
        next(stream)


def test_request_an_ensemble_has_not_passed_on_yet_is_cancelled_late(
    server: FakeKServe, client: Client
) -> None:
    """The first cancel by id comes before the generator has the request; a later one must find it."""
    stream = client.stream("silent")
    assert server.started.wait(WAIT)
    server.accept_cancel = False
    original = client._async._send_cancel
    answers: list[bool] = []

    async def send_cancel(model: ModelSchema, request_id: str, tenant: str) -> bool:
        answers.append(await original(model, request_id, tenant))
        server.accept_cancel = True
        return answers[-1]

    client._async._send_cancel = send_cancel  # type: ignore[method-assign]
    stream.cancel()
    assert answers == [False, True]
    assert server.ended.wait(WAIT)


def test_cancel_after_the_end_sends_nothing(server: FakeKServe, client: Client) -> None:
    with client.stream("tokens 2") as stream:
        list(stream)
    with client.stream("tokens 1") as unfinished:
        next(unfinished)  # the final chunk; the end of the stream itself is not read yet
        assert unfinished.done
    assert server.cancelled_ids == []


@pytest.mark.parametrize("how", ["keyword", "mapping"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_cancel_states_the_tenant_of_its_request(server: FakeKServe, how: str, kind: str) -> None:
    """Ids such as "1" are those of many tenants, so the server ends the request of one tenant only."""
    stated: dict[str, Any] = {"tenant": "a"} if how == "keyword" else {"sampling_parameters": {"tenant": "a"}}

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("endless", request_id="1", **stated)
            await anext(stream)
            assert await client.cancel("1", tenant="b") is False
            assert await client.cancel("1") is False
            await stream.aclose()

    if kind == "async":
        asyncio.run(main())
    else:
        with Client(server.url) as client:
            stream = client.stream("endless", request_id="1", **stated)
            next(stream)
            assert client.cancel("1", tenant="b") is False
            assert client.cancel("1") is False
            assert not server.ended.is_set()
            stream.close()
    assert server.ended.wait(WAIT)
    assert server.cancelled_ids == ["1"] * 3, "the first attempt of the stream itself was the right one"


@pytest.mark.parametrize("model", ["chat", "generator"])
def test_timeout_raises_and_cancels(server: FakeKServe, client: Client, model: str) -> None:
    client.generate("tokens 1", model=model)  # what is asked of the server first takes none of the time
    for limit_s in GROWING_S:
        stream = client.stream("endless", model=model, timeout=limit_s)
        with pytest.raises(DeadlineExceeded, match=f"did not end within {limit_s:g} s"):
            list(stream)
        if stream.request_id in server.begun:
            break
    wait_until(lambda: stream.request_id not in server.running)
    client.close()
    assert stream.request_id in server.cancelled_ids


def test_cancel_by_id_of_someone_elses_request(server: FakeKServe, client: Client) -> None:
    stream = client.stream("endless", request_id="shared")
    next(stream)
    with Client(server.url) as other:
        assert other.cancel("shared") is True
        assert other.cancel("nobody") is False
    with pytest.raises(Cancelled):
        list(stream)


# --- models ---


def test_models(client: Client) -> None:
    infos = {info.name: info for info in client.models()}
    assert infos["chat"].kind == "ensemble" and infos["chat"].decoupled is None
    assert infos["generator"].kind == "quire" and infos["generator"].decoupled is True
    assert infos["broken"].ready is False and "config.json" in infos["broken"].reason
    assert client.server_ready(timeout=WAIT)


def test_restricted_protocol_is_told_apart_from_a_busy_server() -> None:
    with (
        FakeKServe(restricted=True) as server,
        Client(server.url) as client,
        pytest.raises(PermissionDenied, match="restricted"),
    ):
        run_blocking(client._async._control("ModelConfig", service_pb2.ModelConfigRequest(name="chat")))


# --- asyncio ---


def test_blocking_calls_are_those_of_asyncio() -> None:
    """The blocking client is made of the asynchronous one, and a new call of that may be forgotten here."""
    pairs: list[tuple[Any, Any]] = [(Client, AsyncClient), (Stream, AsyncStream)]
    for blocking, asynchronous in pairs:
        calls = {
            n: c for n, c in vars(asynchronous).items() if inspect.iscoroutinefunction(c) and n[0] != "_"
        }
        assert set(calls) - set(vars(blocking)) <= {"start", "aclose"}, "those that only asyncio needs"
        for name in set(calls) & set(vars(blocking)):
            call = getattr(blocking, name)
            assert inspect.signature(call) == inspect.signature(calls[name])
            assert call.__doc__ and not inspect.iscoroutinefunction(call)


def test_blocking_client_works_where_an_event_loop_runs(server: FakeKServe) -> None:
    async def main() -> list[str]:
        with Client(server.url) as client, client.stream("tokens 2") as stream:
            return [client.generate("tokens 1").text, *(chunk.text for chunk in stream)]

    assert asyncio.run(main()) == ["t0 ", "t0 ", "t1 "]


def test_two_tasks_that_start_a_stream_send_one_request(server: FakeKServe) -> None:
    """Both asked for the model's configuration, and then each made a call; the first one was lost."""

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("tokens 2")
            _, chunk = await asyncio.gather(stream.start(), anext(stream))
            assert [chunk.text] + [c.text async for c in stream] == ["t0 ", "t1 "]

    asyncio.run(main())
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_cancel_after_the_client_is_closed_does_nothing(server: FakeKServe, kind: str) -> None:
    """grpc.aio refuses calls on a closed channel with an error of its own, which came out of `cancel`."""

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("endless")
            await anext(stream)
        await stream.cancel()

    if kind == "async":
        asyncio.run(main())
    else:
        with Client(server.url) as client:
            stream = client.stream("endless")
            next(stream)
        stream.cancel()
    assert server.cancelled_ids == []


def test_async_streams_run_together(server: FakeKServe) -> None:
    async def main() -> list[str]:
        async with AsyncClient(server.url) as client:
            results = await asyncio.gather(*(client.generate(f"tokens {n + 1}") for n in range(32)))
            assert [c.text async for c in client.stream("tokens 2")] == ["t0 ", "t1 "]
            assert (await client.chat("tokens 1", system="s")).finish_reason == "stop"
            assert await client.server_ready(timeout=WAIT)
            assert {m.name for m in await client.models()} == {"chat", "generator", "tokenizer", "broken"}
            return [r.text for r in results]

    texts = asyncio.run(main())
    assert texts[2] == "t0 t1 t2 " and len(texts) == 32


@pytest.mark.parametrize("model", ["chat", "generator"])
@pytest.mark.parametrize("how", ["aclose", "with", "task", "drop", "wait_for"])
def test_async_leaving_cancels_on_the_server(server: FakeKServe, model: str, how: str) -> None:
    async def consume(client: AsyncClient) -> None:
        async for _ in client.stream("endless", model=model, request_id="r"):
            if how == "drop":
                return

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            if how == "aclose":
                stream = client.stream("endless", model=model, request_id="r")
                assert (await anext(stream)).text == "first "
                await stream.aclose()
                with pytest.raises(Cancelled):
                    await anext(stream)
            elif how == "with":
                async with client.stream("endless", model=model, request_id="r") as stream:
                    await anext(stream)
            elif how == "task":
                task = asyncio.create_task(consume(client))
                assert await asyncio.to_thread(server.started.wait, WAIT)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "drop":
                await consume(client)
                gc.collect()
            else:
                for limit_s in GROWING_S:
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(consume(client), limit_s)
                    if server.started.is_set():
                        break

    asyncio.run(main())
    assert server.ended.wait(WAIT)
    assert "r" in server.cancelled_ids
    assert not server.running


def test_async_errors(server: FakeKServe) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(InvalidArgument, match="top_p"):
                await client.generate("error INVALID_ARGUMENT top_p: must be in (0, 1]")
            # grpc.aio raises asyncio.CancelledError for this one, which would look like our task's own end.
            with pytest.raises(Cancelled, match="by an operator"):
                await client.generate("error CANCELLED cancelled by an operator")
            with pytest.raises(ProtocolError):
                await client.generate("no final 1")
            for limit_s in GROWING_S:
                with pytest.raises(DeadlineExceeded, match=f"{limit_s:g} s"):
                    await client.generate("endless", timeout=limit_s)
                if server.started.is_set():
                    break
            with pytest.raises(NotFound):
                await client.generate("tokens 1", model="nope")
            assert await client.cancel("nobody") is False

    asyncio.run(main())
    assert server.ended.wait(WAIT)
    assert not server.running


def test_async_configuration_is_asked_again_after_an_invalid_argument(server: FakeKServe) -> None:
    """A model that was loaded anew with other inputs could not be used until the client was made anew."""

    async def main() -> None:
        async with AsyncClient(server.url) as client:
            with pytest.raises(InvalidArgument):
                await client.generate("error INVALID_ARGUMENT unexpected inference input 'x'")
            await client.generate("tokens 1")
            await client.generate("tokens 1")

    asyncio.run(main())
    assert server.config_calls == ["chat", "chat"]


def test_async_cancel_from_another_task(server: FakeKServe) -> None:
    async def main() -> None:
        async with AsyncClient(server.url) as client:
            stream = client.stream("silent")
            reader = asyncio.create_task(stream.result())
            assert await asyncio.to_thread(server.started.wait, WAIT)
            await stream.cancel()
            with pytest.raises(Cancelled):
                await reader

    asyncio.run(main())
    assert server.ended.wait(WAIT)


# --- command line ---


def run_cli(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli_module.main(list(args))
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture(autouse=True)
def _sigterm_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_cli_chat_and_stats(server: FakeKServe, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run_cli(capsys, "chat", "tokens 3", "--url", server.url, "--system", "s", "--stats")
    assert (status, out) == (0, "t0 t1 t2 \n")
    assert "TTFT" in err and "3 tokens" in err and "finish: stop" in err
    messages = json.loads(bytes(server.requests[0].raw_input_contents[0])[4:])
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "tokens 3"}]


def test_cli_generate_json(server: FakeKServe, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_cli(
        capsys,
        "generate",
        "tokens 2",
        "--url",
        server.url,
        "--json",
        "--max-tokens",
        "9",
        "--param",
        "top_k=3",
    )
    fields = json.loads(out)
    assert status == 0
    assert (fields["text"], fields["token_ids"], fields["finish_reason"]) == ("t0 t1 ", [0, 1], "stop")
    assert fields["model"] == "generator" and fields["timing"]["total_s"] > 0


def test_cli_choices(server: FakeKServe, capsys: pytest.CaptureFixture[str]) -> None:
    def generate(*arguments: str) -> str:
        code, out, err = run_cli(capsys, "generate", *arguments, "--url", server.url)
        assert (code, err) == (0, "")
        return out

    assert generate("choices 2", "--n", "2") == "c0 end\n--- choice 1\nc1 end\n"
    assert generate("choices 2", "--n", "2", "--beam-width", "4") == "c0 end\n--- choice 1\nc1 end\n"
    assert read_inputs(server.requests[-1])["stream"] == [False], "ranked choices do not stream"
    (other,) = json.loads(generate("choices 2", "--n", "2", "--json"))["others"]
    assert other == {"index": 1, "text": "c1 end", "finish_reason": "length"}
    generate("tokens 1", "--tenant", "a", "--priority", "-1", "--num-draft", "0")
    inputs = read_inputs(server.requests[-1])
    assert (inputs["tenant"], inputs["request_priority"]) == ([b"a"], [-1])
    assert json.loads(inputs["sampling_parameters"][0]) == {"num_draft": 0}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["reset"], {"command": "reset"}),
        (["inspect"], {"command": "inspect"}),
        (["unpin"], {"command": "unpin", "all": True}),
        (["unpin", "--session", "s", "--tenant", "t"], {"command": "unpin", "session": "s", "tenant": "t"}),
    ],
)
def test_cli_cache(
    server: FakeKServe, capsys: pytest.CaptureFixture[str], arguments: list[str], command: dict[str, Any]
) -> None:
    code, out, err = run_cli(capsys, "cache", *arguments, "--url", server.url)
    assert (code, err, json.loads(out)) == (0, "", {"did": command})


def test_cli_reads_stdin(server: FakeKServe) -> None:
    result = CliRunner().invoke(cli_module.cli, ["chat", "-", "--url", server.url], input="tokens 1\n")
    assert result.output == "t0 \n"


def test_cli_models(server: FakeKServe, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_cli(capsys, "models", "--url", server.url)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0
    assert lines[0][:5] == ["NAME", "VERSION", "STATE", "KIND", "STREAMS"]
    assert ["generator", "1", "READY", "quire", "yes"] in lines


def test_cli_errors_are_one_line(server: FakeKServe, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run_cli(capsys, "chat", "error INVALID_ARGUMENT top_p: bad\nvery", "--url", server.url)
    assert (status, err) == (1, "quire-client: INVALID_ARGUMENT: top_p: bad very\n")
    with nobody() as url:
        status, _, err = run_cli(capsys, "chat", "hi", "--url", url)
    assert status == 1 and len(err.splitlines()) == 1 and f"no connection to {url}" in err
    assert run_cli(capsys, "chat", "hi", "--no-such-option")[0] == 2
    assert run_cli(capsys, "chat", "hi", "--param", "novalue")[0] == 2


def test_cli_ctrl_c_cancels_on_the_server(server: FakeKServe) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CLIENT_DIR)}
    # A shell that starts tests in the background ignores the signal, and children inherit that. Not by
    # preexec_fn: gRPC, of which this process has a server, does not survive a fork without exec.
    main = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('quire_client.cli', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", main, "chat", "endless", "--url", server.url],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    streamed = process.stdout.read(6)  # before the end, so it was flushed
    assert streamed == "first ", process.communicate(timeout=WAIT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert (process.returncode, err) == (130, "cancelled\n")
    assert server.ended.wait(WAIT)
    assert len(server.cancelled_ids) == 1


def test_cli_conversation(server: FakeKServe, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    lines = iter(["tokens 1", "error UNAVAILABLE queue full", "", "tokens 2"])

    def read(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, out, err = run_cli(capsys, "chat", "--url", server.url)
    assert status == 0
    assert out == "t0 \nt0 t1 \n\n"
    assert err == "error: UNAVAILABLE: queue full\n"
    last = json.loads(bytes(server.requests[-1].raw_input_contents[0])[4:])
    assert [m["role"] for m in last] == ["user", "assistant", "user"]


def test_cli_with_tools_and_a_schema(server: FakeKServe, tmp_path: Path, capsys: Any) -> None:
    tools, schema = tmp_path / "tools.json", tmp_path / "schema.json"
    tools.write_text('[{"type": "function", "function": {"name": "f0"}}]', "utf-8")
    schema.write_text('{"type": "object"}', "utf-8")
    files = ("--url", server.url, f"--tools={tools}", f"--schema={schema}")
    assert run_cli(capsys, "chat", "call", *files) == (0, 'hm \n-> f0({"x": 0})\n-> f1({"x": 1})\n', "")
    told = json.loads(sent_by(server)["messages"][0])
    assert told["tools"][0]["function"]["name"] == "f0"
    assert told["response_format"]["json_schema"]["schema"] == {"type": "object"}
    status, out, _ = run_cli(capsys, "chat", "call", *files, "--json")
    assert status == 0 and [c["function"]["name"] for c in json.loads(out)["tool_calls"]] == ["f0", "f1"]
    run_cli(capsys, "generate", "echo", "--url", server.url, f"--schema={schema}")
    assert json.loads(sent_by(server)["structured_output"][0]) == {"json": {"type": "object"}}
    schema.write_text("{", "utf-8")
    status, _, err = run_cli(capsys, "chat", "call", *files)
    assert status == 2 and "--schema" in err


def test_cli_shows_reasoning_at_a_terminal_only(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_cli(capsys, "chat", "think", "--url", server.url) == (0, "19\n", "")
    out = run_cli(capsys, "chat", "think", "--url", server.url, "--json")[1]
    fields = json.loads(out)
    assert (fields["reasoning"], fields["text"]) == ("so what", "19")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = run_cli(capsys, "chat", "think", "--url", server.url)[1]
    assert shown == "\x1b[2mso \x1b[0m\x1b[2mwhat\x1b[0m\n\n19\n"


def test_cli_shows_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, at a terminal, and takes it away."""
    shown, written = threading.Event(), []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            written.append(text)
            shown.set()
            return len(text)

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(Waiting, "AFTER", 0.01)
    with Waiting("waiting") as waiting:
        assert shown.wait(WAIT)
        waiting.over()
        assert written[0].startswith("\rwaiting, ") and written[-1] == "\r\x1b[K"
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Waiting("waiting") as waiting:
        assert waiting._thread is None, "no terminal"


def test_cli_lists_requests(server: FakeKServe, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    status, out, _ = run_cli(capsys, "requests", "--url", server.url, "--json", "--tenant=a")
    assert status == 0 and json.loads(out) == {"did": {"command": "requests"}}
    assert sent_by(server)["tenant"] == [b"a"]
    entry = {"id": "a\x1b[2J", "state": "waiting", "waits_for": "queue", "num_prompt_tokens": 7, "age_ms": 9}
    monkeypatch.setattr(Client, "requests", lambda *_, **__: {"requests": [entry]})
    _, out, _ = run_cli(capsys, "requests", "--url", server.url)
    assert [line.split() for line in out.splitlines()] == [
        ["ID", "STATE", "WAITS", "FOR", "PROMPT", "OUTPUT", "AGE", "MS"],
        ["a[2J", "waiting", "queue", "7", "-", "9"],
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_cli_completes_in_shells(capsys: Any, shell: str) -> None:
    status, out, _ = run_cli(capsys, "completion", shell)
    assert status == 0 and "_QUIRE_CLIENT_COMPLETE" in out
    words = {"COMP_WORDS": "quire-client chat --sche", "COMP_CWORD": "2"}
    asked = {"_QUIRE_CLIENT_COMPLETE": f"{shell}_complete", **words}
    if shell == "fish":
        asked |= {"COMP_CWORD": "--sche"}
    done = subprocess.run(
        [sys.executable, "-m", "quire_client.cli"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert "--schema" in done.stdout, done.stderr


def test_terminal_gets_no_control_characters() -> None:
    assert without_controls("a\x1b[2Jb\x07\tc\nü\x9b1m") == "a[2Jb\tc\nü1m"


# --- packaging ---


def test_client_imports_neither_quire_nor_torch() -> None:
    code = (
        "import sys, quire_client, quire_client.cli;"
        "banned = ('quire', 'quire_ensemble', 'quire_kernels', 'torch');"
        "bad = [m for m in sys.modules if m.split('.')[0] in banned];"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(CLIENT_DIR)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


def test_the_main_thread_is_never_within_grpc(server: FakeKServe, client: Client) -> None:
    """Ctrl-C strikes it anywhere. Within gRPC it left a lock taken, so that even the cancellation hung, or
    one given back: RuntimeError, and the command ended with 1."""
    within = set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_grpc = Path(code.co_filename).is_relative_to(Path(grpc.__file__).parent)
        if event == "call" and is_grpc and code.co_name != "__del__":  # of a call that has ended
            within.add(f"{code.co_filename}: {code.co_name}")

    sys.setprofile(note)
    try:
        assert len(list(client.stream("tokens 3"))) == 3
        assert client.generate("echo").finish_reason == "stop"
        endless = client.stream("endless")
        assert next(endless).text == "first "
        endless.cancel()
        assert client.server_ready(timeout=WAIT)
        client.close()
    finally:
        sys.setprofile(None)
    assert threading.current_thread() is threading.main_thread() and not within
    assert server.cancelled_ids == [endless.request_id]


class InterruptedQueue:
    """Responses whose first wait is broken off by Ctrl-C."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses
        self._gets = [self._interrupted]

    def _interrupted(self, **_: Any) -> Any:
        raise KeyboardInterrupt

    def get(self, **options: Any) -> Any:
        return (self._gets.pop() if self._gets else self._responses.get)(**options)

    def empty(self) -> bool:
        return bool(self._responses.empty())


def test_an_interrupted_wait_cancels_and_the_call_is_read_to_its_end(
    server: FakeKServe, client: Client
) -> None:
    stream = client.stream("silent")
    assert server.started.wait(WAIT)
    server.running[stream.request_id] = threading.Event()  # acknowledged, but the stream does not end
    call: Any = stream._async._call
    call._responses = InterruptedQueue(call._responses)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert server.cancelled_ids == [stream.request_id] and stream.done
    assert call._end, "torn down, as nothing came"
    with pytest.raises(Cancelled):
        next(stream)


def test_an_interrupt_that_leaves_the_lock_taken_blocks_nobody(
    server: FakeKServe, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may strike when a stream has taken its lock and is not yet where it would give it back."""
    stream = client.stream("silent")
    assert server.started.wait(WAIT)

    async def acquire(io: BlockingIO, lock: Any, seconds: float = -1) -> bool:
        monkeypatch.undo()
        assert await io.acquire(lock, seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingIO, "acquire", acquire)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert server.cancelled_ids == [stream.request_id]
    with pytest.raises(Cancelled):
        next(stream)


def test_time_of_a_cancel_is_bounded(server: FakeKServe, client: Client) -> None:
    """A generator that knows the request but never ends it must not hold the caller."""
    stream = client.stream("silent")
    assert server.started.wait(WAIT)
    server.running[stream.request_id] = threading.Event()  # the cancel is acknowledged, and nothing happens
    stream.cancel()  # it returns
    assert server.cancelled_ids == [stream.request_id] and not server.ended.is_set()


def test_a_call_that_ends_as_cancelled_behind_its_deadline_has_exceeded_it() -> None:
    """gRPC says "Locally cancelled by application!" of one that it had only begun to send."""
    error = Cancelled("Locally cancelled by application!", request_id="7")
    assert conn.Deadline(60.0).explained(error) is error and conn.Deadline(None).explained(error) is error
    explained = conn.Deadline(1e-9).explained(error)
    assert isinstance(explained, DeadlineExceeded) and explained.request_id == "7"
