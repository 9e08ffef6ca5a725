"""Errors that are reported to callers, each with its Triton status code.

`QuireError.code` is the name of a member of `pb_utils.TritonError`, so the frontend in Triton needs no table
of its own.
"""

from __future__ import annotations

MAX_DESCRIPTION = 300
"""Most characters that `describe` quotes of an exception's text."""


class QuireError(Exception):
    """Base of the errors that Quire's backend reports to callers."""

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
    """The request itself is wrong: its field `field`, for the reason that `message` gives.

    Args:
        told: whole text of the error, for clients that compare it with another backend's; None: `field` and
            `message`.
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
    """A request or a command cannot be accepted or finished now. For example, the queue is full, a quota is
    used up, or the engine restarts.

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
    """The engine was told to stop, usually because its server is shutting down. The frontend that gets this
    error starts no other engine."""


class EngineError(QuireError):
    """The engine failed or cannot do what was asked, for example because a step failed."""

    code = "INTERNAL"


class WorkerLostError(EngineError):
    """A process that computes for the engine is gone or waits for one that failed, so the engine cannot go
    on."""


class ConfigError(QuireError):
    """The configuration is wrong, or asks for something that the machine, the model or an installed package
    does not allow. The message usually names the keys.

    Args:
        problems: one text for each error.
    """

    code = "INVALID_ARG"

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class CheckpointError(QuireError):
    """A checkpoint or an adapter is missing, broken, changed or unsupported, or the engine could not start
    for another reason. The message is usually one line that names the file."""

    code = "INVALID_ARG"
