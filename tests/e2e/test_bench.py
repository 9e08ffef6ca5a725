"""`make bench`, small: one command serves the demo, runs perf_analyzer and prints one table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.server import ROOT

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.row("G24", clauses=("command",))
def test_one_command_prints_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line for line in run.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 2 + 4, run.stdout
    assert "TTFT" in rows[0]
    assert "p99" in run.stdout
    raw = re.search(r"^raw data: (.+)$", run.stdout, re.MULTILINE)
    assert raw is not None
    folder = Path(raw[1])
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["environment"]["cpu"]
    for row in summary["rows"]:
        if row["load"].startswith("perf_analyzer"):
            assert row["median"]["output_tokens"] == row["median"]["requests"] * summary["max_tokens"]
    exports = list(folder.glob("**/*.json"))
    assert len(exports) > 2, "raw profile exports are kept"
