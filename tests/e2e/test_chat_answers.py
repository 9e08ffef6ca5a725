"""Answers to chat messages through the real server: a forced call and reasoning with a budget, streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.e2e.conftest import AssortedServer
from tests.e2e.test_generate import events, post
from tests.e2e.test_openai_gateway import gateway
from tests.e2e.triton_calls import stream
from tests.fixtures.chat_transcripts import TOOLS

pytestmark = pytest.mark.server

BUDGET = 5
MODELS = ("thinking_generator", "thinking_chat")


@pytest.mark.row("A19", clauses=("reasoning",))
@pytest.mark.row("A25")
@pytest.mark.row("A26")
def test_a_forced_call_is_streamed_behind_its_reasoning(assorted: AssortedServer) -> None:
    server = assorted.server
    tokenizer = AutoTokenizer.from_pretrained(assorted.root / "thinking")
    named = {"type": "function", "function": {"name": "get_weather"}}
    conversation = {
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": SCHEMA}}],
        "tool_choice": named,
    }
    asked: dict[str, Any] = {
        "messages": json.dumps(conversation),
        "temperature": 2.0,
        "seed": 7,
        "max_tokens": 600,
        "stream": True,
    }
    answers = []
    for model in MODELS:
        inputs = {**asked, "thinking_budget": BUDGET, "return_num_reasoning_tokens": True}
        reply = stream(server.grpc_url, model, inputs)
        assert reply.error is None and reply.finals == 1
        deltas, reasoning = [], ""
        for result in reply.results:
            calls, thought = result.as_numpy("tool_calls"), result.as_numpy("reasoning_output")
            deltas += [] if calls is None else json.loads(calls[0])
            reasoning += "" if thought is None else thought[0].decode()
        assert reply.text == "" and reply.finish_reasons[-1] == "tool_calls"
        assert len(deltas) > 1, "a name and pieces"
        check(deltas)
        count = int(reply.results[-1].as_numpy("num_reasoning_tokens")[0])
        assert reasoning and count > BUDGET
        assert count == tokens_to_end_of_thought(tokenizer, reply.token_ids) < len(reply.token_ids)
        arguments = "".join(delta["function"]["arguments"] for delta in deltas)
        answers.append((reasoning, count, arguments, reply.token_ids))
    assert answers[0] == answers[1], "the ensemble's answer is the generator's"

    url = f"{server.http_url}/v2/models/thinking_generator/generate_stream"
    status, body = post(url, {**asked, "sampling_parameters": json.dumps({"thinking_budget": BUDGET})})
    parts = events(body)
    assert status == 200
    check([delta for part in parts if "tool_calls" in part for delta in json.loads(part["tool_calls"])])
    assert "".join(part.get("reasoning_output", "") for part in parts) == answers[0][0]

    with gateway(server.grpc_url) as client:
        options: dict[str, Any] = {"temperature": 2.0, "seed": 7, "max_tokens": 600, **conversation}
        options["extra_body"] = {"thinking_budget": BUDGET}
        answer = client.chat.completions.create(model="thinking_chat", **options)
        usage = answer.usage
        assert usage is not None and usage.completion_tokens_details is not None
        counted = usage.completion_tokens_details.reasoning_tokens, usage.completion_tokens
        assert counted == (answers[0][1], len(answers[0][3]))

    conversation["tool_choice"] = {"type": "function", "function": {"name": "rm"}}
    for model in MODELS:
        reply = stream(server.grpc_url, model, {**asked, "messages": json.dumps(conversation)})
        assert "messages: tool_choice names 'rm', which is not among the tools" in str(reply.error)


def test_tools_of_the_openai_client(assorted: AssortedServer) -> None:
    """Whole and streamed, required and named; what is called is by the grammar. None is called unless it is
    asked for."""
    colours = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tools: Any = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {**colours, "additionalProperties": False}},
        }
        for name in ("paint", "mix")
    ]
    messages = [{"role": "user", "content": "Go on"}]
    asked: Any = {"model": "thinking_chat", "messages": messages, "tools": tools}
    asked |= {"max_tokens": 200, "temperature": 1.0, "seed": 4, "extra_body": {"thinking_budget": BUDGET}}
    with gateway(assorted.server.grpc_url) as client:
        named: Any = {"type": "function", "function": {"name": "mix"}}
        for choice, names in (("required", {"paint", "mix"}), (named, {"mix"})):
            answer = client.chat.completions.create(tool_choice=choice, **asked).choices[0]
            calls: Any = answer.message.tool_calls
            assert calls and answer.finish_reason == "tool_calls"
            for call in calls:
                assert call.function.name in names and call.id
                assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
            with client.chat.completions.stream(tool_choice=choice, **asked) as stream:
                streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
            assert [c.function.arguments for c in streamed] == [c.function.arguments for c in calls]
        plain = client.chat.completions.create(tool_choice="none", **asked).choices[0]
        assert plain.message.content and plain.message.tool_calls is None


def tokens_to_end_of_thought(tokenizer: Any, token_ids: list[int]) -> int:
    """Those of an answer that begins within reasoning, up to the last of its closing tag."""
    return next(
        count
        for count in range(1, len(token_ids) + 1)
        if "</think>" in tokenizer.decode(token_ids[:count], skip_special_tokens=False)
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def check(deltas: list[dict[str, Any]]) -> None:
    """They are one call of the schema, its name first."""
    first, *rest = deltas
    assert first["function"]["name"] == "get_weather" and first["id"].startswith("call_")
    assert all(set(delta) == {"index", "function"} for delta in rest)
    assert {delta["index"] for delta in deltas} == {0}
    arguments = json.loads("".join(delta["function"]["arguments"] for delta in deltas))
    assert arguments["city"] in ("Rome", "Köln") and arguments["days"] in range(1, 10)
