"""The autotuner and what it keeps on disk, with a clock that needs no GPU."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_common import cache
from quire_kernels import ops
from quire_kernels.triton_lang import attention, operators, tuning
from quire_kernels.triton_lang.tuning import Config, Device, Tuner, kernel_key
from tests.kernels.test_paged_attention import dense, make_case

H200 = Device("NVIDIA H200", (9, 0))
SHAPE = {"width": 128, "groups": 4, "dtype": "bfloat16"}
DEFAULT = Config.build(4, 3, BLOCK=64)
CANDIDATES = [Config.build(4, 3, BLOCK=32), Config.build(8, 4, BLOCK=128), Config.build(8, 5, BLOCK=256)]


class Clock:
    """Runs a configuration and says that it took 1 / BLOCK seconds; 256 cannot run."""

    def __init__(self) -> None:
        self.ran: list[Config] = []

    def run(self, config: Config) -> None:
        self.ran.append(config)
        if config["BLOCK"] == 256:
            raise MemoryError("too much shared memory")

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return 1 / self.ran[-1]["BLOCK"]


@pytest.fixture(autouse=True)
def device_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are imported above: meanwhile, `interpreter.install` would not do its work for anybody."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)


def start(
    directory: Path,
    *,
    device: Device = H200,
    version: str = "3.6.0",
    source: str = "a",
    shape: dict[str, int | str] | None = None,
    warm: bool = True,
) -> tuple[Config, int]:
    """What a process that starts anew chooses, and how many configurations it times for that."""
    clock = Clock()
    tuner = Tuner(directory, device, version, clock, (MemoryError,))
    key = kernel_key("attention", source, shape or SHAPE)
    if not warm:
        return tuner.choose(key, DEFAULT, lambda: CANDIDATES, clock.run), tuner.num_timed
    with tuning.warm_up():
        chosen = tuner.choose(key, DEFAULT, lambda: CANDIDATES, clock.run)
    assert tuner.choose(key, DEFAULT, lambda: CANDIDATES, clock.run) is chosen
    assert len(clock.ran) == tuner.num_timed
    return chosen, tuner.num_timed


@pytest.mark.row("D9", clauses=("second",))
def test_a_second_start_times_nothing(tmp_path: Path) -> None:
    best = CANDIDATES[1]
    assert start(tmp_path) == (best, 4), "the default and three candidates, of which one cannot run"
    assert start(tmp_path) == (best, 0)
    assert start(tmp_path, warm=False) == (best, 0), "what is on disk is used without warm-up too"


@pytest.mark.row("D9", clauses=("key",))
def test_another_device_shape_source_or_compiler_is_timed_anew(tmp_path: Path) -> None:
    start(tmp_path)
    others = (
        {"device": Device("NVIDIA H100", (9, 0))},
        {"device": Device("NVIDIA H200", (10, 0))},
        {"shape": {**SHAPE, "rows": 32}},
        {"shape": {**SHAPE, "dtype": "float16"}},
        {"source": "b"},
        {"version": "3.7.0"},
    )
    for other in others:
        assert start(tmp_path, **other)[1] == 4, other  # type: ignore[arg-type]
    for other in others:
        assert start(tmp_path, **other)[1] == 0, other  # type: ignore[arg-type]
    assert start(tmp_path)[1] == 0, "the first one is still there"
    assert len(list(tmp_path.iterdir())) == len(others) + 1


PROGRAM = """
import sys
from pathlib import Path
from quire_kernels.triton_lang import tuning
from quire_kernels.triton_lang.tuning import Config, Device, Tuner, kernel_key

def run(config):
    pass

tuner = Tuner(Path(sys.argv[1]), Device("NVIDIA H200", (9, 0)), "3.6.0", lambda run: float(sys.argv[2]))
with tuning.warm_up():
    for i in range(int(sys.argv[3])):
        key = kernel_key("attention", "a", {"rows": i})
        tuner.choose(key, Config.build(4, 3, BLOCK=64), lambda: [Config.build(8, 3, BLOCK=128)], run)
assert "triton" not in sys.modules
print(tuner.num_timed)
"""


def begin_process(directory: Path, seconds: float, keys: int) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(directory), str(seconds), str(keys)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def timed_by(process: subprocess.Popen[str]) -> int:
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0 and not errors, errors
    return int(out)


@pytest.mark.row("D9")
def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two first starts over the same keys, then a third one that finds them all."""
    keys = 200
    processes = [begin_process(tmp_path, seconds, keys) for seconds in (1.0, 2.0)]
    assert all(0 <= timed_by(process) <= 2 * keys for process in processes)
    assert timed_by(begin_process(tmp_path, 3.0, keys)) == 0
    stored = [json.loads(cache.kept(path) or "") for path in tmp_path.iterdir()]
    assert len(stored) == keys and {entry["seconds"] for entry in stored} <= {1.0, 2.0}


