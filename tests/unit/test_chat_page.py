"""The gateway's chat page in headless Chromium, before a KServe server in this process (`fake_kserve`).

Where there is no Chromium these tests are skipped, so they name no clause.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire_client.openai.app import GatewaySettings
from quire_client.openai.keys import entry_of
from tests.fixtures.chromium import CHROMIUM, Page
from tests.unit.fake_kserve import FakeKServe, read_inputs
from tests.unit.test_openai_gateway import PIXEL, WAIT, gateway

LISTED = "document.querySelector('#model option[value=chat]')"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeKServe]:
    with FakeKServe() as fake:
        yield fake


@pytest.fixture(scope="module")
def base(server: FakeKServe) -> Iterator[str]:
    with gateway(GatewaySettings(server.url)) as url:
        yield url


@pytest.fixture(scope="module")
def browser(base: str) -> Iterator[Page]:
    with Page(base) as page:
        page.wait(LISTED)
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """With an empty conversation; afterwards it has complained about nothing."""
    browser.run("document.getElementById('new').click()")
    browser.messages.clear()
    yield browser
    assert browser.messages == []


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('question').focus()")
    page.type(text)
    page.press("Enter")


DONE = "document.querySelector('#send').ariaLabel === 'Send' && document.querySelector('.note')"


def test_the_page_allows_nothing_from_elsewhere(base: str) -> None:
    """Without a browser: the policy names what is in the page, and the page loads nothing."""
    reply = httpx.get(base, timeout=WAIT)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\son\w+=", reply.text
    )
    assert not re.search(r"""(src|href)=["']""", reply.text)
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_what_a_model_repeats_does_not_stop_the_page(base: str) -> None:
    """Of 4000 beginnings of links each was read to the end of the text, seconds for each piece that came."""
    (pattern,) = re.findall(r"const INLINE = /(.*)/g;", httpx.get(base, timeout=WAIT).text)
    told = "a *b* `c` **d** [e](https://f) ``g`h``"
    assert [found[0] for found in re.finditer(pattern, told)] == told.split(" ", 1)[1].split()
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", re.sub(r"\[\^(?:\\.|[^\]\\])*\]", "x", pattern))
    assert not re.search(r"[+*]", bare), f"unbounded: {bare}"


def test_the_page_is_served_without_a_key(server: FakeKServe, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"alice": entry_of("one")}), "utf-8")
    with gateway(GatewaySettings(server.url, api_keys=file)) as url:
        assert httpx.get(url, timeout=WAIT).status_code == 200
        if CHROMIUM is None:
            return
        with Page(url) as page:
            page.wait("document.activeElement.id === 'key'")
            page.type("wrong")
            page.press("Tab")
            page.wait("document.getElementById('empty').innerText.includes('API key')")
            page.run("document.getElementById('key').select()")
            page.type("one")
            page.press("Tab")
            page.wait(LISTED)
            page.wait("document.getElementById('empty').innerText.includes('Enter sends')")
            page.messages.clear()  # the browser notes the answers 401


@needs_chromium
def test_a_conversation(page: Page, server: FakeKServe) -> None:
    ask(page, "tokens 3")
    page.wait(DONE)
    assert page.text(".user .text") == ["tokens 3"]
    assert page.text(".answer .text") == ["t0 t1 t2 "]
    assert page.text(".note")[0].startswith("3 tokens")
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
    told = json.loads(read_inputs(server.requests[-1])["messages"][0])
    assert [(message["role"], message["content"]) for message in told] == [
        ("user", "tokens 3"),
        ("assistant", "t0 t1 t2 "),
        ("user", "tokens 1"),
    ]


