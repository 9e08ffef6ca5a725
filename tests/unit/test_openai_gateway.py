"""The OpenAI gateway over real HTTP, before a KServe server in this process (`fake_kserve`)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from click.testing import CliRunner

from quire_client.cli import cli
from quire_client.openai import app, intake
from quire_client.openai import server as gateway_server
from quire_client.openai.app import GatewaySettings, create_app
from quire_client.openai.errors import MAX_MESSAGE, RequestError
from quire_client.openai.images import ImageFetcher, ImagePolicy, is_public
from quire_client.openai.intake import MAX_BODY_BYTES, MAX_VALUES, Hold, Intake
from quire_client.openai.replies import finish_reason
from quire_client.openai.requests import MAX_IMAGES, MAX_MESSAGES
from tests.fixtures.waiting import GROWING_S, wait_until
from tests.unit.fake_kserve import FakeKServe, nobody, read_inputs

WAIT = 60.0
"""Seconds any event may take on a busy machine; none is reached when the code is right."""
PUBLIC = "93.184.216.34"
PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"


@contextlib.contextmanager
def gateway(settings: GatewaySettings, **options: Any) -> Iterator[str]:
    """A running gateway; its base URL."""
    config = gateway_server.make_config(create_app(settings, **options))
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture(scope="module")
def base(shared_server: FakeKServe) -> Iterator[str]:
    with gateway(GatewaySettings(shared_server.url)) as url:
        yield url


@pytest.fixture
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


def chat_body(prompt: Any, /, **others: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": prompt}], **others}


def chat(base: str, prompt: Any, /, **others: Any) -> httpx.Response:
    return httpx.post(f"{base}/v1/chat/completions", json=chat_body(prompt, **others), timeout=WAIT)


def complete(base: str, prompt: Any, /, **others: Any) -> httpx.Response:
    body = {"model": "generator", "prompt": prompt, **others}
    return httpx.post(f"{base}/v1/completions", json=body, timeout=WAIT)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a complete stream; the form of the events themselves is checked on the way."""
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    if blocks[-1] == "data: [DONE]":
        blocks.pop()
    return [json.loads(block[6:]) for block in blocks]


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


def usage(completion_tokens: int) -> dict[str, Any]:
    """What the fake counts: three tokens of prompt, two of them cached."""
    counts = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
    return {
        **counts,
        "total_tokens": 3 + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


# --- answers ---


@pytest.mark.row("A16")
def test_choices(base: str) -> None:
    answer = chat(base, "choices 3", n=3).json()
    texts = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert texts == [(0, "c0 end", "stop"), (1, "c1 end", "length"), (2, "c2 end", "length")]
    assert answer["usage"] == usage(6)
    answer = complete(base, "choices 2", n=2, best_of=4).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "c0 end"), (1, "c1 end")]


def test_streamed_choices(base: str) -> None:
    parts = events(chat(base, "choices 2", n=2, stream=True))
    choices = [part["choices"][0] for part in parts]
    opening = {"role": "assistant", "content": ""}
    assert [(c["index"], c["delta"], c["finish_reason"]) for c in choices] == [
        (0, opening, None),
        (1, opening, None),
        (0, {"content": "c0 "}, None),
        (1, {"content": "c1 "}, None),
        (1, {"content": "end"}, None),
        (1, {}, "length"),
        (0, {"content": "end"}, None),
        (0, {}, "stop"),
    ]


@pytest.mark.row("B13")
def test_tenant_and_priority_come_in_headers(base: str) -> None:
    def echo(headers: dict[str, str], **others: Any) -> dict[str, Any]:
        url = f"{base}/v1/completions"
        body = {"model": "generator", "prompt": [5, 6], **others}
        text = httpx.post(url, json=body, headers=headers, timeout=WAIT).json()["choices"][0]["text"]
        inputs: dict[str, Any] = json.loads(text)
        return inputs

    assert echo({"X-Tenant-Id": "common"})["tenant"] == ["common"]
    assert echo({"X-Quire-Tenant": "own", "X-Tenant-Id": "common"})["tenant"] == ["own"]
    assert "tenant" not in echo({})
    salted = echo({"X-Quire-Cache-Salt": "s", "X-Quire-Priority": "7"})
    assert json.loads(salted["sampling_parameters"][0]) == {"cache_salt": "s", "priority": "7"}
    stated = echo({"X-Quire-Priority": "7"}, priority=-3, cache_salt="mine")
    assert stated["request_priority"] == [-3]
    assert json.loads(stated["sampling_parameters"][0]) == {"cache_salt": "mine"}
    assert json.loads(echo({}, num_draft=0)["sampling_parameters"][0]) == {"num_draft": 0}


@pytest.mark.row("B13")
@pytest.mark.parametrize("streams", [False, True])
def test_a_used_up_quota_is_429_with_retry_after(base: str, streams: bool) -> None:
    text = "error UNAVAILABLE tenant 'a' has used its 100 tokens per minute; retry after 2.5 s"
    reply = chat(base, text, stream=streams)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "retry-after" not in chat(base, "error UNAVAILABLE the engine is restarting").headers


def test_a_chat_completion(base: str) -> None:
    begin = time.time()
    answer = chat(base, "tokens 2", user="someone").json()
    assert int(begin) <= answer["created"] <= time.time()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "chat")
    (choice,) = answer["choices"]
    # The fake sends what it has in pieces also to a request that does not stream.
    assert choice["message"] == {"role": "assistant", "content": "t0 t1 ", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert answer["usage"] == usage(2)


def test_a_completion_of_text_and_of_token_ids(base: str) -> None:
    answer = complete(base, "tokens 2").json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "logprobs": None, "text": "t0 t1 ", "finish_reason": "stop"}]
    for prompt in ([5, 6], [[5, 6]]):
        inputs = json.loads(complete(base, prompt).json()["choices"][0]["text"])
        assert inputs["input_ids"] == [5, 6]
    assert complete(base, ["tokens 1"]).json()["choices"][0]["text"] == "t0 "


def test_a_streamed_chat_completion(base: str) -> None:
    reply = chat(base, "tokens 2", stream=True)
    assert reply.text.endswith("data: [DONE]\n\n")
    parts = events(reply)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({(part["id"], part["created"], part["model"]) for part in parts}) == 1
    choices = [part["choices"][0] for part in parts]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "t0 "},
        {"content": "t1 "},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert not any("usage" in part for part in parts)


def test_a_streamed_completion_with_usage(base: str) -> None:
    reply = complete(base, "tokens 3", stream=True, stream_options={"include_usage": True})
    *parts, last = events(reply)
    assert [part["choices"][0]["text"] for part in parts] == ["t0 ", "t1 ", "t2 ", ""]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, None, "stop"]
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"] == usage(3)


def test_a_stream_comes_while_it_is_generated(base: str, shared_server: FakeKServe) -> None:
    """The first token of an endless answer arrives, though the answer has no end."""
    with httpx.stream(
        "POST", f"{base}/v1/chat/completions", json=chat_body("endless", stream=True), timeout=WAIT
    ) as reply:
        assert any("first " in line for line in reply.iter_lines())


