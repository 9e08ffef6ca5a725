"""The rows of the features table: selection, outcomes, exit status, and the status tables made from them."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from quire import tritonserver
from quire.errors import ConfigError
from tests import groups, rows, status
from tests.rows import ROOT, RowResult, load_features

pytest_plugins = ["pytester"]

SAMPLE = """
import pytest

@pytest.mark.row("A1", "A2")
def test_passes():
    pass

@pytest.mark.row("A2")
def test_fails():
    assert False

@pytest.mark.slow
@pytest.mark.row("A3")
def test_is_skipped():
    pytest.skip("no reason")

@pytest.mark.row("A5", part="names only", without="colours")
def test_proves_a_part():
    pass

@pytest.mark.row("A9")
@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False

def test_without_row():
    pass
"""


def run_sample(pytester: pytest.Pytester, *arguments: str, source: str = SAMPLE) -> pytest.RunResult:
    pytester.makeconftest("from tests.rows import pytest_addoption, pytest_configure  # noqa: F401")
    pytester.makeini("[pytest]\nmarkers =\n    row(*ids): row\n    slow: slow\n")
    pytester.makepyfile(test_sample=source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return pytester.run(*command)


@pytest.fixture(autouse=True)
def repository_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_several_processes_make_the_same_report(pytester: pytest.Pytester, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone.json", tmp_path / "shared.json"
    run_sample(pytester, f"--row-report={alone}")
    processes = ("-p", "xdist", "-n", "2")
    run_sample(pytester, f"--row-report={shared}", *processes)
    assert rows.load_report(shared) == rows.load_report(alone)


def test_files_that_start_the_server_are_one_group() -> None:
    names = ("tests/e2e/test_generate.py", "tests/fault/test_engine_death.py", "tests/unit/test_serve.py")
    assert {groups.group_of(name) for name in names} == {groups.SERVER}
    assert groups.group_of("tests/unit/test_config.py") == "tests/unit/test_config.py"


def test_a_report_has_every_row_with_the_outcomes_of_its_tests(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    report = tmp_path / "new" / "rows.json"
    run_sample(pytester, f"--row-report={report}")
    results = rows.load_report(report)
    outcomes = {row: list(result.outcomes.values()) for row, result in results.items()}
    assert outcomes == {
        "A1": ["passed"],
        "A2": ["passed", "failed"],
        "A3": ["skipped"],
        "A5": ["passed"],
        "A9": ["failed"],
    }
    states = {row: result.state for row, result in results.items()}
    assert states == {"A1": "works", "A2": "partly", "A3": "not yet", "A5": "partly", "A9": "not yet"}
    assert list(results["A5"].parts.values()) == ["names only"]
    assert {row for row, result in results.items() if result.without} == {"A5"}
    assert "(so far: names only) (without: colours) | partly | 1 |" in status.render_readme(results)


def test_rows_select_their_tests(pytester: pytest.Pytester) -> None:
    run_sample(pytester, "--rows=A1,A5").assert_outcomes(passed=2, deselected=4)
    run_sample(pytester, "--rows=all").assert_outcomes(passed=2, failed=1, skipped=1, xfailed=1, deselected=1)
    run_sample(pytester, "--rows=H15").assert_outcomes(deselected=6)


def test_collecting_reports_tests_as_not_run(pytester: pytest.Pytester, tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    run_sample(pytester, "--collect-only", f"--row-report={report}")
    result = rows.load_report(report)["A1"]
    assert list(result.outcomes.values()) == [rows.NOT_RUN]
    assert result.state == "not yet"


@pytest.mark.parametrize("mark", ['"A999"', "", '"A1", note="x"'])
def test_a_mark_that_names_no_row_stops_the_run(pytester: pytest.Pytester, mark: str) -> None:
    source = f"import pytest\n\n@pytest.mark.row({mark})\ndef test_x():\n    pass\n"
    result = run_sample(pytester, source=source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_sample.py::test_x: bad row mark*"])


@pytest.mark.parametrize(
    ("results", "pytest_status", "expected"),
    [
        ({"A1": RowResult({"t": "passed"})}, 0, 0),
        ({"A1": RowResult({"t": "passed", "u": "skipped"})}, 0, 1),
        ({"A1": RowResult({"t": "passed", "u": "failed"})}, 1, 1),
        ({"A1": RowResult({"t": "passed"}, {"t": "a part"})}, 0, 1),
        ({"A1": RowResult({"t": "passed", "u": "passed"}, {"t": "a part"})}, 0, 0),
        ({}, 5, 1),
        ({"A1": RowResult({"t": "passed"})}, 1, 1),
    ],
)
def test_make_rows_succeeds_only_if_every_row_is_proven(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, RowResult], pytest_status: int, expected: int
) -> None:
    monkeypatch.setattr(rows, "run_pytest", lambda arguments, quiet: (results, pytest_status))
    assert rows.run_rows(["A1"]) == expected


def test_make_rows_refuses_a_row_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.run_rows(["A1", "Z1"]) == 2
    assert capsys.readouterr().out == "no such row: Z1\n"


def test_tables_say_what_the_results_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readme, full = tmp_path / "README.md", tmp_path / "status.md"
    readme.write_text(f"before\n{status.BEGIN}\nold\n{status.END}\nafter\n", "utf-8")
    monkeypatch.setattr(status, "README", readme)
    monkeypatch.setattr(status, "STATUS", full)
    results = {
        "A1": RowResult({"t": "passed", "u": "passed"}),
        "A5": RowResult({"t": "passed"}, {"t": "names only"}),
        "B2": RowResult({"t": "failed"}),
    }
    status.write_status(results)
    status.write_status(results)  # a second time changes nothing
    text = readme.read_text("utf-8")
    assert text.startswith(f"before\n{status.BEGIN}\n| area |")
    assert text.endswith(f"{status.END}\nafter\n")
    assert "old" not in text
    assert "(so far: names only)" in text
    assert status.parse_table(text) == {"A1": ("works", 2), "A5": ("partly", 1)}
    everything = status.parse_table(full.read_text("utf-8"))
    assert everything.keys() == load_features()[1].keys()
    assert everything["B2"] == ("not yet", 1)
    assert everything["H1"] == ("not yet", 0)


def rows_marked_in(path: Path) -> set[str]:
    """Row ids in `...mark.row("A1", ...)` calls of a source file; constants only, as everywhere here."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.row"):
            found.update(str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))
    return found


