"""Observers hear once of each request that came to the model, however it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.cache_commands import Health
from quire.errors import InvalidArgumentError, UnavailableError
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.triton.observers import RequestEnded  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_log import request_fields  # noqa: E402
from quire.triton.request_traces import attributes_of  # noqa: E402
from tests.fixtures.frontend import Ended, Frontend  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_choices import ScriptedCore, tokens  # noqa: E402
from tests.triton.test_responder import OUTPUTS, Harness  # noqa: E402

WAIT_S = 60.0


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path, max_waiting_requests=4)
    yield harness
    harness.close()


def send(
    harness: Harness, parsed: ParsedRequest, sender: fake_pb_utils.ResponseSender | None = None
) -> fake_pb_utils.ResponseSender:
    sender = sender or fake_pb_utils.ResponseSender()
    harness.responder.submit(RequestHandle(sender, "r-1", parsed.external_id), parsed)
    return sender


def parsed(*, prompt: list[int] | None = None, **options: Any) -> ParsedRequest:
    tenant = options.pop("tenant", "")
    deadline = options.pop("deadline", None)
    stream = options.pop("stream", True)
    made = ParsedRequest(
        prompt or [5, 6, 7],
        SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **options}),
        "chat-1",
        OUTPUTS,
        OUTPUTS,
        stream=stream,
        scheduling=SchedulingParams(tenant=tenant, deadline=deadline),
    )
    made.arrived_at = time.monotonic()
    return made


def only(harness: Harness) -> RequestEnded:
    record = harness.ended.wait(1)[0]
    # A second record would come before the end of a request sent after it.
    done = harness.submit([9], max_tokens=1)
    assert done.final.wait(WAIT_S)
    assert [r.request_id for r in harness.ended.wait(2)] == [record.request_id, "t-0"]
    return record


@pytest.mark.parametrize("stream", [True, False])
def test_a_finished_request_has_its_times_and_counts(harness: Harness, stream: bool) -> None:
    asked = parsed(prompt=[3] * 9, stream=stream, n=3, tenant="acme", max_tokens=20)
    asked.others = [parsed(prompt=[4] * 5, max_tokens=10)]
    before = time.monotonic()
    sender = send(harness, asked)
    record = only(harness)
    assert sender.final.is_set()
    assert (record.request_id, record.external_id, record.model) == ("r-1", "chat-1", "generator")
    assert (record.tenant, record.n, record.params) == ("acme", 4, asked.params)
    assert (record.finish_reason, record.error_code, record.is_command) == ("length", "", False)
    assert record.is_stream is stream
    assert (record.num_prompt_tokens, record.num_output_tokens) == (9 + 5, 3 * 20 + 10)
    times = [before, record.arrived_at, record.admitted_at, record.first_token_at]
    times += [record.first_sent_at, record.ended_at, time.monotonic()]
    assert times == sorted(times), times


def test_what_the_prefix_cache_had(harness: Harness) -> None:
    for _ in range(2):
        assert send(harness, parsed(prompt=list(range(1, 18)))).final.wait(WAIT_S)
    assert [record.num_cached_tokens for record in harness.ended.wait(2)] == [0, 16]


def test_preemptions_and_drafts_are_those_of_all_choices_for_the_log_and_traces_too(tmp_path: Path) -> None:
    ended = Ended()
    core = ScriptedCore(EngineConfig.from_mapping({"model": "fake"}))
    frontend = Frontend(tmp_path, core, observers=[ended])
    try:
        sender = fake_pb_utils.ResponseSender()
        frontend.responder.submit(RequestHandle(sender, "t-1", ""), parsed(n=2))
        for index in range(2):
            counts = {"num_preemptions": 1 + index, "num_draft_tokens": 7, "num_accepted_drafts": 3 + index}
            core.steps.put([tokens(index, 5, finish_reason="length", **counts)])
        record = ended.wait(1)[0]
    finally:
        frontend.close()
    assert (record.num_preemptions, record.num_draft_tokens, record.num_accepted_drafts) == (3, 14, 7)
    line, attributes = request_fields(record), attributes_of(record)
    for name, count in (("preemptions", 3), ("draft_tokens", 14), ("accepted_draft_tokens", 7)):
        assert (line[name], attributes[f"quire.{name}"]) == (count, count)


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidArgumentError("top_p", "no"), "INVALID_ARG"), (UnavailableError("full"), "UNAVAILABLE")],
)
def test_refused_before_it_was_known(harness: Harness, error: Any, code: str) -> None:
    sender = fake_pb_utils.ResponseSender()
    harness.responder.refuse(RequestHandle(sender, "r-1", "chat-1"), error)
    record = only(harness)
    assert (record.finish_reason, record.error_code, record.external_id) == ("error", code, "chat-1")
    assert record.params is None and record.n == record.num_output_tokens == 0
    assert record.admitted_at == record.first_token_at == record.first_sent_at == 0.0


def test_refused_by_the_engine(harness: Harness) -> None:
    send(harness, parsed(prompt=[1] * 400, tenant="acme"))  # longer than the model takes
    record = only(harness)
    assert (record.finish_reason, record.error_code) == ("error", "INVALID_ARG")
    assert (record.tenant, record.admitted_at, record.num_prompt_tokens) == ("acme", 0.0, 400)


def test_a_client_that_left(harness: Harness) -> None:
    harness.runner.hold_after_token_of = "r-1"
    sender = send(harness, parsed(max_tokens=300))
    assert sender.first.wait(WAIT_S)
    sender.cancelled = True
    assert sender.final.wait(WAIT_S)
    harness.runner.gate.set()
    record = only(harness)
    assert (record.finish_reason, record.error_code) == ("cancelled", "CANCELLED")
    assert record.first_sent_at and record.num_output_tokens >= 1


def test_cancelled_by_its_id(harness: Harness) -> None:
    harness.runner.hold_after_token_of = "r-1"
    sender = send(harness, parsed(max_tokens=300))
    assert sender.first.wait(WAIT_S)
    answer = harness.cancel("chat-1")
    harness.runner.is_slow = lambda: not answer.final.is_set()
    harness.runner.gate.set()
    assert answer.final.wait(WAIT_S) and sender.final.wait(WAIT_S)
    told = {record.request_id: record for record in harness.ended.wait(2)}
    assert (told["r-1"].finish_reason, told["r-1"].error_code) == ("cancelled", "")
    assert not told["r-1"].is_command and told["t-0"].is_command


def test_too_late(harness: Harness) -> None:
    send(harness, parsed(max_tokens=300, deadline=time.monotonic() - 1))
    record = only(harness)
    assert record.finish_reason == "timeout"


def test_a_command(harness: Harness) -> None:
    asked = parsed()
    asked.cache_control = Health()
    sender = send(harness, asked)
    record = only(harness)
    assert sender.responses[0].error is None
    assert record.is_command and record.n == 0


@pytest.mark.parametrize("fails", [{0}, {1}, {0, 1}])
def test_a_response_that_is_lost(harness: Harness, fails: set[int]) -> None:
    """The error is told once; with two failures Triton takes no end at all, and the request is given up."""
    sender, runner, execute = fake_pb_utils.ResponseSender(fails), harness.runner, harness.runner.execute

    def behind(output: Any) -> Any:
        """The first two tokens go out one by one: neither is the last."""
        open_ids = harness.responder._requests.handles
        wait_until(lambda: sender.num_sends >= min(runner.num_steps, 2) or not open_ids)
        return execute(output)

    runner.execute = behind  # type: ignore[method-assign]
    send(harness, parsed(), sender)
    record = only(harness)
    assert sender.final.is_set() == (len(fails) == 1)
    assert (record.finish_reason, record.error_code) == ("error", "INTERNAL")


def test_an_unloaded_model_and_an_engine_that_died(tmp_path: Path) -> None:
    for end in ("unload", "death"):
        directory = tmp_path / end
        directory.mkdir()
        harness = Harness(directory)
        harness.runner.gate.clear()
        sender = send(harness, parsed())
        if end == "unload":
            harness.responder.stop()
        else:
            (link,) = harness.responder.engine.links
            harness.responder._continuation._max_pause_s = 0.0
            harness.responder._post(lambda link=link: setattr(link, "_has_died", True))
        assert sender.final.wait(WAIT_S)
        (record,) = harness.ended.wait(1)
        reason = "shutdown" if end == "unload" else "error"
        assert (record.finish_reason, record.error_code) == (reason, "UNAVAILABLE")
        harness.close()
        assert len(harness.ended.records) == 1


def test_an_observer_that_fails_disturbs_neither_requests_nor_others(harness: Harness) -> None:
    class Failing:
        def ended(self, record: RequestEnded) -> None:
            raise RuntimeError("no")

    harness.responder._ends._observers = [Failing(), harness.ended]
    assert send(harness, parsed()).final.wait(WAIT_S)
    assert only(harness).finish_reason == "length"
