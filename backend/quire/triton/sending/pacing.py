"""Pace: how often a stream gets a response, so that sending leaves the CPU to the engine.

A response is a round trip to the server, whatever it holds. Two things bound how many there can be: the one
thread of a frontend that sends them, and, where the engine computes on the CPU, the cores that it shares with
the frontend, the server and often the client. The recent cost of a response and the number of streams give
the shortest time between two responses of a stream. Tokens that arrive in between are merged. One stream
alone, or a few slow ones, usually get a response for each step.
"""

from __future__ import annotations

import math

SENDS_PER_PASS = 16
"""Most responses that `Sender.send_due` sends before the engine's socket is looked at again: about 2.5 ms. A
pass's polls, retries and replays have the same limit."""
SEND_SHARE = 0.6
"""Share of the sending thread's time that `Pace` grants to responses: the rest is for messages, polls and
ends."""
CPU_SHARE = 0.03
"""Share of the computing cores that `Pace` grants to responses, in addition to the idle cores."""
PATH_FACTOR = 3.0
"""CPU seconds of a response's whole path (server, stub, a client on the machine) for each CPU second of the
sending thread."""
MAX_INTERVAL_S = 0.25
"""Longest interval that `Pace` sets between two responses of a stream, in seconds."""
MAX_PERIOD_S = 0.1
"""Cap on a measured time between two arrivals of outputs, in seconds."""
_MEMORY = 0.98
"""Factor by which each new measurement reduces the weight of the earlier ones."""


class Pace:
    """The interval between two responses of a stream, from measured costs.

    Args:
        num_threads: threads that compute the engine's steps on the CPU; 0: another device does.
        num_cpus: cores that the engine may use.
        num_frontends: frontends of the model, which share these cores.
    """

    def __init__(self, num_threads: int, num_cpus: int, num_frontends: int = 1) -> None:
        idle = max(num_cpus - num_threads, 0)
        self._cores = (idle + CPU_SHARE * num_threads) / num_frontends if num_threads else math.inf
        self._num_responses, self._seconds, self._cpu_seconds = 1.0, 1.5e-4, 1e-4
        self._last_step = 0.0
        self.period_s = 0.0
        """Running average of the time between two arrivals of outputs, in seconds. A longer time than
        MAX_PERIOD_S counts as MAX_PERIOD_S."""

    def charge(self, num_responses: int, seconds: float, cpu_seconds: float) -> None:
        """Adds a measurement: `num_responses` took the sending thread `seconds` of wall-clock time and
        `cpu_seconds` of CPU time."""
        self._num_responses = _MEMORY * self._num_responses + num_responses
        self._seconds = _MEMORY * self._seconds + seconds
        self._cpu_seconds = _MEMORY * self._cpu_seconds + cpu_seconds

    def step(self, now: float) -> None:
        """Updates `period_s` when outputs arrive, at CLOCK_MONOTONIC seconds `now`."""
        self.period_s += (1 - _MEMORY) * (min(now - self._last_step, MAX_PERIOD_S) - self.period_s)
        self._last_step = now

    def interval_s(self, num_streams: int) -> float:
        """Returns the shortest time between two responses of one stream, in seconds, with `num_streams` open.

        Half a step is subtracted, because a response can only be sent when a step brings tokens.
        """
        if num_streams <= 1:
            return 0.0
        each = num_streams / self._num_responses
        frugal = each * self._cpu_seconds * PATH_FACTOR / self._cores
        interval = min(max(each * self._seconds / SEND_SHARE, frugal), MAX_INTERVAL_S)
        return max(interval - self.period_s / 2, 0.0)
