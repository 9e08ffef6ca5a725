"""Outcomes of the slow tests, which CI does not run: kept in a report that is committed.

As a pytest plugin (loaded by the root conftest): `--report FILE` writes there how each slow test function
came out, at which commit and on which machine. A run of some of them leaves the entries of the others as they
are: they can be run in pieces. A function keeps its entry where not all of its cases ran, unless one failed,
and where it was skipped. Nothing is written from a tree with changes: no commit has what ran.

A function is slow if it carries the mark itself, or by its class or module. One that has slow cases only is a
test of `make test`, and not in the report.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.rows import FAILED, OUTCOMES, PASSED, ROOT, function_of, outcome_of

REPORT = ROOT / "tests" / "reports" / "slow.json"
WRITTEN = ("tests/reports", "docs/status.md", "README.md")
"""What follows from a report may differ from the commit that it names."""
Entry = dict[str, Any]
"""outcome, seconds, commit, date and machine."""
CASES = "slow cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", metavar="FILE", help="write outcomes of slow tests, and where they ran, as JSON"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests(), "quire-slow")
    file = config.getoption("--report")
    if file and not hasattr(config, "workerinput"):  # the process that hands out the tests writes it
        config.pluginmanager.register(SlowReport(config.rootpath / file, config.rootpath))


class SlowTests:
    """Knows which of the collected functions are slow, and writes to their cases how many of them there are.

    Cases that were named one by one are not counted: others may be missing.
    """

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}
        """Whether it is slow, by function, also of those that `-m` leaves out."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        cases = Counter(function_of(item.nodeid) for item in items)
        for item in items:
            test = function_of(item.nodeid)
            marks = [*getattr(getattr(item, "function", None), "pytestmark", ())]
            marks += [mark for parent in item.listchain()[:-1] for mark in parent.own_markers]
            self.seen[test] = any(mark.name == "slow" for mark in marks)
            if self.seen[test] and not any("[" in argument for argument in config.args):
                item.user_properties.append((CASES, cases[test]))


class SlowReport:
    """Writes an entry as soon as its cases have ended: a run of hours may be broken off."""

    def __init__(self, file: Path, root: Path) -> None:
        from benchmarks.machine import environment

        self._file, self._root = file, root
        self._commit = clean_commit(root)
        self._outcomes: dict[str, dict[str, str]] = defaultdict(dict)
        """By function, then by case."""
        self._seconds: Counter[str] = Counter()
        machine = environment()
        self._date = machine["date"][:10]
        versions = [f"{name} {machine['versions'].get(name)}" for name in ("torch", "nvidia-pytriton")]
        self._machine = (
            f"{machine['cpu']}, {machine['usable_cores']} cores, {machine['memory_gib']:.0f} GiB, "
            f"GPU: {machine['gpu'] or 'none'}, Python {machine['python']}, {', '.join(versions)}"
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cases = next((count for name, count in report.user_properties if name == CASES), None)
        if cases is None:
            return
        test = function_of(report.nodeid)
        outcomes = self._outcomes[test]
        self._seconds[test] += report.duration
        if outcome := outcome_of(report):
            worst = max(outcome, outcomes.get(report.nodeid, PASSED), key=OUTCOMES.index)
            outcomes[report.nodeid] = worst
        if report.when == "teardown":
            worst = max(outcomes.values(), key=OUTCOMES.index)
            if worst == FAILED or (worst == PASSED and len(outcomes) == cases):
                self._write(test, worst)

    def _write(self, test: str, outcome: str) -> None:
        if self._commit is None or clean_commit(self._root) != self._commit:
            self._commit = None
            return
        slow = slow_tests(self._root)
        entries = {name: entry for name, entry in load(self._file).items() if name in slow}
        entries[test] = {
            "outcome": outcome,
            "seconds": round(self._seconds[test], 1),
            "commit": self._commit,
            "date": self._date,
            "machine": self._machine,
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", "utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._commit is None:
            terminalreporter.write_line(f"{self._file}: not written from a tree with changes")


def load(file: Path = REPORT) -> dict[str, Entry]:
    """Entries by node id of the function."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def clean_commit(root: Path) -> str | None:
    """HEAD, if the tree is nothing else but for what follows from a report."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    try:
        changes = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in WRITTEN))
        return None if changes else git("rev-parse", "HEAD").strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def slow_tests(root: Path = ROOT) -> set[str]:
    """Node ids of all functions that are slow, read from the files."""
    return {
        f"{path.relative_to(root).as_posix()}::{name}"
        for path in (root / "tests").rglob("test_*.py")
        for name in read_slow(path)
    }


def read_slow(path: Path) -> set[str]:
    """The slow functions of a test file, as `function` or `Class::function`, without importing it."""
    text = path.read_text("utf-8")
    found: set[str] = set()
    if "mark.slow" not in text:
        return found

    def is_mark(expressions: Iterable[ast.expr]) -> bool:
        return "pytest.mark.slow" in map(ast.unparse, expressions)

    def visit(body: list[ast.stmt], prefix: str, outer: bool) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                slow = outer or is_mark(node.decorator_list)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}::", slow)
                elif slow and node.name.startswith("test"):
                    found.add(prefix + node.name)

    module = ast.parse(text).body
    values = [
        n.value for n in module if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"
    ]
    visit(module, "", any(is_mark(v.elts if isinstance(v, ast.List) else [v]) for v in values))
    return found