def test_only_outputs_of_use_are_asked_for(server: FakeKServe) -> None:
    with gateway(GatewaySettings(server.url)) as base:
        chat(base, "tokens 1")
        chat(base, "tokens 1", stream=True)
        chat(base, "tokens 1", stream=True, stream_options={"include_usage": True})
    asked = [{output.name for output in request.outputs} for request in server.requests]
    text = {"text_output", "finish_reason", "reasoning_output"}
    counted = text | {"output_ids", "num_input_tokens", "num_cached_tokens", "num_reasoning_tokens"}
    assert asked == [counted | {"stop_reason"}, text, counted]


def test_a_final_flag_without_a_finish_reason_is_a_stop(base: str) -> None:
    assert chat(base, "flag final 2").json()["choices"][0]["finish_reason"] == "stop"
    assert events(chat(base, "flag final 2", stream=True))[-1]["choices"][0]["finish_reason"] == "stop"


def test_finish_reasons_are_openai_s() -> None:
    assert {finish_reason(reason) for reason in (None, "", "stop")} == {"stop"}
    assert {finish_reason(reason) for reason in ("length", "cancelled", "timeout")} == {"length"}


# --- what is sent ---


def inputs_of(reply: httpx.Response) -> dict[str, Any]:
    """Inputs as the fake's `echo` saw them."""
    choice = reply.json()["choices"][0]
    return json.loads(choice["text"] if "text" in choice else choice["message"]["content"])


def test_parameters_go_as_they_are_and_absent_ones_not_at_all(base: str) -> None:
    inputs = inputs_of(
        chat(
            base,
            "echo",
            max_completion_tokens=9,
            temperature=0.5,
            seed=3,
            stop=["a", "b"],
            logit_bias={"5": -100},
            top_k=4,
            repetition_penalty=1.5,
            ignore_eos=True,
            presence_penalty=None,
        )
    )
    assert inputs["max_tokens"] == [9]
    assert inputs["temperature"] == [0.5]
    assert inputs["seed"] == [3]
    assert inputs["stop"] == ["a", "b"]
    assert json.loads(inputs["logit_bias"][0]) == {"5": -100}
    others = json.loads(inputs["sampling_parameters"][0])
    assert others == {"top_k": 4, "repetition_penalty": 1.5, "ignore_eos": True}
    plain = inputs_of(chat(base, "echo"))
    assert not {"temperature", "max_tokens", "sampling_parameters", "stop"} & set(plain)


@pytest.mark.parametrize("stop", ["x", ["x"]])
def test_stop_is_a_string_or_a_list(base: str, stop: Any) -> None:
    assert inputs_of(complete(base, "echo", stop=stop))["stop"] == ["x"]


def test_data_urls_go_through_unchanged(base: str) -> None:
    url = "data:image/gif;base64," + base64.b64encode(PIXEL).decode()
    question = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    contents = ([question, {"type": "image"}], "echo")
    messages = [{"role": "user", "content": content} for content in contents]
    reply = httpx.post(
        f"{base}/v1/chat/completions", json={"model": "chat", "messages": messages}, timeout=WAIT
    )
    assert json.loads(inputs_of(reply)["messages"][0]) == messages


# --- what is refused ---


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"images": ["x"]}, "images"),
        ({"request_id": "x"}, "request_id"),
        ({"prompt": "x"}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"tenant": "mine"}, "tenant"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"timing": 1}, "timing"),
        ({"echo": True}, "echo"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"n": "2"}, "n"),
        ({"n": 2.0, "stream": True}, "n"),
        ({"n": True}, "n"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {"messages": []}}, "messages"),
        ({"messages": None}, "messages"),
    ],
)
def test_fields_of_a_chat_that_are_refused(base: str, extra: dict[str, Any], param: str) -> None:
    error = refused(chat(base, "tokens 1", **extra))
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"messages": []}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": "5"}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"tools": [{}]}, "tools"),
        ({"tenant": "mine"}, "tenant"),
        ({"suffix": "x"}, "suffix"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[1]] * 257}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [5], "model": "tokenizer"}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_fields_of_a_completion_that_are_refused(base: str, extra: dict[str, Any], param: str) -> None:
    assert refused(complete(base, "tokens 1", **extra))["param"] == param


