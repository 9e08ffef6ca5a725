"""Sends messages over all surfaces at once, and says what went wrong."""

from __future__ import annotations

import random
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.fault.fuzz import engine_surface, gateway_surface, grpc_surface, http_surface
from tests.fault.fuzz.outcome import Outcome
from tests.fault.fuzz.target import Target

SURFACES: dict[str, tuple[int, Any, Any]] = {
    "grpc": (5, grpc_surface.make, grpc_surface.GrpcSurface),
    "http": (3, http_surface.make, http_surface.HttpSurface),
    "gateway": (2, gateway_surface.make, gateway_surface.GatewaySurface),
    "engine": (2, engine_surface.make, engine_surface.EngineSurface),
}
"""By name: share of the messages, what makes one, what sends it."""
WORKERS = 6


def message(seed: int, index: int) -> tuple[str, Any]:
    """Surface and message `index` of `seed`; depends on nothing else."""
    rng = random.Random(f"{seed}:{index}")
    surface = rng.choices(list(SURFACES), [weight for weight, _, _ in SURFACES.values()])[0]
    return surface, SURFACES[surface][1](rng)


@dataclass
class Finding:
    """A message and what must not have come of it."""

    seed: int
    index: int
    problems: list[str]

    @property
    def is_silence(self) -> bool:
        """Whether a gRPC stream brought too few ends in time, and nothing else is wrong with it."""
        silent = all(problem.startswith("DEADLINE_EXCEEDED") for problem in self.problems)
        return silent and message(self.seed, self.index)[0] == "grpc"

    def __str__(self) -> str:
        surface, sent = message(self.seed, self.index)
        return f"message {self.index} of seed {self.seed} ({surface}): {'; '.join(self.problems)}\n{sent}"


@dataclass
class Report:
    """What came of many messages."""

    findings: list[Finding] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How many requests ended how, by "surface status"."""
    cut_off: list[int] = field(default_factory=list)
    """Messages that were under way when a process died."""
    unsent: list[int] = field(default_factory=list)
    """What was left then."""
    has_died: bool = False
    """Whether a process has died, be it after the last message."""


class Fuzzer:
    """Sends messages of one seed to a target with WORKERS threads."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._seed = seed
        self._pids = {process.pid for process in target.processes().values()}

    def processes_are_the_same(self) -> bool:
        return {process.pid for process in self._target.processes().values()} >= self._pids

    def send(self, indices: Iterable[int]) -> Report:
        """Sends them in this order, as many at a time as there are threads; stops when a process has died."""
        report, lock, over = Report(), threading.Lock(), threading.Event()
        rest = iter(indices)

        def work() -> None:
            senders: dict[str, Any] = {}
            while True:
                with lock:
                    index = next(rest, None)
                if index is None:
                    break
                if over.is_set():
                    report.unsent.append(index)
                    continue
                surface, sent = message(self._seed, index)
                if surface not in senders:
                    senders[surface] = SURFACES[surface][2](self._target)
                try:
                    outcome = senders[surface].send(sent)
                except Exception:
                    outcome = Outcome(problems=[traceback.format_exc(limit=-3)])
                with lock:
                    report.ends.update(f"{surface} {end}" for end in outcome.ends)
                    if not outcome.problems:
                        continue
                    if over.is_set() or not self.processes_are_the_same():
                        over.set()
                        report.cut_off.append(index)
                    else:
                        report.findings.append(Finding(self._seed, index, outcome.problems))
            for sender in senders.values():
                sender.close()

        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(work) for _ in range(WORKERS)]:
                done.result()
        report.has_died = not self.processes_are_the_same()
        return report
