"""Calls that tool_choice forces, and those that begin: a random model's are valid, in each of the formats."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import InvalidArgumentError
from quire.frontend.chat.formats import TOOL_FORMATS, ChatParsing, prepare_answer
from quire.outputs import RequestOutput
from tests.fixtures.checkpoints import make_checkpoint

MESSAGES = [{"role": "user", "content": "Weather in Rome?"}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Rome", "Köln"]},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATES = {
    **{name: "".join(one.signs) for name, one in TOOL_FORMATS.items()},
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral list": "[TOOL_CALLS]",
    "deepseek v3": "<｜tool▁call▁begin｜>```json",
}
"""What says in a template which format it is; by the format and its variant."""


def template(signs: str, ending: str = "") -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        f"<|im_start|>assistant\n{ending}{{# {signs} #}}"
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return LLM(path, dtype="float32", max_model_len=1024, num_blocks=400, num_threads=1)


def use(llm: LLM, signs: str, ending: str = "", reasoning: str = "auto", tools: str = "auto") -> None:
    assert llm.tokenizer is not None
    llm.tokenizer.hf.chat_template = template(signs, ending)
    llm.tokenizer.__dict__["_shows_tools"] = True  # to random weights they would say nothing
    llm._chat_parsing = ChatParsing(llm.tokenizer.hf, tools, reasoning)


def ask(llm: LLM, seed: int, more: dict[str, Any], **sampling: Any) -> RequestOutput:
    options: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": 300, **sampling}
    return llm.chat({"messages": MESSAGES, "tools": TOOLS, **more}, **options)


def check_call(call: dict[str, Any], names: tuple[str, ...] = ("get_weather", "now")) -> None:
    function = call["function"]
    assert function["name"] in names
    arguments = json.loads(function["arguments"])
    assert isinstance(arguments, dict)
    if function["name"] == "get_weather":
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Rome", "Köln") and arguments["days"] in range(1, 10)


def is_lost_in_thought(output: RequestOutput) -> bool:
    """A random model that may think hardly ever ends it; where it spells the tag unlike its tokenizer, no
    budget ends it either."""
    lost = output.finish_reason == "length" and bool(output.num_reasoning_tokens) and not output.text
    assert not (lost and output.tool_calls)
    return lost


NAMED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


@pytest.mark.row("A25", clauses=("json",))
@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_are_of_the_schema(name: str, llm: LLM) -> None:
    """At temperature 2 of random weights, in each format; one alone where parallel calls are off."""
    use(llm, TEMPLATES[name], reasoning="none")
    ended = 0
    for seed in range(6):
        named = ask(llm, seed, NAMED)
        assert named.finish_reason == "tool_calls" and named.text == ""
        (call,) = named.tool_calls
        check_call(call, ("get_weather",))
        one = ask(llm, seed, {"tool_choice": "required", "parallel_tool_calls": False})
        several = ask(llm, seed, {"tool_choice": "required"})
        assert len(one.tool_calls) <= 1
        for output in (one, several):
            assert output.text == "" and output.tool_calls
            assert output.finish_reason in ("tool_calls", "length")
            if output.finish_reason == "tool_calls":
                ended += 1
                for call in output.tool_calls:
                    check_call(call)
    assert ended > 0


@pytest.mark.row("A25", clauses=("choice",))
def test_the_choice_is_kept(llm: LLM) -> None:
    """required: a call; named: that tool's; several at a time; none and auto: none is forced."""
    use(llm, "<tool_call>")
    required = [ask(llm, seed, {"tool_choice": "required"}) for seed in range(12)]
    assert all(output.tool_calls and output.text == "" for output in required)
    assert {call["function"]["name"] for output in required for call in output.tool_calls} == {
        "get_weather",
        "now",
    }
    assert any(len(output.tool_calls) > 1 for output in required), "parallel calls"
    for output in required:
        assert [call["index"] for call in output.tool_calls] == list(range(len(output.tool_calls)))
        assert len({call["id"] for call in output.tool_calls}) == len(output.tool_calls)
    assert all(len(ask(llm, seed, NAMED).tool_calls) == 1 for seed in range(4))
    for choice in ("none", "auto"):
        output = ask(llm, 1, {"tool_choice": choice}, max_tokens=20, ignore_eos=True)
        assert output.finish_reason == "length" and output.text and not output.tool_calls


