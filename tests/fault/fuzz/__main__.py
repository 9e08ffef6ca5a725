"""Sends chosen messages of a seed again: `python -m tests.fault.fuzz SEED INDEX [INDEX ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.fault.fuzz.fuzzer import Fuzzer, message
from tests.fault.fuzz.target import Target


def main() -> None:
    seed, *indices = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as root, Target(Path(root)) as target:
        fuzzer = Fuzzer(target, seed)
        for index in indices:
            print(f"--- {index}: {message(seed, index)[0]}\n{message(seed, index)[1]}")
            report = fuzzer.send([index])
            for finding in report.findings:
                print("FINDING", "; ".join(finding.problems))
            if report.has_died:
                print(f"A PROCESS DIED\n{target.server.log_text()}")
                return
            print(dict(report.ends))


if __name__ == "__main__":
    main()
