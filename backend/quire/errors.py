"""Errors a caller can meet, each with the Triton status code it becomes.

`QuireError.code` is the name of a member of `pb_utils.TritonError` (and of a gRPC status), so that the
adapter needs no table of its own. An error that is ours (a bug) is an `AssertionError`, never one of these.
"""

from __future__ import annotations

MAX_DESCRIPTION = 300
"""Characters of a text that is not ours."""


class QuireError(Exception):
    """Base of every error that is reported to a caller."""

    code = "INTERNAL"
    retry_after_s: float | None = None
    """Seconds until another attempt has a chance, where known."""


def describe(error: BaseException) -> str:
    """An unexpected exception in one bounded line that has a UTF-8 form, whatever it holds."""
    try:
        text = str(error)
    except Exception:  # RecursionError, for one
        text = ""
    line = " ".join(f"{type(error).__name__}: {text[:MAX_DESCRIPTION]}".split())
    return line.encode("utf-8", "replace").decode()


class InvalidArgumentError(QuireError):
    """The request itself is wrong: `field` is named, and the limit it breaks is in the message.

    Args:
        told: what is said in place of both, where clients know the words of another backend.
    """

    code = "INVALID_ARG"

    def __init__(self, field: str, message: str, told: str | None = None) -> None:
        super().__init__(told or f"{field}: {message}")
        self.field = field
        self.reason = message


class NotFoundError(QuireError):
    """There is nothing of the name that the request gives."""

    code = "NOT_FOUND"


class UnavailableError(QuireError):
    """The engine cannot take or finish the request now: queue full, quota used up, engine restarting.

    Args:
        retry_after_s: when another attempt has a chance, where that is known; told in tenths, at least one.
    """

    code = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        if retry_after_s is not None:
            retry_after_s = max(0.1, retry_after_s)
            message += f"; retry after {retry_after_s:.1f} s"
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(UnavailableError):
    """The engine was told to stop, since its server is shutting down; no other will take its place."""


class EngineError(QuireError):
    """The engine failed while it worked on the request."""

    code = "INTERNAL"


class WorkerLostError(EngineError):
    """The process that computes for the engine is gone; another engine must take its place."""


class ConfigError(QuireError):
    """Configuration keys are unknown, ill-typed or out of range; raised at start, names each key.

    Args:
        problems: what is wrong, one text for each thing.
    """

    code = "INVALID_ARG"

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class CheckpointError(QuireError):
    """A checkpoint is missing, broken or unsupported; the message is one line and names the file."""

    code = "INVALID_ARG"
