"""How often a stream is sent to, and that what is merged is what would have come one by one."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.outputs import EngineCoreOutput, TokenLogprobs  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.sending.pacing import (  # noqa: E402
    CPU_SHARE,
    MAX_INTERVAL_S,
    MAX_PERIOD_S,
    PATH_FACTOR,
    SEND_SHARE,
    Pace,
)
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.checkpoints import write_tokenizer  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_choices import WAIT_S, Harness  # noqa: E402

OUTPUTS = frozenset({"text_output", "output_ids", "finish_reason", "index", "logprobs", "num_output_tokens"})
LETTER = 73
"""Token of the letter e."""


def close(value: float) -> Any:
    return pytest.approx(value, rel=0.01)


def charged(pace: Pace, seconds: float, cpu_seconds: float) -> Pace:
    for _ in range(400):
        pace.charge(4, 4 * seconds, 4 * cpu_seconds)
    return pace


def test_one_stream_is_never_paced() -> None:
    assert charged(Pace(2, 2), 1.0, 1.0).interval_s(1) == 0.0


def test_streams_share_the_time_of_the_sending_thread() -> None:
    pace = charged(Pace(0, 2), 2e-4, 1.0)
    for count in (2, 16, 256):
        assert pace.interval_s(count) == close(count * 2e-4 / SEND_SHARE)
    assert pace.interval_s(10**6) == MAX_INTERVAL_S


def test_streams_leave_the_engine_its_cores() -> None:
    cost = 1e-4 * PATH_FACTOR
    assert charged(Pace(2, 2), 0.0, 1e-4).interval_s(8) == close(8 * cost / (2 * CPU_SHARE))
    assert charged(Pace(2, 2, 4), 0.0, 1e-4).interval_s(2) == close(2 * cost / (2 * CPU_SHARE / 4))
    assert charged(Pace(2, 2), 0.0, 1e-4).interval_s(100) == MAX_INTERVAL_S
    with_idle_cores = charged(Pace(6, 8), 0.0, 1e-4).interval_s(64)
    assert with_idle_cores == close(64 * cost / (2 + 6 * CPU_SHARE))


def test_the_pace_follows_the_latest_costs() -> None:
    pace = charged(Pace(0, 2), 1e-4, 0.0)
    before = pace.interval_s(100)
    assert charged(pace, 3e-4, 0.0).interval_s(100) == close(3 * before)
    assert charged(pace, 1e-4, 0.0).interval_s(100) == close(before)


def test_passes_of_few_responses_count_for_few() -> None:
    """The cost of a pass that sends one was taken for that of a response: streams waited too long."""
    pace = charged(Pace(0, 2), 1e-4, 0.0)
    for _ in range(200):
        pace.charge(1, 1e-3, 0.0)
        pace.charge(19, 19e-4, 0.0)
    assert pace.interval_s(100) == close(100 * 29e-4 / 20 / SEND_SHARE)


def test_half_a_step_counts_as_due() -> None:
    """Due just behind a step, a stream would wait for the next one's tokens, nearly a whole step too long."""
    pace = charged(Pace(0, 2), 1e-4, 0.0)
    before = pace.interval_s(300)
    for number in range(500):
        pace.step(100.0 + number * 0.02)
    assert pace.period_s == close(0.02)
    assert pace.interval_s(300) == close(before - 0.01)
    assert pace.interval_s(2) == 0.0


def test_a_pause_counts_as_a_tenth_of_a_second() -> None:
    """The first step of a process comes after an endless one: streams went without a pace for minutes."""
    pace = charged(Pace(0, 2), 1e-4, 0.0)
    before = pace.interval_s(300)
    for now in (1e6, 2e6):
        pace.step(now)
    assert 0 < pace.period_s <= 2 * 0.02 * MAX_PERIOD_S
    assert pace.interval_s(300) == close(before - pace.period_s / 2)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    write_tokenizer(tmp_path)
    harness = Harness(tmp_path, tokenizer=Tokenizer(tmp_path).hf)
    yield harness
    harness.close()


def script(rng: random.Random, name: str, params: SamplingParams) -> list[list[EngineCoreOutput]]:
    """What an engine would bring for a request, step by step; at random up to three tokens at once."""
    steps: list[list[EngineCoreOutput]] = []
    left = {index: rng.choice([rng.randrange(1, 40), rng.randrange(1, 600)]) for index in range(params.n)}
    while left:
        step = []
        for index in list(left):
            count = min(left[index], rng.choice([1, 1, 1, 2, 3]))
            left[index] -= count
            ids = [rng.randrange(3, 512) for _ in range(count)]
            chosen = [TokenLogprobs([i, 7], [-1.5, -2.5]) for i in ids] if params.logprobs else None
            reason = None if left[index] else rng.choice(["length", "stop"])
            step.append(EngineCoreOutput(name, ids, reason, logprobs=chosen, index=index))
            if not left[index]:
                del left[index]
        steps.append(step)
    return steps