def test_what_models_do_not_have_is_refused_by_name(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of another make, or an older one."""
    from tests.unit import fake_kserve

    few = ("text_output", "finish_reason")
    monkeypatch.setattr(fake_kserve, "OUTPUTS", {name: fake_kserve.OUTPUTS[name] for name in few})
    with FakeKServe() as old, gateway(GatewaySettings(old.url)) as url:
        for extra, param in (
            ({"tools": [{}]}, "tools"),
            ({"logprobs": True}, "logprobs"),
            ({"timing": True}, "timing"),
        ):
            error = refused(chat(url, "tokens 1", **extra))
            assert error["param"] == param and "the model 'chat' has no" in error["message"]
        assert refused(complete(url, ["a", "b"]))["param"] == "prompt"
        assert chat(url, "tokens 1").status_code == 200


def test_neutral_values_and_those_for_openai_s_service_pass(base: str) -> None:
    neutral: dict[str, Any] = {"n": 1, "logprobs": False, "tools": None, "stop": [], "tool_choice": None}
    neutral |= {"response_format": {"type": "text"}, "top_logprobs": 0, "modalities": ["text"]}
    service = {"user": "x", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    service |= {"safety_identifier": "x", "prompt_cache_key": "k"}
    inputs = inputs_of(chat(base, "echo", **neutral, **service))
    assert json.loads(inputs["messages"][0]) == [{"role": "user", "content": "echo"}]
    assert "sampling_parameters" not in inputs


# --- tools, formats, reasoning ---

TOOLS: list[Any] = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(2)]


@pytest.fixture(scope="module")
def official(base: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=WAIT) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_tool_calls(official: openai.OpenAI) -> None:
    answer = official.chat.completions.create(model="chat", messages=user("call"), tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "hm ")
    calls: Any = choice.message.tool_calls
    assert [(c.id, c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("call_0", "function", "f0", '{"x": 0}'),
        ("call_1", "function", "f1", '{"x": 1}'),
    ]


def test_streamed_tool_calls(official: openai.OpenAI) -> None:
    """By the helper of the official client, which adds the deltas up and checks them on the way."""
    with official.chat.completions.stream(model="chat", messages=user("call"), tools=TOOLS) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("f0", '{"x": 0}'), ("f1", '{"x": 1}')]
    assert final.choices[0].finish_reason == "tool_calls"
    parts = official.chat.completions.create(
        model="chat", messages=user("call"), tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    deltas = [part.choices[0].delta.tool_calls for part in parts if part.choices]
    calls = [call for delta in deltas for call in delta or []]
    assert [(c.index, c.id, c.type) for c in calls[:2]] == [(0, "call_0", "function"), (0, None, None)]


def test_what_goes_with_the_messages(base: str) -> None:
    beside = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "f0"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    inputs = inputs_of(chat(base, "echo", **beside))
    asked = json.loads(inputs["messages"][0])
    assert asked == {"messages": [{"role": "user", "content": "echo"}], **beside}
    assert "sampling_parameters" not in inputs


def test_answers_may_be_sent_back_as_they_came(official: openai.OpenAI) -> None:
    called = official.chat.completions.create(model="chat", messages=user("call"), tools=TOOLS)
    message: Any = called.choices[0].message
    result = {"role": "tool", "tool_call_id": "call_0", "content": "7"}
    told = {"role": "developer", "content": "be kind"}
    nothing = {"role": "assistant", "content": None, "tool_calls": message.model_dump()["tool_calls"]}
    messages: Any = [told, message, {**message.model_dump(), "annotations": []}, nothing, result]
    answer = official.chat.completions.create(model="chat", messages=[*messages, *user("echo")])
    sent = json.loads(json.loads(answer.choices[0].message.content or "")["messages"][0])
    calls = {"tool_calls": message.model_dump()["tool_calls"]}
    assert sent == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "hm ", **calls},
        {"role": "assistant", "content": "hm ", **calls},
        {"role": "assistant", "content": None, **calls},
        result,
        *user("echo"),
    ]


def test_reasoning(base: str) -> None:
    answer = chat(base, "think", timing=True).json()
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] == "so what"
    assert (choice["message"]["content"], choice["stop_reason"]) == ("19", "END")
    assert choice["timing"] == {"queue": 0.5, "total": 9.5}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    options = {"include_usage": True}
    parts = events(chat(base, "think", stream=True, stream_options=options, timing=True))
    assert parts[-1]["usage"] == answer["usage"]
    choices = [part["choices"][0] for part in parts[:-1]]
    assert [c["delta"].get("reasoning_content") for c in choices] == [None, "so ", "what", None, None]
    assert [c.get("timing") for c in choices] == [None] * 4 + [{"queue": 0.5, "total": 9.5}]
    plain = chat(base, "think").json()["choices"][0]
    assert "timing" not in plain


def test_structured_output_in_vllm_s_words_goes_to_the_sampler(base: str) -> None:
    words = {"guided_regex": "a+", "structured_outputs": {"choice": ["a"]}, "thinking_budget": 5}
    assert json.loads(inputs_of(chat(base, "echo", **words))["sampling_parameters"][0]) == words
    format_ = {"type": "json_object"}
    inputs = inputs_of(complete(base, "echo", response_format=format_, structured_output={"regex": "b"}))
    assert json.loads(inputs["sampling_parameters"][0]) == {"response_format": format_}
    assert json.loads(inputs["structured_output"][0]) == {"regex": "b"}


# --- log-probabilities, several prompts ---


def test_log_probabilities_of_a_chat(official: openai.OpenAI, shared_server: FakeKServe) -> None:
    def check(entries: Any) -> None:
        assert [(e.token, e.logprob) for e in entries] == [
            ("a", -0.5),
            ("\ufffd", -0.5),
            ("é", -0.5),
            ("token_id:8", -0.5),
        ]
        assert [e.bytes for e in entries[:3]] == [[97], None, [195, 169]]
        likely = [(t.token, t.logprob, t.bytes) for t in entries[0].top_logprobs]
        assert likely == [("a", -0.5, [97]), ("\ufffd", -1.0, None)], "the two best, best first"

    asked: Any = {"model": "chat", "messages": user("logprobs"), "logprobs": True, "top_logprobs": 2}
    answer = official.chat.completions.create(**asked)
    assert answer.choices[0].logprobs is not None
    check(answer.choices[0].logprobs.content)
    assert read_inputs(shared_server.requests[-1])["num_logprobs"] == [2]
    parts = list(official.chat.completions.create(stream=True, **asked))
    told = [part.choices[0].logprobs for part in parts]
    check([entry for one in told if one for entry in one.content or []])
    del asked["top_logprobs"]
    alone = official.chat.completions.create(**asked).choices[0].logprobs
    assert alone is not None and alone.content is not None and alone.content[0].top_logprobs == []


def test_log_probabilities_of_a_completion_and_of_its_prompt(official: openai.OpenAI) -> None:
    asked: Any = {"model": "generator", "prompt": "logprobs", "logprobs": 1}
    alone = official.completions.create(**asked).choices[0].logprobs
    assert alone is not None
    assert alone.tokens == ["a", "\ufffd", "é", "token_id:8"]
    assert alone.text_offset == [0, 1, 1, 2]
    assert alone.top_logprobs == [{"a": -0.5}, *({"a": -0.5, t: -0.5} for t in alone.tokens[1:])], (
        "the sampled one is one more"
    )
    asked["prompt"] = "logprobs é"
    choice = official.completions.create(echo=True, **asked).choices[0]
    assert choice.text == "logprobs éaé" and choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None and offsets is not None
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * 5]
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] is None
    assert tokens == ["logprobs ", "é", "a", "\ufffd", "é", "token_id:8"], (
        "more than the text, as of a stop string"
    )
    assert offsets == [0, 9, 10, 11, 11, 12], "where a token is in the text, whatever its own text is"
    parts = [part.choices[0] for part in official.completions.create(echo=True, stream=True, **asked)]
    assert "".join(part.text for part in parts) == choice.text
    columns = [part.logprobs for part in parts if part.logprobs]
    assert [token for column in columns for token in column.tokens or []][:3] == ["logprobs ", "é", "a"]
    assert [offset for column in columns for offset in column.text_offset or []] == [0, 9, 10, 11, 11, 12]
    assert official.completions.create(model="generator", prompt="logprobs").choices[0].logprobs is None
    echoed = official.completions.create(model="generator", prompt="echo", echo=True).choices[0].text
    assert json.loads(echoed)["exclude_input_in_output"] == [False]


def test_several_prompts(official: openai.OpenAI) -> None:
    answer = official.completions.create(model="generator", prompt=["a", "b"])
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a1 a2 "), (1, "b1 b2 ")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)
    stream = official.completions.create(
        model="generator", prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = stream
    texts = [(part.choices[0].index, part.choices[0].text) for part in parts if part.choices[0].text]
    assert texts == [(2, "b1 "), (0, "a1 "), (2, "b2 "), (0, "a2 ")], "n choices of each prompt"
    assert last.usage == answer.usage.model_copy(update={})
    ends = {part.choices[0].index for part in parts if part.choices[0].finish_reason}
    assert ends == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff{}", b'{"model": NaN}', b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_bodies_that_are_no_json_object(base: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{base}/v1/chat/completions", content=body, headers=headers, timeout=WAIT)
    assert "the body" in refused(reply)["message"]


def test_a_form_of_a_web_page_is_refused(base: str) -> None:
    """A page in a browser may post text/plain anywhere without being asked; JSON it may not."""
    body = json.dumps(chat_body("tokens 1"))
    reply = httpx.post(
        f"{base}/v1/chat/completions", content=body, headers={"content-type": "text/plain"}, timeout=WAIT
    )
    assert "application/json" in refused(reply, 415)["message"]


def test_a_body_without_end_is_refused(base: str) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{base}/v1/chat/completions", content=pieces(), headers=headers, timeout=WAIT)
    refused(reply, 413)


def post_body(base: str, body: bytes, route: str = "chat/completions") -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{base}/v1/{route}", content=body, headers=headers, timeout=WAIT)


@pytest.mark.parametrize("route", ["chat/completions", "load_lora_adapter"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": [' + b"{}," * 2**22 + b"{}]}", f"more than {MAX_VALUES} values"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "at most 64 levels"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "at most 64 levels"),
    ],
)
def test_json_that_takes_long_to_parse_is_refused(base: str, body: bytes, message: str, route: str) -> None:
    """12 MiB of small values held everybody's tokens up: a parser cannot be interrupted, in a thread either,
    so values are counted before."""
    assert message in refused(post_body(base, body, route))["message"]


def test_json_of_64_levels_is_accepted(base: str) -> None:
    deepest = json.loads("[" * 60 + "]" * 60)  # below it: the body, its messages, one of them, its content
    messages = [{"role": "user", "content": [deepest]}, {"role": "user", "content": "tokens 1"}]
    body = {"model": "chat", "messages": messages}
    assert post_body(base, json.dumps(body).encode()).status_code == 200


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), f"at most {MAX_MESSAGES} messages"),
        ([{"role": "user", "content": [{}] * (MAX_MESSAGES + 1)}], f"at most {MAX_MESSAGES} parts"),
        ([{"role": "user", "content": [{"type": "image"}] * 9}] * 2, f"at most {MAX_IMAGES} images"),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "classify"])
def test_conversations_have_their_limits(base: str, messages: list[Any], message: str, route: str) -> None:
    body = json.dumps({"model": "chat", "messages": messages}).encode()
    error = refused(post_body(base, body, route))
    assert error["param"] == "messages" and message in error["message"]


@pytest.mark.parametrize(
    "extra", [{"model": "m" * 10**6}, {"model": "\ud800"}, {"\ud800": 1}, {"x" * 10**6: 1}, {"model": "a\nb"}]
)
def test_an_error_repeats_little_of_the_request(base: str, extra: dict[str, Any]) -> None:
    """A name of a megabyte came back in the error, and one with a lone surrogate, which has no UTF-8 form, as
    "the gateway failed"."""
    error = refused(post_body(base, json.dumps(chat_body("tokens 1", **extra)).encode()))
    assert len(error["message"]) < 200


def test_the_text_of_a_server_s_error_is_cut(base: str) -> None:
    message = refused(chat(base, "error INVALID_ARGUMENT seed: " + "x" * 3000))["message"]
    assert message.startswith("seed: x") and len(message) == MAX_MESSAGE


def test_a_large_body_holds_nobody_up(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is parsed, which here ends only after another client has its answer, the loop goes on."""
    parsing, answered = threading.Event(), threading.Event()

    def slow(body: bytes) -> dict[str, Any]:
        parsing.set()
        assert answered.wait(WAIT), "the event loop waited for the parser"
        return parse(body)

    parse = app.parse_json
    monkeypatch.setattr(app, "parse_json", slow)
    content = json.dumps(chat_body("tokens 1", user="x" * 2**20)).encode()
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post_body, base, content)
        assert parsing.wait(WAIT)
        assert httpx.get(f"{base}/v1/models/chat", timeout=WAIT).status_code == 200
        answered.set()
        assert large.result().status_code == 200


