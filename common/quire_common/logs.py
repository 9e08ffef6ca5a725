"""Logging of our processes below tritonserver: lines on stderr, as text or JSON. The lines may have names and
ids from clients, but not the texts of prompts and answers, unless QUIRE_LOG_CONTENT is set.

Environment variables set the logging up, so that all processes of a server log alike: `QUIRE_LOG_LEVEL`,
`QUIRE_LOG_FORMAT` and `QUIRE_LOG_CONTENT`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from types import TracebackType

REQUEST_FIELDS = ("request_id", "external_id")
"""Fields of a log record, given by `extra=`, that name its request: our id, and the client's."""
HARMLESS = (OSError, MemoryError)
"""Exceptions whose texts come from the system, and are taken to hold no text of a prompt."""
HARMLESS_MODULES = (
    *("torch", "triton", "zmq", "c_python_backend_utils"),
    *("quire_common.cache", "quire_common.host_memory", "quire_common.machine"),
    *("quire_kernels", "quire.worker", "quire.kv_tiers", "quire.loader"),
    *("quire.engine.connection", "quire.engine.supervisor", "quire.engine.client"),
)
"""Beginnings of the names of modules that know numbers, shapes, files and devices, and are taken to know no
text of a request. Texts of exceptions that these modules define, or that are raised in their Python code,
are logged. That a module named in `_EXCEPT` raises an exception is no reason to log its text."""
_EXCEPT = ("quire.worker.grammar",)
MAX_TEXT = 2000


def set_up(process: str) -> None:
    """Sends the logs of this process to stderr, and uncaught exceptions with them. Log handlers and exception
    hooks that were set before stay instead. Raises ValueError if an environment variable that is used is
    wrong.

    Args:
        process: name of the process in each line.
    """
    kind = os.environ.get("QUIRE_LOG_FORMAT") or "plain"
    if kind not in ("plain", "json"):
        raise ValueError(f"QUIRE_LOG_FORMAT: must be plain or json, got {kind!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if kind == "json" else PlainFormatter(process))
    logging.basicConfig(level=os.environ.get("QUIRE_LOG_LEVEL") or "INFO", handlers=[handler])
    # What nobody catches would be printed with its text.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = lambda _kind, error, _trace: _uncaught(error)
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = lambda args: _uncaught(args.exc_value)


def _uncaught(error: BaseException | None) -> None:
    logging.getLogger("quire").critical("an exception was not caught", exc_info=error)


def shown_error(error: BaseException) -> str:
    """Returns an exception for a log line: its class, and its text if that is taken to hold no text of a
    request (see HARMLESS and HARMLESS_MODULES).

    Texts of other exceptions tend to repeat the value that was wrong, which may be part of a prompt. If
    `QUIRE_LOG_CONTENT` is set, they are shown too.
    """
    name = type(error).__name__
    if not (_is_harmless(error) or os.environ.get("QUIRE_LOG_CONTENT")):
        return f"{name} (its text is not logged: see QUIRE_LOG_CONTENT)"
    try:
        return f"{name}: {str(error)[:MAX_TEXT]}"
    except Exception:
        return name


def _is_harmless(error: BaseException) -> bool:
    if isinstance(error, HARMLESS) or type(error).__module__.startswith(HARMLESS_MODULES):
        return True
    raised_in = ""
    trace = error.__traceback__
    while trace is not None:
        raised_in, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return raised_in.startswith(HARMLESS_MODULES) and not raised_in.startswith(_EXCEPT)


def shown_traceback(error: BaseException | None) -> str:
    """Returns the tracebacks of an exception and of those that led to it, without local values. Texts are
    shown as by `shown_error`."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{shown_error(error)}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n\nThat led to:\n\n".join(reversed(parts))


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            shown = [shown_error(arg) if isinstance(arg, BaseException) else arg for arg in record.args]
            record.args = tuple(shown)
        record.exc_text = None  # another handler's would be taken
        return super().format(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return shown_traceback(ei[1])


class PlainFormatter(_Formatter):
    """`<local time> quire <process>[<pid>] LEVEL <message> [<request ids>]`, and a traceback below it."""

    def __init__(self, process: str) -> None:
        super().__init__(process)
        self._fmt = f"%(asctime)s quire {process}[%(process)d] %(levelname)s %(message)s"
        self._style = logging.PercentStyle(self._fmt)

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = [str(getattr(record, name)) for name in REQUEST_FIELDS if getattr(record, name, None)]
        line = super().formatMessage(record)
        return _printable(f"{line} [{' '.join(ids)}]" if ids else line)


class JsonFormatter(_Formatter):
    """One JSON object per line: time (UTC), level, process, pid and message. Where a record has them, also
    `request_id` (ours), `external_id` (the client's), the record's `fields`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        super().format(record)  # makes the message
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "pid": record.process,
            "message": record.message,
        }
        line |= {name: getattr(record, name) for name in REQUEST_FIELDS if getattr(record, name, None)}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)


def _printable(line: str) -> str:
    """Returns the line with characters escaped that cannot be printed, so that a client's id neither begins a
    new line nor holds what stderr cannot write."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
