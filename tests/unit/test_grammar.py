"""Output that follows a grammar, whatever random weights would rather say, however it is computed."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import features
from benchmarks.peers.checkpoints import SHAPES
from quire import LLM
from quire.errors import InvalidArgumentError, UnavailableError
from quire.frontend import grammar_checker
from quire.frontend.grammar_checker import GrammarChecker
from quire.outputs import RequestOutput
from quire.request.sampling_params import parse_sampling_params
from quire.request.structured_output import StructuredOutput, parse_structured_output
from quire.worker.grammar import RowGrammar
from tests.fixtures.checkpoints import EOS_TOKEN_IDS, VOCAB_SIZE, make_checkpoint
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.schemas import SCHEMAS
from tests.fixtures.waiting import PATIENT_S, wait_until

PROMPT = "The quick brown fox jumps over the lazy dog and says to it what it has said to all other dogs: "
DIGITS = {"regex": "[0-9]{12}"}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
"""More alternatives at a time than a step may have: known once the object has begun."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)


def engine(path: Path, **options: Any) -> LLM:
    values = {"max_model_len": 4096, "num_blocks": 600, "max_num_seqs": 8, "num_threads": 1}
    return LLM(path, **{**values, "dtype": "float32", **options})


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return engine(checkpoint)


def answers(llm: LLM, grammar: Any, count: int = 4, **params: Any) -> list[RequestOutput]:
    """So many outputs at temperature 2, of seeds 0, 1, ..."""
    values = {"structured_output": grammar, "temperature": 2.0, "max_tokens": 1500, **params}
    each = [parse_sampling_params({**values, "seed": seed}) for seed in range(count)]
    return llm.generate([PROMPT] * count, each)


def is_json(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    return True


@pytest.mark.row("A23", clauses=("valid",))
def test_200_of_200_for_10_schemas_at_temperature_2(checkpoint: Path) -> None:
    """In a batch of 8, each prompt computed in several chunks, beside rows that decode."""
    llm = engine(checkpoint, max_num_batched_tokens=24)
    assert len(SCHEMAS) == 10
    names = list(SCHEMAS) * 20
    each = [
        parse_sampling_params(
            {
                "structured_output": {"json": SCHEMAS[name]},
                "temperature": 2.0,
                "seed": seed,
                "max_tokens": 3000,
            }
        )
        for seed, name in enumerate(names)
    ]
    outputs = llm.generate([PROMPT] * len(each), each)
    assert len(outputs) == 200
    for name, output in zip(names, outputs, strict=True):
        assert output.finish_reason == "stop", (name, output.text)
        assert is_json(output.text, SCHEMAS[name])
    assert len({output.text for output in outputs}) > 150, "of the model's own choice"


TAG = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer", "maximum": 99, "minimum": 0}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<"],
}
CALLS = re.compile(r"[^<]*(<f=(a>\s*[0-9]{1,2}|b>\s*(true|false))\s*</f>[^<]*)*", re.DOTALL)
FORMAT = {
    "type": "tags_with_separator",
    "tags": [
        {"begin": "[x ", "content": {"type": "regex", "pattern": "a{1,3}"}, "end": "]"},
        {"begin": "[y ", "content": {"type": "or", "elements": [{"type": "const_string", "value": "1/2"}]},
         "end": "]"},
    ],
    "separator": ", ",
    "at_least_one": True,
}  # fmt: skip
KINDS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": SCHEMAS["nested"]}, lambda text: is_json(text, SCHEMAS["nested"])),
    ({"json_object": True}, lambda text: is_json(text, {"type": "object"})),
    (
        {"regex": r"(ab|c){2,9}/\d{3}é?"},
        lambda text: re.fullmatch(r"(ab|c){2,9}/\d{3}é?", text),
    ),
    ({"choice": ["yes", "no", 'it "depends"\n', "<|im_end|>", "日本"]}, lambda text: text in CHOICES),
    (
        {"grammar": 'start: "(" start ")" | /[xy]{1,5}/'},
        lambda text: re.fullmatch(r"(\(*)[xy]{1,5}\)*", text),
    ),
    (
        {"grammar": 'root ::= "a" item*\nitem ::= [x-z] | "(" item ")"'},
        lambda text: re.fullmatch(r"a[xyz()]*", text),
    ),
    ({"structural_tag": TAG}, CALLS.fullmatch),
    (
        {"structural_tag": {"format": FORMAT}},
        re.compile(r"\[(x a{1,3}|y 1/2)\](, \[(x a{1,3}|y 1/2)\])*").fullmatch,
    ),
]
CHOICES = KINDS[3][0]["choice"]


