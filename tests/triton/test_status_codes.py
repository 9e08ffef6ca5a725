"""Which of Triton's status codes each cause ends a request with: one table, from tensors to FINAL."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import FrontendConfig  # noqa: E402
from quire.errors import QuireError  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton.intake import Intake  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402
from tests.fixtures.fake_pb_utils import InferenceRequest, ResponseSender  # noqa: E402
from tests.triton.test_usage import WAIT_S, Harness  # noqa: E402

CODES = {
    name: getattr(fake_pb_utils.TritonError, name)
    for name in ("INVALID_ARG", "UNAVAILABLE", "CANCELLED", "NOT_FOUND", "INTERNAL")
}
PROMPT = {"input_ids": np.array([5, 6, 7], np.int32)}


def text(*values: str | bytes) -> Any:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=np.object_)


def number(value: float, kind: Any = np.int32) -> Any:
    return np.array([value], kind)


class Model(Harness):
    """What `TritonPythonModel.execute` does, over the stand-ins."""

    def __init__(self, directory: Path, *, decoupled: bool = True, room: int = 64, **options: Any) -> None:
        super().__init__(directory, **options)
        self.parser = RequestParser(
            None,
            SamplingParams(),
            lambda: self.responder.engine.info,
            FrontendConfig(allow_cache_control=False),
            decoupled=decoupled,
        )
        self.intake = Intake(self.parser, self.responder, max_requests=room, max_bytes=2**20)
        self.intake.start()

    def ask(
        self, inputs: dict[str, Any], parameters: dict[str, Any] | None = None, name: str | bytes = ""
    ) -> Any:
        self._count += 1
        request = InferenceRequest(inputs, parameters=json.dumps(parameters or {}), request_id=name)
        handle = RequestHandle(request.sender, f"t-{self._count}", "")
        try:
            self.intake.check_room()
            raw = self.parser.read(request)
            handle.external_id = raw.external_id
            self.intake.put(handle, raw)
        except QuireError as error:
            self.responder.refuse(handle, error)
        return request.sender

    def close(self) -> None:
        self.intake.stop(WAIT_S)
        super().close()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    model = Model(tmp_path)
    yield model
    model.close()


def check(sender: ResponseSender, code: str, words: str) -> None:
    assert sender.final.wait(WAIT_S), "no FINAL"
    error = sender.responses[-1].error
    assert error is not None, f"no error, {code} expected"
    assert (error.code(), words in error.message()) == (CODES[code], True), error.message()


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str | bytes, str]] = {
    "no prompt": ({}, {}, "", "prompt"),
    "two prompts": ({**PROMPT, "text_input": text("a")}, {}, "", "prompt"),
    "an empty prompt": ({"input_ids": np.array([], np.int32)}, {}, "", "input_ids"),
    "text without a tokenizer": ({"text_input": text("a")}, {}, "", "text_input"),
    "a token beyond the vocabulary": ({"input_ids": number(99)}, {}, "", "99"),
    "a prompt beyond the model": ({"input_ids": np.full(5000, 1, np.int32)}, {}, "", "prompt"),
    "a value out of range": ({**PROMPT, "temperature": number(-1, np.float32)}, {}, "", "temperature"),
    "a value of another type": (PROMPT, {"max_tokens": "many"}, "", "max_tokens"),
    "an unknown parameter": (PROMPT, {"max_tokenz": 1}, "", "max_tokenz"),
    "parameters that are no JSON": ({**PROMPT, "sampling_parameters": text("{")}, {}, "", "sampling_param"),
    "more choices than seats": (PROMPT, {"n": 2, "temperature": 1.0, "max_tokens": 2}, "", "n"),
    "beams for which there is no room": (PROMPT, {"beam_width": 2, "max_tokens": 300}, "", "beam_width"),
    "cancel without an id": ({"cancel": number(True, np.bool_)}, {}, "", "cancel"),
    "an id that is no text": (PROMPT, {}, b"\xff", "id"),
    "an unknown command": ({"cache_control": text('{"command": "burn"}')}, {}, "", "cache_control"),
    "a command that is not allowed": ({"cache_control": text('{"command": "reset"}')}, {}, "", "allow_cache"),
}


@pytest.mark.row("A37", clauses=("codes",))
def test_every_cause_has_its_code(tmp_path: Path) -> None:
    """INVALID_ARG: another attempt with the same request fails, too. UNAVAILABLE: one may succeed, here or
    elsewhere. NOT_FOUND: what is named is not there. CANCELLED: the client has left. INTERNAL is ours."""
    model = Model(tmp_path, max_num_seqs=1)
    try:
        for cause, (inputs, parameters, name, words) in WRONG.items():
            try:
                check(model.ask(inputs, parameters, name), "INVALID_ARG", words)
            except AssertionError as error:
                raise AssertionError(f"{cause}: {error}") from None
        check(model.ask({"cancel": number(True, np.bool_)}, name="nobody"), "NOT_FOUND", "'nobody'")

        model.runner.gate.clear()
        gone = model.ask(PROMPT, {"max_tokens": 300, "ignore_eos": True, "stream": True})
        gone.cancelled = True
        check(gone, "CANCELLED", "cancelled")
        model.runner.gate.set()

        model.runner.is_broken = True
        check(model.ask(PROMPT, {"max_tokens": 3}), "INTERNAL", "the engine failed")
        model.runner.is_broken = False
        good = model.ask(PROMPT, {"max_tokens": 3, "ignore_eos": True})
        assert good.final.wait(WAIT_S) and good.responses[-1].error is None
    finally:
        model.close()


def full_engine(model: Model) -> ResponseSender:
    endless = {"max_tokens": 300, "ignore_eos": True}
    senders: list[ResponseSender] = []
    # The first runs until the last has come.
    model.runner.is_slow = lambda: not any(sender.final.is_set() for sender in senders)
    senders += [model.ask(PROMPT, endless) for _ in range(6)]
    assert all(sender.final.wait(WAIT_S) for sender in senders)
    return next(sender for sender in senders if sender.responses[-1].error is not None)


def full_intake(model: Model) -> ResponseSender:
    held = threading.Event()
    parse = model.parser.parse
    model.parser.parse = lambda raw: held.wait(WAIT_S) and parse(raw)  # type: ignore[method-assign]
    try:
        senders = [model.ask(PROMPT, {"max_tokens": 2}) for _ in range(20)]
    finally:
        held.set()
    assert all(sender.final.wait(WAIT_S) for sender in senders)
    return next(sender for sender in senders if sender.responses[-1].error is not None)


def spent_quota(model: Model) -> ResponseSender:
    # In debt for a quarter of an hour.
    first = model.ask({**PROMPT, "tenant": text("a")}, {"max_tokens": 300, "ignore_eos": True})
    assert first.final.wait(WAIT_S) and first.responses[-1].error is None
    return model.ask({**PROMPT, "tenant": text("a")}, {"max_tokens": 20})


def unloaded(model: Model) -> ResponseSender:
    model.runner.gate.clear()
    sender = model.ask(PROMPT, {"max_tokens": 300, "ignore_eos": True})
    model.intake.stop(WAIT_S)
    model.responder.stop()
    return sender


def engine_stopped(model: Model) -> ResponseSender:
    model.runner.hold_after_token_of = "t-1"
    sender = model.ask(PROMPT, {"max_tokens": 300, "ignore_eos": True, "stream": True})
    assert sender.first.wait(WAIT_S)
    model.loop.stop()
    model.runner.gate.set()
    return sender


def engine_dead(model: Model) -> ResponseSender:
    model.runner.hold_after_token_of = "t-1"
    sender = model.ask(PROMPT, {"max_tokens": 300, "ignore_eos": True, "stream": True})
    assert sender.first.wait(WAIT_S)
    model.responder._continuation._max_pause_s = 0.0  # else it goes on with the next engine
    model.responder._post(lambda: setattr(model.responder.engine.links[0], "_has_died", True))
    assert sender.final.wait(WAIT_S)
    model.runner.gate.set()
    return sender


BUSY: dict[str, tuple[Callable[[Model], ResponseSender], dict[str, Any], str]] = {
    "the queue is full": (full_engine, {"max_num_seqs": 1, "max_waiting_requests": 2}, "max_waiting"),
    "the intake is full": (full_intake, {"room": 4}, "to be parsed"),
    "the quota is used up": (spent_quota, {"tenants": '{"a": {"tokens_per_minute": 20}}'}, "retry after"),
    "the model is unloaded": (unloaded, {}, "unloaded"),
    "the engine stops": (engine_stopped, {}, "shutting down"),
    "the engine died": (engine_dead, {}, "died"),
}


@pytest.mark.row("A37", clauses=("codes",))
@pytest.mark.parametrize("cause", BUSY)
def test_what_may_go_better_later_is_unavailable(tmp_path: Path, cause: str) -> None:
    provoke, options, words = BUSY[cause]
    model = Model(tmp_path, **options)
    try:
        check(provoke(model), "UNAVAILABLE", words)
    finally:
        model.close()
