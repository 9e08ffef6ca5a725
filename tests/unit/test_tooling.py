"""The rows of the features table: selection, outcomes, exit status, and the status tables made from them."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.server import tritonserver
from tests import groups, rows, slow, status
from tests.rows import ROOT, Feature, RowResult, load_features

pytest_plugins = ["pytester"]

SAMPLE = """
import pytest

@pytest.mark.row("A1", whole=True)
@pytest.mark.row("A2")
def test_passes():
    pass

@pytest.mark.row("A2")
@pytest.mark.parametrize("case", [0, 1])
def test_fails(case):
    assert case

@pytest.mark.slow
@pytest.mark.row("A3")
def test_is_skipped():
    pytest.skip("no reason")

@pytest.mark.row("A5", clauses=("names",))
def test_proves_a_part():
    pass

@pytest.mark.row("A9")
@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False

@pytest.mark.row("D7", clauses=("replay",))
@pytest.mark.skipif("True")
def test_needs_a_gpu():
    pass

@pytest.mark.row("D5", "D7")
def test_is_about_two_rows():
    pass

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


def test_a_test_that_ends_its_process_is_run_once_and_those_after_it_run(pytester: pytest.Pytester) -> None:
    """It ran nine times, and the other tests of its group, all those of the server, did not."""
    source = "import os\n\ndef test_ends():\n    os._exit(1)\n\ndef test_after():\n    pass\n"
    result = run_sample(pytester, "-p", "tests.groups", "-p", "xdist", "-n", "1", source=source)
    result.assert_outcomes(failed=1, passed=1)