@pytest.mark.row("A23", clauses=("kinds",))
@pytest.mark.parametrize(
    ("grammar", "is_right"), KINDS, ids=lambda value: str(value)[:40] if isinstance(value, dict) else ""
)
def test_kinds(llm: LLM, grammar: dict[str, Any], is_right: Callable[[str], Any]) -> None:
    for output in answers(llm, grammar, 6):
        if output.finish_reason == "length" and "json_object" in grammar:
            assert output.text.startswith("{")  # objects of random tokens need not end
            continue
        assert output.finish_reason == "stop", output.text
        assert is_right(output.text), output.text


def test_free_text_has_calls_only_as_their_tags_say(llm: LLM) -> None:
    """With a bias for the trigger, so that random text has some."""
    assert llm.tokenizer is not None
    (trigger,) = llm.tokenizer.encode("<", add_special_tokens=False)
    outputs = answers(llm, {"structural_tag": TAG}, 6, logit_bias={trigger: 8}, temperature=1.0)
    whole = [output.text for output in outputs if output.finish_reason == "stop"]
    assert whole and sum(text.count("</f>") for text in whole) >= len(whole)
    assert all(CALLS.fullmatch(text) for text in whole), whole


@pytest.mark.row("A24", clauses=("reasoning",))
@pytest.mark.parametrize("after", ["</think>", "x", "<|im_start|>", "é>"])
def test_the_grammar_begins_behind_a_text(llm: LLM, after: str) -> None:
    """A special token, and texts of one token and of several, cut within a character. What comes before is
    free, and nothing stands between it and the grammar."""
    assert llm.tokenizer is not None
    bias = {str(one): 6 for one in llm.tokenizer.encode(after, add_special_tokens=False)}
    found = set()
    for output in answers(
        llm, {**DIGITS, "after": after}, 6, max_tokens=4000, skip_special_tokens=False, logit_bias=bias
    ):
        free, separator, bound = output.text.partition(after)
        found.add(free)
        if output.finish_reason == "stop":
            assert separator and re.fullmatch("[0-9]{12}", bound), output.text[-100:]
        else:
            assert re.fullmatch("[0-9]{0,12}", bound), output.text[-100:]
    assert len(found) > 1 and any(not re.fullmatch(r"[0-9]*", text) for text in found)


def test_an_output_ends_with_its_grammar(llm: LLM) -> None:
    """With its last token, not with an end-of-text token behind it, also where no more tokens are allowed."""
    (free,) = answers(llm, DIGITS, 1)
    assert free.finish_reason == "stop" and len(free.text) == 12
    assert free.token_ids[-1] not in EOS_TOKEN_IDS
    (exact,) = answers(llm, DIGITS, 1, max_tokens=free.num_output_tokens)
    assert (exact.text, exact.finish_reason) == (free.text, "stop")
    (cut,) = answers(llm, DIGITS, 1, max_tokens=free.num_output_tokens - 1)
    assert cut.finish_reason == "length" and free.text.startswith(cut.text)
    (open_end,) = answers(llm, {"regex": "[0-9]{2,}"}, 1)
    assert open_end.finish_reason == "stop" and open_end.token_ids[-1] in EOS_TOKEN_IDS


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 40},
        {"ignore_eos": True},
        {"bad_words": ["1", "2", "3", "4", "5", "6", "7", "8", "9", "0"]},
        {"logit_bias": {str(token): 100 for token in range(0, VOCAB_SIZE, 2)}},
        {"repetition_penalty": 0.01, "presence_penalty": 2, "frequency_penalty": -2},
        {"no_repeat_ngram_size": 1},
        {"typical_p": 0.5, "top_p": 0.9, "min_p": 0.01, "top_k": 50},
        {"temperature": 0.0},
        {"logprobs": 3},
        {"best_of": 3},
        {"skip_special_tokens": False, "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_nothing_lifts_a_grammar(llm: LLM, params: dict[str, Any]) -> None:
    """Bans that would leave a row no token are lifted, what its grammar forbids stays forbidden."""
    for output in answers(llm, DIGITS, 2, **params):
        assert output.finish_reason == "stop" and re.fullmatch("[0-9]{12}", output.text), output.text


def test_ignore_eos_goes_on_where_the_grammar_can(llm: LLM) -> None:
    for output in answers(llm, {"regex": "[0-9]+"}, 2, ignore_eos=True, max_tokens=40):
        assert (output.finish_reason, output.num_output_tokens) == ("length", 40)
        assert re.fullmatch("[0-9]+", output.text)


def test_stop_strings_and_ids_end_before_the_grammar_does(llm: LLM) -> None:
    (output,) = answers(llm, {"regex": "[ab]{50}c"}, 1, stop=["bb"])
    assert output.stop_reason == "bb" and re.fullmatch("[ab]*", output.text)


def test_choices_follow_the_grammar_each_on_its_own(llm: LLM) -> None:
    (first,) = answers(llm, {"regex": "[0-9]{1,12}"}, 1, n=5)
    texts = [one.text for one in (first, *first.others)]
    assert len(set(texts)) > 1 and all(re.fullmatch("[0-9]{1,12}", text) for text in texts)
    (same,) = answers(llm, {"choice": ["a", "b"]}, 1, n=5)
    assert all(one.finish_reason == "stop" and one.text in "ab" for one in (same, *same.others))


WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 8},
    "preempted": {"num_blocks": 30, "block_size": 8, "max_model_len": 160, "max_num_seqs": 6},
    "ahead": {"async_scheduling": True},
    "ahead, preempted": {
        "async_scheduling": True, "num_blocks": 30, "block_size": 8, "max_model_len": 160, "max_num_seqs": 6,
    },
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 1},
}  # fmt: skip


