"""Parsers of answers: six tool formats and reasoning, however their text is cut."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from quire.config import choices
from quire.frontend.chat import tool_formats
from quire.frontend.chat.formats import REASONING_FORMATS, TOOL_FORMATS, Answer, ChatParsing
from quire.frontend.chat.json_reader import JsonReader
from quire.frontend.chat.machine import Markers
from quire.frontend.chat.sink import AnswerSink
from quire.frontend.chat.thinking import ThinkSplitter
from quire.frontend.chat.tool_formats import Plain
from quire.frontend.output_processor import RequestProcessor
from quire.outputs import EngineCoreOutput, RequestOutput
from quire.request.sampling_params import SamplingParams
from quire_ensemble.chat_format import ChatFormat, parse_chat_format
from quire_ensemble.tokenizer import Tokenizer
from tests.fixtures.chat_templates import TEMPLATES
from tests.fixtures.chat_transcripts import THINKING, TOOLS, TRANSCRIPTS, Transcript
from tests.fixtures.checkpoints import write_tokenizer

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
Tokenizers = dict[str, Any]
DECODER: Any = None
"""Not used here."""
CASES = [(name, case) for name, cases in TRANSCRIPTS.items() for case in cases]


def parser(name: str, max_calls: int | None = None) -> Answer:
    found = TOOL_FORMATS[name]
    hidden = () if name in ("hermes", "glm") else found.markers
    sink = AnswerSink(SCHEMAS, hidden, max_calls, short_ids=name == "mistral")
    return Answer(sink, found.machine(sink, SCHEMAS), DECODER)


def thinking(is_open: bool) -> Answer:
    sink = AnswerSink(SCHEMAS)
    then = TOOL_FORMATS["hermes"].machine(sink, SCHEMAS)
    return Answer(sink, ThinkSplitter(sink, then, ("<think>", "</think>"), is_open=is_open), DECODER)


def parsed(answer: Answer, pieces: Iterable[str]) -> Transcript:
    """What the deltas of an answer are together, as a client puts them together."""
    content, reasoning = "", ""
    calls: list[list[str]] = []
    ids: set[str] = set()

    def take() -> None:
        nonlocal content, reasoning
        text, thought, deltas = answer.pop_deltas()
        content, reasoning = content + text, reasoning + thought
        for delta in deltas:
            function = delta["function"]
            if "id" in delta:
                assert delta["index"] == len(calls) and delta["type"] == "function"
                assert delta["id"] not in ids
                ids.add(delta["id"])
                calls.append([function["name"], ""])
            else:
                assert delta["index"] == len(calls) - 1, "pieces belong to the newest call"
                assert set(function) == {"arguments"}
            calls[delta["index"]][1] += function["arguments"]

    for piece in pieces:
        answer.feed(piece)
        take()
    answer.finish()
    take()
    if answer.has_all_calls:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    found = tuple((name, arguments) for name, arguments in calls)
    return Transcript("".join(pieces), content, found, reasoning, answer.has_all_calls or not calls)


@pytest.mark.row("A25", clauses=("formats",))
@pytest.mark.parametrize(("name", "case"), CASES)
def test_golden_transcripts_whole_and_cut_anywhere(name: str, case: str) -> None:
    """The six formats: whole, in two pieces cut at every place, by characters, and in random pieces."""
    expected = TRANSCRIPTS[name][case]
    text = expected.text
    assert parsed(parser(name), [text]) == expected
    assert parsed(parser(name), list(text)) == expected
    for cut in range(1, len(text)):
        assert parsed(parser(name), [text[:cut], text[cut:]]) == expected
    rng = random.Random(case)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(parser(name), pieces) == expected


def test_every_format_has_transcripts() -> None:
    assert set(TRANSCRIPTS) == set(TOOL_FORMATS) and len(TOOL_FORMATS) == 6


@pytest.mark.row("A26", clauses=("split",))
@pytest.mark.parametrize("case", THINKING)
def test_reasoning_is_apart_wherever_its_tags_are_cut(case: str) -> None:
    is_open, expected = THINKING[case]
    text = expected.text
    assert parsed(thinking(is_open), [text]) == expected
    assert parsed(thinking(is_open), list(text)) == expected
    for first in range(len(text)):
        for second in range(first, min(first + 12, len(text))):
            pieces = [text[:first], text[first:second], text[second:]]
            assert parsed(thinking(is_open), pieces) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[THINK]hm[THINK]more[/THINK]hi", Transcript("", "hi", (), "hmmore")),
        ("[THINK]hm[TOOL_CALLS]now[ARGS]{}", Transcript("", "", (("now", "{}"),), "hm")),
        ("[THINK]hm[/THINK][TOOL_CALLS]now[ARGS]{}", Transcript("", "", (("now", "{}"),), "hm")),
    ],
)
def test_special_tokens_within_reasoning(text: str, expected: Transcript) -> None:
    """A call in reasoning that was not closed was lost, and a second opening tag ended the reasoning."""
    tags = "[THINK]", "[/THINK]"
    for pieces in ([text], list(text)):
        sink = AnswerSink(SCHEMAS, (*TOOL_FORMATS["mistral"].markers, *tags), short_ids=True)
        then = TOOL_FORMATS["mistral"].machine(sink, SCHEMAS)
        found = parsed(Answer(sink, ThinkSplitter(sink, then, tags), DECODER), pieces)
        assert dataclasses.replace(found, text="") == expected


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_pieces_come_as_the_text_comes(name: str) -> None:
    """A name is told as soon as it is known, an argument before the next one begins."""
    text = next(one.text for one in TRANSCRIPTS[name].values() if len(one.calls) == 2)
    answer = parser(name)
    for end in range(len(text)):
        answer.feed(text[end])
        if "days" in text[: end + 1]:
            break
    deltas = answer.pop_deltas()[2]
    assert deltas[0]["function"]["name"] == "get_weather"
    assert "am" in "".join(delta["function"]["arguments"] for delta in deltas)


def test_a_call_in_the_analysis_channel_is_no_reasoning(tokenizers: dict[str, Any]) -> None:
    """gpt-oss writes calls of built-in tools there; its arguments were counted as reasoning tokens."""
    call = " to=functions.get_weather <|constrain|>json<|message|>" + '{"city": "Rome"}<|call|>'
    tokenizer, counts = tokenizers["harmony"], []
    for channel in ("commentary", "analysis"):
        text = f"<|channel|>analysis<|message|>hm, well<|end|><|start|>assistant<|channel|>{channel}{call}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        found, last = processed(tokenizer, ids, [1], ChatFormat(tools=TOOLS))
        assert found.calls == (("get_weather", '{"city": "Rome"}'),) and found.reasoning == "hm, well"
        counts.append(last.num_reasoning_tokens)
    assert counts[0] == counts[1] > 0


def test_each_value_of_a_call_has_the_limit_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_formats, "MAX_HELD", 10)

    def arguments(days: str, where: str) -> list[Any]:
        pairs = "".join(
            f"\n<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>"
            for name, value in (("days", days), ("where", where))
        )
        found = parsed(parser("glm"), [f"<tool_call>get_weather{pairs}\n</tool_call>"])
        return [json.loads(arguments) for _, arguments in found.calls if found.is_complete]

    assert arguments("1234567", '{"a": 1}') == [{"days": 1234567, "where": {"a": 1}}]
    assert arguments("1234567", '{"a": 12345}') == []


def test_a_comma_and_no_call_behind_it_are_content() -> None:
    call = '[TOOL_CALLS][{"name": "now", "arguments": {}}'
    found = parsed(parser("mistral"), [f"{call}, and more"])
    assert (found.calls, found.content) == ((("now", "{}"),), "and more")


def test_arguments_without_a_utf8_form_are_no_call() -> None:
    """A string of arguments may spell half of a surrogate pair: the response could not be written, and the
    request ended with an error."""
    call = {"name": "get_weather", "arguments": '{"city": "\ud83d"}'}
    text = f"<tool_call>{json.dumps(call)}</tool_call>"
    assert "\\ud83d" in text
    answer = parser("hermes")
    answer.feed(text)
    answer.finish()
    content, _, calls = answer.pop_deltas()
    assert (content, calls) == (text.removesuffix("</tool_call>") + "</tool_call>", [])


def test_no_calls_and_plain_text_ask_for_no_grammar() -> None:
    """A client's own chat_format with tool_choice none forced calls, and the response format text counted as
    a grammar that was asked for."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = parse_chat_format(json.dumps({"tools": [tool], "tool_choice": "none"}))
    assert (chat.tools, chat.tool_choice, chat.asks_for_grammar) == ([], "auto", False)
    assert not parse_chat_format('{"response_format": {"type": "text"}}').asks_for_grammar
    assert parse_chat_format('{"response_format": {"type": "json_object"}}').asks_for_grammar


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_no_more_calls_than_allowed(name: str) -> None:
    expected = next(one for one in TRANSCRIPTS[name].values() if len(one.calls) == 2)
    found = parsed(parser(name, max_calls=1), [expected.text])
    assert found.calls == expected.calls[:1]
    assert found.is_complete


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_any_text_is_parsed_the_same_however_it_is_cut(name: str) -> None:
    """Markers, pieces of calls and garbage in any order: nothing raises, nothing depends on the cuts."""
    rng = random.Random(name)
    whole = [one.text for one in TRANSCRIPTS[name].values()]
    parts = [
        *TOOL_FORMATS[name].markers,
        *'{}[]":,;',
        "now",
        '{"name": "now"',
        '"arguments": {',
        " \n",
        "<",
        "é🙂",
    ]
    parts += [
        "assistant",
        "<|channel|>analysis<|message|>",
        "to=functions.now",
        "\\u12",
        '"parameters": "{}"',
    ]
    for _ in range(400):
        text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        if rng.random() < 0.5:
            base = rng.choice(whole)
            at = rng.randrange(len(base))
            text = base[:at] + text + base[at:]
        expected = parsed(parser(name), [text])
        assert parsed(parser(name), list(text)) == expected
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(parser(name), pieces) == expected


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_megabytes_of_nonsense_are_read_once(name: str) -> None:
    """What waits for an end that never comes is bounded; the text is not read again with each piece."""
    markers = TOOL_FORMATS[name].markers
    for begin in (*markers, '{"name": "', markers[0] + '{"name": "now", "x": "', markers[0] * 2):
        for filling in ("x", " ", "{", "\n", '["', markers[0][:-1]):
            answer = parser(name)
            answer.feed(begin)
            for _ in range(16):
                answer.feed(filling * (2**16 // len(filling)))
            held = getattr(answer._parser, "_text", "")
            assert len(held) < 2**17
            answer.finish()
            answer.pop_deltas()


@pytest.mark.parametrize("size", [1000, 1018, 1024, 1025, 1100, 3000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[TOOL_CALLS]now[CALL_ID]{}[ARGS]{{}}x"),
        ("glm", "<tool_call>now\n<arg_key>a</arg_key>{}<arg_value>1</arg_value></tool_call>x"),
        ("deepseek", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}{{}}<｜tool▁call▁end｜>x"),
    ],
)
def test_what_is_too_far_away_is_so_however_the_text_is_cut(name: str, text: str, size: int) -> None:
    """Where all had come at once any distance was near enough, and the search for it went to the end of the
    text from every marker: 2 s for 64 Ki characters of `[TOOL_CALLS]x`."""
    text = text.format("\n" * size)
    whole = parsed(parser(name), [text])
    assert bool(whole.calls and whole.is_complete) == (size <= 1024)
    for step in (1, 7, 1000):
        assert parsed(parser(name), [text[i : i + step] for i in range(0, len(text), step)]) == whole


def test_a_bounded_search_looks_no_further() -> None:
    markers = Markers("<end>", "#")
    assert markers.find("12345<end>", 0, 4) is None and markers.find("12345#", 0, 4) is None
    assert markers.find("12345<end>", 0, 5) and markers.find("12345#", 1, 4)
    assert not markers.is_late("12345<end", 0, 5) and markers.is_late("12345<end.", 0, 5)


def test_json_reader_takes_what_is_json_and_no_more() -> None:
    good = [
        "{}",
        ' \n{"a" : [1, -0.5e+3, 0, true, false, null, "\\u00e9\\n", {}, []], "b": {"c": [[]]}}',
        '{"":{"":""}}',
    ]
    for text in good:
        json.loads(text)
        for pieces in ([text], list(text)):
            reader = JsonReader()
            assert sum(reader.feed(piece + "") for piece in pieces) == len(text)
            assert reader.is_done and not reader.is_bad
        assert JsonReader().feed(text + "}x") == len(text)
    bad = [
        "[]",
        "1",
        '{"a"}',
        '{"a":}',
        '{"a":1,}',
        "{,}",
        '{"a":01}',
        '{"a":1.}',
        '{"a":-}',
        '{"a":tru }',
        "{'a':1}",
        '{"a":"\\x"}',
        '{"a":"\n"}',
        '{"a":[1,]}',
        '{"a":[}',
        '{"a":1 2}',
        '{"a":NaN}',
        '{"a":+1}',
        '{"a":1e}',
        '{"a":"\\u12g4"}',
        '{"a":' * 70,
    ]
    for text in bad:
        for pieces in ([text], list(text)):
            reader = JsonReader()
            for piece in pieces:
                reader.feed(piece)
            assert reader.is_bad and not reader.is_done, text


class Template:
    """A tokenizer that has nothing but a template and special tokens."""

    def __init__(self, template: Any, special: Iterable[str] = ()) -> None:
        self.chat_template = template
        self._special = list(special)
        self.all_special_ids = list(range(len(self._special)))

    def __len__(self) -> int:
        return len(self._special)

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self._special)}

    def convert_ids_to_tokens(self, i: int) -> str:
        return self._special[i]

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(self._special[i] for i in ids)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", "harmony"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ x }}</think>", "deepseek", "think"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", ""),
        ("[TOOL_CALLS] [THINK]x[/THINK]", "mistral", "magistral"),
        ("<tool_call>{{ x }}<arg_key></think>", "glm", "think"),
        ("<tool_call>{{ x }}</tool_call>", "hermes", ""),
        ("Environment: ipython", "llama", ""),
        ({"default": "a", "tool_use": "<tool_call>"}, "hermes", ""),
        ("<|im_start|>", "", ""),
        (None, "", ""),
    ],
)
def test_a_template_says_what_the_model_writes(template: Any, tools: str, reasoning: str) -> None:
    found = ChatParsing(Template(template))
    assert (found.tools, found.reasoning) == (tools, reasoning)
    for name in TOOL_FORMATS:
        assert ChatParsing(Template(template), name, "none").tools == name
    for name in REASONING_FORMATS:
        assert ChatParsing(Template(template), "none", name).reasoning == name