def test_a_report_has_every_row_with_the_outcomes_of_its_tests(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    report = tmp_path / "new" / "rows.json"
    run_sample(pytester, f"--row-report={report}")
    results, features = rows.load_report(report), load_features()[1]
    outcomes = {row: list(result.outcomes.values()) for row, result in results.items()}
    assert outcomes == {
        "A1": ["passed"],
        "A2": ["passed", "failed"],
        "A3": ["skipped"],
        "A5": ["passed"],
        "A9": ["failed"],
        "D5": ["passed"],
        "D7": ["skipped", "passed"],
    }
    states = {row: result.state(features[row]) for row, result in results.items()}
    works = [row for row, state in states.items() if state == "works"]
    partly = [row for row, state in states.items() if state == "partly"]
    assert (works, partly) == (["A1"], ["A2", "A5", "D5", "D7"])
    assert results["A5"].missing(features["A5"]) == ["clients", "frontend"]


def test_a_row_works_when_passing_tests_name_all_its_clauses_and_none_of_it_failed_or_was_skipped() -> None:
    feature = Feature("A1", "", "M", {"grpc": "", "http": ""})

    def state(**tests: tuple[str, list[str]]) -> str:
        outcomes = {name: outcome for name, (outcome, _) in tests.items()}
        return RowResult(outcomes, {name: clauses for name, (_, clauses) in tests.items()}).state(feature)

    assert state() == "not yet"
    assert state(t=("passed", [])) == "partly"
    assert state(t=("passed", ["grpc"])) == "partly"
    assert state(t=("passed", ["grpc"]), u=("passed", ["http"])) == "works"
    assert state(t=("passed", ["grpc", "http"]), u=("passed", [])) == "works"
    for outcome in ("failed", "skipped", rows.NOT_RUN):
        assert state(t=("passed", ["grpc"]), u=(outcome, ["http"])) == "partly"
        expected = "works" if outcome == rows.NOT_RUN else "partly"
        assert state(t=("passed", ["grpc", "http"]), u=(outcome, [])) == expected
        assert state(t=(outcome, ["grpc", "http"])) == "not yet"
    gone = dataclasses.replace(feature, deleted="nobody needed it")
    assert RowResult().state(gone) == "deleted"


def test_a_clause_of_the_gpu_is_proven_only_on_one() -> None:
    feature = Feature("D7", "", "M", {"replay": "[GPU] replays", "miss": "falls back"})
    result = RowResult({"t": "passed"}, {"t": ["replay", "miss"]})
    assert result.missing(feature) == ["replay"]
    result.on_gpu = True
    assert result.missing(feature) == []


def test_a_test_that_names_clauses_must_not_be_skipped(pytester: pytest.Pytester) -> None:
    """CI is green with skipped tests, and the tables are made from the marks alone."""
    source = SAMPLE.replace('row("A3")', 'row("A3", clauses=("refusal",))')
    result = run_sample(pytester, "--rows=A3,D7", source=source)
    result.assert_outcomes(failed=1, skipped=1, passed=1, deselected=6)
    result.stdout.re_match_lines([r"it names clauses of rows, \['refusal'\], and was skipped: .*no reason.*"])


def test_rows_select_their_tests(pytester: pytest.Pytester) -> None:
    run_sample(pytester, "--rows=A1,A5").assert_outcomes(passed=2, deselected=7)
    everything = run_sample(pytester, "--rows=all")
    everything.assert_outcomes(passed=4, failed=1, skipped=2, xfailed=1, deselected=1)
    run_sample(pytester, "--rows=H15").assert_outcomes(deselected=9)


def test_tests_that_did_not_run_prove_nothing(pytester: pytest.Pytester, tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    run_sample(pytester, "-m", "not slow", f"--row-report={report}")
    assert rows.load_report(report)["A3"].outcomes == {"test_sample.py::test_is_skipped": rows.NOT_RUN}


def test_a_mark_that_means_nothing_stops_the_run(pytester: pytest.Pytester) -> None:
    source = 'import pytest\n\n@pytest.mark.row("A1", clauses=("htpp",))\ndef test_x():\n    pass\n'
    result = run_sample(pytester, source=source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_sample.py::test_x: bad row mark: A1 has no clause {'htpp'} but *"])


@pytest.mark.parametrize(
    ("named", "kwargs"),
    [
        (("A999",), {}),
        ((), {}),
        (("A1",), {"note": "x"}),
        (("A1",), {"whole": False}),
        (("A1", "A2"), {"whole": True}),
        (("A1",), {"clauses": ("htpp",)}),
        (("A1",), {"clauses": "http"}),
        (("A1",), {"whole": True, "clauses": ("http",)}),
    ],
)
def test_marks_that_mean_nothing(named: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no such row|has no clause|not one row with"):
        rows.add_mark({}, load_features()[1], named, kwargs)


WHOLE = list(load_features()[1]["A1"].clauses)


@pytest.mark.parametrize(
    ("results", "pytest_status", "expected"),
    [
        ({"A1": RowResult({"t": "passed"}, {"t": WHOLE})}, 0, 0),
        ({"A1": RowResult({"t": "passed", "u": "skipped"}, {"t": WHOLE, "u": []})}, 0, 1),
        ({"A1": RowResult({"t": "passed"}, {"t": WHOLE[1:]})}, 0, 1),
        ({}, 5, 1),
        ({"A1": RowResult({"t": "passed"}, {"t": WHOLE})}, 1, 1),
    ],
)
def test_make_rows_succeeds_only_if_every_row_is_proven(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, RowResult], pytest_status: int, expected: int
) -> None:
    monkeypatch.setattr(rows, "run_pytest", lambda arguments: (results, pytest_status))
    assert rows.run_rows(["A1"]) == expected


def test_make_rows_refuses_a_row_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.run_rows(["A1", "Z1"]) == 2
    assert capsys.readouterr().out == "no such row: Z1\n"


def test_every_row_has_clauses() -> None:
    """And no test claims to prove one whose code is deleted."""
    results = rows.marked_rows()
    for feature in load_features()[1].values():
        assert not (feature.deleted and feature.id in results), feature.id
        assert feature.clauses, feature.id
        assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in feature.clauses), feature.id
        assert all(text and "|" not in text for text in feature.clauses.values()), feature.id


def test_the_marks_read_from_the_files_are_those_that_pytest_sees(request: pytest.FixtureRequest) -> None:
    """The tables are made from the files alone; marks of a module or of one case are not seen."""
    plugin = request.config.pluginmanager.get_plugin("quire-rows")
    assert isinstance(plugin, rows.RowPlugin)
    seen = plugin.marks
    features = load_features()[1]
    for path in {nodeid.partition("::")[0] for nodeid in seen}:
        read = {f"{path}::{name}": marks for name, marks in rows.read_marks(ROOT / path, features).items()}
        assert {nodeid: marks for nodeid, marks in seen.items() if nodeid.startswith(f"{path}::")} == {
            nodeid: marks for nodeid, marks in read.items() if nodeid in seen
        }


def test_the_tables_are_what_the_marks_and_the_report_of_slow_tests_say() -> None:
    """`make status` writes them."""
    results = rows.marked_rows()
    assert status.README.read_text("utf-8") == status.render_readme(results)
    assert status.STATUS.read_text("utf-8") == status.render_status(results, slow.load())


def test_tables_say_what_the_results_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    readme, full = tmp_path / "README.md", tmp_path / "status.md"
    readme.write_text(f"before\n{status.BEGIN}\nold\n{status.END}\nafter\n", "utf-8")
    monkeypatch.setattr(status, "README", readme)
    monkeypatch.setattr(status, "STATUS", full)
    features = load_features()[1]
    results = {
        "A1": RowResult({"t": "passed", "u": "passed"}, {"t": WHOLE, "u": []}),
        "A3": RowResult({"t": "passed"}, {"t": ["infer", "perf"]}),
        "A4": RowResult({"t": "passed", "s": "passed"}, {"t": [], "s": list(features["A4"].clauses)}),
        "B1": RowResult({"t": "passed", "n": rows.NOT_RUN}, {"t": [], "n": ["speed"]}),
        "B2": RowResult({"t": "passed", "f": "failed"}, {"t": list(features["B2"].clauses), "f": []}),
    }
    report = {
        "s": {"outcome": "passed", "date": "2026-01-02", "commit": 40 * "a"},
        "f": {"outcome": "failed", "date": "2026-01-02", "commit": 40 * "b"},
    }
    status.write_status(results, report)
    status.write_status(results, report)  # a second time changes nothing
    text = readme.read_text("utf-8")
    assert text.startswith(f"before\n{status.BEGIN}\nOf the 216 rows of the features table 2 work, ")
    assert text.endswith(f" and 3 partly: [docs/status.md](docs/status.md).\n{status.END}\nafter\n")
    assert "old" not in text
    lines = full.read_text("utf-8").splitlines()
    refusal = features["A3"].clauses["refusal"]
    assert "| A Request / API surface | 2 | 1 | 42 |" in lines
    assert "| B Scheduling | 0 | 2 | 23 |" in lines
    assert "| all | 2 | 3 | 216 |" in lines
    assert (
        "Of the 2 rows that work 1 do by `make test` alone, 1 lean on slow tests: A4. "
        "These passed: 1 at aaaaaaaaaaaa on 2026-01-02."
    ) in lines
    assert "| B1 | speed | n | not run |" in lines
    assert "| B2 |  | f | failed |" in lines
    assert f"| A1 | {features['A1'].capability} | works | 2 |  |" in lines
    assert f"| A3 | {features['A3'].capability} | partly | 1 | {refusal} |" in lines
    assert any(line.startswith("| H15 | ") and "| not yet | 0 | speech" in line for line in lines)
    assert any(line.startswith("| B6 | ") and "| deleted | 0 | on purpose: nobody" in line for line in lines)


def test_ci_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    command = "env --default-signal=INT,QUIT make test </dev/null &"
    assert re.findall(r"^.*make .*</dev/null.*", script, re.MULTILINE) == [command]
    assert "make test " in status.README.read_text("utf-8")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_every_make_target_of_the_documents_exists() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = set().union(*(re.findall(r"\bmake ([a-z][a-z-]+)\b", d.read_text("utf-8")) for d in documents))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"serve", "test", "lint", "rows", "status"} <= named <= targets


def test_environment_variables_of_ours_have_one_prefix_and_are_listed_in_one_place() -> None:
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    named = set(re.findall(r"`([A-Z_]+)`", page))
    text = "".join(
        file.read_text("utf-8")
        for folder in ("backend", "kernels", "ensemble", "common", "client", "benchmarks", "tests")
        for file in (ROOT / folder).rglob("*.py")
        if "out" not in file.relative_to(ROOT).parts
    )
    ours = set(re.findall(r'"(QUIRE_[A-Z_]+)"', text))
    assert ours == {name for name in named if name.startswith("QUIRE_")}
    read = set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"', text))
    assert read <= named | {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name, which may be empty or a module too, of each import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def test_core_imports_neither_torch_nor_zeromq_and_packages_keep_their_places() -> None:
    forbidden = {
        "backend/quire/core": {"torch", "zmq", "triton_python_backend_utils"},
        "backend/quire": {"quire_quantize"},
        "common/quire_common": {"quire", "quire_kernels", "quire_ensemble", "quire_client"},
        "kernels/quire_kernels": {"quire", "quire_ensemble", "quire_client"},
        "ensemble/quire_ensemble": {"quire", "quire_kernels", "quire_client"},
        "client/quire_client": {"quire", "torch", "quire_common", "quire_kernels", "quire_ensemble"},
    }
    broken = []
    for folder, names in forbidden.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            broken += [f"{path}: {module}" for module, _ in imported(path) if module.split(".")[0] in names]
    assert broken == []


def test_modules_do_not_import_each_other_in_a_circle(tmp_path: Path) -> None:
    """Not for types either, nor within functions: modules in a circle can only be understood together. A
    package may gather names of its modules: of a module's own package nothing is said."""

    def check(*roots: Path) -> None:
        files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
            for root in roots
            for path in root.rglob("*.py")
        }
        graph = {
            name: {
                whole if (whole := f"{module}.{part}") in files else module for module, part in imported(path)
            }
            for name, path in files.items()
        }
        TopologicalSorter(graph).prepare()

    check(*(ROOT / folder for folder in ("backend", "kernels", "ensemble", "common", "client")))
    (tmp_path / "a.py").write_text("from b import c", "utf-8")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__init__.py").touch()
    (tmp_path / "b" / "c.py").write_text("def f():\n    import a", "utf-8")
    with pytest.raises(CycleError, match=r"\['a', 'b.c', 'a'\]|\['b.c', 'a', 'b.c'\]"):
        check(tmp_path)


def test_docstrings_name_their_noun_and_functions_what_they_do(tmp_path: Path) -> None:
    command = [sys.executable, ".ci/check_docstrings.py"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == ""
    text = '''"""A module."""
X = 1
"""Of it."""
class Y:
    """What it is."""
    x: int
    """By id."""
    def take(self) -> int:
        """Officially fine."""
'''
    (tmp_path / "planted.py").write_text(text, "utf-8")
    found = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1
    assert [line.split(":")[1] for line in found.stdout.splitlines()] == ["3", "5", "7", "8"]


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


def test_setup_begins_on_a_machine_with_nothing_installed() -> None:
    """The check of Python runs before anything is installed; what it imports grew by a package once, and a
    clean checkout could not be set up any more."""
    command = [sys.executable, "-S", "-I", str(ROOT / ".ci" / "check_python.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
