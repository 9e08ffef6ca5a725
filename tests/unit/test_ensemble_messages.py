"""The `messages` input: what is accepted, and that every refusal names the place and the reason."""

from __future__ import annotations

import json

import pytest

from quire_common.errors import InputError
from quire_ensemble.messages import MAX_MESSAGES, join_text_parts, parse_conversation

USER = {"role": "user", "content": "hi"}


def test_a_list_and_an_object_are_accepted() -> None:
    assert parse_conversation(json.dumps([USER])).messages == [USER]
    conversation = parse_conversation(
        json.dumps(
            {
                "messages": [USER],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "add_generation_prompt": False,
                "chat_template_kwargs": {"thinking": True},
            }
        ).encode()
    )
    assert conversation.messages == [USER]
    assert conversation.tools == [{"type": "function", "function": {"name": "f"}}]
    assert conversation.add_generation_prompt is False
    opened = parse_conversation(json.dumps({"messages": [USER], "continue_final_message": True}))
    assert (opened.continue_final_message, opened.add_generation_prompt) == (True, False)
    assert conversation.template_kwargs == {"thinking": True}


def test_content_may_be_parts_or_absent_beside_tool_calls() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {}}}]},
    ]
    parsed = parse_conversation(json.dumps(messages)).messages
    assert parsed == messages
    assert [m.get("content") for m in join_text_parts(parsed)] == ["a\nb", None, "1", None]
    assert parsed == messages, "joining copies"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\xff[]", "invalid UTF-8 at byte 0 of 3"),
        ('[{"role": "user", "content": "\xe9"}]'.encode("latin-1"), "invalid UTF-8 at byte 30"),
        ("", "invalid JSON at line 1 column 1"),
        ('[\n {"role": }]', "invalid JSON at line 2 column 11"),
        ("[" * 100_000, "nested too deeply"),
        ("[1" + "0" * 5000 + "]", "invalid JSON"),
        ('"text"', "must be a list of messages or an object with 'messages', got str"),
        ("null", "must be a list of messages or an object with 'messages', got null"),
        ("[]", "must hold at least one message"),
        ("{}", "must have the key 'messages'"),
        ('{"messages": {}}', "must be a list of messages, got dict"),
        ('{"messages": [], "tool": []}', "unknown key 'tool'; known are messages, tools"),
        ('["hi"]', "[0] must be an object with role and content, got str 'hi'"),
        ('[{"content": "hi"}]', "[0].role must be a non-empty string, got null"),
        ('[{"role": "", "content": "hi"}]', "[0].role must be a non-empty string"),
        ('[{"role": 1, "content": "hi"}]', "[0].role must be a non-empty string, got int 1"),
        ('[{"role": "user"}]', "[0].content must be a string or a list of text parts"),
        (
            '[{"role": "user", "content": 7}]',
            "[0].content must be a string or a list of text parts, got int 7",
        ),
        ('[{"role": "user", "content": ["a"]}]', "[0].content[0] must be an object like"),
        (
            '[{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url"}]}]',
            "[1].content[0].type 'image_url' is not supported; known: 'text'",
        ),
        (
            '[{"role": "user", "content": [{"type": "text"}]}]',
            "[0].content[0].text must be a string, got null",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "tools": {}}',
            "tools must be a list of objects, got dict",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "tools": ["f"]}',
            "tools[0] must be an object, got str",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "add_generation_prompt": 1}',
            "add_generation_prompt must be true",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "continue_final_message": "yes"}',
            "continue_final_message must be true",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "continue_final_message": true,'
            ' "add_generation_prompt": true}',
            "continue_final_message must not be given beside",
        ),
        (
            '{"messages": [{"role": "u", "content": ""}], "chat_template_kwargs": []}',
            "chat_template_kwargs must be",
        ),
        (json.dumps([USER] * (MAX_MESSAGES + 1)), f"at most {MAX_MESSAGES} messages are allowed, got"),
        (
            json.dumps({"messages": [USER], "tools": [{}] * 1025}),
            "at most 1024 tools are allowed, got 1025",
        ),
    ],
)
def test_wrong_messages_are_refused_by_place_and_reason(raw: str | bytes, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_conversation(raw)
    assert refused.value.field == "messages"
    assert reason in refused.value.reason
    assert len(str(refused.value)) < 300, "a huge input must not come back in the error"
    assert "\n" not in str(refused.value)
