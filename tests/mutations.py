"""Plants bugs and runs the tests that should notice them.

    python -m tests.mutations               all mutants of tests/mutants.py
    python -m tests.mutations TEXT ...      those whose name holds one of the texts
    python -m tests.mutations --check       only whether each one's place in the code is there, once

A mutant is a realistic mistake: one replacement in one file, and the tests that are its neighbours. They must
pass without it and fail with it. What survives is listed, and the share that is caught must be at least
`REQUIRED_SHARE`. The code is copied first, so the checkout is never changed.

A mutant that survives asks for a test. Where none is possible its `reason` says why.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = ("backend", "kernels", "ensemble", "common", "client")
NATIVE = (".h", ".cpp")
REQUIRED_SHARE = 0.95
JOBS = 2
"""Mutants at a time, each in a copy of its own."""
TEST_LIMIT_S = 120
"""Of one test; a mutant that makes it hang is caught."""
RUN_LIMIT_S = 300.0
"""Of one mutant's tests: for what a test's own limit does not end."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in `file`, `old` (which stands there once) becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: files or node ids."""
    reason: str = ""
    """Why it survives; only of one that is known to."""

    def planted(self, text: str) -> str:
        """The file's text with the bug in it."""
        return text.replace(self.old, self.new)


class Copy:
    """A copy of the checkout's files as git lists them, with a place of its own for what they import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._compiles = False
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)

    def run(self, tests: Sequence[str], limit_s: float | None = None) -> tuple[bool, str]:
        """Whether the tests pass, and which one failed or what pytest printed last.

        Raises:
            RuntimeError: pytest could not run them (no such test, none collected).
        """
        roots = [str(self.folder / root) for root in PACKAGE_ROOTS]
        # Before the packages that are installed for editing, whose finder comes last.
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        # A cached module is known by its size and second, which a bug need not change.
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        if self._compiles:
            # What comes of it must not stay in the user's cache; one instruction set takes a minute.
            env |= {"QUIRE_CACHE_DIR": str(self.folder / ".cache"), "QUIRE_CPU_ISA": "avx2"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "--hypothesis-seed=0"]
        command += [f"--timeout={TEST_LIMIT_S}", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return False, f"no end within {limit_s:g} s"
        lines = output.strip().splitlines()
        if process.returncode not in (0, 1, 2):  # 2: a module of the tests could not be imported
            end = "\n".join(lines[-20:])
            raise RuntimeError(f"pytest {' '.join(tests)}: status {process.returncode}\n{end}")
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return process.returncode == 0, (failed or lines or [""])[-1]

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The bug is in the copy meanwhile."""
        path = self.folder / mutant.file
        text = path.read_text("utf-8")
        path.write_text(mutant.planted(text), "utf-8")
        self._compiles = path.suffix in NATIVE
        try:
            yield
        finally:
            path.write_text(text, "utf-8")
            self._compiles = False


def misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with mutants: their place is missing or ambiguous, what they become is no Python, a test
    is not there, a name is taken."""
    found = []
    names = Counter(mutant.name for mutant in mutants)
    for mutant in mutants:
        path = ROOT / mutant.file
        text = path.read_text("utf-8") if path.is_file() else ""
        count = text.count(mutant.old)
        missing = [test for test in mutant.tests if not _is_there(test)]
        if count != 1 or mutant.old == mutant.new:
            found.append(f"{mutant.name}: {mutant.file} holds its place {count} times")
        elif path.suffix == ".py" and not _is_python(mutant.planted(text)):
            found.append(f"{mutant.name}: what {mutant.file} becomes is no Python")
        if missing or not mutant.tests:
            found.append(f"{mutant.name}: no such tests: {missing}")
        if names[mutant.name] > 1:
            found.append(f"{mutant.name}: several have this name")
    return found


def _is_there(test: str) -> bool:
    """Whether the file, and in it the function (and class) that a node id names."""
    file, *names = test.partition("[")[0].split("::")
    path = ROOT / file
    return path.is_file() and all(f" {name}" in path.read_text("utf-8") for name in names)


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def survivors(mutants: Sequence[Mutant]) -> list[Mutant]:
    """Plants every mutant, each alone; returns those that no test noticed.

    Raises:
        RuntimeError: tests fail without any mutant, so they can tell nothing.
    """
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(JOBS)]
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        passes, summary = copies[0].run(tests)
        if not passes:
            raise RuntimeError(f"the tests fail without a mutant: {summary}")
        print(f"{len(tests)} files or tests pass without a mutant: {summary}", flush=True)
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def is_noticed(mutant: Mutant) -> bool:
            copy = free.get()
            began = time.monotonic()
            with copy.planted(mutant):
                passes, summary = copy.run(mutant.tests, RUN_LIMIT_S)
            free.put(copy)
            verdict = "SURVIVES" if passes else "caught"
            print(f"{verdict:8} {time.monotonic() - began:5.1f} s  {mutant.name}: {summary}", flush=True)
            return not passes

        with ThreadPoolExecutor(JOBS) as pool:
            noticed = list(pool.map(is_noticed, mutants))
    return [mutant for mutant, is_one in zip(mutants, noticed, strict=True) if not is_one]


def main() -> int:
    from tests.mutants import MUTANTS

    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; none: all")
    parser.add_argument("--check", action="store_true", help="only look for the places")
    arguments = parser.parse_args()
    mutants = [m for m in MUTANTS if not arguments.names or any(name in m.name for name in arguments.names)]
    wrong = misplaced(mutants)
    if wrong or arguments.check:
        print(*wrong, f"{len(mutants)} mutants, {len(wrong)} complaints", sep="\n")
        return 1 if wrong else 0
    left = survivors(mutants)
    caught = len(mutants) - len(left)
    for mutant in left:
        print(f"survived: {mutant.name}: {mutant.reason or 'no reason is known'}")
    print(f"{caught} of {len(mutants)} caught")
    return 0 if caught >= REQUIRED_SHARE * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
