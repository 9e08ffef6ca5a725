"""EngineLoop with the real core and scheduler, a fake runner, and a bare socket in a frontend's place."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from quire.config import EngineConfig
from quire.engine import loop as loop_module
from quire.engine.cache_commands import (
    CacheCommand,
    Health,
    Inspect,
    Profile,
    Requests,
    Reset,
    Sleep,
    Unpin,
    Wake,
)
from quire.engine.core import MAX_FAILED_STEPS, EngineCore
from quire.engine.executor import RunnerExecutor
from quire.engine.loop import EngineLoop
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CancelByExternalId,
    CommandResult,
    Control,
    EmbedsMessage,
    EngineInfo,
    FrontendMessage,
    Goodbye,
    Hello,
    Outputs,
    encoder,
    engine_message_decoder,
)
from quire.engine.processes import start_time_of
from quire.engine.shared_array import SharedArray
from quire.errors import MAX_DESCRIPTION, CheckpointError, describe
from quire.outputs import EngineCoreOutput
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.fake_runner import VOCAB_SIZE, FakeRunner, generate_alone
from tests.fixtures.waiting import wait_until

WAIT_S = 60.0
PROMPT = [3, 1, 4, 1, 5]
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


class Runner(FakeRunner):
    """Waits, or fails, when it is told to."""

    def __init__(self) -> None:
        super().__init__(256, 4, max_model_len=512)
        self.is_broken = False
        self._gate, self._num_allowed = threading.Condition(), math.inf

    def allow(self, num_steps: float) -> None:
        """So many steps end from now on."""
        with self._gate:
            self._num_allowed = num_steps
            self._gate.notify_all()

    def execute(self, output: Any) -> Any:
        with self._gate:
            assert self._gate.wait_for(lambda: self._num_allowed > 0, WAIT_S)
            self._num_allowed -= 1
        result = super().execute(output)
        if self.is_broken:
            self.was_told_of_failure = True
            raise RuntimeError("\ud800 the device is gone " + "x" * 1000)
        return result


class Peer:
    """A loop that runs in a thread, and a socket that talks to it.

    Within the process a message has arrived when it is sent: the loop has it before its next step.
    """

    def __init__(self, **options: Any) -> None:
        config = EngineConfig.from_mapping({"model": "fake", "block_size": 4, **options})
        self.runner = Runner()
        self.core = EngineCore(config, RunnerExecutor(self.runner))
        self.context: zmq.Context[Any] = zmq.Context()
        router = self.context.socket(zmq.ROUTER)
        router.bind("inproc://engine")
        self.loop = EngineLoop(self.core, router)
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.router = router
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect("inproc://engine")
        self.send(Hello(os.getpid()))
        self.receive(EngineInfo)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.failure = error

    def send(self, message: FrontendMessage | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else encoder.encode(message))

    def receive(self, kind: Any) -> Any:
        """The next message of this kind."""
        while True:
            assert self.socket.poll(WAIT_S * 1000), f"no {kind.__name__}"
            message = engine_message_decoder.decode(self.socket.recv())
            if isinstance(message, kind):
                return message

    def add(self, request_id: str, params: SamplingParams = TEN, **options: Any) -> None:
        self.send(AddRequest(request_id, PROMPT, params, **options))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No step ends in here, so requests sent first are still running when what is sent next is read."""
        self.runner.allow(0)
        yield
        self.runner.allow(math.inf)

    def final(self, request_id: str) -> tuple[list[int], str, str, str]:
        """All of a request: tokens, finish reason, error and its code."""
        tokens: list[int] = []
        while True:
            for output in self.receive(Outputs).outputs:
                assert output.request_id == request_id
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens, output.finish_reason, output.error or "", output.error_code
            # Nothing else is under way, so what comes is the request's.

    def ask(self, command: CacheCommand) -> CommandResult:
        self.send(Control(command, "t"))
        result: CommandResult = self.receive(CommandResult)
        return result

    def check_alive(self) -> None:
        """The engine still gives the right tokens, and holds nothing of what was refused."""
        self.add("good")
        assert self.final("good") == (generate_alone(PROMPT, TEN, 512)[0], "length", "", "")
        assert self.thread.is_alive()
        self.core.scheduler.check_integrity()
        assert not self.core.scheduler.has_unfinished() and not self.loop._owners

    def close(self) -> None:
        self.loop.stop()
        self.send(Goodbye())  # wakes it
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.core.close()
        self.context.destroy(linger=0)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    # A lone surrogate in a log cannot be sent to the process that reports on tests (pytest-xdist).
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    peer = Peer()
    yield peer
    peer.close()


def raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


ADD = {"type": "add", "request_id": "bad", "prompt_token_ids": PROMPT, "sampling_params": {}}
GARBAGE = {
    "nothing": b"",
    "noise": b"\xc1\xff\x00garbage",
    "nested": nested(100_000),
    "too nested to be read to its end": encoder.encode({**ADD, "embeds": 0})[:-1] + nested(50_000),
    "no tag": raw(request_id="bad"),
    "unknown tag": raw(type="burn"),
    "a list": msgspec.msgpack.encode([1, 2]),
    "hello of nobody": raw(type="hello", pid=2**22 + 1),
    "hello of a pid that cannot be": raw(type="hello", pid=2**63 - 1),
    "abort for no reason": raw(type="abort", request_ids=["x"], reason="why not"),
    "add without an id": raw(type="add", request_id=7),
}
ADDED = {
    "a prompt of texts": raw(**{**ADD, "prompt_token_ids": ["a"]}),
    "a prompt beyond 64 bits": encoder.encode(ADD)[:-1] + b"\x81\xa4seed\xd9\x02ab",
    "no prompt": raw(type="add", request_id="bad"),
    "negative tokens": raw(**{**ADD, "prompt_token_ids": [-1]}),
    "a name of a choice": raw(**{**ADD, "request_id": "bad#1"}),
    "nested": encoder.encode({**ADD, "embeds": 0})[:-1] + nested(300),
    "embeddings that are not there": encoder.encode(
        AddRequest(
            "bad", PROMPT, TEN, embeds=EmbedsMessage(SharedArray(2**22 + 1, 3, (2, 8), 1, 2), [(0, 2)], ["a"])
        )
    ),
    "embeddings of another width": encoder.encode(
        AddRequest("bad", PROMPT, TEN, embeds=EmbedsMessage(SharedArray(1, 3, (2, 9), 1, 2), [(0, 2)], ["a"]))
    ),
    "embeddings outside the prompt": encoder.encode(
        AddRequest("bad", PROMPT, TEN, embeds=EmbedsMessage(SharedArray(1, 3, (2, 8), 1, 2), [(4, 2)], ["a"]))
    ),
    "negative embeddings": encoder.encode(
        AddRequest("bad", PROMPT, TEN, embeds=EmbedsMessage(SharedArray(1, 3, (-2, 8), 1, 2), [], []))
    ),
    "positions of another length": encoder.encode(
        AddRequest(
            "bad",
            PROMPT,
            TEN,
            embeds=EmbedsMessage(SharedArray(1, 3, (2, 8), 1, 2), [(0, 2)], ["a"], b"\0" * 24),
        )
    ),
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
def test_a_frame_that_is_no_message_is_dropped(peer: Peer, frame: bytes) -> None:
    """Any exception on the way ended the loop, and with it the engine and everybody's requests."""
    peer.send(frame)
    peer.socket.send_multipart([b"two", frame])
    peer.check_alive()


@pytest.mark.parametrize("frame", ADDED.values(), ids=ADDED)
def test_a_request_that_cannot_be_taken_ends_once_with_an_error(peer: Peer, frame: bytes) -> None:
    peer.send(frame)
    (output,) = peer.receive(Outputs).outputs
    assert output.request_id.startswith("bad") and output.finish_reason == "error" and output.error
    assert len(output.error) < 2 * MAX_DESCRIPTION
    peer.check_alive()


NAN = float("nan")
OUTSIDE = {
    "n 0": {"n": 0},
    "n many": {"n": 10**9},
    "best_of below n": {"n": 3, "best_of": 2},
    "beams 0": {"beam_width": 0},
    "NaN": {"temperature": NAN},
    "cold": {"temperature": -1.0},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -7},
    "max_tokens": {"max_tokens": 0},
    "logprobs": {"logprobs": 10**6},
    "seed": {"seed": -1},
    "n-grams": {"no_repeat_ngram_size": -1},
    "stop ids": {"stop_token_ids": (-1,)},
    "bias of no token": {"logit_bias": {-1: 1.0}},
    "bias": {"logit_bias": {1: NAN}},
    "bad words": {"bad_words_ids": ((VOCAB_SIZE,),)},
}


