"""Rows of the features table and the tests that prove them.

As a pytest plugin (loaded by the root conftest): checks the ids given to `@pytest.mark.row(...)`, selects
tests by row (`--rows A1,A2`, or `--rows all` for every test with a row) and writes what came out
(`--row-report FILE`). As a program, what `make rows` and `make status` call:

    python -m tests.rows                 list all rows that have tests
    python -m tests.rows A1 A2           run their tests; status 0 only if every row has tests and all pass
    python -m tests.rows --status        run the tests of all rows and regenerate the status tables

A test that proves only a part of a criterion says which: `@pytest.mark.row("A5", part="names only")`. A row
with no other tests is "partly" done, and `make rows` does not accept it. Where a criterion is met but the
row's title promises more, a test of it says what is missing: `@pytest.mark.row("E1", without="Llama 4")`; the
status tables repeat it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FEATURES = ROOT / "docs" / "features.json"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Feature:
    """One row of the features table; rank is M (must), S (should) or X (moonshot)."""

    id: str
    capability: str
    rank: str


@dataclass
class RowResult:
    """Tests of one row by node id, with their outcomes; `parts` of those that prove only a part of it;
    `without`: what the row's title promises and is not there."""

    outcomes: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)

    @property
    def all_pass(self) -> bool:
        return bool(self.outcomes) and all(outcome == "passed" for outcome in self.outcomes.values())

    @property
    def state(self) -> str:
        """works: proven whole, and all its tests pass. partly: something passes. not yet: nothing does."""
        if self.all_pass and len(self.parts) < len(self.outcomes):
            return "works"
        return "partly" if "passed" in self.outcomes.values() else "not yet"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_features() -> tuple[dict[str, str], dict[str, Feature]]:
    """Titles of the areas by letter, and all rows by id, in the table's order."""
    document = json.loads(FEATURES.read_text("utf-8"))
    return document["areas"], {row["id"]: Feature(**row) for row in document["rows"]}


def load_report(path: Path) -> dict[str, RowResult]:
    return {row: RowResult(**result) for row, result in json.loads(path.read_text("utf-8")).items()}


def row_order(row: str) -> tuple[str, int]:
    """Sort key that puts A2 before A10."""
    return row[0], int(row[1:])


class RowPlugin:
    """Collects the row marks of the selected tests and the outcome of each."""

    def __init__(self, selected: frozenset[str] | None, report: Path | None) -> None:
        self._selected = selected
        self._report = report
        self._features = load_features()[1]
        self._marks: dict[str, dict[str, dict[str, str]]] = {}  # node id -> row -> the mark's notes
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            marks = self._row_marks(item)
            wanted = (
                self._selected is None or (marks and "all" in self._selected) or self._selected & marks.keys()
            )
            (kept if wanted else dropped).append(item)
            if wanted and marks:
                self._marks[item.nodeid] = marks
                # With several processes the one that reports has not collected.
                item.user_properties.append(("rows", marks))
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _row_marks(self, item: pytest.Item) -> dict[str, dict[str, str]]:
        rows: dict[str, dict[str, str]] = {}
        for mark in item.iter_markers("row"):
            unknown = [row for row in mark.args if row not in self._features]
            if unknown or not mark.args or set(mark.kwargs) - {"part", "without"}:
                raise pytest.UsageError(
                    f"{item.nodeid}: bad row mark {mark.args} {mark.kwargs}: unknown {unknown}"
                )
            for row in mark.args:
                rows.setdefault(row, {}).update(mark.kwargs)
        return rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "call" and hasattr(report, "wasxfail")):
            outcome = "failed"  # an expected failure proves nothing either
        elif report.skipped:
            outcome = "skipped"
        elif report.when == "call":
            outcome = "passed"
        else:
            return
        for name, marks in report.user_properties:
            if name == "rows" and isinstance(marks, dict):
                self._marks[report.nodeid] = marks
        if self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = outcome

    def pytest_sessionfinish(self) -> None:
        if self._report is None:
            return
        rows: dict[str, RowResult] = defaultdict(RowResult)
        for nodeid, marks in self._marks.items():
            for row, notes in marks.items():
                result = rows[row]
                result.outcomes[nodeid] = self._outcomes.get(nodeid, NOT_RUN)
                if "part" in notes:
                    result.parts[nodeid] = notes["part"]
                if "without" in notes and notes["without"] not in result.without:
                    result.without.append(notes["without"])
        document = {row: rows[row].to_json() for row in sorted(rows, key=row_order)}
        self._report.parent.mkdir(parents=True, exist_ok=True)
        self._report.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rows of the features table")
    group.addoption("--rows", metavar="A1,A2", help="run only the tests of these rows ('all': of any row)")
    group.addoption("--row-report", metavar="FILE", help="write rows, tests and outcomes as JSON")


def pytest_configure(config: pytest.Config) -> None:
    rows, report = config.getoption("--rows"), config.getoption("--row-report")
    if hasattr(config, "workerinput"):
        report = None  # the process that hands out the tests writes it
    plugin = RowPlugin(frozenset(rows.split(",")) if rows else None, Path(report) if report else None)
    config.pluginmanager.register(plugin, "quire-rows")


def run_pytest(arguments: Iterable[str], quiet: bool) -> tuple[dict[str, RowResult], int]:
    """Run pytest in the repository with a row report; the report and pytest's status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.json"
        completed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--row-report={report}", *arguments],
            cwd=ROOT,
            check=False,
            capture_output=quiet,
            text=True,
        )
        # 0 all passed, 1 some failed, 5 none selected; anything else is no result at all.
        if completed.returncode not in (0, 1, 5) or not report.is_file():
            print(
                *filter(None, [completed.stdout, completed.stderr]), f"pytest: status {completed.returncode}"
            )
            sys.exit(completed.returncode or 3)
        return load_report(report), completed.returncode


def list_rows() -> int:
    results, _ = run_pytest(["--collect-only", "--rows=all"], quiet=True)
    features = load_features()[1]
    for row in sorted(results, key=row_order):
        result = results[row]
        partly = "  (in part)" if len(result.parts) == len(result.outcomes) else ""
        print(f"{row:4} {len(result.outcomes):3} tests  {features[row].capability}{partly}")
    print(f"{len(results)} of {len(features)} rows have tests")
    return 0


def run_rows(rows: list[str]) -> int:
    unknown = [row for row in rows if row not in load_features()[1]]
    if unknown:
        print(f"no such row: {' '.join(unknown)}")
        return 2
    results, status = run_pytest([f"--rows={','.join(rows)}"], quiet=False)
    print()
    good = status == 0
    for row in rows:
        result = results.get(row, RowResult())
        if result.state != "works":
            good = False
        print(f"{row:4} {result.state if result.outcomes else 'no tests'}")
        for nodeid, outcome in result.outcomes.items():
            part = f"  (in part: {result.parts[nodeid]})" if nodeid in result.parts else ""
            print(f"     {outcome:8} {nodeid}{part}")
    print(f"rows: {'all proven' if good else 'NOT all proven'} ({len(rows)} asked for)")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make rows", description="Rows of the features table and their tests."
    )
    parser.add_argument("rows", nargs="*", help="such as A1 A14")
    parser.add_argument("--status", action="store_true", help="run all rows and regenerate the status tables")
    arguments = parser.parse_args()
    if arguments.status:
        from tests.status import write_status

        results, status = run_pytest(["--rows=all"], quiet=False)
        write_status(results)
        return status
    rows = [row for argument in arguments.rows for row in re.split(r"[,\s]+", argument) if row]
    return run_rows(rows) if rows else list_rows()


if __name__ == "__main__":
    sys.exit(main())
