"""Tokenizer: equal to transformers for text and chat templates, safe against odd checkpoints and clients."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire_common.errors import InputError
from quire_ensemble import template_bounds
from quire_ensemble.errors import TokenizerError
from quire_ensemble.messages import MAX_BYTES, parse_conversation
from quire_ensemble.tokenizer import TOKENIZER_FILES, Tokenizer
from tests.fixtures.chat_templates import CONVERSATIONS, TEMPLATES, TOOLS
from tests.fixtures.checkpoints import write_tokenizer

PACKAGE = Path(__file__).resolve().parents[2] / "ensemble" / "quire_ensemble"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


def with_template(checkpoint: Path, path: Path, template: str | None) -> Path:
    """A copy of a checkpoint's tokenizer with another chat template, or none."""
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").unlink()
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def render(tokenizer: Tokenizer, messages: Any, max_bytes: int = MAX_BYTES) -> str:
    return tokenizer.render(parse_conversation(json.dumps(messages)), max_bytes)


def hf_ids(path: Path, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    """Token ids by transformers itself, from a tokenizer of its own, in Jinja's own sandbox."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
        chat_template_utils._compile_jinja_template.cache_clear()
        ids: Any = loaded.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
        chat_template_utils._compile_jinja_template.cache_clear()
    return ids


@pytest.mark.row("A27", clauses=("templates", "tools"))
@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_equal_apply_chat_template(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path = with_template(checkpoint, tmp_path / "t", TEMPLATES[name])
    tokenizer = Tokenizer(path)
    compared = 0
    for messages, tools in CONVERSATIONS[name]:
        for prompt in (True, False):
            expected = hf_ids(path, messages, tools=tools, add_generation_prompt=prompt)
            whole = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
            assert tokenizer.encode_chat(json.dumps(whole))[0] == expected
            assert tokenizer.encode_chat(json.dumps(whole, ensure_ascii=False).encode())[0] == expected
            assert expected.count(tokenizer.hf.bos_token_id) <= 1, "the template's BOS and no second one"
            compared += len(expected)
    assert compared > 100


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if any(tools for _, tools in CONVERSATIONS[name])]
)
def test_arguments_of_earlier_calls_may_be_json_text(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """As OpenAI's clients send them: templates that write the JSON of an object wrote it twice, as a string
    with quotes within quotes (or raised, where they go through the object's items)."""
    path = with_template(checkpoint, tmp_path / "t", TEMPLATES[name])
    tokenizer, compared = Tokenizer(path), 0
    for messages, tools in CONVERSATIONS[name]:
        sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
        for call in (call for message in sent for call in message.get("tool_calls", [])):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            compared += 1
        whole = json.dumps({"messages": sent, "tools": tools})
        expected = hf_ids(path, messages, tools=tools, add_generation_prompt=True)
        assert tokenizer.encode_chat(whole)[0] == expected
    assert compared


_CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ WRITTEN }};{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("c.function.name + c.function.arguments", ['f{"a":  1}', 'f{"a": 1}', "f", "f{oops", "f[1]"]),
        ("c.function.arguments", ['{"a":  1}', '{"a": 1}', "", "{oops", "[1]"]),
        ("'' ~ c.function.arguments", ['{"a":  1}', '{"a": 1}', "", "{oops", "[1]"]),
        (
            "c.function.arguments if c.function.arguments is string else ''",
            ['{"a":  1}', '{"a": 1}', "", "{oops", "[1]"],
        ),
        ("c.function.arguments | tojson", ['{"a": 1}', '{"a": 1}', "{}", '"{oops"', '"[1]"']),
        ("c.function.arguments.a or 'none'", ["1", "1", "none", "none", "none"]),
    ],
)
def test_arguments_reach_a_template_as_it_reads_them(
    written: str, expected: list[str], checkpoint: Path, tmp_path: Path
) -> None:
    """A template that appends JSON text gets that, as the client wrote it; the others get an object. What is
    no object stays as it came, and an empty text is no arguments."""
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", _CALLS.replace("WRITTEN", written)))
    arguments: list[Any] = ['{"a":  1}', {"a": 1}, "", "{oops", "[1]"]
    calls = [{"type": "function", "function": {"name": "f", "arguments": one}} for one in arguments]
    text = render(tokenizer, [{"role": "assistant", "tool_calls": calls}])
    assert text == "".join(f"{one};" for one in expected)


