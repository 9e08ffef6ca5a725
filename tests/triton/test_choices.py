"""Several choices, commands and refusals between a scripted engine and Triton's senders.

The engine loop, its socket and the responder are real; what the engine core brings is written down here.
"""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.adapter_registry import AdapterRegistry  # noqa: E402
from quire.engine.cache_commands import CacheCommand, Inspect, Reset  # noqa: E402
from quire.engine.step_observer import StepObserver  # noqa: E402
from quire.errors import InvalidArgumentError, UnavailableError  # noqa: E402
from quire.frontend.detokenizer import TokenDecoder  # noqa: E402
from quire.frontend.output_processor import split_ranking  # noqa: E402
from quire.outputs import EngineCoreOutput, RunnerInfo, SchedulerStats, TokenLogprobs  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.request.scheduling_params import SchedulingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.checkpoints import write_tokenizer  # noqa: E402
from tests.fixtures.frontend import Frontend  # noqa: E402

WAIT_S = 60.0
OUTPUTS = frozenset(
    {"text_output", "output_ids", "finish_reason", "index", "num_cached_tokens", "cumulative_logprob"}
)


class ScriptedCore:
    """Stands where an EngineCore does: `steps` are what its steps bring, `seen` what it was told."""

    trace = None
    next_expiry = math.inf

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.info = RunnerInfo(8, 64, 600, frozenset(), (), hidden_size=8)
        self.executor = SimpleNamespace(check=lambda: None)
        self.adapters = AdapterRegistry(config.adapters, self.info)
        roster = SimpleNamespace(find=lambda name, tenant: ["t-1"] if name == "known" else [])
        self.scheduler: Any = SimpleNamespace(roster=roster, probation=None)
        self.observer = StepObserver(self.scheduler, self.info)
        self.steps: queue.SimpleQueue[list[EngineCoreOutput]] = queue.SimpleQueue()
        self.seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.refusal: Exception | None = None
        self.open_choices: dict[str, int] = {}
        self.ended: set[tuple[str, int]] = set()

    def add_request(self, request_id: str, ids: list[int], params: SamplingParams, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.open_choices[request_id] = params.n
        self.seen.put(("add", request_id, options))

    def abort(self, ids: Any, reason: Any) -> list[EngineCoreOutput]:
        """As the engine: an output for each choice that was still open, none for the rest."""
        outputs = []
        for full_id in ids:
            request_id, _, index = full_id.partition("#")
            self.seen.put(("abort", full_id, str(reason)))
            named = [int(index)] if index else range(self.open_choices.pop(request_id, 0))
            left = [i for i in named if (request_id, i) not in self.ended]
            self.ended.update((request_id, i) for i in left)
            outputs += [EngineCoreOutput(request_id, finish_reason=str(reason), index=i) for i in left]
        return outputs

    def control(self, command: CacheCommand) -> dict[str, Any]:
        if not isinstance(command, Reset):
            raise InvalidArgumentError("cache_control", "unknown command")
        return {"num_blocks": 5}

    @property
    def has_work(self) -> bool:
        return bool(self.open_choices)

    def step(self, meanwhile: Any = None) -> list[EngineCoreOutput]:
        try:
            outputs = self.steps.get(timeout=0.005)
        except queue.Empty:
            return []
        outputs = [one for one in outputs if one.error or (one.request_id, one.index) not in self.ended]
        self.ended.update((output.request_id, output.index) for output in outputs if output.finish_reason)
        return outputs

    def stats(self) -> SchedulerStats:
        return SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0)


