"""The engine's figures reach Triton's metrics once per model, and only when they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.outputs import SchedulerStats
from quire.triton.metrics import EngineMetrics
from tests.fixtures import fake_pb_utils
from tests.fixtures.fake_metrics import FakeMetricFamily

LABELS = {"model": "generator", "version": "1", "engine": "5eed"}
ARGS = {"model_name": "generator", "model_version": "1", "model_instance_name": "generator_0_0"}


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_pb_utils, "MetricFamily", FakeMetricFamily, raising=False)
    monkeypatch.setattr(FakeMetricFamily, "alive", {})


def stats(**values: int) -> dict[str, float]:
    """Of a pool of 100 blocks: 40 without content, 25 cached, 35 in use."""
    given: dict[str, Any] = {
        "step": 7,
        "num_running": 3,
        "num_waiting": 2,
        "num_waiting_tokens": 50,
        "num_blocks": 100,
        "num_free_blocks": 65,
        "num_preemptions": 1,
        "num_scheduled_tokens": 900,
        "num_cached_tokens": 64,
        "num_cached_blocks": 25,
        "num_pinned_blocks": 5,
        **values,
    }
    made = SchedulerStats(**given)
    return {name: float(getattr(made, name)) for name in made.__slots__}


def shown() -> dict[str, float]:
    return {
        f"{name}{{{metric.labels['state']}}}" if "state" in metric.labels else name: metric.value
        for name, family in FakeMetricFamily.alive.items()
        for metric in family.metrics
    }


def num_calls() -> int:
    return sum(metric.num_calls for family in FakeMetricFamily.alive.values() for metric in family.metrics)


def test_every_figure_has_its_metric_and_only_changes_are_sent() -> None:
    metrics = EngineMetrics(fake_pb_utils, LABELS)
    metrics.update(stats(), engine_pid=10)
    first = {
        "quire_requests_running": 3,
        "quire_requests_waiting": 2,
        "quire_kv_use_ratio": 0.35,
        "quire_kv_blocks{free}": 40,
        "quire_kv_blocks{cached}": 25,
        "quire_kv_blocks{in_use}": 35,
        "quire_kv_blocks{pinned}": 5,
        "quire_prefix_cached_tokens_total": 64,
        "quire_kv_loaded_tokens_total": 0,
        "quire_preemptions_total": 1,
        "quire_swaps_total": 0,
        "quire_scheduled_tokens_total": 900,
    }
    assert shown() == first
    for family in FakeMetricFamily.alive.values():
        assert all(metric.labels.items() >= LABELS.items() for metric in family.metrics)
    before = num_calls()
    metrics.update(stats(), engine_pid=10)
    assert num_calls() == before, "nothing has changed"
    metrics.update(stats(num_running=0, num_swaps=2, num_scheduled_tokens=950), engine_pid=10)
    assert num_calls() == before + 3
    changed = {"quire_requests_running": 0, "quire_swaps_total": 2, "quire_scheduled_tokens_total": 950}
    assert shown() == {**first, **changed}


def test_counters_never_fall_and_go_on_over_an_engines_death() -> None:
    metrics = EngineMetrics(fake_pb_utils, LABELS)

    def cached() -> float:
        return shown()["quire_prefix_cached_tokens_total"]

    metrics.update(stats(num_cached_tokens=64), engine_pid=10)
    metrics.update(stats(num_cached_tokens=48), engine_pid=10)  # a load has failed
    assert cached() == 64
    metrics.update(stats(num_cached_tokens=80), engine_pid=10)
    assert cached() == 80
    metrics.update(stats(num_cached_tokens=96), engine_pid=11)
    assert cached() == 80 + 96


def test_one_frontend_per_model_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "quire-0-123-5eed"
    directory.mkdir()

    def claim(**args: str) -> EngineMetrics | None:
        # Each frontend is a process of its own.
        monkeypatch.setattr(FakeMetricFamily, "alive", {})
        return EngineMetrics.claim(fake_pb_utils, {**ARGS, **args}, directory)

    first = claim()
    assert first is not None
    assert FakeMetricFamily.alive["quire_requests_running"].metrics[0].labels == LABELS
    assert claim(model_instance_name="generator_0_1") is None
    assert not FakeMetricFamily.alive
    assert claim(model_name="generator_unary") is not None
    first.close()
    assert claim(model_instance_name="generator_0_1") is not None, "the first has gone"


def test_a_server_without_metrics_serves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> Any:
        raise fake_pb_utils.TritonModelException("metrics are disabled")

    refuse.COUNTER = refuse.GAUGE = ""  # type: ignore[attr-defined]
    monkeypatch.setattr(fake_pb_utils, "MetricFamily", refuse, raising=False)
    assert EngineMetrics.claim(fake_pb_utils, ARGS, tmp_path) is None