def test_the_templates_of_the_families_are_known() -> None:
    found = {name: ChatParsing(Template(template)) for name, template in TEMPLATES.items()}
    assert {
        name: (one.tools, one.reasoning) for name, one in found.items() if one.tools or one.reasoning
    } == {
        "chatml_tools": ("hermes", ""),
        "qwen3": ("hermes", "think"),
        "llama3_tools": ("llama", ""),
        "mistral_tools": ("mistral", ""),
        "mistral_named": ("mistral", ""),
        "deepseek_v3": ("deepseek", ""),
        "deepseek_v3_1": ("deepseek", "think"),
        "glm": ("glm", "think"),
        "harmony": ("harmony", "harmony"),
        "reasoning": ("", "think"),
    }


def test_content_without_calls_is_as_it_is() -> None:
    sink = AnswerSink()
    assert parsed(Answer(sink, Plain(sink, {}), DECODER), ["\n a", " ", "b\n"]).content == "\n a b\n"


def test_the_configuration_names_the_formats() -> None:
    assert choices("tool_parser") == ("auto", "none", *TOOL_FORMATS)
    assert choices("reasoning_parser") == ("auto", "none", *REASONING_FORMATS)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    """Of each format, one to which all its markers are special tokens."""
    found = {}
    for name, one in TOOL_FORMATS.items():
        path = tmp_path_factory.mktemp(name)
        write_tokenizer(path)
        tokenizer = Tokenizer(path).hf
        tokenizer.add_special_tokens({"additional_special_tokens": [*one.markers, "<think>", "</think>"]})
        tokenizer.chat_template = "".join(one.signs) + "</think>"
        found[name] = tokenizer
    return found


