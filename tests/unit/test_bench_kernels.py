"""The report on kernels: what it computes from times, and that its cases are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import growth, kernels
from benchmarks.kernels import Case


@pytest.mark.row("D27", clauses=("report",))
def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cases of every kind, ours and eager's results alike; rates add up."""
    monkeypatch.setattr(kernels, "CYCLE_BYTES", 13e6)
    limits = {"read_gb_s": {"1": 10.0, "2": 20.0}, "matrix_gflop_s": 500.0}
    monkeypatch.setattr(kernels.roofline, "measure", lambda: limits)
    monkeypatch.setattr(kernels, "output_directory", lambda: tmp_path)
    few = ("bf16, 1 rows", "w8a8, 16 rows", "16 x 1024", "8 x 512", "RMSNorm", "argmax")
    cases = [
        case
        for make in (kernels.linear_cases, kernels.attention_cases, kernels.elementwise_cases)
        for case in make()
        if any(name in case.name for name in few)
    ]
    assert len(cases) == len(few)
    for case in cases:
        ours, eager = case.run(), case.eager() if case.eager is not None else None
        ours = ours[0] if isinstance(ours, tuple) else ours
        assert eager is not None and ours.shape == eager.shape
        if ours.is_floating_point():
            error = float((ours.float() - eager.float()).norm() / eager.float().norm())
            assert error < (0.02 if "w8a8" in case.name else 0.01), (case.name, error)
        else:
            assert torch.equal(ours, eager)
    for name in ("linear_cases", "attention_cases"):
        monkeypatch.setattr(kernels, name, lambda: iter(()))
    monkeypatch.setattr(kernels, "elementwise_cases", lambda: iter(cases))
    result = CliRunner().invoke(
        kernels.main, ["--turns", "1", "--threads", str(torch.get_num_threads())], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rates = json.loads((tmp_path / "kernels.json").read_text("utf-8"))["rates"]
    assert [rate["name"] for rate in rates] == [case.name for case in cases]
    for rate, case in zip(rates, cases, strict=True):
        seconds = rate["us"] / 1e6
        assert rate["gb_s"] * 1e9 * seconds == pytest.approx(case.num_bytes)
        assert rate["gflop_s"] * 1e9 * seconds == pytest.approx(case.num_flops)
        least = max(case.num_bytes / 20e9, case.num_flops / 500e9)
        assert rate["share"] == pytest.approx(least / seconds)
        assert case.name in result.output


def test_a_case_without_counterpart_is_timed_alone() -> None:
    ours, eager = kernels.best_times(Case("x", lambda: None, None, 1.0, 0.0), 3)
    assert ours < 1.0 and eager is None


def test_points_of_growth() -> None:
    point = growth.Point(4, 128, 50.0, 40.0, {"layers": 30.0, "head": 15.0}, 1.0)
    assert point.tokens_per_s == pytest.approx(80.0)
    assert point.read_share(2**30 / 0.04 / 1e9) == pytest.approx(1.0)
    assert "| 4 | 128 | 50.0 | 40.0 | 80.0 | 1.00 | 100 % | 5.00 |" in growth.table(
        [point], 2**30 / 0.04 / 1e9
    )
