"""What a worker in another process answers with. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass

from quire.outputs import RunnerInfo

WARM_UP, SLEEP, WAKE = "warm up", "sleep", "wake"


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: RunnerInfo
    block_bytes: int
    blocks_fd: int
    """Descriptor, in this process, of the memory with the blocks."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked for could not be done."""

    error: str
    is_ours: bool = False
    """Whether the text is that of a QuireError, made for people."""