@needs_chromium
def test_keys(page: Page, server: FakeKServe) -> None:
    """Shift+Enter begins a line; Escape stops the answer, on the server too."""
    page.run("document.getElementById('question').focus()")
    page.type("endless")
    page.press("Enter", shift=True)
    assert page.run("document.getElementById('question').value") == "endless\n"
    server.ended.clear()
    page.press("Enter")
    page.wait("document.querySelector('.answer .text')?.innerText.includes('first')")
    assert page.run("document.getElementById('send').ariaLabel") == "Stop"
    page.press("Escape")
    page.wait(DONE)
    assert page.text(".note") == ["stopped"]
    assert server.ended.wait(WAIT)


@needs_chromium
def test_the_stop_button(page: Page, server: FakeKServe) -> None:
    server.ended.clear()
    ask(page, "endless")
    page.wait("document.querySelector('.answer .text')?.innerText.includes('first')")
    page.run("document.getElementById('send').click()")
    page.wait(DONE)
    assert server.ended.wait(WAIT)


@needs_chromium
def test_reasoning_is_folded_and_tool_calls_are_shown(page: Page, server: FakeKServe) -> None:
    ask(page, "think")
    page.wait(DONE)
    assert page.text(".answer .text") == ["19"]
    folded = page.run("[...document.querySelectorAll('.reasoning')].map(e => [e.open, e.textContent])")
    assert folded == [[False, "Thoughtsso what"]]
    page.run("document.getElementById('new').click()")
    page.run("document.getElementById('tools').value = '[{\"type\": \"function\"}]'")
    ask(page, "call")
    page.wait(DONE)
    page.run("document.getElementById('tools').value = ''")
    assert page.text(".call summary code") == ["f0", "f1"]
    assert json.loads(page.text(".call pre code")[1]) == {"x": 1}
    page.run(
        "document.querySelectorAll('.call textarea').forEach((e, i) => { e.value = `tokens ${i + 1}`; })"
    )
    page.run("[...document.querySelectorAll('.calls > button')].at(-1).click()")
    page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
    assert page.text(".answer .text")[1] == "t0 t1 "
    told = json.loads(read_inputs(server.requests[-1])["messages"][0])
    results = [(m["tool_call_id"], m["content"]) for m in told if m["role"] == "tool"]
    assert results == [("call_0", "tokens 1"), ("call_1", "tokens 2")]


@needs_chromium
def test_images(page: Page, server: FakeKServe, tmp_path: Path) -> None:
    for name in ("a.gif", "b.gif"):
        (tmp_path / name).write_bytes(PIXEL)
    page.upload("#files", tmp_path / "a.gif", tmp_path / "b.gif")
    page.wait("document.querySelectorAll('#thumbs img').length === 2")
    page.run("document.querySelector('#thumbs button').click()")
    ask(page, "what is it?")
    page.wait("document.querySelector('.error')")  # the fake looks for its verb and finds none
    (message,) = json.loads(read_inputs(server.requests[-1])["messages"][0])
    url = "data:image/gif;base64," + base64.b64encode(PIXEL).decode()
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is it?"},
    ]
    assert page.run("document.querySelectorAll('#thumbs img').length") == 0
    assert page.run("document.querySelectorAll('.user img').length") == 1
    page.messages.clear()  # the browser notes the answer 500


HOSTILE = """# Title
<img src=x onerror="document.title='bad'"> **bold** *soft* `code <b>`
- [good](https://example.com/?a=1) [bad](javascript:alert(1))
1. one

```js
<script>document.title = 'bad'</script>
```
> quoted"""


@needs_chromium
def test_text_of_the_model_is_no_markup(page: Page) -> None:
    shown: Any = page.run(
        f"""(() => {{
          const place = document.createElement("div");
          place.append(...markdown({json.dumps(HOSTILE)}));
          document.body.append(place);
          const found = {{
            html: place.innerHTML, tags: [...place.querySelectorAll("*")].map(e => e.tagName.toLowerCase()),
            links: [...place.querySelectorAll("a")].map(e => e.href), text: place.textContent,
          }};
          place.remove();
          return found;
        }})()"""
    )
    allowed = {"h2", "p", "strong", "em", "code", "ul", "ol", "li", "a", "pre", "blockquote", "button"}
    assert set(shown["tags"]) == allowed
    assert shown["links"] == ["https://example.com/?a=1"]
    assert "&lt;img src=x" in shown["html"] and "[bad](javascript:alert(1))" in shown["text"]
    assert page.run("document.title") == "Quire"


