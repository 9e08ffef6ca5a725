"""The responder against a real engine loop over ZeroMQ; only the model and Triton are stand-ins.

The stand-in for Triton raises where the real server crashes: sending or polling after FINAL.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from tests.fixtures.fake_runner import VOCAB_SIZE, FakeRunner, generate_alone  # noqa: E402
from tests.fixtures.frontend import Ended, Frontend  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402

MAX_MODEL_LEN = 400
OUTPUTS = frozenset({"text_output", "output_ids", "finish_reason"})
WAIT_S = 60.0
SLOW_S = 0.1
"""What a step takes at least while it is slow: some hundred of them are the time that a busy machine has to
deliver a message."""


class SteppedRunner(FakeRunner):
    """A FakeRunner whose steps a test may hold back, or slow down until what it waits for has come."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len=MAX_MODEL_LEN)
        self.gate = threading.Event()
        self.gate.set()
        self.hold_after_token_of = ""
        self.is_slow: Callable[[], bool] = lambda: False

    def execute(self, output: Any) -> Any:
        self.gate.wait()
        if self.is_slow():
            time.sleep(SLOW_S)
        result = super().execute(output)
        if self.hold_after_token_of in {row.request_id for row in output.scheduled if row.samples}:
            self.gate.clear()
            self.hold_after_token_of = ""
        return result


