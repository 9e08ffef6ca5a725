"""Errors that the packages below `quire` report, and functions that put foreign texts into messages.

`quire` turns most of these errors into errors of its own.
"""

from __future__ import annotations

_SHOWN = 60
"""Most characters of a text that `shown` repeats."""


class ReportedError(Exception):
    """Base of the errors of `quire_common` and `quire_ensemble` that are reported to a caller."""


class InputError(ReportedError):
    """A request's input is wrong. In Triton the request fails with INVALID_ARG.

    Attributes:
        field: name of the input tensor or parameter.
        reason: what is wrong with the input, with the limit that it breaks, if there is one.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ParameterError(ReportedError, ValueError):
    """A parameter in a model's config.pbtxt is missing or wrong, or the model's checkpoint directory must not
    be read. The message is one line that names the parameter or file."""


class HubError(ReportedError):
    """A checkpoint cannot be fetched from a hub. The message is one line that names the checkpoint."""


def shown(value: object) -> str:
    """Returns a client's value for a message: at most 60 characters of a text, escaped as in Python. The cost
    does not depend on the value's size or depth. A value without a short text is shown as its type, mostly
    with its size."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}... ({len(value)} long)"
    name = type(value).__name__
    if isinstance(value, int) and value.bit_length() > 256:
        return f"{name} of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"{name} of {len(value)} entries" if isinstance(value, list | tuple | dict) else name


def is_name(text: str) -> bool:
    """Whether a name that a file gives can be put into a message unchanged."""
    return 0 < len(text) <= 256 and text.isprintable()


def kind(value: object) -> str:
    """Returns the type of a client's value, followed by the text of `shown` (once, if that begins with the
    type); "null" for None."""
    name, text = type(value).__name__, shown(value)
    return "null" if value is None else text if text.startswith(name) else f"{name} {text}"


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of a library in Rust (a regular expression's limit, a broken file). The
    class of panics does not inherit from Exception, so `except Exception` does not catch them."""
    return type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """Returns the text of another library's error for a message: one line of at most 400 characters. If the
    error has no text, returns the name of its class."""
    return in_line(str(error))[:400] or type(error).__name__


def in_line(text: str) -> str:
    """Returns a text with foreign parts as one line of at most 1000 characters, with "?" for each character
    that cannot be printed."""
    text = " ".join(text[:1000].split())
    return "".join(c if c.isprintable() else "?" for c in text)