def half_sent(base: str, size: int, sent: int) -> socket.socket:
    """A connection with a part of a body."""
    host, _, port = base.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + b" " * sent)
    return connection


def read_to(connection: socket.socket, words: bytes) -> bytes:
    """What comes, until these words are in it."""
    connection.settimeout(WAIT)
    said = b""
    while words not in said:
        piece = connection.recv(1000)
        assert piece, said
        said += piece
    return said


def test_bodies_beyond_what_is_held_are_refused_for_now(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of bodies was held at a time. Those of requests that the server has do not count: their
    streams may take long."""
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 3 * 2**20)
    monkeypatch.setattr(intake, "BODY_GRACE", math.inf)
    held: list[Intake] = []
    full = threading.Event()
    receive = Hold.receive

    def counted(hold: Hold, count: int) -> None:
        receive(hold, count)
        held.append(hold._intake)
        if hold._intake.held >= 2_800_000:
            full.set()

    given_back = threading.Semaphore(0)
    close = Hold.close

    def closed(hold: Hold) -> None:
        held_any = hold._held > 0
        close(hold)
        if held_any:
            given_back.release()

    monkeypatch.setattr(Hold, "receive", counted)
    monkeypatch.setattr(Hold, "close", closed)
    with gateway(GatewaySettings(server.url)) as base, contextlib.ExitStack() as opened:
        url = f"{base}/v1/chat/completions"
        for stream in (True, False, True, False):
            body = chat_body("endless", stream=stream, user="x" * 2**20)
            opened.enter_context(post_raw(base, body))
            assert given_back.acquire(timeout=WAIT), "the server has the request"
        assert held[-1].held == 0
        halves = [half_sent(base, 1_500_000, 1_400_000) for _ in range(2)]
        assert full.wait(WAIT)
        late = httpx.post(url, json=chat_body("tokens 1", user="x" * 2**20), timeout=WAIT)
        assert "no room" in refused(late, 503)["message"]
        assert int(late.headers["retry-after"]) >= 1
        assert chat(base, "tokens 1").status_code == 200, "what fits is served"
        for half in halves:
            half.close()
    assert held[-1].held == 0, "a body whose client has left is given back"


def test_a_body_that_comes_too_slowly_is_refused(server: FakeKServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BODY_TIMEOUT", 0.2)
    with gateway(GatewaySettings(server.url)) as base, half_sent(base, 100, 10) as connection:
        connection.settimeout(WAIT)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_bodies_that_stall_do_not_shut_others_out(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients who sent all of 32 MiB but the last byte had everybody else refused for a minute. What has
    been coming for long now makes room, the oldest first, for as much as is needed."""
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 3 * 2**20)
    monkeypatch.setattr(intake, "BODY_GRACE", 0.0)
    arrived = threading.Semaphore(0)
    receive = Hold.receive

    def counted(hold: Hold, count: int) -> None:
        receive(hold, count)
        if hold._received == 1_400_000:
            arrived.release()

    monkeypatch.setattr(Hold, "receive", counted)
    with gateway(GatewaySettings(server.url)) as base, contextlib.ExitStack() as opened:
        halves = []
        for _ in range(2):
            halves.append(opened.enter_context(half_sent(base, 1_400_001, 1_400_000)))
            assert arrived.acquire(timeout=WAIT)
        assert chat(base, "tokens 1", user="x" * 2**20).status_code == 200
        assert read_to(halves[0], b"others needed its room").startswith(b"HTTP/1.1 408")
        halves[1].sendall(b"}")
        assert read_to(halves[1], b"is not valid JSON"), "the younger one was left alone"


