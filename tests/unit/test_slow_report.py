"""The report of the slow tests: what a run of all or some of them writes, and what it proves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import rows, slow
from tests.rows import ROOT, load_features

pytest_plugins = ["pytester"]

SAMPLE = """
import pytest

@pytest.mark.slow
def test_passes():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("case", [0, 1])
def test_has_cases(case):
    pass

@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_is_fast_with_a_slow_case(case):
    pass

@pytest.mark.slow
class TestOfAClass:
    def test_fails(self):
        assert False

    @pytest.mark.row("A3", clauses=("refusal",))
    def test_is_skipped(self):
        pytest.skip("not on this machine")
"""
PASSES, CASES, FAILS, SKIPPED = (
    f"tests/test_sample.py::{name}"
    for name in ("test_passes", "test_has_cases", "TestOfAClass::test_fails", "TestOfAClass::test_is_skipped")
)


class Repository:
    """One with the tests of a file, of which each state is a commit."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        self.path = pytester.path
        self.report = self.path / "tests/reports/slow.json"
        self._git("init", "-q")
        (self.path / ".gitignore").write_text("__pycache__/\nstdout\nstderr\n", "utf-8")  # of pytester
        (self.path / "conftest.py").write_text('pytest_plugins = ["tests.rows", "tests.slow"]\n', "utf-8")
        ini = "[pytest]\nmarkers =\n    row(*ids): row\n    slow: slow\n"
        (self.path / "pytest.ini").write_text(ini, "utf-8")

    def commit(self, source: str) -> str:
        (self.path / "tests").mkdir(exist_ok=True)
        (self.path / "tests/test_sample.py").write_text(source, "utf-8")
        self._git("add", ".")
        self._git("-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "-q", "-m", "x")
        return self._git("rev-parse", "HEAD").strip()

    def run(self, *arguments: str) -> pytest.RunResult:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", *arguments]
        return self._pytester.run(*command, "--report", str(self.report))

    def entries(self, field: str) -> dict[str, str]:
        return {test: entry[field] for test, entry in slow.load(self.report).items()}

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout


@pytest.fixture
def repository(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return Repository(pytester)


@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "two"])
def test_a_run_writes_how_each_slow_function_came_out(
    repository: Repository, processes: tuple[str, ...]
) -> None:
    commit = repository.commit(SAMPLE)
    repository.run(*processes).assert_outcomes(passed=4, failed=2)
    assert repository.entries("outcome") == {PASSES: "passed", CASES: "passed", FAILS: "failed"}
    assert set(repository.entries("commit").values()) == {commit}
    assert all(
        f"Python {sys.version.split()[0]}" in where for where in repository.entries("machine").values()
    )


def test_a_part_of_them_leaves_the_other_entries_as_they_are(repository: Repository) -> None:
    first = repository.commit(SAMPLE)
    repository.run()
    second = repository.commit(SAMPLE.replace("assert False", "pass"))
    repository.run("-k", "test_fails")
    assert repository.entries("outcome") == {PASSES: "passed", CASES: "passed", FAILS: "passed"}
    assert repository.entries("commit") == {PASSES: first, CASES: first, FAILS: second}


def test_a_part_of_its_cases_proves_no_function_and_one_that_fails_disproves_it(
    repository: Repository,
) -> None:
    repository.commit(SAMPLE)
    repository.run(f"{CASES}[1]").assert_outcomes(passed=1)
    repository.run("-k", "test_has_cases and 1").assert_outcomes(passed=1)
    assert repository.entries("outcome") == {}
    repository.run("-k", "test_has_cases")
    assert repository.entries("outcome") == {CASES: "passed"}
    repository.commit(
        SAMPLE.replace("def test_has_cases(case):\n    pass", "def test_has_cases(case): assert 0")
    )
    repository.run("-k", "test_has_cases and 1").assert_outcomes(failed=1)
    assert repository.entries("outcome") == {CASES: "failed"}


def test_a_skip_leaves_the_entry_of_another_machine(repository: Repository) -> None:
    repository.commit(SAMPLE.replace('pytest.skip("not on this machine")', "pass"))
    repository.run("-k", "test_is_skipped")
    repository.commit(SAMPLE)
    repository.run("-k", "test_is_skipped").assert_outcomes(failed=1)  # it names a clause
    assert repository.entries("outcome") == {SKIPPED: "passed"}


def test_tests_that_are_gone_or_slow_no_more_leave_the_report(repository: Repository) -> None:
    repository.commit(SAMPLE)
    repository.run()
    source = SAMPLE.replace("test_passes", "test_x").replace("@pytest.mark.slow\nclass", "class")
    repository.commit(source)
    repository.run("-k", "test_x")
    assert set(repository.entries("outcome")) == {CASES, "tests/test_sample.py::test_x"}


def test_a_tree_with_changes_writes_nothing(repository: Repository) -> None:
    repository.commit(SAMPLE)
    (repository.path / "more.py").write_text("", "utf-8")
    result = repository.run()
    assert not repository.report.exists()
    result.stdout.fnmatch_lines(["*slow.json: not written from a tree with changes"])


def test_what_pytest_calls_slow_is_read_from_the_files(request: pytest.FixtureRequest) -> None:
    """The tables are made from the files alone."""
    plugin = request.config.pluginmanager.get_plugin("quire-slow")
    assert isinstance(plugin, slow.SlowTests)
    read = slow.slow_tests()
    assert {test for test, is_slow in plugin.seen.items() if is_slow} == read & plugin.seen.keys()


@pytest.mark.parametrize("outcome", ["passed", "failed", None])
def test_a_clause_that_slow_tests_alone_name_is_proven_by_one_that_passed(
    monkeypatch: pytest.MonkeyPatch, outcome: str | None
) -> None:
    """All others are proven by tests that CI runs."""
    test, clauses = "tests/fault/test_soak.py::test_a_hundred_thousand_requests", ["faults", "shm", "soak"]
    report = {test: {"outcome": outcome}} if outcome else {}
    monkeypatch.setattr(slow, "load", lambda: report)
    results, feature = rows.marked_rows(), load_features()[1]["G32"]
    assert set(clauses) <= feature.clauses.keys()
    missing = set(clauses) & set(results["G32"].missing(feature))
    assert missing == (set() if outcome == "passed" else set(clauses))
    assert results["A1"].state(load_features()[1]["A1"]) == "works"