def processed(
    tokenizer: Any,
    token_ids: list[int],
    sizes: list[int],
    chat: ChatFormat,
    reason: str = "stop",
    **sampling: Any,
) -> tuple[Transcript, RequestOutput]:
    """The answer of a request, as a stream's deltas make it, and its last output."""
    parsing = ChatParsing(tokenizer)
    params = SamplingParams(**sampling)
    processor = RequestProcessor("r", 1, params, tokenizer, new_answer=partial(parsing.answer, chat))
    (choice,) = processor.choices
    whole: RequestOutput | None = None
    position = 0
    while not choice.finished:
        size = sizes[position % len(sizes)]
        new, position = token_ids[position : position + size], position + size
        ends = reason if position >= len(token_ids) else None
        processor.process(EngineCoreOutput("r", new, finish_reason=ends))
        output = choice.pop_ready()
        if output is not None:
            whole = output.after(whole)
    assert whole is not None
    calls = tuple((one["function"]["name"], one["function"]["arguments"]) for one in whole.tool_calls)
    return Transcript("", whole.text, calls, whole.reasoning, whole.finish_reason == "tool_calls"), whole


@pytest.mark.parametrize(("name", "case"), CASES)
def test_golden_transcripts_as_tokens(name: str, case: str, tokenizers: Tokenizers) -> None:
    """The markers are special tokens, which the parser sees and the client does not."""
    expected, tokenizer = TRANSCRIPTS[name][case], tokenizers[name]
    token_ids = tokenizer.encode(expected.text, add_special_tokens=False)
    chat = ChatFormat(tools=TOOLS)
    content = expected.content
    for marker in (*TOOL_FORMATS[name].markers, "<think>", "</think>"):
        content = content.replace(marker, "")
    for sizes in ([1], [len(token_ids)], [3, 1, 7]):
        found, last = processed(tokenizer, token_ids, sizes, chat)
        assert (found.content, found.calls, found.reasoning) == (content, expected.calls, expected.reasoning)
        complete = bool(expected.calls) and expected.is_complete
        assert last.finish_reason == ("tool_calls" if complete else "stop")


