"""Between Triton's thread and the responder: bounded, in lanes, and nothing leaves `execute`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import FrontendConfig  # noqa: E402
from quire.engine.messages import EngineInfo  # noqa: E402
from quire.errors import InvalidArgumentError, QuireError, UnavailableError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.frontend import TritonPythonModel  # noqa: E402
from quire.triton.intake import LONG_BYTES, SHORT_THREADS, Intake  # noqa: E402
from quire.triton.raw_request import RawRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402

WAIT_S = 120.0
MAX_BYTES = 10 * LONG_BYTES
INFO = EngineInfo(1, 64, 600, 8, False, 8, 16, 1, "float32", "cpu")


class Bench:
    """An intake whose parser waits for `gate` with long texts; `submitted` and `refused`: what comes out."""

    def __init__(self, max_requests: int = 100) -> None:
        self.gate = threading.Event()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.submitted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[tuple[str, QuireError]] = queue.SimpleQueue()
        responder: Any = SimpleNamespace(
            submit=lambda handle, parsed: self.submitted.put(handle.request_id),
            refuse=lambda handle, error: self.refused.put((handle.request_id, error)),
        )
        self.responder = responder
        parser: Any = SimpleNamespace(parse=self.parse)
        self.intake = Intake(parser, responder, max_requests=max_requests, max_bytes=MAX_BYTES)
        self.intake.start()

    def parse(self, raw: RawRequest) -> Any:
        self.begun.put(raw.external_id)
        if raw.num_bytes > LONG_BYTES or raw.external_id == "slow":
            assert self.gate.wait(WAIT_S)
        if "panic" in raw.tensors:
            raise KeyboardInterrupt  # as PyO3's PanicException, no Exception
        if "bad" in (raw.external_id, *raw.tensors):
            raise ZeroDivisionError("a bug")
        return SimpleNamespace(cancel="cancel" in raw.tensors, external_id=raw.external_id)

    def put(self, name: str, num_bytes: int, external_id: str = "", **tensors: list[Any]) -> None:
        raw = RawRequest(tensors, {}, "{}", external_id or name, frozenset(), num_bytes=num_bytes)
        self.intake.put(RequestHandle(fake_pb_utils.ResponseSender(), name, name), raw)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.gate.set()
    bench.intake.stop(WAIT_S)


def test_no_text_holds_up_a_command(bench: Bench) -> None:
    """A probe of health waited behind every text that was to be tokenized, and found a busy server dead."""
    for _ in range(SHORT_THREADS + 1):
        bench.put("slow", LONG_BYTES)
    bench.put("long", LONG_BYTES + 1)
    bench.put("probe", 21, cache_control=[b'{"command": "health"}'])
    assert bench.submitted.get(timeout=WAIT_S / 2) == "probe"


def test_long_texts_do_not_hold_up_short_ones(bench: Bench) -> None:
    """Two texts of 4 MiB on two threads, and a request of one word waited 28 s for its turn."""
    for i in range(SHORT_THREADS + 2):
        bench.put(f"long-{i}", LONG_BYTES + 1)
    assert bench.begun.get(timeout=WAIT_S) == "long-0"
    bench.put("short", LONG_BYTES)
    assert bench.submitted.get(timeout=WAIT_S) == "short"
    bench.gate.set()
    found = [bench.submitted.get(timeout=WAIT_S) for _ in range(SHORT_THREADS + 2)]
    assert found == [f"long-{i}" for i in range(SHORT_THREADS + 2)], "one at a time"


def test_no_exception_of_any_kind_ends_a_lane(bench: Bench) -> None:
    for lane in range(SHORT_THREADS):
        bench.put(f"{lane}", 1, panic=[True])
    assert {bench.refused.get(timeout=WAIT_S)[0] for _ in range(SHORT_THREADS)} == {"0", "1"}
    bench.put("next", 1)
    assert bench.submitted.get(timeout=WAIT_S) == "next"


def test_a_cancellation_waits_for_requests_of_its_id_that_are_still_being_parsed(bench: Bench) -> None:
    """It overtook them: NOT_FOUND, and then the request ran to its end."""
    bench.put("request", LONG_BYTES + 1, "chat-1")
    assert bench.begun.get(timeout=WAIT_S) == "chat-1"
    bench.put("first cancel", 1, "chat-1", cancel=[True])
    bench.put("second cancel", 1, "chat-1", cancel=[True])
    bench.put("of another", 1, "chat-2", cancel=[True])
    assert bench.submitted.get(timeout=WAIT_S) == "of another"
    bench.put("a later request of the id", 1, "chat-1")
    assert bench.submitted.get(timeout=WAIT_S) == "a later request of the id"
    assert bench.submitted.empty()
    bench.gate.set()
    assert bench.submitted.get(timeout=WAIT_S) == "request"
    cancels = {bench.submitted.get(timeout=WAIT_S) for _ in range(2)}
    assert cancels == {"first cancel", "second cancel"}
    assert not bench.intake._cancels and not bench.intake._unparsed


def test_a_cancellation_that_waited_for_a_request_that_is_refused_goes_on(bench: Bench) -> None:
    bench.put("request", LONG_BYTES + 1, "chat-1", bad=[True])
    bench.put("cancel", 1, "chat-1", cancel=[True])
    assert {bench.begun.get(timeout=WAIT_S) for _ in range(2)} == {"chat-1"}
    bench.gate.set()
    assert bench.submitted.get(timeout=WAIT_S) == "cancel"
    assert bench.refused.get(timeout=WAIT_S)[0] == "request"
    assert not bench.intake._cancels and not bench.intake._unparsed


def test_waiting_texts_are_bounded_by_their_bytes(bench: Bench) -> None:
    """Sixteen texts of 14 MiB took 4.1 GiB."""
    bench.put("first", MAX_BYTES + 5)  # one alone is always taken
    with pytest.raises(UnavailableError, match=rf"the queue is full: texts of {MAX_BYTES + 5} bytes.*limit"):
        bench.put("second", 1)
    bench.gate.set()
    assert bench.submitted.get(timeout=WAIT_S) == "first"
    bench.put("bad", 7)
    name, error = bench.refused.get(timeout=WAIT_S)
    assert name == "bad" and error.code == "INTERNAL"
    bench.intake.stop(WAIT_S)
    assert bench.intake._num_bytes == 0, "given back, also by one that failed"


def test_waiting_requests_are_bounded() -> None:
    bench = Bench(max_requests=2)
    bench.put("0", LONG_BYTES + 1)
    assert bench.begun.get(timeout=WAIT_S) == "0"
    for name in "12":
        bench.intake.check_room()
        bench.put(name, LONG_BYTES + 1)
    with pytest.raises(UnavailableError, match="the queue is full: 2 requests wait"):
        bench.intake.check_room()
    bench.gate.set()
    bench.intake.stop(WAIT_S)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_id": b"\xff"}, "id: invalid UTF-8"),
        ({"parameters": b"\xff"}, "parameters: invalid UTF-8"),
        ({"correlation_id": b"\xff"}, "sequence_id: invalid UTF-8"),
        ({"requested": 7}, "cannot be read"),
    ],
)
def test_nothing_leaves_execute(bench: Bench, options: dict[str, Any], words: str) -> None:
    """An exception in `execute` makes Triton end requests that belong to the responder by then."""
    model: Any = TritonPythonModel.__new__(TritonPythonModel)
    model._prefix, model._count, model._responder, model._intake = "x", 0, bench.responder, bench.intake
    model._traces = None
    model._parser = RequestParser(
        None, SamplingParams(), lambda: INFO, FrontendConfig(max_prompt_bytes=9), decoupled=True
    )
    inputs = {"input_ids": np.ones(2, np.int32)}
    bad = fake_pb_utils.InferenceRequest(inputs, **options)
    model.execute([bad, fake_pb_utils.InferenceRequest(inputs, request_id="good")])
    name, error = bench.refused.get(timeout=WAIT_S)
    assert name == "x-1" and words in str(error)
    assert isinstance(error, UnavailableError if "requested" in options else InvalidArgumentError)
    assert bench.submitted.get(timeout=WAIT_S) == "x-2"


@pytest.mark.parametrize("name", ["structured_output", "response_format", "guided_regex", "tools"])
def test_an_escaped_name_of_a_grammar_is_in_its_lane(name: str) -> None:
    """Else grammars, which may take as long as they are allowed to, would hold up texts."""
    bench = Bench()
    try:
        for escaped in (name, f"\\u00{ord(name[0]):02x}{name[1:]}", name.replace("_", "\\u005F")):
            raw = RawRequest({"messages": [f'{{"{escaped}": 1}}'.encode()]}, {}, "{}", "a", frozenset())
            assert bench.intake._lane(raw) is bench.intake._grammars
        plain = RawRequest({"messages": [b'{"a": "\\u00e9\\u003c\\u4e00"}']}, {}, "{}", "a", frozenset())
        assert bench.intake._lane(plain) is bench.intake._short
    finally:
        bench.intake.stop(WAIT_S)
