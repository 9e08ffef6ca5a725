"""The report on kernels and on growth: what they compute from times, and that their cases are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import device, features, growth, kernels
from benchmarks.kernels import Case
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.limits import Roofline
from quire_kernels import registry


@pytest.mark.row("D27", clauses=("report",))
def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases of every kind, each implementation near the reference; rates add up."""
    monkeypatch.setattr(device, "FLUSHED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(device, "_flushing", {})
    limits = {"read_gb_s": {"1": 10.0, "2": 20.0}, "matrix_gflop_s": 500.0}
    monkeypatch.setattr(kernels.roofline, "measure", lambda: limits)
    every = registry.implementations

    def without_interpreter(operator: str) -> list[registry.Implementation]:
        return [one for one in every(operator) if one.name != "triton"]  # it takes most of the time

    monkeypatch.setattr(registry, "implementations", without_interpreter)
    monkeypatch.setattr(kernels.report, "output_directory", lambda: tmp_path)
    options = ["--shape", "tiny", "--turns", "1", "--threads", str(torch.get_num_threads())]
    done = CliRunner().invoke(kernels.main, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    records = json.loads((tmp_path / "kernels.json").read_text("utf-8"))["records"]
    cases = {(one.name, one.detail): one for one in kernels.cases(torch.device("cpu"), SHAPES["tiny"])}
    assert {(one["case"], one["detail"]) for one in records} == cases.keys()
    assert {case.operator for case in cases.values()} == {
        *("paged_attention", "linear", "rms_norm", "gate_mul", "argmax", "sample", "add_lora")
    }
    for record in records:
        assert "failed" not in record, record
        case, seconds = cases[record["case"], record["detail"]], record["us"] / 1e6
        assert record["error"] < 0.02, record
        assert record["gb_s"] * 1e9 * seconds == pytest.approx(case.num_bytes)
        assert record["gflop_s"] * 1e9 * seconds == pytest.approx(case.flop)
        assert record["of_limit"] == pytest.approx(max(case.num_bytes / 20e9, case.flop / 500e9) / seconds)
        assert f"| {f'{case.name} {case.detail}'.strip()} | {record['implementation']} |" in done.output
    assert registry.choices() == {}, "no choice is left behind"


def test_the_share_and_eager_are_of_the_case() -> None:
    def record(implementation: str, detail: str, us: float) -> dict[str, object]:
        rates = {"us": us, "gb_s": 10.0, "gflop_s": 100.0}
        return {"case": "x", "implementation": implementation, "detail": detail, **rates}

    records = [record("reference", "", 8.0), record("ours", "", 4.0), record("reference", "int8", 9.0)]
    failed = {"case": "x", "implementation": "theirs", "detail": "", "failed": "no"}
    kernels.judge([*records, failed], Roofline(40.0, 200.0))
    assert [one["eager"] for one in records] == [1.0, 2.0, pytest.approx(8 / 9)]
    assert records[0]["of_limit"] == 0.5
    assert "| x | theirs | no |" in kernels.table(
        [record("y", "", 1.0) | {"of_limit": 1, "eager": None, "error": 0}, failed]
    )


def test_a_case_that_fails_says_how() -> None:
    case = Case("x", "argmax", lambda: lambda: torch.zeros(1) / torch.zeros(2, 3).sum(dim=5), 1.0)
    records = kernels.measure(torch.device("cpu"), [case], 1)
    assert records and all("IndexError" in one["failed"] and "us" not in one for one in records)


def test_points_of_growth() -> None:
    parts = {"plan": 1.0, "prepare": 2.0, "model": 45.0, "account": 2.0}
    point = growth.Point(4, 128, 50.0, 40.0, parts, 1.0, 1e9)
    assert point.tokens_per_s == pytest.approx(80.0)
    assert point.read_share(2**30 / 0.04 / 1e9) == pytest.approx(1.0)
    assert point.floor_ms(Roofline(2**30 / 0.04 / 1e9, 100.0)) == pytest.approx(40.0)
    assert point.floor_ms(Roofline(1e9, 10.0)) == pytest.approx(100.0)
    line = "| 4 | 128 | 50.0 | 40.0 | 80.0 | 1.00 | 100 % | 1.00 | 2.00 | 45.00 | 2.00 | 5.00 |"
    assert line in growth.table([point], 2**30 / 0.04 / 1e9)


def test_all_requests_of_a_point_decode_in_every_timed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that begin first once ended before the last prompt was computed: few were left to be timed."""
    monkeypatch.setattr(growth, "BUDGET", 256)
    steps, prompt = 3, 3 * growth.BUDGET
    with growth.engine(SHAPES["tiny"], device="cpu", **growth.room([(4, prompt)], steps)) as core:
        point = growth.measure(core, growth.Stopwatch(core), 4, prompt, steps)
        weights = SHAPES["tiny"].weight_bytes()
        kv = SHAPES["tiny"].kv_bytes_per_token * 4 * prompt
        assert point.read_gib * 2**30 == pytest.approx(weights + kv)
        shape = SHAPES["tiny"]
        attention = 4 * prompt * shape.num_layers * 4 * shape.num_heads * shape.head_dim
        assert point.flop == 2 * 4 * shape.params + attention
        assert all(value > 0 for value in point.parts_ms.values()), point
        assert not core.has_work


def test_every_feature_generates_all_its_tokens(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    features.write_vocabulary(tmp_path, shape.vocab_size)
    options = {"tokenizer": str(tmp_path), "num_blocks": 64, "max_model_len": 128, "device": "cpu"}
    with growth.engine(shape, **options) as core:
        runs = {
            name: [features.run(core, [[5, 6], [7]], 8, asked)] for name, asked in features.FEATURES.items()
        }
    assert all(each[0].tokens == 16 and each[0].cpu_s > 0 for each in runs.values())
    runs = {
        "plain": [features.Run(10, 1.0, 1.0), features.Run(10, 2.0, 3.0)],
        "x": [features.Run(10, 1.5, 2.0)],
    }
    assert "| x | 6.7 | 0.889 | 200000 | 0.500 |" in features.table(runs)