def answers(sender: fake_pb_utils.ResponseSender) -> dict[int, dict[str, Any]]:
    """All responses of each choice, put together."""
    found: dict[int, dict[str, Any]] = {}
    for response in sender.responses:
        tensors = response.tensors
        whole = found.setdefault(
            int(tensors["index"][0]), {"text": "", "ids": [], "logprobs": [], "reason": "", "responses": 0}
        )
        assert not whole["reason"], "a response behind the last one of its choice"
        ids = tensors["output_ids"].tolist()
        assert int(tensors["num_output_tokens"][0]) == len(ids)
        whole["text"] += tensors["text_output"][0].decode("utf-8")
        whole["ids"] += ids
        whole["logprobs"] += json.loads(tensors["logprobs"][0])
        whole["reason"] = tensors["finish_reason"][0].decode()
        whole["responses"] += 1
    return found


def renamed(steps: list[list[EngineCoreOutput]], name: str) -> list[list[EngineCoreOutput]]:
    return [
        [
            EngineCoreOutput(
                name, one.new_token_ids, one.finish_reason, logprobs=one.logprobs, index=one.index
            )
            for one in step
        ]
        for step in steps
    ]


@pytest.mark.row("A31")
def test_merged_deltas_are_the_whole_answer(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lags of sends, intervals, stop strings, choices and cancellations: exactly one FINAL each, and
    deltas, ids and log-probabilities that put together are those of the answer that does not stream."""
    rng = random.Random(31)
    names = (f"r{number}" for number in itertools.count())
    num_merged = 0
    for _ in range(40):
        pause = rng.choice([0.0, 0.0, 0.002, 0.02])
        monkeypatch.setattr(harness.responder._queue.pace, "interval_s", lambda count, pause=pause: pause)
        running = []
        for _ in range(rng.randrange(1, 7)):
            stops = tuple(rng.choice(["e", "th", "in", "Ġ", "a ", "zz"]) for _ in range(rng.randrange(3)))
            params = SamplingParams(
                n=rng.choice([1, 1, 3]), stop=stops, logprobs=rng.choice([None, 1]), max_tokens=400
            )
            pair = []
            streamed, whole = next(names), next(names)
            steps = script(rng, streamed, params)
            intervals = rng.choice(
                [{}, {"stream_interval": rng.randrange(1, 9)}, {"stream_interval_ms": rng.randrange(1, 9)}]
            )
            for name, stream in ((streamed, True), (whole, False)):
                sender = fake_pb_utils.ResponseSender()
                if (lag := rng.choice([0.0, 0.0, 0.001])) and stream:
                    sender.send_delay = lambda lag=lag: time.sleep(lag)
                parsed = ParsedRequest([1, 2], params, name, OUTPUTS, OUTPUTS, stream=stream, **intervals)
                harness.responder.submit(RequestHandle(sender, name, name), parsed)
                pair.append(sender)
            running.append((pair, steps, renamed(steps, whole), rng.random() < 0.2))
        num_added = 0
        while num_added < 2 * len(running):  # the last round's may still be ended
            num_added += harness.core.seen.get(timeout=WAIT_S)[0] == "add"
        for (streamed_sender, _), *_, is_cancelled in running:
            streamed_sender.cancelled = is_cancelled
        for together in itertools.zip_longest(
            *(steps for _, one, other, _ in running for steps in (one, other)), fillvalue=[]
        ):
            harness.core.steps.put([output for step in together for output in step])
        for (streamed_sender, whole_sender), *_, is_cancelled in running:
            assert whole_sender.final.wait(WAIT_S) and streamed_sender.final.wait(WAIT_S)
            if streamed_sender.responses[-1].error is not None:
                assert is_cancelled
                streamed_sender.responses.pop()
                for index, got in answers(streamed_sender).items():
                    want = answers(whole_sender)[index]
                    assert (
                        want["text"].startswith(got["text"]) and want["ids"][: len(got["ids"])] == got["ids"]
                    )
                continue
            got, want = answers(streamed_sender), answers(whole_sender)
            assert {index: one["responses"] for index, one in want.items()} == dict.fromkeys(want, 1)
            num_merged += sum(len(one["ids"]) > one["responses"] for one in got.values())
            for one in (*got.values(), *want.values()):
                del one["responses"]
            assert got == want
        assert not harness.responder._queue._due and not harness.responder._queue._streams
    assert num_merged > 20, "hardly any stream had merged deltas"


def begun(
    harness: Harness, max_tokens: int, **options: int
) -> tuple[fake_pb_utils.ResponseSender, RequestHandle]:
    """A stream whose first token, a LETTER, has been sent."""
    sender = fake_pb_utils.ResponseSender()
    params = SamplingParams(max_tokens=max_tokens)
    handle = RequestHandle(sender, "x", "x")
    parsed = ParsedRequest([1], params, "x", OUTPUTS, OUTPUTS, stream=True, **options)
    harness.responder.submit(handle, parsed)
    assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
    harness.core.steps.put([EngineCoreOutput("x", [LETTER])])
    wait_for_responses(sender, 1)
    return sender, handle


@pytest.mark.row("A31", clauses=("interval", "first"))
def test_eight_tokens_a_response_are_an_eighth_of_the_responses(harness: Harness) -> None:
    """And the first token does not wait for seven others."""
    sender = begun(harness, 65, stream_interval=8)[0]
    for number in range(1, 9):
        assert [len(response.tensors["output_ids"]) for response in sender.responses] == [1] + [8] * (
            number - 1
        )
        for place in range(8):
            ends = number == 8 and place == 7
            harness.core.steps.put([EngineCoreOutput("x", [LETTER], "length" if ends else None)])
        wait_for_responses(sender, number + 1)
    assert sender.final.wait(WAIT_S)


def wait_for_responses(sender: fake_pb_utils.ResponseSender, count: int) -> None:
    wait_until(lambda: len(sender.responses) >= count, lambda: len(sender.responses), poll_s=0.001)


@pytest.mark.row("A31", clauses=("time",))
def test_responses_keep_an_interval_of_time(harness: Harness) -> None:
    """No response but the last comes earlier than 30 ms after the one before, however fast the tokens are."""
    sender, handle = begun(harness, 100_000, stream_interval_ms=30)
    times = [handle.last_sent[0, 0]]
    sender.send_delay = lambda: times.append(handle.last_sent[0, 0])
    num_sent = 1

    def send() -> bool:
        nonlocal num_sent
        for _ in range(10):
            harness.core.steps.put([EngineCoreOutput("x", [LETTER])])
        num_sent += 10
        return len(times) >= 6

    wait_until(send, poll_s=0.002)
    harness.core.steps.put([EngineCoreOutput("x", [LETTER], "length")])
    assert sender.final.wait(WAIT_S)
    assert answers(sender)[0]["ids"] == [LETTER] * (num_sent + 1)
    assert all(after - before > 0.029 for before, after in itertools.pairwise(times[:-1]))


def test_a_stream_without_news_is_sent_what_waits_when_its_time_comes(harness: Harness) -> None:
    """What a pause holds back does not wait for another token: an engine busy with prompts may have none."""
    sender = begun(harness, 9, stream_interval_ms=30)[0]
    harness.core.steps.put([EngineCoreOutput("x", [LETTER])])
    wait_for_responses(sender, 2)
    harness.core.steps.put([EngineCoreOutput("x", [LETTER], "length")])
    assert sender.final.wait(WAIT_S)
    assert answers(sender)[0]["ids"] == [LETTER] * 3


def test_a_pass_is_charged_for_each_response_of_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty streams whose time has come at once: what one response costs is a share of the pass."""
    charges: list[int] = []
    pace = harness.responder._queue.pace
    charge = pace.charge

    def counted(num_responses: int, *seconds: float) -> None:
        charges.append(num_responses)
        charge(num_responses, *seconds)

    senders = [fake_pb_utils.ResponseSender() for _ in range(20)]
    for number, sender in enumerate(senders):
        name = str(number)
        parsed = ParsedRequest([1], SamplingParams(max_tokens=2), name, OUTPUTS, OUTPUTS, stream=True)
        harness.responder.submit(RequestHandle(sender, name, name), parsed)
        assert harness.core.seen.get(timeout=WAIT_S)[0] == "add"
    monkeypatch.setattr(pace, "charge", counted)
    harness.core.steps.put([EngineCoreOutput(str(number), [LETTER], "length") for number in range(20)])
    for sender in senders:
        assert sender.final.wait(WAIT_S)
    assert sum(charges) == 20