LISTS = """1. first
   - inner *one*
     goes on
   - inner two
     1. deepest

2. second

- other
| a | b \\| c |
|:--|--:|
| 1 | <b>2</b> |
| 3 |
end"""


@needs_chromium
def test_tables_and_lists_in_lists(page: Page) -> None:
    shown: str = page.run(
        f"""(() => {{
          const place = document.createElement("div");
          place.append(...markdown({json.dumps(LISTS)}));
          return place.innerHTML;
        }})()"""
    )
    numbers, bullets, table, end = re.split(r"(?<=</ol>)(?=<ul><li>other)|(?=<div)|(?<=</div>)", shown)
    assert numbers == (
        '<ol start="1"><li>first<ul><li>inner <em>one</em>\ngoes on</li>'
        '<li>inner two<ol start="1"><li>deepest</li></ol></li></ul></li><li>second</li></ol>'
    )
    assert (bullets, end) == ("<ul><li>other</li></ul>", "<p>end</p>")
    right = '<td style="text-align: right;">'
    assert table == (
        '<div class="table" tabindex="0"><table>'
        f"<thead><tr><th>a</th>{right.replace('td', 'th')}b | c</th></tr></thead>"
        f"<tbody><tr><td>1</td>{right}&lt;b&gt;2&lt;/b&gt;</td></tr>"
        '<tr><td>3</td><td colspan="1"></td></tr></tbody>'
        "</table></div>"
    )


@needs_chromium
def test_code_in_lists(page: Page) -> None:
    """Only two spaces of indent made a block of it: with three, as behind "1. ", fences stood in the text and
    the code's own indents were lost."""
    for indent in ("  ", "   ", "    "):
        text = (
            f"1. first\n{indent}```python\n{indent}if x:\n{indent}    y\n\n z\n{indent}```\n   more\n\n2. b"
        )
        for gap in ("", "\n"):
            shown: str = page.run(
                f"""(() => {{
                  const place = document.createElement("div");
                  place.append(...markdown({json.dumps(text.replace("first", "first" + gap))}));
                  for (const button of place.querySelectorAll("button")) button.remove();
                  return place.innerHTML;
                }})()"""
            )
            assert shown == (
                '<ol start="1"><li>first<pre tabindex="0"><code>if x:\n    y\n\nz</code></pre>\nmore</li>'
                "<li>b</li></ol>"
            )


@needs_chromium
def test_what_a_model_writes_ends_the_page_nowhere(page: Page) -> None:
    """Each text is drawn: 20 000 beginnings of each kind of block, and a list of 500 depths."""
    for text in (
        "- " * 20_000,
        "|" * 20_000,
        "|-|\n" * 5_000,
        "\n".join(" " * n + "- x" for n in range(500)),
    ):
        assert page.run(f"markdown({json.dumps(text)}).length") >= 1


@needs_chromium
def test_a_wide_table_of_short_lines_is_as_large_as_its_text(page: Page) -> None:
    """Each line had a cell for each column: a million of 6 KB, drawn with every token."""
    for columns in (100, 1000):
        text = "|" + "a|" * columns + "\n|" + "-|" * columns + "\n" + "|\n" * 1000
        found = page.run(
            f"""(() => {{
              const place = document.createElement("div");
              place.append(...markdown({json.dumps(text)}));
              return [place.querySelectorAll("*").length, place.querySelectorAll("table").length];
            }})()"""
        )
        assert found[0] <= 2 * len(text) and found[1] == (1 if columns == 100 else 0)


@needs_chromium
def test_lines_may_end_as_in_windows(page: Page) -> None:
    """A list was no list."""
    tags = page.run("markdown('a\\r\\n- x\\r\\n\\r\\n## b\\r\\n').map(e => e.tagName)")
    assert tags == ["P", "UL", "H3"]


CLICK = "[...document.querySelectorAll('.actions button')].filter(e => e.textContent === '{}').at(-1).click()"


@needs_chromium
def test_an_answer_again_and_a_question_in_other_words(page: Page, server: FakeKServe) -> None:
    def asked() -> list[tuple[str, str]]:
        told = json.loads(read_inputs(server.requests[-1])["messages"][0])
        return [(message["role"], message["content"]) for message in told]

    ask(page, "tokens 2")
    page.wait(f"{DONE} && document.querySelector('.again')")
    page.run(CLICK.format("Again"))
    page.wait(f"{DONE} && document.querySelector('.again')")
    assert asked() == [("user", "tokens 2")] and page.text(".answer .text") == ["t0 t1 "]
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
    assert page.run("document.querySelectorAll('.again').length") == 1, "of the last answer alone"
    page.run("document.querySelector('.user .actions button').click()")
    assert page.run("document.querySelectorAll('.dropped').length") == 4
    page.press("Escape")
    assert page.run("document.querySelectorAll('.dropped').length") == 0
    assert page.run("document.getElementById('question').value") == ""
    page.run("document.querySelector('.user .actions button').click()")
    assert page.run("document.getElementById('question').value") == "tokens 2"
    page.run("document.getElementById('question').value = 'tokens 3'")
    page.press("Enter")
    page.wait(f"{DONE} && document.querySelector('.again')")
    assert asked() == [("user", "tokens 3")]
    assert page.text(".user .text") == ["tokens 3"] and page.text(".answer .text") == ["t0 t1 t2 "]


