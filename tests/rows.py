"""Rows of the features table, their criteria in clauses, and the tests that prove them.

A row of docs/features.json works when each clause of its criterion is named by a test that passes:

    @pytest.mark.row("A14", clauses=("fuzz", "concat"))  proves these clauses, each of them whole
    @pytest.mark.row("A17", whole=True)                  proves every clause by itself
    @pytest.mark.row("A14")                              is about the row and proves nothing by itself

A clause whose text begins with [GPU] is proven only where the test ran on a GPU. A test that names any other
clause must not be skipped: that is a failure, so that a run without failures proves what the marks say. What
README.md and docs/status.md say is made from the marks and the report of the slow tests (`tests/status.py`,
`tests/slow.py`); a test compares.

As a pytest plugin (loaded by the root conftest): checks the marks, selects tests by row (`--rows A1,A2`, or
`--rows all` for every test with a row) and writes what came out (`--row-report FILE`). As a program, what
`make rows` and `make status` call:

    python -m tests.rows                 list all rows that have tests
    python -m tests.rows A1 A2           run their tests; status 0 only if all pass and prove every clause
    python -m tests.rows --status        regenerate the status tables; runs nothing
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FEATURES = ROOT / "docs" / "features.json"
PASSED, NOT_RUN, SKIPPED, FAILED = OUTCOMES = ("passed", "not run", "skipped", "failed")
"""Of a test function: that of its worst case, and these go from best to worst."""
GPU = "[GPU]"
Marks = dict[str, list[str]]
"""Of one test function: the clauses it names, by row."""


@dataclass(frozen=True)
class Feature:
    """One row of the features table; rank is M (must), S (should) or X (moonshot). `clauses`: what must be
    shown, by name. `deleted`: why the code was deleted on purpose; empty: it was not."""

    id: str
    capability: str
    rank: str
    clauses: dict[str, str]
    deleted: str = ""

    def needs_gpu(self, clause: str) -> bool:
        return self.clauses[clause].startswith(GPU)


@dataclass
class RowResult:
    """Outcomes of the test functions of one row, and the clauses that each names, both by node id without
    parameters; `on_gpu`: whether they ran where there is a GPU."""

    outcomes: dict[str, str] = field(default_factory=dict)
    clauses: dict[str, list[str]] = field(default_factory=dict)
    on_gpu: bool = False

    def missing(self, feature: Feature) -> list[str]:
        """Names of the clauses that no test has proven, in the row's order."""
        passed = [names for test, names in self.clauses.items() if self.outcomes[test] == PASSED]
        proven = {name for names in passed for name in names if self.on_gpu or not feature.needs_gpu(name)}
        return [name for name in feature.clauses if name not in proven]

    def state(self, feature: Feature) -> str:
        """works: every clause is proven, and all tests that ran pass. partly: something passes. deleted: on
        purpose."""
        if feature.deleted:
            return "deleted"
        outcomes = set(self.outcomes.values())
        if outcomes <= {PASSED, NOT_RUN} and not self.missing(feature):
            return "works"
        return "partly" if PASSED in outcomes else "not yet"

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


def outcome_of(report: pytest.TestReport) -> str | None:
    """Outcome of a case as one of its reports says it; None where that says nothing."""
    if (SKIPPED, True) in report.user_properties:
        return SKIPPED
    if report.failed or (report.when == "call" and hasattr(report, "wasxfail")):
        return FAILED  # an expected failure proves nothing either
    if report.skipped:
        return SKIPPED
    return PASSED if report.when == "call" else None


def function_of(nodeid: str) -> str:
    """Node id of the test function of a case."""
    return nodeid.partition("[")[0]


