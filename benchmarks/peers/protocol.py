"""Lines of JSON between the harness and an adapter. Standard library only: adapters run in foreign venvs.

An adapter loads its engine, writes one `ready` line, then answers every run it reads from stdin with one
line, in order, until stdin ends. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

from benchmarks.peers.workloads import Request

NUM_FIRST_TOKENS = 4


@dataclass(frozen=True)
class RunResult:
    """One run of a workload; times in seconds since the first request was sent."""

    wall_s: float
    first_token_s: list[float]
    """Time of each request's first token."""
    end_s: list[float]
    """Time of each request's last token."""
    num_output_tokens: int
    token_hashes: list[str]
    """Hash of each request's output ids: equal outputs have equal hashes in every engine."""
    first_tokens: list[list[int]]
    """First few output ids of each request."""


Run = Callable[[Sequence[Request], int], RunResult]
"""Does all requests, at most the given number at a time."""


class StepEngine(Protocol):
    """An engine that is advanced step by step and takes new requests between steps."""

    def add(self, index: int, request: Request) -> None:
        """Queues a request; `index` names it."""

    def step(self) -> Iterable[tuple[int, Sequence[int], bool]]:
        """Computes one step; yields per request that got any: its index, new token ids, whether it ended."""


def drive(engine: StepEngine, requests: Sequence[Request], running: int) -> RunResult:
    """Runs all requests through a step engine: the next is added in the step after one has ended.

    Raises:
        RuntimeError: a request ended with another number of tokens than it was to have.
    """
    clock = Clock(requests)
    waiting = iter(enumerate(requests))
    num_open = 0
    exhausted = False
    while True:
        while not exhausted and num_open < running:
            entry = next(waiting, None)
            if entry is None:
                exhausted = True
            else:
                engine.add(*entry)
                num_open += 1
        if not num_open:
            return clock.result()
        for index, token_ids, ended in engine.step():
            clock.tokens(index, token_ids)
            if ended:
                clock.end(index)
                num_open -= 1


async def drive_streams(
    stream: Callable[[Request], AsyncIterator[Sequence[int]]], requests: Sequence[Request], running: int
) -> RunResult:
    """Runs all requests through a server: the next is sent when one has ended.

    Args:
        stream: sends a request and yields its new token ids as they come.
        requests, running: what is to be run, and how many at a time.

    Raises:
        RuntimeError: a request ended with another number of tokens than it was to have.
    """
    clock = Clock(requests)
    waiting = iter(enumerate(requests))

    async def worker() -> None:
        for index, request in waiting:
            async for token_ids in stream(request):
                clock.tokens(index, token_ids)
            clock.end(index)

    await asyncio.gather(*(worker() for _ in range(running)))
    return clock.result()


class Clock:
    """Collects outputs and the times at which they came."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._outputs: list[list[int]] = [[] for _ in requests]
        self._first = [0.0] * len(requests)
        self._end = [0.0] * len(requests)
        self._start = time.perf_counter()

    def tokens(self, index: int, token_ids: Sequence[int]) -> None:
        """Notes new tokens of a request."""
        if token_ids:
            now = time.perf_counter() - self._start
            if not self._outputs[index]:
                self._first[index] = now
            self._end[index] = now
            self._outputs[index].extend(token_ids)

    def end(self, index: int) -> None:
        """Checks the length of a request that has ended; RuntimeError where it is wrong."""
        got, asked = len(self._outputs[index]), self._requests[index].num_output
        if got != asked:
            raise RuntimeError(f"request {index} ended with {got} tokens, {asked} were asked for")

    def result(self) -> RunResult:
        wall = time.perf_counter() - self._start
        return RunResult(
            wall_s=wall,
            first_token_s=self._first,
            end_s=self._end,
            num_output_tokens=sum(map(len, self._outputs)),
            token_hashes=[hash_tokens(output) for output in self._outputs],
            first_tokens=[output[:NUM_FIRST_TOKENS] for output in self._outputs],
        )


def hash_tokens(token_ids: Iterable[int]) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:16]


def serve(
    load: Callable[[Path, dict[str, Any]], Run], packages: Sequence[str], *, facts: Callable[[], Any] = str
) -> None:
    """The main loop of an adapter, to its end.

    Args:
        load: builds the engine from the path of its weights and its options, and returns what runs it.
        packages: whose versions the harness notes.
        facts: called when the engine is loaded; what else should stand in the result (precision, flags ...).
    """
    _die_with_parent()
    answers = _take_stdout()
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    start = time.perf_counter()
    try:
        run = load(arguments.weights, arguments.options)
    except BaseException as error:
        traceback.print_exc()
        answer({"error": _describe(error)})
        return
    answer(
        {
            "ready": True,
            "load_s": time.perf_counter() - start,
            "versions": {name: metadata.version(name) for name in packages},
            "facts": facts(),
        }
    )
    for line in sys.stdin:
        message = json.loads(line)
        requests = [Request(**request) for request in message["requests"]]
        try:
            answer(asdict(run(requests, message["running"])))
        except Exception as error:
            traceback.print_exc()
            answer({"error": _describe(error)})


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _die_with_parent() -> None:
    """A stopped process would not notice that the harness is gone."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _take_stdout() -> TextIO:
    """Keeps stdout for answers; what anything else writes there, also from C, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers
