"""Why a run of the tests failed, in few lines of a file that is right at each moment of the run.

As a pytest plugin (loaded by the root conftest): `--failures FILE` keeps the file. Its first line is the
closing one of pytest, or says that pytest has not ended; then come the tests that run now, and the failures.
`.ci/run` shows it after a run that failed, also one that was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LINES, IN_FULL, WIDTH = 44, 10, 200
"""Lines of the file and their width at most; failures that are shown with their error, others are names."""
REST = 8
"""Lines of the names of the others at most."""
ENOUGH = 9
"""Lines of one failure at most."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--failures", metavar="FILE", help="keep in a few lines of it what has failed so far")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--failures")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(file), config.rootpath), "quire-failures")


class Failures:
    """Writes the file anew at each event of the run."""

    def __init__(self, file: Path, root: Path) -> None:
        self._file = file
        self._root = root
        self._began = time.monotonic()
        self._ended = 0
        self._closing = ""
        self._failures: list[tuple[str, list[str]]] = []
        """Node ids with places and the lines of the error."""
        self._running: dict[str, str] = {}
        """Since when, by node id."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.strftime("%H:%M:%S")
        self._write()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)
        self._ended += 1
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            when = "" if report.when == "call" else f" ({report.when})"
            if report.when not in ("setup", "call", "teardown"):  # the process died with it
                when = ""
                self._running.pop(report.nodeid, None)
            self._add(report.nodeid + when, report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(f"{report.nodeid} (collection)", report.nodeid, report.longrepr)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._add("pytest itself", "", excinfo.exconly())

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        result = yield
        counts = ", ".join(text for text, _ in terminalreporter.build_summary_stats_line()[0])
        self._closing = f"==== {counts} in {time.monotonic() - self._began:.2f}s ===="
        self._write()
        return result

    def _add(self, name: str, nodeid: str, error: Any) -> None:
        places = places_of(error, nodeid.partition("::")[0], self._root)
        self._failures.append((f"FAILED {name}  {' '.join(places)}".rstrip(), lines_of(error)))
        self._write()

    def _write(self) -> None:
        written = self._file.with_suffix(f".{os.getpid()}")  # two runs may share the file
        text = "\n".join(line[:WIDTH] for line in self.lines()) + "\n"
        written.write_text(text, "utf-8", "backslashreplace")  # file names may be no UTF-8
        written.replace(self._file)  # whoever reads it sees all of it

    def lines(self) -> list[str]:
        failures, now = self._failures, time.strftime("%H:%M:%S")
        lines = [
            self._closing
            or f"pytest did not end: {self._ended} tests ended by {now}, {len(failures)} failures so far"
        ]
        if not self._closing:
            lines += [f"running since {since}: {test}" for test, since in list(self._running.items())[:4]]
        full, others = failures[:IN_FULL], [name for name, _ in failures[IN_FULL:]]
        if len(others) > REST:
            others[REST - 1 :] = [f"and {len(others) - REST + 1} failures more"]
        room = (LINES - len(lines) - len(others)) // max(1, len(full)) - 1
        for name, error in full:
            lines += [name, *(f"    {line}" for line in shortened(error, min(room, ENOUGH)))]
        return lines + others


def places_of(error: Any, file: str, root: Path) -> list[str]:
    """Where a test failed, `file:line`: the last place in its own file, and that of the exception."""
    crash = getattr(error, "reprcrash", None)
    if crash is None:
        return []
    path = Path(crash.path)
    if path.is_relative_to(root):
        path = path.relative_to(root)
    found = [entry.reprfileloc for entry in error.reprtraceback.reprentries]
    own = [f"{place.path}:{place.lineno}" for place in found if place is not None and place.path == file]
    return list(dict.fromkeys([*own[-1:], f"{path}:{crash.lineno}"]))


def lines_of(error: Any) -> list[str]:
    """The exception with its message; where a report has none, the lines that pytest marks, or all."""
    crash = getattr(error, "reprcrash", None)
    lines = [line for line in str(crash.message if crash else error).splitlines() if line.strip()]
    if crash is None:
        lines = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
    return lines


def shortened(lines: list[str], count: int) -> list[str]:
    """The first ones, and the last one of many."""
    if len(lines) <= count:
        return lines
    return [*lines[: count - 2], "...", lines[-1]] if count > 3 else lines[:count]