@pytest.mark.parametrize("way", [*WAYS, "recorded"])
def test_same_seeds_same_tokens(checkpoint: Path, llm: LLM, way: str) -> None:
    grammar = {"json": SCHEMAS["patterns"]}

    def run(llm: LLM) -> list[tuple[list[int], str | None]]:
        outputs = answers(llm, grammar, 10, max_tokens=50)
        return [(output.token_ids, output.finish_reason) for output in outputs]

    wanted = run(llm)
    if way == "recorded":
        with recorded_steps():
            other = engine(checkpoint, max_model_len=256)
            assert run(other) == wanted
        return
    other = engine(checkpoint, **WAYS[way])
    try:
        assert run(other) == wanted
        if "preempted" in way:
            assert other.core.stats().num_preemptions > 0
    finally:
        other.core.close()


def test_rows_without_a_grammar_are_as_they_were(llm: LLM) -> None:
    alone = llm.generate([PROMPT], temperature=2.0, seed=5, max_tokens=20)[0].token_ids
    free = parse_sampling_params({"temperature": 2.0, "seed": 5, "max_tokens": 20})
    bound = parse_sampling_params({"structured_output": DIGITS, "seed": 5, "temperature": 2.0})
    both = llm.generate([PROMPT] * 2, [free, bound])
    assert both[0].token_ids == alone and re.fullmatch("[0-9]{12}", both[1].text)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: .*"not"'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"unevaluatedProperties": False, "x-guidance": {"lenient": True}}},
            "unevaluatedProperties",
        ),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"json": {"$ref": "http://elsewhere/schema"}}, "http://elsewhere/schema"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable schema"),
        ({"json": {"const": "\ud800"}}, "hex escape"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: nowhere"}, 'unknown name: "nowhere"'),
        ({"grammar": 'root ::= "a'}, "cannot be read as EBNF"),
        ({"regex": "a", "after": "a<|im_end|>b<|im_start|>"}, "after: must be one special token"),
        ({"structural_tag": {"a": 1}}, "must have format, or structures and triggers"),
        ({"structural_tag": {"format": {"type": "xml"}}}, "type must be const_string, .*got str 'xml'"),
        ({"structural_tag": {**TAG, "triggers": ["x"]}}, "no tag begins with the trigger 'x'"),
        ({"structural_tag": {**TAG, "triggers": ["<f=a"]}}, "each tag must begin with one of the triggers"),
        ({"structural_tag": {**TAG, "structures": [5]}}, "structures must be an object"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(llm: LLM, grammar: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        answers(llm, grammar, 1)
    assert caught.value.field == "structured_output"
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_grammar_is_gone_with_its_row(llm: LLM) -> None:
    """In a cycle it waited for a garbage collection, which is rare in an engine: some KiB of each request."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            answers(llm, {"regex": "[a-c]{4}"})
        alive = sum(isinstance(one, RowGrammar) for one in gc.get_objects())
        assert alive <= 4, "those of the last step"
    finally:
        gc.enable()


def test_beams_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match="structured_output: must not be given with beam_width"):
        answers(llm, DIGITS, 1, beam_width=2, temperature=0.0)


def test_a_checkpoint_without_a_fast_tokenizer_is_told(tmp_path: Path, checkpoint: Path) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    llm = engine(path)
    params = parse_sampling_params({"structured_output": DIGITS})
    with pytest.raises(InvalidArgumentError, match=r"needs a tokenizer\.json"):
        llm.generate([[5, 6]], params)
    # The engine says the same of a request that comes to it all the same, and no other suffers from it.
    core = llm.core
    core.add_request("bound", [5, 6], params)
    core.add_request("free", [5, 6], parse_sampling_params({"max_tokens": 3}))
    outputs = [output for _ in range(6) for output in core.step()]
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert list(errors) == ["bound"] and "needs a tokenizer.json" in str(errors["bound"])
    assert [o.finish_reason for o in outputs if o.request_id == "free"][-1] == "length"


def test_a_grammar_that_gets_too_complex_ends_its_request_alone(
    llm: LLM,
) -> None:
    core = llm.core
    asked = {"bound": {"structured_output": {"json": MANY}}, "free": {"temperature": 1.0, "ignore_eos": True}}
    for request_id, params in asked.items():
        core.add_request(request_id, [5, 6], parse_sampling_params({"max_tokens": 5, **params}))
    outputs = [output for _ in range(6) for output in core.step()]
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert list(errors) == ["bound"]
    assert re.search("structured_output: .* items", str(errors["bound"]))
    assert [o.finish_reason for o in outputs if o.request_id == "free"][-1] == "length"


@pytest.mark.row("A23")
def test_masks_are_computed_beside_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never by the thread of the step; and they are there before the model has its logits, which waits for
    them here."""
    threads, begun, compute = set(), [], llm.core.executor.runner.model.compute_logits
    next_mask, begin = RowGrammar._next, RowGrammar._begin

    def seen_next(self: RowGrammar) -> Any:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return next_mask(self)

    def seen_begin(self: RowGrammar, *args: Any) -> None:
        begin(self, *args)
        begun.append(self._mask)

    def late_logits(hidden: Any) -> Any:
        _, waiting = futures.wait(begun, timeout=PATIENT_S)
        assert not waiting
        return compute(hidden)

    monkeypatch.setattr(RowGrammar, "_next", seen_next)
    monkeypatch.setattr(RowGrammar, "_begin", seen_begin)
    monkeypatch.setattr(llm.core.executor.runner.model, "compute_logits", late_logits)
    outputs = answers(llm, {"regex": "[0-9]{5}[a-z]{5}"}, 4)
    assert all(re.fullmatch("[0-9]{5}[a-z]{5}", output.text) for output in outputs)
    assert threads == {"quire-grammar", "quire-masks"}
    assert len(begun) == sum(output.num_output_tokens for output in outputs), "one for each token"


@pytest.mark.parametrize("late", [False, True], ids=["at once", "later"])
def test_a_grammar_that_takes_too_long_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Whether it hangs when it is made or in its fourth mask; others, whose tasks are behind it, go on. The
    time of the one that hangs is over as soon as it does, however busy the machine is with the others."""
    hanging, released, count = threading.Event(), threading.Event(), itertools.count()
    begin, next_mask, result = RowGrammar._begin, RowGrammar._next, futures.Future.result
    slow: list[Any] = []

    def hangs(self: RowGrammar) -> Any:
        if self._structured.regex.startswith("x") and next(count) == (3 if late else 0):
            hanging.set()
            assert released.wait(PATIENT_S)
        return next_mask(self)

    def noted(self: RowGrammar, *task: Any) -> None:
        begin(self, *task)
        if self._structured.regex.startswith("x"):
            slow.append(self._mask)

    def waits(mask: Any, timeout: float | None = None) -> Any:
        if any(mask is one for one in slow):
            wait_until(lambda: mask.done() or hanging.is_set())
            timeout = 0.0
        return result(mask, timeout)

    monkeypatch.setattr(RowGrammar, "_next", hangs)
    monkeypatch.setattr(RowGrammar, "_begin", noted)
    monkeypatch.setattr(futures.Future, "result", waits)
    params = {"slow": {"structured_output": {"regex": "x{20}"}}}
    params |= {f"bound{i}": {"structured_output": {"regex": "[0-9]{12}"}, "seed": i} for i in range(3)}
    params["free"] = {"temperature": 1.0}
    core = llm.core
    for request_id, one in params.items():
        core.add_request(request_id, [5, 6], parse_sampling_params({"max_tokens": 40, **one}))
    try:
        outputs = []
        while core.has_work:
            outputs += core.step()
    finally:
        released.set()
    errors = {output.request_id: output.error for output in outputs if output.error}
    assert list(errors) == ["slow"] and "takes more than 120 s to follow" in str(errors["slow"])
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends.pop("free") and {ends[f"bound{i}"] for i in range(3)} == {"stop"}


# Clients' grammars are tried in a process of its own first.


@pytest.fixture
def checker(checkpoint: Path) -> Any:
    checker = GrammarChecker(checkpoint, VOCAB_SIZE)
    yield checker
    checker.close()


def test_grammars_in_use_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many as are remembered, the one that was asked for longest ago is forgotten."""
    checker, asked = GrammarChecker("unused", VOCAB_SIZE), list[str]()
    monkeypatch.setattr(grammar_checker, "MAX_VERDICTS", 2)
    monkeypatch.setattr(checker, "_ask", lambda structured: asked.append(structured.regex) or "")
    for pattern in ("a", "b", "a", "c", "a", "b"):
        checker.check(StructuredOutput(regex=pattern))
    assert asked == ["a", "b", "c", "b"]


def test_hostile_grammars_are_bounded(checker: GrammarChecker) -> None:
    """An intersection of 30 patterns takes 2**30 of time and memory, and llguidance has no limit for it. What
    tries it is a process, which its own limits end, and the next grammar finds another."""

    def parsed(value: Any) -> StructuredOutput:
        found = parse_structured_output("structured_output", value)
        assert found is not None
        return found

    hostile = {"allOf": [{"type": "string", "pattern": f"^(a|b|ab)*c{{{7 * i},}}$"} for i in range(1, 31)]}
    with pytest.raises(InvalidArgumentError, match=r"takes more than 0\.5 s or 1024 MiB to compile"):
        checker.check(parsed({"json": hostile}))
    first = checker._process
    checker.check(parsed(DIGITS))
    process = checker._process
    assert process is not None and process is not first and process.poll() is None
    for bounded in (
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "(a|a)*(a*)*b.*a.{200}"},
        {"json": {"enum": ["v" * 9 + str(i) for i in range(4000)]}},
        {"json": {"type": "string", "minLength": 100_000}},
        {"choice": [str(i) * 10 for i in range(1024)]},
    ):
        checker.check(parsed(bounded))
    with pytest.raises(InvalidArgumentError, match=r"structured_output: .* items"):
        checker.check(parsed({"json": MANY}))
    deep: Any = {"type": "integer"}
    for _ in range(25):
        deep = {"type": "array", "items": deep}
    checker.check(parsed({"json": deep}))
    assert checker._process is process, "none of these has ended it"


def test_a_verdict_is_remembered(checker: GrammarChecker) -> None:
    good, bad = StructuredOutput(regex="a"), StructuredOutput(regex="(")
    for _ in range(2):
        checker.check(good)
        with pytest.raises(InvalidArgumentError, match="unclosed group"):
            checker.check(bad)
        checker.close()  # the second time nobody is asked
    assert checker._process is None


def test_a_checker_that_dies_is_replaced(checker: GrammarChecker) -> None:
    checker.check(StructuredOutput(regex="a"))
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    checker.check(StructuredOutput(regex="b"))


def test_a_checker_that_is_killed_has_judged_nothing(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(StructuredOutput(regex="a"))
    process, wanted, wait = checker._process, StructuredOutput(regex="b"), grammar_checker.wait_readable
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)

    def killed(*given: Any) -> bool:
        process.kill()
        return wait(*given)

    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="was killed"):
        patch.setattr(grammar_checker, "wait_readable", killed)
        checker.check(wanted)
    checker.check(wanted)


def test_a_checker_that_gets_no_time_has_judged_nothing(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(StructuredOutput(regex="a"))
    process, wanted = checker._process, StructuredOutput(regex="b")
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # as on a machine of which others take everything
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match=r"not checked within 0\.2 s"):
        patch.setattr(grammar_checker, "MAX_WAIT_S", 0.2)
        checker.check(wanted)
    checker.check(wanted)


def test_a_checker_says_what_the_tokenizer_lacks(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path, VOCAB_SIZE)
    with pytest.raises(InvalidArgumentError, match=r"needs a tokenizer\.json"):
        checker.check(StructuredOutput(regex="a"))
    checker.close()


@pytest.mark.slow
@pytest.mark.row("A23", clauses=("cost",))
def test_masks_cost_less_than_a_tenth_of_a_step() -> None:
    """In CPU time of all threads, with Qwen3-0.6B's shape and 151 936 tokens, on all of 16 streams; each
    token of a repetition that is bounded needs a new mask."""
    kinds = ("json", "regex")
    runs = features.measure(SHAPES["qwen3-0.6b"], ["plain", *kinds], 16, prompt=16, max_tokens=64, rounds=4)
    costs = features.costs(runs)
    assert max(costs[kind] for kind in kinds) < 1.1 * costs["plain"], costs
