"""Errors that the packages below `quire` report, and texts of others in messages of ours.

`quire` maps these errors to its own kinds by the fields they carry.
"""

from __future__ import annotations

_SHOWN = 60
"""Most characters of a client's text that an error message repeats."""


class ReportedError(Exception):
    """Base of the errors of `quire_common` and `quire_ensemble` that are reported to a caller."""


class InputError(ReportedError):
    """A request's input is wrong; becomes INVALID_ARG.

    Attributes:
        field: name of the input tensor or parameter.
        reason: what is wrong with it, with the limit it breaks.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ParameterError(ReportedError, ValueError):
    """A parameter in a model's config.pbtxt is missing or wrong; one line that names it."""


class HubError(ReportedError):
    """A checkpoint cannot be fetched from a hub; one line that names it."""


def shown(value: object) -> str:
    """A value of a client's, for a message of ours: some 80 characters at most, and at a cost that does not
    depend on its size or depth. A value without a short text is shown as its type and size."""
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
    """Type and value of a client's value, as `shown`; "null" for None."""
    name, text = type(value).__name__, shown(value)
    return "null" if value is None else text if text.startswith(name) else f"{name} {text}"


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has given up (a regular expression's limit, a broken file): these are no
    Exceptions, and end threads that catch every Exception."""
    return type(error).__name__ == "PanicException"


def one_line(error: BaseException) -> str:
    """The text of another library's error, for a message of ours: one line of at most 400 characters; the
    error's class if it has no text."""
    return in_line(str(error))[:400] or type(error).__name__


def in_line(text: str) -> str:
    """A text of which parts are not ours, as one line of at most 1000 characters that can be printed."""
    text = " ".join(text[:1000].split())
    return "".join(c if c.isprintable() else "?" for c in text)