def test_there_are_ten_templates_and_some_use_tools() -> None:
    assert len(TEMPLATES) >= 10
    assert sum(any(tools for _, tools in CONVERSATIONS[name]) for name in TEMPLATES) >= 10


def test_tools_reach_the_prompt(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", TEMPLATES["chatml_tools"]))
    messages = [{"role": "user", "content": "weather?"}]
    text = render(tokenizer, {"messages": messages, "tools": TOOLS})
    assert TOOLS[0]["function"]["name"] in text
    assert TOOLS[0]["function"]["name"] not in render(tokenizer, messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_that_a_template_does_not_show_are_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", TEMPLATES[name]))
    asked = {"messages": [{"role": "user", "content": "weather?"}], "tools": TOOLS}
    render(tokenizer, {**asked, "tool_choice": "none"})
    if "tools" in TEMPLATES[name]:
        assert TOOLS[0]["function"]["name"] in render(tokenizer, asked)
    else:
        with pytest.raises(InputError, match="chat template has no place for tools: the model would not see"):
            render(tokenizer, asked)


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "get_number", "arguments": {}}}]
SAYS_ALL = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
"""As SmolLM2's: every message has a content."""


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_call_without_content_reads_as_one_with_an_empty_one(
    checkpoint: Path, tmp_path: Path, content: dict[str, Any]
) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", SAYS_ALL))
    call = {"role": "assistant", "tool_calls": CALLS}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "42.69"}
    assert render(tokenizer, [{**call, **content}, result]) == "<assistant><tool>42.69"
    asks = SAYS_ALL.replace("m['content']", "(m.content if m.content is defined else 'none')")
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "u", asks))
    assert render(tokenizer, [{**call, **content}, result]).startswith("<assistant>none"), (
        "as in transformers"
    )


