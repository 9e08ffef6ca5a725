"""What goes wrong with a request is logged with its ids, and without anything that it held."""

from __future__ import annotations

import io
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import EngineConfig  # noqa: E402
from quire.engine.core import EngineCore  # noqa: E402
from quire.engine.executor import RunnerExecutor  # noqa: E402
from quire.frontend.output_processor import OutputProcessor  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.intake import Intake  # noqa: E402
from quire.triton.observers import RequestEnded  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.raw_request import RawRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_log import RequestLog  # noqa: E402
from quire_common.logs import JsonFormatter, PlainFormatter  # noqa: E402
from tests.fixtures.fake_runner import FakeRunner  # noqa: E402
from tests.fixtures.frontend import Ended, Frontend  # noqa: E402

CANARY = "CANARY-55aa"
OUTPUTS = frozenset({"text_output", "output_ids", "finish_reason"})
FOUR = SamplingParams(max_tokens=4, ignore_eos=True, stop=(f"{CANARY}-stop",))
WAIT_S = 60.0


class Log:
    """What is logged, by both formatters."""

    def __init__(self) -> None:
        self.plain, self.json = io.StringIO(), io.StringIO()
        self.handlers = [logging.StreamHandler(stream) for stream in (self.plain, self.json)]
        for handler, formatter in zip(self.handlers, (PlainFormatter("p"), JsonFormatter("p")), strict=True):
            handler.setFormatter(formatter)

    def lines(self) -> list[dict[str, Any]]:
        text = self.plain.getvalue() + self.json.getvalue()
        assert CANARY not in text, text
        return [json.loads(line) for line in self.json.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    log, logger = Log(), logging.getLogger("quire")
    before = logger.level
    logger.setLevel(logging.INFO)
    for handler in log.handlers:
        logger.addHandler(handler)
    yield log
    for handler in log.handlers:
        logger.removeHandler(handler)
    logger.setLevel(before)


class Runner(FakeRunner):
    def execute(self, output: Any) -> Any:
        result = super().execute(output)
        self.computed()
        return result

    def computed(self) -> None:
        pass


class Served(Frontend):
    def __init__(self, directory: Path) -> None:
        config = EngineConfig.from_mapping({"model": "fake", "block_size": 4})
        self.runner = Runner(256, 4, max_model_len=128)
        self.ended = Ended()
        core = EngineCore(config, RunnerExecutor(self.runner))
        super().__init__(directory, core, observers=[RequestLog(), self.ended])
        self.count = itertools.count(1)

    def handle(self) -> RequestHandle:
        number = next(self.count)
        return RequestHandle(fake_pb_utils.ResponseSender(), f"x-{number}", f"mine-{number}")

    def run(self) -> RequestEnded:
        """A request that is through the intake, to its end."""
        handle = self.handle()
        parsed = ParsedRequest([3, 1, 4, 1, 5], FOUR, handle.external_id, OUTPUTS, OUTPUTS, stream=True)
        before = len(self.ended.records)
        self.responder.submit(handle, parsed)
        return self.ended.wait(before + 1)[before]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    yield served
    served.close()


def fail(*_: Any, **__: Any) -> Any:
    try:
        int(CANARY)
    except ValueError as error:
        raise RuntimeError(f"cannot: {CANARY}") from error


@pytest.mark.row("G7", clauses=("structure",))
def test_a_line_of_each_request_that_ends(served: Served, log: Log) -> None:
    record = served.run()
    assert record.finish_reason == "length"
    (line,) = log.lines()
    assert line["level"] == "INFO" and line["message"] == "request ended"
    assert (line["request_id"], line["external_id"]) == ("x-1", "mine-1")
    assert (line["reason"], line["prompt_tokens"], line["output_tokens"]) == ("length", 5, 4)
    assert 0 <= line["admitted_ms"] <= line["first_token_ms"] <= line["first_sent_ms"] <= line["total_ms"]
    plain = log.plain.getvalue()
    assert "INFO request ended: " in plain and plain.endswith("[x-1 mine-1]\n")
    assert " reason=length " in plain and " output_tokens=4 " in plain


@pytest.mark.row("G7", clauses=("structure", "redaction"))
@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        (OutputProcessor, "pop_ready", "frontend: an output cannot be processed"),
        (EngineCore, "add_request", "engine: a message could not be handled"),
        (Runner, "computed", "step 1 failed with 1 rows (1 steps in flight)"),
    ],
)
def test_what_fails_with_a_request(
    served: Served, log: Log, monkeypatch: pytest.MonkeyPatch, place: type, name: str, said: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(place, name, fail)
        assert served.run().finish_reason == "error"
    failure, end = log.lines()
    assert (failure["level"], failure["message"]) == ("ERROR", said)
    assert failure["request_id"] == end["request_id"] == "x-1"
    assert (end["level"], end["reason"], end["code"]) == ("INFO", "error", "INTERNAL")
    trace = failure["exception"]
    assert "in fail" in trace and "ValueError" in trace and "RuntimeError" in trace
    assert served.run().finish_reason == "length"


@pytest.mark.row("G7", clauses=("structure", "redaction"))
def test_what_fails_in_the_intake(served: Served, log: Log) -> None:
    class Parser:
        parse = staticmethod(fail)

    intake = Intake(Parser(), served.responder, max_requests=4, max_bytes=100)  # type: ignore[arg-type]
    intake.start()
    handle = served.handle()
    intake.put(handle, RawRequest({"text_input": [CANARY.encode()]}, {}, "{}", "mine-1", frozenset()))
    served.ended.wait(1)
    intake.stop(WAIT_S)
    failure, end = log.lines()
    assert failure["message"] == "frontend: parsing failed" and failure["level"] == "ERROR"
    assert failure["request_id"] == end["request_id"] == "x-1" and failure["external_id"] == "mine-1"
