"""What the start of an engine took, phase by phase."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.supervisor import EngineSupervisor
from quire.startup import StartTimeline, shown_phases
from quire_kernels.cpu.compiler import supported_isas
from tests.fixtures.checkpoints import make_checkpoint


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that `time.monotonic` tells, in its only element."""
    now = [100.0]
    monkeypatch.setattr("quire.startup.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="q") as path:
        yield Path(path)


def test_phases_follow_each_other_and_add_up(clock: list[float]) -> None:
    timeline = StartTimeline(age_s=1.5)
    clock[0] += 0.5
    timeline.end("imports")
    clock[0] += 3.0
    timeline.end("weights")
    timeline.split("weights", {"kernels": 1.25, "KV cache": 0.25})
    clock[0] += 1.0
    timeline.end("warm-up")
    assert list(timeline.phases.items()) == [
        ("imports", 2.0),
        ("weights", 1.5),
        ("kernels", 1.25),
        ("KV cache", 0.25),
        ("warm-up", 1.0),
    ]
    assert timeline.total_s == 6.0
    assert shown_phases({"weights": 1.5, "warm-up": 0.004}) == "weights 1.50 s, warm-up 0.00 s"


def test_a_timeline_begins_with_its_process() -> None:
    """The kernel counts in ticks of 10 ms from the boot; what came before is in the first phase."""
    code = (
        "import time; time.sleep(0.3)\n"
        "from quire.startup import StartTimeline\n"
        "timeline = StartTimeline.of_process(); timeline.end('imports'); print(timeline.total_s)"
    )
    begin = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.28 <= float(out) <= time.monotonic() - begin + 0.02


@pytest.mark.row("G13", clauses=("timeline",))
def test_an_engine_says_what_its_start_took(
    tmp_path: Path,
    short_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_RUNTIME_DIR", str(short_directory))
    monkeypatch.delenv("QUIRE_LOG_LEVEL", raising=False)
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint", tokenizer=False)
    config = EngineConfig.from_mapping({"model": str(checkpoint), "device": "cpu", "num_blocks": 128})
    supervisor = EngineSupervisor(config, os.getpid())
    begin = time.monotonic()
    try:
        supervisor.ensure()
        took = time.monotonic() - begin
    finally:
        supervisor.close(5.0)
    found = re.search(r"engine ready in ([\d.]+) s \(([^)]*)\)", capfd.readouterr().err)
    assert found is not None
    phases = {name: float(s) for name, s in re.findall(r"([\w -]+?) ([\d.]+) s", found[2].replace(", ", ","))}
    assert list(phases) == ["imports", "weights", "kernels", "KV cache", "warm-up"]
    assert abs(sum(phases.values()) - float(found[1])) <= 0.04
    assert 0 < phases["imports"] < float(found[1]) <= took + 0.02


@pytest.mark.skipif(not supported_isas(), reason="no C++ kernels for this machine")
def test_the_time_of_kernels_is_told_apart_from_that_of_weights(tmp_path: Path) -> None:
    """Libraries are loaded, or compiled, while weights are packed: seen in a process that has none."""
    checkpoint = make_checkpoint("llama", tmp_path / "checkpoint", tokenizer=False)
    code = (
        "import sys, time\n"
        "from quire_kernels.cpu import native\n"
        "load = native.load\n"
        "native.load = lambda isa: (time.sleep(0.5), load(isa))[1]\n"
        "from quire.config import EngineConfig\n"
        "from quire.worker.model_runner import ModelRunner\n"
        "values = {'model': sys.argv[1], 'device': 'cpu', 'num_blocks': 128}\n"
        "start = ModelRunner(EngineConfig.from_mapping(values)).info.start_s\n"
        "print(start['kernels'], sum(start.values()))"
    )
    command = [sys.executable, "-c", code, str(checkpoint)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels, total = map(float, out.split())
    assert 0.5 <= kernels <= total
