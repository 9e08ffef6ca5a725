"""Chat messages on the wire: how an answer is to be read goes in, its parts come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.errors import InvalidArgumentError  # noqa: E402
from quire.frontend.output_processor import RequestProcessor  # noqa: E402
from quire.outputs import EngineCoreOutput  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire_common.errors import InputError  # noqa: E402
from quire_ensemble.chat_format import ChatFormat, parse_chat_format  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from quire_ensemble.triton_tokenizer import TokenizerModel  # noqa: E402
from tests.fixtures.chat_transcripts import TOOLS  # noqa: E402
from tests.fixtures.checkpoints import write_tokenizer  # noqa: E402
from tests.triton.test_request_parser import parse, text  # noqa: E402

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{# writes </think> and <tool_call> #}"
)
MESSAGES = [{"role": "user", "content": "hi"}]
CALL = '{"name": "get_weather", "arguments": {"city": "X"}}'
ANSWER = f"hm\n</think>\n\nWait.\n<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


def chat(**more: Any) -> dict[str, np.ndarray]:
    return {"messages": text(json.dumps({"messages": MESSAGES, **more}))}


LIMITS = {"max_prompt_bytes": 10_000}


def answered(tokenizer: Tokenizer, parsed: Any, size: int = 1, reason: str = "stop") -> list[dict[str, Any]]:
    """Tensors of the responses to a request whose model writes ANSWER."""
    sender = fake_pb_utils.ResponseSender()
    handle = RequestHandle(sender, "r", "")
    handle.parsed = parsed
    processor = RequestProcessor("r", 1, parsed.params, tokenizer.hf, new_answer=parsed.new_answer)
    token_ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    for start in range(0, len(token_ids), size):
        ends = reason if start + size >= len(token_ids) else None
        processor.process(EngineCoreOutput("r", token_ids[start : start + size], finish_reason=ends))
        if parsed.stream or ends:
            output = processor.choices[0].pop_ready()
            if output is not None:
                handle.send(output)
    assert sender.final.is_set()
    return [response.tensors for response in sender.responses]


def joined(responses: list[dict[str, Any]], name: str) -> str:
    return "".join(tensors[name][0].decode() for tensors in responses if name in tensors)


def test_an_answer_to_messages_comes_in_parts(tokenizer: Tokenizer) -> None:
    asked = {"stream": np.array([True]), "return_num_reasoning_tokens": np.array([True])}
    parsed = parse(tokenizer, {**chat(tools=TOOLS), **asked}, limits=LIMITS)
    responses = answered(tokenizer, parsed)
    assert joined(responses, "text_output") == "Wait.\n"
    assert joined(responses, "reasoning_output") == "hm\n"
    thought = len(tokenizer.encode("hm\n</think>", add_special_tokens=False))
    assert int(responses[-1]["num_reasoning_tokens"][0]) == thought > 3
    deltas = [d for r in responses if "tool_calls" in r for d in json.loads(r["tool_calls"][0])]
    assert deltas[0]["id"].startswith("call_") and deltas[0]["type"] == "function"
    assert deltas[0]["function"]["name"] == "get_weather" and {d["index"] for d in deltas} == {0}
    assert "".join(d["function"]["arguments"] for d in deltas) == '{"city": "X"}'
    assert responses[-1]["finish_reason"][0] == b"tool_calls"
    for tensors in responses:
        assert tensors.get("reasoning_output", [b"x"])[0] and tensors.get("tool_calls", [b"x"])[0] != b"[]"

    (whole,) = answered(tokenizer, parse(tokenizer, chat(tools=TOOLS), limits=LIMITS), 5)
    assert (whole["text_output"][0], whole["reasoning_output"][0]) == (b"Wait.\n", b"hm\n")
    (call,) = json.loads(whole["tool_calls"][0])
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "X"}'}

    requested = {"requested": ["tool_calls", "reasoning_output"]}
    parsed = parse(tokenizer, {**chat(tools=TOOLS), "stream": np.array([True])}, limits=LIMITS, **requested)
    for tensors in answered(tokenizer, parsed):
        assert set(tensors) == {"tool_calls", "reasoning_output"}, "what is asked for is there each time"
        json.loads(tensors["tool_calls"][0])


def test_what_is_not_parsed_stays_text(tokenizer: Tokenizer) -> None:
    for inputs, limits in (
        ({"text_input": text("hi")}, {}),
        ({"input_ids": np.array([1, 2], np.int32)}, {}),
        (chat(tools=TOOLS), {"tool_parser": "none", "reasoning_parser": "none"}),
        (chat(), {"reasoning_parser": "none"}),
        (chat(tools=TOOLS, tool_choice="none"), {"reasoning_parser": "none"}),
    ):
        parsed = parse(tokenizer, inputs, limits={**LIMITS, **limits})
        assert parsed.new_answer is None
        (whole,) = answered(tokenizer, parsed, 4)
        assert whole["text_output"][0].decode() == ANSWER
        assert whole["finish_reason"][0] == b"stop" and "tool_calls" not in whole
    (whole,) = answered(tokenizer, parse(tokenizer, chat(tools=TOOLS, tool_choice="none"), limits=LIMITS), 4)
    assert whole["text_output"][0].decode() == ANSWER.partition("</think>\n\n")[2]
    assert whole["finish_reason"][0] == b"stop" and "tool_calls" not in whole


def test_an_ensemble_reads_answers_as_the_generator_does(checkpoint: Path, tokenizer: Tokenizer) -> None:
    class Model(TokenizerModel):
        pb_utils: ClassVar[Any] = fake_pb_utils

    model = Model()
    parameters = {"checkpoint": {"string_value": str(checkpoint)}}
    config = json.dumps({"parameters": parameters})
    args = {"model_config": config, "model_repository": str(checkpoint)}
    model.initialize({**args, "model_instance_name": "tokenizer_0"})
    messages = chat(tools=TOOLS, parallel_tool_calls=False)["messages"]
    request = fake_pb_utils.InferenceRequest({"messages": messages[None]})
    plain = fake_pb_utils.InferenceRequest({"text_input": text("hi")[None]})
    of_messages, of_text = model.execute([request, plain])
    model.finalize()
    assert of_text.tensors["chat_format"].tolist() == [[b""]]
    (raw,) = of_messages.tensors["chat_format"][0]
    found = parse_chat_format(raw)
    assert found == ChatFormat(tools=TOOLS, parallel_tool_calls=False, prompt_end=found.prompt_end)
    assert found.prompt_end.endswith("<|im_start|>assistant\n<think>\n")
    ids = of_messages.tensors["input_ids"][0]
    parsed = parse(tokenizer, {"input_ids": ids, "chat_format": text(raw)}, limits=LIMITS)
    (whole,) = answered(tokenizer, parsed, 3)
    assert (whole["text_output"][0], whole["reasoning_output"][0]) == (b"Wait.\n", b"hm\n")
    assert whole["finish_reason"][0] == b"tool_calls"
    parsed = parse(tokenizer, {"input_ids": ids, "chat_format": text("")}, limits=LIMITS)
    assert parsed.new_answer is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name 'get_weather' is there twice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function must be an object, got null"),
        ({"tools": [{"type": "code", "function": {}}]}, "tools[0].type 'code' is not supported"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name must be of 1 to 64 letters"),
        ({"tools": [{"function": {"name": "a" * 65}}]}, "tools[0].function.name must be of 1 to 64 letters"),
        ({"tools": [{"function": {"name": 3}}]}, "digits, '_', '.' or '-', got int"),
        (
            {"tools": [{"function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters must be an object, got list",
        ),
        ({"tools": [{"function": {"name": "a", "x": "x" * 2**19}}]}, "tools of at most 524288 characters"),
        ({"tool_choice": "required"}, "tool_choice 'required' needs tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be 'auto', 'none', 'required' or"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice must be 'auto'"),
        ({"tools": TOOLS, "tool_choice": [1]}, "tool_choice must be 'auto'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice names 'rm', which is not among the tools",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, got int"),
        ({"response_format": {"type": "xml"}}, "response_format must have the type 'text', 'json_object' or"),
    ],
)
def test_tools_are_checked_wherever_they_come_in(
    more: dict[str, Any], reason: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse(tokenizer, chat(**more), limits={"max_prompt_bytes": 2**21})
    assert str(refused.value).startswith("messages: ") and reason in str(refused.value)
    with pytest.raises(InputError) as wrong:
        parse_chat_format(json.dumps(more))
    assert str(wrong.value).startswith("chat_format: ") and reason in str(wrong.value)


@pytest.mark.parametrize(
    "value", ["[", "3", '{"a": 1}', '{"prompt_end": 3}', '{"prompt_end": "%s"}' % ("x" * 65)]
)
def test_a_chat_format_that_is_none_is_refused(value: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="chat_format: "):
        parse(tokenizer, {"text_input": text("a"), "chat_format": text(value)})
    with pytest.raises(InvalidArgumentError, match="chat_format: must not be given beside messages"):
        parse(tokenizer, {**chat(), "chat_format": text("{}")})