def test_an_empty_list_of_calls_is_none(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", TEMPLATES["llama3_tools"]))
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    expected = render(tokenizer, [user, answer, user])
    assert render(tokenizer, [user, {**answer, "tool_calls": []}, user]) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_message_goes_on(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path = with_template(checkpoint, tmp_path / "t", TEMPLATES[name])
    messages = [
        {"role": "user", "content": "Name three colours."},
        {"role": "assistant", "content": "The first colour is"},
    ]
    asked = {"messages": messages, "continue_final_message": True}
    tokenizer = Tokenizer(path)
    try:
        expected = hf_ids(path, messages, continue_final_message=True)
    except Exception:  # a template that puts something into an answer
        with pytest.raises(InputError, match="refused by the chat template"):
            tokenizer.encode_chat(json.dumps(asked))
        return
    assert tokenizer.encode_chat(json.dumps(asked))[0] == expected
    assert render(tokenizer, asked).endswith("The first colour is")


def test_template_kwargs_reach_the_template_and_reserved_ones_do_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(
        with_template(checkpoint, tmp_path / "t", "{{ messages[0].content }}{{ mood or '' }}")
    )
    whole: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    whole["chat_template_kwargs"] = {"mood": "!"}
    assert render(tokenizer, whole) == "a!"
    ours = ("chat_template", "tokenize", "messages", "conversations", "raise_exception", "namespace", "range")
    for name in (*ours, "eos_token", "bos_token", "pad_token", "mask_token"):
        whole["chat_template_kwargs"] = {name: "{{ 7 * 7 }}"}
        with pytest.raises(InputError, match=f"messages: chat_template_kwargs must not set '{name}'"):
            render(tokenizer, whole)


def test_parts_reach_templates_that_know_them_and_are_joined_for_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    knows = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% if not loop.last %}|{% endif %}{% endfor %}"
        "{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render(Tokenizer(with_template(checkpoint, tmp_path / "1", knows)), messages) == "a|b"
    simple = Tokenizer(with_template(checkpoint, tmp_path / "2", "{{ messages[0].content }}"))
    assert render(simple, messages) == "a\nb"
    raises = Tokenizer(with_template(checkpoint, tmp_path / "3", "{{ messages[0].content + '.' }}"))
    assert render(raises, messages) == "a\nb."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.there }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_refusing_or_broken_template_is_an_error_of_messages(
    template: str, reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", template))
    with pytest.raises(InputError, match=f"messages: refused by the chat template: .*{reason}") as refused:
        tokenizer.encode_chat('[{"role": "user", "content": "a"}]')[0]
    assert refused.value.field == "messages"


def test_a_checkpoint_without_template_says_so(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", None))
    with pytest.raises(InputError, match="messages: the checkpoint has no chat template; send text_input"):
        tokenizer.encode_chat('[{"role": "user", "content": "a"}]')[0]


def test_text_equals_transformers_and_decodes_back(checkpoint: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(checkpoint))
    for text in ("Hello, world", "naïve café ☕", "日本語のテキスト", "👩‍👩‍👧‍👦 family", " a  b\n", "\x00"):
        assert tokenizer.encode(text) == hf(text)["input_ids"] == [1, *tokenizer.encode(text, False)]
        assert tokenizer.hf.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "must not be empty"),
        (b"ab\xff", "invalid UTF-8 at byte 2 of 3"),
        (b"\xed\xa0\x80", "invalid UTF-8 at byte 0 of 3"),
        ("a€".encode()[:-1], "invalid UTF-8 at byte 1 of 3"),
    ],
)
def test_wrong_bytes_name_field_and_offset(tokenizer: Tokenizer, raw: bytes, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        tokenizer.encode_bytes("prompt", raw)
    assert refused.value.field == "prompt"
    assert reason in refused.value.reason


def test_an_unpaired_surrogate_from_json_is_the_clients_error(tokenizer: Tokenizer) -> None:
    """JSON spells what UTF-8 cannot; tokenizers raises a TypeError for it, which is not a bug of ours."""
    with pytest.raises(InputError, match=r"messages: unpaired surrogate U\+D83D"):
        tokenizer.encode_chat('[{"role": "user", "content": "\\ud83d"}]')[0]
    with pytest.raises(InputError, match=r"text_input: unpaired surrogate U\+DC00 at character 1"):
        tokenizer.encode("a\udc00b")


def test_truncation_and_padding_in_the_file_do_not_apply(checkpoint: Path, tmp_path: Path) -> None:
    """Checkpoints saved after training often carry both; a prompt must not lose its tail nor gain pads."""
    path = tmp_path / "t"
    shutil.copytree(checkpoint, path)
    values = json.loads((path / "tokenizer.json").read_text("utf-8"))
    values["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    values["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    text = "one two three four five six seven"
    assert Tokenizer(path).encode(text) == Tokenizer(checkpoint).encode(text)


def test_many_threads_share_one_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"thread {n} says {'word ' * (n % 7)}" for n in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(tokenizer.encode, texts)) == expected


def test_a_plain_tokenizer_json_is_enough(checkpoint: Path, tmp_path: Path) -> None:
    assert not Tokenizer.exists(tmp_path)
    shutil.copy(checkpoint / "tokenizer.json", tmp_path)
    assert Tokenizer.exists(tmp_path)
    assert Tokenizer(tmp_path).encode("hello") == Tokenizer(checkpoint).encode("hello")


def test_missing_and_broken_tokenizers_are_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="absent: tokenizer directory does not exist"):
        Tokenizer(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=f"no tokenizer files; expected one of {TOKENIZER_FILES[0]}"):
        Tokenizer(tmp_path)
    text = (checkpoint / "tokenizer.json").read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(TokenizerError, match="tokenizer cannot be loaded") as broken:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(broken.value)
    assert "\n" not in str(broken.value)


