"""Errors that are reported to callers, each with its Triton status code.

`QuireError.code` is the name of a member of `pb_utils.TritonError`, so the frontend in Triton needs no table
of its own. A bug of ours raises an `AssertionError`, never one of these.
"""

from __future__ import annotations

MAX_DESCRIPTION = 300
"""Most characters quoted from a text that is not ours."""


class QuireError(Exception):
    """Base of every error that is reported to a caller."""

    code = "INTERNAL"
    retry_after_s: float | None = None
    """Seconds until a retry has a chance; None: not known."""


def describe(error: BaseException) -> str:
    """Describes an unexpected exception in one line of bounded length that can be written as UTF-8."""
    try:
        text = str(error)
    except Exception:  # RecursionError, for one
        text = ""
    line = " ".join(f"{type(error).__name__}: {text[:MAX_DESCRIPTION]}".split())
    return line.encode("utf-8", "replace").decode()


class InvalidArgumentError(QuireError):
    """The request itself is wrong. The message names `field` and the limit that it breaks.

    Args:
        told: whole message, for clients that compare it with another backend's; None: field and `message`.
    """

    code = "INVALID_ARG"

    def __init__(self, field: str, message: str, told: str | None = None) -> None:
        super().__init__(told or f"{field}: {message}")
        self.field = field
        self.reason = message


class NotFoundError(QuireError):
    """Nothing has the name or the id that a request or a command states."""

    code = "NOT_FOUND"


class UnavailableError(QuireError):
    """The engine cannot accept or finish the request now: queue full, quota used up, engine restarting.

    Args:
        retry_after_s: seconds until a retry has a chance, raised to 0.1 at least; None: not known. The
            message states it to a tenth of a second.
    """

    code = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        if retry_after_s is not None:
            retry_after_s = max(0.1, retry_after_s)
            message += f"; retry after {retry_after_s:.1f} s"
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(UnavailableError):
    """The engine was told to stop, because its server is shutting down; no other engine will replace it."""


class EngineError(QuireError):
    """The engine failed while it computed the request."""

    code = "INTERNAL"


class WorkerLostError(EngineError):
    """A process that computes for the engine is gone; another engine must replace this one."""


class ConfigError(QuireError):
    """Configuration keys are unknown, ill-typed, out of range or contradict each other, or ask for more than
    the machine, the model or an installed package can do. Raised at start; names the keys.

    Args:
        problems: one text for each error.
    """

    code = "INVALID_ARG"

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class CheckpointError(QuireError):
    """A checkpoint is missing, broken or unsupported; the message is one line and names the file."""

    code = "INVALID_ARG"