@pytest.mark.row("A25", clauses=("length",))
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_cut_short_reports_length(name: str, tokenizers: Tokenizers) -> None:
    """Cut behind any token: the reason is length, and what came is a beginning of the whole's arguments."""
    expected = next(one for one in TRANSCRIPTS[name].values() if len(one.calls) == 2)
    token_ids = tokenizers[name].encode(expected.text, add_special_tokens=False)
    num_begun = set()
    for end in range(1, len(token_ids)):
        found, last = processed(tokenizers[name], token_ids[:end], [2], ChatFormat(tools=TOOLS), "length")
        assert last.finish_reason == "length"
        num_begun.add(len(found.calls))
        for (tool, arguments), whole in zip(found.calls, expected.calls, strict=False):
            assert tool == whole[0] and whole[1].startswith(arguments.rstrip("\ufffd"))
    assert num_begun == {0, 1, 2}


@pytest.mark.row("A26", clauses=("split",))
@pytest.mark.parametrize("special", [True, False])
def test_reasoning_is_counted_token_by_token(
    special: bool, tokenizers: dict[str, Any], tmp_path: Any
) -> None:
    if special:
        tokenizer = tokenizers["hermes"]
    else:
        write_tokenizer(tmp_path)
        tokenizer = Tokenizer(tmp_path).hf
        tokenizer.chat_template = "</think>"

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    parts = [ids("<think>"), ids("\nIs it 4? 日本\n"), ids("</think>"), ids("\n\nFour.")]
    assert (len(parts[0]) == 1) == special
    behind = [*parts[1], *parts[2], *parts[3]]
    for sizes in ([1], [100], [2, 5, 1]):
        found, last = processed(tokenizer, [*parts[0], *behind], sizes, ChatFormat())
        assert (found.content, found.reasoning) == ("Four.", "Is it 4? 日本\n")
        assert last.num_reasoning_tokens == len(parts[1]) + len(parts[2])
        opened = ChatFormat(prompt_end="assistant\n<think>\n")
        found, last = processed(tokenizer, behind, sizes, opened)
        assert (found.content, found.reasoning) == ("Four.", "Is it 4? 日本\n")
        assert last.num_reasoning_tokens == len(parts[1]) + len(parts[2])
        found, last = processed(tokenizer, parts[3], sizes, ChatFormat())
        assert (found.content, last.num_reasoning_tokens) == ("\n\nFour.", 0)


def test_stop_strings_end_an_answer_wherever_it_is(tokenizers: Tokenizers) -> None:
    text = "<think>abc</think>def"
    token_ids = tokenizers["hermes"].encode(text, add_special_tokens=False)
    found, last = processed(tokenizers["hermes"], token_ids, [1], ChatFormat(), stop=("b",))
    assert (found.content, found.reasoning, last.finish_reason, last.stop_reason) == ("", "a", "stop", "b")
    found, last = processed(tokenizers["hermes"], token_ids, [4], ChatFormat(), stop=("e",))
    assert (found.content, found.reasoning, last.stop_reason) == ("d", "abc", "e")
