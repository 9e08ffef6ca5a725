"""A frontend over two engines: each request has one, and an engine's death is nothing to those of the other.

The oracle is the same request with an engine that lives.
"""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.core.probation import InFlightSuspects  # noqa: E402
from quire.engine.cache_commands import Inspect, Reset  # noqa: E402
from quire.engine.client import EngineClient  # noqa: E402
from quire.engine.connection import EngineConnection  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.engine.link import EngineLink  # noqa: E402
from quire.engine.loop import EngineLoop  # noqa: E402
from quire.engine.messages import EngineInfo  # noqa: E402
from quire.engine.processes import start_time_of  # noqa: E402
from quire.engine.supervisor import EngineAddress  # noqa: E402
from quire.errors import UnavailableError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.responder import Responder  # noqa: E402
from tests.fixtures.fake_runner import generate_choices_alone  # noqa: E402
from tests.fixtures.frontend import Ended, join_restarter  # noqa: E402
from tests.fixtures.mortal_engine import (  # noqa: E402
    MAX_MODEL_LEN,
    TENSORS,
    Frontend,
    MortalEngine,
    RandomRequests,
    Sender,
    answers,
    fake_core,
)
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_responder import SteppedRunner  # noqa: E402

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
UNAVAILABLE, NOT_FOUND = fake_pb_utils.TritonError.UNAVAILABLE, fake_pb_utils.TritonError.NOT_FOUND
TEXT = frozenset({"text_output", "finish_reason"})


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    made = Frontend(fake_core(), num_engines=2)
    yield made
    made.close()


def submit(frontend: Frontend, **options: Any) -> tuple[Sender, MortalEngine]:
    """A request, and the engine that has it."""
    before = [set(frontend.client.requests_of(link)) for link in frontend.client.links]
    sender = frontend.submit([[4, 5]], LONG, **options)
    (engine,) = (
        engine
        for engine, old in zip(frontend.engines, before, strict=True)
        if frontend.client.requests_of(engine) - old  # type: ignore[arg-type]
    )
    return sender, engine


def command(frontend: Frontend, **options: Any) -> Sender:
    return frontend.submit([[]], SamplingParams(), outputs=TEXT, final_outputs=TEXT, **options)


def choices(frontend: Frontend, engine: MortalEngine) -> list[Any]:
    """All choices of the open requests of an engine."""
    generations = frontend.responder._requests.generations
    open_ids = frontend.client.requests_of(engine)  # type: ignore[arg-type]
    return [choice for one in open_ids for choice in generations[one].processor.choices]


def is_whole(sender: Sender) -> bool:
    """Whether it has brought what an engine that lives would have, with one FINAL."""
    (found,) = answers(sender).values()
    return [(found["ids"], found["reason"])] == generate_choices_alone([4, 5], LONG, MAX_MODEL_LEN)


@pytest.mark.row("F17")
@pytest.mark.parametrize("seed", range(12))
def test_whenever_either_engine_dies_all_requests_end_as_if_none_had(seed: int) -> None:
    """Prompts of one request may be in different engines; both may be dead at the same time."""
    rng = random.Random(seed)
    frontend = Frontend(fake_core(num_blocks=256), num_engines=2)
    requests = RandomRequests(frontend, rng, most_prompts=3)
    dead: set[int] = set()
    try:
        while not requests.are_over:
            if frontend.client.is_up:
                requests.ask()
            for engine in frontend.engines:
                for _ in range(rng.randrange(3)):
                    engine.step()
            number = rng.randrange(2)
            if number in dead and rng.random() < 0.5:
                dead.remove(number)
                frontend.engines[number].replace()
            elif number not in dead and rng.random() < 0.2:
                dead.add(number)
                frontend.engines[number].die(undelivered=rng.randrange(5))
            if rng.random() < 0.7:
                frontend.turn()
        assert sum(engine.num_deaths for engine in frontend.engines) > 2
        requests.check()
        for number, engine in enumerate(frontend.engines):
            if number not in dead:
                engine.core.scheduler.check_integrity()
        assert not any(frontend.client.requests_of(link) for link in frontend.client.links)
    finally:
        frontend.close()


def test_requests_go_to_the_engine_with_the_fewest_open_ones(frontend: Frontend) -> None:
    first, second = frontend.engines
    begun = [submit(frontend) for _ in range(4)]
    assert [engine for _, engine in begun] == [first, second, first, second]
    for sender, engine in begun:
        sender.cancelled = engine is second
    frontend.responder._polls._queue = [(0.0, *rest) for _, *rest in frontend.responder._polls._queue]
    frontend.turn()
    assert len(first.core.scheduler.roster.requests) == 2 and not second.core.has_work
    assert [submit(frontend)[1] for _ in range(3)] == [second, second, first]