@pytest.mark.row("D9")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:40],
        lambda data: b"[]",
        lambda data: b"\xff\xfe\x00",
        lambda data: data.replace(b"H200", b"H100"),
        lambda data: data.replace(b'"num_warps": 8', b'"num_warps": 4'),
    ],
)
def test_damaged_files_are_ignored_with_a_warning(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    best, _ = start(tmp_path)
    (path,) = tmp_path.iterdir()
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, logger="quire_kernels"):
        assert start(tmp_path) == (best, 4)
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    assert start(tmp_path) == (best, 0), "written again"


def test_a_directory_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="quire_kernels"):
        assert start(tmp_path / "file" / "tuning") == (CANDIDATES[1], 4)
    assert any("cannot be kept" in record.getMessage() for record in caplog.records)


def test_nothing_is_timed_outside_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(tmp_path, warm=False) == (DEFAULT, 0)
    clock = Clock()
    tuner = Tuner(tmp_path, H200, "3.6.0", clock, (MemoryError,))
    key = kernel_key("attention", "a", SHAPE)

    def choose() -> Config:
        return tuner.choose(key, DEFAULT, lambda: CANDIDATES, clock.run)

    with tuning.warm_up():
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert choose() is DEFAULT, "while a graph is captured"
        with monkeypatch.context() as patch:
            patch.setattr(operators, "is_interpreted", lambda: True)
            assert choose() is DEFAULT, "in the interpreter"
        assert not clock.ran and not list(tmp_path.iterdir())
        assert choose() == CANDIDATES[1], "an earlier default is not kept"
    assert not tuning.may_tune()


def test_where_nothing_runs_the_default_stays_and_is_not_kept(tmp_path: Path) -> None:
    clock = Clock()
    tuner = Tuner(tmp_path, H200, "3.6.0", clock, (MemoryError,))
    bad = Config.build(4, 3, BLOCK=256)
    with tuning.warm_up():
        assert tuner.choose(kernel_key("attention", "a", SHAPE), bad, lambda: [bad], clock.run) is bad
    assert not list(tmp_path.iterdir())


def test_the_directory_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert tuning.cache_directory() == tmp_path / "tuning"
    monkeypatch.delenv("QUIRE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert tuning.cache_directory() == tmp_path / "home" / "quire" / "tuning"


def test_a_source_is_known_by_its_text(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("x")
    second.write_text("x")
    assert tuning.source_hash(str(first)) == tuning.source_hash(str(second))
    second.write_text("y")
    tuning.source_hash.cache_clear()
    assert tuning.source_hash(str(first)) != tuning.source_hash(str(second))


@pytest.mark.row("D9")
def test_prompts_run_with_the_tiles_that_were_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed at warm-up by launches of the real kernel; a second start finds them, other heads are timed."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.fail("the kernels' conftest turns the interpreter on")
    launched: list[attention.Tiles] = []
    launch = attention._launch_ragged

    def noted(*arguments: Any) -> None:
        launched.append(arguments[-1])
        launch(*arguments)

    def clock(run: Callable[[], None]) -> float:
        run()
        return 1.0 / launched[-1].keys

    candidates = [attention.Tiles(64, 32, 4, 3), attention.Tiles(64, 128, 4, 3)]
    monkeypatch.setattr(attention, "_launch_ragged", noted)
    monkeypatch.setattr(attention, "_capability", lambda device: 0)
    monkeypatch.setattr(attention, "TUNED_TOKENS", 40)
    monkeypatch.setattr(attention, "ragged_candidates", lambda *_: candidates)
    for groups, is_warm, count in ((2, False, 0), (2, True, 3), (2, True, 0), (4, True, 3)):
        tuner = Tuner(tmp_path, H200, "3.6.0", clock)
        monkeypatch.setattr(tuning, "tuner_of", lambda device, tuner=tuner: tuner)
        case = make_case([(5, 70), (40, 40)], groups=groups, head_dim=16)
        with tuning.warm_up() if is_warm else contextlib.nullcontext():
            out = attention.paged_attention(case.query, case.kv_layer, case.meta, case.scale, None, None)
        torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=1e-5)
        assert tuner.num_timed == count, "the default, and both candidates"
        assert (launched[-1] == candidates[1]) == is_warm


def test_importing_the_tuner_does_not_import_triton() -> None:
    code = (
        "import sys, quire_kernels.triton_lang.tuning, quire_kernels.ops; assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)
    assert ops.argmax is not None
