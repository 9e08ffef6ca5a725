"""`benchmarks.gpu.run_all` runs, on the CPU: a short time on a GPU is not to be spent on its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu import engine
from benchmarks.gpu.run_all import ENGINES, main
from quire_kernels import registry
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.graphs import recorded_steps


@pytest.mark.row("D27")
def test_it_measures_kernels_and_the_engine(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    names = ("machine", "kernels", *ENGINES, "engine drafts")
    options = [word for name in names for word in ("--only", name)]
    done = CliRunner().invoke(main, ["--device", "cpu", "--small", "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    sections = json.loads(out.read_text("utf-8"))["sections"]
    assert sections.keys() == {*names, "limits"}
    assert not any("failed" in record for record in sections["kernels"]), sections["kernels"]
    operators = {record["case"].split(",")[0].split()[0] for record in sections["kernels"]}
    assert {"attention", "linear", "RMSNorm", "SiLU-mul", "argmax", "sample"} <= operators
    for record in sections["kernels"]:
        assert record["error"] < 0.05 and record["us"] > 0, record
    for name in ENGINES:
        assert [point["running"] for point in sections[name]["decode"]] == [1, 4]
        assert sections[name]["mix"]["output_tokens_per_s"] > 0
    runs = sections["engine drafts"]["runs"]
    assert [run["proposed"] > 0 for run in runs] == [False, False, True, True]
    assert registry.choices() == {}, "no choice is left behind"


def test_a_section_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.gpu.run_all.kernels.measure", lambda *_: 1 / 0)
    out = tmp_path / "gpu.json"
    options = ["--only", "kernels", "--only", "machine"]
    done = CliRunner().invoke(main, ["--device", "cpu", "--small", "--out", str(out), *options])
    assert done.exit_code == 1
    sections = json.loads(out.read_text("utf-8"))["sections"]
    assert "ZeroDivisionError" in sections["kernels"]["failed"]
    assert "device" in sections["machine"]


@pytest.mark.parametrize("is_broken", [False, True], ids=["recorded", "broken"])
def test_replays_are_compared_with_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    prompts = [list(range(5, 5 + length)) for length in (40, 3, 70)]
    with recorded_steps() as backend:
        if is_broken:
            end = backend.end
            monkeypatch.setattr(backend, "end", lambda: (end(), lambda: None)[1])
        difference = engine.difference_of_replays(path, torch.device("cpu"), prompts)
    assert difference is not None and (difference > 0.01) == is_broken
    assert is_broken or difference == 0.0
    assert engine.difference_of_replays(path, torch.device("cpu"), prompts) is None