def test_streams_of_the_other_engine_never_pause(frontend: Frontend) -> None:
    lost, other = frontend.engines
    begun = [submit(frontend) for _ in range(6)]
    for _ in range(5):
        frontend.step()
    frontend.kill()
    assert [choice.paused_at > 0 for choice in choices(frontend, lost)] == [True] * 3
    while not all(sender.final.is_set() for sender, engine in begun if engine is other):
        assert not any(choice.paused_at or choice.num_continuations for choice in choices(frontend, other))
        frontend.step()
    late, engine = submit(frontend)
    assert engine is other, "there is one engine for new requests"
    assert not any(sender.final.is_set() for sender, engine in begun if engine is lost)
    assert frontend.client.is_up
    frontend.replace()
    frontend.run([late, *(sender for sender, _ in begun)])
    assert all(is_whole(sender) for sender in [late, *(sender for sender, _ in begun)])


def test_each_goes_on_in_the_successor_of_its_own_engine(frontend: Frontend) -> None:
    """Both are dead, and the second one is replaced first."""
    begun = [submit(frontend) for _ in range(4)]
    for _ in range(5):
        frontend.step()
    for engine in frontend.engines:
        engine.die()
    frontend.turn()
    refused = frontend.submit([[4, 5]], LONG)
    assert refused.responses[-1].error.code() == UNAVAILABLE
    first, second = frontend.engines
    second.replace()
    frontend.run([sender for sender, engine in begun if engine is second])
    assert not any(sender.final.is_set() for sender, engine in begun if engine is first)
    first.replace()
    frontend.run([sender for sender, _ in begun])
    assert all(is_whole(sender) for sender, _ in begun)


def test_an_engine_that_is_gone_for_ever_takes_its_own_streams_along(frontend: Frontend) -> None:
    """With a request whose prompts are in both goes its part in the other engine."""
    lost, other = frontend.engines
    begun = [submit(frontend) for _ in range(2)]
    both = frontend.submit([[4, 5], [6, 7]], LONG, outputs=TENSORS, final_outputs=TENSORS)
    for _ in range(5):
        frontend.step()
    frontend.kill()
    lost.give_up()
    frontend.turn()
    (ended, _), (goes_on, _) = begun
    for sender in (ended, both):
        assert sender.final.is_set() and sender.responses[-1].error.code() == UNAVAILABLE
        assert "it cannot be started" in sender.responses[-1].error.message()
    assert len(other.core.scheduler.roster.requests) == 1
    begun = [submit(frontend) for _ in range(3)]
    assert {engine for _, engine in begun} == {other}
    frontend.run([goes_on, *(sender for sender, _ in begun)])
    assert is_whole(goes_on) and all(is_whole(sender) for sender, _ in begun)


@pytest.mark.parametrize("max_pause_s", [0.0, 1e-9])
def test_the_time_that_requests_may_pause_is_that_of_their_engine(max_pause_s: float) -> None:
    frontend = Frontend(fake_core(), num_engines=2, max_pause_s=max_pause_s)
    try:
        (ended, _), (goes_on, _) = (submit(frontend) for _ in range(2))
        for _ in range(5):
            frontend.step()
        frontend.kill()
        frontend.responder._polls._queue = [(0.0, *rest) for _, *rest in frontend.responder._polls._queue]
        frontend.turn()
        assert ended.responses[-1].error.code() == UNAVAILABLE
        frontend.run([goes_on])
        assert is_whole(goes_on)
    finally:
        frontend.close()


def test_a_request_that_two_engines_died_of_leaves_no_part_in_the_other(frontend: Frontend) -> None:
    lost, other = frontend.engines
    sender = frontend.submit([[4, 5], [6, 7]], LONG, outputs=TENSORS, final_outputs=TENSORS)
    assert len(other.core.scheduler.roster.requests) == 1
    for _ in range(2):
        frontend.step()
        lost.die(InFlightSuspects(("t-0",), is_alone=True))
        frontend.turn()
        frontend.replace()
    assert sender.responses[-1].error.code() == fake_pb_utils.TritonError.INTERNAL
    assert not lost.core.has_work and not other.core.has_work


def test_a_cancellation_by_name_finds_its_requests_wherever_they_are(frontend: Frontend) -> None:
    lost, _ = frontend.engines
    begun = [submit(frontend, external_id=name) for name in ("mine", "mine", "other", "third")]
    for _ in range(5):
        frontend.step()
    missing = command(frontend, external_id="nobody", cancel=True)
    frontend.turn()
    assert missing.responses[0].error.code() == NOT_FOUND
    third = command(frontend, external_id="third", cancel=True)
    frontend.step()
    assert third.responses[0].error is None, "one engine had it"
    assert answers(begun[3][0])[0, 0]["reason"] == "cancelled"
    lost.die()
    mine = command(frontend, external_id="mine", cancel=True)
    frontend.turn()
    frontend.step()
    assert mine.final.is_set() and mine.responses[0].error is None
    for sender, _ in begun[:2]:
        assert answers(sender)[0, 0]["reason"] == "cancelled" and answers(sender)[0, 0]["ids"]
    frontend.replace()
    frontend.run([begun[2][0]])
    assert is_whole(begun[2][0])


