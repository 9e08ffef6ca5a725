"""Sends that fail, at every position of a stream: it ends once, with the truth, and nobody else notices.

The stand-in for Triton's sender fails as the real one does where its shared memory is full: nothing is
delivered, and a sender whose FINAL failed is closed for good, with its client waiting.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.engine.cache_commands import Reset  # noqa: E402
from quire.outputs import EngineCoreOutput  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.sending import ends  # noqa: E402
from quire_ensemble.shared_memory import SMALL_BYTES  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_choices import OUTPUTS, WAIT_S, Harness  # noqa: E402

INTERNAL = fake_pb_utils.TritonError.INTERNAL
NUM_STEPS = 4
_names = itertools.count()


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setattr(ends, "END_PAUSES_S", (0.005,) * len(ends.END_PAUSES_S))
    monkeypatch.setattr(fake_pb_utils, "on_allocation", fake_pb_utils.on_allocation)
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def submit(
    harness: Harness, sender: fake_pb_utils.ResponseSender, params: SamplingParams, **options: Any
) -> RequestHandle:
    stream, name = options.pop("stream", True), options.pop("name", "t-1")
    parsed = ParsedRequest([1, 2], params, "known", OUTPUTS, OUTPUTS, stream=stream, **options)
    handle = RequestHandle(sender, name, "known")
    harness.responder.submit(handle, parsed)
    while harness.core.seen.get(timeout=WAIT_S)[:2] != ("add", name):
        pass
    return handle


def run(
    harness: Harness, fails: Container[int], n: int, stream: bool, closes: bool
) -> tuple[fake_pb_utils.ResponseSender, RequestHandle]:
    """A request of `n` choices, one step after the other: each step's responses are sent before the next."""
    sender = sender_of(fails, closes=closes)
    name = f"run-{next(_names)}"
    handle = submit(harness, sender, SamplingParams(n=n), stream=stream, name=name)
    for step in range(NUM_STEPS):
        last = "length" if step == NUM_STEPS - 1 else None
        outputs = [EngineCoreOutput(name, [10 * i + step], last, index=i) for i in range(n)]
        harness.core.steps.put(outputs)
        wanted = n * (step + 1) if stream else n * bool(last)
        wait_until(lambda wanted=wanted: sender.num_sends >= wanted or handle.is_ending or not handle.is_open)
    return sender, handle


def sender_of(fails: Container[int], **options: bool) -> fake_pb_utils.ResponseSender:
    """One whose `fails` count what is asked for before a send, too."""
    sender = fake_pb_utils.ResponseSender(fails, **options)
    fake_pb_utils.on_allocation = sender.allocate
    return sender


def delivered(sender: fake_pb_utils.ResponseSender) -> list[tuple[int, list[int], str]]:
    """(index, token ids, finish reason) of each data response."""
    names = ("index", "output_ids", "finish_reason")
    rows = [[r.tensors[name] for name in names] for r in sender.responses if r.error is None]
    return [(int(i[0]), ids.tolist(), reason[0].decode()) for i, ids, reason in rows]


