"""What became of a message."""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT_S = 120.0
"""Every request is answered within this time, however busy the machine is."""
ACCUSING = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED"})
"""Statuses that no message may cause: what is wrong with a message has a status that says so."""


@dataclass
class Outcome:
    """How each request of a message ended ("OK", a status, or "LEFT" where the fuzzer went away), and what
    must not be: `problems`, each in one line."""

    ends: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def end(self, status: str, text: str = "") -> None:
        self.ends.append(status)
        if status in ACCUSING:
            self.problems.append(f"{status}: {text[:300]!r}")