class Harness(Frontend):
    """Over a SteppedRunner."""

    core: EngineCore

    def __init__(self, directory: Path, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": "fake", "block_size": 4, **options})
        self.runner = SteppedRunner(256, 4)
        self.ended = Ended()
        super().__init__(directory, EngineCore(config, RunnerExecutor(self.runner)), observers=[self.ended])
        self._count = itertools.count()

    def submit(
        self,
        prompt: list[int],
        *,
        stream: bool = True,
        external_id: str = "",
        delay: Any = None,
        step_s: float = 0.0,
        stream_interval: int = 0,
        cumulative: bool = False,
        **params: Any,
    ) -> fake_pb_utils.ResponseSender:
        sender = fake_pb_utils.ResponseSender()
        sender.send_delay = delay
        handle = RequestHandle(sender, f"t-{next(self._count)}", external_id)
        handle.step_s = step_s
        parsed = ParsedRequest(
            prompt,
            SamplingParams(**params),
            external_id,
            OUTPUTS,
            OUTPUTS,
            cumulative=cumulative,
            stream=stream,
            stream_interval=stream_interval,
        )
        self.responder.submit(handle, parsed)
        return sender

    def cancel(self, external_id: str) -> fake_pb_utils.ResponseSender:
        sender = fake_pb_utils.ResponseSender()
        handle = RequestHandle(sender, f"t-{next(self._count)}", external_id)
        parsed = ParsedRequest([], SamplingParams(), external_id, OUTPUTS, OUTPUTS, cancel=True)
        self.responder.submit(handle, parsed)
        return sender

    def close(self) -> None:
        self.runner.gate.set()
        super().close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def ids_of(sender: fake_pb_utils.ResponseSender) -> list[int]:
    assert sender.final.wait(WAIT_S), "no FINAL"
    assert all(response.error is None for response in sender.responses)
    return [int(i) for response in sender.responses for i in response.tensors["output_ids"]]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def test_many_streams_without_cross_talk(harness: Harness) -> None:
    batch = prompts(48)
    params = {"max_tokens": 60, "ignore_eos": True}
    senders = [harness.submit(prompt, **params) for prompt in batch]
    for prompt, sender in zip(batch, senders, strict=True):
        expected, reason = generate_alone(prompt, SamplingParams(**params), MAX_MODEL_LEN)
        assert ids_of(sender) == expected
        reasons = [response.tensors["finish_reason"][0].decode() for response in sender.responses]
        assert reasons[-1] == reason
        assert not any(reasons[:-1])
    harness.core.scheduler.check_integrity()
    assert harness.core.stats().num_free_blocks == 256


def test_not_streaming_is_one_response_with_final(harness: Harness) -> None:
    sender = harness.submit([5, 6, 7], stream=False, max_tokens=30, ignore_eos=True)
    assert len(ids_of(sender)) == 30
    assert len(sender.responses) == 1


def test_first_response_comes_before_the_last_token_is_computed(harness: Harness) -> None:
    harness.runner.hold_after_token_of = "t-0"
    sender = harness.submit([5, 6, 7], max_tokens=200, ignore_eos=True)
    assert sender.first.wait(WAIT_S)
    harness.runner.gate.set()
    assert len(ids_of(sender)) == 200


def test_a_slow_sender_gets_merged_deltas(harness: Harness) -> None:
    """While the first response is being sent the engine takes 60 steps: deltas must merge, none be lost."""
    batch = prompts(16)
    params = {"max_tokens": 100, "ignore_eos": True}

    def send_slowly() -> None:
        wait_until(lambda: harness.runner.num_steps >= 60, poll_s=0.001)

    senders = [harness.submit(p, delay=send_slowly, **params) for p in batch]
    for prompt, sender in zip(batch, senders, strict=True):
        expected, _ = generate_alone(prompt, SamplingParams(**params), MAX_MODEL_LEN)
        assert ids_of(sender) == expected
    responses = sum(len(sender.responses) for sender in senders)
    assert responses < 16 * 100 / 2, f"{responses} responses for 1600 tokens"


def test_stream_interval(harness: Harness) -> None:
    sender = harness.submit([3, 4], stream_interval=8, max_tokens=65, ignore_eos=True)
    assert len(ids_of(sender)) == 65
    sizes = [len(response.tensors["output_ids"]) for response in sender.responses]
    assert all(size >= 8 for size in sizes[1:-1])


@pytest.mark.row("A20")
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_a_gone_client_frees_its_blocks_in_every_phase(tmp_path: Path, phase: str) -> None:
    options = {"max_num_seqs": 1 if phase == "queued" else 8, "max_num_batched_tokens": 4}
    harness = Harness(tmp_path, **options)
    harness.core.enable_trace()
    trace = harness.core.trace
    assert trace is not None

    def aborts() -> list[Any]:
        return [record for record in trace.records if record.get("event") == "abort"]

    try:
        harness.runner.hold_after_token_of = "t-0"
        other = harness.submit([9] * 3, max_tokens=300, ignore_eos=True)
        assert other.first.wait(WAIT_S)
        sender = harness.submit([5] * 200, max_tokens=100, ignore_eos=True)
        if phase == "decoding":
            harness.runner.hold_after_token_of = "t-1"
            harness.runner.gate.set()
            assert sender.first.wait(WAIT_S)
        sender.cancelled = True
        assert sender.final.wait(WAIT_S)
        harness.runner.is_slow = lambda: not aborts()
        harness.runner.gate.set()
        assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.CANCELLED
        expected, _ = generate_alone([9] * 3, SamplingParams(max_tokens=300, ignore_eos=True), MAX_MODEL_LEN)
        assert ids_of(other) == expected, "the other stream must not notice"
        wait_until(aborts)
        (abort,) = aborts()
        after = [r for r in trace.records if r.get("step", 0) > abort["step"] and "event" not in r]
        gone = abort["request_ids"][0]
        assert all(row[0] != gone for record in after for row in record["scheduled"])
        assert harness.core.stats().num_free_blocks == 256
    finally:
        harness.close()


def test_a_request_with_long_steps_is_polled_once_per_step(harness: Harness) -> None:
    harness.runner.gate.clear()
    start = time.monotonic()
    slow = harness.submit([5] * 8, max_tokens=4, ignore_eos=True, step_s=0.2)
    usual = harness.submit([6] * 8, max_tokens=4, ignore_eos=True)
    wait_until(lambda: usual.num_polls >= 20, "another's long steps are no reason to wait")
    slow_polls, elapsed = slow.num_polls, time.monotonic() - start
    assert slow_polls <= elapsed / 0.2 + 2
    harness.runner.gate.set()
    assert len(ids_of(slow)) == len(ids_of(usual)) == 4


def test_cancel_by_external_id(harness: Harness) -> None:
    harness.runner.hold_after_token_of = "t-0"
    sender = harness.submit([5, 6], external_id="chat-1", max_tokens=390, ignore_eos=True)
    other = harness.submit([5, 6], external_id="chat-2", max_tokens=390, ignore_eos=True)
    assert sender.first.wait(WAIT_S)
    answer = harness.cancel("chat-1")
    harness.runner.is_slow = lambda: not answer.final.is_set()
    harness.runner.gate.set()
    assert answer.final.wait(WAIT_S)
    assert answer.responses[0].error is None
    assert len(ids_of(sender)) < 390
    assert sender.responses[-1].tensors["finish_reason"][0] == b"cancelled"
    assert len(ids_of(other)) == 390
    missing = harness.cancel("chat-1")
    assert missing.final.wait(WAIT_S)
    assert missing.responses[0].error.code() == fake_pb_utils.TritonError.NOT_FOUND


def test_a_full_queue_is_unavailable_at_once(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_num_seqs=1, max_waiting_requests=2)
    try:
        senders: list[fake_pb_utils.ResponseSender] = []
        harness.runner.is_slow = lambda: sum(sender.final.is_set() for sender in senders) < 5
        senders += [harness.submit([4, 5], max_tokens=300, ignore_eos=True) for _ in range(8)]
        for sender in senders:
            assert sender.final.wait(WAIT_S)
        errors = [s.responses[-1].error for s in senders if s.responses[-1].error is not None]
        assert 5 <= len(errors) <= 6, "eight requests, two places to wait, and one to run when a step begins"
        assert {error.code() for error in errors} == {fake_pb_utils.TritonError.UNAVAILABLE}
        assert "max_waiting_requests" in errors[0].message()
    finally:
        harness.close()


def test_unloading_ends_open_streams(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.runner.gate.clear()
    sender = harness.submit([4, 5], max_tokens=300, ignore_eos=True)
    harness.responder.stop()
    assert sender.final.wait(WAIT_S)
    assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    harness.close()


def test_an_engine_that_dies_is_unavailable_and_the_next_one_serves(tmp_path: Path) -> None:
    """A client may send again what ends with UNAVAILABLE; with INTERNAL it gave up."""
    harness = Harness(tmp_path)
    harness.responder._continuation._max_pause_s = 0.0
    harness.runner.gate.clear()
    streamed, whole = (harness.submit([4, 5], stream=stream, max_tokens=300) for stream in (True, False))
    (link,) = harness.responder.engine.links
    harness.responder._post(lambda: setattr(link, "_has_died", True))
    for sender in (streamed, whole):
        assert sender.final.wait(WAIT_S)
        error = sender.responses[-1].error
        assert error.code() == fake_pb_utils.TritonError.UNAVAILABLE and "died" in error.message()
    harness.runner.gate.set()

    def served() -> fake_pb_utils.ResponseSender | None:
        """A request that is, once the next engine is there."""
        after = harness.submit([4, 5], max_tokens=3, ignore_eos=True)
        assert after.final.wait(WAIT_S)
        if after.responses[-1].error is None:
            return after
        assert after.responses[-1].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
        return None

    after = wait_until(served)
    assert after is not None and len(ids_of(after)) == 3
    harness.close()
