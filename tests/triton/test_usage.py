"""Every end of a request as its client sees it, and the counts that come with it.

The real scheduler, engine loop and responder; model and Triton are stand-ins.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.request.scheduling_params import SchedulingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire_ensemble.generator_schema import OUTPUTS  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.checkpoints import write_tokenizer  # noqa: E402
from tests.fixtures.fake_runner import VOCAB_SIZE, generate_alone, generate_choices_alone  # noqa: E402
from tests.fixtures.frontend import Frontend  # noqa: E402
from tests.triton.test_responder import MAX_MODEL_LEN, SteppedRunner  # noqa: E402

WAIT_S = 60.0
LATER_S = 3600.0
BLOCK_SIZE = 4
ALL = frozenset(spec.name for spec in OUTPUTS)


class Runner(SteppedRunner):
    is_broken = False

    def execute(self, output: Any) -> Any:
        result = super().execute(output)
        if self.is_broken:
            self.was_told_of_failure = True
            raise RuntimeError("the device is gone")
        return result


class Harness(Frontend):
    core: EngineCore

    def __init__(self, directory: Path, tokenizer: Any = None, num_blocks: int = 256, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": "fake", "block_size": BLOCK_SIZE, **options})
        self.runner = Runner(num_blocks, BLOCK_SIZE)
        super().__init__(directory, EngineCore(config, RunnerExecutor(self.runner)), tokenizer)
        self._count = 0

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        stream: bool = True,
        delay: Any = None,
        **fields: Any,
    ) -> fake_pb_utils.ResponseSender:
        sender = fake_pb_utils.ResponseSender()
        sender.send_delay = delay
        self._count += 1
        external_id = f"request {self._count}"
        parsed = ParsedRequest(
            prompt, params, external_id, ALL, ALL, stream=stream, arrived_at=time.monotonic(), **fields
        )
        self.responder.submit(RequestHandle(sender, f"t-{self._count}", external_id), parsed)
        return sender

    def cancel(self, external_id: str) -> None:
        outputs = frozenset({"finish_reason"})
        parsed = ParsedRequest([], SamplingParams(), external_id, outputs, outputs, cancel=True)
        self.responder.submit(RequestHandle(fake_pb_utils.ResponseSender(), "cancel", external_id), parsed)

    def pass_time(self) -> None:
        """LATER_S go by for the scheduler."""
        self.core.scheduler.roster.clock = lambda: time.monotonic() + LATER_S

    def close(self) -> None:
        self.runner.gate.set()
        super().close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path).hf


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def data(sender: fake_pb_utils.ResponseSender) -> list[Any]:
    """The responses with data."""
    assert sender.final.wait(WAIT_S), "no FINAL"
    return [response for response in sender.responses if response.error is None]


def texts(responses: list[Any], name: str) -> list[str]:
    return [response.tensors[name][0].decode() for response in responses]


def total(responses: list[Any], name: str) -> int:
    return sum(int(response.tensors[name][0]) for response in responses)


def last(responses: list[Any], name: str) -> int:
    return int(responses[-1].tensors[name][0])


PROMPT = [7, 8, 9, 10, 11]
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.mark.row("A19", clauses=("reasons",))
@pytest.mark.parametrize("cumulative", [False, True], ids=["delta", "cumulative"])
@pytest.mark.parametrize("reason", ["length", "stop", "cancelled", "timeout", "error", "shutdown"])
def test_each_end_is_a_finish_reason_that_the_client_sees(
    tmp_path: Path, reason: str, cumulative: bool
) -> None:
    """On the last response with data; `error` and `shutdown` are those of a stream that had begun, and the
    error itself, with FINAL, comes behind them."""
    harness = Harness(tmp_path)
    try:
        params, scheduling = LONG, SchedulingParams()
        if reason == "length":
            params = SHORT
        elif reason == "stop":
            third = generate_alone(PROMPT, SHORT, MAX_MODEL_LEN)[0][2]
            params = SamplingParams(max_tokens=300, ignore_eos=True, stop_token_ids=(third,))
        else:
            harness.runner.hold_after_token_of = "t-1"
        if reason == "timeout":
            scheduling = SchedulingParams(deadline=time.monotonic() + LATER_S)
        sender = harness.submit(PROMPT, params, scheduling=scheduling, cumulative=cumulative)
        assert sender.first.wait(WAIT_S)
        if reason == "timeout":
            harness.pass_time()
        elif reason == "cancelled":
            harness.runner.is_slow = lambda: not sender.final.is_set()
            harness.cancel("request 1")
        elif reason == "error":
            harness.runner.is_broken = True
        elif reason == "shutdown":
            harness.loop.stop()
        harness.runner.gate.set()
        responses = data(sender)
        reasons = texts(responses, "finish_reason")
        assert reasons[-1] == reason and not any(reasons[:-1])
        expected = generate_alone(PROMPT, params, MAX_MODEL_LEN)[0]
        shown = responses[-1:] if cumulative else responses
        got = [int(i) for response in shown for i in response.tensors["output_ids"]]
        assert got == expected[: len(got)]
        assert total(shown, "num_output_tokens") == len(got)
        error = sender.responses[-1].error
        codes = {
            "error": fake_pb_utils.TritonError.INTERNAL,
            "shutdown": fake_pb_utils.TritonError.UNAVAILABLE,
        }
        assert (None if error is None else error.code()) == codes.get(reason)
    finally:
        harness.close()


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_sent_nothing_ends_with_the_error_alone(harness: Harness, stream: bool) -> None:
    """HTTP generate wants one response, and a client that has nothing needs no reason beside the error."""
    harness.runner.is_broken = True
    sender = harness.submit(PROMPT, SHORT, stream=stream)
    assert data(sender) == [] and len(sender.responses) == 1


def test_each_choice_of_a_broken_stream_is_told_and_those_that_had_ended_are_not_again(
    harness: Harness,
) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=3)
    ends = [len(output) for output, _ in generate_choices_alone(PROMPT, params, MAX_MODEL_LEN)]
    harness.runner.hold_after_token_of = "t-1"
    sender = harness.submit(PROMPT, params)
    assert sender.first.wait(WAIT_S)
    harness.runner.is_broken = True
    harness.runner.gate.set()
    responses = data(sender)
    by_choice = {index: [r for r in responses if last([r], "index") == index] for index in range(3)}
    for index, own in by_choice.items():
        reasons = texts(own, "finish_reason")
        assert reasons[-1] == ("error" if ends[index] > 1 else "stop"), ends
        assert not any(reasons[:-1])
    assert sender.responses[-1].error is not None


@pytest.mark.row("A13", clauses=("reason",))
@pytest.mark.row("A19", clauses=("stop-reason",))
def test_the_stop_reason_names_what_stopped_it(tmp_path: Path, tokenizer: Any) -> None:
    """A stop string over a token's border, a stop token id as text, and nothing for the end of text, the
    length and a cancellation."""
    harness = Harness(tmp_path, tokenizer)
    try:
        ids = generate_alone(PROMPT, LONG, MAX_MODEL_LEN)[0]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        position = next(i for i in range(3, len(text)) if text.find(text[i : i + 2]) == i)
        stop = text[position : position + 2]
        cases: list[tuple[SamplingParams, str, str]] = [
            (SamplingParams(max_tokens=300, ignore_eos=True, stop=("never", stop)), "stop", stop),
            (SamplingParams(max_tokens=300, ignore_eos=True, stop_token_ids=(ids[4],)), "stop", str(ids[4])),
            (SHORT, "length", ""),
        ]
        for params, reason, told in cases:
            responses = data(harness.submit(PROMPT, params))
            assert texts(responses, "finish_reason")[-1] == reason
            assert texts(responses, "stop_reason")[-1] == told
            assert not any(texts(responses, "stop_reason")[:-1])
        # The prompts of which the fake model ends its text: as many as it takes to find one.
        rng = random.Random(1)
        params = SamplingParams(max_tokens=300)
        while True:
            prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(5)]
            if generate_alone(prompt, params, MAX_MODEL_LEN)[1] == "stop":
                break
        responses = data(harness.submit(prompt, params))
        assert texts(responses, "finish_reason")[-1] == "stop"
        assert texts(responses, "stop_reason")[-1] == ""
    finally:
        harness.close()


def test_tokens_behind_a_stop_string_are_not_counted(tmp_path: Path, tokenizer: Any) -> None:
    harness = Harness(tmp_path, tokenizer)
    try:
        for prompt in ([3 + i, 9, 11] for i in range(6)):
            ids = generate_alone(prompt, LONG, MAX_MODEL_LEN)[0]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            stop = text[10:12]
            params = SamplingParams(max_tokens=300, ignore_eos=True, stop=(stop,))
            count = next(
                k for k in range(len(ids)) if stop in tokenizer.decode(ids[:k], skip_special_tokens=True)
            )
            for stream in (True, False):
                responses = data(harness.submit(prompt, params, stream=stream))
                assert total(responses, "num_output_tokens") == count
                assert "".join(texts(responses, "text_output")) == text[: text.index(stop)]
                assert last(responses, "num_input_tokens") == len(prompt)
    finally:
        harness.close()


@pytest.mark.row("A19", clauses=("usage",))
@pytest.mark.row("A38", clauses=("cache",))
def test_counts_are_exact_however_the_answer_came(tmp_path: Path) -> None:
    """Prompts with and without a cached beginning, several choices, preemption, merged responses, whole
    answers: the prompt's tokens, those of the output, and those that nobody computed for this request.

    Accepted drafts are 0, as nothing speculates.
    """
    rng = random.Random(5)
    for num_blocks, is_slow in ((256, False), (256, True), (40, False)):
        harness = Harness(tmp_path, num_blocks=num_blocks, max_num_batched_tokens=32)
        pause = (lambda: threading.Event().wait(0.005)) if is_slow else None
        try:
            shared = [rng.randrange(1, VOCAB_SIZE) for _ in range(24)]
            data(harness.submit(shared, SHORT))
            sent = []
            for number in range(12):
                prompt = shared[: rng.choice((0, 8, 24))] + [
                    rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))
                ]
                options: dict[str, Any] = {"max_tokens": rng.randrange(1, 40)}
                if number % 3 == 1:
                    options |= {"n": 3, "temperature": 1.0, "seed": number}
                params = SamplingParams(**options)
                sender = harness.submit(prompt, params, stream=bool(number % 4), delay=pause)
                sent.append((prompt, params, sender))
            for prompt, params, sender in sent:
                responses = data(sender)
                expected = generate_choices_alone(prompt, params, MAX_MODEL_LEN)
                for index, (ids, reason) in enumerate(expected):
                    own = [r for r in responses if last([r], "index") == index]
                    assert [int(i) for r in own for i in r.tensors["output_ids"]] == ids
                    assert total(own, "num_output_tokens") == len(ids)
                    assert {last([r], "num_input_tokens") for r in own} == {len(prompt)}
                    assert texts(own, "finish_reason")[-1] == reason
            if num_blocks == 40:
                assert harness.core.stats().num_preemptions > 0, "the pool was not small enough"
            # Alone, so that what the engine computed is what this request cost.
            for cached, prompt in ((0, [1, *shared]), (24, [*shared, 1, 2])):
                harness.core.kv.reset()
                data(harness.submit(shared, SHORT))
                before = harness.core.stats().num_scheduled_tokens
                responses = data(harness.submit(prompt, SHORT))
                computed = harness.core.stats().num_scheduled_tokens - before
                assert {last([r], "num_cached_tokens") for r in responses} == {cached}
                assert computed == len(prompt) - cached + SHORT.max_tokens - 1
                timing = responses[-1].tensors["timing"][0].decode()
                assert f'"num_cached_tokens": {cached}' in timing and '"num_accepted_drafts": 0' in timing
        finally:
            harness.close()