def test_wide_text_counts_for_what_it_takes(base: str) -> None:
    """One emoji, and every character beside it took four bytes: a body of 32 MiB took 300."""
    text = "x" * 2**20 + "\N{GRINNING FACE}"
    assert intake.text_bytes({"a": [text, 1, None], text: {}}) == pytest.approx(8 * 2**20, rel=0.001)
    value = {"a": ["ü", "\N{GRINNING FACE}", "\ud800", 1.5, True, None], "\n": {}, "b": [[]]}
    written = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert intake.write_json(value) == written
    parts = [{"type": "text", "text": "\N{GRINNING FACE}"}, {"type": "text", "text": "x" * 2**22}]
    tracemalloc.start()
    intake.write_json(parts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 2**22, "not as wide as its widest character"


def test_wide_text_beyond_what_is_held_is_refused_for_now(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 3 * 2**20)
    with gateway(GatewaySettings(server.url)) as base:
        for extra, status in (("x", 200), ("\N{GRINNING FACE}", 503)):
            body = chat_body("tokens 1", user="x" * 2**20 + extra)
            reply = post_body(base, json.dumps(body, ensure_ascii=False).encode())
            assert reply.status_code == status
        assert chat(base, "tokens 1").status_code == 200, "given back"


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nX-A: "])
def test_headers_that_do_not_come_end_the_connection(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    """Before the first request, and after one: uvicorn waits for the rest of a head without end."""
    monkeypatch.setattr(gateway_server, "HEADER_TIMEOUT", 0.3)
    with gateway(GatewaySettings(server.url)) as base:
        host, _, port = base.removeprefix("http://").partition(":")
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection((host, int(port))) as connection:
                connection.settimeout(WAIT)
                # Where this thread is given no core for that long, it is closed already.
                with contextlib.suppress(ConnectionError):
                    connection.sendall(before)
                    answer = b"" if before else b'"ok"'
                    while b'"ok"' not in answer and (part := connection.recv(1000)):
                        answer += part
                    connection.sendall(start)
                    assert connection.recv(1000) == b"", "closed"


def test_an_answer_may_take_longer_than_headers_may(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit_s in GROWING_S:
        monkeypatch.setattr(gateway_server, "HEADER_TIMEOUT", limit_s / 4)
        came_too_late = contextlib.suppress(httpx.TransportError)  # the request's own headers
        with gateway(GatewaySettings(server.url, timeout=limit_s)) as base, came_too_late:
            refused(chat(base, "silent"), 504)
            return
    raise AssertionError("each time the connection was closed")


def test_images_that_are_fetched_count_as_the_body_does() -> None:
    """16 images of 20 MiB each were fetched for a body of 2 KB."""

    async def resolve(host: str, port: int) -> list[str]:
        return [PUBLIC]

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(10**6)

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=body())

    async def run() -> int:
        policy = ImagePolicy(("pics.example.com",))
        held = Intake()
        async with ImageFetcher(policy, transport=httpx.MockTransport(handler), resolve=resolve) as fetcher:
            part = {"type": "image_url", "image_url": "http://pics.example.com/x"}
            with held.open() as hold, pytest.raises(RequestError, match="longer than") as caught:
                await fetcher.with_images([{"role": "user", "content": [part] * 16}], hold)
        assert caught.value.status == 413
        return held.held

    assert asyncio.run(run()) == 0


def test_audio_is_refused(base: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    error = refused(chat(base, [{"type": "text", "text": "hm"}, part]))
    assert error["param"] == "messages[0].content[1]"
    assert "not supported" in error["message"]


def test_image_urls_are_refused_unless_a_host_is_allowed(base: str) -> None:
    for url in ("http://127.0.0.1:1/x.png", "https://example.com/x.png"):
        for value in (url, {"url": url}):
            error = refused(chat(base, [{"type": "image_url", "image_url": value}]))
            assert error["param"] == "messages[0].content[0].image_url"
            assert "--allow-image-host" in error["message"]
    for url in ("file:///etc/passwd", "ftp://example.com/x.png", "x.png", " data:image/png;base64,AA"):
        error = refused(chat(base, [{"type": "image_url", "image_url": {"url": url}}]))
        assert "must be a data:, http: or https: URL" in error["message"]


# --- errors of the server ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("NOT_FOUND", 404),
        ("UNAVAILABLE", 503),
        ("RESOURCE_EXHAUSTED", 503),
        ("DEADLINE_EXCEEDED", 504),
        ("INTERNAL", 500),
        ("CANCELLED", 500),
    ],
)
def test_errors_have_their_http_status(base: str, code: str, status: int, stream: bool) -> None:
    """Those of a stream too, as long as it has not begun."""
    text = f"error {code} [{code}] temperature: must be in [0, 100]"
    error = refused(chat(base, text, stream=stream), status)
    assert "must be in [0, 100]" in error["message"]
    assert error["param"] == {400: "temperature", 404: "model"}.get(status)
    assert error["code"] == ("model_not_found" if status == 404 else code.lower())


def test_no_client_may_ask_for_error_codes_behind_the_gateway(server: FakeKServe) -> None:
    """They end tritonserver."""
    stated = dict.fromkeys(("triton_grpc_error", "Triton-Grpc-Error"), "true")
    with gateway(GatewaySettings(server.url)) as url:
        body = chat_body("error INTERNAL bad thing")
        refused(httpx.post(f"{url}/v1/chat/completions", json=body, headers=stated, timeout=WAIT), 500)
    assert not server.asked_for_codes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("told", "named", "extra"),
    [
        ("max_tokens: must be at least 1", "max_completion_tokens", {"max_completion_tokens": 1}),
        ("max_tokens: must be at least 1", "max_tokens", {"max_tokens": 1}),
        ("prompt: 9 tokens are too many", "messages", {}),
        ("text_input: is too long", "prompt", {}),
        ("text_input[3]: is too long", "prompt[3]", {}),
        ("input_ids: no such token", "prompt", {}),
        ("exclude_input_in_output: must be true when streaming", "echo", {"echo": True}),
        ("prompt_logprobs: are too many", "logprobs", {}),
    ],
)
def test_an_error_names_the_field_as_the_client_does(
    base: str, told: str, named: str, extra: dict[str, Any], stream: bool
) -> None:
    ask = chat if "messages" in named or "max_" in named else complete
    error = refused(ask(base, f"error INVALID_ARGUMENT {told}", stream=stream, **extra))
    assert error["param"] == named and error["message"] == named + told[told.index(": ") :]


def test_an_error_in_the_middle_of_a_stream_is_its_last_event(base: str) -> None:
    reply = chat(base, "midway 2", stream=True)
    assert "[DONE]" not in reply.text
    *parts, last = events(reply)
    assert [part["choices"][0]["delta"].get("content") for part in parts] == ["", "t0 ", "t1 "]
    assert last["error"]["message"] == "the engine died"
    assert last["error"]["code"] == "unavailable"
    assert refused(chat(base, "midway 2"), 503)["message"] == "the engine died"