def test_a_cancellation_that_no_living_engine_knows_may_have_died_with_the_other(frontend: Frontend) -> None:
    frontend.engine.die()
    cancel = command(frontend, external_id="nobody", cancel=True)
    frontend.turn()
    assert cancel.responses[0].error.code() == UNAVAILABLE


def test_commands_are_for_all_engines_and_answered_once(frontend: Frontend) -> None:
    answer = command(frontend, cache_control=Inspect())
    frontend.turn()
    told = msgspec.json.decode(answer.responses[0].text)
    assert [one["num_blocks"] for one in told["engines"]] == [256, 256]
    second = frontend.engines[1].core
    second.control = lambda command: (_ for _ in ()).throw(UnavailableError("busy"))  # type: ignore[method-assign]
    failed = command(frontend, cache_control=Reset())
    frontend.turn()
    assert failed.final.is_set() and "busy" in failed.responses[0].error.message()


def test_a_command_fails_where_an_engine_is_missing_and_where_one_dies_of_it(frontend: Frontend) -> None:
    lost, other = frontend.engines
    resets: list[Reset] = []
    other.core.control = lambda message: resets.append(message) or {}  # type: ignore[method-assign]
    lost.die()
    under_way = command(frontend, cache_control=Reset())
    frontend.turn()
    assert under_way.responses[0].error.code() == UNAVAILABLE and len(resets) == 1
    late = command(frontend, cache_control=Reset())
    frontend.turn()
    assert late.responses[0].error.code() == UNAVAILABLE and len(resets) == 1, "none got it"
    frontend.replace()
    again = command(frontend, cache_control=Reset())
    frontend.turn()
    assert again.responses[0].error is None and len(resets) == 2


class EngineOfLoops:
    """An engine whose loop is a thread of this process, and whose process is a `sleep`. Whoever connects
    starts it, with a runner that stops behind the first token of a request.

    Args:
        directory: for the sockets.
        context: of frontend and engine.
        held: id of the request.
    """

    def __init__(self, directory: Path, context: zmq.Context[Any], held: str) -> None:
        self._directory, self._context, self._held = directory, context, held
        self.runners: list[SteppedRunner] = []
        self._loops: list[tuple[EngineLoop, threading.Thread]] = []
        self.process: subprocess.Popen[bytes] | None = None

    def connect(self) -> tuple[EngineConnection, EngineInfo]:
        runner = SteppedRunner(256, 4)
        runner.hold_after_token_of = "" if self.runners else self._held
        self.runners.append(runner)
        config = EngineConfig.from_mapping({"model": "fake", "block_size": 4})
        router = self._context.socket(zmq.ROUTER)
        router.linger = 1000
        address = f"ipc://{self._directory}/{self._held}-{len(self.runners)}.ipc"
        router.bind(address)
        loop = EngineLoop(EngineCore(config, RunnerExecutor(runner)), router)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        self._loops.append((loop, thread))
        self.process = subprocess.Popen(["sleep", "600"])
        pid = self.process.pid
        connection = EngineConnection(self._context, EngineAddress(pid, address, 0, start_time_of(pid) or 0))
        return connection, connection.hello(60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for runner in self.runners:
            runner.gate.set()
        for loop, thread in self._loops:
            loop.stop()
            thread.join(60)
            assert not thread.is_alive()
            loop.socket.close()


@pytest.mark.row("F17")
@pytest.mark.parametrize("num_killed", [1, 2])
def test_processes_end_and_only_their_own_streams_pause(tmp_path: Path, num_killed: int) -> None:
    """Sockets, pidfds and the threads that start engines are real."""
    context: zmq.Context[Any] = zmq.Context()
    engines = [EngineOfLoops(tmp_path, context, f"t-{number}") for number in range(2)]
    ended = Ended()
    client = EngineClient([EngineLink(engine.connect) for engine in engines])
    served = Responder(None, client, observers=[ended])
    served.start()
    senders = [fake_pb_utils.ResponseSender() for _ in range(6)]
    for number, sender in enumerate(senders):
        parsed = ParsedRequest([4, 5], LONG, "", TENSORS, TENSORS, stream=True)
        served.submit(RequestHandle(sender, f"t-{number}", ""), parsed)
    wait_until(lambda: all(not engine.runners[0].gate.is_set() for engine in engines))
    assert not any(sender.final.is_set() for sender in senders)
    for engine in engines[:num_killed]:
        engine.kill()
    wait_until(lambda: all(len(engine.runners) == 2 for engine in engines[:num_killed]))
    records = ended.wait(6 if num_killed == 2 else 3)
    assert all(is_whole(senders[int(record.request_id[2:])]) for record in records)
    for engine in engines:
        engine.runners[0].gate.set()
    records = ended.wait(6)
    assert all(is_whole(sender) for sender in senders)
    num_pauses = {record.request_id: record.num_continuations for record in records}
    assert num_pauses == {f"t-{number}": int(number % 2 < num_killed) for number in range(6)}
    served.stop()
    served.join(60)
    assert not served.is_alive()
    join_restarter(client)
    for engine in engines:
        engine.close()
    context.term()