@pytest.mark.parametrize("values", OUTSIDE.values(), ids=OUTSIDE)
def test_values_that_no_frontend_lets_through_meet_no_step(peer: Peer, values: dict[str, Any]) -> None:
    """A step with them would have ended the requests beside it too."""
    peer.add("bad", msgspec.structs.replace(SamplingParams(max_tokens=5), **values))
    _, reason, _, code = peer.final("bad")
    assert (reason, code) == ("error", "INVALID_ARG")
    peer.check_alive()


@pytest.mark.parametrize(
    "options",
    [
        {"scheduling": SchedulingParams(priority=10**6)},
        {"scheduling": SchedulingParams(retention=-1)},
        {"scheduling": SchedulingParams(deadline=NAN)},
        {"scheduling": SchedulingParams(cache_ttl_s=float("inf"))},
        {"scheduling": SchedulingParams(is_internal=True)},
        {"arrival_time": NAN},
    ],
    ids=["priority", "retention", "deadline", "ttl", "exempt", "arrival"],
)
def test_likewise_for_what_is_said_of_scheduling(peer: Peer, options: dict[str, Any]) -> None:
    peer.add("bad", **options)
    assert peer.final("bad")[1::2] == ("error", "INVALID_ARG")
    peer.check_alive()


def test_a_request_that_fails_half_way_in_leaves_nothing(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(peer.core.scheduler.transfers, "prefetch", lambda request: 1 / 0)
        peer.add("bad")
        tokens, reason, error, code = peer.final("bad")
    assert (tokens, reason, code) == ([], "error", "INTERNAL")
    assert "ZeroDivisionError" in error
    peer.check_alive()
    assert "bad" not in peer.runner.times_computed


def test_a_second_request_of_the_same_id_does_not_end_the_first(peer: Peer) -> None:
    with peer.held():
        peer.add("good")
        peer.add("good")
    assert peer.final("good")[:2] == (generate_alone(PROMPT, TEN, 512)[0], "length")
    peer.check_alive()


def test_commands_are_answered(peer: Peer) -> None:
    health = peer.ask(Health()).result
    assert health == {"has_work": False, "num_finished_steps": 0, "is_asleep": False, "is_overdue": False}
    peer.check_alive()
    assert peer.ask(Health()).result["num_finished_steps"] > 0
    assert peer.ask(Inspect()).result["num_cached_blocks"] > 0
    assert peer.ask(Unpin(all=True)).result == {"num_pins": 0}
    assert peer.ask(Unpin(session="none", tenant="a")).result == {"num_pins": 0}
    assert peer.ask(Reset()).result["num_blocks"] > 0
    assert peer.ask(Inspect()).result["num_cached_blocks"] == 0


REFUSING = {
    "quota": {"tenants": '{"*": {"tokens_per_minute": 1, "max_waiting": 1}}'},
    "prediction": {"max_predicted_ttft_ms": 1},
    "deadline": {"default_ttft_deadline_ms": 1},
}


def test_sleep_waits_for_requests_if_it_is_told_to_and_nobody_is_served_in_it(peer: Peer) -> None:
    with peer.held():
        peer.add("running")
        peer.send(Control(Sleep(), "impatient"))
        peer.send(Control(Sleep(drain=True), "sleep"))
        peer.add("late")
    answers: list[CommandResult] = []
    outputs: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
    while len(answers) < 2:
        match peer.receive(CommandResult | Outputs):
            case CommandResult() as answer:
                answers.append(answer)
            case Outputs() as message:
                for output in message.outputs:
                    outputs[output.request_id].append(output)
    assert [(answer.token, answer.error_code) for answer in answers] == [
        ("impatient", "UNAVAILABLE"),
        ("sleep", ""),
    ]
    (late,) = outputs["late"]
    assert (late.error, late.error_code) == ("the engine is about to sleep", "UNAVAILABLE")
    running = [token for output in outputs["running"] for token in output.new_token_ids]
    assert running == generate_alone(PROMPT, TEN, 512)[0], "it was told its end before the answer"
    asleep = peer.ask(Health()).result
    assert asleep["is_asleep"] and not asleep["has_work"]
    assert peer.ask(Health()).result == asleep, "it is not asked for a token"
    assert peer.ask(Inspect()).result["num_cached_blocks"] == 0
    peer.add("late")
    assert "asleep" in peer.final("late")[2]
    assert not peer.ask(Sleep()).error, "asleep it is already"
    for _ in range(2):
        assert not peer.ask(Wake()).error
    peer.check_alive()


def test_a_wake_of_an_engine_that_is_awake_waits_for_no_request(peer: Peer) -> None:
    """As a sleep does, it waited for a moment without requests: under steady load it was never answered."""
    with peer.held():
        peer.add("running", SamplingParams(max_tokens=400, ignore_eos=True))
        peer.send(Control(Wake(), "wake"))
        peer.runner.allow(1)
        seen: list[EngineCoreOutput] = []
        while isinstance(message := peer.receive(CommandResult | Outputs), Outputs):
            seen += message.outputs
        assert (message.token, message.error) == ("wake", "")
        assert not any(output.finish_reason for output in seen), "the request goes on"
        peer.send(AbortRequests(["running"], "cancelled"))
    assert peer.final("running")[1] == "cancelled"
    peer.check_alive()


def test_a_wake_that_fails_is_told_and_others_are_answered_meanwhile(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = peer.core.executor
    assert isinstance(executor, RunnerExecutor)
    executor._pool = ThreadPoolExecutor(1)
    waking, go = threading.Event(), threading.Event()

    def wake() -> None:
        waking.set()
        assert go.wait(WAIT_S)
        raise CheckpointError("the checkpoint is not there")

    monkeypatch.setattr(peer.runner, "wake", wake)
    assert not peer.ask(Sleep()).error
    peer.send(Control(Wake(), "wake"))
    assert waking.wait(WAIT_S)
    assert peer.ask(Health()).result["is_asleep"]
    go.set()
    answer = peer.receive(CommandResult)
    assert (answer.token, answer.error) == ("wake", "the checkpoint is not there")
    assert peer.ask(Health()).result["is_asleep"]
    monkeypatch.undo()
    assert not peer.ask(Wake()).error
    peer.check_alive()


def test_a_profile_is_answered_when_its_steps_are_done_or_its_time_is_over(peer: Peer) -> None:
    with peer.held():
        peer.add("slow")
        peer.send(Control(Profile(steps=4), "steps"))
        peer.send(Control(Profile(), "second"))
    refused = peer.receive(CommandResult)
    assert (refused.token, refused.error_code) == ("second", "UNAVAILABLE")
    answer = peer.receive(CommandResult)
    assert answer.token == "steps" and not answer.error
    events = answer.result["traceEvents"]
    counts = [sum(event["name"] == name for event in events) for name in ("schedule", "update", "send")]
    # A step that is under way when the profile is asked for has an end only.
    assert counts in ([4, 4, 4], [4, 5, 5])
    assert answer.result["otherData"]["roofline"]["phases"] == {}  # a fake runner has no model
    assert peer.final("slow")[1] == "length"
    peer.check_alive()
    idle = peer.ask(Profile(seconds=0.05))
    assert [event for event in idle.result["traceEvents"] if event["ph"] == "X"] == []
    peer.check_alive()


def beside_steps(peer: Peer) -> None:
    """Messages are handled while a step is computed, or weights are loaded."""
    assert isinstance(peer.core.executor, RunnerExecutor)
    peer.core.executor._pool = ThreadPoolExecutor(1)


def test_a_profile_whose_time_is_over_in_a_step_is_answered_though_another_is_asked_for(peer: Peer) -> None:
    """The second took the place of the first, which had no answer for ever."""
    beside_steps(peer)
    with peer.held():
        peer.add("slow")
        peer.send(Control(Profile(seconds=600), "first"))
        wait_until(lambda: peer.core.observer.profile).ends_at = 0.0
        peer.send(Control(Profile(seconds=0.01), "second"))
        assert peer.receive(CommandResult).token == "first"
    assert peer.receive(CommandResult).token == "second"


def test_an_engine_that_wakes_for_long_and_answers_is_not_taken_for_a_stuck_one(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rested only before a message came that it answered: `watchdog_s` later it was killed."""
    beside_steps(peer)
    waking, go, seen, handle = threading.Event(), threading.Event(), list[str](), peer.loop._handle
    monkeypatch.setattr(peer.runner, "wake", lambda: (waking.set(), go.wait()))
    monkeypatch.setattr(loop_module, "STEP_WAIT_MS", 1000 * WAIT_S)  # it rests for messages alone
    assert not peer.ask(Sleep()).error
    peer.loop.heartbeat = SimpleNamespace(  # type: ignore[assignment]
        beat=lambda *_: None, rest=lambda: seen.append("rest"), is_overdue=False
    )
    monkeypatch.setattr(peer.loop, "_handle", lambda *given: (seen.append("message"), handle(*given)))
    peer.send(Control(Wake(), "wake"))
    assert waking.wait(WAIT_S)
    assert peer.ask(Health()).result["is_asleep"]
    try:
        wait_until(lambda: seen.count("message") == 2 and seen[-1] == "rest", lambda: seen)
    finally:
        go.set()
    assert not peer.receive(CommandResult).error
    peer.check_alive()


def test_one_that_is_to_sleep_is_healthy_and_lets_none_in_that_it_would_wait_for(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe's token was refused, the answer an error. New requests between the two kept it awake."""
    beside_steps(peer)
    waking, go = threading.Event(), threading.Event()
    monkeypatch.setattr(peer.runner, "wake", lambda: (waking.set(), go.wait(WAIT_S)))
    assert not peer.ask(Sleep()).error
    refuses, send = [], peer.loop._send

    def told(identity: bytes, message: Any) -> None:
        refuses.append(peer.core.is_resting)
        send(identity, message)

    peer.send(Control(Wake(), "wake"))
    assert waking.wait(WAIT_S)
    peer.send(Control(Sleep(), "sleep"))
    assert peer.ask(Health()).result["is_asleep"]
    monkeypatch.setattr(peer.loop, "_send", told)
    go.set()
    assert [peer.receive(CommandResult).token for _ in range(2)] == ["wake", "sleep"]
    assert refuses[0] and peer.core.is_asleep
    monkeypatch.undo()
    assert not peer.ask(Wake()).error
    peer.core.begin_sleep(Sleep())
    assert not peer.ask(Health()).error
    peer.core.sleep()
    assert not peer.ask(Wake()).error
    peer.check_alive()


@pytest.mark.parametrize("limit", REFUSING)
def test_an_idle_engine_computes_a_token_for_the_probe_whatever_its_limits(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe was a request of the anonymous tenant: with its quota used up, or a prediction above the
    limit, a sound engine was not healthy, and a liveness probe ended it."""
    peer = Peer(**REFUSING[limit])
    scheduler = peer.core.scheduler
    try:
        peer.add("first")
        peer.final("first")
        monkeypatch.setattr(scheduler._admission, "predicted_ttft_s", lambda *given: 60.0)
        monkeypatch.setattr(scheduler.roster, "clock", lambda: time.monotonic() + 1.0)
        peer.add("second")
        assert peer.final("second")[1] in ("error", "timeout")
        limits = scheduler.roster.tenants.limits("")
        tokens_left = scheduler.roster.tenants._find("", limits).tokens
        before = peer.ask(Health()).result
        assert before["has_work"] is False
        wait_until(lambda: peer.ask(Health()).result["num_finished_steps"] > before["num_finished_steps"])
        assert scheduler.roster.tenants._find("", limits).tokens == tokens_left, "it was charged to somebody"
    finally:
        peer.close()


def test_the_warm_up_is_charged_to_nobody() -> None:
    """The anonymous tenant began in debt."""
    options = {"model": "fake", "block_size": 4, **REFUSING["quota"], **REFUSING["deadline"]}
    core = EngineCore(EngineConfig.from_mapping(options), RunnerExecutor(Runner()))
    core.scheduler.roster.clock = lambda: time.monotonic() + 1.0
    core.warm_up()
    assert core.num_finished_steps == 6 and core.kv.pool.num_free == core.kv.num_blocks
    assert core.scheduler.roster.tenants.tokens_left("", core.scheduler.roster.clock()) == 1.0


@pytest.mark.parametrize("answer", [2**70, "\ud800", object()], ids=["beyond 64 bits", "surrogate", "object"])
def test_an_answer_that_cannot_be_sent_is_an_error(
    peer: Peer, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer.core.scheduler, "inspect", lambda: {"tiers": answer})
    result = peer.ask(Inspect())
    assert result.error and result.error_code == "INTERNAL"
    peer.check_alive()


@pytest.mark.parametrize(
    "command", [{"command": "burn"}, {"command": "unpin"}, {"command": "reset", "also": 1}, 7, None]
)
def test_a_command_that_is_none_is_an_error(peer: Peer, command: Any) -> None:
    peer.send(raw(type="control", command=command, token="t"))
    assert peer.receive(CommandResult).error_code == "INTERNAL"
    peer.send(encoder.encode({"type": "control", "token": "u", "command": 0})[:-1] + nested(300))
    assert peer.receive(CommandResult).token == "u"
    peer.check_alive()


def test_a_cancellation_by_id_ends_requests_of_its_tenant_alone(peer: Peer) -> None:
    """Ids such as "1" are everybody's: one tenant's cancellation ended the others' requests."""
    with peer.held():
        peer.add("a", external_id="1", scheduling=SchedulingParams(tenant="a"))
        peer.add("b", external_id="1", scheduling=SchedulingParams(tenant="b"))
        peer.send(CancelByExternalId("1", "t"))
        peer.send(CancelByExternalId("1", ""))
        peer.send(CancelByExternalId("1", "t", tenant="a"))
    refused = peer.receive(CommandResult)
    assert refused.error_code == "NOT_FOUND" and "'1'" in refused.error
    assert peer.receive(CommandResult).error_code == "NOT_FOUND", "a token may be empty"
    ended: dict[str, str] = {}
    cancelled: list[dict[str, int]] = []
    while len(ended) < 2:
        message = peer.receive(Outputs | CommandResult)
        if isinstance(message, CommandResult):
            cancelled.append(message.result)
            continue
        for output in message.outputs:
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
    assert cancelled == [{"num_cancelled": 1}]
    assert ended == {"a": "cancelled", "b": "length"}
    peer.check_alive()


def test_requests_are_listed_by_tenant_and_leave_the_list_when_they_are_cancelled(peer: Peer) -> None:
    with peer.held():
        peer.add("a", external_id="1", scheduling=SchedulingParams(tenant="a"))
        peer.add("b", external_id="2", scheduling=SchedulingParams(tenant="b"))
        for command in (Requests("a"), Requests(), Requests(all=True)):
            peer.send(Control(command, "list"))
        for tenant, external_id in ("a", "1"), ("b", "2"):
            peer.send(CancelByExternalId(external_id, "cancel", tenant=tenant))
        peer.send(Control(Requests(all=True), "list"))
    results = [peer.receive(CommandResult) for _ in range(6)]
    lists = [[one["id"] for one in r.result["requests"]] for r in results if r.token == "list"]
    assert lists == [["1"], [], ["1", "2"], []]
    peer.check_alive()


def test_a_message_is_one_frame(peer: Peer) -> None:
    """The last frame was taken for the message: two goodbyes together ended a frontend's requests."""
    peer.add("a")
    peer.socket.send_multipart([encoder.encode(Goodbye())] * 2)
    assert peer.final("a")[1] == "length"
    peer.check_alive()


def test_a_frontend_that_says_hello_again_is_watched_once(peer: Peer) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        peer.send(Hello(os.getpid()))
        peer.receive(EngineInfo)
    assert len(os.listdir("/proc/self/fd")) < before + 10  # noqa: PTH208
    peer.check_alive()


def test_a_newcomer_is_not_taken_for_the_dead_whose_descriptor_it_inherits(tmp_path: Path) -> None:
    """A frontend that had said goodbye and ended was looked for by the number of its closed descriptor, which
    the next one had by then: the engine forgot that one, and ended with the next step for want of any."""
    core = EngineCore(EngineConfig.from_mapping({"model": "fake", "block_size": 4}), RunnerExecutor(Runner()))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.bind(f"ipc://{tmp_path}/engine.ipc")
        dealer.connect(f"ipc://{tmp_path}/engine.ipc")
        loop = EngineLoop(core, router)
        with subprocess.Popen(["sleep", "600"]) as process:
            loop._handle(b"old", Hello(process.pid))
            process.kill()
        descriptor = loop._frontend_pidfds[b"old"]

        def drain() -> None:
            loop._handle(b"old", Goodbye())
            loop._handle(b"new", Hello(os.getpid()))

        loop._drain_socket = drain  # type: ignore[method-assign]
        dealer.send(b"both are there")
        assert router.poll(WAIT_S * 1000)
        loop._receive(0)
        assert loop._frontend_pidfds == {b"new": descriptor}
    core.close()


def test_a_frontend_that_hangs_behind_its_server_is_killed(tmp_path: Path) -> None:
    """A stub whose server had died with an answer under way stayed for ever: the thread that waited for it
    held the interpreter's lock, and its watchdog could not run."""
    core = EngineCore(EngineConfig.from_mapping({"model": "fake", "block_size": 4}), RunnerExecutor(Runner()))
    sleep = ["sleep", "600"]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, subprocess.Popen(sleep) as hung:
        router.bind(f"ipc://{tmp_path}/engine.ipc")
        with subprocess.Popen(sleep) as server, subprocess.Popen(sleep) as good:
            loop = EngineLoop(core, router, server.pid, start_time_of(server.pid) or 0)
            for process in (hung, good):
                loop._handle(str(process.pid).encode(), Hello(process.pid))
            server.kill()
            good.terminate()
        loop.run()
        try:
            assert hung.wait(WAIT_S) == -signal.SIGKILL and good.returncode == -signal.SIGTERM
        finally:
            hung.kill()
    core.close()


def test_an_engine_whose_every_step_fails_ends(peer: Peer) -> None:
    """It went on for ever: every request got an error and the server stayed ready."""
    peer.check_alive()
    peer.runner.is_broken = True
    for number in range(MAX_FAILED_STEPS):
        assert peer.thread.is_alive()
        peer.add(f"bad{number}")
        _, reason, error, code = peer.final(f"bad{number}")
        assert (reason, code) == ("error", "INTERNAL")
        assert "the device is gone" in error and len(error) < 2 * MAX_DESCRIPTION
    peer.thread.join(WAIT_S)
    assert "steps of the engine have all failed" in str(peer.failure)


def test_failures_between_steps_that_succeed_end_nothing(peer: Peer) -> None:
    for number in range(2 * MAX_FAILED_STEPS):
        peer.runner.is_broken = True
        peer.add(f"bad{number}")
        assert peer.final(f"bad{number}")[1] == "error"
        peer.runner.is_broken = False
        peer.check_alive()


@pytest.mark.parametrize("method", ["expire", "schedule", "update"])
def test_a_broken_scheduler_ends_the_engine_and_none_of_its_requests(
    peer: Peer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on in the next one: nothing is said of them."""
    monkeypatch.setattr(peer.core.scheduler, method, lambda *_: 1 / 0)
    peer.add("bad")
    peer.thread.join(WAIT_S)
    assert isinstance(peer.failure, ZeroDivisionError)
    while peer.socket.poll(0):
        assert not isinstance(engine_message_decoder.decode(peer.socket.recv()), Outputs)


def test_goodbye_ends_the_loop(peer: Peer) -> None:
    peer.send(AbortRequests([], "cancelled"))
    peer.send(Goodbye())
    peer.thread.join(WAIT_S)
    assert not peer.thread.is_alive() and peer.failure is None


def test_any_exception_has_a_description() -> None:
    class Bad(Exception):
        def __str__(self) -> str:
            return str(1 / 0)

    for error in (Bad(), ValueError("\ud800\n" * 1000), RecursionError("deep")):
        line = describe(error)
        assert line.startswith(type(error).__name__)
        assert len(line) < 2 * MAX_DESCRIPTION and "\n" not in line and line.encode()