def test_the_readme_claims_no_row_without_tests() -> None:
    marked = set().union(*map(rows_marked_in, (ROOT / "tests").rglob("test_*.py")))
    text = status.README.read_text("utf-8")
    assert text.count(status.BEGIN) == text.count(status.END) == 1
    claimed = {row for row, (state, _) in status.parse_table(text).items() if state in ("works", "partly")}
    assert claimed <= marked


def test_ci_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    commands = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec make test </dev/null"]
    assert "make test " in status.README.read_text("utf-8")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_every_make_target_of_the_documents_exists() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = set().union(*(re.findall(r"\bmake ([a-z][a-z-]+)\b", d.read_text("utf-8")) for d in documents))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"serve", "test", "lint", "rows", "status"} <= named <= targets


def test_core_imports_neither_torch_nor_zeromq_and_packages_keep_their_places() -> None:
    forbidden = {
        "backend/quire/core": {"torch", "zmq", "triton_python_backend_utils"},
        "kernels/quire_kernels": {"quire", "quire_ensemble", "quire_client"},
        "ensemble/quire_ensemble": {"quire", "quire_client"},
        "client/quire_client": {"quire", "torch", "quire_kernels", "quire_ensemble"},
    }
    broken = []
    for folder, names in forbidden.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules = [node.module]
                broken += [f"{path}: {m}" for m in modules if m.split(".")[0] in names]
    assert broken == []


def test_make_setup_refuses_an_unsuitable_python_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(ROOT / ".ci" / "check_python.py")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds to it
    runpy.run_path(script)

    def no_library() -> Path:
        raise ConfigError("no shared libpython")

    monkeypatch.setattr(tritonserver, "libpython_directory", no_library)
    with pytest.raises(SystemExit, match=r"^no shared libpython\. Another one: make PYTHON="):
        runpy.run_path(script)
    monkeypatch.setattr(sys, "version_info", (3, 9))
    with pytest.raises(SystemExit, match=r"^Quire needs Python >= 3\.10"):
        runpy.run_path(script)
