"""Messages between an engine and its ranks in other processes, besides steps and their results. No torch in
here."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import EngineConfig
from quire.outputs import RunnerInfo

WARM_UP, SLEEP, WAKE = "warm up", "sleep", "wake"


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a rank: its configuration and its number among the ranks."""

    config: EngineConfig
    rank: int
    num_ranks: int
    store: str
    """Path of the file through which the ranks find each other."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Answer of a rank to Start and to WAKE: its model is loaded."""

    info: RunnerInfo
    block_bytes: int
    blocks_fd: int | None
    """Descriptor, in the rank's process, of the memory with the blocks; None: they are on a GPU."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer of a rank that failed to do what it was asked."""

    error: str
    is_ours: bool = False
    """Whether the text is that of a QuireError, which is written for users."""
