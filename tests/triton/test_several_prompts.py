"""Several prompts in one request, and what its responses hold; engine loop and responder are real."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.errors import InvalidArgumentError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_parser import MAX_PROMPTS  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.fake_runner import generate_alone  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_request_parser import parse, text, tokenizer  # noqa: E402, F401
from tests.triton.test_responder import MAX_MODEL_LEN, OUTPUTS, WAIT_S, Harness, prompts  # noqa: E402

TEXTS = [b"a", b"hello there", b"the quick brown fox"]
ALL = OUTPUTS | {"batch_index", "index"}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path, max_num_seqs=16)
    yield harness
    harness.close()


def submit(
    harness: Harness, batch: list[tuple[list[int], SamplingParams]], **options: Any
) -> fake_pb_utils.ResponseSender:
    sender = fake_pb_utils.ResponseSender()
    sender.send_delay = options.pop("delay", None)
    first, *others = (
        ParsedRequest(prompt, params, options.get("name", ""), ALL, ALL, stream=options.get("stream", True))
        for prompt, params in batch
    )
    first.others = others
    first.cumulative = options.get("cumulative", False)
    for other in others:
        other.cumulative = first.cumulative
    harness.responder.submit(RequestHandle(sender, f"t-{id(sender)}", first.external_id), first)
    return sender


def by_item(sender: fake_pb_utils.ResponseSender) -> dict[tuple[int, int], list[dict[str, Any]]]:
    assert sender.final.wait(WAIT_S), "no FINAL"
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for response in sender.responses:
        assert response.error is None
        key = int(response.tensors["batch_index"][0]), int(response.tensors["index"][0])
        found.setdefault(key, []).append(response.tensors)
    return found


@pytest.mark.row("A18")
@pytest.mark.parametrize("stream", [True, False])
def test_each_prompt_is_answered_as_if_it_were_alone(harness: Harness, stream: bool) -> None:
    batch = [
        (prompt, SamplingParams(max_tokens=3 + 7 * i, n=1 + i % 2, seed=i))
        for i, prompt in enumerate(prompts(8))
    ]
    answers = by_item(submit(harness, batch, stream=stream))
    assert set(answers) == {(i, c) for i, (_, params) in enumerate(batch) for c in range(params.n)}
    for (item, choice), parts in answers.items():
        expected, reason = generate_alone(*batch[item], MAX_MODEL_LEN, choice)
        assert [int(i) for part in parts for i in part["output_ids"]] == expected
        assert parts[-1]["finish_reason"][0].decode() == reason
        assert stream or len(parts) == 1
    harness.core.scheduler.check_integrity()
    assert harness.core.stats().num_free_blocks == 256


@pytest.mark.row("A18", clauses=("independent",))
def test_a_prompt_ends_when_it_has_ended_and_final_comes_with_the_last(harness: Harness) -> None:
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (300, 2, 100, 40)]
    execute, seen, submitted = harness.runner.execute, set[str](), threading.Event()

    def behind(output: Any) -> Any:
        """A step begins when all that have ended before have been answered."""
        submitted.wait()
        running = {row.request_id for row in output.scheduled}
        seen.update(running)
        wait_until(lambda: len(sender.responses) >= len(seen - running))
        return execute(output)

    harness.runner.execute = behind  # type: ignore[method-assign]
    sender = submit(harness, list(zip(prompts(4), params, strict=True)), stream=False)
    submitted.set()
    assert sender.final.wait(WAIT_S)
    assert [int(response.tensors["batch_index"][0]) for response in sender.responses] == [1, 3, 2, 0]


def test_a_gone_client_and_a_cancellation_end_every_prompt(harness: Harness) -> None:
    endless = [(prompt, SamplingParams(max_tokens=300, ignore_eos=True)) for prompt in prompts(5)]
    harness.runner.gate.clear()
    gone = submit(harness, endless)
    gone.cancelled = True
    assert gone.final.wait(WAIT_S)
    assert gone.responses[-1].error.code() == fake_pb_utils.TritonError.CANCELLED
    named = submit(harness, endless, name="mine")
    answer = harness.cancel("mine")
    harness.runner.is_slow = lambda: not answer.final.is_set()
    harness.runner.gate.set()
    assert answer.final.wait(WAIT_S) and answer.responses[0].error is None
    answers = by_item(named)
    assert len(answers) == 5
    assert {parts[-1]["finish_reason"][0] for parts in answers.values()} == {b"cancelled"}
    assert by_item(submit(harness, endless[:1]))
    assert harness.core.stats().num_free_blocks == 256


def test_one_refused_prompt_refuses_all(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_num_seqs=1, max_waiting_requests=3)
    try:
        params = SamplingParams(max_tokens=300, ignore_eos=True)
        harness.runner.gate.clear()
        sender = submit(harness, [(prompt, params) for prompt in prompts(8)])
        harness.runner.is_slow = lambda: not sender.final.is_set()  # the first runs until the last has come
        harness.runner.gate.set()
        assert sender.final.wait(WAIT_S)
        *_, last = sender.responses  # the first prompt may have begun before the last one came
        assert last.error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        assert by_item(submit(harness, [([4, 5], SamplingParams(max_tokens=3))]))
        assert harness.core.stats().num_free_blocks == 256
    finally:
        harness.close()


@pytest.mark.parametrize("held", [0, 20], ids=["as it comes", "merged"])
def test_cumulative_responses_repeat_what_came_before(harness: Harness, held: int) -> None:
    batch = [(prompt, SamplingParams(max_tokens=40, ignore_eos=True, n=2, seed=3)) for prompt in prompts(3)]
    harness.runner.gate.clear()
    sender = submit(
        harness, batch, cumulative=True, delay=lambda: wait_until(lambda: harness.runner.num_steps >= held)
    )
    harness.runner.is_slow = lambda: len(sender.responses) < (0 if held else 6)  # each has one before its end
    harness.runner.gate.set()
    for (item, choice), parts in by_item(sender).items():
        expected, _ = generate_alone(*batch[item], MAX_MODEL_LEN, choice)
        said = [[int(i) for i in part["output_ids"]] for part in parts]
        assert said[-1] == expected and (held or len(said) > 1)
        assert all(part == expected[: len(part)] for part in said)
        assert all(len(one) < len(other) for one, other in itertools.pairwise(said))


@pytest.mark.row("A18")
def test_texts_become_requests_of_one(tokenizer: Tokenizer) -> None:  # noqa: F811
    inputs = {"text_input": np.array(TEXTS, np.object_), "stop": text("x"), "n": np.array([2], np.int32)}
    parsed = parse(tokenizer, inputs, {"exclude_input_in_output": False})
    found = [parsed.of_item(item) for item in range(3)]
    assert [one.prompt_token_ids for one in found] == [tokenizer.encode(t.decode()) for t in TEXTS]
    assert [one.echo for one in found] == [t.decode() for t in TEXTS]
    assert all(one.params == found[0].params for one in found) and found[0].stops is found[2].stops
    assert {"batch_index", "index"} <= parsed.outputs
    alone = parse(tokenizer, {"text_input": text("a")})
    assert not alone.others and "batch_index" not in alone.outputs


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": [b"ok", b"\xff"]}, r"text_input\[1\]: .*UTF-8"),
        ({"text_input": [b"ok", b"ok", b"word " * 150]}, r"text_input\[2\]: .*max_model_len is 64"),
        ({"text_input": [b"a"] * (MAX_PROMPTS + 1)}, f"text_input: at most {MAX_PROMPTS} elements"),
        ({"text_input": [b"a" * 600, b"b" * 600]}, "text_input: at most 1000 bytes, got 1200"),
        ({"text_input": [b"a"] * 20, "n": [64]}, "text_input: at most 1024 choices .* got 20 x 64"),
        ({"text_input": [b"a", b"b"], "input_ids": [1, 2]}, "prompt: exactly one of"),
    ],
)
def test_what_is_wrong_with_one_prompt_is_told_with_its_number(
    tokenizer: Tokenizer,  # noqa: F811
    inputs: dict[str, list[Any]],
    message: str,
) -> None:
    arrays = {
        name: np.array(values, np.object_ if isinstance(values[0], bytes) else np.int32)
        for name, values in inputs.items()
    }
    with pytest.raises(InvalidArgumentError, match=message):
        parse(tokenizer, arrays)


def test_a_model_that_answers_once_takes_one_prompt(tokenizer: Tokenizer) -> None:  # noqa: F811
    with pytest.raises(InvalidArgumentError, match="text_input: this model answers once"):
        parse(tokenizer, {"text_input": np.array(TEXTS, np.object_)}, decoupled=False)


@pytest.mark.parametrize("form", ["tensor", "json", "parameter"])
@pytest.mark.parametrize(
    ("mode", "stream", "expected"),
    [
        ("delta", None, (True, False)),
        ("delta", True, (True, False)),
        ("cumulative", None, (True, True)),
        ("final", None, (False, False)),
        ("final", False, (False, False)),
        (None, True, (True, False)),
        (None, None, (False, False)),
        ("final", True, "output_mode: 'final' contradicts stream=True"),
        ("cumulative", False, "output_mode: 'cumulative' contradicts stream=False"),
        ("all", None, "output_mode: must be one of delta, cumulative, final"),
    ],
)
def test_output_mode_and_stream(
    tokenizer: Tokenizer,  # noqa: F811
    form: str,
    mode: str | None,
    stream: bool | None,
    expected: Any,
) -> None:
    stated = {k: v for k, v in {"output_mode": mode, "stream": stream}.items() if v is not None}
    inputs, parameters = {"text_input": text("a")}, {}
    if form == "tensor":
        inputs |= {k: text(v) if isinstance(v, str) else np.array([v]) for k, v in stated.items()}
    elif form == "json":
        inputs["sampling_parameters"] = text(json.dumps(stated))
    else:
        parameters = stated
    if isinstance(expected, str):
        with pytest.raises(InvalidArgumentError, match=expected):
            parse(tokenizer, inputs, parameters)
        return
    parsed = parse(tokenizer, inputs, parameters)
    assert (parsed.stream, parsed.cumulative) == expected
