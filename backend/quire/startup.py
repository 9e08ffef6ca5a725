"""StartTimeline: records the duration of a start, phase by phase."""

from __future__ import annotations

import os
import time

from quire.engine.processes import start_time_of


class StartTimeline:
    """Phases of a start; each begins when the previous one ends.

    Args:
        age_s: seconds of the first phase that have already passed.
    """

    def __init__(self, age_s: float = 0.0) -> None:
        self.phases: dict[str, float] = {}
        """Seconds of each phase that has ended, by name."""
        self._phase_began = time.monotonic() - age_s

    @classmethod
    def of_process(cls) -> StartTimeline:
        """Returns a timeline that began with this process, so its first phase covers the imports so far. If
        the system does not tell when the process began, the timeline begins now."""
        ticks = start_time_of(os.getpid()) or 0
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return cls(max(now - ticks / os.sysconf("SC_CLK_TCK"), 0.0) if ticks else 0.0)

    def end(self, phase: str) -> None:
        """Ends the present phase and gives it this name."""
        now = time.monotonic()
        self.phases[phase] = now - self._phase_began
        self._phase_began = now

    def split(self, phase: str, parts: dict[str, float]) -> None:
        """Splits named parts, given with their seconds, off a phase that has ended. The rest of the phase,
        and then the parts, move to the end of `phases`."""
        rest = self.phases.pop(phase) - sum(parts.values())
        self.phases |= {phase: max(rest, 0.0), **parts}

    @property
    def total_s(self) -> float:
        """Seconds of all phases that have ended."""
        return sum(self.phases.values())


def shown_phases(phases: dict[str, float]) -> str:
    """Returns the phases as text for a log line: "imports 1.62 s, weights 0.31 s"."""
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