@pytest.mark.row("A25", clauses=("json",))
@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if name not in ("llama", "harmony", "mistral list")]
)
def test_a_call_that_begins_by_itself_is_valid(name: str, llm: LLM) -> None:
    """The text is free up to the marker; what follows is a call of one of the tools."""
    use(llm, TEMPLATES[name])
    assert llm.tokenizer is not None and llm._chat_parsing is not None
    _, chat = llm.tokenizer.encode_chat(json.dumps({"messages": MESSAGES, "tools": TOOLS}))
    structured = prepare_answer(llm._chat_parsing, llm.default_params, chat, llm._vocabulary.compile)[
        0
    ].structured_output
    assert structured is not None
    trigger = json.loads(structured.structural_tag)["format"]["triggers"][0]
    vocabulary = llm._vocabulary.compile(structured)
    begun = llm.tokenizer.encode(f"well {trigger}", add_special_tokens=False)
    assert vocabulary.consume_tokens(begun)
    for wrong in ("?", '{"name": "rm"', "rm"):
        ids = llm.tokenizer.encode(wrong, add_special_tokens=False)
        assert vocabulary.validate_tokens(ids) < len(ids)


@pytest.mark.parametrize("ending", ["", "<think>\n"], ids=["may think", "thinks"])
@pytest.mark.parametrize("budget", [None, 3])
def test_reasoning_comes_before_what_is_forced(ending: str, budget: int | None, llm: LLM) -> None:
    use(llm, "<tool_call></think>", ending)
    if ending and budget is None:
        return  # a random model never closes its thoughts
    for seed in range(4):
        output = ask(llm, seed, NAMED, thinking_budget=budget)
        assert bool(output.num_reasoning_tokens) >= bool(ending)
        if not is_lost_in_thought(output):
            assert output.finish_reason == "tool_calls"
            check_call(output.tool_calls[0], ("get_weather",))
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
        }
        output = ask(llm, seed, {"response_format": form}, thinking_budget=budget)
        if not is_lost_in_thought(output):
            assert output.finish_reason == "stop" and json.loads(output.text)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("tools", "more", "reason"),
    [
        ("none", {"tool_choice": "required"}, "tool_choice needs a model whose tool_parser is not none"),
        (
            "hermes",
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice must not force calls beside a grammar",
        ),
    ],
)
def test_what_cannot_be_forced_is_refused(tools: str, more: dict[str, Any], reason: str, llm: LLM) -> None:
    use(llm, "", tools=tools)
    with pytest.raises(InvalidArgumentError, match=f"messages: {reason}"):
        ask(llm, 1, more)
    with pytest.raises(InvalidArgumentError, match="response_format must not be given beside a grammar"):
        ask(llm, 1, {"response_format": {"type": "json_object"}}, structured_output={"regex": "a"})


def test_tools_of_an_unknown_format_are_refused(llm: LLM) -> None:
    """Unless the configuration says that calls stay in the text, or the request wants none."""
    use(llm, "")
    reason = "messages: tools: the chat template does not show how the model writes calls; set tool_parser"
    for choice in ("auto", "required"):
        with pytest.raises(InvalidArgumentError, match=reason):
            ask(llm, 1, {"tool_choice": choice})
    assert not ask(llm, 1, {"tool_choice": "none"}).tool_calls
    use(llm, "", tools="none")
    assert not ask(llm, 1, {}).tool_calls


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1], "required": 5},
        {"properties": {"a": 3, "b": {"type": "string", "enum": 7}, "\ud800<|x|>": {}}, "required": "a"},
        {"properties": {"a": {"type": "string", "enum": [1, None]}}, "required": [["a"]]},
        {"type": "object", "$ref": "#/nowhere"},
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_is_none_is_told_as_an_argument(
    name: str, parameters: dict[str, Any], choice: str, llm: LLM
) -> None:
    use(llm, TEMPLATES[name])
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    # A grammar that nobody asked for is done without, as behind Triton.
    refusal = contextlib.suppress(InvalidArgumentError) if choice == "required" else contextlib.nullcontext()
    with refusal:
        ask(llm, 1, {"tools": tools, "tool_choice": choice}, max_tokens=2)