def add_mark(
    marks: Marks, features: Mapping[str, Feature], rows: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Add what one `row(*rows, **kwargs)` says to the marks of its test; ValueError if it means nothing."""
    if not rows or not features.keys() >= set(rows):
        raise ValueError(f"no such row: {rows}")
    names: Iterable[str] = ()
    if len(rows) == 1 and kwargs == {"whole": True}:
        names = features[rows[0]].clauses
    elif len(rows) == 1 and kwargs.keys() == {"clauses"} and isinstance(kwargs["clauses"], tuple):
        names = kwargs["clauses"]
    elif kwargs:
        raise ValueError(f"not one row with whole=True or clauses=(...), nor rows alone: {rows} {kwargs}")
    for row in rows:
        if unknown := set(names) - features[row].clauses.keys():
            raise ValueError(f"{row} has no clause {unknown} but {list(features[row].clauses)}")
        marks[row] = sorted({*marks.get(row, ()), *names})


def read_marks(path: Path, features: Mapping[str, Feature]) -> dict[str, Marks]:
    """Marks of the functions in a test file, by `function` or `Class::function`, without importing it.

    Only those that stand above a function or a class as calls with constants are seen.
    """
    found: dict[str, Marks] = {}

    def visit(body: list[ast.stmt], prefix: str, outer: list[ast.expr]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::", [*outer, *node.decorator_list])
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marks: Marks = {}
                for call in [*outer, *node.decorator_list]:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.row":
                        rows = tuple(ast.literal_eval(argument) for argument in call.args)
                        kwargs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                        add_mark(marks, features, rows, kwargs)
                if marks:
                    found[prefix + node.name] = marks

    visit(ast.parse(path.read_text("utf-8")).body, "", [])
    return found


def marked_rows() -> dict[str, RowResult]:
    """What the marks of all test files say if every test of `make test` passes and there is no GPU.

    CI runs those with each change. The slow ones came out as their report says.
    """
    from tests import slow

    features, slow_tests, report = load_features()[1], slow.slow_tests(), slow.load()
    rows: dict[str, RowResult] = defaultdict(RowResult)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, marks in read_marks(path, features).items():
            test = f"{path.relative_to(ROOT).as_posix()}::{name}"
            for row, names in marks.items():
                on_record = report[test]["outcome"] if test in report else NOT_RUN
                rows[row].outcomes[test] = on_record if test in slow_tests else PASSED
                rows[row].clauses[test] = names
    return rows


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class RowPlugin:
    """Collects the row marks of the selected tests and the outcome of each."""

    def __init__(self, selected: frozenset[str] | None, report: Path | None) -> None:
        self._selected = selected
        self._report = report
        self._features = load_features()[1]
        self._outcomes: dict[str, str] = {}
        self.marks: dict[str, Marks] = {}
        """Of every selected test function that has some, also of those that `-m` leaves out."""

    @pytest.hookimpl(tryfirst=True)
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
                self.marks[function_of(item.nodeid)] = marks
                # With several processes the one that reports has not collected.
                item.user_properties.append(("rows", marks))
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def _row_marks(self, item: pytest.Item) -> Marks:
        marks: Marks = {}
        for mark in item.iter_markers("row"):
            try:
                add_mark(marks, self._features, mark.args, mark.kwargs)
            except ValueError as error:
                raise pytest.UsageError(f"{item.nodeid}: bad row mark: {error}") from None
        return marks

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        marks = self.marks.get(function_of(item.nodeid), {})
        needed = [n for row, names in marks.items() for n in names if not self._features[row].needs_gpu(n)]
        if report.skipped and needed:
            report.outcome = FAILED
            report.user_properties.append((SKIPPED, True))
            report.longrepr = f"it names clauses of rows, {needed}, and was skipped: {report.longrepr}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = outcome_of(report)
        if outcome is None:
            return
        test = function_of(report.nodeid)
        for name, marks in report.user_properties:
            if name == "rows" and isinstance(marks, dict):
                self.marks[test] = marks
        self._outcomes[test] = max(outcome, self._outcomes.get(test, PASSED), key=OUTCOMES.index)

    def pytest_sessionfinish(self) -> None:
        if self._report is None:
            return
        rows: dict[str, RowResult] = defaultdict(RowResult)
        for test, marks in self.marks.items():
            for row, names in marks.items():
                rows[row].outcomes[test] = self._outcomes.get(test, NOT_RUN)
                rows[row].clauses[test] = names
                if any(map(self._features[row].needs_gpu, names)):
                    rows[row].on_gpu = has_gpu()
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


def run_pytest(arguments: Iterable[str]) -> tuple[dict[str, RowResult], int]:
    """Run pytest in the repository with a row report; the report and pytest's status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "rows.json"
        completed = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--row-report={report}", *arguments],
            cwd=ROOT,
            check=False,
        )
        # 0 all passed, 1 some failed, 5 none selected; anything else is no result at all.
        if completed.returncode not in (0, 1, 5) or not report.is_file():
            print(f"pytest: status {completed.returncode}")
            sys.exit(completed.returncode or 3)
        return load_report(report), completed.returncode


def list_rows() -> int:
    results, features = marked_rows(), load_features()[1]
    for row in sorted(results, key=row_order):
        result, feature = results[row], features[row]
        missing = result.missing(feature)
        without = f"  (without: {', '.join(missing)})" if missing else ""
        print(f"{row:4} {len(result.outcomes):3} tests  {feature.capability}{without}")
    print(f"{len(results)} of {len(features)} rows have tests")
    return 0


def run_rows(rows: list[str]) -> int:
    features = load_features()[1]
    if unknown := [row for row in rows if row not in features]:
        print(f"no such row: {' '.join(unknown)}")
        return 2
    results, status = run_pytest([f"--rows={','.join(rows)}"])
    print()
    good = status == 0
    for row in rows:
        feature, result = features[row], results.get(row, RowResult())
        state = result.state(feature)
        good = good and state == "works"
        print(f"{row:4} {state if result.outcomes else 'no tests'}")
        for test, outcome in result.outcomes.items():
            print(f"     {outcome:8} {test}  {', '.join(result.clauses[test])}")
        for name in result.missing(feature):
            print(f"     missing  {name}: {feature.clauses[name]}")
    print(f"rows: {'all proven' if good else 'NOT all proven'} ({len(rows)} asked for)")
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make rows", description="Rows of the features table and their tests."
    )
    parser.add_argument("rows", nargs="*", help="such as A1 A14")
    parser.add_argument("--status", action="store_true", help="regenerate the status tables")
    arguments = parser.parse_args()
    if arguments.status:
        from tests import slow, status

        status.write_status(marked_rows(), slow.load())
        return 0
    rows = [row for argument in arguments.rows for row in re.split(r"[,\s]+", argument) if row]
    return run_rows(rows) if rows else list_rows()


if __name__ == "__main__":
    sys.exit(main())