@pytest.mark.parametrize("careful", [False, True], ids=["usual", "careful"])
@pytest.mark.parametrize("closes", [False, True], ids=["older", "real"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_send_at_every_position_ends_the_request_once_with_the_truth(
    harness: Harness, n: int, stream: bool, closes: bool, careful: bool
) -> None:
    """A delta that could not be sent was logged and forgotten: the stream went on without it and ended as
    `length`. Now everything before it has arrived, an error says that output was lost, and the engine stops.
    """
    harness.responder._ends._careful_until = math.inf if careful else 0.0
    whole, _ = run(harness, (), n, stream, closes)
    assert whole.final.wait(WAIT_S) and whole.num_sends == (NUM_STEPS * n if stream else n)
    assert whole.num_allocations == whole.num_sends + careful, "careful ones ask for room before FINAL"
    for position in range(whole.num_allocations):
        if position == whole.num_allocations - 1 and closes:
            continue  # see test_a_final_that_triton_refuses_for_good_is_told_and_given_up
        harness.responder._ends._careful_until = math.inf if careful else 0.0
        sender, handle = run(harness, {position}, n, stream, closes)
        assert sender.final.wait(WAIT_S), f"no FINAL after allocation {position} failed"
        *data, last = sender.responses
        assert delivered(sender) == delivered(whole)[: min(position, whole.num_sends - 1)]
        assert all(response.error is None for response in data)
        assert last.error.code() == INTERNAL and "output was lost" in last.error.message()
        assert drain(harness)[-1] == ("abort", handle.request_id, "error")
        assert not handle.is_open
        assert not harness.responder._requests.handles and not harness.responder._queue._due


def drain(harness: Harness) -> list[Any]:
    """What the engine was told, up to the abort that a lost delta leads to."""
    found = [harness.core.seen.get(timeout=WAIT_S)]
    while found[-1][0] != "abort":
        found.append(harness.core.seen.get(timeout=WAIT_S))
    return found


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_error_is_sent_again_until_it_arrives(harness: Harness, count: int) -> None:
    """The second token's send fails, and so do those of the error: it arrives when there is memory again."""
    sender, _ = run(harness, range(1, 1 + count), 1, True, closes=True)
    assert sender.final.wait(WAIT_S)
    assert [r.error and r.error.code() for r in sender.responses] == [None, INTERNAL]
    assert sender.num_allocations == 1 + count + 2 and sender.num_sends == 3


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_large_last_response_is_asked_room_for(harness: Harness, decoupled: bool) -> None:
    """Where memory is short it is large responses that do not fit: their error arrives on the real sender,
    also from a model that answers once, whose one response must not be used up by the attempt."""
    size = SMALL_BYTES // 4 + 1
    for fails in ((), (0,)):
        sender = sender_of(fails, decoupled=decoupled)
        harness.responder._ends._careful_until = 0.0
        name = f"run-{next(_names)}"
        submit(harness, sender, SamplingParams(), stream=False, name=name)
        harness.core.steps.put([EngineCoreOutput(name, list(range(size)), "length")])
        assert sender.final.wait(WAIT_S)
        (response,) = sender.responses
        assert (response.error is None) == (not fails)
        assert sender.num_sends == 1
    assert drain(harness)[-1] == ("abort", name, "error")


class ValueErrorOf(Exception):
    code, retry_after_s = "INVALID_ARG", None


@pytest.mark.parametrize("kind", ["cancel", "cache_control", "refusal"])
def test_answers_to_commands_and_refusals_are_not_lost_either(harness: Harness, kind: str) -> None:
    harness.responder._ends._careful_until = math.inf
    sender = sender_of({0})
    handle = RequestHandle(sender, "command", "known")
    outputs = frozenset({"text_output", "finish_reason"})
    if kind == "refusal":
        harness.responder.refuse(handle, ValueErrorOf("wrong"))
    else:
        fields: Any = {kind: True} if kind == "cancel" else {kind: Reset()}
        parsed = ParsedRequest([], SamplingParams(), "known", outputs, outputs, **fields)
        harness.responder.submit(handle, parsed)
    assert sender.final.wait(WAIT_S)
    (response,) = sender.responses
    words = "wrong" if kind == "refusal" else "output was lost"
    assert words in response.error.message()


def test_a_final_that_triton_refuses_for_good_is_told_and_given_up(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton closes a sender before it finds that FINAL does not fit, and takes nothing from it afterwards:
    what is left is to say so, to stop trying, and to serve the others."""
    caplog.set_level(logging.ERROR, "quire")
    sender, handle = run(harness, {NUM_STEPS - 1}, 1, True, closes=True)
    wait_until(lambda: not handle.is_open)
    assert not sender.final.is_set() and delivered(sender)[-1][2] == ""
    assert "closed" in sender.errors[-1] and len(sender.errors) == 2 + len(ends.END_PAUSES_S)
    assert handle.request_id not in harness.responder._requests.handles
    given_up = [record for record in caplog.records if "is given up" in record.getMessage()]
    assert [vars(record)["request_id"] for record in given_up] == [handle.request_id]
    other, _ = run(harness, (), 1, True, closes=True)
    assert other.final.wait(WAIT_S) and delivered(other)[-1][2] == "length"


def test_others_are_served_while_an_end_is_tried_again_and_unloading_tries_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "END_PAUSES_S", (3600.0,) * 10)
    harness = Harness(tmp_path)
    broken, handle = run(harness, {1, 2}, 1, True, closes=True)
    wait_until(lambda: harness.responder._ends._failed)
    other, _ = run(harness, (), 2, True, closes=True)
    assert other.final.wait(WAIT_S)
    assert handle.is_open and not broken.final.is_set()
    harness.close()
    assert broken.final.is_set() and "output was lost" in broken.responses[-1].error.message()


def test_unloading_answers_commands_that_the_engine_has_not(tmp_path: Path) -> None:
    """A cache command or a cancellation that was under way when the model was unloaded got no answer, and
    Triton waits for one before it unloads anything."""
    harness = Harness(tmp_path)
    held = threading.Event()
    harness.core.control = lambda command: {"held": held.wait(WAIT_S)}  # type: ignore[method-assign]
    senders = [fake_pb_utils.ResponseSender() for _ in range(2)]
    commands = ({"cache_control": Reset()}, {"cancel": True})
    for name, sender, fields in zip("ab", senders, commands, strict=True):
        parsed = ParsedRequest([], SamplingParams(), "known", OUTPUTS, OUTPUTS, **fields)
        harness.responder.submit(RequestHandle(sender, name, "known"), parsed)
    wait_until(lambda: len(harness.responder._requests.handles) == 2)
    harness.responder.stop()
    for sender in senders:
        assert sender.final.wait(WAIT_S)
        assert sender.responses[0].error.code() == fake_pb_utils.TritonError.UNAVAILABLE
    held.set()
    harness.close()


def test_a_request_that_cannot_be_written_for_the_engine_is_answered(harness: Harness) -> None:
    """It stayed among the open ones, and its client waited for ever."""
    sender = fake_pb_utils.ResponseSender()
    submit(harness, sender, SamplingParams())
    bad = fake_pb_utils.ResponseSender()
    handle = RequestHandle(bad, "t-9", "")
    parsed = ParsedRequest([2**70], SamplingParams(), "", OUTPUTS, OUTPUTS)
    harness.responder.submit(handle, parsed)
    assert bad.final.wait(WAIT_S)
    assert bad.responses[0].error.code() == INTERNAL
    harness.core.steps.put([EngineCoreOutput("t-1", [7], "stop")])
    assert sender.final.wait(WAIT_S)


def test_an_error_that_repeats_what_a_client_sent_has_a_length_and_a_utf8_form(harness: Harness) -> None:
    """Triton's error takes no unpaired surrogate; where making it fails, the request had no end."""
    sender = fake_pb_utils.ResponseSender()
    harness.responder.refuse(RequestHandle(sender, "t-8", ""), ValueErrorOf("\ud800" + "x" * 10**6))
    assert sender.final.wait(WAIT_S)
    message = sender.responses[0].error.message()
    assert message.startswith("\\ud800x") and len(message.encode()) < 10_000
