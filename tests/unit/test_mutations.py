"""Bugs are planted where they are said to be, and the tests beside them notice."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.mutants import MUTANTS
from tests.mutations import ROOT, Mutant, misplaced, survivors

WINDOWS = Mutant(
    "windows need a block less",
    "backend/quire/models/kv_groups.py",
    "total += min(whole, math.ceil(positions / block_size) + 1)",
    "total += min(whole, math.ceil(positions / block_size))",
    ("tests/unit/test_kv_groups.py::test_no_sequence_needs_more_blocks_than_stated",),
)


def test_every_planted_bug_has_its_place() -> None:
    """Whoever moves a line moves its mutant too."""
    assert len(MUTANTS) >= 50
    assert misplaced(MUTANTS) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"old": "total += 7"}, "holds its place 0 times"),
        ({"old": "window"}, "times"),
        ({"new": WINDOWS.old}, "holds its place"),
        ({"file": "backend/quire/kv_group.py"}, "holds its place 0 times"),
        ({"new": "total += ("}, "is no Python"),
        ({"tests": ("tests/unit/test_kv_groups.py::test_nothing",)}, "no such tests"),
        ({"tests": ()}, "no such tests"),
    ],
)
def test_a_mutant_that_means_nothing_is_told(change: dict[str, object], complaint: str) -> None:
    assert misplaced([WINDOWS]) == []
    (found,) = misplaced([dataclasses.replace(WINDOWS, **change)])
    assert WINDOWS.name in found and complaint in found
    assert len(misplaced([WINDOWS, WINDOWS])) == 2, "two of one name"


def test_what_is_noticed_and_what_survives() -> None:
    """In a copy: this checkout's file is as it was."""
    before = (ROOT / WINDOWS.file).read_bytes()
    harmless = dataclasses.replace(WINDOWS, name="harmless", new=f"{WINDOWS.old}  # as before")
    assert survivors([harmless, WINDOWS]) == [harmless]
    assert (ROOT / WINDOWS.file).read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planted_bugs_are_noticed() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.mutations"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
