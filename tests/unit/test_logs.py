"""Log lines name their request, and hold nothing that a client may have written."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError, InvalidArgumentError
from quire_common import logs

CANARY = "CANARY-7f3a"
Formatter = Callable[[str], logging.Formatter]
FORMATTERS: list[Formatter] = [logs.PlainFormatter, logs.JsonFormatter]


def line_of(
    formatter: Formatter,
    message: str,
    *args: object,
    error: Any = None,
    **extra: Any,
) -> str:
    record = logging.getLogger("quire").makeRecord(
        "quire", logging.ERROR, "file.py", 1, message, args,
        None if error is None else (type(error), error, error.__traceback__), extra=extra,
    )  # fmt: skip
    return formatter("engine").format(record)


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as info:
        action()
    return info.value


def chained() -> None:
    try:
        int(CANARY)
    except ValueError as error:
        raise RuntimeError(CANARY) from error


def in_context() -> None:
    try:
        {}[CANARY]
    except KeyError:
        raise InvalidArgumentError("stop", CANARY)  # noqa: B904


@pytest.mark.parametrize("formatter", FORMATTERS)
@pytest.mark.parametrize(
    "action",
    [
        lambda: int(CANARY),
        lambda: {}[CANARY],
        lambda: json.loads(f'{{"{CANARY}": {CANARY}'),
        lambda: CANARY.encode().decode("utf-16-be").encode("ascii"),
        lambda: (_ for _ in ()).throw(RuntimeError(CANARY)),
        chained,
        in_context,
    ],
)
def test_an_exceptions_text_is_not_logged(
    formatter: Formatter,
    action: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = raised(action)
    for line in (line_of(formatter, "it failed", error=error), line_of(formatter, "it failed: %s", error)):
        assert CANARY not in line
        assert type(error).__name__ in line
    assert "test_logs.py" in line_of(formatter, "it failed", error=error)  # where it was raised is
    monkeypatch.setenv("QUIRE_LOG_CONTENT", "1")
    if CANARY in str(error):
        assert CANARY in line_of(formatter, "it failed: %s", error)
        assert CANARY in line_of(formatter, "it failed", error=error)


def test_both_of_a_chain_are_shown() -> None:
    text = logs.shown_traceback(raised(chained))
    assert text.index("ValueError") < text.index("That led to") < text.index("RuntimeError")


def test_what_the_system_and_the_device_say_is_logged() -> None:
    missing = raised(lambda: Path("/nowhere/file").read_bytes())
    assert "No such file" in line_of(logs.PlainFormatter, "%s", missing)

    def multiply() -> None:
        from quire_kernels import ops

        ops.rms_norm(torch.zeros(2, 3), torch.zeros(5), 1e-6)

    shapes = raised(multiply)
    assert str(shapes)[:20] in logs.shown_error(shapes)

    def find() -> None:
        from quire.loader.info import read_configs

        read_configs(str(Path("/nowhere")))

    absent = raised(find)
    assert isinstance(absent, CheckpointError) and "/nowhere" in logs.shown_error(absent)


def test_text_formatted_before_cannot_break_a_line() -> None:
    line = line_of(
        logs.PlainFormatter, "%s", "a", request_id="x-1", external_id="mine\n2026 quire fake\udcff"
    )
    assert line.endswith(r"a [x-1 mine\n2026 quire fake\udcff]") and "\n" not in line
    line.encode()


@pytest.mark.row("G7", clauses=("structure",))
def test_a_json_line_has_level_time_and_request() -> None:
    error = raised(lambda: int("x"))
    line = line_of(
        logs.JsonFormatter,
        "a %d",
        1,
        error=error,
        request_id="x-1",
        external_id="m\n",
        fields={"reason": "stop"},
    )
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z") and told.pop("pid") > 0
    assert told.pop("exception").startswith("Traceback")
    assert told == {
        "level": "ERROR",
        "process": "engine",
        "message": "a 1",
        "request_id": "x-1",
        "external_id": "m\n",
        "reason": "stop",
    }
    assert json.loads(line_of(logs.JsonFormatter, "none")).keys() == {
        "time", "level", "process", "pid", "message",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "level", "lines"), [("plain", "", 3), ("json", "", 3), ("json", "ERROR", 2)]
)
def test_a_process_says_why_it_ends_without_texts(kind: str, level: str, lines: int) -> None:
    code = (
        "import logging, threading\n"
        "from quire_common import logs\n"
        "logs.set_up('p')\n"
        "logging.getLogger('quire').info('begins')\n"
        f"thread = threading.Thread(target=lambda: int('{CANARY}'))\n"
        "thread.start(); thread.join()\n"
        f"raise KeyError('{CANARY}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={"QUIRE_LOG_FORMAT": kind, "QUIRE_LOG_LEVEL": level, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 1
    assert CANARY not in done.stderr.replace(f"int('{CANARY}')", "").replace(f"KeyError('{CANARY}')", "")
    starts = [line for line in done.stderr.splitlines() if line.startswith(("{", "20"))]
    assert len(starts) == lines
    if kind == "json":
        assert [json.loads(line)["level"] for line in done.stderr.splitlines()][-1] == "CRITICAL"


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_FORMAT", "xml")
    with pytest.raises(ValueError, match="plain or json"):
        logs.set_up("p")