def test_an_answer_without_end_is_no_answer(base: str) -> None:
    assert "final" in refused(chat(base, "no final 2"), 500)["message"]


def test_unknown_models_and_models_without_the_input(base: str) -> None:
    error = refused(chat(base, "tokens 1", model="nope"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "nope" in error["message"]
    error = refused(complete(base, [1, 2], model="tokenizer"))
    assert error["param"] == "prompt"
    assert "input_ids" in error["message"]


def test_a_timeout_is_504_and_ends_the_request(server: FakeKServe) -> None:
    for limit_s in GROWING_S:
        with gateway(GatewaySettings(server.url, timeout=limit_s)) as base:
            chat(base, "tokens 1")  # what is asked first takes none of the time
            refused(chat(base, "silent"), 504)
        if server.begun:
            break
    assert server.ended.wait(WAIT)


def test_no_server() -> None:
    with nobody() as url, gateway(GatewaySettings(url)) as base:
        refused(chat(base, "tokens 1"), 503)
        refused(httpx.get(f"{base}/v1/models", timeout=WAIT), 503)
        assert httpx.get(f"{base}/health", timeout=WAIT).status_code == 503


# --- several servers ---


@pytest.fixture
def pair() -> Iterator[tuple[FakeKServe, FakeKServe]]:
    with FakeKServe() as first, FakeKServe() as second:
        yield first, second


def health(base: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{base}/health", timeout=WAIT).json()
    return answer


def test_the_server_with_fewer_streams_gets_the_next_and_the_cancelling(
    pair: tuple[FakeKServe, FakeKServe],
) -> None:
    first, second = pair
    with gateway(GatewaySettings(f"{first.url},{second.url}")) as base:
        url = f"{base}/v1/chat/completions"
        body = chat_body("endless", stream=True)
        with httpx.stream("POST", url, json=body, timeout=WAIT) as one:
            lines = one.iter_lines()  # dropping it would close the connection
            assert next(lines) and first.started.wait(WAIT)
            with httpx.stream("POST", url, json=body, timeout=WAIT) as other:
                others = other.iter_lines()
                assert next(others) and second.started.wait(WAIT)
            assert second.ended.wait(WAIT) and not first.ended.is_set()
        assert first.ended.wait(WAIT)
        assert [len(first.cancelled_ids), len(second.cancelled_ids)] == [1, 1]


def test_requests_at_the_same_moment_are_spread_evenly(pair: tuple[FakeKServe, FakeKServe]) -> None:
    """Whatever came before; a request counts from the moment it is given to a server."""
    first, second = pair
    with gateway(GatewaySettings(f"{first.url},{second.url}")) as base:
        for _ in range(3):
            assert chat(base, "tokens 1", stream=True).status_code == 200
        url = f"{base}/v1/chat/completions"
        with contextlib.ExitStack() as opened, ThreadPoolExecutor(8) as pool:

            def begin(_: int) -> None:
                reply = httpx.stream("POST", url, json=chat_body("endless", stream=True), timeout=WAIT)
                lines = opened.enter_context(reply).iter_lines()
                assert next(lines)
                opened.callback(lambda: lines)  # dropping them would close the connection

            list(pool.map(begin, range(8)))
            assert [len(one.running) for one in pair] == [4, 4]


@pytest.mark.row("F18", clauses=("health",))
def test_a_server_that_dies_takes_its_streams_along_and_no_others(
    pair: tuple[FakeKServe, FakeKServe],
) -> None:
    first, second = pair
    with gateway(GatewaySettings(f"{first.url},{second.url}")) as base:
        url = f"{base}/v1/chat/completions"
        with httpx.stream("POST", url, json=chat_body("endless", stream=True), timeout=WAIT) as lost:
            lines = lost.iter_lines()
            assert next(lines) and first.started.wait(WAIT)
            with httpx.stream("POST", url, json=chat_body("endless", stream=True), timeout=WAIT) as kept:
                going = kept.iter_lines()
                assert next(going) and second.started.wait(WAIT)
                first.__exit__()
                *_, last = [line for line in lines if line]
                assert "error" in json.loads(last.removeprefix("data: "))
                assert not second.ended.is_set()
                wait_until(lambda: health(base)["servers"] == {first.url: False, second.url: True})
                assert health(base)["status"] == "ok"
                # The one that is left has more streams than the dead one, and still gets the request.
                assert chat(base, "tokens 2").status_code == 200


def test_a_connection_that_breaks_takes_its_server_out_at_once(pair: tuple[FakeKServe, FakeKServe]) -> None:
    first, second = pair
    first.__exit__()
    with gateway(GatewaySettings(f"{first.url},{second.url}")) as base:
        assert [chat(base, "tokens 1").status_code for _ in range(3)][1:] == [200, 200]


def test_a_server_that_is_gone_is_tried_again_each_second() -> None:
    """gRPC's own times between attempts grow to two minutes, and a server that is back waits for the next: it
    would make nine attempts in the first 70 s."""
    attempts = []

    def listen(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = listener.accept()
                attempts.append(connection)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, args=(listener,))
        thread.start()
        try:
            with gateway(GatewaySettings(f"127.0.0.1:{listener.getsockname()[1]}")) as url:

                def has_tried() -> bool:
                    assert httpx.get(f"{url}/health", timeout=WAIT).status_code == 503
                    return len(attempts) >= 10

                wait_until(has_tried, timeout_s=WAIT)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT)


def test_sessions_stay_with_their_server(pair: tuple[FakeKServe, FakeKServe]) -> None:
    """Which is by chance: of eight sessions all may be one server's, as its port is part of the hash."""
    first, second = pair
    with gateway(GatewaySettings(f"{first.url}, {second.url}")) as base:
        for number in range(64):
            if number >= 8 and all(one.requests for one in pair):
                break
            session = f"session {number}"
            before = [len(one.requests) for one in pair]
            for _ in range(3):
                assert chat(base, "tokens 1", session=session).status_code == 200
            after = [len(one.requests) for one in pair]
            assert sorted(now - then for now, then in zip(after, before, strict=True)) == [0, 3]
        assert all(one.requests for one in pair)
        odd = json.dumps(chat_body("tokens 1", session="\ud800"))
        assert httpx.post(f"{base}/v1/chat/completions", content=odd, timeout=WAIT).status_code < 500


# --- models and routes ---


def test_models_are_those_that_take_text(base: str) -> None:
    listed = httpx.get(f"{base}/v1/models", timeout=WAIT).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["chat"], "and not what it is made of"
    one = httpx.get(f"{base}/v1/models/chat", timeout=WAIT).json()
    assert one == listed["data"][0]
    assert (one["object"], one["owned_by"]) == ("model", "quire")
    refused(httpx.get(f"{base}/v1/models/nope", timeout=WAIT), 404)


def test_a_model_without_text_to_give_is_not_listed(
    server: FakeKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quire's own tokenizer takes `messages`, but its answer is token ids."""
    from tests.unit import fake_kserve

    whole = fake_kserve.model_config

    def config(name: str) -> Any:
        made = whole(name)
        if name == "tokenizer":
            del made.output[:]
            made.output.add(name="input_ids", data_type="TYPE_INT32", dims=[-1])
        return made

    monkeypatch.setattr(fake_kserve, "model_config", config)
    with gateway(GatewaySettings(server.url)) as base:
        listed = httpx.get(f"{base}/v1/models", timeout=WAIT).json()["data"]
        assert [model["id"] for model in listed] == ["chat"]
        assert httpx.get(f"{base}/v1/models/generator", timeout=WAIT).json()["id"] == "generator"
        refused(httpx.get(f"{base}/v1/models/tokenizer", timeout=WAIT), 404)


def test_health_and_unknown_routes(base: str) -> None:
    assert httpx.get(f"{base}/health", timeout=WAIT).json()["status"] == "ok"
    assert "/v1/nope" in refused(httpx.get(f"{base}/v1/nope", timeout=WAIT), 404)["message"]
    refused(httpx.get(f"{base}/v1/completions", timeout=WAIT), 405)


# --- clients that leave ---


def post_raw(base: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """A connection on which the request has been sent and nothing was read."""
    host, _, port = base.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("prompt", ["endless", "silent"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(server: FakeKServe, prompt: str, stream: bool) -> None:
    """Before the first chunk and after it; `chat` is an ensemble and ends by a cancel request only."""
    with gateway(GatewaySettings(server.url)) as base:
        connection = post_raw(base, chat_body(prompt, stream=stream))
        assert server.started.wait(WAIT)
        if stream and prompt == "endless":
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert not server.ended.is_set()
        connection.close()
        assert server.ended.wait(WAIT)
        assert server.cancelled_ids == [server.requests[0].id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_that_stops_ends_its_requests(server: FakeKServe, stream: bool) -> None:
    with gateway(GatewaySettings(server.url)) as base:
        connection = post_raw(base, chat_body("endless", stream=stream))
        assert server.started.wait(WAIT)
    assert server.cancelled_ids == [server.requests[0].id]
    assert server.ended.wait(WAIT)
    connection.close()


# --- fetching images ---


Handler = Callable[[httpx.Request], httpx.Response]


def fetch(
    handler: Handler,
    url: str,
    *,
    hosts: tuple[str, ...] = ("pics.example.com",),
    addresses: dict[str, list[str]] | None = None,
    **limits: Any,
) -> str:
    """The data URL for `url`; hosts have a public address unless `addresses` has others."""

    async def resolve(host: str, port: int) -> list[str]:
        return (addresses or {}).get(host, [PUBLIC])

    def streamed(request: httpx.Request) -> httpx.Response:
        made = handler(request)
        return _unread(made) if made.is_stream_consumed else made

    async def run() -> str:
        policy = ImagePolicy(hosts, **limits)
        async with ImageFetcher(policy, transport=httpx.MockTransport(streamed), resolve=resolve) as fetcher:
            return await fetcher.fetch(url, "here", Intake().open())

    return asyncio.run(run())


def _unread(made: httpx.Response) -> httpx.Response:
    """As from a network: a response made of bytes counts as read already."""

    async def body() -> AsyncIterator[bytes]:
        yield made.content

    return httpx.Response(made.status_code, headers=made.headers, content=body())


def picture(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=PIXEL, headers={"content-type": "image/gif; q=1"})


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"fetched {request.url}")


def test_a_fetched_image_is_a_data_url_and_goes_to_the_address_that_was_checked() -> None:
    """A name may have another address at the next look-up: the connection must not look it up again."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return picture(request)

    got = fetch(handler, "https://Pics.Example.com:444/a.gif?b#c")
    assert got == "data:image/gif;base64," + base64.b64encode(PIXEL).decode()
    (request,) = seen
    assert str(request.url) == f"https://{PUBLIC}:444/a.gif?b#c"
    assert request.headers["host"] == "pics.example.com:444"
    assert request.extensions["sni_hostname"] == "pics.example.com"
    assert request.headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization"} & set(request.headers)


def test_a_type_that_is_no_image_s_is_not_repeated() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=PIXEL, headers={"content-type": "text/html,x"})

    assert fetch(handler, "http://pics.example.com/").startswith("data:application/octet-stream;base64,")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("pics.example.com", True),
        ("PICS.example.com", True),
        ("pics.example.com.", True),
        ("a.cdn.example.org", True),
        ("b.a.cdn.example.org", True),
        ("xn--bcher-kva.example", True),
        ("bücher.example", True),
        ("cdn.example.org", False),
        ("evilcdn.example.org", False),
        ("x.pics.example.com", False),
        ("pics.example.com.evil.org", False),
        ("evil.org", False),
        (PUBLIC, False),
    ],
)
def test_hosts_are_allowed_by_exact_name_or_suffix(host: str, allowed: bool) -> None:
    hosts = ("Pics.example.com", "*.cdn.example.org", "bücher.example")
    if allowed:
        assert fetch(picture, f"http://{host}/x", hosts=hosts).startswith("data:image/gif")
    else:
        with pytest.raises(RequestError, match=r"^here: the host .* is not allowed$"):
            fetch(never, f"http://{host}/x", hosts=hosts)


@pytest.mark.parametrize(
    "url",
    [
        "http://pics.example.com@evil.org/x",
        "http://evil.org#@pics.example.com/",
        "http://evil.org\\@pics.example.com/",
        "http://user:pw@pics.example.com/x",
        "http:///x",
        "http://",
        "http://[::1",
        "https://pics.example.com:99999/",
        "http://pics.example.com/\x00",
        "http://" + "a" * 300 + ".example.com/",
        "gopher://pics.example.com/",
        "http:pics.example.com",
    ],
)
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match=r"^here: .") as caught:
        fetch(never, url)
    assert caught.value.param == "here"


@pytest.mark.parametrize(
    "entry", ["", "*", "*.", "http://x", "x/y", "x:80", "a b", "*x.com", "x.*.com", "u@x"]
)
def test_entries_that_are_no_hosts_are_refused_at_start(entry: str) -> None:
    with pytest.raises(ValueError, match="must be a host name"):
        ImagePolicy((entry,))
    result = CliRunner().invoke(cli, ["openai", "--allow-image-host", entry])
    assert result.exit_code == 2
    assert "--allow-image-host" in result.output


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "fd00::1",
    "fec0::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::127.0.0.1",
    "2002:7f00:1::",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2001:0:53aa:64c:0:0:80ff:fffe",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    for found in ([address], [PUBLIC, address]):
        addresses = {"a.example.com": found}
        with pytest.raises(RequestError, match="not public") as caught:
            fetch(never, "http://a.example.com/", hosts=("*.example.com",), addresses=addresses)
        assert address not in caught.value.message, "a network's inside is not to be mapped from outside"


def test_addresses_that_are_public() -> None:
    for address in (PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(address)


def test_a_host_allowed_by_its_very_name_may_be_private() -> None:
    addresses = {"files.lan": ["10.0.0.1"]}
    assert fetch(picture, "http://files.lan/x", hosts=("files.lan",), addresses=addresses)
    with pytest.raises(RequestError, match="not public"):
        fetch(never, "http://files.lan/x", hosts=("*.lan",), addresses=addresses)


def redirects_to(*locations: str) -> Handler:
    """Answers with the locations in turn, then with the picture."""
    left = list(locations)

    def handler(request: httpx.Request) -> httpx.Response:
        if not left:
            return picture(request)
        headers = {"location": left.pop(0), "set-cookie": "a=b"}
        return httpx.Response(302, headers=headers, content=b"x" * 100)

    return handler


def test_redirects_are_followed_to_allowed_hosts_only() -> None:
    start = "https://pics.example.com/a/b"
    hosts = ("pics.example.com", "*.cdn.example.org")
    assert fetch(redirects_to("/c", "d", "//x.cdn.example.org/e"), start, hosts=hosts)
    with pytest.raises(RequestError, match="more than 3 redirects"):
        fetch(redirects_to("/1", "/2", "/3", "/4"), start)
    with pytest.raises(RequestError, match=r"the host evil\.org is not allowed"):
        fetch(redirects_to("/1", "http://evil.org/"), start)
    for other in ("file:///etc/passwd", "data:image/gif;base64,AA", "ftp://pics.example.com/"):
        with pytest.raises(RequestError, match=r"must be a data:, http: or https: URL|not a valid URL"):
            fetch(redirects_to(other), start)
    private = {"x.cdn.example.org": ["127.0.0.1"]}
    with pytest.raises(RequestError, match="not public"):
        fetch(redirects_to("http://x.cdn.example.org/"), start, hosts=hosts, addresses=private)


def test_a_redirect_is_resolved_against_the_name_and_sends_no_cookie() -> None:
    seen: list[httpx.Request] = []
    answer = redirects_to("/next")

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(request)

    fetch(handler, "http://pics.example.com/a")
    assert [request.headers["host"] for request in seen] == ["pics.example.com"] * 2
    assert seen[1].url.path == "/next"
    assert "cookie" not in seen[1].headers


@pytest.mark.row("H9", clauses=("limit",))
def test_the_size_is_counted_while_it_comes() -> None:
    """A host may state a small Content-Length or none, and send without end."""
    sent = 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100
            yield b"x" * 100

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=long(), headers={"content-length": "5"})

    with pytest.raises(RequestError, match="longer than 1000 bytes"):
        fetch(handler, "http://pics.example.com/", max_bytes=1000)
    assert sent == 1100
    stated = httpx.Response(200, content=b"x" * 1001)
    with pytest.raises(RequestError, match="longer than 1000 bytes"):
        fetch(lambda request: stated, "http://pics.example.com/", max_bytes=1000)
    exact = httpx.Response(200, content=b"x" * 1000)
    got = fetch(lambda request: exact, "http://pics.example.com/", max_bytes=1000)
    assert len(base64.b64decode(got.partition(",")[2])) == 1000


def test_a_compressed_body_is_refused() -> None:
    """It could be far larger than what was counted."""

    def handler(request: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"x"

        return httpx.Response(200, content=body(), headers={"content-encoding": "gzip"})

    with pytest.raises(RequestError, match="compressed"):
        fetch(handler, "http://pics.example.com/")


def test_hosts_that_fail() -> None:
    with pytest.raises(RequestError, match="status 404"):
        fetch(lambda request: httpx.Response(404), "http://pics.example.com/")

    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no")

    with pytest.raises(RequestError, match="cannot be fetched: ConnectError"):
        fetch(broken, "http://pics.example.com/")
    with pytest.raises(RequestError, match="cannot be fetched"):
        fetch(never, "http://pics.example.com/", addresses={"pics.example.com": []})


def test_the_next_address_is_tried_where_nobody_listens() -> None:
    """`localhost` is often ::1 first, for a server at 127.0.0.1."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "::1":
            raise httpx.ConnectError("refused")
        assert request.url.host == "127.0.0.1"
        return picture(request)

    addresses = {"localhost": ["::1", "127.0.0.1"]}
    assert fetch(handler, "http://localhost/", hosts=("localhost",), addresses=addresses)


def test_a_host_that_sends_too_slowly() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.Event().wait()

    with pytest.raises(RequestError, match=r"did not come within 0\.1 s"):
        fetch(lambda request: httpx.Response(200, content=slow()), "http://pics.example.com/", timeout=0.1)


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "image/gif")
        self.send_header("Set-Cookie", "a=b")
        self.end_headers()
        self.wfile.write(PIXEL if self.path == "/pixel" else b"x" * 5000)

    def log_message(self, *_: object) -> None:
        pass


def test_a_gateway_fetches_from_a_real_host(server: FakeKServe) -> None:
    policy = ImagePolicy(("localhost",), max_bytes=1000)
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    with contextlib.closing(web.socket), gateway(GatewaySettings(server.url, images=policy)) as base:

        def ask(url: str, count: int = 1) -> httpx.Response:
            parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}] * count
            messages = [{"role": "user", "content": parts}, {"role": "user", "content": "echo"}]
            body = {"model": "chat", "messages": messages}
            return httpx.post(f"{base}/v1/chat/completions", json=body, timeout=WAIT)

        local = f"http://localhost:{web.server_port}"
        sent = json.loads(inputs_of(ask(f"{local}/pixel", 2))["messages"][0])
        expected = {"url": "data:image/gif;base64," + base64.b64encode(PIXEL).decode(), "detail": "low"}
        assert [part["image_url"] for part in sent[0]["content"]] == [expected, expected]
        error = refused(ask(f"{local}/large"))
        assert error["param"] == "messages[0].content[0].image_url"
        assert "longer than 1000 bytes" in error["message"]
        assert "not allowed" in refused(ask(f"http://127.0.0.1:{web.server_port}/pixel"))["message"]
        assert f"at most {MAX_IMAGES} images" in refused(ask(f"{local}/pixel", 17))["message"]
        web.shutdown()


# --- the command ---


def test_the_client_does_not_load_the_gateway() -> None:
    """Its packages are an extra, which a user of the client alone does not have."""
    code = (
        "import sys, quire_client, quire_client.cli; "
        "assert not {'starlette', 'uvicorn', 'httpx', 'quire', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quire_client.openai.server", None)
    result = CliRunner().invoke(cli, ["openai"])
    assert result.exit_code == 1
    assert "pip install starlette uvicorn httpx prometheus-client" in result.output


def test_the_command_at_a_taken_port_and_with_a_bad_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "quire_client.cli", "openai", f"--port={port}"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 1
    assert run.stderr.startswith(f"Error: cannot listen at 127.0.0.1:{port}: ")
    for url in ("http://x", "a:1,,b:2"):
        run = subprocess.run([*command, f"--url={url}"], capture_output=True, text=True, timeout=280)
        assert run.returncode == 1
        assert run.stderr.startswith("quire-client: INVALID_ARGUMENT: url: ")