class Harness(Frontend):
    """Over a ScriptedCore."""

    core: ScriptedCore

    def __init__(self, directory: Path, tokenizer: Any = None, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": "fake", **options})
        super().__init__(directory, ScriptedCore(config), tokenizer)

    def submit(
        self, params: SamplingParams, *, stream: bool = True, name: str = "t-1", **options: Any
    ) -> fake_pb_utils.ResponseSender:
        sender = fake_pb_utils.ResponseSender()
        parsed = ParsedRequest([1, 2], params, "known", OUTPUTS, OUTPUTS, stream=stream, **options)
        self.responder.submit(RequestHandle(sender, name, "known"), parsed)
        return sender

    def command(self, **fields: Any) -> fake_pb_utils.ResponseSender:
        sender = fake_pb_utils.ResponseSender()
        outputs = frozenset({"text_output", "finish_reason"})
        parsed = ParsedRequest([], SamplingParams(), "known", outputs, outputs, **fields)
        self.responder.submit(RequestHandle(sender, "command", "known"), parsed)
        return sender


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def tokens(index: int, *ids: int, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput("t-1", list(ids), index=index, **fields)


def read(sender: fake_pb_utils.ResponseSender, name: str) -> list[Any]:
    assert sender.final.wait(WAIT_S), "no FINAL"
    values = [response.tensors[name] for response in sender.responses]
    return [v[0].decode() if v.dtype == object else v.tolist() for v in values]


def by_choice(sender: fake_pb_utils.ResponseSender) -> dict[int, tuple[list[int], list[str]]]:
    """Per choice: its token ids and its finish reasons."""
    found: dict[int, tuple[list[int], list[str]]] = {}
    names = ("index", "output_ids", "finish_reason")
    for (index,), ids, reason in zip(*(read(sender, name) for name in names), strict=True):
        entry = found.setdefault(index, ([], []))
        entry[0].extend(ids)
        entry[1].extend([reason] if reason else [])
    return found


@pytest.mark.row("A16")
def test_choices_keep_apart_and_the_last_end_is_final(harness: Harness) -> None:
    sender = harness.submit(SamplingParams(n=3))
    harness.core.steps.put([tokens(0, 10, num_cached_tokens=16), tokens(1, 20), tokens(2, 30)])
    assert sender.first.wait(WAIT_S)
    harness.core.steps.put([tokens(1, 21, finish_reason="stop"), tokens(0, 11), tokens(2, 31)])
    harness.core.steps.put([tokens(0, 12, finish_reason="length"), tokens(2, 32)])
    assert not sender.final.is_set()
    harness.core.steps.put([tokens(2, 33, finish_reason="timeout")])
    assert by_choice(sender) == {
        0: ([10, 11, 12], ["length"]),
        1: ([20, 21], ["stop"]),
        2: ([30, 31, 32, 33], ["timeout"]),
    }
    assert read(sender, "num_cached_tokens")[0] == [16]
    assert not harness.loop._owners, "the engine's process forgets the request with its last choice"


def test_without_streaming_each_choice_is_one_response(harness: Harness) -> None:
    sender = harness.submit(SamplingParams(n=2), stream=False)
    harness.core.steps.put([tokens(0, 10), tokens(1, 20)])
    harness.core.steps.put([tokens(1, 21, finish_reason="stop"), tokens(0, 11)])
    harness.core.steps.put([tokens(0, 12, finish_reason="length")])
    assert by_choice(sender) == {0: ([10, 11, 12], ["length"]), 1: ([20, 21], ["stop"])}
    assert len(sender.responses) == 2


def test_the_sum_of_log_probabilities_is_the_engines_or_ours(harness: Harness) -> None:
    sender = harness.submit(SamplingParams(n=2, logprobs=0), stream=False)

    def entry(token_id: int, value: float) -> list[TokenLogprobs]:
        return [TokenLogprobs([token_id], [value])]

    harness.core.steps.put([tokens(0, 10, logprobs=entry(10, -0.5)), tokens(1, 20, logprobs=entry(20, -1.0))])
    last = {"finish_reason": "length", "logprobs": entry(11, -0.25)}
    harness.core.steps.put([tokens(0, 11, **last), tokens(1, 21, cumulative_logprob=-3.0, **last)])
    sums = dict(zip((i for (i,) in read(sender, "index")), read(sender, "cumulative_logprob"), strict=True))
    assert sums == {0: [-0.75], 1: [-3.0]}


def test_a_stop_string_ends_its_choice_alone(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    harness = Harness(tmp_path, tokenizer.hf)
    try:
        sender = harness.submit(SamplingParams(n=2, stop=("b",)))
        assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
        a, b = (tokenizer.hf.encode(letter, add_special_tokens=False) for letter in "ab")
        harness.core.steps.put([tokens(0, *a), tokens(1, *a, *b)])
        assert harness.core.seen.get(timeout=WAIT_S) == ("abort", "t-1#1", "stop")
        harness.core.steps.put([tokens(1, *a), tokens(0, *a)])
        harness.core.steps.put([tokens(0, *b)])
        assert harness.core.seen.get(timeout=WAIT_S) == ("abort", "t-1", "stop")
        assert {index: reasons for index, (_, reasons) in by_choice(sender).items()} == {
            0: ["stop"],
            1: ["stop"],
        }
        texts: dict[int, str] = {}
        for (index,), text in zip(read(sender, "index"), read(sender, "text_output"), strict=True):
            texts[index] = texts.get(index, "") + text
        assert texts == {0: "aa", 1: "a"}
    finally:
        harness.close()


def test_the_best_choices_are_those_of_what_stands_before_a_stop_string(tmp_path: Path) -> None:
    """The engine knows none: it went on behind it to the last token, and ranked by what nobody is told."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    harness = Harness(tmp_path, tokenizer.hf)
    a, b = (tokenizer.hf.encode(letter, add_special_tokens=False)[0] for letter in "ab")

    def step(index: int, token_id: int, logprob: float, reason: str | None = None) -> EngineCoreOutput:
        entry = [TokenLogprobs([token_id], [logprob])]
        return tokens(index, token_id, logprobs=entry, finish_reason=reason)

    try:
        params, num_best = split_ranking(SamplingParams(n=2, best_of=3, stop=("b",), prompt_logprobs=0))
        assert (params.n, params.is_ranked, params.logprobs, num_best) == (3, False, 0, 2)
        sender = harness.submit(params, stream=False, num_best=num_best)
        first = [step(0, a, -3.0), step(1, a, -1.0), step(2, a, -2.0)]
        first[0].prompt_logprobs = [None]
        harness.core.steps.put(first)
        harness.core.steps.put([step(0, a, -3.0), step(1, b, -1.0), step(2, a, -2.0)])
        assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
        assert harness.core.seen.get(timeout=WAIT_S) == ("abort", "t-1#1", "stop")
        assert not sender.responses
        harness.core.steps.put([step(0, a, -3.0), step(2, a, -2.0, "length")])
        harness.core.steps.put([step(0, a, -3.0, "length")])
        assert by_choice(sender) == {0: ([a, b], ["stop"]), 1: ([a, a, a], ["length"])}
        assert read(sender, "text_output") == ["a", "aaa"]
        assert read(sender, "cumulative_logprob") == [[-2.0], [-6.0]]
        assert ["prompt_logprobs" in response.tensors for response in sender.responses] == [True, False]
    finally:
        harness.close()
    for same in (SamplingParams(n=3, best_of=3), SamplingParams(n=2, beam_width=3), SamplingParams(n=2)):
        assert split_ranking(same) == (same, 0)


@pytest.mark.parametrize("by", ["client", "id"])
def test_cancelling_ends_every_choice(harness: Harness, by: str) -> None:
    sender = harness.submit(SamplingParams(n=3))
    harness.core.steps.put([tokens(0, 10), tokens(1, 20), tokens(2, 30)])
    assert sender.first.wait(WAIT_S)
    if by == "client":
        sender.cancelled = True
        assert sender.final.wait(WAIT_S)
        assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.CANCELLED
    else:
        assert harness.command(cancel=True).final.wait(WAIT_S)
        ends = {index: reasons for index, (_, reasons) in by_choice(sender).items()}
        assert ends == {index: ["cancelled"] for index in range(3)}
    assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
    assert harness.core.seen.get(timeout=WAIT_S) == ("abort", "t-1", "cancelled")


def test_tokens_that_become_no_text_end_their_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer written in Python may raise for a token it does not foresee. Text is made when a response
    is due, and there nobody caught it: the request had no end, in the stream or behind its last token."""
    decode = TokenDecoder.decode

    def broken(decoder: TokenDecoder, ids: list[int]) -> str:
        if 300 in ids:
            raise KeyError("byte_decoder")
        return decode(decoder, ids)

    monkeypatch.setattr(TokenDecoder, "decode", broken)
    write_tokenizer(tmp_path)
    harness = Harness(tmp_path, Tokenizer(tmp_path).hf)
    try:
        senders = {name: harness.submit(SamplingParams(n=2), name=name) for name in ("first", "last", "good")}
        for _ in senders:
            assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
        harness.core.steps.put(
            [
                EngineCoreOutput(name, [300 if name == "first" else 73], index=i)
                for name in senders
                for i in (0, 1)
            ]
        )
        assert harness.core.seen.get(timeout=WAIT_S)[:2] == ("abort", "first")
        harness.core.steps.put(
            [
                EngineCoreOutput(name, [300 if name == "last" else 73], "length", index=i)
                for name in ("last", "good")
                for i in (0, 1)
            ]
        )
        for name, sender in senders.items():
            assert sender.final.wait(WAIT_S), f"{name}: no FINAL"
            errors = [one.error for one in sender.responses if one.error is not None]
            assert len(errors) == (name != "good")
            for error in errors:
                assert error.message() == "the output cannot be processed: 'byte_decoder'"
                assert error.code() == fake_pb_utils.TritonError.INTERNAL
    finally:
        harness.close()


def test_an_error_ends_every_choice_once(harness: Harness) -> None:
    """The engine tells it without a choice's index, and choice 0 may have ended before."""
    sender = harness.submit(SamplingParams(n=2))
    harness.core.steps.put([tokens(0, 10, finish_reason="stop"), tokens(1, 20)])
    assert sender.first.wait(WAIT_S)
    failed = tokens(0, finish_reason="error", error="the logits are not finite", error_code="INTERNAL")
    harness.core.steps.put([failed])
    assert sender.final.wait(WAIT_S)
    assert sender.responses[-1].error.message() == "the logits are not finite"
    assert harness.core.seen.get(timeout=WAIT_S)[:2] == ("add", "t-1")
    other = harness.submit(SamplingParams(), name="t-2")
    assert harness.core.seen.get(timeout=WAIT_S)[:2] == ("add", "t-2")
    harness.core.steps.put([EngineCoreOutput("t-2", [7], "stop")])
    assert by_choice(other) == {0: ([7], ["stop"])}


@pytest.mark.row("B13")
def test_a_refusal_says_when_to_try_again(harness: Harness) -> None:
    """In its message: no version of Triton passes on the parameters of a response with an error."""
    sender = fake_pb_utils.ResponseSender()
    error = UnavailableError("tenant 'a': 100 tokens per minute are used up", retry_after_s=2.25)
    harness.responder.refuse(RequestHandle(sender, "t-9", ""), error)
    assert sender.final.wait(WAIT_S)
    (response,) = sender.responses
    assert response.error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    assert response.error.message().endswith("used up; retry after 2.2 s")
    assert not response.parameters


def test_scheduling_crosses_to_the_engine(harness: Harness) -> None:
    scheduling = SchedulingParams(priority=-3, tenant="a", pin=True, deadline=12.5)
    harness.submit(SamplingParams(), scheduling=scheduling, arrived_at=4.5)
    _, request_id, options = harness.core.seen.get(timeout=WAIT_S)
    assert request_id == "t-1"
    assert (options["scheduling"], options["arrival_time"]) == (scheduling, 4.5)


@pytest.mark.row("C8")
def test_a_cache_command_is_answered_or_refused(harness: Harness) -> None:
    answer = harness.command(cache_control=Reset())
    assert [json.loads(text) for text in read(answer, "text_output")] == [{"num_blocks": 5}]
    refused = harness.command(cache_control=Inspect())
    assert refused.final.wait(WAIT_S)
    assert refused.responses[0].error.code() == fake_pb_utils.TritonError.INVALID_ARG
    assert "unknown command" in refused.responses[0].error.message()


def test_requests_of_a_frontend_that_has_gone_are_not_computed(tmp_path: Path) -> None:
    """Nobody reads what they would bring, and they hold blocks and seats."""
    harness = Harness(tmp_path)
    harness.submit(SamplingParams(n=2))
    assert harness.core.seen.get(timeout=WAIT_S)[:2] == ("add", "t-1")
    harness.responder.stop()
    assert harness.core.seen.get(timeout=WAIT_S) == ("abort", "t-1", "cancelled")
    harness.close()