@needs_chromium
def test_what_cannot_be_copied_or_sent_is_told(page: Page) -> None:
    """Copy did nothing that could be seen where there is no clipboard, as on a page that came by plain HTTP.
    A key with a character that came along when it was pasted was a server that cannot be reached."""
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelector('.again')")
    page.run("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    copy = "document.querySelector('.answer .actions button')"
    page.run(f"{copy}.click()")
    page.wait(f"{copy}.innerText !== 'Copy'")
    assert page.run(f"{copy}.innerText") == "The browser does not allow it"
    page.run("delete navigator.clipboard; document.getElementById('key').value = 'sk-\\u200b1'")
    ask(page, "tokens 1")
    page.wait("document.querySelector('.error')")
    page.run("document.getElementById('key').value = ''")
    assert page.text(".error") == ["The API key has characters that no key has."]


@needs_chromium
def test_editing_leaves_a_draft_alone(page: Page, tmp_path: Path) -> None:
    """Edit and Escape took it away, and its images went into the question that was edited."""
    (tmp_path / "a.gif").write_bytes(PIXEL)
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelector('.again')")
    page.upload("#files", tmp_path / "a.gif")
    page.wait("document.querySelectorAll('#thumbs img').length === 1")
    page.run("document.getElementById('question').value = 'a draft'")
    page.run(CLICK.format("Edit"))
    assert page.run("document.getElementById('question').value") == "tokens 1"
    assert page.run("document.querySelectorAll('#thumbs img').length") == 0
    page.press("Escape")
    assert page.run("document.getElementById('question').value") == "a draft"
    assert page.run("document.querySelectorAll('#thumbs img').length") == 1


@needs_chromium
def test_another_answer_ends_editing(page: Page) -> None:
    """It went on, so that the next question took the place of the one that was edited, and all behind it."""
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelector('.again')")
    page.run(CLICK.format("Edit"))
    page.run(CLICK.format("Again"))
    page.wait(f"{DONE} && document.querySelector('.again')")
    assert page.run("document.querySelectorAll('.dropped').length") == 0
    assert page.run("document.getElementById('question').value") == ""
    ask(page, "tokens 2")
    page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
    assert page.text(".user .text") == ["tokens 1", "tokens 2"]


@needs_chromium
def test_a_conversation_survives_a_reload(base: str, server: FakeKServe, tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(PIXEL)
    with Page(base) as page:
        page.wait(LISTED)
        ask(page, "tokens 2")
        page.wait(f"{DONE} && document.querySelector('.again')")
        page.upload("#files", tmp_path / "a.gif")
        page.wait("document.querySelectorAll('#thumbs img').length === 1")
        ask(page, "what is it?")
        page.wait("document.querySelector('.error')")  # the fake looks for its verb and finds none
        page.messages.clear()
        page.reload()
        page.wait(LISTED)
        assert page.text(".user .text") == ["tokens 2", "what is it?"]
        assert page.text(".answer .text") == ["t0 t1 ", ""]
        assert page.run("document.querySelectorAll('.user img').length") == 1
        assert page.text(".note button") == ["Try again"]
        page.run("document.querySelectorAll('.user .actions button')[1].click()")
        assert page.run("document.querySelectorAll('#thumbs img').length") == 1
        page.run("document.getElementById('question').value = 'tokens 1'")
        page.run("document.querySelector('#thumbs button').click()")
        page.run("document.getElementById('question').focus()")
        page.press("Enter")
        page.wait(f"{DONE} && document.querySelector('.again')")
        told = json.loads(read_inputs(server.requests[-1])["messages"][0])
        assert [message["content"] for message in told] == ["tokens 2", "t0 t1 ", "tokens 1"]
        page.run("document.getElementById('new').click()")
        page.reload()
        page.wait(LISTED)
        assert page.run("document.querySelectorAll('#log > *').length") == 0
        assert page.messages == []


@needs_chromium
def test_of_a_conversation_too_large_to_keep_the_texts_are_kept(base: str) -> None:
    with Page(base) as page:
        page.wait(LISTED)
        page.run(
            """(() => {
              const url = "data:image/png;base64," + "A".repeat(2 ** 24);
              const image = {type: "image_url", image_url: {url}};
              messages = [{role: "user", content: [image, {type: "text", text: "what is it?"}]}];
              messages.push({role: "assistant", content: "a picture"});
              keep();
            })()"""
        )
        page.reload()
        page.wait(LISTED)
        assert page.text(".user .text") == ["what is it?"] and page.text(".answer .text") == ["a picture"]


@needs_chromium
def test_calls_and_their_results_survive_a_reload(base: str, server: FakeKServe) -> None:
    with Page(base) as page:
        page.wait(LISTED)
        page.run("document.getElementById('tools').value = '[{\"type\": \"function\"}]'")
        ask(page, "call")
        page.wait(f"{DONE} && document.querySelector('.again')")
        for _ in range(2):  # without results, and with them
            page.reload()
            page.wait(LISTED)
            assert page.text(".call summary code") == ["f0", "f1"]
            if page.run("document.querySelectorAll('.call textarea').length"):
                page.run(
                    "document.querySelectorAll('.call textarea').forEach(e => { e.value = 'tokens 1'; })"
                )
                page.run("[...document.querySelectorAll('.calls > button')].at(-1).click()")
                page.wait(f"{DONE} && document.querySelectorAll('.answer .text')[1]?.innerText === 't0 '")
                page.wait("document.querySelector('.again')")
        assert page.text(".call pre + pre code") == ["tokens 1", "tokens 1"]
        assert page.messages == []


@needs_chromium
def test_a_question_in_place_of_results(base: str) -> None:
    """The results could still be returned, behind the next answer: such a conversation no reload understood,
    and all of it was lost."""
    with Page(base) as page:
        page.wait(LISTED)
        page.run("document.getElementById('tools').value = '[{\"type\": \"function\"}]'")
        ask(page, "call")
        page.wait(f"{DONE} && document.querySelector('.again')")
        button = "document.querySelector('.calls > button')"
        page.run(f"window.late = {button}")
        ask(page, "tokens 1")
        page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
        page.run("window.late.click()")
        assert page.run("messages.map(message => message.role)") == ["user", "assistant"] * 2
        assert page.text(".calls > button, .call textarea") == []
        page.reload()
        page.wait(LISTED)
        assert page.text(".user .text") == ["call", "tokens 1"]


@needs_chromium
def test_a_lost_server_is_told_in_words(server: FakeKServe) -> None:
    with gateway(GatewaySettings(server.url)) as url:
        page = Page(url)
        page.wait(LISTED)
        ask(page, "tokens 1")
        page.wait(DONE)
    with page:
        ask(page, "tokens 1")
        page.wait("document.querySelector('.error')")
        assert page.text(".error") == ["The server cannot be reached."]


def test_an_indented_quote_ends(base: str) -> None:
    """Without a browser: the loop over a quote's lines takes those that began it, indented or not; else the
    page would hang in it."""
    text = httpx.get(base, timeout=WAIT).text
    (loop,) = re.findall(
        r"for \(; i < lines\.length && /(.*?)/\.test\(lines\[i\]\); i\+\+\) quote\.push", text
    )
    assert all(re.search(loop, line) for line in (">", "> a", " > a", "   >a"))


@needs_chromium
def test_errors_are_shown_and_tried_again(page: Page) -> None:
    ask(page, "error INVALID_ARGUMENT seed: <b>no</b>")
    page.wait("document.querySelector('.error')")
    assert page.text(".error") == ["seed: <b>no</b>"]
    page.run("document.querySelector('.note button').click()")
    page.wait(f"{DONE} && document.querySelector('.error')")
    assert page.run("document.querySelectorAll('.answer').length") == 1
    page.messages.clear()  # the browser notes the answers 400


@needs_chromium
def test_a_question_after_a_refused_one(page: Page, server: FakeKServe) -> None:
    """It is asked by itself: what a model refuses once it would refuse in every conversation."""
    ask(page, "error INVALID_ARGUMENT seed: no")
    page.wait("document.querySelector('.note button')")
    ask(page, "tokens 1")
    page.wait(f"{DONE} && document.querySelectorAll('.note')[1]?.innerText")
    assert json.loads(read_inputs(server.requests[-1])["messages"][0]) == [
        {"role": "user", "content": "tokens 1"}
    ]
    assert page.run("document.querySelectorAll('.note button').length") == 0
    page.messages.clear()  # the browser notes the answer 400


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_dark_and_light(base: str, dark: bool) -> None:
    """By the preference, and by the button; and on a phone nothing is wider than the window."""
    theme = "document.documentElement.dataset.theme"
    with Page(base, dark=dark, width=360, height=640) as page:
        assert page.run(theme) == ("dark" if dark else "light")
        ground = "getComputedStyle(document.body).backgroundColor"
        before = page.run(ground)
        page.run("document.getElementById('theme').click()")
        assert page.run(theme) == ("light" if dark else "dark")
        assert page.run(ground) != before
        page.wait(LISTED)
        ask(page, "tokens 3")
        page.wait(DONE)
        assert page.run("document.documentElement.scrollWidth") == 360
        page.run("document.getElementById('log').append(...markdown('```\\na\\n```'))")
        opacity = page.run("getComputedStyle(document.querySelector('pre .copy')).opacity")
        assert opacity == "1", "nothing hovers there"
        unnamed = """[...document.querySelectorAll("button, input:not([hidden]), textarea, select")]
            .filter(e => !e.ariaLabel && !e.labels?.length && !e.innerText.trim()).map(e => e.id)"""
        assert page.run(unnamed) == []
        assert page.messages == []