def _with_parts(checkpoint: Path, target: Path, **parts: Any) -> Path:
    """A tokenizer.json with other parts."""
    values = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))
    (target / "tokenizer.json").write_text(json.dumps(values | parts), encoding="utf-8")
    return target


def test_what_a_tokenizer_gives_up_on_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Llama 3's pattern goes back over 12 million spaces: a panic, which no `except Exception` sees, ended
    the frontend's thread for long texts, and all that came behind waited for ever."""
    cut = {"type": "Split", "pattern": {"Regex": "(a|a)*b"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(_with_parts(checkpoint, tmp_path, pre_tokenizer=cut))
    with pytest.raises(InputError, match=r"the tokenizer gives up on it: .*retry-limit") as refused:
        tokenizer.encode("a" * 40 + "cb")
    assert refused.value.field == "text_input"
    assert tokenizer.encode("ab")


def test_a_tokenizer_whose_loading_panics_is_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "continuing_subword_prefix": "####"}
    with pytest.raises(TokenizerError, match="tokenizer cannot be loaded: range end"):
        Tokenizer(_with_parts(checkpoint, tmp_path, model=model, added_tokens=[], post_processor=None))


def test_code_of_a_checkpoint_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "t"
    shutil.copytree(checkpoint, path)
    marker = tmp_path / "was_run"
    (path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    try:
        Tokenizer(path)
    except TokenizerError as refused:
        assert str(path) in str(refused)
    assert not marker.exists()


def test_importing_the_package_is_light_and_never_reaches_quire() -> None:
    """Triton's auto-complete stub imports these before every load; only loading a checkpoint may be heavy."""
    of_the_encoder = {"vision_tower", "vision_families", "vision_weights", "weight_files"}
    modules = sorted(
        f"quire_ensemble.{file.stem}"
        for file in PACKAGE.glob("*.py")
        if file.stem not in {"__init__", *of_the_encoder}
    )
    assert "quire_ensemble.generator_schema" in modules
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'tritonclient', 'quire')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert ran.stdout.strip() == "[]"


BLOWN_UP = {
    "indented": "{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ messages[-1].content }}",
    "repeated": "{% for m in messages %}{{ m.content }}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", BLOWN_UP)
def test_a_template_does_not_make_a_long_text_of_a_short_one(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Tools of 2 MB, 60 levels deep, became 251 MB of spaces."""
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", BLOWN_UP[name]))
    wide = "[" * 50 + "1" + ",1" * 2000 + "]" * 50
    named = [f"""{{"function": {{"name": "f{i}", "a": {wide}}}}}""" for i in range(10)]
    tools = f"[{', '.join(named)}]"
    messages = [{"role": "user", "content": f"question {i}"} for i in range(20)]
    short, long = ({"messages": messages, "tools": json.loads(text)} for text in ("[]", tools))
    assert "question 19" in render(tokenizer, short, 2**18)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"messages: the chat template makes more than 262144 bytes of the"):
        render(tokenizer, long, 2**18)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * 2**18
    assert render(tokenizer, long).count("1,") == 20_000 * (20 if name == "repeated" else 1)


BOMBS = {
    "text": "{{ 'a' * 10**9 }}",
    "text, before": "{{ 10**9 * 'a' }}",
    "list": "{% set x = [0] * 10**9 %}",
    "number": "{{ 9 ** (9 ** 9) }}",
    "doubled": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "joined": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "constant": "{% if messages|length > 9 %}{{ 'a'|center(10**8) }}{% endif %}{{ 'a' * 10**8 }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_does_not_make_memory(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """What is constant was computed, and written into Python's source, while the template was compiled."""
    tokenizer = Tokenizer(with_template(checkpoint, tmp_path / "t", BOMBS[name]))
    tracemalloc.start()
    with pytest.raises(InputError, match="makes more than 16777216"):
        render(tokenizer, [{"role": "user", "content": "a"}])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**27


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_takes_no_time_without_end(
    template: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with such a model never became ready, nor any other of its models."""
    monkeypatch.setattr(template_bounds, "MAX_S", 0.1)
    path = with_template(checkpoint, tmp_path / "t", template)
    with pytest.raises(TokenizerError) as refused:
        Tokenizer(path).warm_up()
    assert str(refused.value) == f"{path}: refused by the chat template: it takes more than 0.1 s"


def test_a_tokenizer_whose_template_takes_all_memory_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    path = with_template(checkpoint, tmp_path / "t", "{% set x = 'a'|center(10**11) %}")
    with pytest.raises(TokenizerError, match=r"refused by the chat template: MemoryError$"):
        Tokenizer(path).warm_up()
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    Tokenizer(with_template(checkpoint, tmp_path / "none", None)).warm_up()


def test_operators_in_templates_are_those_of_jinja(checkpoint: Path, tmp_path: Path) -> None:
    template = (
        "{% set m = messages[0] %}{{ 'a' ~ 1 ~ none ~ nothing ~ [m.content] ~ true }}|{{ 2 ** 10 * -3 }}|"
        "{{ ['x'] * 2 + ['y'] }}|{{ 'ab' * 2 }}|{{ -1 * 'ab' }}|{{ 1.5 * 2 ** 0.5 }}|{{ '%5d' % 3 }}|"
        "{% macro f(x) %}<{{ x ~ caller() }}>{% endmacro %}{% call f(m.content) %}{{ loop }}c{% endcall %}|"
        "{% for i in [1, 2] recursive %}{{ i ~ '/' }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}"
        "{% set b %}{{ '<' ~ ('&'|e) }}{% endset %}{{ b ~ b }}{{ none }}{{ nothing }}"
    )
    path = with_template(checkpoint, tmp_path / "t", template)
    messages = [{"role": "user", "content": "hello"}]
    expected = hf_ids(path, messages)
    assert len(expected) > 30 and Tokenizer(path).encode_chat(json.dumps(messages))[0] == expected


def test_json_in_templates_is_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    options = ("", "indent=2", "ensure_ascii=True", "sort_keys=True, separators=(',', ':')")
    paths = [
        with_template(
            checkpoint,
            tmp_path / str(number),
            f"{{{{ tools | tojson({given}) }}}}{{{{ messages[0].content | tojson }}}}",
        )
        for number, given in enumerate(options)
    ]
    other = {"b": [1, 2.5, None, True, {}], "a": 'ü\u2028😀<&>"', "c": {"d": []}}
    tools = [{"type": "function", "function": {"name": "f", "z": other}}]
    messages = [{"role": "user", "content": "a"}]
    asked = json.dumps({"messages": messages, "tools": tools})
    ids = [Tokenizer(path).encode_chat(asked)[0] for path in paths]
    script = (
        "import json, sys; from transformers import AutoTokenizer\n"
        "a = json.loads(sys.argv[1])\n"
        "for path in sys.argv[2:]:\n"
        "    t = AutoTokenizer.from_pretrained(path, local_files_only=True)\n"
        "    print(t.apply_chat_template(a['messages'], tools=a['tools'], tokenize=True, return_dict=False, "
        "add_generation_prompt=True))"
    )
    command = [sys.executable, "-c", script, asked, *map(str, paths)]
    told = subprocess.run(command, capture_output=True, check=True).stdout.splitlines()
    assert [json.loads(line) for line in told] == ids, "in a process whose templates are not bounded"
